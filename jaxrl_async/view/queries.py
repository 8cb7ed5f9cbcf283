"""Answers to the page's queries about runs, from their folders: bounded, as JSON."""

from collections.abc import Callable, Mapping, Sequence
from math import isnan
from pathlib import Path
from typing import Any

from jaxrl_async.metrics.metric import metric_of
from jaxrl_async.metrics.profiles import traces_of
from jaxrl_async.view.sections import SECTIONS, WARM, WARM_CHARTS, Chart
from jaxrl_async.view.summary import ages, dropped, faults, lengths, tiles
from jaxrl_async.view.watched import SampleFilter, WatchedRun

MAX_POINTS = 2000
"""Maximum number of points of a curve in one answer."""
MAX_SAMPLES = 100
"""Maximum number of samples in one answer."""
MAX_COLUMNS = 2000
"""Maximum number of spans per depth of a lane in one answer."""
LAST_STEP = 2**62

Query = Mapping[str, Sequence[str]]

Runs = Mapping[str, WatchedRun]
Answer = Callable[[Runs, Query], Any]


def overview(runs: Runs, query: Query) -> Any:
    """Return each run's state, and a text that changes with its files."""
    return [{"name": name, "seen": run.look(), "state": run.state()} for name, run in runs.items()]


def layout(runs: Runs, query: Query) -> Any:
    """Return the charts, by section, that at least one run has data for; and all metrics."""
    present = {key for run in runs.values() for key in run.measured()}
    sections = [(title, list(charts)) for title, charts in SECTIONS]
    parts = sorted(k for k in present if k.startswith("reward/") and "<" in told(k)["key"])
    labels = tuple((key, key.partition("/")[2]) for key in parts)
    sections[0][1].append(Chart("Parts of the reward", "reward", labels))
    sections.append(("Warm start, by update", list(WARM_CHARTS)))
    drawn = [
        {"title": title, "charts": [d for c in charts if (d := _drawn(c, present))["curves"]]}
        for title, charts in sections
    ]
    metrics = [{**told(key), "key": key} for key in sorted(present)]
    return {"sections": [s for s in drawn if s["charts"]], "metrics": metrics}


def _drawn(chart: Chart, present: set[str]) -> dict[str, Any]:
    curves = [curve for curve in chart.curves if curve[0] in present]
    return {"title": chart.title, "unit": chart.unit, "zero": chart.from_zero, "curves": curves}


def told(key: str) -> dict[str, str]:
    """Return a metric's declaration; empty if another version of the package wrote it."""
    try:
        metric = metric_of(key.removeprefix(WARM))
    except AssertionError:
        return {"key": key, "unit": "", "about": ""}
    return {"key": metric.key, "unit": metric.unit, "about": metric.help}


def curves(runs: Runs, query: Query) -> Any:
    """Return the curves of the metrics `key`, of a run, between two steps."""
    run = runs[query["run"][0]]
    first, last = _number(query, "first", 0), _number(query, "last", LAST_STEP)
    most = min(_number(query, "points", 600), MAX_POINTS)
    return run.curves(list(query.get("key", ())), first, last, max(most, 2))


def summary(runs: Runs, query: Query) -> Any:
    """Return a run's tiles, trained tokens by age, lengths, drops and faults."""
    run = runs[query["run"][0]]
    return {
        "tiles": tiles(run),
        "ages": ages(run),
        "lengths": lengths(run),
        "dropped": dropped(run),
        "faults": faults(run),
    }


def extents(runs: Runs, query: Query) -> Any:
    """Return all metrics of a run: first, last, minimum and maximum value, unit and meaning."""
    found = runs[query["run"][0]].extents()
    return [{**told(key), "key": key, "values": values} for key, values in found.items()]


def samples(runs: Runs, query: Query) -> Any:
    """Return a run's samples that match the query: their number, and one page of them."""
    wanted = SampleFilter(
        text=(query.get("text") or [""])[0],
        first_step=_number(query, "first", None),
        last_step=_number(query, "last", None),
        least_reward=_fraction(query, "least"),
        most_reward=_fraction(query, "most"),
        stop=(query.get("stop") or [""])[0],
    )
    most = min(_number(query, "count", 20), MAX_SAMPLES)
    found, page = runs[query["run"][0]].samples(wanted, _number(query, "skip", 0), most)
    return {"found": found, "samples": page}


def spans(runs: Runs, query: Query) -> Any:
    """Return the timeline between the times `from` and `to`, seconds since the run's first span, or
    between two steps."""
    found = runs[query["run"][0]].spans()
    columns = min(_number(query, "columns", 400), MAX_COLUMNS)
    first, last = _number(query, "first", None), _number(query, "last", None)
    if first is None and last is None:
        window = _fraction(query, "from") or 0.0, _fraction(query, "to")
    else:
        window = found.window_of(first or 0, LAST_STEP if last is None else last)
    return found.shown(window[0], found.end_s if window[1] is None else window[1], max(columns, 1))


def identity(runs: Runs, query: Query) -> Any:
    """Return a run's versions, devices and configuration, and its traces of JAX's profiler."""
    run = runs[query["run"][0]]
    traces = [
        {"step": step, "file": file, "bytes": size} for step, file, size in traces_of(run.root)
    ]
    return {**run.identity(), "traces": traces}


def file_of(runs: Runs, query: Query) -> Path:
    """Return the requested file of a run, which must be one of its traces. Raises KeyError for any
    other."""
    run, asked = runs[query["run"][0]], query["file"][0]
    if asked not in {file for _, file, _ in traces_of(run.root)}:
        raise KeyError(f"{run.name} has no such trace")
    return run.root / asked


ANSWERS: dict[str, Answer] = {
    "/api/runs": overview,
    "/api/layout": layout,
    "/api/curves": curves,
    "/api/summary": summary,
    "/api/extents": extents,
    "/api/samples": samples,
    "/api/spans": spans,
    "/api/identity": identity,
}


def _number(query: Query, name: str, usual: Any) -> Any:
    given = (query.get(name) or [""])[0]
    return max(int(given), 0) if given else usual


def _fraction(query: Query, name: str) -> float | None:
    given = (query.get(name) or [""])[0]
    if given and isnan(float(given)):
        raise ValueError(f"{name} is no number")
    return float(given) if given else None
