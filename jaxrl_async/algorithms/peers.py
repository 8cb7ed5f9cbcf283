"""Who is compared with whom: a group's episodes of one word (Episode.peers) and no others.

    groups  (a a b b b)  (a b)  ──by_peers──>  (a a)  (b b b)  (a)  (b)  ──estimator──┐
    advantages of (a a b b b)  (a b)  <──────────────────────────────of_groups────────┘

Estimators see each word's episodes as a group of its own. Pure host code.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import TypeVar

from jaxrl_async.algorithms.advantages import AdvantageFn, PerToken, StepAdvantages, StepData
from jaxrl_async.algorithms.forks import data_with_references, without_references
from jaxrl_async.types import EpisodeGroup

T = TypeVar("T")
Classes = list[list[int]]
"""For each word of a group, in the order of its first episode, the indices of its episodes."""


def classes_of(group: EpisodeGroup) -> Classes:
    """Return who is compared with whom in a group."""
    by_word: dict[str, list[int]] = {}
    for index, episode in enumerate(group.episodes):
        by_word.setdefault(episode.peers, []).append(index)
    return list(by_word.values())


def split_group(group: EpisodeGroup) -> list[EpisodeGroup]:
    """Return a group for each of its words."""
    classes = classes_of(group)
    return [group] if len(classes) < 2 else [_part_of(group, indices) for indices in classes]


def by_peers(data: StepData) -> StepData:
    """Return the step with a group for each word of each group."""
    classes = [classes_of(group) for group in data.groups]
    if all(len(of) == 1 for of in classes):
        return data
    return replace(
        data,
        groups=tuple(part for group in data.groups for part in split_group(group)),
        rewards=tuple(
            r[indices] for r, of in zip(data.rewards, classes, strict=True) for indices in of
        ),
        token_rewards=data.token_rewards and _parted(data.token_rewards, classes),
        values=data.values and _parted(data.values, classes),
        last_values=data.last_values
        and tuple(
            v[indices] for v, of in zip(data.last_values, classes, strict=True) for indices in of
        ),
    )


def of_groups(learnt: StepAdvantages, groups: Sequence[EpisodeGroup]) -> StepAdvantages:
    """Return what was estimated of the parts of these groups, in the groups' own order."""
    classes = [classes_of(group) for group in groups]
    if len(learnt.advantages) == len(classes):
        return learnt
    returns = None if learnt.returns is None else _together(learnt.returns, classes)
    return StepAdvantages(advantages=_together(learnt.advantages, classes), returns=returns)


def compared_with_peers(data: StepData, advantage: AdvantageFn, *, trunk: str) -> StepAdvantages:
    """Estimate the advantages of a step, each episode among its peers.

    Args:
        data: the step.
        advantage: the estimator.
        trunk: as in forks.without_references.
    """
    whole = data_with_references(data)
    learnt = of_groups(advantage(by_peers(whole)), whole.groups)
    return learnt if whole is data else without_references(learnt, data, trunk=trunk)


def _part_of(group: EpisodeGroup, indices: Sequence[int]) -> EpisodeGroup:
    return replace(
        group,
        episodes=tuple(group.episodes[i] for i in indices),
        scores=tuple(group.scores[i] for i in indices),
    )


def _parted(
    columns: Sequence[Sequence[T]], classes: Sequence[Classes]
) -> tuple[tuple[T, ...], ...]:
    return tuple(
        tuple(column[i] for i in indices)
        for column, of in zip(columns, classes, strict=True)
        for indices in of
    )


def _together(parts: PerToken, classes: Sequence[Classes]) -> PerToken:
    rest = iter(parts)
    whole = []
    for of_group in classes:
        pairs = [pair for indices in of_group for pair in zip(indices, next(rest), strict=True)]
        whole.append(tuple(values for _, values in sorted(pairs, key=lambda pair: pair[0])))
    return tuple(whole)
