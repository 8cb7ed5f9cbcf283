"""Answers to the page's queries about runs, from their folders: bounded, as JSON."""

import importlib.metadata
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import cache
from itertools import groupby
from math import isnan
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jaxrl_async.later import Later
from jaxrl_async.metrics.metric import metric_of
from jaxrl_async.metrics.series import accuracy_points, number
from jaxrl_async.metrics.symptoms import ALERT_RULES, DOCS, NEEDED_BY_RULES
from jaxrl_async.metrics.trace_file import traces_of
from jaxrl_async.view.sections import SECTIONS, WARM, WARM_CHARTS, Chart
from jaxrl_async.view.watched import ORDERS, RunsByName, SampleFilter, WatchedRun, locks_held
from jaxrl_async.view.watched_files import Points, finite_number

if TYPE_CHECKING:
    from jaxrl_async.view import run_table
else:
    run_table = Later("jaxrl_async.view.run_table")

MAX_POINTS = 2000
"""Maximum number of points of a curve in one answer."""
MAX_CHOSEN = 50
"""Maximum number of runs in one answer with their curves or measures."""
AXIS_POINTS = 600
"""Maximum number of points of an axis in one answer."""
LOG_BYTES = 2**16
"""Maximum size of a part of a log in one answer, bytes."""
HISTORY = 100
"""Maximum number of evaluations of a name in one answer: the newest."""
MAX_SAMPLES = 100
"""Maximum number of samples in one answer."""
MAX_COLUMNS = 2000
"""Maximum number of spans per depth of a lane in one answer."""
LAST_STEP = 2**62
Z_95 = 1.959963984540054
"""Half the length of a 95 % interval, in standard errors."""
SHARES = ("accuracy", "avg_at_", "pass_at_", "maj_at_")
"""Beginnings of the names of an evaluation's means that are shares."""
MEAN_DETAILS = ("_stderr", "_change")
"""Endings of the names of an evaluation's metrics that belong to a mean."""
ALWAYS_LISTED = ("accuracy", "reward")
"""Means of an evaluation that are listed without a standard error too."""

Query = Mapping[str, Sequence[str]]
Answer = Callable[[RunsByName, Query], Any]


def overview(runs: RunsByName, query: Query) -> Any:
    """Return the runs by their start, each with its state, its progress, and a text that changes
    with its files; the folders; and the address of the documentation."""
    locks = locks_held()
    facts = [facts_of(run, run.state(locks), run.stamp()) for run in runs.values()]
    return as_overview(facts, runs)


def as_overview(facts: list[dict[str, object]], runs: RunsByName) -> dict[str, Any]:
    """Return the overview of runs. A run's number, which is its color, is its rank by start and
    name: one that begins later changes no other's."""
    facts.sort(key=lambda run: (run["started"] or 0.0, run["name"]))
    return {
        "runs": [{**run, "number": number} for number, run in enumerate(facts)],
        "leftOut": runs.left_out,
        "folders": runs.folders,
    }


def facts_of(run: WatchedRun, state: str, seen: str) -> dict[str, Any]:
    """Return what the list of runs shows of one."""
    step, update = run.newest()
    starts = run.starts()
    return {
        "name": run.name,
        "seen": seen,
        "state": state,
        "step": step,
        "update": update,
        "started": started_s(run),
        "host": str(starts[-1].get("host", "")) if starts else "",
        "tags": run.tags(),
    }


def chosen_runs(runs: RunsByName, query: Query) -> list[WatchedRun]:
    """Return the runs of a query. Raises KeyError for an unknown one, or for none."""
    names = query["run"]
    if len(names) > MAX_CHOSEN:
        raise ValueError(f"{len(names)} runs are more than {MAX_CHOSEN}")
    return [runs[name] for name in dict.fromkeys(names)]


def chosen_or_all(runs: RunsByName, query: Query) -> list[WatchedRun]:
    """Return the runs of a query; all, if it names none. Raises KeyError for an unknown one."""
    return [runs[name] for name in query["run"]] if "run" in query else list(runs.values())


def layout(runs: RunsByName, query: Query) -> Any:
    """Return the charts, by section, that at least one of the runs `run` (or of all) has data for;
    and all metrics."""
    chosen = chosen_or_all(runs, query)
    present = {key for run in chosen for key in run.known()}
    sections = [(title, list(charts)) for title, charts in SECTIONS]
    parts = sorted(k for k in present if k.startswith("reward/") and "<" in declaration(k)["key"])
    labels = tuple((key, key.partition("/")[2]) for key in parts)
    sections[0][1].append(Chart("Parts of the reward", "reward", labels))
    sections.insert(1, ("Evaluations by name", charts_of_evaluations(present)))
    sections.append(("Warm start, by update", list(WARM_CHARTS)))
    shown = [
        {"title": title, "charts": [d for c in charts if (d := _chart_json(c, present))["curves"]]}
        for title, charts in sections
    ]
    metrics = [{**declaration(key), "key": key} for key in sorted(present)]
    return {"sections": [s for s in shown if s["charts"]], "metrics": metrics}


def charts_of_evaluations(present: Collection[str]) -> list[Chart]:
    """Return two charts for each evaluation by name: its shares, and its reward."""
    charts = []
    for name in sorted({key.split("/")[1] for key in present if key.count("/") == 2}):
        prefix = f"eval/{name}/"
        own = sorted(key.removeprefix(prefix) for key in present if key.startswith(prefix))
        means = [m for m in own if m.startswith(SHARES) and not m.endswith(MEAN_DETAILS)]
        labels = tuple((prefix + mean, mean.replace("_at_", "@")) for mean in means)
        charts.append(Chart(name, "share", labels, True))
        charts.append(Chart(f"{name}: reward", "reward", ((f"{prefix}reward", "mean"),)))
    return charts


def _chart_json(chart: Chart, present: set[str]) -> dict[str, Any]:
    curves = [curve for curve in chart.curves if curve[0] in present]
    return {"title": chart.title, "unit": chart.unit, "zero": chart.from_zero, "curves": curves}


def declaration(key: str) -> dict[str, str]:
    """Return a metric's declaration; empty if another version of the package wrote it."""
    try:
        metric = metric_of(key.removeprefix(WARM))
    except AssertionError:
        return {"key": key, "unit": "", "about": ""}
    return {"key": metric.key, "unit": metric.unit, "about": metric.help}


def curves(runs: RunsByName, query: Query) -> Any:
    """Return the curves of the metrics `key`, of each run, between two steps."""
    first, last = _number(query, "first", 0), _number(query, "last", LAST_STEP)
    most = max(min(_number(query, "points", 600), MAX_POINTS), 2)
    keys = list(query.get("key", ()))
    return {run.name: run.curves(keys, first, last, most) for run in chosen_runs(runs, query)}


def axes(runs: RunsByName, query: Query) -> Any:
    """Return the axis `x` of each run: steps, and tokens or seconds up to each."""
    kind = query["x"][0]
    return {run.name: thinned(run.axis(kind), AXIS_POINTS) for run in chosen_runs(runs, query)}


def settings(runs: RunsByName, query: Query) -> Any:
    """Return the settings that are not the same in all runs `run` (or in all)."""
    chosen = chosen_or_all(runs, query)
    return run_table.differing(chosen)


def rows(runs: RunsByName, query: Query) -> Any:
    """Return the newest values and the alerts of each run."""
    return {run.name: measures(run) for run in chosen_runs(runs, query)}


def log_part(runs: RunsByName, query: Query) -> Any:
    """Return the last lines of a run's log, or the lines that end at the offset `before`."""
    text, begin, size = runs[query["run"][0]].log_text(_number(query, "before", None), LOG_BYTES)
    return {"text": text, "from": begin, "size": size}


def csv_of(runs: RunsByName, query: Query) -> Iterator[str]:
    """Return the lines of all values of the metrics `key` of the runs `run`, as CSV."""
    chosen = [runs[name] for name in dict.fromkeys(query["run"])]
    return run_table.csv_lines(chosen, list(dict.fromkeys(query["key"])))


def summary(runs: RunsByName, query: Query) -> Any:
    """Return a run's tiles, alerts, evaluations, trained tokens by age, lengths, drops and
    faults."""
    run = runs[query["run"][0]]
    return {
        "tiles": tiles(run),
        "alerts": alerts(run),
        "evaluations": evaluations(run),
        "ages": ages(run),
        "lengths": lengths(run),
        "dropped": dropped(run),
        "faults": faults(run),
    }


def extents(runs: RunsByName, query: Query) -> Any:
    """Return all metrics of a run: first, last, minimum and maximum value, unit and meaning."""
    values_of = runs[query["run"][0]].extents()
    return [{**declaration(key), "key": key, "values": values} for key, values in values_of.items()]


def samples(runs: RunsByName, query: Query) -> Any:
    """Return a run's samples that match the query: their number, and one page of them."""
    filters = SampleFilter(
        text=(query.get("text") or [""])[0],
        first_step=_number(query, "first", None),
        last_step=_number(query, "last", None),
        least_reward=_fraction(query, "least"),
        most_reward=_fraction(query, "most"),
        stop=(query.get("stop") or [""])[0],
        number=_number(query, "sample", None),
    )
    order = (query.get("order") or [ORDERS[0]])[0]
    if order not in ORDERS:
        raise ValueError(f"order is none of {', '.join(ORDERS)}")
    most = min(_number(query, "count", 20), MAX_SAMPLES)
    count, page = runs[query["run"][0]].samples(filters, _number(query, "skip", 0), most, order)
    numbers, lines = [number for number, _ in page], [line for _, line in page]
    return {"found": count, "samples": lines, "numbers": numbers}


def spans(runs: RunsByName, query: Query) -> Any:
    """Return the timeline between the times `from` and `to`, seconds since the run's first span, or
    between two steps."""
    recorded = runs[query["run"][0]].spans()
    columns = min(_number(query, "columns", 400), MAX_COLUMNS)
    first, last = _number(query, "first", None), _number(query, "last", None)
    if first is None and last is None:
        window = _fraction(query, "from") or 0.0, _fraction(query, "to")
    else:
        window = recorded.window_of(first or 0, LAST_STEP if last is None else last)
    end_s = recorded.end_s if window[1] is None else window[1]
    return recorded.shown(window[0], end_s, max(columns, 1))


def identity(runs: RunsByName, query: Query) -> Any:
    """Return a run's versions, devices and configuration, its folder, its starts, its tags, and its
    traces of JAX's profiler."""
    run = runs[query["run"][0]]
    traces = [
        {"step": step, "file": file, "bytes": size} for step, file, size in traces_of(run.root)
    ]
    seconds = run.axis("time")[1]
    return {
        **run.identity(),
        "path": str(run.root),
        "starts": run.starts(),
        "tags": run.tags(),
        "time": seconds[-1] if seconds else None,
        "traces": traces,
    }


def file_of(runs: RunsByName, query: Query) -> Path:
    """Return the requested file of a run, which must be one of its traces. Raises KeyError for any
    other."""
    run, name = runs[query["run"][0]], query["file"][0]
    if name not in {file for _, file, _ in traces_of(run.root)}:
        raise KeyError(f"{run.name} has no such trace")
    return run.root / name


ANSWERS: dict[str, Answer] = {
    "/api/runs": overview,
    "/api/layout": layout,
    "/api/curves": curves,
    "/api/axes": axes,
    "/api/settings": settings,
    "/api/rows": rows,
    "/api/log": log_part,
    "/api/summary": summary,
    "/api/extents": extents,
    "/api/samples": samples,
    "/api/spans": spans,
    "/api/identity": identity,
}


def _number(query: Query, name: str, usual: object) -> Any:
    text = (query.get(name) or [""])[0]
    return max(int(text), 0) if text else usual


def _fraction(query: Query, name: str) -> float | None:
    text = (query.get(name) or [""])[0]
    if text and isnan(float(text)):
        raise ValueError(f"{name} is no number")
    return float(text) if text else None


# ---- a run in a few numbers: tiles, trained tokens by age, lengths, groups dropped, faults


MEDIANS = (
    ("throughput/generated_tokens_per_s", "tokens/s generated", False),
    ("sampler/idle_share", "sampler idle", True),
    ("trainer/idle_share", "trainer idle", True),
    ("staleness/mean", "staleness", False),
)
"""Key, label, and whether it is a percentage, of the tiles that show a median of the steps."""
AGE_COLUMNS = ("reward", "length", "kl")
"""Measurements by token age: `staleness/lag_<n>_...`."""
TOKENS = "staleness/tokens_lag_"
LENGTHS = "rollout/lengths_to_"
DROPPED = "staleness/dropped_"
NOT_COUNTED = ("length_mean", "share")
"""Suffixes after DROPPED of metrics that do not count groups."""


def tiles(run: WatchedRun) -> list[dict[str, str]]:
    """Return labels, values and notes of the tiles: progress, quality, speed."""
    shown = [_tile("steps", str(run.steps()))]
    accuracy = accuracy_points(_evaluations(run))
    if held_out := accuracy or run.points("eval/reward"):
        kind = "accuracy" if accuracy else "reward"
        error = dict(run.points(f"eval/{kind}_stderr")).get(held_out[-1][0])
        note = f"from {held_out[0][1]:.3f} at step {held_out[0][0]}"
        best_step, best = max(held_out, key=lambda point: point[1])
        if best > held_out[-1][1]:
            note += f"; best {best:.3f} at step {best_step}"
        within = "" if error is None else f" ± {Z_95 * error:.3f}"
        shown.append(_tile(f"held-out {kind}", f"{held_out[-1][1]:.3f}{within}", note))
    if reward := run.points("reward/mean"):
        shown.append(_tile("reward", number(reward[-1][1]), f"from {number(reward[0][1])}"))
    for key, label, percent in MEDIANS:
        if values := sorted(value for _, value in run.points(key)):
            middle = values[len(values) // 2]
            text = f"{100 * middle:.0f} %" if percent else number(middle)
            shown.append(_tile(label, text, "median of the steps"))
    if seconds := sum(value for _, value in run.points("time/step_s")):
        text = f"{seconds:,.0f} s" if seconds < 600 else f"{seconds / 60:,.1f} min"
        shown.append(_tile("time in steps", text))
    return shown


def _tile(label: str, value: str, note: str = "") -> dict[str, str]:
    return {"label": label, "value": value, "note": note}


def _evaluations(run: WatchedRun) -> list[dict[str, float]]:
    """Return the line of each evaluation, as in metrics.jsonl."""
    lines: dict[int, dict[str, float]] = {}
    for key in ("eval/accuracy", "eval/reward"):
        for step, value in run.points(key):
            lines.setdefault(step, {"step": step})[key] = value
    return [lines[step] for step in sorted(lines)]


def evaluations(run: WatchedRun) -> list[dict[str, Any]]:
    """Return the last reward and accuracy of each evaluation, and its other means that have a
    standard error, with the 95 % interval where there is an error, which a single prompt has not,
    and the change since the evaluation before where that was measured."""
    rows = []
    for key in run.measured():
        if not key.startswith("eval/") or key.endswith(MEAN_DETAILS):
            continue
        errors = dict(run.points(f"{key}_stderr"))
        if not errors and key.rpartition("/")[2] not in ALWAYS_LISTED:
            continue
        if not (history := run.points(key)[-HISTORY:]):
            continue  # it was never finite
        step, value = history[-1]
        change = dict(run.points(f"{key}_change")).get(step)
        _, name, measure = key.split("/") if key.count("/") == 2 else ("", "eval", key[5:])
        rows.append(
            {
                "name": name,
                "measure": measure.replace("_at_", "@"),
                "step": step,
                "value": value,
                "interval": _interval(value, errors.get(step)),
                "change": change,
                "changeInterval": _interval(
                    change, dict(run.points(f"{key}_change_stderr")).get(step)
                ),
                "history": [[s, v, _interval(v, errors.get(s))] for s, v in history],
            }
        )
    return rows


def _interval(mean: float | None, stderr: float | None) -> list[float] | None:
    if mean is None or stderr is None:
        return None
    return [mean - Z_95 * stderr, mean + Z_95 * stderr]


def ages(run: WatchedRun) -> list[dict[str, Any]]:
    """Return the trained tokens by age in versions, with measurements of their episodes, averaged
    over the tokens of all steps."""
    counts = _numbered(run, TOKENS)
    return [
        {"age": age, "tokens": counts[age]} | {n: age_mean(run, age, n) for n in AGE_COLUMNS}
        for age in sorted(counts)
    ]


def age_mean(run: WatchedRun, age: int, name: str) -> float | None:
    """Return the run's mean of `staleness/lag_<age>_<name>`, or None if it was not measured.

    Each step is weighted by its tokens of that age.
    """
    tokens = dict(run.points(f"{TOKENS}{age}"))
    total = count = 0.0
    for step, value in run.points(f"staleness/lag_{age}_{name}"):
        weight = tokens.get(step, 0.0)
        total, count = total + value * weight, count + weight
    return total / count if count else None


def lengths(run: WatchedRun) -> dict[str, float]:
    """Return the number of trained episodes by number of generated tokens: 9 to 16, ..."""
    counts = _numbered(run, LENGTHS)
    return {_length_text(most): counts[most] for most in sorted(counts)}


def _numbered(run: WatchedRun, prefix: str) -> dict[int, float]:
    """Return the totals above 0 of the metrics named by this prefix and a short number."""
    numbered = ((k.removeprefix(prefix), v) for k, v in run.totals(prefix).items())
    return {int(n): v for n, v in numbered if v > 0 and n.isascii() and n.isdigit() and len(n) < 10}


def _length_text(most: int) -> str:
    """Describe the lengths up to this power of two and above the one below it."""
    return str(most) if most <= 2 else f"{most // 2 + 1} to {most}"


def dropped(run: WatchedRun) -> dict[str, Any]:
    """Return the number of dropped groups by reason, and of the tokens generated for them."""
    sums = {key.removeprefix(DROPPED): value for key, value in run.totals(DROPPED).items()}
    reasons = {k: v for k, v in sums.items() if k not in NOT_COUNTED and v > 0}
    return {"groups": reasons, "tokens": sum(v for _, v in run.points("staleness/wasted_tokens"))}


def faults(run: WatchedRun) -> dict[str, float]:
    """Return the faults of a run, with their counts."""
    sums = {key.removeprefix("faults/"): value for key, value in run.totals("faults/").items()}
    return {kind: count for kind, count in sums.items() if count > 0}


# ---- a run in the table of runs: newest values, alerts


def measures(run: WatchedRun) -> dict[str, Any]:
    """Return a run's newest value of each metric, the time and the tokens it has trained, the best
    evaluation, and its alerts."""
    newest = {key: values[1] for key, values in run.extents().items() if values}
    held_out = run.points("eval/accuracy") or run.points("eval/reward")
    tokens, seconds = run.axis("tokens"), run.axis("time")
    return {
        "newest": newest,
        "best": max((value for _, value in held_out), default=None),
        "tokens": tokens[1][-1] if tokens[1] else None,
        "time": seconds[1][-1] if seconds[1] else None,
        "alerts": alerts(run),
    }


def thinned(points: Points, most: int) -> Points:
    """Return at most `most` points of an axis, evenly spaced, with the first and the last."""
    steps, values = points
    if len(steps) <= most:
        return points
    indices = [round(i * (len(steps) - 1) / (most - 1)) for i in range(most)]
    return [steps[i] for i in indices], [values[i] for i in indices]


def started_s(run: WatchedRun) -> float | None:
    """Return when a run was first started, seconds since 1970; None if it was not recorded."""
    starts = run.starts()
    return finite_number(starts[0]["started"]) if starts else None


def alerts(run: WatchedRun) -> list[dict[str, object]]:
    """Return the alerts of a run: of each rule the last stretch of at least `in_a_row` updates that
    show it, with its first and last step, and whether it lasts; those that last come first."""
    updates: dict[int, dict[str, float]] = {step: {} for step, _ in run.points("train/grad_norm")}
    for key in NEEDED_BY_RULES:
        for step, value in run.points(key):
            if step in updates:
                updates[step][key] = value
    steps = sorted(updates)
    by_title: dict[str, dict[str, object]] = {}
    for rule in ALERT_RULES:
        stretch = last_stretch([rule.shown(updates[step]) for step in steps], rule.in_a_row)
        if stretch is None:
            continue
        first, last = (steps[index] for index in stretch)
        stronger = by_title.get(rule.behind)
        if stronger is not None and (stronger["lasts"] or stretch[1] < len(steps) - 1):
            continue
        count = stretch[1] - stretch[0] + 1
        by_title[rule.title] = {
            "title": rule.title,
            "says": f"{count:,} {'update' if count == 1 else 'updates'} {rule.text}.",
            "first": first,
            "last": last,
            "lasts": stretch[1] == len(steps) - 1,
            "keys": [key for key in rule.keys if run.points(key)],
            "help": f"{DOCS}#{rule.section}",
            "helpAddress": page_address(documentation(), f"{DOCS}#{rule.section}"),
        }
    return sorted(by_title.values(), key=lambda alert: not alert["lasts"])


def last_stretch(shown: list[bool], in_a_row: int) -> tuple[int, int] | None:
    """Return the first and the last index of the last stretch of at least `in_a_row` true
    values."""
    end = 0
    last: tuple[int, int] | None = None
    for value, equal in groupby(shown):
        begin, end = end, end + len(list(equal))
        if value and end - begin >= in_a_row:
            last = begin, end - 1
    return last


def page_address(index: str, page: str) -> str:
    """Return the address of a section, such as "docs/metrics.md#kl", of the documentation whose
    first page has the address `index`: files of a repository, or a site; "" if `index` is ""."""
    base = index.removesuffix("index.md").rstrip("/")
    if not base:
        return ""
    name, section = page.removeprefix("docs/").split("#")
    if "/blob/" in base or "/tree/" in base:
        return f"{base}/{name}#{section}"
    return f"{base}/{name.removesuffix('.md')}/#{section}"


@cache
def documentation() -> str:
    """Return the address of the documentation, as the installed package names it; "" if it names
    none."""
    try:
        urls = importlib.metadata.metadata("jaxrl_async").get_all("Project-URL") or []
    except importlib.metadata.PackageNotFoundError:
        return ""
    named = dict(url.split(", ", 1) for url in urls if ", " in url)
    address = named.get("Documentation", "")
    return address if address.startswith("https://") else ""
