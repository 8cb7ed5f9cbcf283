"""Read a run's folder while the run writes it: metrics by column, samples by number.

Each read continues where the last one ended. An incomplete line is read next time. The last step's
line may be rewritten (an evaluation adds to it), and a resumed run removes lines: the file is then
a new one, and is read from its beginning.
"""

import contextlib
import json
import os
import re
import threading
from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from math import isfinite
from pathlib import Path
from typing import Any

from jaxrl_async.metrics.recorder import METRICS_FILE, SAMPLES_FILE, WARM_START
from jaxrl_async.types import StopReason
from jaxrl_async.view.lanes import RunSpans, read_spans, trace_files
from jaxrl_async.view.sections import WARM

MAX_LINE = 2**24
"""Maximum size of a line, bytes; longer lines are skipped."""
MAX_DEPTH = 32
"""Maximum nesting of a line."""
Points = tuple[list[int], list[float]]
"""[points] steps, ascending, and [points] values."""


@dataclass(slots=True)
class GrowingFile:
    """A file of lines that another process appends to."""

    path: Path
    at: int = 0  # offset of the next line
    last_at: int = 0  # offset of the last complete line
    known: tuple[int, int] = (0, 0)  # device and inode
    stamp: tuple[int, int] = (0, 0)  # size and modification time at the last read

    def news(self) -> tuple[bool, list[tuple[int, bytes]]]:
        """Return whether all data read before are void, and the new complete lines with their
        offsets."""
        try:
            with self.path.open("rb") as file:
                return self._read(file)
        except OSError:
            begun, self.at, self.last_at, self.known = self.at > 0, 0, 0, (0, 0)
            self.stamp = (0, 0)
            return begun, []

    def _read(self, file: Any) -> tuple[bool, list[tuple[int, bytes]]]:
        status = os.fstat(file.fileno())
        identity = (status.st_dev, status.st_ino)
        void = self.known not in ((0, 0), identity) or status.st_size < self.last_at
        if void:
            self.at = self.last_at = 0
        self.known, self.stamp = identity, (status.st_size, status.st_mtime_ns)
        file.seek(self.at)
        lines, place = [], self.at
        for raw in iter(lambda: file.readline(MAX_LINE), b""):
            size, is_whole = len(raw), raw.endswith(b"\n")
            if not is_whole and size == MAX_LINE:  # skipped, once its end is written
                rest, is_whole = _rest_of_line(file)
                size, raw = size + rest, b""
            if not is_whole:
                break
            if raw:
                lines.append((place, raw))
            place += size
        if lines:
            self.last_at = lines[-1][0]
        self.at = place
        return void, lines


def _rest_of_line(file: Any) -> tuple[int, bool]:
    """Return the remaining bytes of a long line, and whether its end is written."""
    size = 0
    for raw in iter(lambda: file.readline(MAX_LINE), b""):
        size += len(raw)
        if raw.endswith(b"\n"):
            return size, True
    return size, False


@dataclass(slots=True)
class MetricColumn:
    """One metric of a run: its steps, ascending, and its values."""

    steps: array = field(default_factory=lambda: array("q"))
    values: array = field(default_factory=lambda: array("d"))

    def put(self, step: int, value: float) -> None:
        """Write the value of a step: the last one, a new one or, rarely, an earlier one."""
        if not self.steps or step > self.steps[-1]:
            self.steps.append(step)
            self.values.append(value)
            return
        place = bisect_left(self.steps, step)
        if self.steps[place] == step:
            self.values[place] = value
        else:
            self.steps.insert(place, step)
            self.values.insert(place, value)

    def between(self, first: int, last: int, most: int) -> Points:
        """Return about `most` points of these steps at most. Longer stretches keep the minimum and
        the maximum of each part, so no spike is lost."""
        begin, end = bisect_left(self.steps, first), bisect_right(self.steps, last)
        count = end - begin
        if count <= most:
            return list(self.steps[begin:end]), list(self.values[begin:end])
        places: list[int] = []
        parts = max(1, most // 2)
        for part in range(parts):
            low = begin + part * count // parts
            stretch = range(low, begin + (part + 1) * count // parts)
            least = min(stretch, key=self.values.__getitem__)
            largest = max(stretch, key=self.values.__getitem__)
            places += sorted({least, largest})
        return [self.steps[i] for i in places], [self.values[i] for i in places]


@dataclass(slots=True)
class WatchedMetrics:
    """A file of metrics by column. prefix: prefix of the columns' names, before the keys."""

    file: GrowingFile
    prefix: str = ""
    columns: dict[str, MetricColumn] = field(default_factory=dict)

    def read(self) -> None:
        """Read new lines. A metric that was never finite has an empty column."""
        void, lines = self.file.news()
        if void:
            self.columns.clear()
        for _, raw in lines:
            line = _object(raw)
            step = line.pop("step", None)
            if not is_step(step):
                continue
            for key, value in line.items():
                column = self.columns.setdefault(self.prefix + key, MetricColumn())
                number = finite_number(value)
                if number is not None:
                    column.put(step, number)
        self.file.at = self.file.last_at  # the last line may be rewritten


@dataclass(frozen=True, slots=True)
class SampleFilter:
    """Selects samples; None: any value."""

    text: str = ""
    first_step: int | None = None
    last_step: int | None = None
    least_reward: float | None = None
    most_reward: float | None = None
    stop: str = ""

    def takes(self, sample: "Sample") -> bool:
        """Return whether a sample matches, apart from its text."""
        return (
            (self.first_step is None or sample.step >= self.first_step)
            and (self.last_step is None or sample.step <= self.last_step)
            and (self.least_reward is None or sample.reward >= self.least_reward)
            and (self.most_reward is None or sample.reward <= self.most_reward)
            and (not self.stop or sample.stop == self.stop)
        )


@dataclass(frozen=True, slots=True)
class Sample:
    """The location of a sample in its file, and the values that select it."""

    at: int
    size: int
    step: int
    reward: float
    stop: str


class WatchedRun:
    """One run's folder. Usable from any thread."""

    def __init__(self, root: Path, name: str) -> None:
        """Read nothing yet. name: its unique name on the page."""
        self.root, self.name = root, name
        self._lock = threading.Lock()
        self._metrics = WatchedMetrics(GrowingFile(root / METRICS_FILE))
        self._warm = WatchedMetrics(GrowingFile(root / WARM_START / METRICS_FILE), WARM)
        self._samples_file = GrowingFile(root / SAMPLES_FILE)
        self._samples: list[Sample] = []
        self._spans, self._traces = RunSpans(), ""

    def look(self) -> str:
        """Read new data; return a text that differs if anything has changed."""
        with self._lock:
            self._metrics.read()
            self._warm.read()
            self._read_samples()
            files = (self._metrics.file, self._warm.file, self._samples_file)
            stamps = "-".join(str(number) for file in files for number in file.stamp)
            return f"{stamps}-{stamp_of(trace_files(self.root))}"

    def _columns(self) -> dict[str, MetricColumn]:
        return {**self._metrics.columns, **self._warm.columns}

    def _read_samples(self) -> None:
        void, lines = self._samples_file.news()
        if void:
            self._samples.clear()
        self._samples += [Sample(place, len(raw), *chosen_by(raw)) for place, raw in lines]

    # ---- data for the page

    def state(self) -> str:
        """Return "running" while a process holds the run's lock, else "finished" or "stopped"."""
        return "running" if _is_locked(self.root / "lock") else self.outcome()

    def outcome(self) -> str:
        """Return "finished" if the run has written its results, else "stopped"."""
        done = (self.root / "policy", self.root / "reward_model")
        return "finished" if any(path.is_dir() for path in done) else "stopped"

    def measured(self) -> list[str]:
        """Return the metrics that have a finite value."""
        with self._lock:
            return sorted(key for key, column in self._columns().items() if column.steps)

    def curves(self, keys: list[str], first: int, last: int, most: int) -> dict[str, Points]:
        """Return the curves of some metrics; see Column.between."""
        with self._lock:
            known = self._columns()
            found = {key: known[key] for key in keys if key in known and known[key].steps}
            return {key: column.between(first, last, most) for key, column in found.items()}

    def points(self, key: str) -> list[tuple[int, float]]:
        """Return all (step, value) of a metric."""
        with self._lock:
            column = self._columns().get(key, MetricColumn())
            return list(zip(column.steps, column.values, strict=True))

    def totals(self, prefix: str) -> dict[str, float]:
        """Return the sums over all steps of the metrics with this prefix."""
        with self._lock:
            return {k: sum(c.values) for k, c in self._columns().items() if k.startswith(prefix)}

    def extents(self) -> dict[str, tuple[float, ...]]:
        """Return each metric's first, last, minimum and maximum value; () if it was never
        finite."""
        with self._lock:
            return {
                key: (c.values[0], c.values[-1], min(c.values), max(c.values)) if c.steps else ()
                for key, c in sorted(self._columns().items())
            }

    def spans(self) -> RunSpans:
        """Return the spans that the run has written; they are read again when their files
        change."""
        with self._lock:
            stamp = stamp_of(trace_files(self.root))
            if stamp != self._traces:
                self._spans, self._traces = read_spans(self.root), stamp
            return self._spans

    def steps(self) -> int:
        """Return the number of the newest step, 0 if there are no steps."""
        with self._lock:
            return max((c.steps[-1] for c in self._metrics.columns.values() if c.steps), default=0)

    def samples(self, wanted: SampleFilter, skip: int, most: int) -> tuple[int, list[Any]]:
        """Return the number of matching samples, and some of them, newest steps first.

        skip, most: the number of samples to skip, and to return.
        """
        with self._lock:
            chosen = [sample for sample in self._samples if wanted.takes(sample)]
        chosen.sort(key=lambda sample: -sample.step)
        try:
            with (self.root / SAMPLES_FILE).open("rb") as file:
                if wanted.text:
                    chosen = list(_with_text(file, chosen, wanted.text))
                page = chosen[skip : skip + most]
                return len(chosen), [_object(_line_of(file, sample)) for sample in page]
        except OSError:
            return 0, []

    def identity(self) -> dict[str, str]:
        """Return the run's versions, devices and configuration."""
        facts: dict[str, str] = {}
        try:
            with (self.root / "schedule.jsonl").open("rb") as file:
                head = _object(file.readline(MAX_LINE))
        except OSError:
            head = {}
        made_by = head.get("made_by")
        if isinstance(made_by, Mapping):
            facts |= {str(key): str(value) for key, value in made_by.items()}
        with contextlib.suppress(OSError, ValueError):
            facts["config"] = (self.root / "config.yaml").read_text("utf-8")
        return facts


def _is_locked(path: Path) -> bool:
    """Return whether a process holds a lock on a file. The lock is not tried, since a run that
    starts at that moment would find it taken."""
    try:
        status = path.stat()
        locks = Path("/proc/locks").read_text("ascii").splitlines()
    except OSError:  # no such file, or not Linux
        return False
    device = f"{os.major(status.st_dev):02x}:{os.minor(status.st_dev):02x}:{status.st_ino}"
    return any(device in line.split() for line in locks)


_CHOSEN_BY = re.compile(
    rb'\{"step": (\d{1,18}), .*?"reward": (-?\d+(?:\.\d+)?(?:e[+-]?\d{1,3})?), .*?"stop": "(%s)"'
    % "|".join(StopReason).encode(),
    re.DOTALL,
)
"""The values that select a line of samples.jsonl, in the place where its writer puts them. No text
matches such a key, since a quotation mark in a text follows a backslash. No part of a reward has
such a name and value either."""


def chosen_by(raw: bytes) -> tuple[int, float, str]:
    """Return step, reward and stop of a line of samples, without parsing all of it as JSON, which
    would take most of a minute for 100,000 long lines."""
    if found := _CHOSEN_BY.match(raw):
        return int(found[1]), float(found[2]), found[3].decode()
    line = _object(raw)
    step, reward = line.get("step"), finite_number(line.get("reward"))
    return int(step or 0) if is_step(step) else 0, reward or 0.0, str(line.get("stop", ""))


def _line_of(file: Any, sample: Sample) -> bytes:
    file.seek(sample.at)
    return bytes(file.read(sample.size))


def _with_text(file: Any, samples: list[Sample], text: str) -> Iterator[Sample]:
    """Yield the samples whose prompt, completion or reference contains a text, ignoring case."""
    sought = text.lower()
    plain = sought.isascii() and json.dumps(sought) == f'"{sought}"'  # as it is in the file
    for sample in samples:
        raw = _line_of(file, sample)
        if plain and sought.encode() not in raw.lower():
            continue
        line = _object(raw)
        fields = (line.get(name, "") for name in ("prompt", "completion", "reference"))
        if any(sought in str(value).lower() for value in fields):
            yield sample


def _object(raw: bytes) -> dict[str, Any]:
    """Return a line's object; {} for a damaged or unrelated line."""
    try:
        value = json.loads(raw)
        is_deep = raw.count(b"[") + raw.count(b"{") > MAX_DEPTH and _is_deep(value, MAX_DEPTH)
    except (ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) and not is_deep else {}


def _is_deep(value: Any, most: int) -> bool:
    if not isinstance(value, dict | list):
        return False
    inner = value.values() if isinstance(value, dict) else value
    return not most or any(_is_deep(one, most - 1) for one in inner)


def is_step(value: Any) -> bool:
    """Return whether a value of a line may be the number of a step."""
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**62


def finite_number(value: Any) -> float | None:
    """Return a value of a line as a finite number; None if it is not one."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        number = float(value)
    except OverflowError:  # an integer with hundreds of digits
        return None
    return number if isfinite(number) else None


def stamp_of(files: list[Path]) -> str:
    """Return a text that differs if any of the files has changed."""
    words = []
    for path in files:
        with contextlib.suppress(OSError):
            status = path.stat()
            words.append(f"{status.st_ino}.{status.st_size}.{status.st_mtime_ns}")
    return "-".join(words)
