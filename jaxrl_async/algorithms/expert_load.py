"""Load balance of a mixture of experts: counts, a loss, a correction, metrics.

L layers with experts, E experts per layer, k experts per token.
"""

import math
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import Array


class ExpertLoad(NamedTuple):
    """Sums over tokens other than padding; they add up over micro-batches."""

    chosen: Any  # [L, E] int32, tokens routed to each expert
    odds: Any  # [L, E] float32, the router's probabilities; the only part with a gradient
    tokens: Any  # [] int32


def load_balance_loss(odds: Any, chosen: Any, tokens: Any, *, each_layer: bool = False) -> Any:
    """Return E sum_e f_e P_e: Fedus et al. 2021 (Switch Transformer, arXiv:2101.03961), eq. 4-6.

    f_e: share of the tokens routed to e, P_e: mean probability of e, both over all layers as in
    transformers' load_balancing_loss_func. The loss is k if either is uniform. It is linear in
    `odds`: with the counts of a whole update, the losses of its micro-batches add up to the
    update's loss. Accepts JAX or NumPy arrays.

    Args:
        odds: [L, E], sums of a micro-batch.
        chosen: [L, E], counts of the whole update.
        tokens: number of tokens of the whole update.
        each_layer: return the mean of the layers' losses.
    """
    count = tokens + (tokens == 0)
    shares, means = chosen / count, odds / count
    if not each_layer:
        shares, means = (a.mean(axis=0, keepdims=True) for a in (shares, means))
    return odds.shape[1] * (shares * means).sum() / len(shares)


def correction_step(chosen: Array) -> Array:
    """Return sign(mean load - load) of each layer's experts, [L, E] float32: Wang et al. 2024
    (arXiv:2408.15664), alg. 1."""
    load = chosen.astype(jnp.float32)
    return jnp.sign(load.mean(axis=1, keepdims=True) - load)


def load_measures(load: ExpertLoad, *, each_layer: bool = False) -> dict[str, float]:
    """Return the metrics of an update's load, on the host; empty without tokens."""
    chosen = np.asarray(load.chosen, np.float64)
    experts = chosen.shape[1]
    if not chosen.any():
        return {}
    shares = chosen / chosen.sum(axis=1, keepdims=True)
    busiest = shares.max(axis=1) * experts
    logs = np.log(shares, where=shares > 0, out=np.zeros_like(shares))
    entropy = -(shares * logs).sum(axis=1) / math.log(experts) if experts > 1 else np.ones(1)
    odds, tokens = (np.asarray(a, np.float64) for a in (load.odds, load.tokens))
    loss = load_balance_loss(odds, chosen, tokens, each_layer=each_layer)
    return {
        "experts/load_max": float(busiest.mean()),
        "experts/load_worst": float(busiest.max()),
        "experts/load_entropy": float(entropy.mean()),
        "experts/idle_share": float((chosen == 0).mean()),
        "experts/balance_loss": float(loss),
    }


def summed_load(loads: list[ExpertLoad]) -> ExpertLoad:
    """Add up the loads of micro-batches, on the host."""
    return ExpertLoad(
        *(sum(np.asarray(a, np.float64) for a in part) for part in zip(*loads, strict=True))
    )
