"""A clock that advances only when a test advances it."""

import heapq
from asyncio import Future, get_running_loop


class VirtualClock:
    """A ports.Clock. Each reading adds `tick_s`; `advance` adds more and wakes sleepers.

    For one thread: an asyncio test advances the clock on the same loop as its sleepers.
    """

    def __init__(self, *, start_s: float = 0.0, tick_s: float = 0.0) -> None:
        self.now_s, self._tick_s = start_s, tick_s
        self._sleepers: list[tuple[float, int, Future[None]]] = []
        self._slept = 0

    def __call__(self) -> float:
        """Return the seconds since an arbitrary moment."""
        now_s = self.now_s
        self.now_s += self._tick_s
        return now_s

    def advance(self, seconds: float) -> None:
        """Advance the time: sleepers wake in order of their wake-up time, ties in order of
        sleep()."""
        assert seconds >= 0, "time does not run backwards"
        self.now_s += seconds
        while self._sleepers and self._sleepers[0][0] <= self.now_s:
            _, _, sleeper = heapq.heappop(self._sleepers)
            if not sleeper.done():
                sleeper.set_result(None)

    @property
    def sleeping(self) -> bool:
        """True if a sleeper waits for the clock."""
        return any(not sleeper.done() for _, _, sleeper in self._sleepers)

    async def sleep(self, seconds: float) -> None:
        """Return once the clock has been advanced by `seconds`."""
        if seconds <= 0:
            return
        sleeper: Future[None] = get_running_loop().create_future()
        self._slept += 1
        heapq.heappush(self._sleepers, (self.now_s + seconds, self._slept, sleeper))
        await sleeper
