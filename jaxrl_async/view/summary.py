"""Summarize a run in a few numbers: tiles, trained tokens by age,
lengths, groups dropped, faults."""

from typing import Any

from jaxrl_async.metrics.series import accuracy_points, number
from jaxrl_async.view.watched import WatchedRun

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
        note = f"from {held_out[0][1]:.3f} at step {held_out[0][0]}"
        best_step, best = max(held_out, key=lambda point: point[1])
        if best > held_out[-1][1]:
            note += f"; best {best:.3f} at step {best_step}"
        shown.append(_tile(f"held-out {kind}", f"{held_out[-1][1]:.3f}", note))
    if reward := run.points("reward/mean"):
        shown.append(_tile("reward", number(reward[-1][1]), f"from {number(reward[0][1])}"))
    for key, label, percent in MEDIANS:
        if values := sorted(value for _, value in run.points(key)):
            middle = values[len(values) // 2]
            text = f"{middle:.0%}" if percent else number(middle)
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
    return {_words_of(most): counts[most] for most in sorted(counts)}


def _numbered(run: WatchedRun, prefix: str) -> dict[int, float]:
    """Return the totals above 0 of the metrics named by this prefix and a short number."""
    found = ((k.removeprefix(prefix), v) for k, v in run.totals(prefix).items())
    return {int(n): v for n, v in found if v > 0 and n.isascii() and n.isdigit() and len(n) < 10}


def _words_of(most: int) -> str:
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
