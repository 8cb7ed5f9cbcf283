"""The prompts of several tasks as one stream: each draw chooses a task and takes its next prompt.

    streams, one for each task ──the task that is due──> Prompt ──> ...... group
                                      ^                              │
                                      └── scored, dropped <──────────┘

The choice is data/mixing.py's. Its state is journaled, as a curriculum's is: a checkpoint holds the
state before an earlier draw, and a resumed run makes the same choices again.
"""

import logging
import math
import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from jaxrl_async.data.curriculum import Curriculum, Journal
from jaxrl_async.data.mixing import (
    RECENT,
    MixView,
    accrued,
    due,
    given_back,
    shares,
    spent,
)
from jaxrl_async.data.prompts import Ended, PromptStream
from jaxrl_async.errors import DataError, RolloutError, naming
from jaxrl_async.types import Drop, EpisodeGroup, Prompt

log = logging.getLogger(__name__)

ChooseTask = Callable[[MixView], str | Mapping[str, float]]
"""A user's `mixing` function."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskMix:
    """One task's part of a mix."""

    weight: float
    most: float  # groups by which it may be behind its share
    max_in_flight: int | None = None  # groups that are sampled and scored; None: no limit


@dataclass(slots=True)
class MixState:
    """The state that determines a mix's next choice."""

    credits: dict[str, float]
    started: dict[str, int]  # groups that were started, by task
    dropped: dict[str, int]  # how many of these were dropped, by task
    rewards: dict[str, tuple[float, ...]] = field(default_factory=dict)  # of the last groups

    @property
    def next(self) -> int:
        """Number of the next draw."""
        return sum(self.started.values())

    def copy(self) -> "MixState":
        """Return another state with the same values."""
        return MixState(
            dict(self.credits), dict(self.started), dict(self.dropped), dict(self.rewards)
        )


@dataclass(frozen=True, slots=True)
class ChosenTask:
    """A journal event: a draw, with the weights that it was made by."""

    task: str
    weights: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class DroppedGroup:
    """A journal event: a group was dropped."""

    group: int
    task: str


@dataclass(frozen=True, slots=True)
class ScoredGroup:
    """A journal event: a group was scored."""

    group: int
    task: str
    reward: float  # mean


class MixedPrompts:
    """The prompts of several tasks. The rollout loop draws and reports, the trainer reads the state
    and reports drops: access is locked."""

    def __init__(
        self,
        streams: Mapping[str, PromptStream | Curriculum],
        tasks: Mapping[str, TaskMix],
        *,
        choose: ChooseTask | None = None,
        rests: Callable[[str], bool] = lambda task: False,
        process_index: int = 0,
        process_count: int = 1,
    ) -> None:
        """Begin at the first draw.

        Args:
            streams: prompts of each task, by name.
            tasks: the part of each of them.
            choose: a user's function; None: by the weights.
            rests: whether a task starts no group for now, after failures.
            process_index: this process, which draws every process_count-th group of the run.
            process_count: processes with rollouts.
        """
        self._streams, self._tasks, self._choose = dict(streams), dict(tasks), choose
        self._weights = {name: task.weight for name, task in tasks.items()}
        self._most = {name: task.most for name, task in tasks.items()}
        self.rests = rests  # set before the run starts
        self.prescribed: Sequence[str] = ()  # choices of a recording that is replayed, by draw
        self._first, self._stride = process_index, process_count
        self._lock = threading.Lock()
        zeros = dict.fromkeys(tasks, 0)
        start = MixState(dict.fromkeys(tasks, 0.0), zeros, dict(zeros), dict.fromkeys(tasks, ()))
        self._journal = Journal(start, ChosenTask, self._advance)
        self._running: dict[int, str] = {}  # task of each group that is sampled or scored
        self._drops = Counter[tuple[str, str]]()  # task and reason, since the last `measures`
        self._overruled = 0  # choices of tasks that could not start, since the last `measures`

    @property
    def references(self) -> tuple[str, ...]:
        """See PromptStream: of all tasks."""
        return tuple(text for stream in self._streams.values() for text in stream.references)

    def __iter__(self) -> "MixedPrompts":
        return self

    def may_begin(self) -> bool:
        """Return whether a task may start a group now: one with a weight, since a task of weight 0
        starts a group only if the user's function prefers it to such a task."""
        with self._lock:
            able = any(self._weights[name] for name in self._able())
            return able or self._journal.now.next < len(self.prescribed)

    def __next__(self) -> Prompt:
        """Return the prompt of the next group; the stream never ends. Raises RolloutError if the
        user's function fails."""
        with self._lock:
            self._journal.take_in()
            number = self._journal.now.next
            weights, name = self._due()
            self._journal.append(ChosenTask(name, weights))
            self._running[number] = name
            prompt = replace(next(self._streams[name]), task=name)
            if len(self._tasks) > 1:
                prompt = replace(prompt, position=self._first + self._stride * number)
            return prompt

    def observe(self, group: EpisodeGroup) -> None:
        """Record a scored group, whether or not it will be trained on."""
        number, name = group.ticket.group, group.prompt.task
        self._streams[name].observe(group)
        rewards = [score.total for score in group.scores]
        with self._lock:
            self._running.pop(number, None)
            if rewards:
                mean = math.fsum(rewards) / len(rewards)
                self._journal.arrived.append(ScoredGroup(number, name, mean))

    def dropped(self, task: str, number: int, reason: Drop) -> None:
        """Record a group that will not be trained on: its draw counts no more."""
        with self._lock:
            self._running.pop(number, None)
            self._drops[task, reason.value] += 1
            self._journal.arrived.append(DroppedGroup(number, task))

    def measures(self, next_draw: int) -> dict[str, float]:
        """Return each task's metrics before draw `next_draw`, or before the last call's draw if
        later; drops are those since the last call. Keys as in METRICS."""
        with self._lock:
            state = self._journal.settled
            self._journal.settle(max(next_draw, state.next))
            counted = {name: state.started[name] - state.dropped[name] for name in self._tasks}
            total, running = max(sum(counted.values()), 1), Counter(self._running.values())
            metrics: dict[str, float] = {}
            for name in self._tasks:
                metrics |= {
                    f"task/{name}/share": counted[name] / total,
                    f"task/{name}/behind": state.credits[name],
                    f"task/{name}/in_flight": float(running[name]),
                    f"task/{name}/resting": float(self.rests(name)),
                }
            for (name, reason), count in self._drops.items():
                metrics[f"task/{name}/dropped_{reason}"] = float(count)
            self._drops.clear()
            if self._choose is not None:
                metrics["task/overruled"] = float(self._overruled)
                self._overruled = 0
            started = dict(state.started)
        for name, stream in self._streams.items():
            for key, value in stream.measures(started[name]).items():
                metrics[f"task/{name}/{key.removeprefix('data/')}"] = value
        return metrics

    def state(self, next_draw: int | None = None, ended: Ended | None = None) -> dict[str, Any]:
        """Return the state before this draw (None: now), as JSON. Successive calls must not go
        back.

        Groups are scored and dropped while a checkpoint is made. What has happened to a group is
        in the state if the group had `ended` for the buffer, too; None: if it happened before the
        draw.
        """
        with self._lock:
            state = self._journal.before(next_draw, ended)
        return {
            "next": state.next,
            "tasks": {
                name: {
                    "credit": state.credits[name],
                    "drawn": state.started[name],
                    "dropped": state.dropped[name],
                    "rewards": list(state.rewards[name]),
                    "stream": stream.state(state.started[name], ended),
                }
                for name, stream in self._streams.items()
            },
        }

    def restore(self, state: Mapping[str, object]) -> None:
        """Continue from `state`; a task that it does not have begins at its first prompt.

        Raises DataError if it is the state of other tasks, or of other records.
        """
        saved = state.get("tasks")
        if not isinstance(saved, Mapping):
            raise DataError(
                "the checkpoint is of a run with one task (task, data), and this run has several "
                "(tasks). Resume with the same task, or choose another run.name; "
                "model.path=.../policy starts from a finished run's weights."
            )
        if missing := [name for name in saved if name not in self._tasks]:
            raise DataError(
                f"the checkpoint has groups of the task {missing[0]!r}, which tasks does not have "
                f"now (it has: {', '.join(self._tasks)}). Keep the names of tasks; weight: 0 "
                "starts no further group of one."
            )
        with self._lock:
            now = self._journal.now
            for name, own in saved.items():
                with naming(f"tasks.{name}"):
                    self._streams[name].restore(dict(own["stream"]))
                now.credits[name] = float(own["credit"])
                now.started[name] = int(own["drawn"])
                now.dropped[name] = int(own["dropped"])
                now.rewards[name] = tuple(map(float, own["rewards"]))
            self._journal.restart(now)
            self._running = {}
        if new := [name for name in self._tasks if name not in saved]:
            log.info("new tasks since the checkpoint: %s", ", ".join(new))

    def restore_running(self, groups: Mapping[int, str]) -> None:
        """Count these groups of a checkpoint, by number, which continue: the task of each."""
        with self._lock:
            self._running = dict(groups)

    # ---- under the lock

    def _able(self) -> tuple[str, ...]:
        """Return the tasks that may start a group now."""
        running = Counter(self._running.values())
        return tuple(
            name
            for name, task in self._tasks.items()
            if (task.weight > 0 or self._choose is not None)
            and (task.max_in_flight is None or running[name] < task.max_in_flight)
            and not self.rests(name)
        )

    def _due(self) -> tuple[Mapping[str, float], str]:
        """Return the weights of this draw, and the task that it chooses."""
        if self._journal.now.next < len(self.prescribed):
            return self._weights, self.prescribed[self._journal.now.next]
        able, weights = self._able(), self._weights
        assert any(weights[name] for name in able), "may_begin was asked"
        if self._choose is not None:
            chosen = self._ask_user(able)
            if isinstance(chosen, str) and chosen in able:
                return weights, chosen
            if isinstance(chosen, dict) and any(chosen[name] for name in able):
                weights = chosen
            else:
                self._overruled += 1
        return weights, due(accrued(self._journal.now.credits, weights, self._most), weights, able)

    def _ask_user(self, able: tuple[str, ...]) -> str | dict[str, float]:
        """Ask the user's function. Raises RolloutError."""
        assert self._choose is not None
        state = self._journal.now
        view = MixView(
            draw=state.next,
            weights=dict(self._weights),
            counts={name: state.started[name] - state.dropped[name] for name in self._tasks},
            rewards=dict(state.rewards),
            available=able,
        )
        try:
            answer: Any = self._choose(view)
        except Exception as error:
            raise RolloutError(
                f"the function of `mixing` raised {type(error).__name__}: {error}. Correct it."
            ) from error
        if isinstance(answer, str) and answer in self._tasks:
            return answer
        numbers = answer.values() if isinstance(answer, Mapping) else ()
        if (
            isinstance(answer, Mapping)
            and {*answer} <= {*self._tasks}
            and all(isinstance(w, int | float) and 0 <= w < math.inf for w in numbers)
            and any(numbers)
        ):
            return {name: float(answer.get(name, 0.0)) for name in self._tasks}
        raise RolloutError(
            f"the function of `mixing` returned {answer!r:.80}. It must return the name of a task "
            f"({', '.join(self._tasks)}), or a mapping from names to weights, not negative and not "
            "all 0."
        )

    def _advance(self, state: MixState, event: ChosenTask | DroppedGroup | ScoredGroup) -> None:
        """Bring a state to after an event."""
        name = event.task
        if isinstance(event, ChosenTask):
            gained = accrued(state.credits, event.weights, self._most)
            state.credits = spent(gained, name)
            state.started[name] += 1
        elif isinstance(event, DroppedGroup):
            state.dropped[name] += 1
            if self._weights[name] > 0:
                state.credits = given_back(state.credits, self._weights, self._most, name)
        else:
            state.rewards[name] = (*state.rewards[name], event.reward)[-RECENT:]


def catch_up(weights: Mapping[str, float], groups_per_step: int) -> dict[str, float]:
    """Return by how many groups each task may be behind its share: one step's worth of its groups,
    and at least one."""
    of_each = shares(weights)
    return {name: max(1.0, share * groups_per_step) for name, share in of_each.items()}
