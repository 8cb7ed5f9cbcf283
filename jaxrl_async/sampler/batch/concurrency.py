"""How many requests may be in flight: additive increase, multiplicative decrease. Pure."""

from dataclasses import dataclass, replace

HIGH = 0.9
"""Share of the pages in use above which the limit falls."""
LOW = 0.6
"""Share of the pages in use below which the limit may rise."""
DECREASE = 0.8
"""Factor of the limit when pages ran out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limit:
    """How many requests may hold a slot."""

    value: float
    least: int
    most: int

    @property
    def requests(self) -> int:
        """The limit as a whole number."""
        return int(self.value)


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplerLoad:
    """The load of a sampler since the limit was last adjusted."""

    running: int  # requests with a slot
    waiting: int  # requests without a slot
    used_share: float  # of the KV pages, by requests; pages that can be evicted are not counted
    preempted: int  # requests that had to give up their pages


def adjusted_limit(limit: Limit, load: SamplerLoad) -> Limit:
    """Return the limit + 1 while it binds and pages are plenty, x 0.8 if they run out or nearly do.

    Chiu and Jain 1989 (Computer Networks 17), eq. 2 with a_I = 1 and b_D = 0.8.
    """
    if load.preempted or load.used_share > HIGH:
        return replace(limit, value=max(float(limit.least), limit.value * DECREASE))
    if load.waiting and load.running >= limit.requests and load.used_share < LOW:
        return replace(limit, value=min(float(limit.most), limit.value + 1))
    return limit
