"""Files of a run that grow while they are read: their new lines, and metrics by column."""

import json
import os
from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Mapping
from dataclasses import dataclass, field
from math import inf, isfinite
from pathlib import Path
from typing import Any

import numpy as np

MAX_LINE = 2**24
"""Maximum size of a line, bytes; longer lines are skipped."""
MAX_DEPTH = 32
"""Maximum nesting of a line."""
END_BYTES = 2**16
"""Size of the beginning and of the end of a file that are read at first, bytes."""
Points = tuple[list[int], list[float]]
"""[points] steps, ascending, and [points] values."""


@dataclass(slots=True)
class GrowingFile:
    """A file of lines that another process appends to."""

    path: Path
    offset: int = 0  # of the next line
    last_offset: int = 0  # of the last complete line
    known: tuple[int, int] = (0, 0)  # device and inode
    stamp: tuple[int, int] = (0, 0)  # size and modification time at the last read

    def new_lines(self) -> tuple[bool, list[tuple[int, bytes]]]:
        """Return whether all data read before are void, and the new complete lines with their
        offsets."""
        try:
            with self.path.open("rb") as file:
                return self._read(file)
        except OSError:
            begun, self.offset, self.last_offset, self.known = self.known != (0, 0), 0, 0, (0, 0)
            self.stamp = (0, 0)
            return begun, []

    def _read(self, file: Any) -> tuple[bool, list[tuple[int, bytes]]]:
        status = os.fstat(file.fileno())
        identity = (status.st_dev, status.st_ino)
        void = self.known not in ((0, 0), identity) or status.st_size < self.last_offset
        if void:
            self.offset = self.last_offset = 0
        self.known, self.stamp = identity, (status.st_size, status.st_mtime_ns)
        file.seek(self.offset)
        lines, offset = [], self.offset
        for raw in iter(lambda: file.readline(MAX_LINE), b""):
            size, is_whole = len(raw), raw.endswith(b"\n")
            if not is_whole and size == MAX_LINE:  # skipped, once its end is written
                rest, is_whole = _rest_of_line(file)
                size, raw = size + rest, b""
            if not is_whole:
                break
            if raw:
                lines.append((offset, raw))
            offset += size
        if lines:
            self.last_offset = lines[-1][0]
        self.offset = offset
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
        index = bisect_left(self.steps, step)
        if self.steps[index] == step:
            self.values[index] = value
        else:
            self.steps.insert(index, step)
            self.values.insert(index, value)

    def between(self, first: int, last: int, most: int) -> Points:
        """Return about `most` points of these steps at most. Longer stretches keep the minimum and
        the maximum of each part, so no spike is lost."""
        begin, end = bisect_left(self.steps, first), bisect_right(self.steps, last)
        steps, values = self.steps[begin:end], self.values[begin:end]
        if len(steps) <= most:
            return list(steps), list(values)
        indices = _extremes(np.frombuffer(values), max(1, most // 2))
        return [steps[i] for i in indices], [values[i] for i in indices]


def _extremes(values: Any, parts: int) -> list[int]:
    """Return the indices of the minimum and of the maximum of each of some equal parts."""
    begins = np.arange(parts + 1) * len(values) // parts
    index = begins[:-1, None] + np.arange((begins[1:] - begins[:-1]).max())
    within = index < begins[1:, None]
    known = values[np.minimum(index, len(values) - 1)]
    least = np.where(within, known, inf).argmin(axis=1)
    largest = np.where(within, known, -inf).argmax(axis=1)
    indices: list[int] = np.unique([begins[:-1] + least, begins[:-1] + largest]).tolist()
    return indices


@dataclass(slots=True)
class WatchedMetrics:
    """A file of metrics by column. prefix: prefix of the columns' names, before the keys."""

    file: GrowingFile
    prefix: str = ""
    columns: dict[str, MetricColumn] = field(default_factory=dict)

    def read(self) -> None:
        """Read new lines. A metric that was never finite has an empty column."""
        void, lines = self.file.new_lines()
        if void:
            self.columns.clear()
        for _, raw in lines:
            line = object_of(raw)
            step = line.pop("step", None)
            if is_step(step):
                self._add(step, line)
        self.file.offset = self.file.last_offset  # the last line may be rewritten

    def _add(self, step: int, line: Mapping[str, object]) -> None:
        columns, prefix = self.columns, self.prefix
        for key, value in line.items():
            column = columns.get(prefix + key)
            if column is None:
                column = columns[prefix + key] = MetricColumn()
            number = value if type(value) is float and isfinite(value) else finite_number(value)
            if number is None:
                continue
            if not column.steps or step > column.steps[-1]:  # nearly always: no call
                column.steps.append(step)
                column.values.append(number)
            else:
                column.put(step, number)


@dataclass(slots=True)
class FileEnds:
    """The first and the last lines of a file of metrics, for runs whose metrics are not asked
    for."""

    path: Path
    stamp: tuple[int, int] = (-1, 0)
    step: int = 0
    values: dict[str, float] = field(default_factory=dict)  # the newest of each key

    def read(self) -> None:
        """Read the ends again if the file has changed."""
        try:
            with self.path.open("rb") as file:
                status = os.fstat(file.fileno())
                stamp = (status.st_size, status.st_mtime_ns)
                if stamp == self.stamp:
                    return
                lines = file.read(END_BYTES).split(b"\n")[:-1]
                if status.st_size > 2 * END_BYTES:
                    file.seek(-END_BYTES, os.SEEK_END)
                    lines += file.read(END_BYTES).split(b"\n")[1:-1]
                else:
                    lines = [*lines, *_rest_of(file, lines)]
        except OSError:
            stamp, lines = (0, 0), []
        self.stamp, self.step, self.values = stamp, 0, {}
        for raw in lines:
            line = object_of(raw)
            step = line.pop("step", None)
            if not is_step(step):
                continue
            self.step = max(self.step, step)
            for key, value in line.items():
                number = finite_number(value)
                if number is not None:
                    self.values[key] = number


def _rest_of(file: Any, lines: list[bytes]) -> list[bytes]:
    """Return the lines after the first ones, of a file that is not much longer."""
    file.seek(sum(len(raw) + 1 for raw in lines))
    rest: list[bytes] = file.read(2 * END_BYTES).split(b"\n")[:-1]
    return rest


def object_of(raw: bytes) -> dict[str, Any]:
    """Return a line's object; {} for a damaged or unrelated line."""
    try:
        value = json.loads(raw)
        is_deep = raw.count(b"[") + raw.count(b"{") > MAX_DEPTH and _is_deep(value, MAX_DEPTH)
    except (ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) and not is_deep else {}


def _is_deep(value: object, most: int) -> bool:
    if not isinstance(value, dict | list):
        return False
    inner = value.values() if isinstance(value, dict) else value
    return not most or any(_is_deep(item, most - 1) for item in inner)


def is_step(value: object) -> bool:
    """Return whether a value of a line may be the number of a step."""
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**62


def finite_number(value: object) -> float | None:
    """Return a value of a line as a finite number; None if it is not one."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        number = float(value)
    except OverflowError:  # an integer with hundreds of digits
        return None
    return number if isfinite(number) else None
