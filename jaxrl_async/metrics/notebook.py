"""Draw a run as one picture, for notebooks: what `jaxrl_async.Run` shows of itself."""

from collections.abc import Sequence
from html import escape
from itertools import pairwise

from jaxrl_async.metrics.series import Line, number, points, thinned, tick_labels, ticks

WIDTH, LEFT, RIGHT = 760, 70, 14
GAP, DIGIT = 8, 7.2
"""Space between a label and its axis, and width of a label's widest digit."""
CURVES_TOP, CURVES_BOTTOM = 34, 190
LANES = (("trainer", 246), ("samplers", 282))
LANE_HEIGHT, HEIGHT = 22, 340
MAX_POINTS = 100
"""Maximum number of points of a curve; longer curves are thinned."""
MAX_STEPS = 40
"""Number of steps in the timeline: the newest ones."""
CURVES = (("reward/mean", "reward", "#1f6feb"), ("eval/accuracy", "held-out accuracy", "#d1590f"))
WITHOUT_ACCURACY = (CURVES[0], ("eval/reward", "held-out reward", "#d1590f"))
"""Curves of a run whose reward has no accuracy."""
TRAINER_PHASES = (
    ("time/wait_data_s", "waits for answers", "#d8d8d4"),
    ("time/train_s", "learns", "#1f6feb"),
    ("time/wait_eval_s", "waits for answers", "#d8d8d4"),  # of a concurrent evaluation
    ("time/publish_s", "publishes", "#8250df"),
    ("time/eval_s", "evaluates", "#d1590f"),
)
"""The trainer's phases in a step, in order: key, label, color."""
BUSY = "#1a7f37"


def run_svg(lines: Sequence[Line]) -> str:
    """Return a standalone SVG: reward and held-out accuracy by step, and a timeline."""
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" '
        f'height="{HEIGHT}" font-family="sans-serif" font-size="12" fill="#57606a">'
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="#fff"/>'
        f"{_curves(lines)}{_timeline(lines)}</svg>"
    )


def _curves(lines: Sequence[Line]) -> str:
    curves = CURVES if points(lines, "eval/accuracy") else WITHOUT_ACCURACY
    drawable = [(label, c, thinned(points(lines, key), MAX_POINTS)) for key, label, c in curves]
    every = [p for _, _, pts in drawable for p in pts]
    if not every:
        return _text(LEFT, CURVES_TOP, "no step has finished yet")
    y_ticks = ticks(min(0.0, *(v for _, v in every)), max(v for _, v in every))
    y_labels = tick_labels(y_ticks)
    left = max(LEFT, GAP + DIGIT * max(map(len, y_labels)))  # no label is cut off
    first, last = min(s for s, _ in every), max(s for s, _ in every)

    def x(step: float) -> float:
        return left + (step - first) / ((last - first) or 1) * (WIDTH - left - RIGHT)

    def y(value: float) -> float:
        share = (value - y_ticks[0]) / (y_ticks[-1] - y_ticks[0])
        return CURVES_BOTTOM - share * (CURVES_BOTTOM - CURVES_TOP)

    parts = [_legend([(label, c) for label, c, pts in drawable if pts], 16)]
    for tick, label in zip(y_ticks, y_labels, strict=True):
        parts.append(
            f'<path d="M{left:g} {y(tick):.1f}H{WIDTH - RIGHT}" stroke="#e3e3df"/>'
            + _text(left - GAP, y(tick) + 4, label, "end")
        )
    for step in ticks(first, last, 8):
        if first <= step <= last and step == int(step):
            parts.append(_text(x(step), CURVES_BOTTOM + 16, f"{int(step)}", "middle"))
    for _, color, pts in drawable:
        path = " ".join(f"{x(s):.1f},{y(v):.1f}" for s, v in pts)
        parts.append(f'<polyline points="{path}" fill="none" stroke="{color}" stroke-width="1.8"/>')
        if len(pts) == 1:
            parts.append(f'<circle cx="{x(pts[0][0]):.1f}" cy="{y(pts[0][1]):.1f}" r="3"/>')
    return "".join(parts)


def _timeline(lines: Sequence[Line]) -> str:
    """Draw one lane of the trainer's phases and one of the samplers' busy shares."""
    steps = _since_start([x for x in lines if {"time/step_s", "time/elapsed_s"} <= x.keys()])
    steps = steps[-MAX_STEPS:]
    if not steps:
        return ""
    start = steps[0]["time/elapsed_s"] - steps[0]["time/step_s"]
    end = steps[-1]["time/elapsed_s"]

    def x(at_s: float) -> float:
        return LEFT + (at_s - start) / ((end - start) or 1) * (WIDTH - LEFT - RIGHT)

    def bar(lane: int, from_s: float, to_s: float, color: str, opacity: float = 1.0) -> str:
        return (
            f'<rect x="{x(from_s):.1f}" y="{LANES[lane][1]}" '
            f'width="{max(x(to_s) - x(from_s), 0):.1f}" height="{LANE_HEIGHT}" '
            f'fill="{color}" fill-opacity="{opacity:.2f}"/>'
        )

    phases = {label: color for _, label, color in TRAINER_PHASES}
    legend = [*phases.items(), ("samplers busy", BUSY)]
    parts = [_legend(legend, LANES[0][1] - 14)]
    parts += [_text(LEFT - 8, y + 15, name, "end") for name, y in LANES]
    before = start
    for line in steps:
        at, after = line["time/elapsed_s"] - line["time/step_s"], line["time/elapsed_s"]
        for key, _, color in TRAINER_PHASES:
            if line.get(key, 0.0) > 0:
                until = min(at + line[key], after)  # evaluations may outlast the step
                parts.append(bar(0, at, until, color))
                at = until
        if "sampler/busy_share" in line:
            parts.append(bar(1, before, after, BUSY, line["sampler/busy_share"]))
        before = after
    for at_s in ticks(start, end, 8):
        if start <= at_s <= end:
            where = LANES[-1][1] + LANE_HEIGHT + 18
            parts.append(_text(x(at_s), where, f"{number(at_s)} s", "middle"))
    return "".join(parts)


def _since_start(steps: Sequence[Line]) -> Sequence[Line]:
    """Return the steps since the newest start or resume, from which time/elapsed_s counts."""
    resumes = [
        i
        for i, (a, b) in enumerate(pairwise(steps), 1)
        if b["time/elapsed_s"] < a["time/elapsed_s"]
    ]
    return steps[resumes[-1] :] if resumes else steps


def _legend(entries: Sequence[tuple[str, str]], y: float) -> str:
    parts, x = [], float(LEFT)
    for label, color in entries:
        parts.append(f'<rect x="{x:.0f}" y="{y - 9:.0f}" width="10" height="10" fill="{color}"/>')
        parts.append(_text(x + 15, y, label))
        x += 34 + 6.5 * len(label)
    return "".join(parts)


def _text(x: float, y: float, text: str, anchor: str = "start") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'
