"""Keep spans of time until they are written: each thread in a separate list, without a lock."""

import threading
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count
from typing import Any

CAPACITY = 50_000
"""Maximum number of spans of each thread between two writes; the newest are kept."""


@dataclass(frozen=True, slots=True)
class RecordedSpan:
    """A named interval of time."""

    name: str
    start_s: float
    end_s: float
    lanes: str  # the group of tracks for overlapping spans; "": the track of its thread
    args: dict[str, Any]


class ThreadSpans:
    """The spans of one thread that are not written yet. Only that thread appends.

    number: distinguishes it from all other threads of the process, even if names are equal.
    """

    def __init__(self, thread: threading.Thread, number: int, capacity: int) -> None:
        self.name, self.number = thread.name, number
        self._thread = thread
        self._kept: deque[RecordedSpan] = deque(maxlen=capacity)
        self._added = self._taken = 0

    def add(self, one: RecordedSpan) -> None:
        """Keep a span, replacing the oldest one if there are too many."""
        self._kept.append(one)
        self._added += 1

    def take(self) -> list[RecordedSpan]:
        """Return and remove the kept spans. Only one thread at a time may call this."""
        taken = [self._kept.popleft() for _ in range(len(self._kept))]  # others only add
        self._taken += len(taken)
        return taken

    @property
    def dropped(self) -> int:
        """Number of added spans for which there was no room."""
        return max(self._added - self._taken - len(self._kept), 0)

    @property
    def is_over(self) -> bool:
        """Whether no more spans will be added."""
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
        """Return and remove the spans added since the last call, by thread."""
        with self._lock:
            over = [thread for thread in self._threads if thread.is_over]  # checked before taking
            taken = [(thread, thread.take()) for thread in self._threads]
            self._dropped += sum(thread.dropped for thread in over)
            self._threads = [thread for thread in self._threads if thread not in over]
        return [(thread, spans) for thread, spans in taken if spans]

    @property
    def dropped(self) -> int:
        """Number of spans, the oldest of their threads, for which there was no room between two
        writes."""
        with self._lock:
            return self._dropped + sum(thread.dropped for thread in self._threads)
