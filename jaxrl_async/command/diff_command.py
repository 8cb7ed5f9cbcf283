"""Compare two runs: settings, versions, last metrics, and the first step that differs.

    jaxrl-async diff runs/a runs/b               what differs, as text
    jaxrl-async diff runs/a runs/b --all         all metrics, not just the main ones
    jaxrl-async diff runs/a runs/b --json        the same as JSON, with all metrics

A difference of two metrics has a 95 % interval where both runs know the standard error. It takes the
runs for independent: `jaxrl-async eval`, which asks two policies the same, gives a narrower one.

Exit codes: 0 compared, whether they differ or not; 2 a bad command line, or a run that cannot be
read.
"""  # noqa: E501

import argparse
import json
import logging
import shutil
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from jaxrl_async.command.run_differences import (
    Divergence,
    LastValue,
    RunRecords,
    as_plain,
    difference,
    first_divergence,
    last_values,
    setting_differences,
    version_differences,
)
from jaxrl_async.config.draft import read_draft
from jaxrl_async.config.load import load
from jaxrl_async.config.setting_fields import value_text
from jaxrl_async.data.addresses import local_argument
from jaxrl_async.errors import ConfigError, shown
from jaxrl_async.evals.estimates import Estimate
from jaxrl_async.help_format import command_parser
from jaxrl_async.metrics.json_logs import lines_for_people
from jaxrl_async.metrics.recorder import METRICS_FILE, STARTS_FILE, read_lines
from jaxrl_async.metrics.series import number

CONFIG_FILE = "config.yaml"
MAIN = (
    *("reward/mean", "reward/std", "train/loss", "policy/entropy", "policy/kl_reference"),
    *("rollout/length_mean", "rollout/truncated_share", "staleness/mean"),
    *("throughput/generated_tokens_per_s", "throughput/trained_tokens_per_s"),
)
"""Metrics that are shown in addition to the evaluations (eval/...)."""
COLUMNS = 140
"""Width of the table if the output is no terminal, characters."""
LEAST_CELL = 12
"""Minimum width to which a value is cut, characters."""
SHOWN_METRICS = 6
"""Number of metrics that are shown of the first step that differs."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line `argv` (without the program's name); return the exit code."""
    args = _parser().parse_args(argv)
    with lines_for_people():
        try:
            runs = [read_run(path) for path in (args.a, args.b)]
        except (ConfigError, OSError) as error:
            print(f"config error: {error}", file=sys.stderr)
            return 2
    if args.json:
        print(json.dumps(as_json(*runs), indent=2, ensure_ascii=False))
    else:
        columns = shutil.get_terminal_size((COLUMNS, 24)).columns
        print("\n".join(shown(line) for line in text_of(*runs, columns=columns, whole=args.all)))
    return 0


def read_run(path: str) -> RunRecords:
    """Read a run's records. Raises ConfigError for a folder without a run."""
    folder = local_argument(path, "records of a run")
    file = folder / CONFIG_FILE
    if not file.is_file():
        raise ConfigError(f"{path}: there is no run ({CONFIG_FILE} is missing). Give its folder.")
    own = logging.getLogger("jaxrl_async.config")
    level = own.level
    own.setLevel(logging.ERROR)  # former names in an older run are not reported
    try:
        config, is_complete = load(file).model_dump(), True
    except ConfigError:  # of another version: compared as it is written
        config, is_complete = read_draft(file).tree, False
    finally:
        own.setLevel(level)
    return RunRecords(
        name=path,
        config=as_plain(config),
        lines=[line for line in read_lines(folder / METRICS_FILE) if "step" in line],
        versions=_versions(folder / STARTS_FILE),
        is_complete=is_complete,
    )


def _versions(file: Path) -> dict[str, str]:
    """Return the versions that a run recorded when it was last started; {}: none."""
    try:
        last = json.loads(file.read_text("utf-8").splitlines()[-1])
    except (OSError, ValueError, IndexError):
        return {}
    if not isinstance(last, dict):
        return {}
    packages = last.get("packages")
    own = {name: last[name] for name in ("jaxrl_async", "python") if name in last}
    found = (packages if isinstance(packages, dict) else {}) | own
    return {str(name): str(version) for name, version in found.items()}


# ---- text


def text_of(a: RunRecords, b: RunRecords, *, columns: int, whole: bool) -> Iterator[str]:
    """Yield the lines of the comparison.

    Args:
        a: a run.
        b: the other one.
        columns: width of the table.
        whole: show all metrics.
    """
    for name, run in (("a", a), ("b", b)):
        note = "" if run.is_complete else f"; its {CONFIG_FILE} is of another version"
        yield f"{name}: {run.name}, {run.steps} updates{note}"
    settings = setting_differences(a, b)
    rows = [(name, *map(value_text, values)) for name, values in settings.items()]
    yield ""
    if rows:
        yield from _table(("settings that differ", "a", "b", "default"), rows, columns)
    else:
        yield "no setting differs"
    yield ""
    yield from _version_lines(a, b, columns)
    yield ""
    yield from _metric_lines(a, b, columns, whole)
    yield ""
    yield _divergence_line(first_divergence(a.lines, b.lines))


def _version_lines(a: RunRecords, b: RunRecords, columns: int) -> Iterator[str]:
    unrecorded = [run.name for run in (a, b) if not run.versions]
    if unrecorded:
        yield f"versions are not recorded in {' and '.join(unrecorded)}"
    elif rows := [(name, *pair) for name, pair in version_differences(a, b).items()]:
        yield from _table(("versions that differ", "a", "b"), rows, columns)
    else:
        yield "no version differs"


def _metric_lines(a: RunRecords, b: RunRecords, columns: int, whole: bool) -> Iterator[str]:
    of_a, of_b = last_values(a.lines), last_values(b.lines)
    names = [
        *sorted(key for key in {*of_a, *of_b} if key.startswith("eval/")),
        *(key for key in MAIN if key in of_a or key in of_b),
    ]
    if whole:
        names += sorted({*of_a, *of_b} - {*names})
    if not names:
        yield "no metrics"
        return
    rows = []
    for name in names:
        in_a, in_b = of_a.get(name), of_b.get(name)
        change = "" if in_a is None or in_b is None else estimate_text(difference(in_a, in_b), "+")
        rows.append((name, _last_text(in_a, a.steps), _last_text(in_b, b.steps), change))
    yield from _table(("last values", "a", "b", "b - a"), rows, columns)


def _last_text(last: LastValue | None, steps: int) -> str:
    """Return a last value with its interval, and its step unless it is the run's last one."""
    if last is None:
        return "-"
    step = "" if last.step == steps else f" (step {last.step})"
    return estimate_text(Estimate(last.value, last.stderr)) + step


def estimate_text(value: Estimate, sign: str = "") -> str:
    """Return a mean, and plus or minus which number its 95 % interval is."""
    mean = number(value.mean)
    text = f"{sign if value.mean >= 0 else ''}{mean}"
    return text if value.interval is None else f"{text} ± {number(value.interval[1] - value.mean)}"


def _divergence_line(divergence: Divergence | None) -> str:
    if divergence is None:
        return "no step of both differs in a metric that is independent of time"
    first = [
        f"{name} {_value_text(in_a)} and {_value_text(in_b)}"
        for name, (in_a, in_b) in list(divergence.metrics.items())[:SHOWN_METRICS]
    ]
    more = len(divergence.metrics) - len(first)
    others = f", and {more} more" if more else ""
    return f"first step that differs: {divergence.step} ({', '.join(first)}{others})"


def _value_text(value: object) -> str:
    return f"{value:.9g}" if isinstance(value, float) else str(value)


def _table(head: Sequence[str], rows: Sequence[Sequence[str]], columns: int) -> Iterator[str]:
    """Yield the lines of a table whose values are cut at the width."""
    first = max(len(row[0]) for row in (head, *rows)) + 2
    most = max((columns - first) // (len(head) - 1) - 2, LEAST_CELL)
    cut = [
        [row[0], *(cell if len(cell) <= most else cell[: most - 3] + "..." for cell in row[1:])]
        for row in (head, *rows)
    ]
    widths = [max(len(row[i]) for row in cut) + 2 for i in range(len(head))]
    for row in cut:
        yield "".join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True)).rstrip()


# ---- JSON


def as_json(a: RunRecords, b: RunRecords) -> dict[str, Any]:
    """Return the comparison as plain data."""
    of_a, of_b = last_values(a.lines), last_values(b.lines)
    divergence = first_divergence(a.lines, b.lines)
    metrics = dict[str, Any]()
    for name in sorted({*of_a, *of_b}):
        in_a, in_b = of_a.get(name), of_b.get(name)
        metrics[name] = {"a": _last_json(in_a), "b": _last_json(in_b)}
        if in_a is not None and in_b is not None:
            metrics[name]["difference"] = _estimate_json(difference(in_a, in_b))
    names = ("a", "b", "default")
    plain: dict[str, Any] = {
        "a": _run_json(a),
        "b": _run_json(b),
        "settings": {
            name: dict(zip(names, values, strict=True))
            for name, values in setting_differences(a, b).items()
        },
        "versions": {
            name: dict(zip(names[:2], pair, strict=True))
            for name, pair in version_differences(a, b).items()
        },
        "metrics": metrics,
        "first_step_that_differs": None
        if divergence is None
        else {
            "step": divergence.step,
            "metrics": {
                name: dict(zip(names[:2], map(_finite, pair), strict=True))
                for name, pair in divergence.metrics.items()
            },
        },
    }
    return plain


def _run_json(run: RunRecords) -> dict[str, Any]:
    return {"run": run.name, "updates": run.steps, "versions": dict(run.versions)}


def _last_json(last: LastValue | None) -> dict[str, Any] | None:
    if last is None:
        return None
    estimate = _estimate_json(Estimate(last.value, last.stderr))
    return {"step": last.step, "value": estimate.pop("mean"), **estimate}


def _estimate_json(estimate: Estimate) -> dict[str, Any]:
    interval = None if estimate.interval is None else list(estimate.interval)
    return {"mean": estimate.mean, "stderr": estimate.stderr, "interval_95": interval}


def _finite(value: object) -> Any:
    """Return a value that JSON has; others as text."""
    is_special = isinstance(value, float) and (value != value or abs(value) == float("inf"))
    return str(value) if is_special else value


def _parser() -> argparse.ArgumentParser:
    parser = command_parser("diff", __doc__)
    parser.add_argument("a", metavar="RUN", help="folder of a run, or its address")
    parser.add_argument("b", metavar="RUN", help="folder of the other run, or its address")
    parser.add_argument("--all", action="store_true", help="show all metrics")
    parser.add_argument("--json", action="store_true", help="print JSON")
    return parser


if __name__ == "__main__":
    sys.exit(main())
