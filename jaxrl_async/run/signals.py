"""Ctrl-C once: finish the step, save, exit 0. Ctrl-C twice: out, at once."""

import logging
import os
import signal
import threading
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Any

EXIT_CODE = 130
"""Of a run that was told to stop twice: 128 + SIGINT, as shells count."""

log = logging.getLogger(__name__)


class Stop:
    """Whether somebody asked the run to stop, and who. Enter it on the main thread (Python's rule).

    The first SIGINT or SIGTERM sets it; the second ends the process at once with EXIT_CODE. Leaving
    the `with` restores the handlers that were there.
    """

    def __init__(
        self,
        signals: tuple[signal.Signals, ...] = (signal.SIGINT, signal.SIGTERM),
        *,
        end_process: Callable[[int], Any] = os._exit,
    ) -> None:
        self._signals, self._end_process = signals, end_process
        self._event = threading.Event()
        self._before: dict[signal.Signals, Any] = {}
        self.reason = ""

    def __enter__(self) -> "Stop":
        assert threading.current_thread() is threading.main_thread(), (
            "signals arrive at the main thread"
        )
        self._before = {s: signal.signal(s, self._on_signal) for s in self._signals}
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler if handler is not None else signal.SIG_DFL)
        self._before = {}

    def __bool__(self) -> bool:
        return self._event.is_set()

    def is_set(self) -> bool:
        """Whether a stop was asked for. Any thread may look."""
        return self._event.is_set()

    def request(self, reason: str) -> None:
        """Ask for a stop after the current step; the first reason is kept."""
        if not self._event.is_set():
            self.reason = reason
            self._event.set()

    def wait(self, timeout_s: float | None = None) -> bool:
        """Block until a stop was asked for, or timeout_s went by; whether it was."""
        return self._event.wait(timeout_s)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        name = signal.Signals(number).name
        if self._event.is_set():
            os.write(2, f"\n{name} again: ending at once; what was not saved is lost\n".encode())
            self._end_process(EXIT_CODE)
            return
        self.request(name)
        # os.write, not print or logging: a handler may run in the middle of either.
        os.write(
            2, f"\n{name}: stopping after this step and saving; once more ends at once\n".encode()
        )
