"""Corrections for off-policy tokens: a factor per token, on the policy loss.

w = proximal / behavior is the importance weight: per token (level token), the product over the
sequence (sequence) or the geometric mean over the sequence (geometric). A correction returns a
factor, and weights * w is the corrected importance weight. The factor has no gradient and is 1
on-policy and outside the mask.

    algorithm.anchor=behavior   the loss's ratio is policy / behavior and contains w: loss * weights
    algorithm.anchor=proximal   the ratio is policy / proximal: loss * weights * exp(log_ratio).
                                Decoupled PPO, AReaL (arXiv:2505.24298), eq. 5

At the levels sequence and geometric, `truncate` and `band` are therefore exact with
anchor=proximal; with anchor=behavior each token keeps its own ratio times weights.

`combined` combines a list, in any order, to one correction: factors multiply. With anchor=proximal
the importance weight is the w of the correction in the list that bounds it. Each declares a role:

    bounds      bounds w, which is the importance weight; at most one in a list
    rejects     keeps or drops tokens by w: a factor of 1 or 0. If no correction in the list bounds
                w, the importance weight is w at this level (masked importance sampling)
    filters     does not use w; if a list has only filters, anchor=proximal omits w
"""

import math
from collections.abc import Callable, Sequence
from functools import reduce
from typing import Annotated, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from pydantic import Field

from jaxrl_async.algorithms.aggregate import any_in_sequence, mean_over_sequence, sum_over_sequence
from jaxrl_async.algorithms.losses import (
    MAX_LOG_RATIO,
    TokenInputs,
    bounded_difference,
    mismatch,
    token_loss,
)
from jaxrl_async.algorithms.registry import (
    Above0,
    AtLeast0,
    AtLeast1,
    Registry,
    Share,
    defaults_of,
)
from jaxrl_async.config.schema import AlgorithmSection, Choice, Choices, each_of, name_of
from jaxrl_async.errors import ConfigError

Level = Literal["token", "sequence", "geometric"]


class Correction(NamedTuple):
    """The output of a correction."""

    weights: Array  # [rows, length] float32 >= 0, no gradient; at most 1, except for `band`
    truncated: Array  # [rows, length] bool, tokens whose weight is not 1
    log_ratio: Array  # [rows, length] float32, log w at the correction's level; 0 outside the mask


CorrectionFn = Callable[..., Correction]  # (TokenInputs, **settings) -> Correction


class CorrectionFacts(NamedTuple):
    """The facts that a correction declares."""

    role: Literal["bounds", "rejects", "filters"] = "rejects"  # see above
    level: Level | None = "token"  # of w, without an argument `level`; None: unknown
    may_grow: bool = False  # its factor may exceed 1


correction: Registry[CorrectionFn, CorrectionFacts] = Registry(
    "correction", "algorithm.correction", CorrectionFacts, assumed=CorrectionFacts(level=None)
)


def weighs(choices: Choices | None) -> bool:
    """Return whether any of the chosen corrections carries an importance weight."""
    return any(correction.facts(c).role != "filters" for c in _listed(choices or "none"))


def default_correction(loss: Choice, anchor: str) -> Choice:
    """Return the correction that a loss declares as its default. Raise ConfigError if it has no
    such anchor."""
    defaults = token_loss.facts(loss).correction
    chosen = defaults.proximal if anchor == "proximal" else defaults.behavior
    if chosen is None:
        raise ConfigError(
            f"algorithm.loss={name_of(loss)} supports only the policy that sampled the tokens as "
            "its anchor. Set algorithm.anchor=behavior, or another loss."
        )
    return chosen


def correction_of(algorithm: AlgorithmSection) -> Choices:
    """Return the configured corrections, or the loss's default."""
    if algorithm.correction is not None:
        return algorithm.correction
    return default_correction(algorithm.loss, algorithm.anchor)


def combined(choices: Choices, anchor: str = "behavior") -> CorrectionFn:
    """Combine the chosen corrections: weights multiply, a token is truncated if any truncates it.

    log_ratio is from the correction that bounds w, else from one that rejects (all of one level),
    else 0. Raise ConfigError on an unknown name, on two corrections that bound w, and, with the
    proximal anchor, on a list with an ambiguous w.
    """
    listed = _listed(choices)
    parts = [correction.resolve(choice) for choice in listed]
    if len(parts) == 1:
        return parts[0]
    weighing = _index_of_weight(listed, anchor)

    def apply(x: TokenInputs) -> Correction:
        done = [part(x) for part in parts]
        return Correction(
            reduce(jnp.multiply, (c.weights for c in done)),
            reduce(jnp.logical_or, (c.truncated for c in done)),
            done[weighing].log_ratio,
        )

    return apply


def _listed(choices: Choices) -> list[Choice]:
    """Return the choices as a list. Raise ConfigError if it is empty."""
    listed = each_of(choices)
    if not listed:
        raise ConfigError("algorithm.correction: the list is empty: write none.")
    return listed


def _index_of_weight(listed: Sequence[Choice], anchor: str) -> int:
    """Return the index of the correction whose log_ratio is used."""
    names = [name_of(choice) for choice in listed]
    roles = [correction.facts(choice).role for choice in listed]
    bounds = [i for i, role in enumerate(roles) if role == "bounds"]
    if len(bounds) > 1:
        raise ConfigError(
            f"algorithm.correction: {' and '.join(names[i] for i in bounds)} each bound the one "
            "importance weight. Keep one of them, and combine it with reject or mask."
        )
    others = [i for i, role in enumerate(roles) if role == "rejects"]
    levels = sorted({level_of(listed[i]) for i in others})
    if not bounds and len(levels) > 1 and anchor == "proximal":
        raise ConfigError(
            "algorithm.correction: with algorithm.anchor=proximal the loss needs one importance "
            f"weight, but {', '.join(names[i] for i in others)} use several levels "
            f"({', '.join(levels)}). Add the intended one, such as {{truncate: {{cap: 5.0}}}}."
        )
    return next(iter([*bounds, *others, 0]))


def level_of(choice: Choice) -> str:
    """Return the level of a correction's importance weight; the correction's name if unknown."""
    name, facts = name_of(choice), correction.facts(choice)
    if facts.level is None:
        return name
    arguments = {} if isinstance(choice, str) else choice[name] or {}
    return str((defaults_of(correction[name]) | arguments).get("level", facts.level))


# --- corrections by action and level --------------------------------------------------------------


@correction(role="filters")
def none(x: TokenInputs) -> Correction:
    """1 everywhere, and no importance weight."""
    return _filter(x, jnp.ones(x.mask.shape, jnp.float32))


@correction(role="bounds")
def truncate(x: TokenInputs, *, cap: AtLeast1 = 2.0, level: Level = "token") -> Correction:
    """min(w, cap) / w: the corrected weight is min(w, cap). cap >= 1.

    Ionides 2008; Espeholt et al. 2018 (IMPALA, arXiv:1802.01561), eq. 1 with rho-bar = cap; for
    language models Yao et al. 2025, "Your efficient RL framework secretly brings you off-policy
    RL training".
    """
    logs = level_log_ratio(x, level)
    excess = logs - math.log(cap)  # logs: exact also where w is huge
    return _correct(x, jnp.exp(-jnp.maximum(excess, 0.0)), excess > 0, logs)


@correction(role="rejects")
def mask(
    x: TokenInputs, *, low: Share = 0.0, cap: AtLeast1 = 2.0, level: Level = "token"
) -> Correction:
    """1 where low <= w <= cap, else 0. low <= 1 <= cap.

    Masked importance sampling: Liu et al. 2025, "When speed kills stability: demystifying RL
    collapse from the training-inference mismatch".
    """
    logs = level_log_ratio(x, level)
    outside = _outside(logs, low, cap)
    return _correct(x, jnp.where(outside, 0.0, 1.0), outside, logs)


@correction(role="bounds", may_grow=True)
def band(
    x: TokenInputs, *, low: Share = 0.5, high: AtLeast1 = 2.0, level: Level = "token"
) -> Correction:
    """clip(w, low, high) / w: the corrected weight is clip(w, low, high). low <= 1 <= high.

    The one correction whose factor may exceed 1: where w < low.
    """
    logs = level_log_ratio(x, level)
    clipped = jnp.clip(logs, _log(low), _log(high))
    return _correct(x, jnp.exp(clipped - logs), _outside(logs, low, high), logs)


@correction(role="rejects")
def reject(
    x: TokenInputs, *, low: Share = 0.5, high: AtLeast1 = 2.0, level: Level = "geometric"
) -> Correction:
    """0 for all tokens of a sequence that violates low <= w <= high, else 1. low <= 1 <= high.

    At level token, any of its tokens may violate it; else, the sequence's w. Rejection of
    sequences by their geometric mean: Liu et al. 2025 (see mask).
    """
    logs = level_log_ratio(x, level)
    broken = any_in_sequence(_outside(logs, low, high), x.mask, x.segment_ids)
    return _correct(x, jnp.where(broken, 0.0, 1.0), broken, logs)


# --- named settings -------------------------------------------------------------------------------


@correction(role="bounds")
def truncate_token(x: TokenInputs, *, cap: AtLeast1 = 2.0) -> Correction:
    """min(1, cap / w): `truncate` at level token.

    With anchor=behavior a gradient r A d log policy becomes min(r, cap) A d log policy. With
    ppo_clip it matters where A < 0, since there r is not clipped from above.
    """
    return truncate(x, cap=cap)


@correction(role="bounds")
def tis(x: TokenInputs, *, cap: AtLeast1 = 2.0) -> Correction:
    """Truncated importance sampling: `truncate` at level token."""
    return truncate(x, cap=cap)


@correction(role="rejects")
def mis(x: TokenInputs, *, cap: AtLeast1 = 2.0) -> Correction:
    """Masked importance sampling: `mask` at level token, with an upper bound only."""
    return mask(x, cap=cap)


@correction(role="bounds", level="sequence")
def seq_tis(x: TokenInputs, *, cap: AtLeast1 = 2.0) -> Correction:
    """Truncated importance sampling of whole sequences: `truncate` at level sequence."""
    return truncate(x, cap=cap, level="sequence")


@correction(role="rejects", level="sequence")
def seq_mis(x: TokenInputs, *, cap: AtLeast1 = 2.0) -> Correction:
    """Masked importance sampling of whole sequences: `mask` at level sequence."""
    return mask(x, cap=cap, level="sequence")


@correction(role="rejects", level="geometric")
def geo_mis(x: TokenInputs, *, low: Share = 0.99, cap: AtLeast1 = 1.01) -> Correction:
    """0 for sequences of any length outside a narrow band: `mask` at level geometric."""
    return mask(x, low=low, cap=cap, level="geometric")


@correction(role="rejects")
def icepop(x: TokenInputs, *, low: Share = 0.5, cap: AtLeast1 = 5.0) -> Correction:
    """1 where low <= w <= cap, else 0: `mask` at level token, with both bounds.

    IcePop, Ling Team 2025 (Ring-1T, arXiv:2510.18855), with alpha = low and beta = cap. With
    anchor=proximal it is the paper's.
    """
    return mask(x, low=low, cap=cap)


# --- filters --------------------------------------------------------------------------------------


@correction(role="filters")
def opsm(x: TokenInputs, *, delta: AtLeast0 = 0.1) -> Correction:
    """0 where A < 0 and the mean over the sequence of log(behavior / policy) exceeds delta, nats.

    Off-policy sequence masking: a bad answer that has become unlikely under the policy is not
    trained on. DeepSeek-V3.2 (arXiv:2512.02556), eq. 9.
    """
    gap = bounded_difference(x, x.behavior_logprobs, jax.lax.stop_gradient(x.policy_logprobs))
    far = mean_over_sequence(gap, x.mask, x.segment_ids) > delta
    return _filter(x, jnp.where(far & (x.advantages < 0), 0.0, 1.0))


@correction(role="filters")
def age_limit(x: TokenInputs, *, max_age: Annotated[int, Field(ge=0)] = 4) -> Correction:
    """0 for tokens sampled more than max_age versions ago, else 1: by each token's own version."""
    return _filter(x, jnp.where(_ages(x) > max_age, 0.0, 1.0))


@correction(role="filters")
def age_decay(x: TokenInputs, *, half_life: Above0 = 4.0) -> Correction:
    """0.5^(age / half_life): a token counts half as much for each half_life versions of age."""
    return _filter(x, jnp.exp2(-_ages(x) / half_life))


# --- helpers --------------------------------------------------------------------------------------


def level_log_ratio(x: TokenInputs, level: Level) -> Array:
    """Return log w of the token or sequence, or its mean over it; within MAX_LOG_RATIO."""
    logs = mismatch(x)
    if level == "sequence":
        total = sum_over_sequence(logs, x.mask, x.segment_ids)
        logs = jnp.clip(total, -MAX_LOG_RATIO, MAX_LOG_RATIO)
    elif level == "geometric":
        logs = mean_over_sequence(logs, x.mask, x.segment_ids)
    return jnp.where(x.mask, logs, 0.0)


def _correct(x: TokenInputs, weights: Array, acts: Array, logs: Array) -> Correction:
    """Return a correction that is neutral outside the mask."""
    return Correction(jnp.where(x.mask, weights, 1.0), x.mask & acts, logs)


def _filter(x: TokenInputs, weights: Array) -> Correction:
    """Return a correction without an importance weight."""
    return _correct(x, weights, weights != 1, jnp.zeros(x.mask.shape, jnp.float32))


def _outside(logs: Array, low: float, high: float) -> Array:
    return (logs < _log(low)) | (logs > _log(high))


def _ages(x: TokenInputs) -> Array:
    """Return the tokens' ages in versions, at least 0; 0 outside the mask."""
    ages = jnp.zeros(x.mask.shape, jnp.int32) if x.ages is None else x.ages
    return jnp.where(x.mask, jnp.maximum(ages, 0), 0).astype(jnp.float32)


def _log(value: float) -> float:
    return math.log(value) if value else -math.inf
