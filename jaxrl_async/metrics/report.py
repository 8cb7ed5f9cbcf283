"""Report a run on one HTML page, from its folder alone: python -m jaxrl_async.metrics.report RUN.

The page is one file: its charts are SVG (metrics/charts.py), and it loads nothing.
"""

import sys
from collections.abc import Iterable, Sequence
from html import escape
from pathlib import Path

from jaxrl_async.errors import DataError
from jaxrl_async.metrics.charts import (
    Chart,
    Line,
    accuracy_points,
    chart_svg,
    histogram_svg,
    lag_counts,
    number,
    points,
)
from jaxrl_async.metrics.metric import METRICS, metric_of
from jaxrl_async.metrics.recorder import METRICS_FILE, SAMPLES_FILE, read_lines

MAX_SAMPLES = 40
"""Samples shown, newest steps first."""
SHOWN_APART = ("step", "prompt", "completion", "reward", "tokens")
"""Fields of a sample with a place of their own, or none (tokens: see jaxrl_async.view)."""

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
                "Clipped and truncated",
                "share",
                (("policy/clip_share", "clipped"), ("policy/truncated_share", "weight truncated")),
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
            Chart("Staleness target", "versions", (("staleness/limit", "limit"),), True),
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
"""Folder of the warm start's own metrics, inside the run folder."""
WARM_CHARTS = (
    Chart("Loss", "nats", (("train/loss", "per answer token"),)),
    Chart("Gradient norm", "norm", (("train/grad_norm", "before clipping"),), True),
    Chart("Learning rate", "rate", (("train/learning_rate", "rate"),), True),
    Chart("Time of an update", "s", (("time/step_s", "update"),), True),
)


def write_report(run_dir: Path) -> Path:
    """Write run_dir/report.html from metrics.jsonl, samples.jsonl and config.yaml; return its path.

    Missing files are left out. Raises DataError if run_dir is not a folder.
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
    """Return the whole page; warm: the warm start's own lines, by update."""
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
        tiles=tiles(lines),
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


def tiles(lines: Sequence[Line]) -> str:
    """Return the tiles at the top of the page: progress, quality, speed."""
    steps = [line["step"] for line in lines]
    shown = [("steps", str(max(steps)) if steps else "0", "")]
    accuracy, eval_reward = accuracy_points(lines), points(lines, "eval/reward")
    if held_out := accuracy or eval_reward:
        shown.append(
            (
                f"held-out {'accuracy' if accuracy else 'reward'}",
                f"{held_out[-1][1]:.3f}",
                f"from {held_out[0][1]:.3f} at step {held_out[0][0]}",
            )
        )
    reward = points(lines, "reward/mean")
    if reward:
        shown.append(("reward", number(reward[-1][1]), f"from {number(reward[0][1])}"))
    for key, label, percent in (
        ("throughput/generated_tokens_per_s", "tokens/s generated", False),
        ("sampler/idle_share", "sampler idle", True),
        ("trainer/idle_share", "trainer idle", True),
        ("staleness/mean", "staleness", False),
    ):
        values = sorted(v for _, v in points(lines, key))
        if values:
            middle = values[len(values) // 2]
            shown.append(
                (label, f"{middle:.0%}" if percent else number(middle), "median of the steps")
            )
    seconds = sum(v for _, v in points(lines, "time/step_s"))
    if seconds:
        shown.append(
            (
                "time in steps",
                f"{seconds:,.0f} s" if seconds < 600 else f"{seconds / 60:,.1f} min",
                "",
            )
        )
    return "".join(
        f'<div class="tile"><div class="label">{escape(label)}</div>'
        f'<div class="value">{escape(value)}</div><div class="note">{escape(note)}</div></div>'
        for label, value, note in shown
    )


LAG_COLUMNS = ("reward", "length", "kl")
"""Measured of the tokens of each lag: `staleness/lag_<n>_...`."""


def lag_table(lines: Sequence[Line]) -> str:
    """Tabulate the tokens of each lag and the means of their episodes; "" if none were counted."""
    counts = lag_counts(lines)
    total = sum(counts.values())
    if not total:
        return ""
    means = {lag: [lag_mean(lines, lag, name) for name in LAG_COLUMNS] for lag in sorted(counts)}
    used = [i for i in range(len(LAG_COLUMNS)) if any(row[i] is not None for row in means.values())]
    rows = []
    for lag, values in means.items():
        measured = [values[i] for i in used]
        cells = [f"{counts[lag]:,.0f}", f"{counts[lag] / total:.1%}"]
        cells += ["" if v is None else number(v) for v in measured]
        rows.append(f"<tr><td>{lag}</td>{''.join(f'<td>{c}</td>' for c in cells)}</tr>")
    names = "".join(f"<th>{LAG_COLUMNS[i]}" for i in used)
    head = f"<tr><th>lag, versions<th>tokens<th>share{names}</tr>"
    return (
        "<section><h2>Learnt tokens by age</h2><p>Reward and length are those of the tokens' "
        f"episodes, averaged over the tokens.</p><table>{head}{''.join(rows)}</table>"
        "</section>"
    )


def lag_mean(lines: Sequence[Line], lag: int, name: str) -> float | None:
    """Return the run's mean of `staleness/lag_<lag>_<name>`, or None if it was not measured.

    Each step is weighted by its tokens of that lag.
    """
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
"""Keys that begin like a drop's reason but do not count groups."""


def drops_table(lines: Sequence[Line]) -> str:
    """Tabulate the dropped groups by reason, and their tokens; "" if none were dropped."""
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
    tokens = (
        f"<p>Those of which something was drawn had {wasted:,.0f} tokens.</p>" if wasted else ""
    )
    return f"<section><h2>Groups dropped</h2>{tokens}{table}</section>"


def samples_table(samples: Sequence[Line]) -> str:
    """Tabulate the newest samples: prompt, completion, reward and their other fields."""
    newest = sorted(samples, key=lambda s: -int(s.get("step", 0)))[:MAX_SAMPLES]
    if not newest:
        return ""
    rows = []
    for s in newest:
        rest = [f"{k}: {v}" for k, v in s.items() if k not in SHOWN_APART]
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
    """Tabulate every key with its first, last, smallest and largest value."""
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
        return "<section><p>No step has been recorded yet.</p></section>"
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
<div class="tiles">{tiles}</div>
{sections}
{drops}
{samples}
{metrics}
{config}
</body>
</html>
"""


def main(argv: Sequence[str]) -> int:
    """Write the reports of the run folders named on the command line; return the exit code."""
    usage = "usage: python -m jaxrl_async.metrics.report RUN ...: write RUN/report.html"
    if "--help" in argv or "-h" in argv:
        print(usage)
        return 0
    if not argv or any(word.startswith("-") for word in argv):
        print(usage, file=sys.stderr)
        return 2
    try:
        for run in argv:
            print(write_report(Path(run)))
    except DataError as error:
        print(f"DataError: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
