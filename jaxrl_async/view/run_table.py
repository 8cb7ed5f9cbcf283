"""What the table of runs needs of several: the settings that differ, and all values as CSV."""

import csv
import io
from collections.abc import Iterator, Sequence
from typing import Any

from jaxrl_async.view.configuration import TAGS_SETTING
from jaxrl_async.view.watched import AXES, WatchedRun

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
    differ = [name for name in names if len({settings.get(name) for settings in configured}) > 1]
    shown = differ[:MAX_COLUMNS]
    return {
        "names": shown,
        "values": {run: [s.get(name) for name in shown] for run, s in read.items()},
        "equal": len(names) - len(differ),
        "leftOut": len(differ) - len(shown),
    }


def csv_lines(runs: Sequence[WatchedRun], keys: Sequence[str]) -> Iterator[str]:
    """Yield all values of some metrics of some runs as CSV: a line for each step of each run, with
    its trained tokens and seconds of training."""
    yield _csv_line(["run", "step", *AXES, *keys])
    for run in runs:
        columns = [dict(run.points(key)) for key in keys]
        totals = [dict(zip(*run.axis(kind), strict=True)) for kind in AXES]
        for step in sorted({step for column in columns for step in column}):
            cells = [column.get(step) for column in (*totals, *columns)]
            yield _csv_line([run.name, step, *("" if cell is None else cell for cell in cells)])


def _csv_line(cells: Sequence[object]) -> str:
    """Return a line; a text that a spreadsheet would take as a formula follows an apostrophe."""
    texts = [f"'{c}" if isinstance(c, str) and c.startswith(FORMULA) else c for c in cells]
    written = io.StringIO()
    csv.writer(written, lineterminator="\n").writerow(texts)
    return written.getvalue()
