"""The age limit of process rewards: they are dropped for groups that are too old."""

from collections.abc import Sequence
from dataclasses import replace

from jaxrl_async.types import EpisodeGroup


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
