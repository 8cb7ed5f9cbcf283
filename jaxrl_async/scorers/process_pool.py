"""A pool of processes that judge answers, each used by one thread at a time. Needs no JAX."""

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Generic, Protocol, TypeVar


class Closes(Protocol):
    """A process that starts when first needed, and restarts after it ended."""

    def close(self) -> None:
        """End the process if it runs."""


ProcessT = TypeVar("ProcessT", bound=Closes)


class ProcessPool(Generic[ProcessT]):
    """Processes that threads borrow; the one returned last is taken next. Thread safe."""

    def __init__(self, processes: Sequence[ProcessT]) -> None:
        """Make the pool; no process starts yet."""
        self.free = list(processes)
        self._slots, self._lock = threading.BoundedSemaphore(len(processes)), threading.Lock()

    @contextmanager
    def one(self) -> Iterator[ProcessT]:
        """Give a process to this thread, waiting until one is free."""
        with self._slots:
            with self._lock:
                process = self.free.pop()
            try:
                yield process
            finally:
                with self._lock:
                    self.free.append(process)

    def close(self) -> None:
        """End the processes that are not borrowed; each restarts when needed."""
        with self._lock:
            close_all(self.free)


def close_all(processes: Sequence[Closes]) -> None:
    """End these processes."""
    for process in processes:
        process.close()
