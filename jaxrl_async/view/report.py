"""Write a run's page as one file that needs no server: python -m jaxrl_async.view.report RUN...

The file is the page that `jaxrl-async view` serves, with scripts and style included. The run's data
are included as JSON, which the page reads instead of asking the server (page/source.js).
"""

import base64
import hashlib
import json
import re
import sys
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from importlib.resources import files
from math import isfinite
from pathlib import Path
from typing import Any

from jaxrl_async.errors import DataError
from jaxrl_async.metrics.recorder import METRICS_FILE
from jaxrl_async.view.queries import (
    AXIS_POINTS,
    LAST_STEP,
    as_overview,
    extents,
    facts_of,
    identity,
    layout,
    measures,
    summary,
    thinned,
)
from jaxrl_async.view.watched import AXES, RunsByName, SampleFilter, WatchedRun

MODULES = (
    "source.js",
    "elements.js",
    "numbers.js",
    "colors.js",
    "address.js",
    "run_model.js",
    "plot.js",
    "charts.js",
    "curves.js",
    "run_table.js",
    "conversation.js",
    "samples.js",
    "spans.js",
    "tabs.js",
    "page.js",
)
"""The page's modules, each after the modules that it imports."""
ALL_POINTS = 24_000
"""Total points of all curves; each curve has LEAST_POINTS to MOST_POINTS."""
LEAST_POINTS, MOST_POINTS = 60, 600
TOKEN_BYTES = 250_000
"""Maximum JSON size up to which the newest samples keep their data per token."""
SAMPLE_BYTES = 350_000
"""Maximum JSON size of all samples; the oldest ones beyond it are left out."""
MAX_SAMPLES = 1000
LOG_BYTES = 30_000
"""Maximum size of the end of the log, bytes."""
ALL_SPANS, SPAN_COLUMNS, LAST_STEPS = 4000, 200, 3
"""Approximate maximum number of spans of all lanes together and per depth of a lane, and the number
of final steps that are kept in more detail."""


def write_report(run_dir: Path) -> Path:
    """Write run_dir/report.html from what the run has written so far; return its path.

    Missing files are skipped. Raises DataError if run_dir is not a folder.
    """
    if not run_dir.is_dir():
        raise DataError(
            f"{run_dir}: no such run folder. Give the folder that holds {METRICS_FILE}."
        )
    run = WatchedRun(run_dir, run_dir.absolute().name)
    path = run_dir / "report.html"
    path.write_text(page(embedded(run)), "utf-8", "replace")
    return path


def embedded(run: WatchedRun) -> dict[str, Any]:
    """Return the page's data about a run: the answers to its queries, curves and samples."""
    runs, query = RunsByName({run.name: run}), {"run": [run.name]}
    keys = run.measured()
    most = min(max(ALL_POINTS // max(len(keys), 1), LEAST_POINTS), MOST_POINTS)
    curves = run.curves(keys, 0, LAST_STEP, most)
    whole = {key: len(run.points(key)) for key in keys}
    total, newest = run.samples(SampleFilter(), 0, MAX_SAMPLES)
    numbered, tokens_left_out = within([line for _, line in newest], TOKEN_BYTES, SAMPLE_BYTES)
    samples = [line for _, line in numbered]
    log, log_from, log_size = run.log_text(None, LOG_BYTES)
    return {
        "written": datetime.now(UTC).isoformat(" ", "minutes").removesuffix("+00:00") + " UTC",
        "answers": {
            "/api/runs": as_overview([facts_of(run, run.outcome(), "")], runs),
            "/api/layout": layout(runs, {}),
            "/api/settings": {"names": [], "values": {run.name: []}, "equal": 0, "leftOut": 0},
            "/api/rows": {run.name: measures(run)},
            "/api/log": {"text": log, "from": log_from, "size": log_size},
            "/api/summary": summary(runs, query),
            "/api/extents": extents(runs, query),
            "/api/identity": identity(runs, query),
        },
        "curves": {key: [steps, rounded(values)] for key, (steps, values) in curves.items()},
        "axes": {kind: thinned(run.axis(kind), AXIS_POINTS) for kind in AXES},
        "thinned": most if any(whole[key] > len(curves[key][0]) for key in keys) else 0,
        "spans": embedded_spans(run),
        "samples": samples,
        "numbers": [newest[index][0] for index, _ in numbered],
        "allSamples": total,
        "tokensLeftOut": tokens_left_out,
    }


def embedded_spans(run: WatchedRun) -> dict[str, Any]:
    """Return the spans of the whole run, and of its last steps in more detail."""
    spans = run.spans()
    rows = sum(int(lane.depths.max(initial=0)) + 1 for lane in spans.lanes)
    columns = min(max(ALL_SPANS // max(rows, 1), 1), SPAN_COLUMNS)
    whole = spans.shown(0.0, spans.end_s, columns)
    if not spans.steps:
        return {"whole": whole, "last": None}
    newest = max(step for step, *_ in spans.steps)
    window = spans.window_of(newest - LAST_STEPS + 1, newest)
    return {"whole": whole, "last": spans.shown(*window, columns)}


def rounded(values: Sequence[float]) -> list[float]:
    """Return values rounded to six digits, which are short in JSON."""
    return [float(f"{value:.6g}") for value in values]


def within(
    samples: Sequence[Any], token_bytes: int, all_bytes: int
) -> tuple[list[tuple[int, Any]], int]:
    """Return the samples that fit with their indices, the first ones first, and the number of
    samples whose data per token are left out.

    token_bytes: JSON size up to which tokens are kept. all_bytes: maximum JSON size.
    """
    shown: list[tuple[int, Any]] = []
    used = tokens_left_out = 0
    for index, sample in enumerate(samples):
        size = len(as_json(sample))
        shortened = "tokens" in sample and used + size > token_bytes
        if shortened:
            sample = {name: value for name, value in sample.items() if name != "tokens"}
            size = len(as_json(sample))
        if used + size <= all_bytes:
            shown.append((index, sample))
            used += size
            tokens_left_out += shortened
    return shown, tokens_left_out


def as_json(value: object) -> str:
    """Encode as JSON that is safe anywhere in a page: it contains no `<`, `>` or `&`."""
    text = plain_json(value)
    for character in "<>&\u2028\u2029":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return text


def page(data: object) -> str:
    """Return the page with its scripts, its style and its data. Its policy allows only these
    scripts, by their hashes, and no other loads."""
    style = _file("page.css")
    script = "\n".join(_without_imports(_file(name)) for name in MODULES)
    policy = f"default-src 'none'; script-src {_hashed(script)}; style-src {_hashed(style)}"
    head = (
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n'
        f"<style>{style}</style>\n"
        f'<script id="embedded" type="application/json">{as_json(data)}</script>\n'
        f'<script type="module">{script}</script>\n'
    )
    before, title, rest = _file("index.html").partition("<title>Runs</title>\n")
    assert title, "page/index.html has another title"
    return before + title + head + re.sub(r"<(link|script) .*\n", "", rest)


def _without_imports(module: str) -> str:
    """Return a module's text in a form for a single script with all modules."""
    return re.sub(r'^import .* from "\./\w+\.js";\n|^export ', "", module, flags=re.MULTILINE)


def _hashed(text: str) -> str:
    digest = hashlib.sha256(text.encode()).digest()
    return f"'sha256-{base64.b64encode(digest).decode()}'"


def _file(name: str) -> str:
    return files("jaxrl_async.view").joinpath("page", name).read_text("utf-8")


def main(argv: Sequence[str]) -> int:
    """Write the reports of the run folders named on the command line; return the exit code."""
    usage = "usage: python -m jaxrl_async.view.report RUN ...: write RUN/report.html"
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
    except OSError as error:
        print(f"the report cannot be written: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))


# ---- JSON that any browser reads


def plain_json(value: object) -> str:
    """Return a value as JSON. Non-finite numbers become null, unpaired surrogates become question
    marks."""
    try:
        text = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    except ValueError:
        text = json.dumps(_finite(value), ensure_ascii=False, separators=(",", ":"))
    return text.encode("utf-8", "replace").decode()


def _finite(value: object) -> Any:
    if isinstance(value, Mapping):
        return {key: _finite(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(inner) for inner in value]
    return None if isinstance(value, float) and not isfinite(value) else value
