"""Report what a run waits for while it makes no step: services that are unavailable, and groups
without a training signal."""

import logging
import threading
from collections.abc import Callable

from jaxrl_async.buffer.contents import BufferStats
from jaxrl_async.outages import Outages

log = logging.getLogger(__name__)

LOOK_S = 0.5
"""Interval between checks, seconds."""


class Notices:
    """Reports on the console and in the log. Owned by the thread in `run`; `stop` from any."""

    def __init__(
        self,
        outages: Outages,
        buffer: Callable[[], BufferStats],
        show: Callable[[str], bool | None],
        *,
        groups_per_step: int,
    ) -> None:
        """Make the reporter; nothing is reported yet.

        Args:
            outages: each is reported immediately, and then once a minute.
            buffer: reads the buffer's counters; each step's worth of groups that are dropped in a
                row because they have no signal is reported.
            show: shows a line on the console; returns True if it printed it: then the log gets
                no warning, which the same terminal would show again.
            groups_per_step: number of groups of a step.
        """
        self._outages, self._buffer, self._show = outages, buffer, show
        self._wanted, self._told_steps = groups_per_step, 0
        self._stopped = threading.Event()

    def run(self) -> None:
        """Check until stopped."""
        self._outages.reported = True
        while not self._stopped.wait(LOOK_S):
            self.look()

    def stop(self) -> None:
        """End `run`. Idempotent."""
        self._stopped.set()

    def look(self) -> None:
        """Report what is new."""
        for line in self._outages.reports():
            self._say(line)
        stats = self._buffer()
        steps = stats.barren // self._wanted
        if steps > self._told_steps:
            self._say(
                f"{stats.barren} groups in a row were dropped, {steps} steps' worth: they have no "
                f"training signal ({stats.no_signal})"
            )
        self._told_steps = steps

    def _say(self, line: str) -> None:
        printed = self._show(line)
        log.log(logging.INFO if printed else logging.WARNING, "%s", line)
