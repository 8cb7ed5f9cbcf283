"""Read the spans that a run has written, and arrange them as a timeline: lanes, for any time
window.

    trace.json  ──read──> tracks ──of one family together──> lanes ──thinned──> what the page shows

A thread is a lane whose spans nest. Overlapping spans (scorers, environments) are written on
numbered tracks, which form one lane here. Times are seconds since the first span of the run;
processes are aligned by the clocks that each recorded.
"""

import json
import os
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from math import isfinite
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

TRACES = ("trace*.json", "older.trace*.json", "samplers/*.trace.json")
"""Files of spans in a run's folder; with several adapters in one run, in their common folder. The
older one of two files begins with older."""
MAX_SPANS = 2_000_000
"""Maximum number of spans that are read from all files; further ones are only counted."""
FAMILY = re.compile(r"(.+) \d+")
"""Names of the numbered tracks of overlapping spans."""
FIRST = ("trainer", "evaluation", "sampler", "gate", "environment", "scorer", "weights", "")
"""Prefixes of the lanes' names, in the order of display; others come last."""
IDLE = ("wait for groups", "wait for the turn", "wait for the evaluation", "wait at the gate")
"""Spans in which a thread waits for others. A sampler that waits for its block is busy: its device
computes."""

LEAST_S = 1e-9
"""Minimum window for which shares are computed, seconds."""
UNREADABLE = (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError)
"""Exceptions from lines that are not spans."""

Doubles = NDArray[np.float64]
ShownSpans = tuple[float, float, int, int]  # start and end, seconds; kind; number of spans


@dataclass(slots=True)
class Track:
    """Spans of a thread, or overlapping spans, in any order."""

    starts: list[float] = field(default_factory=list)
    ends: list[float] = field(default_factory=list)
    kinds: list[int] = field(default_factory=list)

    def add(self, start_s: float, end_s: float, kind: int) -> None:
        """Add a span."""
        self.starts.append(start_s)
        self.ends.append(end_s)
        self.kinds.append(kind)

    def depths(self) -> list[int]:
        """Return how many spans contain each one. A span contains another if it begins earlier, or
        at the same time and ends later, and has not ended when the other begins."""
        depths = [0] * len(self.starts)
        ends_s: list[float] = []  # of the spans that contain the next one
        for i in np.lexsort((-np.array(self.ends), np.array(self.starts))).tolist():
            while ends_s and ends_s[-1] <= self.starts[i]:
                ends_s.pop()
            depths[i] = len(ends_s)
            ends_s.append(self.ends[i])
        return depths


@dataclass(frozen=True, slots=True)
class Lane:
    """One row of the timeline: spans [spans] by start, of a thread or of a family of tracks."""

    process: str
    name: str
    starts: Doubles
    ends: Doubles
    kinds: NDArray[np.int64]
    depths: NDArray[np.int64]
    nests: bool  # a thread, whose spans may contain others; False: overlapping spans

    def busy_s(self, first_s: float, last_s: float, idle: Sequence[int]) -> float:
        """Return the seconds between two times in which a span was open, but no span of the idle
        kinds
        within it."""
        waits = np.isin(self.kinds, idle)
        if not self.nests:
            return self._open_s(~waits, first_s, last_s)
        whole = self._open_s(self.depths == 0, first_s, last_s)
        return whole - self._open_s(waits, first_s, last_s)

    def _open_s(self, chosen: NDArray[np.bool_], first_s: float, last_s: float) -> float:
        """Return the seconds between two times in which any of the chosen spans was open."""
        starts = np.clip(self.starts[chosen], first_s, last_s)
        ends = np.clip(self.ends[chosen], first_s, last_s)
        before = np.maximum.accumulate(np.concatenate([[first_s], ends]))[:-1]
        return float(np.maximum(ends - np.maximum(starts, before), 0.0).sum())

    def rows(self, first_s: float, last_s: float, columns: int) -> list[list[ShownSpans]]:
        """Return the rectangles to show between two times, by depth: short neighbours are merged,
        with the kind of the longest."""
        within = (self.ends > first_s) & (self.starts < last_s)
        rows = []
        for depth in range(int(self.depths.max(initial=-1)) + 1):
            chosen = within & (self.depths == depth)
            spans = self.starts[chosen], self.ends[chosen], self.kinds[chosen]
            rows.append(thinned(*spans, max(last_s - first_s, LEAST_S) / columns))
        return rows


@dataclass(frozen=True, slots=True)
class RunSpans:
    """The spans of all processes of a run."""

    lanes: tuple[Lane, ...] = ()
    kinds: tuple[str, ...] = ()  # names of spans; lanes hold indices into it
    end_s: float = 0.0  # since the first span
    files: tuple[str, ...] = ()
    dropped: int = 0  # number of spans that the processes had no room for
    unread: int = 0  # lines that are not spans, and spans beyond MAX_SPANS
    steps: tuple[tuple[int, float, float], ...] = ()  # version that a step produced, start, end

    def shown(self, first_s: float, last_s: float, columns: int) -> dict[str, Any]:
        """Return the lanes between two times, with about `columns` spans per depth at most."""
        first_s = min(max(first_s, 0.0), self.end_s)
        last_s = min(max(last_s, first_s), self.end_s)
        window_s = max(last_s - first_s, LEAST_S)
        idle = [i for i, name in enumerate(self.kinds) if name in IDLE]
        return {
            "end": rounded_s(self.end_s),
            "window": [rounded_s(first_s), rounded_s(last_s)],
            "kinds": self.kinds,
            "lanes": [
                {
                    "process": lane.process,
                    "name": lane.name,
                    "busy": round(lane.busy_s(first_s, last_s, idle) / window_s, 4),
                    "rows": lane.rows(first_s, last_s, columns),
                }
                for lane in self.lanes
            ],
            "steps": self.steps_between(first_s, last_s),
            "spans": sum(len(lane.starts) for lane in self.lanes),
            "files": self.files,
            "dropped": self.dropped,
            "unread": self.unread,
        }

    def window_of(self, first: int, last: int) -> tuple[float, float]:
        """Return the time from the beginning of the first of these steps to the end of the last;
        the whole run if none of them was recorded."""
        chosen = [(start, end) for step, start, end in self.steps if first <= step <= last]
        if not chosen:
            return 0.0, self.end_s
        return min(start for start, _ in chosen), max(end for _, end in chosen)

    def steps_between(self, first_s: float, last_s: float) -> list[int]:
        """Return the first and the last step that overlap a window; [] without steps."""
        within = [step for step, start, end in self.steps if end > first_s and start < last_s]
        return [min(within), max(within)] if within else []


def read_spans(root: Path) -> RunSpans:
    """Read the files of spans in a run's folder; empty without files. Truncated or invalid lines
    are skipped and counted."""
    reading = _Reading()
    files = trace_files(root)
    for path in files:
        try:
            with path.open(encoding="utf-8", errors="replace") as file:
                reading.read(file)
        except OSError:
            reading.unread += 1
    return reading.finished(tuple(os.path.relpath(path, root) for path in files), root.name)


def trace_files(root: Path) -> list[Path]:
    """Return the files of spans in a run's folder; for one of several adapters, their common
    files."""
    folders = [root, *([root.parent] if (root.parent / "config.yaml").is_file() else [])]
    listed = (sorted(p for pattern in TRACES for p in folder.glob(pattern)) for folder in folders)
    return next((files for files in listed if files), [])


class _Reading:
    """Reads files line by line: each line is one event."""

    def __init__(self) -> None:
        self.kinds: dict[str, int] = {}
        self.tracks: dict[tuple[str, str, int], Track] = {}
        self.steps: dict[str, list[tuple[str, int, float, float]]] = {"step": [], "update": []}
        self.count = self.dropped = self.unread = 0

    def read(self, lines: Iterable[str]) -> None:
        """Read one process's spans."""
        process, names, ahead_s = "", dict[int, str](), 0.0
        for line in lines:
            text = line.strip().rstrip(",")
            if text in ("]}", '"traceEvents": [', ""):
                continue
            if text.startswith('{"displayTimeUnit"'):
                ahead_s = self._head(text)
                continue
            try:
                event = json.loads(text)
                kind, tid = event["ph"], int(event["tid"])
                if kind == "M" and event["name"] == "process_name":
                    process = str(event["args"]["name"])
                elif kind == "M":
                    names[tid] = str(event["args"]["name"])
                elif kind == "X":
                    self._span(event, (process, names.get(tid, str(tid)), tid), ahead_s)
            except UNREADABLE:
                self.unread += 1

    def _head(self, text: str) -> float:
        """Read the number of dropped spans; return how far the wall clock is ahead of the spans'
        own clock, seconds."""
        try:
            facts = json.loads(text + "}")["otherData"]
            self.dropped += int(facts["dropped"])
            clocks = facts["written_at"]
            return float(clocks["wall_clock_s"]) - float(clocks["trace_clock_s"])
        except UNREADABLE:
            self.unread += 1
            return 0.0

    def _span(self, event: dict[str, Any], where: tuple[str, str, int], ahead_s: float) -> None:
        start_s = float(event["ts"]) / 1e6 + ahead_s
        end_s = start_s + float(event["dur"]) / 1e6
        name = str(event["name"])
        known = isfinite(start_s) and isfinite(end_s) and start_s <= end_s
        if self.count >= MAX_SPANS or not known:
            self.unread += 1
            return
        self.count += 1
        number = self.kinds.setdefault(name, len(self.kinds))
        self.tracks.setdefault(where, Track()).add(start_s, end_s, number)
        if name in self.steps:
            step = event["args"].get("version", event["args"].get("number"))
            if isinstance(step, int):
                self.steps[name].append((where[1], step, start_s, end_s))

    def finished(self, files: tuple[str, ...], run: str) -> RunSpans:
        """Return the spans. run: of several adapters in one run, the one whose steps count."""
        begin_s = min((min(t.starts) for t in self.tracks.values()), default=0.0)
        end_s = max((max(t.ends) for t in self.tracks.values()), default=begin_s)
        lanes: dict[tuple[str, str], list[Track]] = {}
        for (process, name, tid), track in self.tracks.items():
            family = FAMILY.fullmatch(name)
            key = (process, family[1]) if family else (process, f"{name}\0{tid}")
            lanes.setdefault(key, []).append(track)
        made = [
            lane_of(process, name.partition("\0")[0], tracks, begin_s)
            for (process, name), tracks in lanes.items()
        ]
        steps = self.steps["step"] or self.steps["update"]  # updates: for a job without rollouts
        steps = [step for step in steps if step[0] == f"trainer of {run}"] or steps
        return RunSpans(
            lanes=tuple(sorted(made, key=_order)),
            kinds=tuple(self.kinds),
            end_s=end_s - begin_s,
            files=files,
            dropped=self.dropped,
            unread=self.unread,
            steps=tuple((n, start_s - begin_s, end_s - begin_s) for _, n, start_s, end_s in steps),
        )


def lane_of(process: str, name: str, tracks: Sequence[Track], begin_s: float) -> Lane:
    """Merge tracks into one lane, by start. Several tracks have no depth; overlaps are merged."""
    starts = np.concatenate([t.starts for t in tracks])
    ends = np.concatenate([t.ends for t in tracks])
    order = np.lexsort((-ends, starts))
    nests = len(tracks) == 1
    return Lane(
        process=process,
        name=name,
        starts=starts[order] - begin_s,
        ends=ends[order] - begin_s,
        kinds=np.concatenate([t.kinds for t in tracks])[order],
        depths=np.array(tracks[0].depths())[order] if nests else np.zeros(len(order), np.int64),
        nests=nests,
    )


def thinned(
    starts: Doubles, ends: Doubles, kinds: NDArray[np.int64], column_s: float
) -> list[ShownSpans]:
    """Return spans, by start, as rectangles; spans that overlap, or share a column with their
    neighbours, are merged."""
    if not len(starts):
        return []
    reach = np.maximum.accumulate(ends)
    same_column = np.floor(starts[1:] / column_s) == np.floor(starts[:-1] / column_s)
    short = reach[:-1] - starts[:-1] < column_s
    joins = (starts[1:] < reach[:-1]) | (same_column & short)
    firsts = np.flatnonzero(np.concatenate([[True], ~joins]))
    counts = np.diff([*firsts, len(starts)])
    groups = np.repeat(np.arange(len(firsts)), counts)
    longest = np.lexsort((starts - ends, groups))[firsts]
    return [
        (rounded_s(s), rounded_s(e), k, n)
        for s, e, k, n in zip(
            starts[firsts].tolist(),
            np.maximum.reduceat(ends, firsts).tolist(),
            kinds[longest].tolist(),
            counts.tolist(),
            strict=True,
        )
    ]


def rounded_s(seconds: float) -> float:
    """Round seconds to the microsecond."""
    return round(seconds, 6)


def _order(lane: Lane) -> tuple[int, str, str]:
    rank = next(i for i, first in enumerate(FIRST) if lane.name.startswith(first))
    return rank, lane.process, lane.name
