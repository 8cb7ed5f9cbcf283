"""Runs work on another thread while the waiting side gets signs of life."""

import threading
from collections.abc import Callable
from concurrent.futures import Future, wait
from typing import TypeVar

T = TypeVar("T")

POLL_S = 0.1
"""Maximum time between two signs of life to the other side, or two checks of a condition,
seconds."""


def run_in_thread(work: Callable[[], T], name: str) -> Future[T]:
    """Start work on a daemon thread with this name; return a future of its result."""
    done: Future[T] = Future()

    def run() -> None:
        try:
            done.set_result(work())
        except BaseException as error:  # raised by result()
            done.set_exception(error)

    threading.Thread(target=run, name=name, daemon=True).start()
    return done


def result_of(done: Future[T], waiting: Callable[[], None]) -> T:
    """Return the result of work, or raise its exception; call `waiting` every 0.1 s until then. An
    exception of `waiting` ends the wait."""
    while not wait([done], POLL_S).done:
        waiting()
    return done.result()
