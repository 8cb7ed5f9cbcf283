"""Keep spans of time until they are written: each thread in a list of its own, without a lock."""

import threading
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count
from typing import Any

CAPACITY = 50_000
"""Newest spans of each thread that are kept between two writes."""


@dataclass(frozen=True, slots=True)
class RecordedSpan:
    """Something that took from one time to another."""

    name: str
    start_s: float
    end_s: float
    lanes: str  # the group of tracks of what overlaps; "": the track of its thread
    args: dict[str, Any]


class ThreadSpans:
    """The spans of one thread that are not written yet. The thread alone appends.

    number: tells it from all other threads of the process, whatever their names.
    """

    def __init__(self, thread: threading.Thread, number: int, capacity: int) -> None:
        self.name, self.number = thread.name, number
        self._thread = thread
        self._kept: deque[RecordedSpan] = deque(maxlen=capacity)
        self._added = self._taken = 0

    def add(self, one: RecordedSpan) -> None:
        """Keep a span, in the place of the oldest one if there are too many."""
        self._kept.append(one)
        self._added += 1

    def take(self) -> list[RecordedSpan]:
        """Return what is kept, and keep it no longer. One thread at a time may take."""
        taken = [self._kept.popleft() for _ in range(len(self._kept))]  # others only add
        self._taken += len(taken)
        return taken

    @property
    def dropped(self) -> int:
        """How many were added, but there was no room for them."""
        return max(self._added - self._taken - len(self._kept), 0)

    @property
    def is_over(self) -> bool:
        """Whether nothing will be added any more."""
        return not self._thread.is_alive()


class SpanRecorder:
    """The spans of a process that are not written yet. Usable from any thread."""

    def __init__(self, capacity: int = CAPACITY) -> None:
        self._capacity, self._own, self._lock = capacity, threading.local(), threading.Lock()
        self._threads: list[ThreadSpans] = []
        self._numbers: Iterator[int] = count()
        self._dropped = 0  # of threads that have ended

    def add(self, one: RecordedSpan) -> None:
        """Keep a span of the calling thread."""
        spans = getattr(self._own, "spans", None)
        if spans is None:
            thread = threading.current_thread()
            with self._lock:
                spans = ThreadSpans(thread, next(self._numbers), self._capacity)
                self._threads.append(spans)
            self._own.spans = spans
        spans.add(one)

    def take(self) -> list[tuple[ThreadSpans, list[RecordedSpan]]]:
        """Return what was added since it was last asked, by thread, and keep it no longer."""
        with self._lock:
            over = [thread for thread in self._threads if thread.is_over]  # before they are asked
            taken = [(thread, thread.take()) for thread in self._threads]
            self._dropped += sum(thread.dropped for thread in over)
            self._threads = [thread for thread in self._threads if thread not in over]
        return [(thread, spans) for thread, spans in taken if spans]

    @property
    def dropped(self) -> int:
        """How many spans there was no room for between two writes: the oldest of their threads."""
        with self._lock:
            return self._dropped + sum(thread.dropped for thread in self._threads)
