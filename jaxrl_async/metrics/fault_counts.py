"""What went wrong and was survived, counted since the start: one object for all parts. And what
their limits share: the time that counts, and how long to wait before the next try."""

import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

from jaxrl_async.metrics.metric import METRICS
from jaxrl_async.ports import Clock

SPACE = "faults/"
OF_THE_STEP = ("faults/oom_retries",)
"""Told with the step's own report, not counted here."""
NAMES = tuple(
    m.key.removeprefix(SPACE)
    for m in METRICS
    if m.key.startswith(SPACE) and m.key not in OF_THE_STEP
)
"""Every name that may be counted; docs/metrics.md explains them."""

LONGEST_BACKOFF_S = 60.0
"""Longest wait before something is tried again, seconds."""


def backoff_s(first_s: float, failures: int) -> float:
    """Wait after so many earlier failures in a row: first_s * 2**failures, a minute at most."""
    return min(first_s * 2.0 ** min(failures, 100), LONGEST_BACKOFF_S)


class FaultCounts:
    """How often each fault was met. Thread safe."""

    def __init__(self) -> None:
        self._counts, self._lock = Counter[str](), threading.Lock()

    def add(self, name: str, count: int = 1) -> None:
        """`name` is a key of METRICS without "faults/"."""
        assert name in NAMES, f"fault {name!r} is not declared: add faults/{name} to METRICS"
        with self._lock:
            self._counts[name] += count

    def read(self) -> dict[str, int]:
        """Totals since the start, of every name."""
        with self._lock:
            return {name: self._counts[name] for name in NAMES}


class UnderWay:
    """Calls under way and since when. Counted on one thread; `oldest_s` from any."""

    def __init__(self, clock: Clock) -> None:
        self._clock, self._started = clock, dict[object, float]()

    @contextmanager
    def one(self) -> Iterator[None]:
        """A call, as long as it takes."""
        mine = object()
        self._started[mine] = self._clock()
        try:
            yield
        finally:
            del self._started[mine]

    def oldest_s(self) -> float:
        """How long the longest has taken, seconds; 0: none."""
        return max((self._clock() - s for s in list(self._started.values())), default=0.0)


class AwakeClock:
    """A ports.Clock for limits: between two readings it counts `most_s` at most, so that nobody is
    taken to hang because the whole process was suspended. Thread safe."""

    def __init__(self, clock: Clock, *, most_s: float) -> None:
        self._clock, self._most_s, self._lock = clock, most_s, threading.Lock()
        self._last, self._counted_s = clock(), 0.0

    def __call__(self) -> float:
        """Seconds since the first reading in which the process was awake."""
        with self._lock:
            now = self._clock()
            self._counted_s += min(now - self._last, self._most_s)
            self._last = now
            return self._counted_s
