"""Comparison among peers: a group's episodes with the same `Episode.peers`, and no others.

    groups  (a a b b b)  (a b)  ──by_peers──>  (a a)  (b b b)  (a)  (b)  ──estimator──┐
    advantages of (a a b b b)  (a b)  <──────────────────────────────of_groups────────┘

Estimators see each set of peers as a separate group, restricted to the episodes that are compared
(StepData.compared, algorithm.baseline). Pure host code.
"""

from collections.abc import Sequence
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from jaxrl_async.algorithms.advantages import AdvantageFn, PerToken, StepAdvantages, StepData
from jaxrl_async.algorithms.forks import data_with_references, part_of, without_references
from jaxrl_async.types import EpisodeGroup

T = TypeVar("T")
D = TypeVar("D", bound=np.generic)
Classes = list[list[int]]
"""The episode indices of each set of peers in a group, ordered by the set's first episode."""


def classes_of(group: EpisodeGroup) -> Classes:
    """Return the sets of peers in a group."""
    by_word: dict[str, list[int]] = {}
    for index, episode in enumerate(group.episodes):
        by_word.setdefault(episode.peers, []).append(index)
    return list(by_word.values())


def split_group(group: EpisodeGroup) -> list[EpisodeGroup]:
    """Return one group per set of peers."""
    classes = classes_of(group)
    return [group] if len(classes) < 2 else [part_of(group, indices) for indices in classes]


def by_peers(data: StepData) -> StepData:
    """Return the step with one group per set of peers of each group."""
    classes = [classes_of(group) for group in data.groups]
    if all(len(of) == 1 for of in classes):
        return data
    return picked(data, [(g, indices) for g, of in enumerate(classes) for indices in of])


def picked(data: StepData, parts: Sequence[tuple[int, Sequence[int]]]) -> StepData:
    """Return a step with one group per (group index, episode indices)."""

    def of(columns: Sequence[Sequence[T]] | None) -> tuple[tuple[T, ...], ...] | None:
        if columns is None:
            return None
        return tuple(tuple(columns[g][i] for i in chosen) for g, chosen in parts)

    def arrays(columns: Sequence[NDArray[D]] | None) -> tuple[NDArray[D], ...] | None:
        if columns is None:
            return None
        return tuple(columns[g][list(chosen)] for g, chosen in parts)

    return StepData(
        groups=tuple(part_of(data.groups[g], chosen) for g, chosen in parts),
        rewards=arrays(data.rewards) or (),
        token_rewards=of(data.token_rewards),
        values=of(data.values),
        last_values=arrays(data.last_values),
        compared=arrays(data.compared),
    )


def of_groups(estimates: StepAdvantages, groups: Sequence[EpisodeGroup]) -> StepAdvantages:
    """Join the estimates for the peers of these groups, in the groups' original order."""
    classes = [classes_of(group) for group in groups]
    if len(estimates.advantages) == len(classes):
        return estimates
    returns = None if estimates.returns is None else _together(estimates.returns, classes)
    return StepAdvantages(advantages=_together(estimates.advantages, classes), returns=returns)


def compared_with_peers(
    data: StepData, advantage: AdvantageFn, *, trunk: str, least: int = 2
) -> StepAdvantages:
    """Estimate the advantages of a step, comparing each episode with its peers.

    Args:
        data: the step.
        advantage: the estimator.
        trunk: as in forks.without_references.
        least: as in `among_compared`.
    """
    whole = data_with_references(data)
    estimates = of_groups(among_compared(by_peers(whole), advantage, least), whole.groups)
    return estimates if whole is data else without_references(estimates, data, trunk=trunk)


def among_compared(data: StepData, advantage: AdvantageFn, least: int) -> StepAdvantages:
    """Estimate the advantages among the episodes that are compared (StepData.compared).

    All other episodes get 0, and so does a group with fewer than `least` compared episodes. With
    rloo this is Marin's RLOO-N (MarinSkyRL, compute_rloo_n_outcome_advantage). Returns are omitted:
    they are for a critic, which algorithm.baseline=unmasked refuses (preflight.check_algorithm).
    """
    if data.compared is None:
        return advantage(data)
    chosen = [np.flatnonzero(c).tolist() for c in data.compared]
    parts = [(g, of) for g, of in enumerate(chosen) if len(of) >= least]
    advantages = [[np.zeros(len(e.drawn), np.float32) for e in g.episodes] for g in data.groups]
    if parts:
        estimates = advantage(picked(data, parts))
        for (group, of), of_group in zip(parts, estimates.advantages, strict=True):
            for index, values in zip(of, of_group, strict=True):
                advantages[group][index] = values
    return StepAdvantages(advantages=tuple(tuple(of) for of in advantages))


def num_too_few(data: StepData, least: int) -> int:
    """Count the compared episodes that get no advantage because they have too few peers."""
    if data.compared is None:
        return 0
    parts = by_peers(data_with_references(data)).compared or ()
    return sum(n for c in parts if 0 < (n := int(np.count_nonzero(c))) < least)


def _together(parts: PerToken, classes: Sequence[Classes]) -> PerToken:
    rest = iter(parts)
    whole = []
    for of_group in classes:
        pairs = [pair for indices in of_group for pair in zip(indices, next(rest), strict=True)]
        whole.append(tuple(values for _, values in sorted(pairs, key=lambda pair: pair[0])))
    return tuple(whole)
