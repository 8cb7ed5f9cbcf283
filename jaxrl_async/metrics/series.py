"""Read the points of a metric from the lines of metrics.jsonl, and format numbers briefly."""

from collections.abc import Mapping, Sequence
from math import ceil, floor, inf, isfinite, log10
from typing import Any

MOST_DIGITS = 13
"""More digits than needed to distinguish two float64 values on an axis."""
Line = Mapping[str, Any]
"""One object of a .jsonl file."""


def points(lines: Sequence[Line], key: str) -> list[tuple[int, float]]:
    """Return (step, value) of the lines in which the key was measured and is finite."""
    pairs = [(int(line["step"]), line[key]) for line in lines if key in line and "step" in line]
    return [(s, float(v)) for s, v in pairs if isinstance(v, int | float) and isfinite(v)]


def accuracy_points(lines: Sequence[Line]) -> list[tuple[int, float]]:
    """Return (step, held-out accuracy) of each evaluation; [] if the rewards have no part
    `correct`.
    An evaluation without it has an accuracy of 0, since all its answers were cut off."""
    if not points(lines, "eval/accuracy"):
        return []
    return points(
        [{"eval/accuracy": 0.0, **x} if "eval/reward" in x else x for x in lines], "eval/accuracy"
    )


def thinned(values: Sequence[tuple[int, float]], most: int) -> list[tuple[int, float]]:
    """Return at most `most` points, evenly spaced, including the first and the last."""
    if len(values) <= most:
        return list(values)
    return [values[round(i * (len(values) - 1) / (most - 1))] for i in range(most)]


def number(value: float, more: int = 0) -> str:
    """Format a number with four digits: 1,234 or 0.1234 or 1.2e-07; more: additional digits."""
    if not isfinite(value):
        return str(value)
    if value == 0 or 1e-3 <= abs(value) < 1e3:
        return f"{value:.{4 + more}g}"
    return f"{value:,.{more}f}" if 1e3 <= abs(value) < 1e9 else f"{value:.{3 + more}g}"


def tick_labels(values: Sequence[float]) -> list[str]:
    """Return the labels of an axis: numbers with enough digits to give each tick to a thousandth of
    its distance from the next one."""
    near = [min((abs(v - u) for u in values if u != v), default=inf) for v in values]
    for more in range(MOST_DIGITS):
        labels = [number(value, more) for value in values]
        labelled = (float(label.replace(",", "")) for label in labels)
        if all(abs(s - v) <= n / 1000 for s, v, n in zip(labelled, values, near, strict=True)):
            break
    return labels


def ticks(low: float, high: float, about: int = 4) -> list[float]:
    """Return round numbers (1, 2 or 5 times a power of ten apart) that enclose low to high."""
    if not high > low:
        pad = abs(low) * 0.1 or 1.0
        low, high = low - pad, high + pad
    raw = (high - low) / about
    power = 10.0 ** floor(log10(raw))
    size = next(m * power for m in (1, 2, 5, 10) if m * power >= raw * 0.999)
    first, last = floor(low / size + 1e-9), ceil(high / size - 1e-9)
    return [i * size for i in range(first, last + 1)]
