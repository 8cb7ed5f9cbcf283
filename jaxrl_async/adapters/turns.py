"""Turns on the trainer's slice, first come, first served."""

import threading
import time
from collections import deque

from jaxrl_async.errors import StalledError
from jaxrl_async.ports.run import Clock

LOOK_S = 1.0
"""Interval at which a waiting run checks how long the turn has been held, seconds."""


class Turns:
    """A first-come, first-served lock. A run asks for it once its groups are ready, so the run
    whose batch is ready first steps next. No run waits for more than one step of each other run.
    """

    def __init__(self, limit_s: float = 0.0, clock: Clock = time.monotonic) -> None:
        """limit_s: maximum time that a run may hold it while others wait, seconds; 0: no limit."""
        self._limit_s, self._clock = limit_s, clock
        self._lock = threading.Lock()
        self._taken, self._since = False, 0.0
        self._waiting: deque[threading.Event] = deque()

    def __enter__(self) -> None:
        """Wait for the turn. Raises StalledError if another run does not release it."""
        with self._lock:
            if not self._taken:
                self._taken, self._since = True, self._clock()
                return
            mine = threading.Event()
            self._waiting.append(mine)
        while not mine.wait(LOOK_S if self._limit_s else None):
            self._give_up_late(mine)

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._since = self._clock()
            if self._waiting:
                self._waiting.popleft().set()
            else:
                self._taken = False

    def _give_up_late(self, mine: threading.Event) -> None:
        """Leave the queue and raise StalledError once the turn has been held for too long."""
        with self._lock:
            held_s = self._clock() - self._since
            if held_s < self._limit_s or mine.is_set():
                return
            self._waiting.remove(mine)
        raise StalledError(
            f"another run has held the trainer's slice for {held_s:.0f} s while this one waits. "
            "Check which run made no step; raise faults.watchdog_s if it only needs longer."
        )
