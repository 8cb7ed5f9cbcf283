"""Mixture of experts: which experts a token goes through, and how much each of them counts."""

import jax
import jax.numpy as jnp
from jax import Array


def route(logits: Array, k: int, forced_ids: Array | None = None) -> tuple[Array, Array]:
    """The k experts of each token and their weights: ids [..., k] int32, weights [..., k] float32.

    logits [..., experts]; weights g_i = exp(l_i) / sum_{j chosen} exp(l_j), which carry the
    gradient. forced_ids [..., k] int32 replace the choice of the k largest logits, not the weights;
    a token with a -1 among its ids chooses for itself. Numerics that differ a little between
    sampler and trainer turn the choice where logits are close, and the token's log-prob with it:
    forced_ids are the sampler's choice, replayed (R3, "Stabilizing MoE Reinforcement Learning by
    Aligning Training and Inference Routers", arXiv:2510.11370, sec. 3).
    """
    logits = logits.astype(jnp.float32)
    ids = jax.lax.top_k(jax.lax.stop_gradient(logits), k)[1].astype(jnp.int32)
    if forced_ids is not None:
        known = jnp.all(forced_ids >= 0, axis=-1, keepdims=True)
        ids = jnp.where(known, forced_ids, ids)
    chosen = jnp.take_along_axis(logits, ids, axis=-1)
    return ids, jax.nn.softmax(chosen, axis=-1)
