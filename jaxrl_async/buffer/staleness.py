"""The staleness bound: pure functions, and why they hold.

S = max_staleness, P = groups per step, L = look-ahead. A group holds a slot from its admission until the
weights of the step that used it are live in every sampler; there are (S + 1) * P - L slots.
"""

from collections.abc import Mapping, Sequence

from jaxrl_async.types import Drop, EpisodeGroup


def capacity(max_staleness: int, groups_per_step: int, lookahead: int) -> int:
    """Groups that may be active (admitted, not yet freed) at once: (S + 1) * P - L."""
    return (max_staleness + 1) * groups_per_step - lookahead


def worst_staleness(capacity: int, lookahead: int, groups_per_step: int) -> int:
    """(capacity + lookahead - 1) // groups_per_step, in versions.

    When group g enters at live version v, at most capacity - 1 older groups are active, and at most
    `lookahead` younger ones may overtake it. Before g is trained on, the trainer therefore takes at most
    capacity - 1 + lookahead others beyond those whose weights are live, and each P of them move its version
    by one. Holds because a slot is freed only once the step's weights are live: freed when the group is
    taken, groups of steps not yet published would no longer be counted.
    """
    return (capacity + lookahead - 1) // groups_per_step


def staleness_of(group: EpisodeGroup, version: int) -> int:
    """The version about to be improved minus the group's oldest token, in versions."""
    return version - group.oldest_version


def split_stale(
    groups: Sequence[EpisodeGroup], version: int, max_staleness: int
) -> tuple[tuple[EpisodeGroup, ...], tuple[tuple[EpisodeGroup, Drop], ...]]:
    """(kept, dropped with the reason): too old, or drawn by weights that the trainer does not have yet."""
    reasons = [(g, drop_reason(g, version, max_staleness)) for g in groups]
    kept = tuple(g for g, reason in reasons if reason is None)
    return kept, tuple((g, reason) for g, reason in reasons if reason is not None)


def drop_reason(group: EpisodeGroup, version: int, max_staleness: int) -> Drop | None:
    """Why a group may not be trained on at this version; None where it may."""
    if group.newest_version > version:
        return Drop.FROM_THE_FUTURE
    if staleness_of(group, version) > max_staleness:
        return Drop.STALE
    return None


def select(
    pending: Sequence[int], ready: Mapping[int, EpisodeGroup], count: int, lookahead: int
) -> tuple[int, ...]:
    """The next groups to train on, at most `count`: in order of admission.

    pending: numbers of all groups admitted and not yet taken, ascending. A ready group may overtake the
    oldest pending one only from within `lookahead` numbers of it.
    """
    waiting, taken = list(pending), []
    while waiting and len(taken) < count:
        window = [n for n in waiting if n <= waiting[0] + lookahead]
        chosen = next((n for n in window if n in ready), None)
        if chosen is None:
            break
        taken.append(chosen)
        waiting.remove(chosen)
    return tuple(taken)
