"""Record who was busy when, as spans of time: written beside the run for https://ui.perfetto.dev.

    with span("prefill"): ...          on the track of its thread, where spans nest
    add_span(..., lanes="scorer")      of work that overlaps: each on the first track that is free

Each thread appends to a list of its own, without a lock. While nothing is recorded a span costs two
readings of the clock at most.
"""

import json
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from jaxrl_async.metrics import otlp

log = logging.getLogger(__name__)

TRACE_FILE = "trace.json"
"""In the run's folder: the spans of its process (of further ones trace.1.json, ...)."""
TRACE_VARIABLE = "JAXRL_ASYNC_TRACE"
"""Environment variable of a sampler process: the file that its spans are written to."""
WRITE_EVERY_S = 60.0
"""Seconds between two writes of the file while the run goes on."""
CAPACITY = 50_000
"""Newest spans of each thread that are kept."""
TRACE_CLOCK = time.perf_counter
"""The clock of all spans, seconds. On Linux it is the same in all processes of a machine."""


@dataclass(frozen=True, slots=True)
class RecordedSpan:
    """Something that took from one time to another."""

    name: str
    start_s: float
    end_s: float
    lanes: str  # the group of tracks of what overlaps; "": the track of its thread
    args: dict[str, Any]


class ThreadSpans:
    """The spans of one thread, which alone appends."""

    def __init__(self, name: str, capacity: int) -> None:
        self.name, self.count = name, 0
        self.kept: deque[RecordedSpan] = deque(maxlen=capacity)

    def add(self, one: RecordedSpan) -> None:
        """Keep a span, in the place of the oldest one if there are too many."""
        self.kept.append(one)
        self.count += 1


class SpanRecorder:
    """The spans of a process. Usable from any thread."""

    def __init__(self, capacity: int = CAPACITY) -> None:
        self._capacity, self._own, self._lock = capacity, threading.local(), threading.Lock()
        self._threads: list[ThreadSpans] = []

    def add(self, one: RecordedSpan) -> None:
        """Keep a span on the track of the calling thread."""
        spans = getattr(self._own, "spans", None)
        if spans is None:
            spans = self._own.spans = ThreadSpans(threading.current_thread().name, self._capacity)
            with self._lock:
                self._threads.append(spans)
        spans.add(one)

    def tracks(self) -> list[tuple[str, list[RecordedSpan]]]:
        """Return the spans of each track by start; a span that holds others comes before them."""
        with self._lock:
            threads = list(self._threads)
        tracks, overlapping = [], dict[str, list[RecordedSpan]]()
        for thread in threads:
            kept = list(thread.kept)
            if own := [s for s in kept if not s.lanes]:
                tracks.append((thread.name, in_order(own)))
            for one in kept:
                if one.lanes:
                    overlapping.setdefault(one.lanes, []).append(one)
        for name, spans in overlapping.items():
            lanes = in_lanes(spans)
            width = len(str(len(lanes)))
            tracks += [(f"{name} {i:0{width}}", lane) for i, lane in enumerate(lanes, 1)]
        return tracks

    @property
    def dropped(self) -> int:
        """How many spans there was no room for: the oldest of their threads."""
        with self._lock:
            return sum(thread.count - len(thread.kept) for thread in self._threads)


_recorder: SpanRecorder | None = None
_write: Callable[[], None] | None = None  # brings what is recorded so far to its file


class span:
    """Record the time inside a `with`, if spans are recorded."""

    __slots__ = ("_args", "_lanes", "_name", "_start_s")

    def __init__(self, name: str, lanes: str = "", **args: Any) -> None:
        """Name it, and what is said of it (numbers and texts); lanes: see RecordedSpan."""
        self._name, self._lanes, self._args = name, lanes, args

    def __enter__(self) -> None:
        self._start_s = TRACE_CLOCK()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if _recorder is not None:
            end_s = TRACE_CLOCK()
            _recorder.add(RecordedSpan(self._name, self._start_s, end_s, self._lanes, self._args))


def add_span(name: str, start_s: float, end_s: float, lanes: str = "", **args: Any) -> None:
    """Record what took from start_s to end_s of TRACE_CLOCK, if spans are recorded."""
    if _recorder is not None:
        _recorder.add(RecordedSpan(name, start_s, end_s, lanes, args))


@contextmanager
def recorded_spans(
    path: Path | None, process: str, is_ours: Callable[[], bool] = lambda: True
) -> Iterator[None]:
    """Record the spans of this process inside the `with`, and write them every WRITE_EVERY_S and at
    its end, whatever ends it; then they are also sent to a collector that OpenTelemetry's variables
    name (metrics/otlp.py).

    path: the file; None: nothing is recorded. If its folder is not there at the end nothing is
        written.
    process: what the process is called there.
    is_ours: asked before they are written; whether the folder is this run's, so that one which was
        refused leaves the spans of another alone.
    """
    global _recorder, _write
    if path is None or _recorder is not None:
        yield
        return
    recorder, ended, writing = SpanRecorder(), threading.Event(), threading.Lock()

    def write() -> None:
        try:
            with writing:
                if path.parent.is_dir() and is_ours():
                    write_trace(recorder, path, process)
        except OSError as error:
            log.warning("the spans could not be written to %s: %s", path, error)

    def write_now_and_then() -> None:
        while not ended.wait(WRITE_EVERY_S):
            write()

    thread = threading.Thread(target=write_now_and_then, name="spans", daemon=True)
    _recorder, _write = recorder, write
    thread.start()
    try:
        yield
    finally:
        _recorder = _write = None
        ended.set()
        thread.join()
        write()
        if recorder.dropped:
            log.warning("%s: no room for the oldest %d spans", path, recorder.dropped)
        if path.exists() and is_ours():
            log.info("spans: %s, which https://ui.perfetto.dev opens", path)
            run = path.parent if path.name.startswith("trace.") else path.parent.parent
            otlp.send(recorder.tracks(), process, run.name, time.time() - TRACE_CLOCK())


def write_spans() -> None:
    """Write what is recorded so far, if spans are recorded."""
    if _write is not None:
        _write()


def write_trace(recorder: SpanRecorder, path: Path, process: str) -> None:
    """Write the spans in Chrome's JSON format of traces; times in microseconds of TRACE_CLOCK."""
    pid = os.getpid()
    began = {"wall_clock_s": time.time(), "trace_clock_s": TRACE_CLOCK()}
    fresh = path.with_name(path.name + ".tmp")
    with fresh.open("w", encoding="utf-8") as file:
        file.write('{"displayTimeUnit": "ms", "otherData": ')
        file.write(json.dumps({"dropped": recorder.dropped, "written_at": began}))
        file.write(',\n"traceEvents": [\n')
        file.write(json.dumps(_named("process_name", pid, 0, process)))
        for tid, (name, spans) in enumerate(recorder.tracks(), 1):
            file.write(",\n" + json.dumps(_named("thread_name", pid, tid, name)))
            for one in spans:
                file.write(",\n" + json.dumps(_event(one, pid, tid)))
        file.write("\n]}\n")
    fresh.replace(path)


def in_order(spans: list[RecordedSpan]) -> list[RecordedSpan]:
    """Return the spans by start; one that holds others comes before them."""
    return sorted(spans, key=lambda s: (s.start_s, -s.end_s))


def in_lanes(spans: list[RecordedSpan]) -> list[list[RecordedSpan]]:
    """Deal spans to as few lanes as hold them without an overlap: each to the first free one."""
    lanes: list[list[RecordedSpan]] = []
    for one in in_order(spans):
        free = next((lane for lane in lanes if lane[-1].end_s <= one.start_s), None)
        if free is None:
            lanes.append([one])
        else:
            free.append(one)
    return lanes


def _event(one: RecordedSpan, pid: int, tid: int) -> dict[str, Any]:
    start_ns, end_ns = int(one.start_s * 1e9), int(one.end_s * 1e9)
    own = {"ts": start_ns / 1000, "dur": (end_ns - start_ns) / 1000}
    return {"name": one.name, "ph": "X", "pid": pid, "tid": tid, **own, "args": one.args}


def _named(what: str, pid: int, tid: int, name: str) -> dict[str, Any]:
    return {"name": what, "ph": "M", "pid": pid, "tid": tid, "args": {"name": name}}
