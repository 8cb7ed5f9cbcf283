"""Make the next examples on a separate thread while devices compute with the previous ones."""

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Generic, TypeVar

T = TypeVar("T")


class Ahead(Generic[T]):
    """Values from a stream, one made ahead; the sequence of values is the stream's.

    make: takes the next value from the stream; called by one thread at a time.
    place: returns the stream's state, from which it can continue.
    """

    def __init__(self, make: Callable[[], T], place: Callable[[], Any]) -> None:
        self._make, self._place = make, place
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="examples")
        self._next: Future[tuple[T, Any]] | None = None
        self._after: Any = None  # the place after the last value that was taken

    def take(self) -> T:
        """Return the next value, and start making the one after it. Raises the errors of `make`."""
        value, self._after = (self._next or self._thread.submit(self._one)).result()
        self._next = self._thread.submit(self._one)
        return value

    @property
    def place(self) -> Any:
        """The stream's state after the last value that was taken, not the one made ahead."""
        return self._place() if self._next is None else self._after

    def close(self) -> None:
        """Wait for the value that is made ahead, and discard it."""
        self._thread.shutdown(cancel_futures=True)

    def _one(self) -> tuple[T, Any]:
        value = self._make()
        return value, self._place()
