"""What differs between two runs: settings, versions, last metrics, and the first step that differs.
Pure functions over their records; needs no JAX."""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from jaxrl_async.config.schema import Config
from jaxrl_async.config.section import Section
from jaxrl_async.config.several import section_of
from jaxrl_async.evals.estimates import Estimate
from jaxrl_async.metrics.metric import metric_of, names_a_known_metric

STDERR = "_stderr"
"""Ending of the metric that is the standard error of another one."""
START_SETTINGS = ("name", "dir", "overwrite", "resume", "resume_or_start")
"""Settings of `run` that say where and how a run is started: not compared."""

Value = float | str | None
Line = Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class RunRecords:
    """What is compared of a run."""

    name: str  # its folder, as given
    config: Mapping[str, Any]  # all settings (as_plain); as they are written, if not complete
    lines: Sequence[Line]  # of metrics.jsonl
    versions: Mapping[str, str] = field(default_factory=dict)  # {}: not recorded
    is_complete: bool = True  # whether config is the whole configuration

    @property
    def steps(self) -> int:
        """Number of the last update; 0: none."""
        return max((int(line["step"]) for line in self.lines), default=0)


@dataclass(frozen=True, slots=True, kw_only=True)
class LastValue:
    """The last value of a metric."""

    step: int
    value: float
    stderr: float | None  # None: not known


@dataclass(frozen=True, slots=True, kw_only=True)
class Divergence:
    """The first step with a metric that differs."""

    step: int
    metrics: Mapping[str, tuple[Value, Value]]  # those that differ, by name


# ---- settings


def setting_differences(a: RunRecords, b: RunRecords) -> dict[str, tuple[Any, Any, Any]]:
    """Return the settings that differ, each with the value of both runs and the default. A section
    that one run does not have is null there, and its settings that are not the defaults here."""
    different = dict(_different(a.config, b.config, as_plain(Config().model_dump()), Config, ""))
    return {
        name: values
        for name, values in different.items()
        if name not in {f"run.{key}" for key in START_SETTINGS}
    }


def _different(
    a: Mapping[str, object],
    b: Mapping[str, object],
    usual: Mapping[str, object] | None,
    section: type[Section],
    prefix: str,
) -> list[tuple[str, tuple[Any, Any, Any]]]:
    known = list(section.model_fields)
    differences = list[tuple[str, tuple[Any, Any, Any]]]()
    for key in [*known, *sorted({*a, *b} - {*known}, key=str)]:
        target = section.model_fields.get(key)
        inner = None if target is None else section_of(target)
        default = None if usual is None else usual.get(key)
        in_a, in_b = a.get(key, default), b.get(key, default)
        if in_a == in_b:
            continue
        if inner is None:
            differences.append((f"{prefix}{key}", (in_a, in_b, default)))
        elif isinstance(in_a, Mapping) and isinstance(in_b, Mapping):
            own = default if isinstance(default, Mapping) else _usual(inner)
            differences += _different(in_a, in_b, own, inner, f"{prefix}{key}.")
        else:
            shown = (_own(in_a, inner), _own(in_b, inner), _own(default, inner))
            differences.append((f"{prefix}{key}", shown))
    return differences


def _usual(section: type[Section]) -> dict[str, Any]:
    """Return the defaults of a section; None for a setting that has none."""
    return {
        name: None
        if target.is_required()
        else as_plain(target.get_default(call_default_factory=True))
        for name, target in section.model_fields.items()
    }


def as_plain(value: object) -> Any:
    """Return settings as JSON has them: a tuple is a list, as in a file."""
    if isinstance(value, Section):
        value = value.model_dump()
    return json.loads(json.dumps(value, default=str))


def _own(value: object, section: type[Section]) -> Any:
    """Return a section's settings that are not its defaults; null and other values as they are."""
    if not isinstance(value, Mapping):
        return value
    usual = _usual(section)
    return {key: inner for key, inner in value.items() if inner != usual.get(key)}


# ---- versions


def version_differences(a: RunRecords, b: RunRecords) -> dict[str, tuple[str, str]]:
    """Return the packages whose versions differ; "" where a run has none. {} if a run recorded no
    versions."""
    if not a.versions or not b.versions:
        return {}
    names = sorted({*a.versions, *b.versions})
    pairs = {name: (a.versions.get(name, ""), b.versions.get(name, "")) for name in names}
    return {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}


# ---- metrics


def last_values(lines: Sequence[Line]) -> dict[str, LastValue]:
    """Return the last finite value of each metric, by name, with its standard error if the same
    step has one. Standard errors are not listed."""
    last = dict[str, LastValue]()
    for line in lines:
        for key, value in line.items():
            if key == "step" or key.endswith(STDERR) or not _is_finite(value):
                continue
            stderr: Any = line.get(key + STDERR)
            last[key] = LastValue(
                step=int(line["step"]),
                value=float(value),
                stderr=float(stderr) if _is_finite(stderr) else None,
            )
    return last


def difference(a: LastValue, b: LastValue) -> Estimate:
    """Return b - a, with the standard error of independent runs, sqrt(s_a^2 + s_b^2); None: one of
    them is not known."""
    stderr = None
    if a.stderr is not None and b.stderr is not None:
        stderr = math.hypot(a.stderr, b.stderr)
    return Estimate(b.value - a.value, stderr)


def first_divergence(a: Sequence[Line], b: Sequence[Line]) -> Divergence | None:
    """Return the first step of both runs with a metric of both that differs; None: no step does.
    Metrics that depend on time or the machine are left out."""
    of_a, of_b = ({int(line["step"]): line for line in lines} for lines in (a, b))
    for step in sorted(of_a.keys() & of_b.keys()):
        in_a, in_b = of_a[step], of_b[step]
        differs = {
            key: (in_a[key], in_b[key])
            for key in sorted(in_a.keys() & in_b.keys() - {"step"})
            if not _is_timing(key) and not _same(in_a[key], in_b[key])
        }
        if differs:
            return Divergence(step=step, metrics=differs)
    return None


def _same(a: Any, b: Any) -> bool:
    both = isinstance(a, float) and isinstance(b, float)
    return a == b or (both and math.isnan(a) and math.isnan(b))


def _is_timing(key: str) -> bool:
    """Return whether a metric depends on time or the machine; a metric of another version of the
    package does not, as far as is known."""
    return names_a_known_metric(key) and metric_of(key).timing


def _is_finite(value: Any) -> bool:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return is_number and math.isfinite(value)
