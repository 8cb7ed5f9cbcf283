"""The watchdog: a thread that reads every part's counters and finds the part that is stuck.

    trainer <─groups─ buffer <─scores─ scorer <─episodes─ environment <─completions─ sampler
       └──weights──> channel ──live──> gate ──tickets──> rollouts ──requests──────────^

A part that waits for another is not to blame: the search starts at the trainer and follows the
chain of waiting parts. A run is stopped with an error that names the part if nothing moves (tokens,
requests, groups, weights, compiled programs), or if tokens are sampled and no group is accepted:
FLOOD steps' worth of groups were dropped or failed, not counting groups without a signal, which
have a separate limit (algorithm.max_resampled). Time of a reported outage and time in the caller's
code do not count; a call within its own time limit is no stall.

The watchdog is a Python thread, which stops with all others while one of them holds Python's lock
(such as a regular expression that backtracks). Then faulthandler's thread, which needs no lock,
writes the stacks.
"""

import faulthandler
import logging
import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn, TextIO

from jaxrl_async.buffer.contents import BufferStats
from jaxrl_async.errors import StalledError
from jaxrl_async.outages import Outages
from jaxrl_async.ports.run import Clock

log = logging.getLogger(__name__)

LOCKED = (
    "no thread of this process ran for %g s: one of them held Python's lock, as a regular "
    "expression that backtracks does. The stacks are written; reward.processes runs reward "
    "functions in other processes"
)
WITH_CALLER = (
    "in the caller's code for %.0f s: on_step, or the body of the loop over the updates, has not "
    "returned. The run continues when it does"
)
FLOOD = 10
"""Steps' worth of groups dropped or failed, without an accepted one, that count as no progress."""
LOOKS = 20
"""Number of readings of the counters within the time limit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """State of every part at one moment."""

    version: int = 0  # of the trainer
    trainer: str = "waiting for groups"  # its activity
    trainer_s: float = 0.0  # time in it, seconds
    blocks: int = 0  # decode blocks and prefilled tokens, of all samplers
    requests: int = 0  # given to the samplers and not answered
    living: int = 1  # samplers at work
    accepted: int = 0  # groups trained on, or ready to be
    rejected: int = 0  # groups dropped (except those without a signal), failed or cancelled
    groups_per_step: int = 1
    compiled: int = 0  # programs, in this process
    with_caller: bool = False  # the caller's own on_step is running
    outage: bool = False  # an outage of a service is reported
    within_limits: bool = False  # a call of a scorer or environment is within its time limit
    playing: int = 0  # groups under way in the rollouts
    score_s: float = 0.0  # longest call of the scorer under way; 0: none
    env_s: float = 0.0  # longest reply of an environment under way; 0: none
    published: int = 0  # version sent to the samplers last
    live: int = 0  # version that every sampler has
    ready: int = 0  # groups finished, waiting for the trainer
    slots_free: int = 0  # groups that the gate may admit

    @property
    def progress(self) -> tuple[object, ...]:
        """Values that change whenever any part makes progress."""
        return (
            self.version,
            self.trainer,
            self.blocks,
            self.requests,
            self.accepted,
            self.playing,
            self.published,
            self.live,
            self.compiled,
        )


def stuck_part(r: Reading) -> tuple[str, str]:
    """Return the part that is stuck, and the chain of waiting parts that leads to it."""
    if r.trainer in ("learning", "saving", "starting"):
        return "trainer", f"the trainer has been {r.trainer} for {r.trainer_s:.0f} s"
    if r.trainer == "waiting for its turn":
        return "run that has the trainer's slice", f"this one waits for it for {r.trainer_s:.0f} s"
    of_weights = r.trainer in ("publishing", "waiting for live weights")
    chain = f"the trainer ({r.trainer}, version {r.version})"
    if r.trainer == "evaluating" or not of_weights:
        part, why = _of_groups(r, chain)
    else:
        part, why = _of_samplers(r, f"{chain} <- the weights of version {r.published}")
    return part, why


def _of_groups(r: Reading, chain: str) -> tuple[str, str]:
    """Return the part that delays the groups that the trainer, or its evaluation, waits for."""
    if r.score_s:
        return "scorer", f"{chain} <- a scorer under way for {r.score_s:.0f} s"
    if r.env_s:
        return "environment", f"{chain} <- an environment under way for {r.env_s:.0f} s"
    if r.requests:
        return _of_samplers(r, f"{chain} <- {r.requests} requests")
    if r.playing:
        return "rollouts", f"{chain} <- {r.playing} groups without a request: a blocked loop?"
    if not r.slots_free and r.live < r.published:
        return _of_samplers(r, f"{chain} <- the gate <- version {r.published}, live is {r.live}")
    if not r.slots_free:
        return "gate", f"{chain} <- the gate is shut, with {r.ready} groups ready"
    return "rollouts", f"{chain} <- the gate is open, and no group begins"


def _of_samplers(r: Reading, chain: str) -> tuple[str, str]:
    if not r.living:
        return "sampler", f"{chain} <- no sampler is at work"
    return "sampler", f"{chain} <- {r.living} samplers at work finish no block and take no weights"


class Watchdog:
    """Stops a run that makes no progress. Owned by the thread in `run`; `stop` from any."""

    def __init__(
        self,
        read: Callable[[], Reading],
        *,
        limit_s: float,
        stacks: Path,
        clock: Clock = time.monotonic,
    ) -> None:
        """Begin to count.

        Args:
            read: reads every part's counters.
            limit_s: maximum time without progress, seconds; 0: no limit.
            stacks: the file for the threads' stacks.
            clock: may leave out time in which the process was suspended.
        """
        self.limit_s = limit_s  # read at each look
        self._read, self._stacks, self._clock = read, stacks, clock
        self._stopped = threading.Event()
        self._last: tuple[object, ...] | None = None
        self._moved_at = self._looked_at = clock()
        self._gained_at, self._gained = self._moved_at, (0, 0)  # version, maximum of accepted
        self._rejected = 0  # at that time
        self._with_caller_s = 0.0

    def run(self) -> None:
        """Read the counters until stopped. Raises StalledError if there is no progress."""
        if not self.limit_s:
            return
        with self._stacks.open("a", encoding="utf-8") as file:  # after an earlier run's stacks
            try:
                self._write_if_locked(file)
                written = os.fstat(file.fileno()).st_size
                while not self._stopped.wait(self.limit_s / LOOKS):
                    self._write_if_locked(file)
                    if (size := os.fstat(file.fileno()).st_size) > written:
                        written = size
                        log.warning("%s (%s)", LOCKED % self.limit_s, self._stacks)
                    self.look()
            finally:
                faulthandler.cancel_dump_traceback_later()
            if not os.fstat(file.fileno()).st_size:
                self._stacks.unlink(missing_ok=True)

    def _write_if_locked(self, file: TextIO) -> None:
        """Schedule the stacks of all threads to be written unless this is called again within the
        limit: if it is not, a thread holds Python's lock."""
        faulthandler.dump_traceback_later(self.limit_s, file=file, exit=False)

    def stop(self) -> None:
        """End `run`. Idempotent."""
        self._stopped.set()

    def look(self) -> None:
        """Read the counters once. If none has moved for the limit, or groups arrive and none is
        accepted, write the stacks of all threads and raise StalledError."""
        reading, now = self._read(), self._clock()
        passed_s, self._looked_at = now - self._looked_at, now
        self._log_caller(reading, passed_s)
        if reading.with_caller or reading.outage:
            self._moved_at += passed_s
            self._gained_at += passed_s
        if reading.progress != self._last:
            self._last, self._moved_at = reading.progress, now
        gained = (reading.version, max(self._gained[1], reading.accepted))
        if gained != self._gained or reading.trainer == "evaluating":
            self._gained, self._gained_at, self._rejected = gained, now, reading.rejected
        if now - self._moved_at >= self.limit_s and not reading.within_limits:
            part, why = stuck_part(reading)
            self._stop(
                reading,
                f"no progress for {now - self._moved_at:.0f} s; stuck part: {part} ({why})",
                f"{part}: {why}",
            )
        rejected = reading.rejected - self._rejected
        flooded = rejected >= FLOOD * reading.groups_per_step
        if flooded and now - self._gained_at >= self.limit_s:
            why = f"{rejected} groups were dropped or failed, and none was accepted"
            self._stop(reading, f"no progress for {now - self._gained_at:.0f} s: {why}", why)

    def _log_caller(self, reading: Reading, passed_s: float) -> None:
        """Log that the caller's code is running, each time that another limit has passed."""
        before_s = self._with_caller_s
        self._with_caller_s = before_s + passed_s if reading.with_caller else 0.0
        if self._with_caller_s // self.limit_s > before_s // self.limit_s:
            log.warning(WITH_CALLER, self._with_caller_s)

    def _stop(self, reading: Reading, what: str, head: str) -> NoReturn:
        with self._stacks.open("a", encoding="utf-8") as file:
            file.write(f"{head}\n{reading}\n\n")
            file.flush()
            faulthandler.dump_traceback(file, all_threads=True)
        raise StalledError(
            f"{what}. The stacks of all threads are in {self._stacks}. Raise faults.watchdog_s if "
            "it only needs longer."
        )


# ---- what a run waits for


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
        self._per_step, self._reported_steps = groups_per_step, 0
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
            self._report(line)
        stats = self._buffer()
        steps = stats.without_signal // self._per_step
        if steps > self._reported_steps:
            self._report(
                f"{stats.without_signal} groups in a row were dropped, {steps} steps' worth: they "
                f"have no training signal ({stats.no_signal})"
            )
        self._reported_steps = steps

    def _report(self, line: str) -> None:
        printed = self._show(line)
        log.log(logging.INFO if printed else logging.WARNING, "%s", line)
