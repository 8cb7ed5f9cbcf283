"""Lengths of answers: from a histogram, from a previous run, or assumed."""

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from jaxrl_async.errors import DataError
from jaxrl_async.plan.pipeline import Histogram

ASSUMED = {0.125: 25, 0.25: 30, 0.5: 25, 0.75: 10, 1.0: 10}
"""Length as a share of the maximum -> percent of answers of that length."""
MOST_VALUES = 64
"""Maximum number of distinct lengths in a distribution."""


def assumed(longest: int) -> Histogram:
    """Return an assumed long-tailed distribution: mean 41 % of the longest, 10 % cut off."""
    return Histogram(
        values=tuple(float(max(1, round(longest * share))) for share in ASSUMED),
        weights=tuple(float(w) for w in ASSUMED.values()),
    )


def read_lengths(path: Path, longest: int) -> Histogram:
    """Read answers' lengths in tokens; lengths above `longest` count as `longest`.

    path: a run's folder (the lengths in its ledger.jsonl), or a JSON file: {"512": 30, "2048": 5},
    length and weight, or a list of lengths. Raises DataError.
    """
    counts = _of_run(path) if path.is_dir() else _of_json(_read(path), path)
    limited: dict[float, float] = {}
    for length, weight in counts.items():
        limited[min(length, longest)] = limited.get(min(length, longest), 0.0) + weight
    return _coarser(limited)


_FORM = 'Give {"LENGTH": WEIGHT, ...} or a list of lengths, in tokens from 1 on.'


def _read(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise DataError(
            f"--lengths {path}: {error.strerror}. Give a run's folder, or a JSON file of "
            '{"LENGTH": WEIGHT, ...} or of lengths.'
        ) from error
    except (ValueError, RecursionError) as error:
        raise DataError(f"--lengths {path}: not JSON: {error}. {_FORM}") from error


def _of_run(folder: Path) -> dict[float, float]:
    file, counts = folder / "ledger.jsonl", dict[float, float]()
    for number, line in _ledger(file):
        if line.get("fate") not in ("trained", "dropped") or line.get("use", 1) != 1:
            continue
        lengths = line.get("lengths", [])
        numbers = [_number(n) for n in lengths] if isinstance(lengths, list) else [math.nan]
        if not all(0 <= n < math.inf for n in numbers):
            raise DataError(
                f"--lengths {folder}: line {number} of {file} has lengths {str(lengths)[:80]}: "
                "they must be a list of numbers of tokens. Correct the line, or give a JSON file."
            )
        for n in numbers:
            if n >= 1:
                counts[n] = counts.get(n, 0.0) + 1
    if not counts:
        raise DataError(
            f"--lengths {folder}: no answers in {file}. Give the folder of a run of run.job=rl "
            "that has completed a step, or a JSON file."
        )
    return counts


def _ledger(file: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield number and object of each line, without torn lines."""
    for number, raw in enumerate(file.read_bytes().splitlines() if file.exists() else (), 1):
        try:
            line = json.loads(raw)
        except ValueError:
            continue
        except RecursionError as error:
            raise DataError(
                f"--lengths: line {number} of {file} is not a line of a ledger: {error}. Correct "
                "it, or give a JSON file."
            ) from error
        if isinstance(line, dict):
            yield number, line


def _number(value: Any) -> float:
    """Convert to a number; NaN if that fails."""
    try:
        return float(value)
    except (TypeError, ValueError, OverflowError):
        return math.nan


def _of_json(value: object, path: Path) -> dict[float, float]:
    pairs = list(value.items()) if isinstance(value, dict) else [(n, 1) for n in _listed(value)]
    counts: dict[float, float] = {}
    for length, weight in pairs:
        n, w = _number(length), _number(weight)
        if not (1 <= n < math.inf and 0 <= w < math.inf):
            raise DataError(
                f"--lengths {path}: {str(length)[:80]}: {str(weight)[:80]} is not a length and "
                f"a weight. {_FORM}"
            )
        counts[n] = counts.get(n, 0.0) + w
    if not 0 < sum(counts.values()) < math.inf:
        raise DataError(
            f"--lengths {path}: no length has a weight above 0, or the weights are too "
            f"large. {_FORM}"
        )
    return counts


def _listed(value: object) -> list[Any]:
    return value if isinstance(value, list) else []


def _coarser(counts: dict[float, float]) -> Histogram:
    """Merge to at most MOST_VALUES lengths: groups of neighbours become their mean."""
    ordered = sorted(counts.items())
    total, size = sum(counts.values()), max(1, math.ceil(len(ordered) / MOST_VALUES))
    parts = [ordered[at : at + size] for at in range(0, len(ordered), size)]
    weights = [sum(w for _, w in part) for part in parts]
    nonempty = [(part, w) for part, w in zip(parts, weights, strict=True) if w]
    return Histogram(
        values=tuple(float(round(sum(n * x for n, x in part) / w)) for part, w in nonempty),
        weights=tuple(w / total for _, w in nonempty),
    )


def mean_context(lengths: Histogram, prompt: float) -> float:
    """Return the mean tokens of a running sequence over its decode steps: prompt + E[n^2] / (2
    E[n])."""
    pairs = list(zip(lengths.values, lengths.weights, strict=True))
    first = sum(n * w for n, w in pairs)
    return prompt + sum(n * n * w for n, w in pairs) / (2 * first)
