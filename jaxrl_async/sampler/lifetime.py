"""How long a part with a thread of its own lives: until it is closed, the program ends, or its last
user has gone. Pure host code.

A daemon thread that is still inside a program when the interpreter exits aborts the whole process,
so open parts are closed before that. A forked process has copies of the parts, but not their
threads.
"""

import atexit
import logging
import math
import os
import threading
import weakref
from collections.abc import Callable
from typing import Any

from jaxrl_async.errors import Closed, RolloutError

log = logging.getLogger(__name__)

FORGOTTEN_S = 1.0
"""How often an idle thread checks whether anybody still holds its part, seconds."""

_OPEN: "weakref.WeakSet[Any]" = weakref.WeakSet()
os.register_at_fork(after_in_child=_OPEN.clear)


class Lifetime:
    """The thread of a part, from its first start to its end, and the lock that guards the end.

    A part (Sampler, Router, ForeignSampler) owns one. While the thread sleeps, only the users of
    the part keep it alive.
    """

    def __init__(self, part: Any, step: Callable[[Any], float | None], *, name: str) -> None:
        """Make the lifetime of `part`, which it does not keep alive.

        Args:
            part: has close(), which is called when the program ends.
            step: what the thread does again and again, as in `serve`.
            name: of the thread.
        """
        self.lock = threading.RLock()  # guards all below, and what users hand to the thread
        self.wake = threading.Event()  # ends the thread's sleep
        self.closed = False
        self.error: BaseException | None = None  # that ended the thread
        self.thread: threading.Thread | None = None
        self._part, self._step, self._name = weakref.ref(part), step, name
        self._kind, self._pid = type(part).__name__, os.getpid()

    def start(self) -> None:
        """Start the thread unless it was started or closed before."""
        with self.lock:
            if self.thread is not None or self.closed:
                return
            self.thread = threading.Thread(
                target=serve, args=(self._part, self.wake, self._step), name=self._name, daemon=True
            )
            close_at_exit(self._part())
            self.thread.start()

    def stop(self, timeout_s: float | None = None) -> bool:
        """Close, and wait for the thread to end, unless this is the thread. Return False if it has
        not ended after timeout_s."""
        with self.lock:
            self.closed = True
        self.wake.set()
        if self.thread is None or self.is_current:
            return True
        self.thread.join(timeout_s)
        return not self.thread.is_alive()

    def fail(self, error: BaseException) -> None:
        """Close because of this error, which ended the thread."""
        with self.lock:
            self.error, self.closed = error, True

    @property
    def is_current(self) -> bool:
        """Whether the caller runs on the thread."""
        return self.thread is threading.current_thread()

    @property
    def is_forked(self) -> bool:
        """Whether this process is a fork of the one that the thread runs in."""
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
                f"this {self._kind} was made in process {self._pid}, and its thread is there: "
                f"process {os.getpid()}, a fork of it, would wait for ever. Make a {self._kind} in "
                "each process, and start processes with multiprocessing's 'spawn'."
            )

    def check_waits(self) -> None:
        """Raise RolloutError where waiting for the thread would never end: on the thread itself, or
        in a forked process."""
        self.check_process()
        if self.is_current:
            raise RolloutError(
                f"a callback of a request waits for the {self._kind} on whose own thread it runs: "
                "it would wait for ever. Use start_many, which does not wait, or another thread."
            )


def close_at_exit(part: Any) -> None:
    """Have `part.close()` called when the program ends; do not keep the part alive."""
    if not _OPEN:
        atexit.unregister(_close_all)
        atexit.register(_close_all)  # after jax's own: what was registered last is called first
    _OPEN.add(part)


def _close_all() -> None:
    """Close all parts that are open."""
    for part in list(_OPEN):
        try:
            part.close()
        except Exception as error:
            log.error("%s was not closed at the end: %s", type(part).__name__, error)


def serve(
    held: "weakref.ref[Any]", wake: threading.Event, step: Callable[[Any], float | None]
) -> None:
    """Run the thread of a part: call `step(part)` again and again, until it returns None or nobody
    holds the part.

    Args:
        held: the part.
        wake: ends the sleep between two steps.
        step: returns how long to sleep after it, seconds; 0: not at all; infinite: until `wake` is
            set.
    """
    part = held()
    while part is not None:
        sleep_s = step(part)
        if sleep_s is None:
            return
        if sleep_s:
            part = None
            while not wake.wait(min(sleep_s, FORGOTTEN_S)) and math.isinf(sleep_s):
                if held() is None:
                    return
            wake.clear()
            part = held()


def check_here(part: Any, pid: int, threads: tuple[Any, ...] = ()) -> None:
    """Raise RolloutError in a process forked from the one `pid` that made the part, and on one of
    its own threads: there it would wait for ever.
    """
    name = type(part).__name__
    if os.getpid() != pid:
        raise RolloutError(
            f"this {name} was made in process {pid}, and its thread is there: process "
            f"{os.getpid()}, a fork of it, would wait for ever. Make a {name} in each process, and "
            "start processes with multiprocessing's 'spawn'."
        )
    if threading.current_thread() in threads:
        raise RolloutError(
            f"a callback of a request waits for the {name} on whose own thread it runs: it would "
            "wait for ever. Use start_many, which does not wait, or another thread."
        )
