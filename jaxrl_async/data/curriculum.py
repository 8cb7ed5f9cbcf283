"""A curriculum: samples prompts by weights that depend on their measured difficulty.

    PromptStream ──the next `pool` unused positions──> weighted draw ──> Prompt ──> ...... group
                                                               ^                              │
                                                               └──── pass rates <── observe ──┘

A curriculum changes only the order of the stream: each position is used once, and none waits longer
than MAX_PASSED_OVER pools. A draw depends on the seed, on its number (equal to its group's number),
and on the groups observed before it.
"""

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, Protocol, Self, TypeVar

import numpy as np
from numpy.typing import NDArray

from jaxrl_async.config.schema import DataSection
from jaxrl_async.data.prompts import CheckRecord, Ended, PromptStream, make_prompts
from jaxrl_async.data.records import OwnRecords
from jaxrl_async.data.tokenizer import Tokenizer
from jaxrl_async.errors import DataError
from jaxrl_async.types import EpisodeGroup, Prompt

Doubles = NDArray[np.float64]
Rates = Mapping[int, float]
"""prompt_id -> pass rate: the fraction of correct answers, 0 to 1."""

MAX_PASSED_OVER = 10
"""A position that was skipped for this many pools' worth of draws is taken next."""
SALT = 0x6375
"""Separates the random numbers of draws from others with the same seed."""


# ---- pure: rates and weights


def pass_share(group: EpisodeGroup, threshold: float = 0.5) -> float:
    """Return the fraction of a group's rewards above `threshold`."""
    return float(np.mean([s.total > threshold for s in group.scores]))


def observed(old: float | None, share: float, *, decay: float = 0.5) -> float:
    """Return a prompt's pass rate after another group: decay * old + (1 - decay) * share.

    old: the rate before; None: this is the prompt's first group, which sets the rate.
    """
    return share if old is None else decay * old + (1 - decay) * share


def hard_first(rates: Rates, prompt_ids: Sequence[int], *, floor: float = 0.05) -> Doubles:
    """Return sampling weights of prompts, proportional to 1 - pass rate, with sum 1.

    Team Kimi 2025 (Kimi k1.5, arXiv:2501.12599), sec. 2.3.4, prioritized sampling. A prompt without
    a rate counts as unsolved; `floor` is the minimum weight before normalization.
    """
    known = np.array([rates.get(i, 0.0) for i in prompt_ids], np.float64)
    return _shares(1 - known, floor)


def frontier_first(rates: Rates, prompt_ids: Sequence[int], *, floor: float = 0.05) -> Doubles:
    """Return sampling weights proportional to p (1 - p) for the pass rate p, with sum 1.

    This is the variance of a binary reward, with its maximum at p = 1/2; a group with equal rewards
    gives no training signal. A prompt without a rate counts as 1/2.
    """
    known = np.array([rates.get(i, 0.5) for i in prompt_ids], np.float64)
    return _shares(4 * known * (1 - known), floor)


def _shares(weights: Doubles, floor: float) -> Doubles:
    weights = np.maximum(weights, floor)
    return weights / weights.sum() if len(weights) else weights


Weigh = Callable[[Rates, Sequence[int]], Doubles]

WEIGHTS: dict[str, Weigh] = {f.__name__: f for f in (hard_first, frontier_first)}


def chosen(weights: Doubles, seed: int, draw: int) -> int:
    """Sample an index by weight, with random numbers keyed by the seed and the draw's number."""
    return int(np.random.default_rng([SALT, seed, draw]).choice(len(weights), p=weights))


# ---- the state of a stream, now and before an earlier draw


class DrawState(Protocol):
    """The state that determines a stream's next draw."""

    @property
    def next(self) -> int:
        """Number of the next draw."""

    def copy(self) -> Self:
        """Return another state with the same values."""


State = TypeVar("State", bound=DrawState)


class Journal(Generic[State]):
    """The state at the next draw, the state last read, and the events in between, which advance
    the second. An event is a draw or has the number of its `group`. Its owner holds a lock."""

    def __init__(self, now: State, draws: type, advance: Callable[[State, Any], None]) -> None:
        """draws: the type of draws. advance: brings a state to after an event."""
        self.now, self.settled = now, now.copy()
        self._draws, self._advance = draws, advance
        self.events: list[Any] = []  # between the two states
        self.arrived: list[Any] = []  # of groups, since the last draw

    def _in_order(self) -> list[Any]:
        """Return what has arrived since the last draw, ordered by group, not by arrival."""
        return sorted(self.arrived, key=lambda event: event.group)

    def take_in(self) -> None:
        """Apply what has arrived since the last draw."""
        for event in self._in_order():
            self.append(event)
        self.arrived.clear()

    def append(self, event: object) -> None:
        """Apply an event."""
        self._advance(self.now, event)
        self.events.append(event)

    def settle(self, next_draw: int, ended: Ended | None = None) -> list[Any]:
        """Advance the settled state to just before this draw, or what happened to a group that has
        not `ended`; return the draws in between."""
        assert self.settled.next <= next_draw <= self.now.next, "not between the two states"
        if next_draw == self.now.next:
            self.take_in()
        draws: list[Any] = []
        done = 0
        for event in self.events:
            if isinstance(event, self._draws):
                if self.settled.next == next_draw:
                    break
                draws.append(event)
            elif ended is not None and not ended(event.group):
                break
            self._advance(self.settled, event)
            done += 1
        del self.events[:done]
        return draws

    def before(self, next_draw: int | None, ended: Ended | None) -> State:
        """Return the state before this draw (None: now), with what happened to the groups that have
        `ended`, also later; None: with what happened before the draw."""
        end = self.now.next if next_draw is None else next_draw
        self.settle(end, ended)
        state = self.settled.copy()
        if ended is not None:
            for event in (*self.events, *self._in_order()):
                is_draw = isinstance(event, self._draws)
                if state.next < end if is_draw else ended(event.group):
                    self._advance(state, event)
        return state

    def restart(self, now: State) -> None:
        """Continue from a state, without events."""
        self.now, self.settled = now, now.copy()
        self.events, self.arrived = [], []


# ---- the state of a curriculum


@dataclass(slots=True)
class StreamPosition:
    """The state that determines a curriculum's next draw, together with the seed."""

    next: int = 0  # number of the next draw
    passed_over: list[int] = field(default_factory=list)  # positions below `reach`, ascending
    rates: dict[int, float] = field(default_factory=dict)

    @property
    def reach(self) -> int:
        """The first position that was in no pool yet; each draw has used one position below it."""
        return self.next + len(self.passed_over)

    def fill(self, pool: int) -> list[int]:
        """Return the positions to draw from, after filling up the pool with new ones."""
        missing = max(pool - len(self.passed_over), 0)
        self.passed_over += range(self.reach, self.reach + missing)
        return self.passed_over[:pool]

    def follow(self, event: "DrawEvent | Seen") -> None:
        """Advance to after an event."""
        if isinstance(event, Seen):
            self.rates[event.prompt_id] = observed(self.rates.get(event.prompt_id), event.share)
        else:
            self.fill(event.pool)
            self.passed_over.remove(event.position)
            self.next += 1

    def copy(self) -> "StreamPosition":
        """Return another position with the same values."""
        return StreamPosition(self.next, list(self.passed_over), dict(self.rates))


@dataclass(frozen=True, slots=True)
class DrawEvent:
    """A journal event: a draw."""

    pool: int  # size of the pool
    position: int
    rate: float | None  # pass rate of its prompt at that time


@dataclass(frozen=True, slots=True)
class Seen:
    """A journal event: a group was scored."""

    group: int
    prompt_id: int
    share: float


class Curriculum:
    """A PromptStream in a weighted random order.

    The rollout loop draws prompts and reports scored groups; the trainer reads the state before an
    earlier draw, so access is locked.
    """

    def __init__(
        self, stream: PromptStream, weigh: Weigh, *, pool: int, seed: int, threshold: float = 0.5
    ) -> None:
        """pool: number of upcoming positions to choose from. threshold: higher rewards are
        correct."""
        self._stream, self._weigh = stream, weigh
        self._pool, self._seed, self._threshold = pool, seed, threshold
        self._lock = threading.Lock()
        self._journal = Journal(StreamPosition(), DrawEvent, StreamPosition.follow)
        self._upcoming: dict[int, Prompt] = {}  # of the pool

    @property
    def references(self) -> tuple[str, ...]:
        """See PromptStream."""
        return self._stream.references

    def __iter__(self) -> "Curriculum":
        return self

    def __next__(self) -> Prompt:
        """Return the prompt for the next group; the stream never ends."""
        with self._lock:
            self._journal.take_in()
            now = self._journal.now
            number, positions = now.next, now.fill(self._pool)
            for position in positions:
                if position not in self._upcoming:
                    self._upcoming[position] = self._stream.at(position)
            position = positions[0]
            if number - position < MAX_PASSED_OVER * self._pool:
                ids = [self._upcoming[p].prompt_id for p in positions]
                weights = self._weigh(now.rates, ids)
                position = positions[chosen(weights, self._seed, number)]
            prompt = self._upcoming.pop(position)
            rate = now.rates.get(prompt.prompt_id)
            self._journal.append(DrawEvent(self._pool, position, rate))
            return prompt

    def observe(self, group: EpisodeGroup) -> None:
        """Record a scored group for its prompt's pass rate, whether or not it will be trained
        on."""
        if group.scores:
            share = pass_share(group, self._threshold)
            with self._lock:
                self._journal.arrived.append(
                    Seen(group.ticket.group, group.prompt.prompt_id, share)
                )

    def measures(self, next_draw: int) -> dict[str, float]:
        """Return metrics of the difficulty of all prompts, and of the prompts taken since the last
        call.

        They describe the state before draw `next_draw`, or before the last call's draw if later.
        Keys as in METRICS.
        """
        with self._lock:
            draws = self._journal.settle(max(next_draw, self._journal.settled.next))
            settled = self._journal.settled
            rates = [*settled.rates.values()]
            known = [d.rate for d in draws if d.rate is not None]
            oldest = min(settled.passed_over, default=settled.next)
            return {
                "data/measured_prompts": float(len(rates)),
                "data/longest_passed_over": float(max(settled.next - oldest, 0)),
                **({"data/difficulty_mean": 1 - float(np.mean(rates))} if rates else {}),
                **({"data/drawn_difficulty_mean": 1 - float(np.mean(known))} if known else {}),
            }

    def state(self, next_draw: int | None = None, ended: Ended | None = None) -> dict[str, Any]:
        """Return the state before this draw (None: now) and the stream's identity, as JSON.

        A resumed run repeats the later draws. Successive calls must not go back.

        ended: groups whose scores are in the state; None: those scored before the draw.
        """
        with self._lock:
            state = self._journal.before(next_draw, ended)
        return {
            **self._stream.state(state.next),
            "passed_over": state.passed_over,
            "rates": [[i, rate] for i, rate in state.rates.items()],
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Continue from `state`, which a curriculum or a stream in fixed order has returned.

        Raises DataError if it is the state of a different stream.
        """
        passed_over, rates = state.get("passed_over", []), state.get("rates", [])
        self._stream.restore({k: v for k, v in state.items() if k != "passed_over"})
        if passed_over != sorted({int(p) for p in passed_over}):
            raise DataError(
                "the saved state of the curriculum is damaged: the skipped positions are not "
                "ascending. Resume from an earlier checkpoint."
            )
        with self._lock:
            known = {int(i): float(rate) for i, rate in rates}
            self._journal.restart(StreamPosition(state["next"], list(passed_over), known))
            self._upcoming = {}


SUMMED = ("measured_prompts", "in_flight", "overruled")
"""Measures that are summed over processes, and so are dropped groups."""


def combined_measures(of_processes: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Combine the measures of the processes' prompts, each over its shard of them."""
    even = [1.0] * len(of_processes)
    combined: dict[str, float] = {}
    for key in sorted({key for measures in of_processes for key in measures}):
        space, _, kind = key.rpartition("/")
        values, weights = [m.get(key, 0.0) for m in of_processes], even
        if kind == "difficulty_mean":
            weights = [m.get(f"{space}/measured_prompts", 0.0) for m in of_processes]
        each = [w * (key in m) for m, w in zip(of_processes, weights, strict=True)]
        if kind in SUMMED or kind.startswith("dropped_"):
            combined[key] = sum(values)
        elif kind == "longest_passed_over":
            combined[key] = max(values)
        else:
            combined[key] = float(np.average(values, weights=each))
    return combined


def make_stream(
    data: DataSection,
    tokenizer: Tokenizer,
    seed: int,
    process_index: int = 0,
    process_count: int = 1,
    own: OwnRecords | None = None,
    graded: bool = False,
    check: CheckRecord | None = None,
) -> PromptStream | Curriculum:
    """Return one process's endless stream of prompts, in fixed order or ordered by data.curriculum.

    own, graded: see eval_prompts; check: see PromptStream. Raises DataError or ConfigError.
    """
    stream = make_prompts(
        data, tokenizer, seed, process_index, process_count, own=own, graded=graded, check=check
    )
    if data.curriculum == "none":
        return stream
    return Curriculum(
        stream,
        WEIGHTS[data.curriculum],
        pool=data.curriculum_pool,
        seed=seed,
        threshold=data.curriculum_threshold,
    )
