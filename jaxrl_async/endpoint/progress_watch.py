"""A single reader of the sampler's progress for all calls that stream their answers.

It reads only while a call waits, and pauses four times as long as a reading takes, not to slow
down a sampler with many long sequences. The pause is limited, because a reading may be slow due to
the compilation of a program, and the answer should not end before the next reading.
"""

import asyncio
import logging
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from jaxrl_async.ports.generate import Generate
from jaxrl_async.types import Partial

log = logging.getLogger(__name__)

READ_EVERY_S = 0.02
"""Interval between two readings, seconds."""
PAUSE = 4
"""Minimum pause between two readings, as a multiple of a reading's duration."""
LONGEST_PAUSE_S = 0.5
"""Maximum pause between two readings, seconds."""


class ProgressWatch:
    """The tokens so far of the watched requests. Used on one event loop."""

    def __init__(self, generate: Generate, *, every_s: float = READ_EVERY_S) -> None:
        """Start no reading yet."""
        self._generate, self._every_s = generate, every_s
        self._waiting: dict[str, asyncio.Event] = {}  # by request
        self._latest: dict[str, Partial] = {}
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="progress-watch")
        self._task: asyncio.Task[None] | None = None
        self.failures = 0  # failed readings; answers then arrive only when complete

    def add(self, request_ids: Sequence[str], event: asyncio.Event) -> None:
        """Watch requests, and set `event` when one of them has more tokens."""
        self._waiting |= dict.fromkeys(request_ids, event)
        if self._task is None or self._task.done():
            self._task = asyncio.get_running_loop().create_task(self._read())

    def latest(self, request_id: str) -> Partial | None:
        """Return a request's tokens so far; None: none yet."""
        return self._latest.get(request_id)

    def remove(self, request_ids: Sequence[str]) -> None:
        """Stop watching these."""
        for request_id in request_ids:
            self._waiting.pop(request_id, None)
            self._latest.pop(request_id, None)

    async def close(self) -> None:
        """Stop reading."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        self._thread.shutdown(wait=False)

    async def _read(self) -> None:
        loop = asyncio.get_running_loop()
        while self._waiting:
            started = time.monotonic()
            try:
                self._take(await loop.run_in_executor(self._thread, self._generate.progress))
            except Exception as error:
                self.failures += 1
                log.log(
                    logging.WARNING if self.failures == 1 else logging.DEBUG,
                    "the sampler does not report its progress, so streams are delayed: %s",
                    error,
                )
            pause = min(PAUSE * (time.monotonic() - started), LONGEST_PAUSE_S)
            await asyncio.sleep(max(self._every_s, pause))

    def _take(self, partials: Sequence[Partial]) -> None:
        for partial in partials:
            name = partial.request.request_id
            event, before = self._waiting.get(name), self._latest.get(name)
            if event is None:
                continue
            if before is None or len(before.token_ids) != len(partial.token_ids):
                self._latest[name] = partial
                event.set()
