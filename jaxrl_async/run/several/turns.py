"""Whose turn it is on the trainer's slice: whoever has asked first."""

import threading
from collections import deque


class Turns:
    """A lock that is handed on in the order of asking. A run asks once its groups are there: the
    run whose batch is ready first steps next, and none waits for more than one step of each other.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._taken = False
        self._waiting: deque[threading.Event] = deque()

    def __enter__(self) -> None:
        with self._lock:
            if not self._taken:
                self._taken = True
                return
            mine = threading.Event()
            self._waiting.append(mine)
        mine.wait()

    def __exit__(self, *_: object) -> None:
        with self._lock:
            if self._waiting:
                self._waiting.popleft().set()
            else:
                self._taken = False
