"""Count the faults that a run survives; the clock and backoff that retries and timeouts share."""

import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

from jaxrl_async.metrics.metric import METRICS
from jaxrl_async.ports.run import Clock

SPACE = "faults/"
OF_THE_STEP = (
    "faults/oom_retries",
    "faults/tracker_failures",
    "faults/tracker_lost_steps",
    "faults/copy_failures",
)
"""Faults that are reported with the step's metrics, not counted here."""
NAMES = tuple(
    m.key.removeprefix(SPACE)
    for m in METRICS
    if m.key.startswith(SPACE) and m.key not in OF_THE_STEP
)
"""All names that may be counted; docs/metrics.md explains them."""

LONGEST_BACKOFF_S = 60.0
"""Maximum wait before a retry, seconds."""


def backoff_s(first_s: float, failures: int) -> float:
    """Return the wait after `failures` failures in a row: first_s * 2**failures, at most 60 s."""
    return min(first_s * 2.0 ** min(failures, 100), LONGEST_BACKOFF_S)


class FaultCounts:
    """Counts of each fault since the start. Thread safe."""

    def __init__(self) -> None:
        self._counts, self._lock = Counter[str](), threading.Lock()

    def add(self, name: str, count: int = 1) -> None:
        """Count a fault; `name` is its key in METRICS without "faults/"."""
        assert name in NAMES, f"fault {name!r} is not declared: add faults/{name} to METRICS"
        with self._lock:
            self._counts[name] += count

    def read(self) -> dict[str, int]:
        """Return the total of every name since the start."""
        with self._lock:
            return {name: self._counts[name] for name in NAMES}


class UnderWay:
    """Running calls and their start times. Calls start on one thread; any may read `oldest_s`."""

    def __init__(self, clock: Clock) -> None:
        self._clock, self._started = clock, dict[object, float]()

    @contextmanager
    def one(self) -> Iterator[None]:
        """Count a call while the context is open."""
        call = object()
        self._started[call] = self._clock()
        try:
            yield
        finally:
            del self._started[call]

    def oldest_s(self) -> float:
        """Return the age of the oldest running call, seconds; 0 if no call is running."""
        return max((self._clock() - s for s in list(self._started.values())), default=0.0)


class AwakeClock:
    """A ports.Clock for timeouts that ignores time while the whole process was suspended.

    Between two readings it counts at most `most_s` seconds. Thread safe.
    """

    def __init__(self, clock: Clock, *, most_s: float) -> None:
        self._clock, self._most_s, self._lock = clock, most_s, threading.Lock()
        self._last, self._counted_s = clock(), 0.0

    def __call__(self) -> float:
        """Return the seconds since construction during which the process was awake."""
        with self._lock:
            now = self._clock()
            self._counted_s += min(now - self._last, self._most_s)
            self._last = now
            return self._counted_s
