"""Off-policy measures: how far the data is from the weights being trained.

They are measured with every algorithm. w = proximal / behavior, per token or multiplied over the
token's sequence. Totals and counts add up over micro-batches (`off_policy_measures`); measures that
are not means are derived from the means on the host.
"""

from collections.abc import Mapping

import jax.numpy as jnp
from jax import Array

from jaxrl_async.algorithms.kl import k3_of
from jaxrl_async.algorithms.losses import MAX_LOG_RATIO, TokenInputs, mismatch
from jaxrl_async.algorithms.segments import first_tokens, mean_over_sequence, sum_over_sequence

OF_SEQUENCES = (
    "offpolicy/geometric_ratio_mean",
    "offpolicy/sequence_weight_mean",
    "offpolicy/sequence_weight_square_mean",
)
"""The measures that are means over sequences; all others are means over tokens."""


def off_policy_measures(x: TokenInputs, version: Array) -> dict[str, tuple[Array, Array]]:
    """Return (total, count) of each mean, over trained tokens or over sequences that have any.

    version: int32, of the weights being trained. k3 estimates KL(behavior || proximal). At lag 0
    both are the same weights, so k3 measures only numerical differences.
    """
    logs = mismatch(x)
    fresh = x.mask & (x.versions == version)
    heads = first_tokens(x.mask, x.segment_ids)
    geometric = mean_over_sequence(logs, x.mask, x.segment_ids)
    whole = jnp.clip(sum_over_sequence(logs, x.mask, x.segment_ids), -MAX_LOG_RATIO, MAX_LOG_RATIO)
    return {
        "offpolicy/weight_mean": _mean(x.mask, jnp.exp(logs)),
        "offpolicy/weight_square_mean": _mean(x.mask, jnp.exp(2 * logs)),
        "offpolicy/k3": _mean(x.mask, k3_of(-logs)),
        "offpolicy/k3_lag0": _mean(fresh, k3_of(-logs)),
        "offpolicy/geometric_ratio_mean": _mean(heads, jnp.exp(geometric)),
        "offpolicy/sequence_weight_mean": _mean(heads, jnp.exp(whole)),
        "offpolicy/sequence_weight_square_mean": _mean(heads, jnp.exp(2 * whole)),
    }


def divergence_by_lag(x: TokenInputs, num_lags: int) -> dict[str, tuple[Array, Array]]:
    """Return (total, count) of k3 of KL(behavior || proximal) over the tokens of each lag."""
    if not num_lags:
        return {}
    assert x.ages is not None
    values = k3_of(-mismatch(x))
    return {f"staleness/lag_{n}_kl": _mean(x.mask & (x.ages == n), values) for n in range(num_lags)}


def derived_measures(stats: Mapping[str, float]) -> dict[str, float]:
    """Derive effective sample sizes and chi-square from the means that `stats` has.

    Effective sample size as a share, (sum w)^2 / (n sum w^2): Kish 1965; Owen 2013, "Monte Carlo
    theory", eq. 9.13. Chi-square divergence of proximal from behaviour: mean w^2 - 1.
    """
    derived = {}
    for level in ("", "sequence_"):
        mean = stats.get(f"offpolicy/{level}weight_mean")
        square = stats.get(f"offpolicy/{level}weight_square_mean")
        if mean is not None and square:
            derived[f"offpolicy/{level}ess_share"] = mean**2 / square
    if (square := stats.get("offpolicy/weight_square_mean")) is not None:
        derived["offpolicy/chi_square"] = square - 1
    return derived


def _mean(mask: Array, values: Array) -> tuple[Array, Array]:
    return jnp.sum(jnp.where(mask, values, 0.0)), jnp.sum(mask)
