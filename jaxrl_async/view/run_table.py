"""The rows of the table of runs: settings that differ, newest values, alerts; and CSV."""

import csv
import io
from collections.abc import Iterator, Sequence
from typing import Any

from jaxrl_async.view.alerts import alerts
from jaxrl_async.view.configuration import TAGS_SETTING
from jaxrl_async.view.watched import Points, WatchedRun, finite_number

MAX_COLUMNS = 300
"""Maximum number of settings that differ in one answer; further ones are counted."""
OWN = ("run.name", "run.dir", "run.resume", "run.overwrite", "run.resume_or_start")
"""Settings that say which run it is, and are no differences."""
FORMULA = ("=", "+", "-", "@")
"""Beginnings of texts that spreadsheets take as formulas."""


def differing(runs: Sequence[WatchedRun]) -> dict[str, Any]:
    """Return the settings that are not the same in all runs: their names, the values of each run
    (null: it has no such setting), the number of equal settings, and of those left out."""
    read = {run.name: run.settings() for run in runs}
    configured = [settings for settings in read.values() if settings]
    every = dict.fromkeys(name for settings in configured for name in settings)
    names = [name for name in every if name not in (*OWN, TAGS_SETTING)]
    differ = [name for name in names if len({one.get(name) for one in configured}) > 1]
    shown = differ[:MAX_COLUMNS]
    return {
        "names": shown,
        "values": {run: [s.get(name) for name in shown] for run, s in read.items()},
        "equal": len(names) - len(differ),
        "leftOut": len(differ) - len(shown),
    }


def measures(run: WatchedRun) -> dict[str, Any]:
    """Return a run's newest value of each metric, the time and the tokens it has trained, the best
    evaluation, and its alerts."""
    newest = {key: values[1] for key, values in run.extents().items() if values}
    held_out = run.points("eval/accuracy") or run.points("eval/reward")
    tokens, seconds = axis(run, "tokens"), axis(run, "time")
    return {
        "newest": newest,
        "best": max((value for _, value in held_out), default=None),
        "tokens": tokens[1][-1] if tokens[1] else None,
        "time": seconds[1][-1] if seconds[1] else None,
        "alerts": alerts(run),
    }


AXES = ("tokens", "time")
"""Axes that curves can have instead of the step: trained tokens, and seconds of training."""


def axis(run: WatchedRun, kind: str) -> Points:
    """Return the steps of a run and its trained tokens up to each, or its seconds of training. The
    time between the end of a process and the resume of its run does not count. Raises KeyError for
    another kind."""
    if kind not in AXES:
        raise KeyError(f"axis {kind}")
    steps, totals = list[int](), list[float]()
    total = before = 0.0
    if kind == "tokens":
        for step, count in run.points("train/tokens"):
            total += max(count, 0.0)
            steps.append(step)
            totals.append(total)
        return steps, totals
    for step, elapsed_s in run.points("time/elapsed_s"):
        if elapsed_s < before:  # resumed: the clock began again
            total, before = total + before, 0.0
        before = elapsed_s
        steps.append(step)
        totals.append(total + elapsed_s)
    return steps, totals


def thinned(points: Points, most: int) -> Points:
    """Return at most `most` points of an axis, evenly spaced, with the first and the last."""
    steps, values = points
    if len(steps) <= most:
        return points
    places = [round(i * (len(steps) - 1) / (most - 1)) for i in range(most)]
    return [steps[i] for i in places], [values[i] for i in places]


def csv_lines(runs: Sequence[WatchedRun], keys: Sequence[str]) -> Iterator[str]:
    """Yield all values of some metrics of some runs as CSV: a line for each step of each run, with
    its trained tokens and seconds of training."""
    yield _csv_line(["run", "step", *AXES, *keys])
    for run in runs:
        columns = [dict(run.points(key)) for key in keys]
        totals = [dict(zip(*axis(run, kind), strict=True)) for kind in AXES]
        for step in sorted({step for column in columns for step in column}):
            cells = [column.get(step) for column in (*totals, *columns)]
            yield _csv_line([run.name, step, *("" if cell is None else cell for cell in cells)])


def _csv_line(cells: Sequence[object]) -> str:
    """Return a line; a text that a spreadsheet would take as a formula follows an apostrophe."""
    texts = [f"'{c}" if isinstance(c, str) and c.startswith(FORMULA) else c for c in cells]
    written = io.StringIO()
    csv.writer(written, lineterminator="\n").writerow(texts)
    return written.getvalue()


def started_s(run: WatchedRun) -> float | None:
    """Return when a run was first started, seconds since 1970; None if it was not recorded."""
    starts = run.starts()
    return finite_number(starts[0]["started"]) if starts else None
