"""Heap of due times: the next one is found without scanning all."""

import heapq
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import count
from typing import Generic, TypeVar

T = TypeVar("T")


@dataclass(slots=True)
class Alarms(Generic[T]):
    """Alarms at times that may change: an alarm is valid only while its thing still has this time.
    Not locked."""

    _heap: list[tuple[float, int, T]] = field(default_factory=list)
    _numbers: Iterator[int] = field(default_factory=count)

    def add(self, at_s: float, thing: T) -> None:
        """Set an alarm for a thing, at its current time."""
        heapq.heappush(self._heap, (at_s, next(self._numbers), thing))

    def passed(self, now_s: float, time_of: Callable[[T], float | None]) -> list[T]:
        """Remove the alarms up to now; return the things whose alarms are still valid, each once.

        time_of: returns the time of a thing, or None if it has no time.
        """
        passed = dict[T, None]()
        while self._heap and self._heap[0][0] <= now_s:
            at_s, _, thing = heapq.heappop(self._heap)
            if time_of(thing) == at_s:
                passed[thing] = None
        return list(passed)

    def first(self, time_of: Callable[[T], float | None]) -> float | None:
        """Return the time of the first valid alarm; None: no alarm is valid."""
        while self._heap and time_of(self._heap[0][2]) != self._heap[0][0]:
            heapq.heappop(self._heap)
        return self._heap[0][0] if self._heap else None
