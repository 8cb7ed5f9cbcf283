"""Work on another thread, while the side that waits for it is kept informed."""

import threading
from collections.abc import Callable
from concurrent.futures import Future, wait
from typing import TypeVar

T = TypeVar("T")

POLL_S = 0.1
"""Longest wait before the other side gets a sign of life, or a condition is checked, seconds."""


def begin(work: Callable[[], T], name: str) -> Future[T]:
    """Start work on a daemon thread of this name; return its result to come."""
    done: Future[T] = Future()

    def run() -> None:
        try:
            done.set_result(work())
        except BaseException as error:  # raised where the result is asked for
            done.set_exception(error)

    threading.Thread(target=run, name=name, daemon=True).start()
    return done


def result_of(done: Future[T], waiting: Callable[[], None]) -> T:
    """Return the result of work, or raise its exception; call `waiting` every 0.1 s until then. An
    exception of `waiting` ends the wait."""
    while not wait([done], POLL_S).done:
        waiting()
    return done.result()
