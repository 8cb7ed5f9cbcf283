"""The staleness bound: pure functions, and why they hold.

S = max_staleness, P = groups per step, L = look-ahead, K = reuse: steps that may use a group. From
its admission a group holds K slots, one per use. A slot is freed when the weights of the step that
used it are live in every sampler, or when the use will not happen (the group is dropped, or too
stale to be used again). There are (S + 1) * P - K * L slots; K is 1 by default.

"Live in every sampler" is a number that never decreases. Each sampler that serves requests
generates with that version or a newer one, even as samplers join and leave: weights/exchange.py
ensures that. The count below relies on nothing else.

This is pacing by waiting: rollouts pause instead of generating what would be too stale. Pacing by
dropping has `memory_bound` slots instead, which are freed as soon as a group is taken. Rollouts
continue, and groups that are too stale at the trainer's draw are dropped: there the check at each
draw is the whole bound.
"""

from jaxrl_async.types import Drop, EpisodeGroup


def capacity(max_staleness: int, groups_per_step: int, lookahead: int, reuse: int = 1) -> int:
    """Return how many uses of groups may be outstanding at the same time: (S + 1) * P - K * L.

    It must be at least K * P, or a step could never be filled: with all slots free, P different
    groups must be admitted. See `never_fills_a_step`.

    This many keep the bound. Let group g enter while version v is live; C = capacity. Count the
    uses before g's first one:
      - uses by steps that are live: v * P, because a slot is freed only once its step is live;
      - uses whose slots are held when g enters: at most C - K, as g holds K;
      - uses of groups that enter after g and overtake it: at most K * L, since select() lets no
        group overtake the oldest waiting one from more than L numbers away (failed ones waste
        numbers), whichever group within reach it takes.
    A group that fails or is dropped is not used (again): it leaves one of the counts and adds to
    none, so its slots may go to a new group immediately. Each P uses make one version, hence g is
    first trained on at version (v * P + C - K + K * L) // P at most, and no token of it is older
    than v. With C = (S + 1) * P - K * L the result is S if K <= P, and lower otherwise: reached if
    K = 1 and L = 0, loose if L is near S * P. This count does not bound later uses; the check at
    each draw does: a group too old to be used again frees its slots.

    If a slot were freed when the group is taken, the P groups of each step that is not live yet
    would be missing from the second count; tests/test_staleness.py has such schedules.

    The trainer never gets stuck: while it waits, all steps are live, so only groups with uses left
    hold slots. Fewer than P such groups hold at most K * (P - 1) slots, K less than there are, so
    another group is admitted; P of them fill a step once they are ready.

    Hence a fresh group cannot become stale: there is nothing to drop. That also holds if the
    capacity changes meanwhile (ReplayBuffer.set_limit), as long as it is never above C: g enters
    only while the held slots fit the capacity of that moment, hence C. Dropping needs more slots
    than the bound allows: see `memory_bound`.
    """
    return (max_staleness + 1) * groups_per_step - reuse * lookahead


def never_fills_a_step(
    max_staleness: int, groups_per_step: int, lookahead: int, reuse: int = 1
) -> str | None:
    """Return why no step could ever be filled, as an error message; None if steps can be filled.

    Pacing by waiting needs a capacity of K * P uses: S >= least_limit(P, L, K). For K = 1 that is
    L <= S * P, the largest look-ahead.
    """
    least = least_limit(groups_per_step, lookahead, reuse)
    if max_staleness >= least:
        return None
    most = (max_staleness + 1) * groups_per_step // reuse - groups_per_step
    if lookahead > most >= 0:
        bound = "max_staleness * groups_per_step"
        if reuse > 1:
            bound = "(max_staleness + 1) * groups_per_step / buffer.reuse - groups_per_step"
        return (
            f"staleness.lookahead ({lookahead}) must be at most {bound} ({most}): a step could "
            f"never be filled. Set staleness.lookahead={most} or raise staleness.max_staleness to "
            f"{least}."
        )
    groups = capacity(max_staleness, groups_per_step, lookahead, reuse) // reuse
    return (
        f"buffer.reuse ({reuse}) leaves room for {groups} groups at a time, fewer than "
        f"algorithm.groups_per_step ({groups_per_step}): a step could never be filled. Lower it, "
        f"or raise staleness.max_staleness to {least}."
    )


def least_limit(groups_per_step: int, lookahead: int, reuse: int = 1) -> int:
    """Return the smallest staleness whose capacity fills a step: ceil(K * (P + L) / P) - 1."""
    return -(-reuse * (groups_per_step + lookahead) // groups_per_step) - 1


def memory_bound(max_staleness: int, groups_per_step: int, overcommit: float) -> int:
    """Return the number of groups in memory with pacing by dropping: floor(overcommit * (S + 1) *
    P).

    This is at least P for an overcommit of 1 or more, so a step can be filled.
    """
    return int(overcommit * (max_staleness + 1) * groups_per_step)


def may_admit(active: int, capacity: int, reuse: int = 1) -> int:
    """Return how many groups may start now, given the number of held slots; never negative."""
    return max(0, capacity - active) // reuse


def drop_reason(group: EpisodeGroup, version: int, max_staleness: int) -> Drop | None:
    """Return why a group may not be trained on at this version: it is too stale, or was generated
    by weights that the trainer does not have yet. None if it may."""
    oldest, newest = group.version_range
    if newest > version:
        return Drop.FROM_THE_FUTURE
    if version - oldest > max_staleness:
        return Drop.STALE
    return None
