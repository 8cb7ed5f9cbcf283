"""Read a run's folder while the run writes it: metrics by column, samples by number, the log.

A file is read when its content is asked for; of a run that is not compared only the ends of its
metrics are. Each read continues where the last one ended. An incomplete line is read next time. The
last step's line may be rewritten (an evaluation adds to it), and a resumed run removes lines: the
file is then a new one, and is read from its beginning.
"""

import contextlib
import json
import os
import re
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jaxrl_async.later import Later
from jaxrl_async.metrics.recorder import (
    LOG_FILE,
    METRICS_FILE,
    SAMPLES_FILE,
    STARTS_FILE,
    WARM_START,
)
from jaxrl_async.types import StopReason
from jaxrl_async.view.lanes import RunSpans, read_spans, trace_files
from jaxrl_async.view.sections import WARM
from jaxrl_async.view.watched_files import (
    END_BYTES,
    MAX_LINE,
    FileEnds,
    GrowingFile,
    MetricColumn,
    Points,
    WatchedMetrics,
    finite_number,
    is_step,
    object_of,
)

if TYPE_CHECKING:
    from jaxrl_async.view import configuration
else:
    configuration = Later("jaxrl_async.view.configuration")

TAGS_FILE = "tags.txt"
"""File in a run's folder with a tag in each line, for people to write."""


@dataclass(frozen=True, slots=True)
class SampleFilter:
    """Selects samples; None: any value."""

    text: str = ""
    first_step: int | None = None
    last_step: int | None = None
    least_reward: float | None = None
    most_reward: float | None = None
    stop: str = ""
    number: int | None = None

    def matches(self, sample: "Sample") -> bool:
        """Return whether a sample matches, apart from its text."""
        return (
            (self.first_step is None or sample.step >= self.first_step)
            and (self.last_step is None or sample.step <= self.last_step)
            and (self.least_reward is None or sample.reward >= self.least_reward)
            and (self.most_reward is None or sample.reward <= self.most_reward)
            and (not self.stop or sample.stop == self.stop)
            and (self.number is None or sample.number == self.number)
        )


@dataclass(slots=True)
class Sample:
    """The location of a sample in its file, and the values that select and sort it."""

    number: int  # in the file, from 0
    offset: int
    size: int
    step: int
    reward: float
    stop: str
    advantage: float | None = None  # mean over its recorded tokens; read when it is first asked for


ORDERS = ("newest", "oldest", "reward", "reward_up", "advantage", "advantage_up")
"""Orders of samples. By reward or advantage the largest come first, or with _up the smallest."""


AXES = ("tokens", "time")
"""Axes that curves can have instead of the step: trained tokens, and seconds of training."""


class WatchedRun:
    """One run's folder. Usable from any thread."""

    def __init__(self, root: Path, name: str) -> None:
        """Read nothing yet. name: its unique name on the page."""
        self.root, self.name = root, name
        self._lock = threading.Lock()
        self._metrics = WatchedMetrics(GrowingFile(root / METRICS_FILE))
        self._warm = WatchedMetrics(GrowingFile(root / WARM_START / METRICS_FILE), WARM)
        self._ends = FileEnds(root / METRICS_FILE), FileEnds(root / WARM_START / METRICS_FILE)
        self._samples_file = GrowingFile(root / SAMPLES_FILE)
        self._samples: list[Sample] = []
        self._spans, self._traces = RunSpans(), ""
        self._starts: tuple[str, list[dict[str, Any]]] = ("", [])
        self._config: tuple[str, list[str], dict[str, str] | None] = ("", [], {})

    def stamp(self) -> str:
        """Return a text that differs if any of the run's files has changed."""
        names = (METRICS_FILE, f"{WARM_START}/{METRICS_FILE}", SAMPLES_FILE, LOG_FILE)
        files = [self.root / name for name in (*names, TAGS_FILE, "config.yaml")]
        return stamp_of([*files, *trace_files(self.root)])

    def _columns(self) -> dict[str, MetricColumn]:
        """Read new lines of the metrics; return all columns."""
        self._metrics.read()
        self._warm.read()
        return {**self._metrics.columns, **self._warm.columns}

    def _read_samples(self) -> None:
        void, lines = self._samples_file.new_lines()
        if void:
            self._samples.clear()
        for offset, raw in lines:
            self._samples.append(Sample(len(self._samples), offset, len(raw), *sort_values(raw)))

    # ---- data for the page

    def state(self, locks: frozenset[str] | None = None) -> str:
        """Return "running" while a process holds the run's lock, else "finished" or "stopped".
        locks: of `locks_held`, if several runs are asked."""
        held = locks_held() if locks is None else locks
        return "running" if _is_locked(self.root / "lock", held) else self.outcome()

    def outcome(self) -> str:
        """Return "finished" if the run has written its results, else "stopped"."""
        done = (self.root / "policy", self.root / "reward_model")
        return "finished" if any(path.is_dir() for path in done) else "stopped"

    def measured(self) -> list[str]:
        """Return the metrics that have a finite value."""
        with self._lock:
            return sorted(key for key, column in self._columns().items() if column.steps)

    def known(self) -> list[str]:
        """Return the metrics that have a finite value, of a run that was not read yet those at the
        ends of its files."""
        with self._lock:
            if self._metrics.file.offset > 0 or self._warm.file.offset > 0:  # it was read
                return sorted(key for key, column in self._columns().items() if column.steps)
            ends, warm = self._ends
            ends.read()
            warm.read()
            return sorted([*ends.values, *(WARM + key for key in warm.values)])

    def newest(self) -> tuple[int, int]:
        """Return the number of the newest step, and of the newest update of the warm start, as the
        ends of the files have it."""
        with self._lock:
            ends, warm = self._ends
            ends.read()
            warm.read()
            return ends.step, warm.step

    def curves(self, keys: list[str], first: int, last: int, most: int) -> dict[str, Points]:
        """Return the curves of some metrics; see MetricColumn.between."""
        with self._lock:
            known = self._columns()
            columns = {key: known[key] for key in keys if key in known and known[key].steps}
            return {key: column.between(first, last, most) for key, column in columns.items()}

    def points(self, key: str) -> list[tuple[int, float]]:
        """Return all (step, value) of a metric."""
        with self._lock:
            column = self._columns().get(key, MetricColumn())
            return list(zip(column.steps, column.values, strict=True))

    def axis(self, kind: str) -> Points:
        """Return the steps and the trained tokens up to each, or the seconds of training, without
        the time between the end of a process and a resume. Raises KeyError for another kind."""
        if kind not in AXES:
            raise KeyError(f"axis {kind}")
        steps, totals = list[int](), list[float]()
        total = before = 0.0
        if kind == "tokens":
            for step, count in self.points("train/tokens"):
                total += max(count, 0.0)
                steps.append(step)
                totals.append(total)
            return steps, totals
        for step, elapsed_s in self.points("time/elapsed_s"):
            if elapsed_s < before:  # resumed: the clock began again
                total, before = total + before, 0.0
            before = elapsed_s
            steps.append(step)
            totals.append(total + elapsed_s)
        return steps, totals

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
            self._metrics.read()
            return max((c.steps[-1] for c in self._metrics.columns.values() if c.steps), default=0)

    def samples(
        self, filters: SampleFilter, skip: int, most: int, order: str = "newest"
    ) -> tuple[int, list[tuple[int, Any]]]:
        """Return the number of matching samples, and some of them with their numbers in the file.

        skip, most: the number of samples to skip, and to return. order: one of ORDERS.
        """
        with self._lock:
            self._read_samples()
            chosen = [sample for sample in self._samples if filters.matches(sample)]
        try:
            with (self.root / SAMPLES_FILE).open("rb") as file:
                if filters.text:
                    chosen = list(_with_text(file, chosen, filters.text))
                page = _in_order(file, chosen, order)[skip : skip + most]
                lines = [(sample.number, object_of(_line_of(file, sample))) for sample in page]
                return len(chosen), lines
        except OSError:
            return 0, []

    def log_text(self, before: int | None, most: int) -> tuple[str, int, int]:
        """Return whole lines of the run's log that end at an offset, or the last ones: their text,
        their first offset, and the size of the file. Of one of several adapters, the common log.

        before: offset; None: the end. most: maximum size, bytes.
        """
        path = _own_or_common(self.root, LOG_FILE)
        try:
            with path.open("rb") as file:
                size = os.fstat(file.fileno()).st_size
                end = size if before is None else min(before, size)
                begin = max(0, end - most)
                file.seek(begin)
                raw = file.read(end - begin)
        except OSError:
            return "", 0, 0
        if begin:
            cut = raw.find(b"\n") + 1
            begin, raw = begin + cut, raw[cut:]
        return raw.decode("utf-8", "replace"), begin, size

    def starts(self) -> list[dict[str, Any]]:
        """Return when, where and how the run was started and resumed, oldest first; of one of
        several adapters, the common starts."""
        path = _own_or_common(self.root, STARTS_FILE)
        stamp = stamp_of([path])
        with self._lock:
            if stamp != self._starts[0]:
                self._starts = stamp, _starts_in(path)
            return self._starts[1]

    def tags(self) -> list[str]:
        """Return the run's tags: of its configuration, and those that people wrote into its
        folder."""
        listed = self._from_config()[1]
        try:
            with (self.root / TAGS_FILE).open(encoding="utf-8", errors="replace") as file:
                listed = [*listed, *configuration.cleaned(file.read(END_BYTES).splitlines())]
        except OSError:  # no one has written any
            pass
        return list(dict.fromkeys(listed))

    def settings(self) -> dict[str, str]:
        """Return the run's settings by dotted name, as short texts."""
        text, _, settings = self._from_config()
        if settings is None:
            settings = dict(configuration.settings_of(configuration.parsed(text)))
            with self._lock:
                self._config = text, self._config[1], settings
        return settings

    def _from_config(self) -> tuple[str, list[str], dict[str, str] | None]:
        """Return the configuration's text, its tags, and its settings if they were read."""
        text = self.config_text() or ""
        with self._lock:
            if text != self._config[0]:
                tags = configuration.tags_in(text) if _HAS_TAGS.search(text) else []
                self._config = text, tags, None
            return self._config

    def config_text(self) -> str | None:
        """Return the text of the run's configuration; None if it cannot be read."""
        try:
            return (self.root / "config.yaml").read_text("utf-8")
        except (OSError, ValueError):
            return None

    def identity(self) -> dict[str, Any]:
        """Return the run's versions, devices and configuration."""
        facts: dict[str, Any] = {}
        try:
            with (self.root / "schedule.jsonl").open("rb") as file:
                head = object_of(file.readline(MAX_LINE))
        except OSError:
            head = {}
        made_by = head.get("made_by")
        if isinstance(made_by, Mapping):
            facts |= {str(key): str(value) for key, value in made_by.items()}
        if (text := self.config_text()) is not None:
            facts["config"] = text
        return facts


_HAS_TAGS = re.compile(r"^ +tags:(?! *\[\])", re.MULTILINE)


def _own_or_common(root: Path, name: str) -> Path:
    """Return the path of a file of a run; of one of several adapters, in their common folder."""
    common = root.parent / name
    is_adapter = not (root / name).is_file() and (root.parent / "config.yaml").is_file()
    return common if is_adapter else root / name


def _starts_in(path: Path) -> list[dict[str, Any]]:
    try:
        with path.open("rb") as file:
            lines = file.read(16 * END_BYTES).splitlines()
    except OSError:
        return []
    starts = []
    for raw in lines:
        start = {
            key: value
            for key, value in object_of(raw).items()
            if isinstance(value, str) or finite_number(value) is not None
        }
        if finite_number(start.get("started")) is not None:
            starts.append(start)
    return starts


def _in_order(file: object, samples: list[Sample], order: str) -> list[Sample]:
    """Sort samples; equal ones stay in the order of the file, the newest step first."""
    if order == "oldest":
        return sorted(samples, key=lambda sample: sample.step)
    newest = sorted(samples, key=lambda sample: -sample.step)
    sign = 1 if order.endswith("_up") else -1
    if order.startswith("reward"):
        return sorted(newest, key=lambda sample: sign * sample.reward)
    if order.startswith("advantage"):
        for sample in newest:
            if sample.advantage is None:
                sample.advantage = mean_advantage(_line_of(file, sample))
        return sorted(newest, key=lambda sample: sign * _last(sample.advantage, sign))
    return newest


def _last(advantage: float | None, sign: int) -> float:
    """Return an advantage; one that was not recorded (NaN) sorts last."""
    return sign * inf if advantage is None or advantage != advantage else advantage


def mean_advantage(raw: bytes) -> float:
    """Return the mean advantage of a sample's recorded tokens; NaN if none was recorded."""
    tokens = object_of(raw).get("tokens")
    listed = tokens.get("advantage") if isinstance(tokens, dict) else None
    values = [finite_number(value) for value in listed] if isinstance(listed, list) else []
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else float("nan")


def locks_held() -> frozenset[str]:
    """Return the words of the system's list of locks (Linux): of each lock, its file."""
    try:
        return frozenset(Path("/proc/locks").read_text("ascii").split())
    except (OSError, ValueError):  # not Linux
        return frozenset()


def _is_locked(path: Path, locks: frozenset[str]) -> bool:
    """Return whether a process holds a lock on a file. The lock is not tried, since a run that
    starts at that moment would find it taken."""
    try:
        status = path.stat()
    except OSError:
        return False
    return f"{os.major(status.st_dev):02x}:{os.minor(status.st_dev):02x}:{status.st_ino}" in locks


_SORT_VALUES = re.compile(
    rb'\{"step": (\d{1,18}), .*?"reward": (-?\d+(?:\.\d+)?(?:e[+-]?\d{1,3})?), .*?"stop": "(%s)"'
    % "|".join(StopReason).encode(),
    re.DOTALL,
)
"""The values that select a line of samples.jsonl, where its writer puts them. No text matches
such a key, since a quotation mark in a text follows a backslash. No part of a reward has
such a name and value either."""


def sort_values(raw: bytes) -> tuple[int, float, str]:
    """Return step, reward and stop of a line of samples, without parsing all of it as JSON, which
    would take most of a minute for 100,000 long lines."""
    if match := _SORT_VALUES.match(raw):
        return int(match[1]), float(match[2]), match[3].decode()
    line = object_of(raw)
    step, reward = line.get("step"), finite_number(line.get("reward"))
    return int(step or 0) if is_step(step) else 0, reward or 0.0, str(line.get("stop", ""))


def _line_of(file: Any, sample: Sample) -> bytes:
    file.seek(sample.offset)
    return bytes(file.read(sample.size))


def _with_text(file: object, samples: list[Sample], text: str) -> Iterator[Sample]:
    """Yield the samples whose prompt, completion or reference contains a text, ignoring case."""
    needle = text.lower()
    plain = needle.isascii() and json.dumps(needle) == f'"{needle}"'  # as it is in the file
    for sample in samples:
        raw = _line_of(file, sample)
        if plain and needle.encode() not in raw.lower():
            continue
        line = object_of(raw)
        fields = (line.get(name, "") for name in ("prompt", "completion", "reference"))
        if any(needle in str(value).lower() for value in fields):
            yield sample


def stamp_of(files: list[Path]) -> str:
    """Return a text that differs if any of the files has changed."""
    stamps = []
    for path in files:
        with contextlib.suppress(OSError):
            status = path.stat()
            stamps.append(f"{status.st_ino}.{status.st_size}.{status.st_mtime_ns}")
    return "-".join(stamps)


class RunsByName(dict[str, WatchedRun]):
    """The runs of a page by name. left_out: number of runs that are not shown. folders: where runs
    are searched."""

    left_out: int = 0
    folders: tuple[str, ...] = ()
