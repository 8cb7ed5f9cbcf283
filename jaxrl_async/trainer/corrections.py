"""Corrections for tokens that other weights drew: a factor per token, on the policy loss.

w = proximal / behavior is the importance weight of a token (level token), the product of its
sequence's (sequence) or their geometric mean (geometric). A correction says which multiple of w
counts: weights * w is the corrected importance weight. It has no gradient, is 1 on-policy, and
outside the mask.

    algorithm.anchor=behavior   the loss's ratio is policy / behavior and holds w: loss * weights
    algorithm.anchor=proximal   it is policy / proximal: loss * weights * exp(log_ratio).
                                Decoupled PPO, AReaL (arXiv:2505.24298), eq. 5

At the levels sequence and geometric, `truncate` and `band` therefore mean what they say with
anchor=proximal; with behavior each token keeps its own ratio times weights.

A list of corrections: `combined`. Filters (none, opsm and the limits by age) carry no importance
weight of their own: log_ratio is 0, so with anchor=proximal and nothing else w is left out.
"""

import math
from collections.abc import Callable
from functools import reduce
from typing import Literal, NamedTuple, get_args

import jax
import jax.numpy as jnp
from jax import Array

from jaxrl_async.config.schema import Choices, name_of
from jaxrl_async.errors import ConfigError
from jaxrl_async.trainer.losses import (
    MAX_LOG_RATIO,
    TokenInputs,
    bounded_difference,
    mismatch,
)
from jaxrl_async.trainer.registry import Registry
from jaxrl_async.trainer.segments import sequence_any, sequence_mean, sequence_sum

Level = Literal["token", "sequence", "geometric"]


class Correction(NamedTuple):
    """What a correction gives."""

    weights: Array  # [rows, length] float32 >= 0, no gradient; at most 1, but for `band`
    truncated: Array  # [rows, length] bool, tokens whose weight is not 1
    log_ratio: Array  # [rows, length] float32, log w at the correction's level; 0 outside the mask


CorrectionFn = Callable[..., Correction]  # (TokenInputs, **settings) -> Correction

correction: Registry[CorrectionFn] = Registry("correction")

FILTERS = ("none", "opsm", "age_limit", "age_decay")
"""Corrections that carry no importance weight of their own."""


def weighs(choices: Choices) -> bool:
    """Whether any of the chosen corrections carries an importance weight."""
    listed = choices if isinstance(choices, list) else [choices]
    return any(name_of(choice) not in FILTERS for choice in listed)


def combined(choices: Choices) -> CorrectionFn:
    """The chosen corrections as one: weights multiply, a token is truncated where any says so.

    log_ratio is that of the last one that is not a filter. ConfigError with the nearest name.
    """
    listed = choices if isinstance(choices, list) else [choices]
    if not listed:
        raise ConfigError("a list of corrections needs at least one: write none.")
    parts = [(name_of(choice) in FILTERS, correction.resolve(choice)) for choice in listed]

    def apply(x: TokenInputs) -> Correction:
        done = [(is_filter, part(x)) for is_filter, part in parts]
        weighing = [c for is_filter, c in done if not is_filter] or [c for _, c in done]
        return Correction(
            reduce(jnp.multiply, (c.weights for _, c in done)),
            reduce(jnp.logical_or, (c.truncated for _, c in done)),
            weighing[-1].log_ratio,
        )

    return apply if len(parts) > 1 else parts[0][1]


# --- the menu: what to do, at which level ---------------------------------------------------------


@correction
def none(x: TokenInputs) -> Correction:
    """1 everywhere, and no importance weight either."""
    return _filter(x, jnp.ones(x.mask.shape, jnp.float32))


@correction
def truncate(x: TokenInputs, *, cap: float = 2.0, level: Level = "token") -> Correction:
    """min(w, cap) / w: the corrected weight is min(w, cap). cap >= 1.

    Ionides 2008; Espeholt et al. 2018 (IMPALA, arXiv:1802.01561), eq. 1 with rho-bar = cap; for
    language models Yao et al. 2025, "Your efficient RL framework secretly brings you off-policy
    RL training".
    """
    _check_band("truncate", 0.0, cap)
    logs = level_log_ratio(x, level)
    excess = logs - math.log(cap)  # logs: exact also where w is huge
    return _correct(x, jnp.exp(-jnp.maximum(excess, 0.0)), excess > 0, logs)


@correction
def mask(
    x: TokenInputs, *, low: float = 0.0, cap: float = 2.0, level: Level = "token"
) -> Correction:
    """1 where low <= w <= cap, else 0. low <= 1 <= cap.

    Masked importance sampling: Liu et al. 2025, "When speed kills stability: demystifying RL
    collapse from the training-inference mismatch".
    """
    _check_band("mask", low, cap)
    logs = level_log_ratio(x, level)
    outside = _outside(logs, low, cap)
    return _correct(x, jnp.where(outside, 0.0, 1.0), outside, logs)


@correction
def band(
    x: TokenInputs, *, low: float = 0.5, high: float = 2.0, level: Level = "token"
) -> Correction:
    """clip(w, low, high) / w: the corrected weight is clip(w, low, high). low <= 1 <= high.

    The one correction whose factor may exceed 1: where w < low.
    """
    _check_band("band", low, high)
    logs = level_log_ratio(x, level)
    clipped = jnp.clip(logs, _log(low), _log(high))
    return _correct(x, jnp.exp(clipped - logs), _outside(logs, low, high), logs)


@correction
def reject(
    x: TokenInputs, *, low: float = 0.5, high: float = 2.0, level: Level = "geometric"
) -> Correction:
    """0 for all tokens of a sequence with low <= w <= high broken, else 1. low <= 1 <= high.

    level token: broken by any of its tokens; else by the sequence's own w. Rejection of sequences
    by their geometric mean: Liu et al. 2025 (see mask).
    """
    _check_band("reject", low, high)
    logs = level_log_ratio(x, level)
    broken = sequence_any(_outside(logs, low, high), x.mask, x.segment_ids)
    return _correct(x, jnp.where(broken, 0.0, 1.0), broken, logs)


# --- named settings of it -------------------------------------------------------------------------


@correction
def truncate_token(x: TokenInputs, *, cap: float = 2.0) -> Correction:
    """min(1, cap / w): `truncate` at level token.

    With anchor=behavior a gradient r A d log policy becomes min(r, cap) A d log policy. With
    ppo_clip it matters where A < 0, since there r is not clipped from above.
    """
    _check_band("truncate_token", 0.0, cap)
    return truncate(x, cap=cap)


@correction
def tis(x: TokenInputs, *, cap: float = 2.0) -> Correction:
    """Truncated importance sampling: `truncate` at level token."""
    return truncate(x, cap=cap)


@correction
def mis(x: TokenInputs, *, cap: float = 2.0) -> Correction:
    """Masked importance sampling: `mask` at level token, from above."""
    return mask(x, cap=cap)


@correction
def seq_tis(x: TokenInputs, *, cap: float = 2.0) -> Correction:
    """Truncated importance sampling of whole sequences: `truncate` at level sequence."""
    return truncate(x, cap=cap, level="sequence")


@correction
def seq_mis(x: TokenInputs, *, cap: float = 2.0) -> Correction:
    """Masked importance sampling of whole sequences: `mask` at level sequence."""
    return mask(x, cap=cap, level="sequence")


@correction
def geo_mis(x: TokenInputs, *, low: float = 0.99, cap: float = 1.01) -> Correction:
    """Sequences whose geometric mean of w leaves a narrow band are out, whatever their length."""
    return mask(x, low=low, cap=cap, level="geometric")


@correction
def icepop(x: TokenInputs, *, low: float = 0.5, cap: float = 5.0) -> Correction:
    """Tokens are masked on both sides: 1 where low <= w <= cap, else 0.

    IcePop, Ling Team 2025 (Ring-1T, arXiv:2510.18855), with alpha = low and beta = cap; as there,
    with anchor=proximal.
    """
    return mask(x, low=low, cap=cap)


# --- filters --------------------------------------------------------------------------------------


@correction
def opsm(x: TokenInputs, *, delta: float = 0.1) -> Correction:
    """0 where A < 0 and the mean over the sequence of log(behavior / policy) exceeds delta, nats.

    Off-policy sequence masking: a bad answer that the policy would hardly give any more teaches
    nothing. DeepSeek-V3.2 (arXiv:2512.02556), eq. 9.
    """
    away = bounded_difference(x, x.behavior_logprobs, jax.lax.stop_gradient(x.policy_logprobs))
    far = sequence_mean(away, x.mask, x.segment_ids) > delta
    return _filter(x, jnp.where(far & (x.advantages < 0), 0.0, 1.0))


@correction
def age_limit(x: TokenInputs, *, max_age: int = 4) -> Correction:
    """0 for tokens drawn more than max_age versions ago, else 1: each token by its own version."""
    return _filter(x, jnp.where(_ages(x) > max_age, 0.0, 1.0))


@correction
def age_decay(x: TokenInputs, *, half_life: float = 4.0) -> Correction:
    """0.5^(age / half_life): a token counts half as much for each half_life versions of age."""
    if not half_life > 0:
        raise ConfigError(f"correction 'age_decay': half_life must be above 0, not {half_life}.")
    return _filter(x, jnp.exp2(-_ages(x) / half_life))


# --- parts ----------------------------------------------------------------------------------------


def level_log_ratio(x: TokenInputs, level: Level) -> Array:
    """log w of the token, of its sequence, or the mean over it; within MAX_LOG_RATIO."""
    if level not in get_args(Level):
        raise ConfigError(
            f"a correction's level is one of {', '.join(get_args(Level))}, not {level!r}."
        )
    logs = mismatch(x)
    if level == "sequence":
        total = sequence_sum(logs, x.mask, x.segment_ids)
        logs = jnp.clip(total, -MAX_LOG_RATIO, MAX_LOG_RATIO)
    elif level == "geometric":
        logs = sequence_mean(logs, x.mask, x.segment_ids)
    return jnp.where(x.mask, logs, 0.0)


def _correct(x: TokenInputs, weights: Array, acts: Array, logs: Array) -> Correction:
    return Correction(jnp.where(x.mask, weights, 1.0), x.mask & acts, logs)


def _filter(x: TokenInputs, weights: Array) -> Correction:
    return _correct(x, weights, weights != 1, jnp.zeros(x.mask.shape, jnp.float32))


def _outside(logs: Array, low: float, high: float) -> Array:
    return (logs < _log(low)) | (logs > _log(high))


def _ages(x: TokenInputs) -> Array:
    """Versions, at least 0; 0 outside the mask."""
    ages = jnp.zeros(x.mask.shape, jnp.int32) if x.ages is None else x.ages
    return jnp.where(x.mask, jnp.maximum(ages, 0), 0).astype(jnp.float32)


def _check_band(name: str, low: float, high: float) -> None:
    """What a band leaves alone must hold 1, or on-policy tokens would be corrected."""
    if not high >= 1:
        bound = "high" if name in ("band", "reject") else "cap"
        raise ConfigError(f"correction {name!r}: {bound} must be at least 1, not {high}.")
    if not 0 <= low <= 1:
        raise ConfigError(f"correction {name!r}: low must be from 0 to 1, not {low}.")


def _log(value: float) -> float:
    return math.log(value) if value else -math.inf
