"""Draw line charts and bars as SVG from the lines of metrics.jsonl."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from math import ceil, floor, isfinite, log10
from typing import Any

MAX_POINTS = 300
"""Points drawn per curve; longer curves are thinned, keeping the first and last point."""
WIDTH, HEIGHT = 460, 220
LEFT, RIGHT, TOP, BOTTOM = 54, 12, 12, 30

Line = Mapping[str, Any]
"""One object of a .jsonl file."""
Scale = Callable[[float], float]
"""From a value to a coordinate, pixels."""


@dataclass(frozen=True, slots=True)
class Chart:
    """One chart: a title, a unit, and the keys drawn in it with their labels."""

    title: str
    unit: str
    curves: tuple[tuple[str, str], ...]  # (key, label)
    from_zero: bool = False


def points(lines: Sequence[Line], key: str) -> list[tuple[int, float]]:
    """Return (step, value) of the lines in which the key was measured and is finite."""
    pairs = [(int(line["step"]), line[key]) for line in lines if key in line and "step" in line]
    return [(s, float(v)) for s, v in pairs if isinstance(v, int | float) and isfinite(v)]


def accuracy_points(lines: Sequence[Line]) -> list[tuple[int, float]]:
    """Return (step, held-out accuracy) of each evaluation; [] if no answer's reward said what is
    right. One in which none did so has an accuracy of 0: all its answers were cut off."""
    if not points(lines, "eval/accuracy"):
        return []
    return points(
        [{"eval/accuracy": 0.0, **x} if "eval/reward" in x else x for x in lines], "eval/accuracy"
    )


def thinned(values: Sequence[tuple[int, float]], most: int = MAX_POINTS) -> list[tuple[int, float]]:
    """Return at most `most` points, evenly spaced, including the first and the last."""
    if len(values) <= most:
        return list(values)
    return [values[round(i * (len(values) - 1) / (most - 1))] for i in range(most)]


def number(value: float) -> str:
    """Format a number with four digits: 1,234 or 0.1234 or 1.2e-07."""
    if not isfinite(value):
        return str(value)
    if value == 0 or 1e-3 <= abs(value) < 1e3:
        return f"{value:.4g}"
    return f"{value:,.0f}" if 1e3 <= abs(value) < 1e9 else f"{value:.3g}"


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


def chart_svg(chart: Chart, lines: Sequence[Line]) -> str:
    """Draw a line chart, with tooltips on its points; "" if none of its keys was measured."""
    curves = [(label, pts) for key, label in chart.curves if (pts := thinned(points(lines, key)))]
    if not curves:
        return ""
    every = [p for _, pts in curves for p in pts]
    low = min(v for _, v in every)
    y_ticks = ticks(min(low, 0.0) if chart.from_zero else low, max(v for _, v in every))
    first, last = min(s for s, _ in every), max(s for s, _ in every)
    span = (last - first) or 1

    def x(step: float) -> float:
        return LEFT + (step - first) / span * (WIDTH - LEFT - RIGHT)

    def y(value: float) -> float:
        share = (value - y_ticks[0]) / (y_ticks[-1] - y_ticks[0])
        return HEIGHT - BOTTOM - share * (HEIGHT - TOP - BOTTOM)

    body = [_grid(y_ticks, y), _step_axis(first, last, x)]
    for i, (label, pts) in enumerate(curves):
        path = " ".join(f"{x(s):.1f},{y(v):.1f}" for s, v in pts)
        body.append(f'<polyline class="curve c{i}" points="{path}"/>')
        radius = 2.5 if len(pts) <= 40 else 1.2
        body += [
            f'<g class="dot c{i}"><circle class="hit" cx="{x(s):.1f}" cy="{y(v):.1f}" r="7"/>'
            f'<circle cx="{x(s):.1f}" cy="{y(v):.1f}" r="{radius}"/>'
            f"<title>step {s}: {escape(label)} {number(v)} {escape(chart.unit)}</title></g>"
            for s, v in pts
        ]
    return _figure(chart.title, chart.unit, [label for label, _ in curves], "".join(body))


def histogram_svg(lines: Sequence[Line]) -> str:
    """Draw the share of learnt tokens per lag over the whole run; "" if none were counted."""
    counts = lag_counts(lines)
    total = sum(counts.values())
    if not total:
        return ""
    y_ticks = ticks(0.0, max(counts.values()) / total)
    lags = range(min(0, *counts), max(counts) + 1)
    slot = (WIDTH - LEFT - RIGHT) / len(lags)

    def y(share: float) -> float:
        return HEIGHT - BOTTOM - share / y_ticks[-1] * (HEIGHT - TOP - BOTTOM)

    body = [_grid(y_ticks, y)]
    for i, lag in enumerate(lags):
        share = counts.get(lag, 0.0) / total
        width = min(slot * 0.7, 60.0)
        left = LEFT + (i + 0.5) * slot - width / 2
        body.append(
            f'<rect class="bar" x="{left:.1f}" y="{y(share):.1f}" width="{width:.1f}" '
            f'height="{max(y(0) - y(share), 0):.1f}" rx="2">'
            f"<title>lag {lag}: {share:.1%} of the tokens, {counts.get(lag, 0):,.0f}</title></rect>"
            f'<text class="tick" x="{left + width / 2:.1f}" y="{HEIGHT - BOTTOM + 16}" '
            f'text-anchor="middle">{lag}</text>'
        )
    return _figure("Age of the learnt tokens, in versions", "share", [], "".join(body))


def lag_counts(lines: Sequence[Line]) -> dict[int, float]:
    """Count the learnt tokens of each lag over the whole run."""
    prefix = "staleness/tokens_lag_"
    counts: dict[int, float] = {}
    for line in lines:
        for key, value in line.items():
            if key.startswith(prefix) and isinstance(value, int | float):
                lag = int(key.removeprefix(prefix))
                counts[lag] = counts.get(lag, 0.0) + value
    return counts


def _grid(y_ticks: Sequence[float], y: Scale) -> str:
    return "".join(
        f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y(t):.1f}" y2="{y(t):.1f}"/>'
        f'<text class="tick" x="{LEFT - 6}" y="{y(t) + 3.5:.1f}" text-anchor="end">'
        f"{number(t)}</text>"
        for t in y_ticks
    )


def _step_axis(first: int, last: int, x: Scale) -> str:
    marks = [t for t in ticks(first, last, 6) if first <= t <= last and t == int(t)] or [first]
    return "".join(
        f'<text class="tick" x="{x(t):.1f}" y="{HEIGHT - BOTTOM + 16}" text-anchor="middle">'
        f"{int(t)}</text>"
        for t in marks
    )


def _figure(title: str, unit: str, labels: Sequence[str], body: str) -> str:
    legend = "".join(
        f'<span class="key c{i}"><i></i>{escape(label)}</span>' for i, label in enumerate(labels)
    )
    return (
        f'<figure><figcaption><b>{escape(title)}</b> <span class="unit">{escape(unit)}</span>'
        f'<span class="legend">{legend if len(labels) > 1 else ""}</span></figcaption>'
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(title)}">'
        f"{body}</svg></figure>"
    )
