"""The simulation's clock and its scheduled events."""

import heapq
from collections.abc import Callable
from typing import Any

from jaxrl_async.errors import ConfigError


class Timeline:
    """Events in the order of their times."""

    def __init__(self) -> None:
        self.now = 0.0  # seconds
        self._events: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._number = 0

    def after(self, seconds: float, action: Callable[..., None], *args: object) -> None:
        """Schedule an event; events at equal times happen in the order of scheduling."""
        self._number += 1
        heapq.heappush(self._events, (self.now + seconds, self._number, action, args))

    def next(self) -> tuple[float, Callable[..., None], tuple[Any, ...]]:
        """Remove the next event; return its time, function and arguments. Raises ConfigError."""
        if not self._events:
            raise ConfigError(
                "no sampler is left and none will join: the simulated run waits forever. Let "
                "turnover.changes have joins."
            )
        at_s, _, action, args = heapq.heappop(self._events)
        return at_s, action, args
