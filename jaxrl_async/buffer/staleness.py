"""The staleness bound: pure functions, and why they hold.

S = max_staleness, P = groups per step, L = look-ahead. A group holds a slot from its admission
until the
weights of the step that used it are live in every sampler; there are (S + 1) * P - L slots.
"""

from collections.abc import Mapping, Sequence

from jaxrl_async.types import Drop, EpisodeGroup


def capacity(max_staleness: int, groups_per_step: int, lookahead: int) -> int:
    """Groups that may be active (admitted, not yet freed) at once: (S + 1) * P - L."""
    return (max_staleness + 1) * groups_per_step - lookahead


def may_admit(active: int, capacity: int) -> int:
    """Groups that may start now, given how many hold a slot; never negative."""
    return max(0, capacity - active)


def worst_staleness(capacity: int, lookahead: int, groups_per_step: int) -> int:
    """(capacity + lookahead - 1) // groups_per_step, in versions: the worst of any schedule.

    Let group g enter while version v is live; C = capacity. Count the groups taken before g is:
      - those of steps that are live: v * P, because a slot is freed only once its step is live;
      - those that hold a slot when g enters, all older than g: at most C - 1, as g holds one;
      - those that enter after g and overtake it: at most L, for select() lets nobody overtake
        the oldest waiting group from further than L numbers away (failed ones waste numbers).
    A group that fails or is dropped is never taken: it leaves one of the counts and adds to none,
    so its slot may go to a new group at once. Each P groups taken make one version, hence g is
    trained on at version (v * P + C - 1 + L) // P at most, and no token of it is older than v.
    With C = (S + 1) * P - L the result is S: reached where L = 0, loose where L is near S * P.

    Were the slot freed when the group is taken, the P groups of each step that is not live yet
    would be missing from the second count; tests/buffer/test_staleness.py has such schedules.
    """
    return (capacity + lookahead - 1) // groups_per_step


def staleness_of(group: EpisodeGroup, version: int) -> int:
    """The version about to be improved minus the group's oldest token, in versions."""
    return version - group.oldest_version


def split_stale(
    groups: Sequence[EpisodeGroup], version: int, max_staleness: int
) -> tuple[tuple[EpisodeGroup, ...], tuple[tuple[EpisodeGroup, Drop], ...]]:
    """(kept, dropped with the reason): too old, or drawn by weights that the trainer does not have
    yet."""
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

    pending: numbers of all groups admitted and not yet taken, ascending. A ready group may
    overtake the oldest pending one only from within `lookahead` numbers of it.
    """
    waiting = list(pending)
    taken: list[int] = []
    while waiting and len(taken) < count:
        window = [n for n in waiting if n <= waiting[0] + lookahead]
        chosen = next((n for n in window if n in ready), None)
        if chosen is None:
            break
        taken.append(chosen)
        waiting.remove(chosen)
    return tuple(taken)
