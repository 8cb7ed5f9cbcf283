"""The pipeline as a discrete-event simulation: who will be busy, and how stale the data will be.

    gate ──groups──> [ sampler: queue > places > blocks of K steps ] x N ──> scorers ──> ready
      ^                        ^ swap, between two blocks                                  │
      └──── slots freed ── live in all <── transfer <── publish <── update <── P groups ───┘

It follows the run's own rules: the gate's bounds come from staleness.py, rows from
sampler/batch/shapes.py, a block's take-overs from sampler/device/engine.py. One event is one block
of one sampler, and its slots are NumPy arrays. Same pipeline and seed, same outcome; lengths go
with the group's number, so that two pipelines can be compared on the same answers.

Not simulated: KV pages that run out, failures, evaluations, several turns, groups that are used
twice or dropped for want of a signal; sampler.on_new_weights is "continue".
"""

import heapq
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from itertools import islice, pairwise
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from jaxrl_async.errors import ConfigError
from jaxrl_async.sampler.batch.shapes import decode_rows
from jaxrl_async.staleness import capacity, memory_bound, never_fills_a_step

Longs = npt.NDArray[np.int64]
Doubles = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Histogram:
    """Values and how often each occurs."""

    values: tuple[float, ...]
    weights: tuple[float, ...]  # not negative, on any scale

    def __post_init__(self) -> None:
        """Raises ConfigError where no value can be drawn."""
        same = len(self.values) == len(self.weights) > 0
        if not same or min(self.weights) < 0 or sum(self.weights) <= 0 or min(self.values) < 0:
            raise ConfigError(
                f"a histogram of {len(self.values)} values and {len(self.weights)} weights: it "
                "needs as many of one as of the other, none negative, and a weight above 0."
            )

    @classmethod
    def constant(cls, value: float) -> "Histogram":
        """One value for all."""
        return cls(values=(value,), weights=(1.0,))

    @classmethod
    def of(cls, samples: Iterable[float]) -> "Histogram":
        """As often as each occurs in `samples`."""
        values, counts = np.unique(np.asarray(list(samples), np.float64), return_counts=True)
        return cls(values=tuple(values.tolist()), weights=tuple(counts.astype(float).tolist()))

    @property
    def mean(self) -> float:
        """Of a value drawn."""
        return float(np.average(self.values, weights=self.weights))


@dataclass(frozen=True, slots=True, kw_only=True)
class Samplers:
    """The samplers' side: what each holds, and what its programs take, in seconds."""

    slots: int
    rows: tuple[int, ...]  # rows that decode, ascending, and
    step_s: tuple[float, ...]  # a decode step at so many; linear between, level outside
    count: int = 1  # samplers
    reserve: int = 0  # sequences prefilled ahead
    block: int = 8  # decode steps in a dispatch
    context_token_s: float = 0.0  # a step's more for each token of context of the running rows
    block_s: float = 0.0  # a block's more, whatever its steps: dispatch and the host's work
    prefill_s: float = 0.0  # a round in which something is prefilled, and
    prefill_token_s: float = 0.0  # each token of it
    prefill_chunk: int = 2048  # tokens prefilled between two blocks
    swap_s: float = 0.0  # decoding stands still for a swap


@dataclass(frozen=True, slots=True, kw_only=True)
class Pipeline:
    """All that the outcome depends on. Times in seconds, lengths in tokens."""

    samplers: Samplers
    answer_tokens: Histogram
    prompt_tokens: int = 0
    group_size: int = 8
    groups_per_step: int = 8
    max_staleness: int = 1
    lookahead: int = 0
    when_too_old: Literal["wait", "drop"] = "wait"
    overcommit: float = 1.5  # with drop
    score_s: Histogram = field(default_factory=lambda: Histogram.constant(0.0))  # of a group
    scorers: int | None = None  # groups scored at a time; None: all
    update_s: float = 0.0  # packing, forward, backward and optimizer, whatever the tokens, and
    update_token_s: float = 0.0  # for each token of the batch, prompts included
    publish_s: float = 0.0  # of the trainer's time
    transfer_s: float = 0.0  # from publish until the weights are in the samplers' memory
    report_s: float = 0.0  # between two steps
    save_every: int = 0  # updates between two checkpoints; 0: none
    save_s: float = 0.0  # the trainer stands still for one

    @property
    def places(self) -> int:
        """Groups under way at once, the gate's bound."""
        if self.when_too_old == "drop":
            return memory_bound(self.max_staleness, self.groups_per_step, self.overcommit)
        return capacity(self.max_staleness, self.groups_per_step, self.lookahead)


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulationResult:
    """What came of it, after the warm-up; shares as metrics.jsonl defines them."""

    updates: int
    wall_s: float
    updates_per_s: float
    trained_tokens_per_s: float  # answers' tokens
    generated_tokens_per_s: float
    trainer_busy_share: float  # 1 - trainer/idle_share: step time in which the trainer learnt
    sampler_busy_share: float  # sampler/busy_share, mean over samplers
    slot_occupancy: float  # sampler/slot_occupancy: decode steps x slots that drew a token
    staleness_mean: float  # staleness/mean, versions, over trained tokens
    staleness_max: int  # staleness/max, versions, of a trained group's oldest token
    wait_data_share: float  # of wall time: the trainer waited for groups,
    wait_publish_share: float  # for samplers to take the update before, or sent weights,
    wait_other_share: float  # and wrote metrics and checkpoints
    sampler_idle_share: float  # of wall time: nothing to decode
    scoring_mean: float  # groups in the scorers or waiting for one, over wall time
    ready_mean: float  # groups that wait for the trainer, over wall time
    drawn_tokens: int  # since the start: all of trained, dropped and left
    trained_tokens: int
    dropped_tokens: int
    left_tokens: int  # of groups under way, or waiting, at the end
    dropped_groups: int


def simulate(
    pipeline: Pipeline, *, updates: int = 60, warm_up: int = 10, seed: int = 0
) -> SimulationResult:
    """Run the pipeline for so many updates; shares and rates leave out the first `warm_up`.

    Raises ConfigError where a step could never be filled or a setting has no meaning.
    """
    _check(pipeline, updates, warm_up)
    run = _Run(pipeline, seed)
    before = run.to(warm_up)
    return _outcome(run, before, run.to(updates))


@dataclass(frozen=True, slots=True, kw_only=True)
class Simulated:
    """A split of the chips, and what comes of it."""

    trainer_chips: int
    outcome: SimulationResult


def best_split(
    pipelines: Mapping[int, Pipeline], *, updates: int = 60, warm_up: int = 10, seed: int = 0
) -> tuple[Simulated, ...]:
    """Every split, by the trainer's chips, the one that trains on most tokens a second first."""
    splits = [
        Simulated(
            trainer_chips=chips, outcome=simulate(p, updates=updates, warm_up=warm_up, seed=seed)
        )
        for chips, p in sorted(pipelines.items())
    ]
    return tuple(sorted(splits, key=lambda s: -s.outcome.trained_tokens_per_s))


def _check(p: Pipeline, updates: int, warm_up: int) -> None:
    """Raise ConfigError for what cannot run."""
    if not 0 <= warm_up < updates:
        raise ConfigError(
            f"{updates} updates, the first {warm_up} of them to warm up: nothing is left to "
            "measure. Simulate more updates than that."
        )
    s = p.samplers
    least = {
        "group_size": (p.group_size, 1),
        "groups_per_step": (p.groups_per_step, 1),
        "max_staleness": (p.max_staleness, 0),
        "lookahead": (p.lookahead, 0),
        "overcommit": (p.overcommit, 1),
        "prompt_tokens": (p.prompt_tokens, 0),
        "answer_tokens": (min(p.answer_tokens.values), 1),
        "scorers": (1 if p.scorers is None else p.scorers, 1),
        "samplers.count": (s.count, 1),
        "samplers.slots": (s.slots, 1),
        "samplers.reserve": (s.reserve, 0),
        "samplers.block": (s.block, 1),
        "samplers.prefill_chunk": (s.prefill_chunk, 1),
    }
    small = [f"{name} ({v}) must be at least {low}" for name, (v, low) in least.items() if v < low]
    if small:
        raise ConfigError(f"{', '.join(small)}. Correct the pipeline.")
    if p.when_too_old == "wait":
        problem = never_fills_a_step(p.max_staleness, p.groups_per_step, p.lookahead)
        if problem is not None:
            raise ConfigError(problem)
    _check_times(p, s)


def _check_times(p: Pipeline, s: Samplers) -> None:
    times = {f"samplers.{f.name}": getattr(s, f.name) for f in fields(s) if f.name.endswith("_s")}
    times |= {f.name: getattr(p, f.name) for f in fields(p) if f.name.endswith("_s")}
    steps_s = times.pop("samplers.step_s")
    times["score_s"] = max(p.score_s.values)  # a histogram has nothing negative
    wrong = [f"{name} ({value})" for name, value in times.items() if not 0 <= value < np.inf]
    if wrong:
        raise ConfigError(f"{', '.join(wrong)} must be finite and not negative, seconds.")
    grows = all(a < b for a, b in pairwise(s.rows))
    positive = len(steps_s) > 0 and 0 < min(steps_s) <= max(steps_s) < np.inf
    if len(s.rows) != len(steps_s) or not (grows and positive):
        raise ConfigError(
            f"samplers.rows {s.rows} and samplers.step_s {steps_s}: give ascending numbers of rows "
            "and the seconds, above 0, of a step at each."
        )


# ---- the state


@dataclass(slots=True, eq=False)
class _Group:
    """A prompt with its answers, from the gate to the trainer."""

    number: int
    left: int  # answers that are not done
    oldest: int = -1  # version that drew its first token; -1: none yet
    tokens: int = 0  # of answers that are done
    version_tokens: int = 0  # the sum of their versions
    ready: bool = False


class _Sampler:
    """One sampler. A column of `seqs` is a sequence with a place, in order of admission."""

    LEFT, MINE, VERSIONS, GROUP, MARK = range(5)
    # tokens to draw | tokens drawn | the sum of their versions | group's number | tokens of
    # prefill that must be done before it can decode, since the start

    def __init__(self, places: int) -> None:
        self.seqs: Longs = np.zeros((5, places), np.int64)
        self.held = 0  # columns in use
        self.queue: deque[tuple[_Group, Longs]] = deque()  # lengths of the answers that wait
        self.version = 0
        self.staged: int | None = None  # a version on its way, or there
        self.arrives_s = 0.0
        self.to_prefill = self.prefilled = 0  # tokens, since the start
        self.idle_since: float | None = 0.0
        self.idle_s = 0.0
        self.called = False  # somebody has woken it already


@dataclass(slots=True)
class _Totals:
    """Counters since the start; read the difference of two."""

    at_s: float = 0.0
    updates: int = 0
    trained: int = 0  # tokens
    lag_tokens: int = 0  # sum of the trained tokens' staleness
    oldest: int = 0  # largest staleness of a group since the last reading
    drawn: int = 0  # tokens
    slot_steps: int = 0
    train_s: float = 0.0
    step_s: float = 0.0
    data_s: float = 0.0
    publish_s: float = 0.0
    idle_s: float = 0.0  # all samplers together
    scoring_group_s: float = 0.0
    ready_group_s: float = 0.0


class _Run:
    """The pipeline at one moment, and the events to come."""

    def __init__(self, pipeline: Pipeline, seed: int) -> None:
        self.p, self.now, self.version = pipeline, 0.0, 0
        side = pipeline.samplers
        self.samplers = [_Sampler(side.slots + side.reserve) for _ in range(side.count)]
        self.loads = np.zeros(side.count, np.int64)  # answers dealt to each and not done
        self.totals, self.dropped_tokens, self.dropped_groups = _Totals(), 0, 0
        self._events: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._next_event = 0
        self._lengths = _drawing(pipeline.answer_tokens, np.random.default_rng([seed, 0]))
        self._scores = _drawing(pipeline.score_s, np.random.default_rng([seed, 1]))
        self._step_s: dict[int, float] = {}  # by rows
        # the gate and the buffer
        self.pending: dict[int, _Group] = {}  # admitted, not taken or dropped; ascending
        self.next_group = 0
        self.first_unready = 0  # lowest number of a pending group that is not ready
        self.leading = 0  # pending groups below that, all ready
        self.taken: dict[int, int] = {}  # version drawn at -> slots held until it is live
        self.live = 0
        self.num_ready = self.num_scoring = 0
        self.to_score: deque[_Group] = deque()  # wait for a scorer
        # the trainer
        self.waits = True  # for groups
        self.step_from = self.learnt_at = 0.0
        self.waits_to_publish = False
        self.admit()

    def to(self, updates: int) -> _Totals:
        """Go on until so many updates are done; the counters then."""
        while self.totals.updates < updates:
            at_s, _, act, given = heapq.heappop(self._events)
            self._pass(at_s)
            act(*given)
        idle_s = sum(
            s.idle_s + (0.0 if s.idle_since is None else self.now - s.idle_since)
            for s in self.samplers
        )
        reading = replace(self.totals, at_s=self.now, idle_s=idle_s)
        self.totals.oldest = 0
        return reading

    def after(self, seconds: float, act: Callable[..., None], *given: Any) -> None:
        """An event to come; equal times in the order of asking."""
        self._next_event += 1
        heapq.heappush(self._events, (self.now + seconds, self._next_event, act, given))

    def _pass(self, at_s: float) -> None:
        passed_s = at_s - self.now
        self.totals.scoring_group_s += passed_s * self.num_scoring
        self.totals.ready_group_s += passed_s * self.num_ready
        self.now = at_s

    # ---- the gate

    def admit(self) -> None:
        """Groups into all free slots, each to the least loaded sampler (router.choose)."""
        active = len(self.pending) + sum(self.taken.values())
        for _ in range(max(0, self.p.places - active)):
            group = _Group(self.next_group, self.p.group_size)
            self.pending[group.number] = group
            self.next_group += 1
            index = int(self.loads.argmin())
            sampler = self.samplers[index]
            sampler.queue.append((group, self._lengths(self.p.group_size).astype(np.int64)))
            self.loads[index] += self.p.group_size
            if sampler.idle_since is not None and not sampler.called:
                sampler.called = True
                self.after(0.0, self.wake, index)

    # ---- a sampler

    def wake(self, index: int) -> None:
        """Begin a round, where none is under way."""
        sampler = self.samplers[index]
        sampler.called = False
        if sampler.idle_since is not None:
            sampler.idle_s += self.now - sampler.idle_since
            sampler.idle_since = None
            self.round(index)

    def round(self, index: int) -> None:
        """What happens between two blocks: a swap where weights have arrived."""
        sampler = self.samplers[index]
        if sampler.staged is None or sampler.arrives_s > self.now:
            self.block(index)
            return
        sampler.version, sampler.staged = sampler.staged, None
        if self.waits_to_publish:
            self.publish()
        self.after(self.p.samplers.swap_s, self.swapped, index)

    def swapped(self, index: int) -> None:
        """The next block starts; the slots that have become free are for the one after it."""
        self.block(index)
        lowest = min(s.version for s in self.samplers)
        if lowest > self.live:
            self.live = lowest
            self.taken = {at: n for at, n in self.taken.items() if at >= lowest}
            self.admit()

    def block(self, index: int) -> None:
        """Places, a round of prefill, and one decode block; or nothing to do."""
        sampler, side = self.samplers[index], self.p.samplers
        self._place(sampler)
        if not sampler.held:
            sampler.idle_since = self.now
            if sampler.staged is not None:  # sent while the last swap was going on
                self.after(max(0.0, sampler.arrives_s - self.now), self.wake, index)
            return
        taken_s = side.block_s
        prefilled = min(sampler.to_prefill - sampler.prefilled, side.prefill_chunk)
        if prefilled:
            sampler.prefilled += prefilled
            taken_s += side.prefill_s + prefilled * side.prefill_token_s
        seqs = sampler.seqs
        can = int(np.searchsorted(seqs[_Sampler.MARK, : sampler.held], sampler.prefilled, "right"))
        drawn, steps, rows = block_of(seqs[_Sampler.LEFT, :can], side.slots, side.block)
        if steps:
            context = int(seqs[_Sampler.MINE, :rows].sum())
            context += rows * (self.p.prompt_tokens + steps // 2)
            taken_s += steps * (self._step(rows) + context * side.context_token_s)
        self.after(taken_s, self.block_done, index, drawn, steps)

    def _place(self, sampler: _Sampler) -> None:
        """Those who waited longest into free places; members that come together share a prefill."""
        free = sampler.seqs.shape[1] - sampler.held
        while sampler.queue and free:
            group, lengths = sampler.queue[0]
            new = lengths[:free]
            start, end = sampler.held, sampler.held + len(new)
            sampler.to_prefill += self.p.prompt_tokens
            columns = sampler.seqs[:, start:end]
            columns[:] = 0
            columns[_Sampler.LEFT] = new
            columns[_Sampler.GROUP] = group.number
            columns[_Sampler.MARK] = sampler.to_prefill
            if group.oldest < 0:
                group.oldest = sampler.version
            if len(new) < len(lengths):
                sampler.queue[0] = (group, lengths[free:])
            else:
                sampler.queue.popleft()
            sampler.held, free = end, free - len(new)

    def _step(self, running: int) -> float:
        """Seconds of a decode step, context aside."""
        side = self.p.samplers
        rows = decode_rows(running, side.slots)
        if rows not in self._step_s:
            self._step_s[rows] = float(np.interp(rows, side.rows, side.step_s))
        return self._step_s[rows]

    def block_done(self, index: int, drawn: Longs, steps: int) -> None:
        """Count what was drawn; the next block starts before the answers are handed out."""
        sampler, n = self.samplers[index], len(drawn)
        self.totals.drawn += int(drawn.sum())
        self.totals.slot_steps += steps * self.p.samplers.slots
        seqs = sampler.seqs
        seqs[:3, :n] += drawn * np.array([[-1], [1], [sampler.version]])
        ends = np.flatnonzero(seqs[_Sampler.LEFT, :n] == 0)
        done = seqs[_Sampler.MINE : _Sampler.MARK, ends].T.tolist()
        if done:
            held = seqs[:, : sampler.held]
            kept = held.compress(held[_Sampler.LEFT] > 0, axis=1)
            sampler.held = kept.shape[1]
            seqs[:, : sampler.held] = kept
            self.loads[index] -= len(done)
        self.round(index)
        for mine, versions, number in done:
            group = self.pending[number]
            group.left -= 1
            group.tokens += mine
            group.version_tokens += versions
            if not group.left:
                self.num_scoring += 1
                self.to_score.append(group)
        self.score()

    # ---- scorers and buffer

    def score(self) -> None:
        """Give finished groups to free scorers, first come, first served."""
        most = self.p.scorers
        while self.to_score and (most is None or self.num_scoring - len(self.to_score) < most):
            self.after(float(self._scores(1)[0]), self.scored, self.to_score.popleft())

    def scored(self, group: _Group) -> None:
        """A group is ready."""
        self.num_scoring -= 1
        group.ready = True
        self.num_ready += 1
        self.score()
        self._advance()
        self.draw()

    def _advance(self) -> None:
        """Move on to the lowest pending group that is not ready."""
        while self.first_unready < self.next_group:
            group = self.pending.get(self.first_unready)
            if group is not None:
                if not group.ready:
                    return
                self.leading += 1
            self.first_unready += 1

    def _drop_stale(self) -> None:
        """Leave out what is too old; a fresh group takes the place."""
        old = [
            g
            for g in self.pending.values()
            if g.ready and self.version - g.oldest > self.p.max_staleness
        ]
        for group in old:
            self._leave(group)
            self.dropped_groups += 1
            self.dropped_tokens += group.tokens
        if old:
            self.admit()

    def _leave(self, group: _Group) -> None:
        del self.pending[group.number]
        self.num_ready -= 1
        if group.number < self.first_unready:
            self.leading -= 1

    def selected(self) -> list[_Group]:
        """The next step's groups (select.select with rank strict); fewer where it is not full."""
        most = self.p.groups_per_step
        found = list(islice(self.pending.values(), min(self.leading, most)))
        blocker = self.first_unready
        window = (self.pending.get(blocker + i) for i in range(1, self.p.lookahead + 1))
        found += [g for g in window if g is not None and g.ready]
        return found[:most]

    # ---- the trainer

    def draw(self) -> None:
        """Begin an update where the trainer waits and a step's groups are ready."""
        if not self.waits:
            return
        drops = self.p.when_too_old == "drop"
        if drops:
            self._drop_stale()
        if self.leading + self.p.lookahead < self.p.groups_per_step:
            return
        groups = self.selected()
        if len(groups) < self.p.groups_per_step:
            return
        self.waits = False
        for group in groups:
            self._leave(group)
        tokens = sum(g.tokens for g in groups)
        lag = self.version - min(g.oldest for g in groups)
        self.totals.trained += tokens
        self.totals.lag_tokens += tokens * self.version - sum(g.version_tokens for g in groups)
        self.totals.oldest = max(self.totals.oldest, lag)
        self.totals.data_s += self.now - self.step_from
        if drops:  # their places are free
            self.admit()
        else:
            self.taken[self.version] = len(groups)
        tokens += len(groups) * self.p.group_size * self.p.prompt_tokens
        update_s = self.p.update_s + tokens * self.p.update_token_s
        self.totals.train_s += update_s
        self.after(update_s, self.learnt)

    def learnt(self) -> None:
        """A new version."""
        self.version += 1
        self.learnt_at = self.now
        self.publish()

    def publish(self) -> None:
        """Send it, once every sampler has taken the one before."""
        self.waits_to_publish = any(s.staged is not None for s in self.samplers)
        if not self.waits_to_publish:
            self.after(self.p.publish_s, self.published)

    def published(self) -> None:
        """The weights are on their way; the next step begins."""
        more_s = max(0.0, self.p.transfer_s - self.p.publish_s)
        for index, sampler in enumerate(self.samplers):
            sampler.staged, sampler.arrives_s = self.version, self.now + more_s
            self.after(more_s, self.wake, index)
        totals = self.totals
        totals.publish_s += self.now - self.learnt_at
        totals.step_s += self.now - self.step_from
        totals.updates += 1
        saves = self.p.save_every and self.version % self.p.save_every == 0
        self.after(self.p.report_s + (self.p.save_s if saves else 0.0), self.begin_step)

    def begin_step(self) -> None:
        """The trainer wants groups."""
        self.waits, self.step_from = True, self.now
        self.draw()


def block_of(left: Longs, slots: int, block: int) -> tuple[Longs, int, int]:
    """One decode block: (tokens drawn by each [n], steps run, rows).

    left: [n] tokens that each sequence may still draw, >= 1, oldest first. The first `slots` of
    them have the rows; a row that ends goes to the next of the others at the next step. The block
    ends early where no row runs.
    """
    rows = min(len(left), slots)
    drawn = np.zeros(len(left), np.int64)
    drawn[:rows] = np.minimum(left[:rows], block)
    steps = int(drawn[:rows].max(initial=0))
    if rows < len(left):
        free = drawn[:rows][drawn[:rows] < block].tolist()  # steps at which a row becomes free
        heapq.heapify(free)
        for i in range(rows, len(left)):
            if not free:
                break
            start = heapq.heappop(free)
            drawn[i] = min(int(left[i]), block - start)
            end = start + int(drawn[i])
            steps = max(steps, end)
            if end < block:
                heapq.heappush(free, end)
    return drawn, steps, rows


def _drawing(histogram: Histogram, rng: np.random.Generator) -> Callable[[int], Doubles]:
    """n values at random [n]."""
    values = np.asarray(histogram.values, np.float64)
    edges = np.cumsum(histogram.weights) / np.sum(histogram.weights)
    edges[-1] = 1.0
    return lambda n: values[np.searchsorted(edges, rng.random(n), "right")]


def _outcome(run: _Run, before: _Totals, after: _Totals) -> SimulationResult:
    wall_s = max(after.at_s - before.at_s, 1e-12)
    updates = after.updates - before.updates
    trained, drawn = after.trained - before.trained, after.drawn - before.drawn
    slot_steps = after.slot_steps - before.slot_steps
    step_s, data_s = after.step_s - before.step_s, after.data_s - before.data_s
    publish_s, train_s = after.publish_s - before.publish_s, after.train_s - before.train_s
    idle = (after.idle_s - before.idle_s) / (len(run.samplers) * wall_s)
    return SimulationResult(
        updates=updates,
        wall_s=wall_s,
        updates_per_s=updates / wall_s,
        trained_tokens_per_s=trained / wall_s,
        generated_tokens_per_s=drawn / wall_s,
        trainer_busy_share=train_s / step_s if step_s else 1.0,
        sampler_busy_share=1.0 - idle,
        slot_occupancy=drawn / slot_steps if slot_steps else 0.0,
        staleness_mean=(after.lag_tokens - before.lag_tokens) / trained,
        staleness_max=after.oldest,
        wait_data_share=data_s / wall_s,
        wait_publish_share=publish_s / wall_s,
        wait_other_share=max(0.0, 1.0 - (data_s + publish_s + train_s) / wall_s),
        sampler_idle_share=idle,
        scoring_mean=(after.scoring_group_s - before.scoring_group_s) / wall_s,
        ready_mean=(after.ready_group_s - before.ready_group_s) / wall_s,
        drawn_tokens=after.drawn,
        trained_tokens=after.trained,
        dropped_tokens=run.dropped_tokens,
        left_tokens=_left(run),
        dropped_groups=run.dropped_groups,
    )


def _left(run: _Run) -> int:
    """Tokens drawn for groups that are neither trained on nor dropped."""
    running = sum(int(s.seqs[_Sampler.MINE, : s.held].sum()) for s in run.samplers)
    return running + sum(g.tokens for g in run.pending.values())
