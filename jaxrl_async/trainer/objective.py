"""The objective of one micro-batch: the chosen functions put together, and what to report of them.

Everything adds up over micro-batches: `aggregate` made the weights of the loss's sum beforehand,
and each reported mean travels as (total, count) until `summarize` divides on the host.
"""

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from jaxrl_async.config import schema
from jaxrl_async.trainer.aggregate import mean_of
from jaxrl_async.trainer.corrections import CorrectionFn, combined
from jaxrl_async.trainer.kl import KLFn, k3_of, kl
from jaxrl_async.trainer.losses import (
    TokenInputs,
    TokenLoss,
    TokenLossFn,
    cross_entropy,
    log_ratio,
    token_loss,
)
from jaxrl_async.trainer.offpolicy import derived_measures, off_policy_measures


class Recipe(NamedTuple):
    """The chosen functions, settings bound: token loss * correction + c_kl * kl - c_h * entropy."""

    loss: TokenLossFn
    correction: CorrectionFn
    kl: KLFn
    kl_coefficient: float
    entropy_coefficient: float
    anchor: str = "behavior"  # what the loss's ratio is against: behavior or proximal


class Totals(NamedTuple):
    """What a micro-batch adds to the report; scalars by the names of metrics.metric.METRICS."""

    sums: dict[str, Array]
    means: dict[str, tuple[Array, Array]]  # total, count
    maxima: dict[str, Array]  # -inf where nothing was looked at
    minima: dict[str, Array]  # inf where nothing was looked at


def make_recipe(algorithm: schema.Algorithm) -> Recipe:
    """The functions that the configuration names. ConfigError with the nearest known name."""
    return Recipe(
        loss=token_loss.resolve(algorithm.loss),
        correction=combined(algorithm.correction),
        kl=kl.resolve(algorithm.kl),
        kl_coefficient=algorithm.kl_coefficient,
        entropy_coefficient=algorithm.entropy_coefficient,
        anchor=algorithm.anchor,
    )


def policy_objective(
    recipe: Recipe, x: TokenInputs, weights: Array, version: Array
) -> tuple[Array, Totals]:
    """This micro-batch's share of the step's loss, and of the report.

    weights: [rows, length] float32 from `aggregate`; version: int32, of the weights that learn.
    Where the sampler told no log-prob (NaN), the learning weights' own stands in: ratio 1.
    """
    told = ~jnp.isnan(x.behavior_logprobs)
    own = jax.lax.stop_gradient(x.policy_logprobs)
    x = x._replace(behavior_logprobs=jnp.where(told, x.behavior_logprobs, own))
    token, truncated, factor = _corrected_loss(recipe, x)
    policy_loss = _weighted(x, weights, factor * token.loss)
    loss = policy_loss
    if x.reference_logprobs is not None and recipe.kl_coefficient:
        loss += recipe.kl_coefficient * _weighted(x, weights, recipe.kl(x))
    if recipe.entropy_coefficient:
        loss -= recipe.entropy_coefficient * _weighted(x, weights, x.entropy)
    ratio, held = jnp.exp(log_ratio(x)), recipe.anchor == "behavior"
    means = {
        "policy/clip_share": _mean(x.mask, token.clipped),
        "policy/truncated_share": _mean(x.mask, truncated),
        "policy/weight_mean": _mean(x.mask, factor * ratio if held else factor),
    }
    if x.reference_logprobs is not None:
        means["policy/kl_reference"] = _mean(x.mask, recipe.kl(x))
    sums = {"train/loss": loss, "train/policy_loss": policy_loss, "train/tokens": jnp.sum(x.mask)}
    minima = {"policy/ratio_min": _smallest(x.mask, ratio)}
    means |= _distances(x, told, version) | off_policy_measures(x, version)
    report = Totals(sums, means, _largest_distances(x, told, version), minima)
    return loss, jax.lax.stop_gradient(report)


def _corrected_loss(recipe: Recipe, x: TokenInputs) -> tuple[TokenLoss, Array, Array]:
    """The token loss against the recipe's anchor, what is truncated, and the factor on the loss.

    anchor behavior: the loss's ratio holds the importance weight, the factor bounds it. proximal:
    the ratio starts where the importance weight ends, and the factor is the corrected weight
    (decoupled PPO, arXiv:2505.24298, eq. 5).
    """
    corrected = recipe.correction(x)
    if recipe.anchor == "behavior":
        return recipe.loss(x), corrected.truncated, corrected.weights
    own = jax.lax.stop_gradient(x.policy_logprobs)
    proximal = own if x.proximal_logprobs is None else x.proximal_logprobs
    token = recipe.loss(x._replace(anchor_logprobs=proximal))
    return token, corrected.truncated, corrected.weights * jnp.exp(corrected.log_ratio)


def supervised_objective(x: TokenInputs, weights: Array) -> tuple[Array, Totals]:
    """The same for maximum likelihood of given tokens."""
    loss = _weighted(x, weights, cross_entropy(x).loss)
    sums = {"train/loss": loss, "train/tokens": jnp.sum(x.mask)}
    report = Totals(sums, {"policy/entropy": _mean(x.mask, x.entropy)}, {}, {})
    return loss, jax.lax.stop_gradient(report)


def summarize(totals: Sequence[Totals]) -> dict[str, float]:
    """One report from all micro-batches' totals, which lie on the host already.

    A mean or extreme that no token went into (no token of the current version, say) is left out
    rather than made up.
    """
    first = totals[0]
    stats = {k: float(sum(float(t.sums[k]) for t in totals)) for k in first.sums}
    for key in first.means:
        total, count = (sum(float(t.means[key][i]) for t in totals) for i in (0, 1))
        if count:
            stats[key] = mean_of(total, count)
    stats |= {k: max(float(t.maxima[k]) for t in totals) for k in first.maxima}
    stats |= {k: min(float(t.minima[k]) for t in totals) for k in first.minima}
    stats |= derived_measures(stats)
    return {k: v for k, v in stats.items() if abs(v) != float("inf") or k in first.sums}


def _distances(x: TokenInputs, told: Array, version: Array) -> dict[str, tuple[Array, Array]]:
    """How far the policy is from what drew the tokens."""
    difference = log_ratio(x)
    mismatch = jnp.abs(difference)
    return {
        "policy/entropy": _mean(x.mask, x.entropy),
        "policy/ratio_mean": _mean(x.mask, jnp.exp(difference)),
        "policy/k1_behavior": _mean(x.mask, -difference),
        "policy/k3_behavior": _mean(x.mask, k3_of(-difference)),
        "policy/recomputed_logprob_share": _mean(x.mask, ~told),
        "mismatch/mean": _mean(_fresh(x, version) & told, mismatch),
        "mismatch/all_mean": _mean(x.mask & told, mismatch),
    }


def _largest_distances(x: TokenInputs, told: Array, version: Array) -> dict[str, Array]:
    difference = log_ratio(x)
    mismatch = jnp.abs(difference)
    return {
        "policy/ratio_max": _largest(x.mask, jnp.exp(difference)),
        "mismatch/max": _largest(_fresh(x, version) & told, mismatch),
        "mismatch/all_max": _largest(x.mask & told, mismatch),
    }


def _fresh(x: TokenInputs, version: Array) -> Array:
    """Tokens drawn by exactly the weights that learn: any mismatch is numerics, not staleness."""
    return x.mask & (x.versions == version)


def _weighted(x: TokenInputs, weights: Array, values: Array) -> Array:
    return jnp.sum(jnp.where(x.mask, weights * values, 0.0))


def _mean(mask: Array, values: Array) -> tuple[Array, Array]:
    return jnp.sum(jnp.where(mask, values, 0.0)), jnp.sum(mask)


def _largest(mask: Array, values: Array) -> Array:
    return jnp.max(jnp.where(mask, values, -jnp.inf))


def _smallest(mask: Array, values: Array) -> Array:
    return jnp.min(jnp.where(mask, values, jnp.inf))
