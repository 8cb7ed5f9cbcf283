"""Shaping of rewards, masks and groups between the scorer and the advantage. NumPy only.

    step_data(groups) ──> shape(data, [soft_overlong, mask_truncated, ...]) ──> advantage, pack

A shaping is a pure function Shaped -> Shaped, registered by name and applied in the order of the
configuration. It may change rewards, mask tokens, or drop episodes. It counts how often it does so
and never modifies its input groups. A masked episode still counts in its group's baseline unless
`compare_unmasked` excludes it; a dropped episode does not count.

`has_signal` selects the groups that are worth training on.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated, NamedTuple

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from jaxrl_async.algorithms.advantages import Doubles, StepData, returns_of, step_data
from jaxrl_async.algorithms.forks import with_references
from jaxrl_async.algorithms.peers import by_peers, classes_of, picked, split_group
from jaxrl_async.algorithms.registry import Above0, AtLeast0, Finite, Registry, Whole, rule
from jaxrl_async.config import function_facts
from jaxrl_async.config.schema import Choice, arguments_of
from jaxrl_async.errors import DataError
from jaxrl_async.types import LARGEST_REWARD, BoolArray, EpisodeGroup, StopReason


@dataclass(frozen=True, slots=True, kw_only=True)
class Shaped:
    """One step between the scorers and the advantage."""

    data: StepData
    masks: tuple[tuple[BoolArray, ...], ...]  # per episode [length]: tokens to train on
    counts: Mapping[str, float] = field(default_factory=dict)  # by name as in METRICS


ShapingFn = Callable[..., Shaped]  # (Shaped, **settings) -> Shaped


class ShapingFacts(NamedTuple):
    """The facts that a shaping declares."""

    group_size: str | None = None  # name of its argument for the episodes kept per group
    masks: bool = False  # whether it may mask whole episodes


shaping: Registry[ShapingFn, ShapingFacts] = Registry("shaping", "algorithm.shaping", ShapingFacts)


def kept_group_size(choices: Sequence[Choice], group_size: int) -> int:
    """Return the maximum number of episodes that these shapings keep of `group_size`."""
    named = [(shaping.facts(choice).group_size, arguments_of(choice)) for choice in choices]
    return min([group_size, *(arguments[name] for name, arguments in named if name is not None)])


def shape(data: StepData, functions: Sequence[ShapingFn] = ()) -> Shaped:
    """Apply all functions in order. Without functions, all generated tokens are trained on.

    Comparisons within a group are made among peers only (Episode.peers).
    """
    parts = by_peers(data) if functions else data
    masks = tuple(tuple(e.drawn for e in g.episodes) for g in parts.groups)
    shaped = Shaped(data=parts, masks=masks)
    for function in functions:
        shaped = function(shaped)
    return shaped if parts is data else _rejoined(shaped, data.groups)


def bounded(function: ShapingFn, choice: Choice) -> ShapingFn:
    """Wrap a shaping to raise DataError, with its name, if a reward is NaN or its absolute value
    exceeds LARGEST_REWARD, above which the square is not finite."""

    def shaping_within_bounds(shaped: Shaped) -> Shaped:
        done: Shaped = function(shaped)
        of_groups = done.data.token_rewards or ()
        tokens = [values for group in of_groups for values in group if values is not None]
        for values in map(np.asarray, (*done.data.rewards, *tokens)):
            wrong = ~(np.abs(values) <= LARGEST_REWARD)  # NaN is wrong, too
            if wrong.any():
                raise DataError(
                    f"algorithm.shaping = {choice!r} made a reward of {values[wrong][0]:g}. "
                    f"Rewards must be finite and at most {LARGEST_REWARD:g}: correct the "
                    "function or its arguments."
                )
        return done

    return shaping_within_bounds


def _rejoined(shaped: Shaped, groups: Sequence[EpisodeGroup]) -> Shaped:
    """Join the groups of a step that were split by peers (Episode.peers). The episodes are in their
    original order; if some were dropped, in the order of the parts."""
    data, begin = shaped.data, 0
    whole: list[EpisodeGroup] = []
    chosen: list[list[tuple[int, int]]] = []  # per group: (part, index in the part)
    masks: list[tuple[BoolArray, ...]] = []
    for group in groups:
        classes = classes_of(group)
        parts = range(begin, begin + len(classes))
        begin += len(classes)
        members = [(p, i) for p in parts for i in range(len(data.groups[p].episodes))]
        indices = [index for of_word in classes for index in of_word]
        if len(indices) == len(members):
            members = [member for _, member in sorted(zip(indices, members, strict=True))]
        chosen.append(members)
        masks.append(tuple(shaped.masks[p][i] for p, i in members))
        whole.append(
            replace(
                group,
                episodes=tuple(data.groups[p].episodes[i] for p, i in members),
                scores=tuple(data.groups[p].scores[i] for p, i in members),
            )
        )
    tokens = data.token_rewards
    joined = StepData(
        groups=tuple(whole),
        rewards=tuple(np.array([data.rewards[p][i] for p, i in members]) for members in chosen),
        token_rewards=tokens
        and tuple(tuple(tokens[p][i] for p, i in members) for members in chosen),
    )
    return replace(shaped, data=joined, masks=tuple(masks))


# ---- rewards


def soft_overlong_penalty(length: int, max_tokens: int, cache_tokens: int) -> float:
    """Return 0 up to max - cache, then (max - cache - length) / cache, and -1 above max.

    Yu et al. 2025 (DAPO, arXiv:2503.14476), sec. 3.4, eq. 13.
    """
    if length <= max_tokens - cache_tokens:
        return 0.0
    if length <= max_tokens:
        return (max_tokens - cache_tokens - length) / cache_tokens
    return -1.0


@shaping
@rule(
    "cache_tokens must be at most max_tokens",
    lambda max_tokens, cache_tokens: cache_tokens <= max_tokens,
)
def soft_overlong(
    shaped: Shaped, *, max_tokens: Whole, cache_tokens: Whole, weight: Above0 = 1.0
) -> Shaped:
    """Add weight * soft_overlong_penalty(generated tokens) to each reward. DAPO, eq. 13."""
    penalties = [
        np.array([soft_overlong_penalty(e.num_drawn, max_tokens, cache_tokens) for e in g.episodes])
        for g in shaped.data.groups
    ]
    rewards = [r + weight * p for r, p in zip(shaped.data.rewards, penalties, strict=True)]
    return _rewarded(shaped, rewards, "shaping/overlong_penalized", penalties)


@shaping
def missing_eos(shaped: Shaped, *, penalty: Above0 = 1.0) -> Shaped:
    """Subtract `penalty` from the reward of answers truncated by a length limit, and keep them.

    Huang et al. 2024 (arXiv:2403.17031), where the penalty replaces the score. Here it is
    subtracted, as in TRL.
    """
    cut = [
        np.array([e.stop is StopReason.LENGTH for e in g.episodes], bool)
        for g in shaped.data.groups
    ]
    rewards = [r - penalty * c for r, c in zip(shaped.data.rewards, cut, strict=True)]
    return _rewarded(shaped, rewards, "shaping/missing_eos", cut)


@shaping
@rule("low must be below high", lambda low, high: low < high)
def cap(shaped: Shaped, *, low: Finite, high: Finite) -> Shaped:
    """Clip rewards to [low, high], so one outlier cannot dominate a group's baseline."""
    rewards = [np.clip(r, low, high) for r in shaped.data.rewards]
    changed = [a != b for a, b in zip(rewards, shaped.data.rewards, strict=True)]
    return _rewarded(shaped, rewards, "shaping/capped", changed)


@shaping
def concise(shaped: Shaped, *, alpha: AtLeast0 = 0.05, threshold: Finite = 0.5) -> Shaped:
    """Reward exp(-alpha z) if correct, else -1; z is the length, standardised over correct answers.

    Zhang & Zuo 2025 (GRPO-LEAD, arXiv:2504.09696), length-dependent accuracy reward. An answer is
    correct if its reward is above `threshold`.
    """
    pairs = list(zip(shaped.data.groups, shaped.data.rewards, strict=True))
    rewards = [_concise(_lengths(g), r > threshold, alpha) for g, r in pairs]
    changed = [a != r for a, (_, r) in zip(rewards, pairs, strict=True)]
    return _rewarded(shaped, rewards, "shaping/rescored", changed)


def _concise(lengths: Doubles, right: NDArray[np.bool_], alpha: float) -> Doubles:
    if not right.any():
        return np.full(len(right), -1.0)
    of_right = lengths[right]
    z = (lengths - of_right.mean()) / (of_right.std() + 1e-6)
    return np.where(right, np.exp(-alpha * np.where(right, z, 0.0)), -1.0)


@shaping
def length_reward(shaped: Shaped, *, weight: Above0 = 1.0, threshold: Finite = 0.5) -> Shaped:
    """Add weight * x, x = 0.5 - (length - min) / (max - min) if correct, else min(0, x).

    Team Kimi 2025 (Kimi k1.5, arXiv:2501.12599), sec. 2.3.3. Minimum and maximum are over the
    group; x = 0 if they are equal. An answer is correct if its reward is above `threshold`.
    """
    pairs = list(zip(shaped.data.groups, shaped.data.rewards, strict=True))
    extra = [_by_length(_lengths(g), r > threshold) for g, r in pairs]
    rewards = [r + weight * x for (_, r), x in zip(pairs, extra, strict=True)]
    return _rewarded(shaped, rewards, "shaping/rescored", extra)


def _by_length(lengths: Doubles, right: NDArray[np.bool_]) -> Doubles:
    shortest, longest = lengths.min(initial=np.inf), lengths.max(initial=0.0)
    if not longest > shortest:
        return np.zeros(len(lengths))
    x = 0.5 - (lengths - shortest) / (longest - shortest)
    return np.where(right, x, np.minimum(x, 0.0))


# ---- masks


@shaping(masks=True)
def mask_truncated(shaped: Shaped) -> Shaped:
    """Mask episodes truncated by a length limit: their reward does not judge a complete answer.

    DAPO (arXiv:2503.14476), sec. 3.4, overlong filtering.
    """
    cut = [[e.stop is StopReason.LENGTH for e in g.episodes] for g in shaped.data.groups]
    return _masked(shaped, cut, "shaping/masked_truncated")


@shaping(masks=True)
def overlong_filter(shaped: Shaped, *, max_tokens: Whole) -> Shaped:
    """Mask episodes of more than `max_tokens` generated tokens, for any stop reason.

    DAPO's overlong filtering (arXiv:2503.14476, sec. 3.4) with a limit below the sampler's.
    """
    cut = [[e.num_drawn > max_tokens for e in g.episodes] for g in shaped.data.groups]
    return _masked(shaped, cut, "shaping/masked_overlong")


def compare_unmasked(shaped: Shaped) -> Shaped:
    """Exclude masked episodes from their groups' baselines (algorithm.baseline)."""
    compared = tuple(
        np.array([m.any() or not e.drawn.any() for e, m in zip(g.episodes, masks, strict=True)])
        for g, masks in zip(shaped.data.groups, shaped.masks, strict=True)
    )
    return replace(shaped, data=replace(shaped.data, compared=compared))


shaping.check_known(function_facts.MASKS_EPISODES, lambda facts: facts.masks)

# ---- episodes


@shaping(group_size="keep")
@rule(
    "keep must be below algorithm.group_size, or nothing is dropped",
    lambda keep, group_size: keep < group_size,
)
def downsample(
    shaped: Shaped,
    *,
    keep: Annotated[int, Field(ge=2)],
    penalty: str = "penalty",
    threshold: Finite = 0.5,
    seed: Annotated[int, Field(ge=0)] = 0,
) -> Shaped:
    """Keep `keep` random episodes of each group and drop the others: resample on correct.

    Correct and wrong answers keep their shares, with at least one of each. Wrong answers are
    sampled uniformly, to keep all kinds of failure. Correct answers are sampled with weights
    1 / penalty, which prefers clean solutions. The penalty is the score's part of that name (tool
    errors, format; 0 if missing). Shang et al. 2025 (GRPO-RoC in rStar2-Agent, arXiv:2508.20722).
    The random choice is keyed by seed, prompt and group, not by order.
    """
    chosen = [
        _resampled(g, r > threshold, keep, penalty, seed)
        for g, r in zip(shaped.data.groups, shaped.data.rewards, strict=True)
    ]
    left = sum(len(g.episodes) - len(c) for g, c in zip(shaped.data.groups, chosen, strict=True))
    return counted(with_episodes(shaped, chosen), "shaping/left_out", left)


def _resampled(
    group: EpisodeGroup, right: NDArray[np.bool_], keep: int, penalty: str, seed: int
) -> list[int]:
    """Return the indices of the episodes to keep, ascending."""
    size = len(right)
    if size <= keep:
        return list(range(size))
    rng = np.random.default_rng([seed, group.prompt.prompt_id, group.ticket.group])
    num_right = round(keep * np.count_nonzero(right) / size)
    if 0 < np.count_nonzero(right) < size:
        num_right = min(max(num_right, 1), keep - 1)
    penalties = np.array([s.parts.get(penalty, 0.0) for s in group.scores])
    weights = np.where(right, 1 / (np.maximum(penalties, 0.0) + 1e-3), 1.0)
    keys = rng.exponential(size=size) / weights  # smallest: weighted, without replacement
    order = np.argsort(keys, kind="stable")
    taken = [*order[right[order]][:num_right], *order[~right[order]][: keep - num_right]]
    return sorted(int(i) for i in taken)


def with_episodes(shaped: Shaped, chosen: Sequence[Sequence[int]]) -> Shaped:
    """Return the step with only the chosen episodes of each group."""
    small = picked(shaped.data, list(enumerate(chosen)))
    masks = tuple(tuple(m[i] for i in of) for m, of in zip(shaped.masks, chosen, strict=True))
    return replace(shaped, data=small, masks=masks)


# ---- shared parts


def _rewarded(
    shaped: Shaped, rewards: Sequence[Doubles], name: str, changed: Sequence[NDArray[np.generic]]
) -> Shaped:
    data = replace(shaped.data, rewards=tuple(rewards))
    count = sum(int(np.count_nonzero(c)) for c in changed)
    return counted(replace(shaped, data=data), name, count)


def _masked(shaped: Shaped, cut: Sequence[Sequence[bool]], name: str) -> Shaped:
    masks = tuple(
        tuple(np.zeros_like(m) if out else m for m, out in zip(*of_group, strict=True))
        for of_group in zip(shaped.masks, cut, strict=True)
    )
    return counted(replace(shaped, masks=masks), name, sum(map(sum, cut)))


def counted(shaped: Shaped, name: str, count: int) -> Shaped:
    """Return the step with `count` added to a counter, named as in METRICS."""
    return replace(shaped, counts={**shaped.counts, name: shaped.counts.get(name, 0.0) + count})


def _lengths(group: EpisodeGroup) -> Doubles:
    return np.array([e.num_drawn for e in group.episodes], np.float64)


# ---- selection of groups


def has_signal(group: EpisodeGroup, *, part: str | None = None, least_std: float = 0.0) -> bool:
    """Return whether the standard deviation of the returns is above `least_std` in the group, or in
    any of its sets of peers (Episode.peers).

    Rounding does not make equal returns differ. Yu et al. 2025 (DAPO, arXiv:2503.14476), sec. 3.2,
    dynamic sampling: prompts with accuracy 0 or 1 have no gradient.

    Args:
        group: scored episodes.
        part: the part of the reward to compare, 0 in a score without it. None: the whole return.
        least_std: in units of the reward.
    """
    return any(
        bool(not np.all(values == values[0]) and values.std() > least_std)
        for one in split_group(with_references(group))
        if len(values := _judged(one, part))
    )


def _judged(group: EpisodeGroup, part: str | None) -> Doubles:
    """Return the values that are compared for the group's signal, [episodes]."""
    if part is None:
        return returns_of(step_data([group]))[0]
    return np.array([s.parts.get(part, 0.0) for s in group.scores], np.float64)


# ---- the age limit of process rewards


def within_age(
    groups: Sequence[EpisodeGroup], version: int, max_age: int | None
) -> tuple[tuple[EpisodeGroup, ...], dict[str, float]]:
    """Drop the process rewards of groups that are too old; also return counts for the metrics.

    A group keeps or loses the process rewards of all its answers, since they are compared.

    Args:
        groups: the groups to train on.
        version: version of the weights being trained.
        max_age: maximum age of a group's oldest token, versions. None: no limit.
    """
    judged = [any(s.process_rewards is not None for s in group.scores) for group in groups]
    if max_age is None or not any(judged):
        return tuple(groups), {}
    old = [
        has and version - group.oldest_version > max_age
        for group, has in zip(groups, judged, strict=True)
    ]
    kept = tuple(
        _without(group) if is_old else group for group, is_old in zip(groups, old, strict=True)
    )
    return kept, {"process/too_old": float(sum(old))}


def _without(group: EpisodeGroup) -> EpisodeGroup:
    scores = tuple(replace(score, process_rewards=None) for score in group.scores)
    return replace(group, scores=scores)
