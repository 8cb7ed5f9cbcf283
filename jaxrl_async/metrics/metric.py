"""Every metric of a run, and the functions on their declarations: merge, compare, document.

Each is declared once, in the file of its namespace: *_metrics.py in this folder. Keys are
"namespace/name". A key that contains <...> is a family (`staleness/tokens_lag_<n>`) and matches
any text there. docs/metrics.md is generated from these tables (`markdown()`); a test compares them.
"""

import re
from collections.abc import Iterable, Mapping
from functools import reduce
from typing import Any

from jaxrl_async.metrics.learning_metrics import LEARNING_METRICS, STALENESS_METRICS
from jaxrl_async.metrics.machine_metrics import FAULT_METRICS, MACHINE_METRICS
from jaxrl_async.metrics.reductions import Last, Max, Mean, Metric, Min, Reduction, Sum
from jaxrl_async.metrics.rollout_metrics import ROLLOUT_METRICS

__all__ = [
    "MAX_PART",
    "METRICS",
    "Last",
    "Max",
    "Mean",
    "Metric",
    "Min",
    "Reduction",
    "Sum",
    "comparable",
    "markdown",
    "merge",
    "metric_of",
    "names_a_metric",
    "part_name",
]

METRICS: tuple[Metric, ...] = (
    *LEARNING_METRICS,
    *ROLLOUT_METRICS,
    *STALENESS_METRICS,
    *MACHINE_METRICS,
    *FAULT_METRICS,
)
"""All keys of a run. Logging an undeclared key is a programming error."""

_EXACT = {m.key: m for m in METRICS if "<" not in m.key}
_FAMILIES = tuple(
    (re.compile(re.sub(r"<\w+>", r"[\\w.\\-]+", m.key)), m) for m in METRICS if "<" in m.key
)


MAX_PART = 80
"""Maximum length of the name of a part of the reward."""


def part_name(name: object) -> str:
    """Turn text into the name of a reward's part: all but letters, digits and _ . - become _."""
    return re.sub(r"[^\w.-]+", "_", str(name))[:MAX_PART] or "_"


def names_a_metric(part: str) -> bool:
    """Return whether the part's key (reward/PART) is already another metric's (reward/mean)."""
    return f"reward/{part}" in _EXACT


def names_a_known_metric(key: str) -> bool:
    """Return whether any run may have a metric of this name; excludes reward parts, which vary by
    run."""
    families = [] if key.startswith("reward/") else [pattern for pattern, _ in _FAMILIES]
    return key in _EXACT or any(pattern.fullmatch(key) for pattern in families)


def metric_of(key: str) -> Metric:
    """Return the declaration of a key; assert that it is declared."""
    metric = _EXACT.get(key) or next(
        (m for pattern, m in _FAMILIES if pattern.fullmatch(key)), None
    )
    assert metric is not None, (
        f"metric {key!r} is not declared: add it to its namespace in metrics/*_metrics.py"
    )
    return metric


def merge(parts: Iterable[Mapping[str, Reduction]]) -> dict[str, float]:
    """Reduce one step's metrics from several sources (micro-batches, processes) to numbers."""
    grouped: dict[str, list[Reduction]] = {}
    for part in parts:
        for key, value in part.items():
            kind = metric_of(key).kind
            assert isinstance(value, kind), f"metric {key!r} is a {kind.__name__}, got {value!r}"
            grouped.setdefault(key, []).append(value)
    return {key: reduce(_merge_two, values).value for key, values in grouped.items()}


def _merge_two(a: Any, b: Any) -> Any:
    return a.merge(b)


def comparable(line: Mapping[str, float]) -> dict[str, float]:
    """Return a line of metrics.jsonl without timing keys: equal for two equal runs."""
    return {k: v for k, v in line.items() if k == "step" or not metric_of(k).timing}


PAGE = {
    "Training": (
        "train",
        "loss",
        "loss_coefficient",
        "loss_tokens",
        "loss_grad_norm",
        "supervised",
        "warm",
    ),
    "Policy and importance weights": ("policy", "offpolicy", "mismatch"),
    "Critic": ("critic",),
    "Preference pairs": ("preference",),
    "Experts": ("experts", "routing"),
    "Teachers": ("teacher",),
    "Rewards": ("reward", "logged", "shaping", "process", "judge"),
    "Prompts and episodes": ("data", "rollout", "task", "seats"),
    "Evaluation": ("eval",),
    "Staleness": ("staleness", "buffer"),
    "Time and throughput": ("time", "throughput", "trainer"),
    "Sampler": ("sampler",),
    "Weights, memory and checkpoints": ("weights", "memory", "checkpoint"),
    "Endpoint": ("endpoint",),
    "Faults": ("faults",),
}
"""Sections of docs/metrics.md, with their namespaces."""

COUNTS = ("Endpoint", "Faults")
"""Sections without a unit: each meaning begins with what is counted."""

_ERROR = "_stderr"


def markdown() -> str:
    """Return docs/metrics.md: one table per section, by namespace and name."""
    parts = [_HEAD]
    for title, spaces in PAGE.items():
        columns = ("key", "meaning") if title in COUNTS else ("key", "unit", "meaning")
        parts.append(f"\n## {title}\n\n{_line(columns)}{_line(['---'] * len(columns))}")
        for space in spaces:
            metrics = [m for m in METRICS if m.key.startswith(f"{space}/")]
            parts += [
                _line([_cells(m)[column] for column in columns])
                for m in sorted(metrics, key=lambda m: m.key)
                if not m.key.endswith(_ERROR)
            ]
    return "".join(parts)


def _cells(m: Metric) -> dict[str, str]:
    shown = m.help.replace("|", "\\|")
    return {"key": f"`{m.key}`", "unit": m.unit + "*" * m.timing, "meaning": shown}


def _line(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |\n"


_HEAD = """# Metrics

What each key of a run's metrics means. They are in `metrics.jsonl`, on the dashboard and in
TensorBoard. Generated by `python -m jaxrl_async.metrics.metric > docs/metrics.md`.

`metrics.jsonl` has one JSON object per step: `step` (the version that the step produced; 0 is
before the first update), then keys of this page. A value is of the whole step; a key is absent if
there was nothing to measure. A value that is not finite is the string `"nan"`, `"inf"` or
`"-inf"`, which Python's `float()` reads.

A resumed run continues the file. Lines of steps that it repeats are moved to
`metrics.superseded.jsonl` (samples: `samples.superseded.jsonl`). A warm start has a separate file,
in `warm_start/`, whose `step` is the update, from 1.

A value with `*` behind its unit, and all counts of the last two sections, depend on time or on the
machine. All others are equal for two runs with the same seed at `staleness.max_staleness=0`.
`<...>` in a key is any name or number. Rewards and shares of an evaluation have a second key with
`_stderr`, their standard error over the prompts; 1.96 times it is the 95 % interval.
"""

if __name__ == "__main__":
    print(markdown(), end="")
