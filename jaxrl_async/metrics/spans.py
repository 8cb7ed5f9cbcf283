"""Record a timeline as spans of time, written into the run's folder for https://ui.perfetto.dev.

    with span("prefill"): ...          on the track of its thread, where spans nest
    add_span(..., lanes="scorer")      for overlapping work: each on the first track that is free

If nothing is recorded, a span costs at most two readings of the clock.
"""

import logging
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING

from jaxrl_async.later import Later
from jaxrl_async.metrics.trace_file import (
    TRACE_CLOCK,
    RecordedSpan,
    SpanRecorder,
    TraceFile,
    Tracks,
)

if TYPE_CHECKING:
    from jaxrl_async.metrics import otlp
else:
    otlp = Later("jaxrl_async.metrics.otlp")

log = logging.getLogger(__name__)

TRACE_VARIABLE = "JAXRL_ASYNC_TRACE"
"""Environment variable of a sampler process: the file for its spans."""
OTLP_VARIABLES = "OTEL_EXPORTER_OTLP_"
"""Beginning of the environment variables that may name a collector (metrics/otlp.py)."""
WRITE_EVERY_S = 60.0
"""Interval between two writes of recorded spans, seconds."""

_recorder: SpanRecorder | None = None
_write: Callable[[], None] | None = None  # writes the spans recorded so far
annotate: Callable[[str], AbstractContextManager[object]] | None = None
"""Also marks the time inside a `with` in another trace (profiling.py); None: no other trace."""


class span:
    """Record the time inside a `with`, if spans are recorded."""

    __slots__ = ("_args", "_lanes", "_mark", "_name", "_start_s")

    def __init__(self, name: str, lanes: str = "", **args: object) -> None:
        """Set the name and attributes (numbers and texts) of the span; lanes: see RecordedSpan."""
        self._name, self._lanes, self._args = name, lanes, args
        self._mark = None if annotate is None else annotate(name)

    def __enter__(self) -> None:
        self._start_s = TRACE_CLOCK()
        if self._mark is not None:
            self._mark.__enter__()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._mark is not None:
            self._mark.__exit__(kind, error, trace)
        if _recorder is not None:
            end_s = TRACE_CLOCK()
            _recorder.add(RecordedSpan(self._name, self._start_s, end_s, self._lanes, self._args))


def add_span(name: str, start_s: float, end_s: float, lanes: str = "", **args: object) -> None:
    """Record a span from start_s to end_s of TRACE_CLOCK, if spans are recorded."""
    if _recorder is not None:
        _recorder.add(RecordedSpan(name, start_s, end_s, lanes, args))


@contextmanager
def recorded_spans(
    path: Path | None, process: str, is_ours: Callable[[], bool] = lambda: True
) -> Iterator[None]:
    """Record the spans of this process inside the `with`, and write them every WRITE_EVERY_S and at
    its end, even after an exception. Written spans are also sent to a collector if OpenTelemetry's
    variables name one (metrics/otlp.py).

    path: the file; None: nothing is recorded. Nothing is written while its folder is missing.
    process: the process's name in the file.
    is_ours: called before each write; returns whether the folder belongs to this run, so a run
        that was refused the folder does not overwrite another run's spans.
    """
    global _recorder, _write
    if path is None or _recorder is not None:
        yield
        return
    recorder, file = SpanRecorder(), TraceFile(path, process)
    run = path.parent if path.name.startswith("trace.") else path.parent.parent
    ended, writing = threading.Event(), threading.Lock()
    unsent: Tracks = []  # for a collector

    def write() -> None:
        with writing:
            if not (path.parent.is_dir() and is_ours()):
                return
            taken = recorder.take()
            try:
                tracks = file.add(taken, recorder.dropped)
            except OSError as error:
                log.warning("the spans could not be written to %s: %s", path, error)
            else:
                named = any(name.startswith(OTLP_VARIABLES) for name in os.environ)
                unsent.extend(tracks if named and otlp.address() else ())

    def send() -> None:  # a collector that does not answer does not delay writes
        with writing:
            tracks = unsent.copy()
            unsent.clear()
        if tracks:
            otlp.send(tracks, process, run.name, time.time() - TRACE_CLOCK())

    def write_now_and_then() -> None:
        while not ended.wait(WRITE_EVERY_S):
            write()
            send()

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
        send()
        if dropped := file.dropped(recorder.dropped):
            log.warning("%s: no room for the oldest %d spans", path, dropped)
        if file.is_there:
            log.info("spans: %s, for https://ui.perfetto.dev", path)


def write_spans() -> None:
    """Write the spans recorded so far, if spans are recorded."""
    if _write is not None:
        _write()
