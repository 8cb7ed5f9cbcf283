"""Selection of the groups that the trainer takes next. It never changes the staleness bound.

    fresh (never trained on)   within `lookahead` numbers of the oldest pending one, by rank
    kept (for reuse)           fill up the step if too few fresh ones are ready, by rank

A rank orders the groups that may be taken. It never widens the window, and the proof in
staleness.py depends only on the window. With lookahead 0 the window is one group, and fresh groups
are drawn in order of admission for every rank.
"""

import math
from collections import deque
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from heapq import heappop, heappush
from itertools import takewhile
from typing import Any

import numpy as np

from jaxrl_async.buffer.contents import Contents
from jaxrl_async.errors import TrainingError
from jaxrl_async.staleness import drop_reason
from jaxrl_async.types import Drop, EpisodeGroup

Rank = Callable[
    [EpisodeGroup, int], float
]  # (group, version about to be updated) -> smallest first; ties by number

HALF_LIFE = 1.0
"""Age that halves a group's weight in `recent`, in versions."""
NO_BOUNDS: Mapping[str, int] = {}
"""All tasks have the buffer's bound."""


def strict(group: EpisodeGroup, version: int) -> float:
    """Rank in order of admission: no group is preferred, and runs are comparable."""
    return float(group.ticket.group)


def recent(group: EpisodeGroup, version: int) -> float:
    """Rank at random with weights 2^(-age / HALF_LIFE): nearly on-policy groups are likelier.

    The minimum of exponential variables divided by weights is sampled in proportion to the weights
    (Efraimidis & Spirakis 2006). The noise is keyed by group and version, so it does not depend on
    the other groups in the buffer.
    """
    age = max(version - group.oldest_version, 0)
    noise = np.random.default_rng([version, group.ticket.group]).exponential()
    return float(noise * 2.0 ** (age / HALF_LIFE))


def reward_variance(group: EpisodeGroup, version: int) -> float:
    """Rank by variance of rewards, largest first: for rewards 0 and 1, prompts solved half of the
    time."""
    return -float(np.var([s.total for s in group.scores])) if group.scores else 0.0


def advantage_size(group: EpisodeGroup, version: int) -> float:
    """Rank by mean |r - mean(r)|, largest first: the advantage's size, as in prioritized replay.

    Schaul et al. 2016 (arXiv:1511.05952), sec. 3.3, with the advantage instead of the TD error,
    greedily.
    """
    rewards = np.array([s.total for s in group.scores], np.float64)
    return -float(np.abs(rewards - rewards.mean()).mean()) if len(rewards) else 0.0


RANKS: dict[str, Rank] = {f.__name__: f for f in (strict, recent, reward_variance, advantage_size)}


def own_rank(function: Callable[..., Any], name: str) -> Rank:
    """Return a user's function as a rank. It raises TrainingError for anything but a number."""

    def rank(group: EpisodeGroup, version: int) -> float:
        try:
            number = float(function(group, version))
        except Exception as error:
            raise TrainingError(
                f"buffer.select={name} raised {type(error).__name__}: {error}. It gets an "
                "EpisodeGroup and the version to update, and returns a number."
            ) from error
        if math.isnan(number):
            raise TrainingError(f"buffer.select={name} returned NaN. It must return a number.")
        return number

    return rank


def select(
    pending: Sequence[int],
    ready: Mapping[int, EpisodeGroup],
    count: int,
    lookahead: int,
    *,
    rank: Rank = strict,
    version: int = 0,
) -> tuple[int, ...]:
    """Return the numbers of the next fresh groups to train on, at most `count`.

    Args:
        pending: numbers of all groups admitted and not yet taken, ascending.
        ready: the finished groups.
        count: number of groups wanted.
        lookahead: a ready group may overtake the oldest pending one only within this many numbers.
        rank: orders the groups that may be taken.
        version: the version about to be updated.
    """
    waiting, later, window = deque(pending), deque(pending), list[tuple[float, int]]()
    taken = dict[int, None]()
    while waiting and len(taken) < count:
        end = waiting[0] + lookahead
        while later and later[0] <= end:
            if (number := later.popleft()) in ready:
                heappush(window, (rank(ready[number], version), number))
        if not window:
            break
        taken[heappop(window)[1]] = None
        while waiting and waiting[0] in taken:
            waiting.popleft()
    return tuple(taken)


def waited_for(pending: Iterable[int], taken: Container[int], lookahead: int) -> int:
    """Return the highest number of a group that would let `select` take more groups when it becomes
    ready; -1: all are taken. A ready group with a higher number changes nothing.

    Args:
        pending, lookahead: see `select`.
        taken: the result of `select`, with fewer groups than wanted.
    """
    oldest = next((n for n in pending if n not in taken), None)
    return -1 if oldest is None else oldest + lookahead


def select_again(
    kept: Mapping[int, EpisodeGroup], count: int, *, rank: Rank = strict, version: int = 0
) -> tuple[int, ...]:
    """Return the numbers of the groups to train on again, at most `count`, each once."""
    return tuple(sorted(kept, key=lambda n: (rank(kept[n], version), n))[: max(count, 0)])


# ---- which finished groups may be trained on


class Eligibility:
    """Finds the groups that may not be trained on. A waiting trainer checks after each new group,
    so groups that were fit at the last check are not checked again. Not locked."""

    def __init__(self) -> None:
        self._at = (-1, -1)  # version and bound of the last check
        self._fit = set[int]()  # numbers of groups that were fit then

    def unfit(
        self,
        groups: dict[int, EpisodeGroup],
        version: int,
        max_staleness: int,
        of_task: Mapping[str, int] = NO_BOUNDS,
    ) -> dict[int, Drop]:
        """Return the groups that may not be trained on at this version, with the reasons, by
        number.

        groups: groups added since the last check must come last, and groups found unfit must have
        been removed; else call `forget` first.
        of_task: lower bounds of some tasks' groups; the same in every call.
        """
        if self._at != (version, max_staleness):
            self._at, self._fit = (version, max_staleness), set()
        new = list(takewhile(lambda n: n not in self._fit, reversed(groups)))

        def bound(group: EpisodeGroup) -> int:
            return min(max_staleness, of_task.get(group.prompt.task, max_staleness))

        reasons = {n: drop_reason(groups[n], version, bound(groups[n])) for n in reversed(new)}
        self._fit |= {n for n, reason in reasons.items() if reason is None}
        return {n: reason for n, reason in reasons.items() if reason is not None}

    def forget(self) -> None:
        """Check every group again at the next call."""
        self._at, self._fit = (-1, -1), set()


class StepSelection:
    """The selection of the groups of the next step. Not locked.

    While a draw waits, a step is selected again only once a group has become ready that may fill
    it.
    """

    def __init__(
        self,
        contents: Contents,
        *,
        groups_per_step: int,
        lookahead: int,
        rank: Rank,
        task_bounds: Mapping[str, int],
    ) -> None:
        """contents: to select from. The others: see BufferSettings."""
        self._contents, self._per_step = contents, groups_per_step
        self._lookahead, self._rank, self._task_bounds = lookahead, rank, task_bounds
        self._overtaken = set[int]()  # running groups that the trainer does not wait for
        # while a draw waits, only a group with at most this number can fill its step; None: check
        self._waits_for: int | None = None
        # for ready groups, for kept groups
        self._ready_check, self._kept_check = Eligibility(), Eligibility()

    def begin_draw(self) -> None:
        """Check at the next call whether a step can be filled."""
        self._waits_for = None

    def let_overtake(self, number: int) -> None:
        """Let others overtake this running group without a limit."""
        self._overtaken.add(number)
        self._waits_for = None

    def note_ready(self, number: int) -> None:
        """Note that this group has become ready."""
        late = number in self._overtaken
        self._overtaken.discard(number)
        if self._waits_for is not None and (late or number <= self._waits_for):
            self._waits_for = None

    def note_dropped(self, number: int) -> None:
        """Note that this group will not be trained on."""
        self._overtaken.discard(number)
        self._waits_for = None

    def forget(self) -> None:
        """Check every group again: some have returned to the buffer."""
        self._ready_check.forget()
        self._kept_check.forget()

    def unfit(
        self, version: int, max_staleness: int, max_staleness_again: int
    ) -> tuple[dict[int, Drop], dict[int, Drop]]:
        """Return the ready and the kept groups that may not be trained on at this version, with
        the reasons, by number. They must be removed before the next call.

        Args:
            version: the version about to be updated.
            max_staleness: of a group that is taken for the first time.
            max_staleness_again: of a kept group.
        """
        contents, bounds = self._contents, self._task_bounds
        return (
            self._ready_check.unfit(contents.ready, version, max_staleness, bounds),
            self._kept_check.unfit(contents.kept, version, max_staleness_again, bounds),
        )

    def fills_step(self, version: int) -> bool:
        """Return whether a step can be filled."""
        ready, kept = self._contents.ready, self._contents.kept
        if self._waits_for is not None or len(ready) + len(kept) < self._per_step:
            return False
        fresh = self._fresh(version)
        if len(fresh) + len(kept) >= self._per_step:
            return True
        self._waits_for = waited_for(self._waiting(), frozenset(fresh), self._lookahead)
        return False

    def of_step(self, version: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Return the numbers of the fresh groups to take, and of the kept groups to reuse."""
        fresh = self._fresh(version)
        missing = self._per_step - len(fresh)
        return fresh, select_again(self._contents.kept, missing, rank=self._rank, version=version)

    def _fresh(self, version: int) -> tuple[int, ...]:
        """Return the numbers of the fresh groups to take."""
        ready, rank = self._contents.ready, self._rank
        return select(
            self._waiting(), ready, self._per_step, self._lookahead, rank=rank, version=version
        )

    def _waiting(self) -> list[int]:
        """Return the numbers of the groups that a draw takes, or waits for, ascending."""
        pending = self._contents.pending
        if not self._overtaken:
            return list(pending)
        return [number for number in pending if number not in self._overtaken]
