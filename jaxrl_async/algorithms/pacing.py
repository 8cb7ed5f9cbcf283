"""How stale the data may be, set by how much of it still counts: a pure controller.

    update ──offpolicy/ess_share──> next_pace ──limit──> ReplayBuffer.set_limit ──> gate, or drops

The effective sample size says what share of the tokens' weight is left once importance weights
w = proximal / behaviour are taken into account; it falls as the data grows older. The limit halves
when it is below the target and grows by one when it is well above, as a sender's window does by
lost and by delivered packets (additive increase, multiplicative decrease: Chiu & Jain 1989,
"Analysis of the increase and decrease algorithms for congestion avoidance").
"""

from dataclasses import dataclass, replace
from math import isfinite


@dataclass(frozen=True, slots=True, kw_only=True)
class Bounds:
    """The range of the controller's limit, and its target."""

    target: float  # effective sample size as a share, 0 to 1
    lowest: int  # versions; with less no step could be filled
    highest: int  # versions; staleness.max_staleness


@dataclass(frozen=True, slots=True, kw_only=True)
class Pace:
    """The present limit, and how many updates it stays whatever is measured."""

    limit: int  # versions
    rest: int = 0  # updates


def next_limit(limit: int, ess: float, bounds: Bounds) -> int:
    """Return limit // 2 if ess < target, limit + 1 if ess > (1 + target) / 2, else the limit.

    The lower half of the range from the target to 1 (on-policy) changes nothing, so that noise does
    not move the limit. The result is kept within the bounds. A value that is not finite (a skipped
    update) changes nothing.
    """
    if not isfinite(ess):
        return limit
    if ess < bounds.target:
        limit //= 2
    elif ess > (1 + bounds.target) / 2:
        limit += 1
    return min(max(limit, bounds.lowest), bounds.highest)


def next_pace(pace: Pace, ess: float, bounds: Bounds) -> Pace:
    """Rest after a change, or take the next limit.

    The updates after a change still train on groups that were admitted under the old limit. Only
    after max(old, new) updates are these gone and is the new limit in full use. Until then the
    measured value says nothing about the new limit, which therefore stays.
    """
    if pace.rest:
        return replace(pace, rest=pace.rest - 1)
    limit = next_limit(pace.limit, ess, bounds)
    return Pace(limit=limit, rest=max(pace.limit, limit) if limit != pace.limit else 0)
