"""A run on one HTML page, from its folder alone: python -m jaxrl_async.metrics.report RUN.

The page is one file: charts are SVG drawn here, nothing is loaded from anywhere.
"""

import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from math import ceil, floor, isfinite, log10
from pathlib import Path
from typing import Any

from jaxrl_async.errors import DataError
from jaxrl_async.metrics.metric import METRICS, metric_of
from jaxrl_async.metrics.recorder import METRICS_FILE, SAMPLES_FILE, read_lines

MAX_POINTS = 300
"""Points drawn per curve; longer ones are thinned, first and last kept."""
MAX_SAMPLES = 40
"""Samples shown, the newest steps first."""
WIDTH, HEIGHT = 460, 220
LEFT, RIGHT, TOP, BOTTOM = 54, 12, 12, 30

Line = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Chart:
    """One chart: a title, a unit, and the keys drawn in it with their labels."""

    title: str
    unit: str
    curves: tuple[tuple[str, str], ...]  # (key, label)
    from_zero: bool = False


SECTIONS: tuple[tuple[str, tuple[Chart, ...]], ...] = (
    (
        "Learning",
        (
            Chart("Reward", "reward", (("reward/mean", "mean"), ("reward/std", "std"))),
            Chart("Held-out accuracy", "share", (("eval/accuracy", "accuracy"),), True),
            Chart("Held-out reward", "reward", (("eval/reward", "mean"),)),
            Chart("Held-out loss", "loss", (("eval/loss", "loss"),)),
            Chart(
                "Groups without signal",
                "share",
                (("reward/zero_variance_share", "zero variance"),),
                True,
            ),
            Chart("Loss", "loss", (("train/loss", "loss"), ("train/policy_loss", "policy loss"))),
            Chart("Gradient norm", "norm", (("train/grad_norm", "before clipping"),), True),
            Chart("Learning rate", "rate", (("train/learning_rate", "rate"),), True),
        ),
    ),
    (
        "Preferences",
        (
            Chart(
                "Pairs ranked right",
                "share",
                (("preference/accuracy", "in the step"),),
                True,
            ),
            Chart(
                "Margin",
                "reward",
                (("preference/margin", "training"), ("eval/margin", "held-out")),
            ),
            Chart(
                "Reward of the answers",
                "reward",
                (
                    ("preference/chosen_reward", "chosen"),
                    ("preference/rejected_reward", "rejected"),
                ),
            ),
        ),
    ),
    (
        "Policy",
        (
            Chart("Entropy", "nats", (("policy/entropy", "entropy"),), True),
            Chart("KL to the reference", "nats", (("policy/kl_reference", "KL"),), True),
            Chart(
                "KL to the behaviour",
                "nats",
                (("policy/k3_behavior", "k3"), ("policy/k1_behavior", "k1")),
            ),
            Chart(
                "Policy / behaviour ratio",
                "ratio",
                (
                    ("policy/ratio_mean", "mean"),
                    ("policy/ratio_max", "max"),
                    ("policy/ratio_min", "min"),
                ),
            ),
            Chart(
                "Clipped and cut",
                "share",
                (("policy/clip_share", "clipped"), ("policy/truncated_share", "weight cut")),
                True,
            ),
            Chart(
                "Sampler vs trainer log-prob, same weights",
                "nats",
                (
                    ("mismatch/mean", "mean"),
                    ("mismatch/max", "max"),
                    ("weights/probe_error", "probe"),
                ),
                True,
            ),
        ),
    ),
    (
        "Answers",
        (
            Chart(
                "Answer length",
                "tokens",
                (
                    ("rollout/length_mean", "mean"),
                    ("rollout/length_max", "max"),
                    ("eval/length_mean", "held-out mean"),
                ),
                True,
            ),
            Chart(
                "Cut off at the length limit",
                "share",
                (("rollout/truncated_share", "training"), ("eval/truncated_share", "held-out")),
                True,
            ),
        ),
    ),
    (
        "Asynchrony and speed",
        (
            Chart(
                "Idle share",
                "share",
                (("sampler/idle_share", "sampler"), ("trainer/idle_share", "trainer")),
                True,
            ),
            Chart(
                "Staleness",
                "versions",
                (("staleness/mean", "mean"), ("staleness/max", "max")),
                True,
            ),
            Chart("Staleness aimed at", "versions", (("staleness/limit", "limit"),), True),
            Chart(
                "Effective sample size",
                "share",
                (
                    ("offpolicy/ess_share", "of tokens"),
                    ("offpolicy/sequence_ess_share", "of sequences"),
                ),
                True,
            ),
            Chart("Groups dropped", "share", (("staleness/dropped_share", "dropped"),), True),
            Chart(
                "Difficulty",
                "share",
                (("data/difficulty_mean", "all"), ("data/drawn_difficulty_mean", "drawn")),
                True,
            ),
            Chart(
                "Throughput",
                "tokens/s",
                (
                    ("throughput/generated_tokens_per_s", "generated"),
                    ("throughput/trained_tokens_per_s", "trained"),
                ),
                True,
            ),
            Chart(
                "Where a step's time goes",
                "s",
                (
                    ("time/step_s", "step"),
                    ("time/train_s", "train"),
                    ("time/wait_data_s", "wait for data"),
                    ("time/publish_s", "publish"),
                ),
                True,
            ),
            Chart(
                "Sampler",
                "share",
                (
                    ("sampler/slot_occupancy", "slots in use"),
                    ("sampler/gate_wait_share", "waiting at the gate"),
                ),
                True,
            ),
            Chart("FLOP utilisation", "share", (("throughput/mfu", "MFU"),), True),
            Chart(
                "Weights",
                "s",
                (("weights/transfer_s", "transfer"), ("weights/swap_pause_s", "longest pause")),
                True,
            ),
            Chart(
                "Buffer", "groups", (("buffer/active", "active"), ("buffer/ready", "ready")), True
            ),
        ),
    ),
)

WARM_START = "warm_start"
"""Folder of the warm start's own metrics, in the run's."""
WARM_CHARTS = (
    Chart("Loss", "nats", (("train/loss", "a token of the answer"),)),
    Chart("Gradient norm", "norm", (("train/grad_norm", "before clipping"),), True),
    Chart("Learning rate", "rate", (("train/learning_rate", "rate"),), True),
    Chart("Time of an update", "s", (("time/step_s", "update"),), True),
)


def write_report(run_dir: Path) -> Path:
    """Write run_dir/report.html from metrics.jsonl, samples.jsonl and config.yaml; its path.

    What is missing is left out. Raises DataError where run_dir is no folder.
    """
    if not run_dir.is_dir():
        raise DataError(
            f"{run_dir}: no such run folder. Give the folder that holds {METRICS_FILE}."
        )
    config = run_dir / "config.yaml"
    text = config.read_text("utf-8") if config.exists() else ""
    lines = read_lines(run_dir / METRICS_FILE)
    samples = read_lines(run_dir / SAMPLES_FILE)
    warm = read_lines(run_dir / WARM_START / METRICS_FILE)
    path = run_dir / "report.html"
    path.write_text(page(run_dir.absolute().name, lines, samples, text, warm), "utf-8")
    return path


def page(
    name: str,
    lines: Sequence[Line],
    samples: Sequence[Line],
    config: str,
    warm: Sequence[Line] = (),
) -> str:
    """The whole page; warm: the warm start's own lines, by update."""
    sections = [
        _section("Warm start, by update", [chart_svg(chart, warm) for chart in WARM_CHARTS]),
        *(_section(title, [chart_svg(c, lines) for c in charts]) for title, charts in SECTIONS),
    ]
    sections[-1] = _section(
        SECTIONS[-1][0], [histogram_svg(lines), *(chart_svg(c, lines) for c in SECTIONS[-1][1])]
    )
    parts_key = sorted({k for line in lines for k in line if _is_reward_part(k)})
    if parts_key:
        parts = Chart(
            "Parts of the reward", "reward", tuple((k, k.split("/", 1)[1]) for k in parts_key)
        )
        sections.insert(2, _section("Reward", [chart_svg(parts, lines)]))
    return _PAGE.format(
        title=escape(name),
        style=_STYLE,
        headline=headline(lines),
        sections="".join(sections) + lag_table(lines),
        drops=drops_table(lines),
        samples=samples_table(samples),
        metrics=metrics_table(lines),
        config=f"<section><h2>Configuration</h2><pre>{escape(config)}</pre></section>"
        if config
        else "",
    )


def _section(title: str, charts: Iterable[str]) -> str:
    body = "".join(charts)
    return (
        f'<section><h2>{escape(title)}</h2><div class="charts">{body}</div></section>'
        if body
        else ""
    )


def _is_reward_part(key: str) -> bool:
    return key.startswith("reward/") and "<" in metric_of(key).key


# --- numbers --------------------------------------------------------------------------------------


def headline(lines: Sequence[Line]) -> str:
    """The tiles on top: how far, how good, how fast."""
    steps = [line["step"] for line in lines]
    tiles = [("steps", str(max(steps)) if steps else "0", "")]
    accuracy, eval_reward = points(lines, "eval/accuracy"), points(lines, "eval/reward")
    if held_out := accuracy or eval_reward:
        tiles.append(
            (
                f"held-out {'accuracy' if accuracy else 'reward'}",
                f"{held_out[-1][1]:.3f}",
                f"from {held_out[0][1]:.3f} at step {held_out[0][0]}",
            )
        )
    reward = points(lines, "reward/mean")
    if reward:
        tiles.append(("reward", number(reward[-1][1]), f"from {number(reward[0][1])}"))
    for key, label, percent in (
        ("throughput/generated_tokens_per_s", "tokens/s generated", False),
        ("sampler/idle_share", "sampler idle", True),
        ("trainer/idle_share", "trainer idle", True),
        ("staleness/mean", "staleness", False),
    ):
        values = sorted(v for _, v in points(lines, key))
        if values:
            middle = values[len(values) // 2]
            tiles.append(
                (label, f"{middle:.0%}" if percent else number(middle), "median of the steps")
            )
    seconds = sum(v for _, v in points(lines, "time/step_s"))
    if seconds:
        tiles.append(
            (
                "time in steps",
                f"{seconds:,.0f} s" if seconds < 600 else f"{seconds / 60:,.1f} min",
                "",
            )
        )
    return "".join(
        f'<div class="tile"><div class="label">{escape(label)}</div>'
        f'<div class="value">{escape(value)}</div><div class="note">{escape(note)}</div></div>'
        for label, value, note in tiles
    )


def points(lines: Sequence[Line], key: str) -> list[tuple[int, float]]:
    """(step, value) where the key was measured and is finite."""
    found = [(int(line["step"]), line[key]) for line in lines if key in line and "step" in line]
    return [(s, float(v)) for s, v in found if isinstance(v, int | float) and isfinite(v)]


def thinned(values: Sequence[tuple[int, float]], most: int = MAX_POINTS) -> list[tuple[int, float]]:
    """At most `most` of the points, evenly, the first and the last among them."""
    if len(values) <= most:
        return list(values)
    return [values[round(i * (len(values) - 1) / (most - 1))] for i in range(most)]


def number(value: float) -> str:
    """Four digits: 1,234 or 0.1234 or 1.2e-07."""
    if not isfinite(value):
        return str(value)
    if value == 0 or 1e-3 <= abs(value) < 1e3:
        return f"{value:.4g}"
    return f"{value:,.0f}" if 1e3 <= abs(value) < 1e9 else f"{value:.3g}"


def ticks(low: float, high: float, about: int = 4) -> list[float]:
    """Round numbers (1, 2 or 5 times a power of ten apart) that enclose low to high."""
    if not high > low:
        pad = abs(low) * 0.1 or 1.0
        low, high = low - pad, high + pad
    raw = (high - low) / about
    power = 10.0 ** floor(log10(raw))
    size = next(m * power for m in (1, 2, 5, 10) if m * power >= raw * 0.999)
    first, last = floor(low / size + 1e-9), ceil(high / size - 1e-9)
    return [i * size for i in range(first, last + 1)]


# --- drawing --------------------------------------------------------------------------------------


def chart_svg(chart: Chart, lines: Sequence[Line]) -> str:
    """A line chart as a figure; "" where none of its keys was measured. Points have tooltips."""
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
    """Share of learnt tokens per lag, over the whole run; "" where none were counted."""
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
    return _figure("Age of the tokens learnt from, in versions", "share", [], "".join(body))


def lag_counts(lines: Sequence[Line]) -> dict[int, float]:
    """Learnt tokens of each lag, over the whole run."""
    prefix = "staleness/tokens_lag_"
    counts: dict[int, float] = {}
    for line in lines:
        for key, value in line.items():
            if key.startswith(prefix) and isinstance(value, int | float):
                lag = int(key.removeprefix(prefix))
                counts[lag] = counts.get(lag, 0.0) + value
    return counts


def _grid(y_ticks: Sequence[float], y: Any) -> str:
    return "".join(
        f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y(t):.1f}" y2="{y(t):.1f}"/>'
        f'<text class="tick" x="{LEFT - 6}" y="{y(t) + 3.5:.1f}" text-anchor="end">'
        f"{number(t)}</text>"
        for t in y_ticks
    )


def _step_axis(first: int, last: int, x: Any) -> str:
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


# --- tables ---------------------------------------------------------------------------------------


LAG_COLUMNS = ("reward", "length", "kl")
"""What is known of the tokens of each lag: `staleness/lag_<n>_...`."""


def lag_table(lines: Sequence[Line]) -> str:
    """Tokens of each lag over the run, and what their episodes were like; "" where none were
    counted."""
    counts = lag_counts(lines)
    total = sum(counts.values())
    if not total:
        return ""
    means = {lag: [lag_mean(lines, lag, name) for name in LAG_COLUMNS] for lag in sorted(counts)}
    used = [i for i in range(len(LAG_COLUMNS)) if any(row[i] is not None for row in means.values())]
    rows = []
    for lag, values in means.items():
        found = [values[i] for i in used]
        cells = [f"{counts[lag]:,.0f}", f"{counts[lag] / total:.1%}"]
        cells += ["" if v is None else number(v) for v in found]
        rows.append(f"<tr><td>{lag}</td>{''.join(f'<td>{c}</td>' for c in cells)}</tr>")
    names = "".join(f"<th>{LAG_COLUMNS[i]}" for i in used)
    head = f"<tr><th>lag, versions<th>tokens<th>share{names}</tr>"
    return (
        "<section><h2>Tokens learnt from, by age</h2><p>Reward and length are of the episodes that "
        f"the tokens are from, means over the tokens.</p><table>{head}{''.join(rows)}</table>"
        "</section>"
    )


def lag_mean(lines: Sequence[Line], lag: int, name: str) -> float | None:
    """The run's mean of `staleness/lag_<lag>_<name>`, each step weighted by its tokens of that
    lag; None where it was not measured."""
    total = count = 0.0
    for line in lines:
        pair = (
            points([line], f"staleness/lag_{lag}_{name}"),
            points([line], f"staleness/tokens_lag_{lag}"),
        )
        for (_, value), (_, tokens) in zip(*pair, strict=False):
            total, count = total + value * tokens, count + tokens
    return total / count if count else None


NOT_COUNTED = ("staleness/dropped_length_mean", "staleness/dropped_share")
"""Keys with the prefix of a drop's reason that count no groups."""


def drops_table(lines: Sequence[Line]) -> str:
    """Groups dropped over the run, by reason, and their tokens; "" where none were."""
    prefix = "staleness/dropped_"
    keys = sorted(
        {k for line in lines for k in line if k.startswith(prefix) and k not in NOT_COUNTED}
    )
    counts = {k.removeprefix(prefix): sum(v for _, v in points(lines, k)) for k in keys}
    rows = "".join(
        f"<tr><td>{escape(k)}</td><td>{v:,.0f}</td></tr>" for k, v in counts.items() if v
    )
    if not rows:
        return ""
    table = f"<table><tr><th>reason<th>groups</tr>{rows}</table>"
    wasted = sum(v for _, v in points(lines, "staleness/wasted_tokens"))
    told = f"<p>Finished ones had {wasted:,.0f} tokens.</p>" if wasted else ""
    return f"<section><h2>Groups dropped</h2>{told}{table}</section>"


def samples_table(samples: Sequence[Line]) -> str:
    """The newest samples: prompt, completion, reward, and whatever else they bring."""
    newest = sorted(samples, key=lambda s: -int(s.get("step", 0)))[:MAX_SAMPLES]
    if not newest:
        return ""
    rows = []
    for s in newest:
        rest = [
            f"{k}: {v}" for k, v in s.items() if k not in ("step", "prompt", "completion", "reward")
        ]
        reward = s.get("reward")
        shown = (
            number(reward)
            if isinstance(reward, int | float)
            else str(reward if reward is not None else "")
        )
        rows.append(
            f"<tr><td>{escape(str(s.get('step', '')))}</td><td>{escape(shown)}</td>"
            f"<td><pre>{escape(str(s.get('prompt', '')))}</pre></td>"
            f"<td><pre>{escape(str(s.get('completion', '')))}</pre></td>"
            f'<td class="rest">{"<br>".join(escape(r) for r in rest)}</td></tr>'
        )
    head = "<tr><th>step<th>reward<th>prompt<th>completion<th></tr>"
    return (
        f"<section><h2>Samples</h2><p>The newest {len(newest)} of {len(samples)}; all are in "
        f'{SAMPLES_FILE}.</p><div class="wide"><table>{head}{"".join(rows)}</table></div></section>'
    )


def metrics_table(lines: Sequence[Line]) -> str:
    """Every key with its first, last, smallest and largest value."""
    order = {m.key: i for i, m in enumerate(METRICS)}
    keys = sorted(
        {k for line in lines for k in line if k != "step"}, key=lambda k: (k.split("/")[0], k)
    )
    rows = []
    for key in keys:
        values = [v for _, v in points(lines, key)]
        metric = metric_of(key)
        assert metric.key in order
        cells = [values[0], values[-1], min(values), max(values)] if values else []
        rows.append(
            f"<tr><td><code>{escape(key)}</code></td>"
            + (
                "".join(f"<td>{number(v)}</td>" for v in cells)
                or '<td colspan="4">never finite</td>'
            )
            + f'<td>{escape(metric.unit)}</td><td class="rest">{escape(metric.help)}</td></tr>'
        )
    if not rows:
        return "<section><p>No step was recorded yet.</p></section>"
    head = "<tr><th>key<th>first<th>last<th>min<th>max<th>unit<th>meaning</tr>"
    return (
        "<section><details><summary>All metrics</summary>"
        f'<div class="wide"><table>{head}{"".join(rows)}</table></div></details></section>'
    )


_STYLE = """
:root { color-scheme: light dark; --page: #f7f7f5; --card: #fff; --ink: #1f2328; --soft: #667;
  --line: #e3e3df; --c0: #1f6feb; --c1: #d1590f; --c2: #1a7f37; --c3: #8250df; }
@media (prefers-color-scheme: dark) { :root { --page: #14161a; --card: #1d2026; --ink: #e6e8eb;
  --soft: #9aa3ad; --line: #31353d; --c0: #6cb0ff; --c1: #ffa657; --c2: #56d364; --c3: #c297ff; } }
* { box-sizing: border-box; }
body { margin: 0 auto; padding: 24px; max-width: 1500px; background: var(--page); color: var(--ink);
  font: 15px/1.45 system-ui, sans-serif; }
h1 { font-size: 24px; margin: 0 0 16px; }
h2 { font-size: 17px; margin: 32px 0 10px; }
.tiles { display: grid; gap: 10px; grid-template-columns: repeat(auto-fit, minmax(150px, 1fr)); }
.tile, figure, details, table, section > pre { background: var(--card);
  border: 1px solid var(--line); border-radius: 8px; }
.tile { padding: 10px 14px; }
.label, .note, .unit { color: var(--soft); font-size: 12.5px; }
.value { font-size: 23px; font-weight: 600; font-variant-numeric: tabular-nums; }
.charts { display: grid; gap: 12px;
  grid-template-columns: repeat(auto-fill, minmax(min(400px, 100%), 1fr)); }
figure { margin: 0; padding: 10px 12px 4px; }
figcaption { font-size: 13.5px; }
.legend { float: right; } .key { margin-left: 12px; font-size: 12.5px; color: var(--soft); }
.key i { display: inline-block; width: 14px; height: 3px; border-radius: 2px; margin-right: 5px;
  vertical-align: middle; background: var(--c); }
svg { width: 100%; height: auto; display: block; }
.grid { stroke: var(--line); stroke-width: 1; }
.tick { fill: var(--soft); font-size: 11px; font-variant-numeric: tabular-nums; }
.c0 { --c: var(--c0); } .c1 { --c: var(--c1); } .c2 { --c: var(--c2); } .c3 { --c: var(--c3); }
.c4, .c5, .c6, .c7 { --c: var(--soft); }
.curve { fill: none; stroke: var(--c); stroke-width: 1.8; stroke-linejoin: round; }
.dot circle { fill: var(--c); } .dot .hit { fill: transparent; }
.dot:hover circle:last-of-type { r: 5; }
.bar { fill: var(--c0); } .bar:hover { opacity: .75; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; font-size: 13.5px; width: 100%; }
th, td { text-align: left; vertical-align: top; padding: 6px 10px;
  border-bottom: 1px solid var(--line); }
td { font-variant-numeric: tabular-nums; }
pre { margin: 0; white-space: pre-wrap; overflow-wrap: anywhere; font-size: 12.5px; }
section > pre { padding: 14px; }
.rest { color: var(--soft); }
details { padding: 10px 14px; margin-top: 24px; } summary { cursor: pointer; font-weight: 600; }
"""

_PAGE = """<!doctype html>
<html lang="en">
<head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title><style>{style}</style></head>
<body>
<h1>{title}</h1>
<div class="tiles">{headline}</div>
{sections}
{drops}
{samples}
{metrics}
{config}
</body>
</html>
"""


def main(argv: Sequence[str]) -> int:
    """Write the report of the run folder named on the command line; the exit code."""
    if len(argv) != 1:
        print("usage: python -m jaxrl_async.metrics.report RUN", file=sys.stderr)
        return 2
    try:
        print(write_report(Path(argv[0])))
    except DataError as error:
        print(f"DataError: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
