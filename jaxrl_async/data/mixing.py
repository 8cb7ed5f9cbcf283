"""The mix of several tasks: which one the next group is of. Pure functions; needs no JAX.

    weights ──> shares ──every draw──> credits ──earliest deadline──> the next group's task
                                          ^
                                          └── a group that was dropped gives its draw back

A task's credit is the number of groups that it is behind its share; all credits sum to 0. Each draw
adds the task's share to its credit and takes 1 from the chosen one's. Among the tasks with a
positive credit, the one is chosen whose credit would be the first to reach 1. That is the Pfair
schedule of one processor (Baruah et al. 1996, "Proportionate progress", sec. 3; Tijdeman 1980, "The
chairman assignment problem"): while all tasks can be chosen, every credit is above -1 and below 1,
so after N draws a task has its share of N groups, give or take less than one.

A task that cannot be chosen (its limit, its failures) gains credit up to its bound, `most`. Beyond
that it gains nothing, and its share goes to the others: it later catches up by at most that much.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

Credits = Mapping[str, float]
Weights = Mapping[str, float]


def shares(weights: Weights) -> dict[str, float]:
    """Return weights divided by their sum, which must be above 0."""
    total = sum(weights.values())
    return {name: weight / total for name, weight in weights.items()}


def accrued(credits: Credits, weights: Weights, most: Credits) -> dict[str, float]:
    """Return the credits with one more draw to give.

    Args:
        credits: of each task.
        weights: of each task, at least one above 0.
        most: a task with this credit, or more, gains nothing while another one can.
    """
    gaining = {n: w for n, w in weights.items() if w > 0 and credits[n] < most[n]}
    gained = shares(gaining or weights)
    return {name: credit + gained.get(name, 0.0) for name, credit in credits.items()}


def due(credits: Credits, weights: Weights, available: Collection[str]) -> str:
    """Return the task of the next draw.

    Args:
        credits: of each task, after `accrued`.
        weights: of each task.
        available: tasks that may be chosen, in the order in which ties are broken; at least one
            with a weight above 0.
    """
    able = [name for name in available if weights[name] > 0]
    behind = [name for name in able if credits[name] > 0]
    return min(behind or able, key=lambda name: (1 - credits[name]) / weights[name])


def spent(credits: Credits, name: str) -> dict[str, float]:
    """Return the credits after a group of this task has started."""
    return {**credits, name: credits[name] - 1}


def given_back(credits: Credits, weights: Weights, most: Credits, name: str) -> dict[str, float]:
    """Return the credits as if a dropped group of this task had not started, within its bound.

    What exceeds the bound goes to the other tasks by their weights.
    """
    before = shares(weights)
    after = {n: credit - before[n] for n, credit in credits.items()}
    after[name] += 1
    excess = after[name] - max(most[name], credits[name])
    others = {n: w for n, w in weights.items() if n != name and w > 0}
    if excess > 0 and others:
        after[name] -= excess
        after = {n: c + excess * shares(others).get(n, 0.0) for n, c in after.items()}
    return after


@dataclass(frozen=True, slots=True, kw_only=True)
class MixView:
    """What a user's `mixing` function sees before a draw. It returns the next group's task by name,
    or new weights by name."""

    draw: int  # number of the draw, from 0
    weights: Mapping[str, float]  # as configured
    counts: Mapping[str, int]  # groups of each task that were started and not dropped
    rewards: Mapping[str, tuple[float, ...]]  # mean rewards of its last groups, the newest last
    available: tuple[str, ...] = field(default=())  # tasks that may be chosen now


RECENT = 32
"""Number of a task's last groups whose mean rewards are kept."""
