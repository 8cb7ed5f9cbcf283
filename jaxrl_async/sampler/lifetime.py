"""Lifetime of an object that owns a thread (a *part*): until it is closed, the program ends, or its
last user has dropped it. Pure host code.

A daemon thread that is still inside a program when the interpreter exits aborts the whole process.
Open parts are therefore closed before that. A forked process has copies of the parts, but not their
threads.
"""

import atexit
import contextlib
import logging
import math
import os
import threading
import time
import traceback
import weakref
from collections.abc import Callable, Sequence
from typing import Any, Self

from jaxrl_async.errors import Closed, RolloutError
from jaxrl_async.stuck_threads import register_stuck

log = logging.getLogger(__name__)

UNREFERENCED_S = 1.0
"""Interval at which an idle thread checks whether its part is still referenced, seconds."""

_OPEN: "weakref.WeakSet[Any]" = weakref.WeakSet()
os.register_at_fork(after_in_child=_OPEN.clear)


class Lifetime:
    """The thread of a part, from its first start to its end, and the lock that guards the end.

    A part (Sampler, Router, ForeignSampler) owns one. While the thread sleeps, only the users of
    the part keep it alive.
    """

    def __init__(self, part: object, step: Callable[[Any], float | None], *, name: str) -> None:
        """Make the lifetime of `part`, which it does not keep alive.

        Args:
            part: has close(), which is called when the program ends.
            step: called repeatedly by the thread with the part. Returns the time to sleep after
                it, seconds (0: no sleep; infinite: until `wake` is set), or None to end the thread.
            name: of the thread.
        """
        self.lock = threading.RLock()  # guards all below, and data that users hand to the thread
        self.wake = threading.Event()  # ends the thread's sleep
        self.closed = False
        self.error: BaseException | None = None  # that ended the thread
        self.thread: threading.Thread | None = None
        self._part, self._step, self._name = weakref.ref(part), step, name
        self._kind, self._pid = type(part).__name__, os.getpid()
        self._roused: Any = None  # the part, from a call of its users until the thread has seen it

    def start(self) -> None:
        """Start the thread unless it was started or closed before."""
        with self.lock:
            if self.thread is not None or self.closed:
                return
            self.thread = threading.Thread(target=self._serve, name=self._name, daemon=True)
            self._roused = self._part()
            close_at_exit(self._roused)
            self.thread.start()

    def rouse(self) -> None:
        """Wake the thread for new work. The part stays alive until the thread has seen the work,
        even if its last user drops it immediately."""
        self._roused = self._part()
        self.wake.set()

    def _serve(self) -> None:
        """Run the thread: call `step(part)` repeatedly, until it returns None or the part is no
        longer referenced. `wake` ends the sleep between two steps."""
        part, self._roused = self._part(), None
        while part is not None:
            sleep_s = self._step(part)
            if sleep_s is None:
                return
            if sleep_s:
                part = None
                while not self.wake.wait(min(sleep_s, UNREFERENCED_S)) and math.isinf(sleep_s):
                    if self._part() is None:
                        return
                self.wake.clear()
                part, self._roused = self._part(), None

    def stop(self, timeout_s: float | None = None) -> bool:
        """Close, and wait for the thread to end, unless this is the thread. Return False if it has
        not ended within timeout_s."""
        self.detach()
        if self.thread is None or self.is_current:
            return True
        register_stuck(self.thread)  # first: Ctrl-C may end the join
        self.thread.join(timeout_s)
        return not self.thread.is_alive()

    def detach(self) -> None:
        """Close without waiting for the thread, which is dead or hung; it ends if it wakes up."""
        with self.lock:
            self.closed = True
        self.wake.set()

    def fail(self, error: BaseException) -> None:
        """Close because of this error, which ended the thread."""
        with self.lock:
            self.error, self.closed = error, True

    def forget_frames(self) -> None:
        """Clear the frames of the thread's error and of its causes: they refer to the part, whose
        arrays must be freed without Python's garbage collector, which does not scan a run's first
        samplers (host.py)."""
        error = self.error
        while error is not None and error.__traceback__ is not None:
            traceback.clear_frames(error.__traceback__)
            for frame, _ in traceback.walk_stack(error.__traceback__.tb_frame):  # its callers
                with contextlib.suppress(RuntimeError):  # it is still running
                    frame.clear()
            error.__traceback__ = None
            error = error.__cause__ or error.__context__

    @property
    def is_current(self) -> bool:
        """Whether the caller runs on the thread."""
        return self.thread is threading.current_thread()

    @property
    def is_forked(self) -> bool:
        """Whether this process is a fork of the thread's process."""
        return os.getpid() != self._pid

    def check_open(self, closed: str) -> None:
        """Raise the error that ended the thread, or Closed with this message if it was closed. Call
        it under the lock."""
        if self.error is not None:
            raise self.error
        if self.closed:
            raise Closed(closed)

    def check_process(self) -> None:
        """Raise RolloutError in a forked process, where the thread does not exist."""
        if self.is_forked:
            raise RolloutError(
                f"this {self._kind} and its thread belong to process {self._pid}: "
                f"process {os.getpid()}, a fork of it, would wait forever. Make a {self._kind} in "
                "each process, and start processes with multiprocessing's 'spawn'."
            )

    def check_waits(self) -> None:
        """Raise RolloutError where a wait for the thread would never end: on the thread itself, or
        in a forked process."""
        self.check_process()
        if self.is_current:
            raise RolloutError(
                f"a callback of a request waits for the {self._kind} on whose own thread it runs: "
                "it would wait forever. Use start_many, which does not wait, or another thread."
            )


class Living:
    """A part that has a Lifetime. A context manager: leaving it closes it."""

    lifetime: Lifetime

    @property
    def error(self) -> BaseException | None:
        """The exception that ended the thread."""
        return self.lifetime.error

    def start(self) -> None:
        """Start the thread; the first request does it, too."""
        self.lifetime.start()

    def close(self) -> None:
        """Stop; requests that are not done fail with Closed. Idempotent."""
        raise NotImplementedError

    def check_waits(self) -> None:
        """Raise RolloutError where a wait for this part would never end: on its own thread, or in a
        forked process."""
        self.lifetime.check_waits()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def close_side_by_side(parts: Sequence[Any], limit_s: float) -> None:
    """Call `close()` of all parts concurrently, each on a separate thread. Wait at most limit_s
    seconds for all of them together, and log the number that are not closed then."""
    threads = []
    for part in parts:
        thread = threading.Thread(target=part.close, name="close", daemon=True)
        try:
            thread.start()
        except RuntimeError:  # the interpreter is shutting down and starts no thread
            part.close()
        else:
            threads.append(thread)
    end_s = time.monotonic() + limit_s
    for thread in threads:
        thread.join(max(0.0, end_s - time.monotonic()))
    if left := sum(thread.is_alive() for thread in threads):
        log.warning("%d of %d were not closed within %g s", left, len(threads), limit_s)


def close_at_exit(part: object) -> None:
    """Call `part.close()` when the program ends, without keeping the part alive."""
    if not _OPEN:
        atexit.unregister(_close_all)
        atexit.register(_close_all)  # runs before jax's: the last one registered is called first
    _OPEN.add(part)


def _close_all() -> None:
    """Close all open parts."""
    for part in list(_OPEN):
        try:
            part.close()
        except Exception as error:
            log.error("%s was not closed at the end: %s", type(part).__name__, error)
