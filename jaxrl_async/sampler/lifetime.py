"""How a part with a thread of its own ends: with the program, with its last user, or in a fork not
at all. Pure host code.

A daemon thread that is still inside a program when the interpreter goes aborts the whole process,
so what is open is closed before. A forked process has the parts but not their threads.
"""

import atexit
import logging
import math
import os
import threading
import weakref
from collections.abc import Callable
from typing import Any

from jaxrl_async.errors import RolloutError

log = logging.getLogger(__name__)

FORGOTTEN_S = 1.0
"""How often a thread with nothing to do looks whether anybody still holds its part, seconds."""

_OPEN: "weakref.WeakSet[Any]" = weakref.WeakSet()
os.register_at_fork(after_in_child=_OPEN.clear)


def close_at_exit(part: Any) -> None:
    """Have `part.close()` called when the program ends; does not keep the part alive."""
    if not _OPEN:
        atexit.unregister(_close_all)
        atexit.register(_close_all)  # after jax's own: what was registered last is called first
    _OPEN.add(part)


def _close_all() -> None:
    for part in list(_OPEN):
        try:
            part.close()
        except Exception as error:
            log.error("%s was not closed at the end: %s", type(part).__name__, error)


def serve(
    held: "weakref.ref[Any]", wake: threading.Event, go_on: Callable[[Any], float | None]
) -> None:
    """The thread of a part: do `go_on(part)` again and again, until it says None or nobody holds
    the part any more.

    go_on gives the time to sleep after it, seconds: 0: none; infinite: until `wake` is set. While
    it sleeps only its users keep the part.
    """
    part = held()
    while part is not None:
        sleep_s = go_on(part)
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
