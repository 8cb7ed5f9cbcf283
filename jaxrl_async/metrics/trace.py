"""Who did what when: spans by thread, as a file that Perfetto and chrome://tracing open."""

import json
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

MAX_EVENTS = 200_000
"""Newest events kept: some 40 MB; older ones are forgotten, and the file says how many."""


class Event(NamedTuple):
    """One event in the making. Times in seconds of the trace's clock."""

    phase: str  # "X" a span, "i" an instant, "C" a counter: the words of the format
    name: str
    thread: int
    at_s: float
    duration_s: float
    args: Mapping[str, Any]


class Trace:
    """Collects spans from any thread; `close()` writes them. Without a path it does nothing."""

    def __init__(
        self,
        path: Path | None = None,
        *,
        max_events: int = MAX_EVENTS,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._path, self._clock = path, clock
        self._events: deque[Event] = deque(maxlen=max_events)
        self._threads: dict[int, str] = {}
        self._added = 0
        self._start = clock()
        self._lock = threading.Lock()

    @contextmanager
    def span(self, name: str, **args: Any) -> Iterator[None]:
        """Time what is inside the `with`, also where it raises. `args` are shown with the span."""
        if self._path is None:
            yield
            return
        start = self._clock()
        try:
            yield
        finally:
            self._add("X", name, start, self._clock() - start, args)

    def instant(self, name: str, **args: Any) -> None:
        """Mark a moment: a weight swap, a stop."""
        if self._path is not None:
            self._add("i", name, self._clock(), 0.0, args)

    def counter(self, name: str, value: float) -> None:
        """Draw a value over time: groups ready, slots in use."""
        if self._path is not None:
            self._add("C", name, self._clock(), 0.0, {"value": value})

    def _add(
        self, phase: str, name: str, at_s: float, duration_s: float, args: Mapping[str, Any]
    ) -> None:
        thread = threading.current_thread()
        event = Event(phase, name, thread.native_id or 0, at_s - self._start, duration_s, args)
        with self._lock:
            self._threads[event.thread] = thread.name
            self._events.append(event)
            self._added += 1

    def close(self) -> None:
        """Write what was collected and collect no more. A second call does nothing."""
        with self._lock:
            path, self._path = self._path, None
            events, threads = list(self._events), dict(self._threads)
            self._events.clear()
        if path is not None:
            fresh = path.with_name(path.name + ".tmp")
            fresh.write_text(
                json.dumps(document(events, threads, self._added - len(events))), "utf-8"
            )
            fresh.replace(path)


NO_TRACE = Trace()
"""Collects nothing: the default where a part takes a trace."""


def document(events: list[Event], threads: Mapping[int, str], forgotten: int) -> dict[str, Any]:
    """The trace-event format: times in microseconds; thread names as metadata events."""
    names = [
        {"ph": "M", "name": "thread_name", "pid": 1, "tid": tid, "args": {"name": name}}
        for tid, name in sorted(threads.items())
    ]
    return {
        "traceEvents": [*names, *(_event(e) for e in events)],
        "displayTimeUnit": "ms",
        "otherData": {"forgotten_events": forgotten},
    }


_EXTRA: Mapping[str, Callable[[Event], dict[str, Any]]] = {
    "X": lambda e: {"dur": e.duration_s * 1e6},
    "i": lambda e: {"s": "t"},  # drawn on its thread only
    "C": lambda e: {},
}


def _event(event: Event) -> dict[str, Any]:
    args = {
        k: v if isinstance(v, int | float | str | bool) else str(v) for k, v in event.args.items()
    }
    common = {"ph": event.phase, "name": event.name, "pid": 1, "tid": event.thread}
    extra = _EXTRA[event.phase](event)
    return {**common, "ts": event.at_s * 1e6, **extra, "args": args}
