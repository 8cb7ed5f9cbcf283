"""The age limit of process rewards: they count only while the answers they judge are young."""

from collections.abc import Sequence
from dataclasses import replace

from jaxrl_async.types import EpisodeGroup


def within_age(
    groups: Sequence[EpisodeGroup], version: int, max_age: int | None
) -> tuple[tuple[EpisodeGroup, ...], dict[str, float]]:
    """Leave out the process rewards of groups that are too old; also return counts of the others.

    A group keeps or loses those of all its answers, which are compared with each other.

    Args:
        groups: to learn from.
        version: of the weights that learn.
        max_age: most versions by which the oldest token of a group may be older. None: any.
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
