"""How many requests may be in flight: additive increase, multiplicative decrease. Pure."""

from dataclasses import dataclass, replace

HIGH = 0.9
"""Share of the pages in use above which the limit falls."""
LOW = 0.6
"""Share below which it may rise."""
DECREASE = 0.8
"""What the limit is multiplied by where memory was short."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limit:
    """Requests that may hold a slot or a reserve place."""

    value: float
    least: int
    most: int

    @property
    def requests(self) -> int:
        """The limit as a whole number."""
        return int(self.value)


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplerLoad:
    """What a sampler saw since the last look."""

    running: int  # requests with a place
    waiting: int  # requests without one
    used_share: float  # of the KV pages, by running requests (what can be evicted is not counted)
    preempted: int  # requests that had to give their pages up


def next_limit(limit: Limit, load: SamplerLoad) -> Limit:
    """+1 while the limit binds and pages are plenty; x 0.8 on a preemption or above 90 %.

    Chiu and Jain 1989 (Computer Networks 17), eq. 2 with a_I = 1 and b_D = 0.8.
    """
    if load.preempted or load.used_share > HIGH:
        return replace(limit, value=max(float(limit.least), limit.value * DECREASE))
    if load.waiting and load.running >= limit.requests and load.used_share < LOW:
        return replace(limit, value=min(float(limit.most), limit.value + 1))
    return limit
