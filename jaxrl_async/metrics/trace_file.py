"""Write spans as a trace for https://ui.perfetto.dev, in parts: written spans need not stay in
memory, and are not written again with the next part.

    {"displayTimeUnit": "ms", "otherData": {"dropped": ..., "written_at": ...}},
    "traceEvents": [
    {"name": "process_name", ...},       one event per line, in no order
    ...
    ]}                                   overwritten by the next part

A full file is renamed older.NAME, replacing the previous one.
"""

import json
import os
import re
import threading
import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path
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

    def add(self, span: RecordedSpan) -> None:
        """Keep a span, replacing the oldest one if there are too many."""
        self._kept.append(span)
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

    def add(self, span: RecordedSpan) -> None:
        """Keep a span of the calling thread."""
        spans = getattr(self._own, "spans", None)
        if spans is None:
            thread = threading.current_thread()
            with self._lock:
                spans = ThreadSpans(thread, next(self._numbers), self._capacity)
                self._threads.append(spans)
            self._own.spans = spans
        spans.add(span)

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


MOST_SPANS = 250_000
"""Maximum number of spans of a file, about 30 MB; then the next one begins."""
OLDER = "older."
"""Prefix of the name of the older of the two files."""
TRACE_CLOCK = time.perf_counter
"""The clock of all spans, seconds. On Linux it is the same in all processes of a machine."""
FIRST_LINE_BYTES = 200
"""Size of the first line, which is rewritten with each part."""
LAST_LINE = b"\n]}\n"

Taken = Sequence[tuple[ThreadSpans, Sequence[RecordedSpan]]]
"""The recorded spans of each thread."""
Tracks = list[tuple[str, list[RecordedSpan]]]
"""Name and spans of each track."""


class Lanes:
    """Tracks for overlapping spans: each span goes to the first track that is free."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._ends_s: list[float] = []  # end of the last span of each track

    def deal(self, spans: Iterable[RecordedSpan]) -> Tracks:
        """Assign spans to tracks, after the spans of earlier calls; return the new ones by
        track."""
        dealt: dict[int, list[RecordedSpan]] = {}
        for span in in_order(spans):
            free = (i for i, end_s in enumerate(self._ends_s) if end_s <= span.start_s)
            index = next(free, len(self._ends_s))
            self._ends_s[index : index + 1] = [span.end_s]
            dealt.setdefault(index, []).append(span)
        return [(f"{self._name} {index + 1:03}", dealt[index]) for index in sorted(dealt)]


class TraceFile:
    """The file of one process's spans. For one thread at a time."""

    def __init__(self, path: Path, process: str, most_spans: int = MOST_SPANS) -> None:
        """Prepare to write, and write nothing yet.

        process: the process's name in the file.
        most_spans: maximum number of spans of a file; then the next one begins.
        """
        self._path, self._process, self._most = path, process, most_spans
        self._older = path.with_name(OLDER + path.name)
        self._lanes: dict[str, Lanes] = {}
        self._numbers: dict[int | str, int] = {}  # of the tracks, the same in both files
        self._next_number: Iterator[int] = count(1)
        self._named: set[int | str] = set()  # the tracks that the file names
        self._end = self._count = self._noted = 0  # where its last line begins (0: no file), its
        # spans, and how many it says were dropped
        self._older_count = self._older_noted = 0  # spans of the older file, and what it says
        self._lost = 0  # spans that could not be written, or are no longer in a file

    @property
    def is_there(self) -> bool:
        """Whether anything was written."""
        return self._end > 0

    def dropped(self, not_taken: int) -> int:
        """Return the number of spans in neither file; not_taken: spans never passed to `add`."""
        return not_taken + self._lost

    def add(self, taken: Taken, not_taken: int = 0) -> Tracks:
        """Append spans to the existing ones; return them by track.

        not_taken: total number of spans that were never passed to this.

        Raises OSError if writing fails: these spans are then lost, but no earlier ones.
        """
        tracks: list[tuple[int | str, str, list[RecordedSpan]]] = [
            (thread.number, thread.name, in_order(own)) for thread, own in _own(taken)
        ]
        for name, spans in _overlapping(taken).items():
            lanes = self._lanes.setdefault(name, Lanes(name))
            tracks += [(track, track, own) for track, own in lanes.deal(spans)]
        count = sum(len(own) for *_, own in tracks)
        try:
            self._write(tracks, not_taken)
        except OSError:
            self._lost += count
            raise
        self._count += count
        return [(name, own) for _, name, own in tracks]

    def _write(
        self, tracks: Sequence[tuple[int | str, str, list[RecordedSpan]]], not_taken: int
    ) -> None:
        if self._end and not self._path.exists():
            self._lost += self._count  # the file was removed: begin another one
            self._begin()
        if self._count >= self._most:
            self._begin_next()
        pid, named, events = os.getpid(), set(self._named), list[dict[str, Any]]()
        if not self._end:
            events.append(_metadata_event("process_name", pid, 0, self._process))
        for key, name, spans in tracks:
            if key not in self._numbers:
                self._numbers[key] = next(self._next_number)
            number = self._numbers[key]
            if key not in named:
                named.add(key)
                events.append(_metadata_event("thread_name", pid, number, name))
            events += [_event(span, pid, number) for span in spans]
        lines = ",\n".join(json.dumps(event, default=str) for event in events).encode()
        noted = self.dropped(not_taken) - self._older_noted
        first = _first_line(noted)
        if self._end:
            with self._path.open("r+b") as file:
                file.seek(self._end)
                file.write((b",\n" + lines if lines else b"") + LAST_LINE)
                end = file.tell() - len(LAST_LINE)
                file.truncate()
                file.seek(0)
                file.write(first)
        else:
            if not self._older_count:
                self._older.unlink(missing_ok=True)  # of an earlier run
            content = first + b'"traceEvents": [\n' + lines + LAST_LINE
            self._path.write_bytes(content)
            end = len(content) - len(LAST_LINE)
        self._end, self._named, self._noted = end, named, noted

    def _begin_next(self) -> None:
        """Replace the older file with the full one."""
        self._path.replace(self._older)
        self._lost += self._older_count
        self._older_count, self._older_noted = self._count, self._noted
        # most other tracks are of threads that have ended
        self._numbers = {key: n for key, n in self._numbers.items() if key in self._named}
        self._begin()

    def _begin(self) -> None:
        """Make the next write create a new file."""
        self._end = self._count = self._noted = 0
        self._named = set()


def in_order(spans: Iterable[RecordedSpan]) -> list[RecordedSpan]:
    """Return spans by start; a span that contains others comes before them."""
    return sorted(spans, key=lambda s: (s.start_s, -s.end_s))


def _own(taken: Taken) -> list[tuple[ThreadSpans, list[RecordedSpan]]]:
    """Return the spans on the tracks of their threads."""
    own = ((thread, [s for s in spans if not s.lanes]) for thread, spans in taken)
    return [(thread, spans) for thread, spans in own if spans]


def _overlapping(taken: Taken) -> dict[str, list[RecordedSpan]]:
    """Return the overlapping spans, by the name of their lanes."""
    by_lanes: dict[str, list[RecordedSpan]] = {}
    for span in (span for _, spans in taken for span in spans if span.lanes):
        by_lanes.setdefault(span.lanes, []).append(span)
    return by_lanes


def _first_line(dropped: int) -> bytes:
    """Return the line with the number of missing spans, and the time of writing."""
    began = {"wall_clock_s": time.time(), "trace_clock_s": TRACE_CLOCK()}
    facts = json.dumps({"dropped": dropped, "written_at": began})
    line = f'{{"displayTimeUnit": "ms", "otherData": {facts}'
    return f"{line:{FIRST_LINE_BYTES - 2}},\n".encode()


def _event(span: RecordedSpan, pid: int, number: int) -> dict[str, Any]:
    start_ns, end_ns = int(span.start_s * 1e9), int(span.end_s * 1e9)
    own = {"ts": start_ns / 1000, "dur": (end_ns - start_ns) / 1000}
    return {"name": span.name, "ph": "X", "pid": pid, "tid": number, **own, "args": span.args}


def _metadata_event(what: str, pid: int, number: int, name: str) -> dict[str, Any]:
    return {"name": what, "ph": "M", "pid": pid, "tid": number, "args": {"name": name}}


# ---- where the traces of JAX's profiler (run.profile) are in a run's folder, in XProf's layout

# profile/plugins/profile/step_3/trainer.xplane.pb        xprof --logdir RUN/profile
#                                trainer.trace.json.gz    https://ui.perfetto.dev
#                                sampler-0.xplane.pb      a host of the same session for XProf


FOLDER = "profile"
"""Folder to open with XProf and TensorBoard, in the run's folder."""
SESSIONS = f"{FOLDER}/plugins/profile"
"""Folder of the sessions, one for each step, in which both tools look."""
SUFFIXES = (".xplane.pb", ".trace.json.gz")
"""Suffixes of a trace's two files; their names begin with the name of the process."""
_STEP = re.compile(r"step_(\d{1,18})")
_NAME = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,127}")


def write_trace(root: Path, step: int, process: str, files: Mapping[str, bytes]) -> None:
    """Write the trace of a process during a step into a run's folder. Raises OSError.

    files: their content, by SUFFIXES.
    """
    folder = root / SESSIONS / f"step_{step}"
    folder.mkdir(parents=True, exist_ok=True)
    name = _file_name(process)
    for suffix in SUFFIXES:
        part = folder / f".{name}{suffix}"
        part.write_bytes(files[suffix])
        os.replace(part, folder / f"{name}{suffix}")


def sampler_process(name: str) -> str:
    """Return the name of a sampler's traces: the sampler's own name, unless that could be the
    trainer's
    (trainer, trainer-0, trainer-update), or the new name of another such sampler."""
    own = _file_name(name)
    return f"sampler-{own}" if re.match(r"(sampler-)*trainer", own) else own


def _file_name(process: str) -> str:
    return re.sub(r"[^A-Za-z0-9._-]", "_", process).lstrip(".")[:100] or "process"


def traces_of(root: Path) -> list[tuple[int, str, int]]:
    """Return the step, the path relative to the run's folder, and the size in bytes of each trace
    for Perfetto, by step and process."""
    traces = []
    for path in root.glob(f"{SESSIONS}/*/*{SUFFIXES[1]}"):
        step = _STEP.fullmatch(path.parent.name)
        if step and _NAME.fullmatch(path.name) and path.is_file():
            traces.append((int(step[1]), path.relative_to(root).as_posix(), path.stat().st_size))
    return sorted(traces)
