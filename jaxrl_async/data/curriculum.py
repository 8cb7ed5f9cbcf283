"""Prompts by how hard they have been: a stream whose next prompts are drawn by weight.

    PromptStream ──the next `pool` places not used yet──> draw by weight ──> Prompt ──> ... group
                                                               ^                              │
                                                               └──── pass rates <── observe ──┘

A curriculum changes the order of the stream and nothing else: each place is used once, and none
waits longer than MAX_PASSED_OVER pools. What a draw gives depends on the seed, on its number (that
of the group it is for), and on the groups observed before it.
"""

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from jaxrl_async.config.schema import DataSection
from jaxrl_async.data.prompts import PromptStream, make_prompts
from jaxrl_async.data.tokenizer import Tokenizer
from jaxrl_async.errors import DataError
from jaxrl_async.types import EpisodeGroup, Prompt

Doubles = NDArray[np.float64]
Rates = Mapping[int, float]
"""prompt_id -> pass rate, the share of its answers that were right, 0 to 1."""

MAX_PASSED_OVER = 10
"""A place that was passed over for so many pools' worth of draws is drawn next."""
SALT = 0x6375
"""Keeps the draws' random numbers apart from others of the same seed."""


# ---- pure: rates and weights


def pass_share(group: EpisodeGroup, threshold: float = 0.5) -> float:
    """The share of a group's rewards above `threshold`."""
    return float(np.mean([s.reward > threshold for s in group.scores]))


def observed(old: float | None, share: float, *, decay: float = 0.5) -> float:
    """A prompt's pass rate after another group: decay * old + (1 - decay) * share.

    Its first group sets the rate.
    """
    return share if old is None else decay * old + (1 - decay) * share


def hard_first(rates: Rates, prompt_ids: Sequence[int], *, floor: float = 0.05) -> Doubles:
    """Weights to draw prompts by, proportional to 1 - pass rate; they add up to 1.

    Team Kimi 2025 (Kimi k1.5, arXiv:2501.12599), sec. 2.3.4, prioritized sampling. A prompt that
    was never seen counts as unsolved; `floor` keeps solved ones from vanishing.
    """
    known = np.array([rates.get(i, 0.0) for i in prompt_ids], np.float64)
    return _shares(1 - known, floor)


def frontier_first(rates: Rates, prompt_ids: Sequence[int], *, floor: float = 0.05) -> Doubles:
    """The same, proportional to p (1 - p): the variance of a reward of 0 or 1, most at one half.

    That of what a group can teach: with all rewards equal, nothing. A prompt that was never seen
    counts as 1/2.
    """
    known = np.array([rates.get(i, 0.5) for i in prompt_ids], np.float64)
    return _shares(4 * known * (1 - known), floor)


def _shares(weights: Doubles, floor: float) -> Doubles:
    weights = np.maximum(weights, floor)
    return weights / weights.sum() if len(weights) else weights


Weigh = Callable[[Rates, Sequence[int]], Doubles]

WEIGHTS: dict[str, Weigh] = {f.__name__: f for f in (hard_first, frontier_first)}


def chosen(weights: Doubles, seed: int, draw: int) -> int:
    """Which of the weighted is drawn: keyed by seed and number of the draw."""
    return int(np.random.default_rng([SALT, seed, draw]).choice(len(weights), p=weights))


# ---- where a curriculum is


@dataclass(slots=True)
class StreamPosition:
    """Where a curriculum is: all that the next draw depends on, beside the seed."""

    next: int = 0  # number of the next draw
    passed_over: list[int] = field(default_factory=list)  # places below `reach`, ascending
    rates: dict[int, float] = field(default_factory=dict)

    @property
    def reach(self) -> int:
        """The first place that was not in a pool yet: each draw has used one of those below."""
        return self.next + len(self.passed_over)

    def fill(self, pool: int) -> list[int]:
        """The places to draw from, after taking in new ones up to `pool`."""
        missing = max(pool - len(self.passed_over), 0)
        self.passed_over += range(self.reach, self.reach + missing)
        return self.passed_over[:pool]

    def use(self, place: int) -> None:
        """This place has been drawn."""
        self.passed_over.remove(place)
        self.next += 1

    def saw(self, prompt_id: int, share: float) -> None:
        """A group of this prompt has been scored."""
        self.rates[prompt_id] = observed(self.rates.get(prompt_id), share)


@dataclass(frozen=True, slots=True)
class DrawEvent:
    """An event of the journal: a draw."""

    pool: int  # places drawn from
    place: int
    rate: float | None  # pass rate of its prompt, as known then


@dataclass(frozen=True, slots=True)
class Seen:
    """An event of the journal: a group was scored."""

    group: int
    prompt_id: int
    share: float


class Curriculum:
    """A PromptStream in an order drawn by weight. Drawn from and told of groups by the rollout
    loop; the trainer asks for its state as it was before an earlier draw, hence the lock.

    Two places are kept: that of the next draw, and the one last asked for, with the journal of what
    happened since, which moves the second after the first.
    """

    def __init__(
        self, stream: PromptStream, weigh: Weigh, *, pool: int, seed: int, threshold: float = 0.5
    ) -> None:
        """pool: upcoming places to choose among. threshold: a reward above it is right."""
        self._stream, self._weigh = stream, weigh
        self._pool, self._seed, self._threshold = pool, seed, threshold
        self._lock = threading.Lock()
        self._now, self._settled = StreamPosition(), StreamPosition()
        self._journal: list[DrawEvent | Seen] = []  # between the two
        self._unsorted: list[Seen] = []  # since the last draw
        self._upcoming: dict[int, Prompt] = {}  # of the pool

    def __iter__(self) -> "Curriculum":
        return self

    def __next__(self) -> Prompt:
        """The prompt for the next group; never ends."""
        with self._lock:
            self._take_in()
            number, places = self._now.next, self._now.fill(self._pool)
            for place in places:
                if place not in self._upcoming:
                    self._upcoming[place] = self._stream.at(place)
            place = places[0]
            if number - place < MAX_PASSED_OVER * self._pool:
                ids = [self._upcoming[p].prompt_id for p in places]
                place = places[chosen(self._weigh(self._now.rates, ids), self._seed, number)]
            prompt = self._upcoming.pop(place)
            rate = self._now.rates.get(prompt.prompt_id)
            self._now.use(place)
            self._journal.append(DrawEvent(self._pool, place, rate))
            return prompt

    def observe(self, group: EpisodeGroup) -> None:
        """A group has been scored, whether or not it will be trained on: its prompt's pass rate."""
        if group.scores:
            share = pass_share(group, self._threshold)
            with self._lock:
                self._unsorted.append(Seen(group.ticket.group, group.prompt.prompt_id, share))

    def measures(self, next_draw: int) -> dict[str, float]:
        """How hard the prompts are, as known before that draw, and those drawn since the last call;
        keys as in METRICS. An earlier draw than the last call's counts as that one."""
        with self._lock:
            drawn = self._settle(max(next_draw, self._settled.next))
            place, rates = self._settled, [*self._settled.rates.values()]
            known = [d.rate for d in drawn if d.rate is not None]
            oldest = min(place.passed_over, default=place.next)
            return {
                "data/measured_prompts": float(len(rates)),
                "data/longest_passed_over": float(max(place.next - oldest, 0)),
                **({"data/difficulty_mean": 1 - float(np.mean(rates))} if rates else {}),
                **({"data/drawn_difficulty_mean": 1 - float(np.mean(known))} if known else {}),
            }

    def state(self, next_draw: int | None = None) -> dict[str, Any]:
        """Where the stream is before that draw (None: now), and which stream it is; JSON.

        Draws from there on are forgotten by a resumed run, which makes them again. Calls must not
        go back.
        """
        with self._lock:
            self._settle(self._now.next if next_draw is None else next_draw)
            place = self._settled
            return {
                **self._stream.state(place.next),
                "passed_over": list(place.passed_over),
                "rates": [[i, rate] for i, rate in place.rates.items()],
            }

    def restore(self, state: dict[str, Any]) -> None:
        """Go on where `state` was taken, by this or by a stream in fixed order. Raises DataError
        where that was another stream."""
        passed_over, rates = state.get("passed_over", []), state.get("rates", [])
        self._stream.restore({k: v for k, v in state.items() if k != "passed_over"})
        if passed_over != sorted({int(p) for p in passed_over}):
            raise DataError(
                "the saved place of the curriculum is damaged: the places passed over do not "
                "ascend. Resume from an earlier checkpoint."
            )
        with self._lock:
            for place in (self._now, self._settled):
                place.next = state["next"]
                place.passed_over = list(passed_over)
                place.rates = {int(i): float(rate) for i, rate in rates}
            self._journal, self._unsorted, self._upcoming = [], [], {}

    # ---- under the lock

    def _take_in(self) -> None:
        """Groups scored since the last draw, in order of their numbers: not of who came first."""
        for seen in sorted(self._unsorted, key=lambda s: s.group):
            self._now.saw(seen.prompt_id, seen.share)
            self._journal.append(seen)
        self._unsorted.clear()

    def _settle(self, next_draw: int) -> list[DrawEvent]:
        """Move the settled place on, to before that draw; the draws it passed."""
        assert self._settled.next <= next_draw <= self._now.next, "not between the two places"
        if next_draw == self._now.next:
            self._take_in()
        drawn: list[DrawEvent] = []
        done = 0
        for event in self._journal:
            if isinstance(event, Seen):
                self._settled.saw(event.prompt_id, event.share)
            elif self._settled.next == next_draw:
                break
            else:
                self._settled.fill(event.pool)
                self._settled.use(event.place)
                drawn.append(event)
            done += 1
        del self._journal[:done]
        return drawn


def make_stream(
    data: DataSection,
    tokenizer: Tokenizer,
    seed: int,
    process_index: int = 0,
    process_count: int = 1,
) -> PromptStream | Curriculum:
    """One process's endless stream of prompts, in fixed order or by data.curriculum. Raises
    DataError or ConfigError."""
    stream = make_prompts(data, tokenizer, seed, process_index, process_count)
    if data.curriculum == "none":
        return stream
    return Curriculum(
        stream,
        WEIGHTS[data.curriculum],
        pool=data.curriculum_pool,
        seed=seed,
        threshold=data.curriculum_threshold,
    )
