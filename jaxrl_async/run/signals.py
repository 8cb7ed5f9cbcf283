"""Signals: one Ctrl-C finishes the step, saves and exits with 0; SIGTERM, and SIGHUP of a closing
terminal, do so without the last evaluation and exit with 75. A second signal ends the process
immediately; in a notebook, whose kernel holds more than the run, it raises KeyboardInterrupt. If
SIGHUP is ignored from the start (nohup), it stays ignored."""

import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType, TracebackType
from typing import Any

from jaxrl_async.errors import Preempted
from jaxrl_async.metrics.json_logs import signal_line

EXIT_CODE = 130
"""Exit code after a second signal: 128 + SIGINT, as shells count."""
NO_TRAINER_CODE = 69
"""Exit code of a sampler that found no trainer within --wait: EX_UNAVAILABLE."""
PREEMPTED_CODE = 75
"""Exit code after SIGTERM or SIGHUP: EX_TEMPFAIL of sysexits.h, "try again later"."""
HURRIED = ("SIGTERM", "SIGHUP")
"""Signals that leave little time to stop."""
STOPPING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""Signals that request a stop."""

log = logging.getLogger(__name__)


def preempted(stop: "Stop", what: str) -> Preempted:
    """Return the exception of a run after SIGTERM or SIGHUP, once everything is saved. what: the
    saved state."""
    return Preempted(
        f"{stop.reason}: {what} was saved {time.monotonic() - stop.asked_at_s:.1f} s later. "
        "--resume continues from there."
    )


def end_at_once(code: int) -> None:
    """End the process; after a second signal in a notebook raise KeyboardInterrupt instead."""
    if code == EXIT_CODE and _in_notebook():
        raise KeyboardInterrupt
    os._exit(code)


def _in_notebook() -> bool:
    ipython = sys.modules.get("IPython")
    return ipython is not None and ipython.get_ipython() is not None


def end_on_ctrl_c() -> None:
    """Make Ctrl-C end the process with one line, until a Stop takes over.

    Otherwise modules that are being imported would print a traceback or swallow it.
    """

    def end(number: int, frame: FrameType | None) -> None:
        write_line("SIGINT: nothing was started; ending")
        os._exit(EXIT_CODE)

    signal.signal(signal.SIGINT, end)


def write_line(text: str) -> None:
    """Write a line to stderr from a signal's handler, which may interrupt a print or logging; the
    line is lost if it cannot be written (a closed terminal)."""
    with suppress(OSError):
        os.write(2, signal_line(text))


def listens_to(number: signal.Signals) -> bool:
    """Return whether a signal may be handled: not SIGHUP if the process was started with it ignored
    (nohup)."""
    return number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN


LOOK_S = 0.1
"""Interval at which `acting_on` checks for a stop, seconds."""


class Stop:
    """A stop flag with its reason, set by signals.

    The first SIGINT, SIGTERM or SIGHUP sets it; a second SIGINT or SIGTERM ends the process
    immediately with EXIT_CODE. SIGHUP never counts as the first or second of the two: a closing
    terminal may send several, and service managers send it with SIGTERM. Leaving the `with`
    restores the earlier handlers. Python delivers signals to the main thread alone: entered on
    another thread, which is logged, it gets none, and only `request` sets it.
    """

    def __init__(
        self,
        *,
        grace_s: float | None = None,
        end_process: Callable[[int], object] = end_at_once,
    ) -> None:
        """Make the flag; signals are handled only inside the `with`.

        Args:
            grace_s: seconds from SIGTERM or SIGHUP until the process ends with PREEMPTED_CODE in
                any case.
            end_process: ends the process with an exit code.
        """
        self._grace_s, self._end_process = grace_s, end_process
        self._timer: threading.Timer | None = None
        self.asked_at_s = 0.0  # time.monotonic() of the first signal
        self._event = threading.Event()
        self._before: dict[signal.Signals, Any] = {}
        self.reason = ""
        self._counted = False  # a SIGINT or SIGTERM was received
        self.answer = "stopping after this step and saving"
        """The run's reaction, for the message on the first signal."""

    def __enter__(self) -> "Stop":
        if threading.current_thread() is not threading.main_thread():
            log.warning(
                "train() is not on the main thread: Ctrl-C, SIGTERM and SIGHUP do not stop the run"
            )
            return self
        self._before = {s: signal.signal(s, self._on_signal) for s in STOPPING if listens_to(s)}
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._timer is not None:
            self._timer.cancel()
        for number, handler in self._before.items():
            signal.signal(number, handler if handler is not None else signal.SIG_DFL)
        self._before = {}

    def __bool__(self) -> bool:
        return self._event.is_set()

    def is_set(self) -> bool:
        """Return whether a stop was requested, by any thread."""
        return self._event.is_set()

    @property
    def preempted(self) -> bool:
        """Whether the reason is SIGTERM or SIGHUP: the machine is needed for something else soon,
        or the terminal was closed."""
        return self.reason in HURRIED

    @contextmanager
    def acting_on(self, act: Callable[[], object]) -> Iterator[None]:
        """Call a function, once and on a separate thread, if a stop is requested inside the `with`:
        for a block that waits for something else."""
        over = threading.Event()

        def watch() -> None:
            while not over.wait(LOOK_S):
                if self.is_set():
                    act()
                    return

        threading.Thread(target=watch, name="watch for a stop", daemon=True).start()
        try:
            yield
        finally:
            over.set()

    def request(self, reason: str) -> None:
        """Request a stop after the current step; the first reason is kept."""
        if not self._event.is_set():
            self.reason, self.asked_at_s = reason, time.monotonic()
            self._event.set()

    def wait(self, timeout_s: float | None = None) -> bool:
        """Block until a stop is requested, or for timeout_s; return whether it was."""
        return self._event.wait(timeout_s)

    def _end_late(self) -> None:
        write_line(
            f"{self.reason}: not ended within {self._grace_s:.0f} s (checkpoint.grace_s); ending. "
            "--resume continues from the newest checkpoint"
        )
        self._end_process(PREEMPTED_CODE)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        name = signal.Signals(number).name
        counts = number != signal.SIGHUP
        hung_up = self.reason == "SIGHUP" and not self._counted
        if counts and self._event.is_set() and not hung_up:
            write_line(f"{name} again: ending immediately; unsaved work is lost")
            self._end_process(EXIT_CODE)
            return
        self._counted = self._counted or counts
        self.request(name)
        if self.preempted and self._grace_s is not None and self._timer is None:
            self._timer = threading.Timer(self._grace_s, self._end_late)
            self._timer.daemon = True
            self._timer.start()
        write_line(f"{name}: {self.answer}; a second signal ends the process immediately")
