"""A pure controller of the staleness limit, driven by the effective sample size.

    update ──offpolicy/ess_share──> next_pace ──limit──> ReplayBuffer.set_limit ──> gate, or drops

The effective sample size is the share of the tokens that remains effective under the importance
weights w = proximal / behaviour. It falls as the data gets older. The limit halves when the size is
below the target and grows by one when it is well above: additive increase, multiplicative decrease,
as in TCP congestion control (Chiu & Jain 1989, "Analysis of the increase and decrease algorithms
for congestion avoidance").
"""

from dataclasses import dataclass, replace
from math import isfinite


@dataclass(frozen=True, slots=True, kw_only=True)
class Bounds:
    """The range of the controller's limit, and its target."""

    target: float  # effective sample size as a share, 0 to 1
    lowest: int  # versions; below it no step could be filled
    highest: int  # versions; staleness.max_staleness


@dataclass(frozen=True, slots=True, kw_only=True)
class Pace:
    """The current limit, and the number of updates for which it is held."""

    limit: int  # versions
    rest: int = 0  # updates


def next_limit(limit: int, ess: float, bounds: Bounds) -> int:
    """Return limit // 2 if ess < target, limit + 1 if ess > (1 + target) / 2, else the limit.

    In the lower half of the range from the target to 1 (on-policy) the limit stays, so noise does
    not move it. The result is clipped to the bounds. A value that is not finite (a skipped update)
    leaves the limit unchanged.
    """
    if not isfinite(ess):
        return limit
    if ess < bounds.target:
        limit //= 2
    elif ess > (1 + bounds.target) / 2:
        limit += 1
    return min(max(limit, bounds.lowest), bounds.highest)


def next_pace(pace: Pace, ess: float, bounds: Bounds) -> Pace:
    """Hold the limit after a change, or compute the next one.

    The updates after a change still train on groups that were admitted under the old limit. These
    are gone after max(old, new) updates. Until then the measured value does not reflect the new
    limit, so the limit is held.
    """
    if pace.rest:
        return replace(pace, rest=pace.rest - 1)
    limit = next_limit(pace.limit, ess, bounds)
    return Pace(limit=limit, rest=max(pace.limit, limit) if limit != pace.limit else 0)
