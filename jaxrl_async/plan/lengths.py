"""How long answers are: from a histogram, from a previous run, or assumed."""

import json
import math
from pathlib import Path
from typing import Any

from jaxrl_async.errors import DataError
from jaxrl_async.metrics.recorder import read_lines
from jaxrl_async.plan.simulate import Histogram

ASSUMED = {0.125: 25, 0.25: 30, 0.5: 25, 0.75: 10, 1.0: 10}
"""Share of the longest answer, and how many in a hundred answers are so long."""
MOST_VALUES = 64
"""Different lengths that a distribution keeps."""


def assumed(longest: int) -> Histogram:
    """A long tail, for want of anything known: mean 41 % of the longest, a tenth cut off."""
    return Histogram(
        values=tuple(float(max(1, round(longest * share))) for share in ASSUMED),
        weights=tuple(float(w) for w in ASSUMED.values()),
    )


def read_lengths(path: Path, longest: int) -> Histogram:
    """Answers' lengths in tokens, at most `longest` (longer ones count as that).

    path: a run's folder (the lengths in its ledger.jsonl), or a JSON file: {"512": 30, "2048": 5},
    length and weight, or a list of lengths. Raises DataError.
    """
    if path.is_dir():
        counts = _of_run(path)
    else:
        try:
            found = json.loads(path.read_text(encoding="utf-8"))
        except OSError as error:
            raise DataError(
                f"--lengths {path}: {error.strerror}. Give a run's folder, or a JSON file of "
                '{"LENGTH": WEIGHT, ...} or of lengths.'
            ) from error
        except ValueError as error:
            raise DataError(f"--lengths {path}: no JSON: {error}. {_FORM}") from error
        counts = _of_json(found, path)
    limited: dict[float, float] = {}
    for length, weight in counts.items():
        limited[min(length, longest)] = limited.get(min(length, longest), 0.0) + weight
    return _coarser(limited)


_FORM = 'It is to be {"LENGTH": WEIGHT, ...} or a list of lengths, in tokens from 1 on.'


def _of_run(folder: Path) -> dict[float, float]:
    counts: dict[float, float] = {}
    for line in read_lines(folder / "ledger.jsonl"):
        if line.get("fate") in ("trained", "dropped") and line.get("use", 1) == 1:
            for length in line.get("lengths", ()):
                if length >= 1:
                    counts[float(length)] = counts.get(float(length), 0.0) + 1
    if not counts:
        raise DataError(
            f"--lengths {folder}: no answers in {folder / 'ledger.jsonl'}. Give the folder of a "
            "run of run.job=rl that has made a step, or a JSON file."
        )
    return counts


def _of_json(found: Any, path: Path) -> dict[float, float]:
    pairs = list(found.items()) if isinstance(found, dict) else [(n, 1) for n in _listed(found)]
    counts: dict[float, float] = {}
    for length, weight in pairs:
        try:
            n, w = float(length), float(weight)
        except (TypeError, ValueError):
            n = w = math.nan
        if not (1 <= n < math.inf and 0 <= w < math.inf):
            raise DataError(
                f"--lengths {path}: {length!r}: {weight!r} is no length and weight. {_FORM}"
            )
        counts[n] = counts.get(n, 0.0) + w
    if not sum(counts.values()):
        raise DataError(f"--lengths {path}: there is no length with a weight above 0. {_FORM}")
    return counts


def _listed(found: Any) -> list[Any]:
    return found if isinstance(found, list) else []


def _coarser(counts: dict[float, float]) -> Histogram:
    """At most MOST_VALUES lengths: equal numbers of neighbours become their mean."""
    ordered = sorted(counts.items())
    total, size = sum(counts.values()), max(1, math.ceil(len(ordered) / MOST_VALUES))
    parts = [ordered[at : at + size] for at in range(0, len(ordered), size)]
    weights = [sum(w for _, w in part) for part in parts]
    kept = [(part, w) for part, w in zip(parts, weights, strict=True) if w]
    return Histogram(
        values=tuple(float(round(sum(n * x for n, x in part) / w)) for part, w in kept),
        weights=tuple(w / total for _, w in kept),
    )


def mean_context(lengths: Histogram, prompt: float) -> float:
    """Tokens that a running sequence has, over all its decode steps: prompt + E[n^2] / (2 E[n])."""
    pairs = list(zip(lengths.values, lengths.weights, strict=True))
    first = sum(n * w for n, w in pairs)
    return prompt + sum(n * n * w for n, w in pairs) / (2 * first)
