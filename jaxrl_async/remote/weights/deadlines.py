"""The next due time among many: found without a look at all of them."""

import heapq
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import count
from typing import Generic, TypeVar

T = TypeVar("T")


@dataclass(slots=True)
class Alarms(Generic[T]):
    """A time of each thing, which may change: an alarm counts while it is still that time. Not
    locked."""

    _heap: list[tuple[float, int, T]] = field(default_factory=list)
    _numbers: Iterator[int] = field(default_factory=count)

    def add(self, at_s: float, thing: T) -> None:
        """Set the alarm of a thing, whose time is this now."""
        heapq.heappush(self._heap, (at_s, next(self._numbers), thing))

    def passed(self, now_s: float, time_of: Callable[[T], float | None]) -> list[T]:
        """Take the alarms until now out; return the things that they still count for, each once.

        time_of: the time of a thing; None: it has none.
        """
        passed = dict[T, None]()
        while self._heap and self._heap[0][0] <= now_s:
            at_s, _, thing = heapq.heappop(self._heap)
            if time_of(thing) == at_s:
                passed[thing] = None
        return list(passed)

    def first(self, time_of: Callable[[T], float | None]) -> float | None:
        """Return the time of the first alarm that counts; None: no alarm counts."""
        while self._heap and time_of(self._heap[0][2]) != self._heap[0][0]:
            heapq.heappop(self._heap)
        return self._heap[0][0] if self._heap else None
