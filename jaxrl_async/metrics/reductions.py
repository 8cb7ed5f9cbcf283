"""Define how values of one step merge, and the declaration of a metric."""

import math
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Mean:
    """A mean that can be merged: a sum and the number of values in it."""

    total: float
    count: float = 1.0

    @property
    def value(self) -> float:
        """total / count; NaN if nothing was counted."""
        return self.total / self.count if self.count else math.nan

    def merge(self, other: "Mean") -> "Mean":
        """Return the mean over both."""
        return Mean(self.total + other.total, self.count + other.count)


@dataclass(frozen=True, slots=True)
class Sum:
    """A total."""

    value: float

    def merge(self, other: "Sum") -> "Sum":
        """Return the total of both."""
        return Sum(self.value + other.value)


@dataclass(frozen=True, slots=True)
class Max:
    """A maximum."""

    value: float

    def merge(self, other: "Max") -> "Max":
        """Return the larger of both."""
        return Max(max(self.value, other.value))


@dataclass(frozen=True, slots=True)
class Min:
    """A minimum."""

    value: float

    def merge(self, other: "Min") -> "Min":
        """Return the smaller of both."""
        return Min(min(self.value, other.value))


@dataclass(frozen=True, slots=True)
class Last:
    """The newest value; `merge(other)` assumes that other is newer."""

    value: float

    def merge(self, other: "Last") -> "Last":
        """Return the newer of both: `other`."""
        return other


Reduction = Mean | Sum | Max | Min | Last


@dataclass(frozen=True, slots=True, kw_only=True)
class Metric:
    """One documented key of metrics.jsonl."""

    key: str
    kind: type[Mean] | type[Sum] | type[Max] | type[Min] | type[Last]
    unit: str
    help: str
    timing: bool = (
        False  # depends on wall time or on the machine: ignored when two runs are compared
    )


Row = tuple[str, str, str]
"""Key, unit and help of a metric."""


def declared(kind: type[Reduction], *rows: Row) -> tuple[Metric, ...]:
    """Declare metrics of one kind that are equal for equal runs."""
    return tuple(Metric(key=k, kind=kind, unit=u, help=h) for k, u, h in rows)


def timed(kind: type[Reduction], *rows: Row) -> tuple[Metric, ...]:
    """Declare metrics of one kind that depend on wall time or on the machine."""
    return tuple(Metric(key=k, kind=kind, unit=u, help=h, timing=True) for k, u, h in rows)
