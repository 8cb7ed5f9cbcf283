"""A discrete-event simulation of the pipeline: who will be busy, and how stale the data will be.

    gate ──groups──> [ sampler: queue > places > blocks of K steps ] x N ──> scorers ──> ready
      ^                        ^ swap, between two blocks                                  │
      └──── slots freed ── live in all <── transfer <── publish <── update <── P groups ───┘

It follows the same rules as a run: the gate's bounds come from staleness.py, rows from
sampler/batch/shapes.py, a block's take-overs from sampler/device/decode.py. One event is one block
of one sampler, and its slots are NumPy arrays. The result depends only on pipeline and seed;
lengths are keyed by the group's number, so two pipelines can be compared on the same answers.

Not simulated: running out of KV pages, failures, evaluations, several turns, groups that are
reused or dropped for lack of a signal; sampler.on_new_weights is "continue".
"""

import heapq
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

import numpy as np
import numpy.typing as npt

from jaxrl_async.errors import ConfigError
from jaxrl_async.plan.pipeline import Histogram, Pipeline, check_pipeline
from jaxrl_async.sampler.batch.shapes import decode_rows

Longs = npt.NDArray[np.int64]
Doubles = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulationResult:
    """What was measured after the warm-up; shares as metrics.jsonl defines them."""

    updates: int
    wall_s: float
    updates_per_s: float
    trained_tokens_per_s: float  # answers' tokens
    generated_tokens_per_s: float
    trainer_busy_share: float  # 1 - trainer/idle_share: share of step time spent learning
    sampler_busy_share: float  # sampler/busy_share, mean over samplers
    slot_occupancy: float  # sampler/slot_occupancy: decode steps x slots that drew a token
    staleness_mean: float  # staleness/mean, versions, over trained tokens
    staleness_max: int  # staleness/max, versions, of a trained group's oldest token
    wait_data_share: float  # of wall time: the trainer waited for groups,
    wait_publish_share: float  # for samplers to take the update before, or sent weights,
    wait_other_share: float  # and wrote metrics and checkpoints
    sampler_idle_share: float  # of wall time: nothing to decode
    scoring_mean: float  # groups in the scorers or waiting for one, over wall time
    ready_mean: float  # groups waiting for the trainer, over wall time
    drawn_tokens: int  # since the start: the sum of trained, dropped and left
    trained_tokens: int
    dropped_tokens: int
    left_tokens: int  # of groups under way, or waiting, at the end
    dropped_groups: int


def simulate(
    pipeline: Pipeline, *, updates: int = 60, warm_up: int = 10, seed: int = 0
) -> SimulationResult:
    """Simulate a number of updates; shares and rates leave out the first `warm_up` of them.

    Raises ConfigError if a step could never be filled or a setting makes no sense.
    """
    if not 0 <= warm_up < updates:
        raise ConfigError(
            f"{updates} updates, of which the first {warm_up} are the warm-up: nothing is left to "
            "measure. Simulate more updates than that."
        )
    check_pipeline(pipeline)
    run = _Run(pipeline, seed)
    before = run.to(warm_up)
    return _outcome(run, before, run.to(updates))


@dataclass(frozen=True, slots=True, kw_only=True)
class Simulated:
    """A split of the chips, and its simulation."""

    trainer_chips: int
    outcome: SimulationResult


def best_split(
    pipelines: Mapping[int, Pipeline], *, updates: int = 60, warm_up: int = 10, seed: int = 0
) -> tuple[Simulated, ...]:
    """Simulate every split; return the one that trains on most tokens per second first.

    pipelines: by the trainer's chips.
    """
    splits = [
        Simulated(
            trainer_chips=chips, outcome=simulate(p, updates=updates, warm_up=warm_up, seed=seed)
        )
        for chips, p in sorted(pipelines.items())
    ]
    return tuple(sorted(splits, key=lambda s: -s.outcome.trained_tokens_per_s))


# ---- the state


@dataclass(slots=True, eq=False)
class _Group:
    """A prompt with its answers, from the gate to the trainer."""

    number: int
    left: int  # unfinished answers
    oldest: int = -1  # version that drew its first token; -1: none yet
    tokens: int = 0  # of finished answers
    version_tokens: int = 0  # the sum of their versions
    ready: bool = False


class _Sampler:
    """One sampler. A column of `seqs` is an admitted sequence, in order of admission."""

    LEFT, DRAWN, VERSIONS, GROUP, MARK = range(5)
    # tokens left to draw | tokens drawn | sum of their versions | group's number | prefilled
    # tokens, since the start, after which the sequence can decode

    def __init__(self, places: int) -> None:
        self.seqs: Longs = np.zeros((5, places), np.int64)
        self.held = 0  # columns in use
        self.queue: deque[tuple[_Group, Longs]] = deque()  # lengths of the waiting answers
        self.version = 0
        self.staged: int | None = None  # a version in transfer, or arrived
        self.arrives_s = 0.0
        self.to_prefill = self.prefilled = 0  # tokens, since the start
        self.idle_since: float | None = 0.0
        self.idle_s = 0.0
        self.called = False  # a wake event is pending


@dataclass(slots=True)
class _Totals:
    """Counters since the start; a measurement is the difference of two."""

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
    """The state of the pipeline, and the coming events."""

    def __init__(self, pipeline: Pipeline, seed: int) -> None:
        self.p, self.now, self.version = pipeline, 0.0, 0
        side = pipeline.samplers
        self.samplers = [_Sampler(side.slots + side.reserve) for _ in range(side.count)]
        self.loads = np.zeros(side.count, np.int64)  # unfinished answers of each sampler
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
        """Simulate until a number of updates is done; return the counters then."""
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
        """Schedule an event; events at equal times happen in the order of scheduling."""
        self._next_event += 1
        heapq.heappush(self._events, (self.now + seconds, self._next_event, act, given))

    def _pass(self, at_s: float) -> None:
        passed_s = at_s - self.now
        self.totals.scoring_group_s += passed_s * self.num_scoring
        self.totals.ready_group_s += passed_s * self.num_ready
        self.now = at_s

    # ---- the gate

    def admit(self) -> None:
        """Admit groups to all free slots, each to the least loaded sampler (router.choose)."""
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
        """Begin a round if the sampler is idle."""
        sampler = self.samplers[index]
        sampler.called = False
        if sampler.idle_since is not None:
            sampler.idle_s += self.now - sampler.idle_since
            sampler.idle_since = None
            self.round(index)

    def round(self, index: int) -> None:
        """Swap the weights if new ones have arrived, else start a block."""
        sampler = self.samplers[index]
        if sampler.staged is None or sampler.arrives_s > self.now:
            self.block(index)
            return
        sampler.version, sampler.staged = sampler.staged, None
        if self.waits_to_publish:
            self.publish()
        self.after(self.p.samplers.swap_s, self.swapped, index)

    def swapped(self, index: int) -> None:
        """Start the next block after a swap; slots freed by it are filled from the block after."""
        self.block(index)
        lowest = min(s.version for s in self.samplers)
        if lowest > self.live:
            self.live = lowest
            self.taken = {at: n for at, n in self.taken.items() if at >= lowest}
            self.admit()

    def block(self, index: int) -> None:
        """Admit sequences, prefill a round and decode a block, or become idle."""
        sampler, side = self.samplers[index], self.p.samplers
        self._place(sampler)
        if not sampler.held:
            sampler.idle_since = self.now
            if sampler.staged is not None:  # sent during the last swap
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
            context = int(seqs[_Sampler.DRAWN, :rows].sum())
            context += rows * (self.p.prompt_tokens + steps // 2)
            taken_s += steps * (self._step(rows) + context * side.context_token_s)
        self.after(taken_s, self.block_done, index, drawn, steps)

    def _place(self, sampler: _Sampler) -> None:
        """Move the longest waiting into free columns; members moved together share a prefill."""
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
        """Return the seconds of a decode step without those for its context."""
        side = self.p.samplers
        rows = decode_rows(running, side.slots)
        if rows not in self._step_s:
            self._step_s[rows] = float(np.interp(rows, side.rows, side.step_s))
        return self._step_s[rows]

    def block_done(self, index: int, drawn: Longs, steps: int) -> None:
        """Count the drawn tokens; start the next block before handing out answers."""
        sampler, n = self.samplers[index], len(drawn)
        self.totals.drawn += int(drawn.sum())
        self.totals.slot_steps += steps * self.p.samplers.slots
        seqs = sampler.seqs
        seqs[:3, :n] += drawn * np.array([[-1], [1], [sampler.version]])
        ends = np.flatnonzero(seqs[_Sampler.LEFT, :n] == 0)
        done = seqs[_Sampler.DRAWN : _Sampler.MARK, ends].T.tolist()
        if done:
            held = seqs[:, : sampler.held]
            kept = held.compress(held[_Sampler.LEFT] > 0, axis=1)
            sampler.held = kept.shape[1]
            seqs[:, : sampler.held] = kept
            self.loads[index] -= len(done)
        self.round(index)
        for tokens, versions, number in done:
            group = self.pending[number]
            group.left -= 1
            group.tokens += tokens
            group.version_tokens += versions
            if not group.left:
                self.num_scoring += 1
                self.to_score.append(group)
        self.score()

    # ---- scorers and buffer

    def score(self) -> None:
        """Start scoring finished groups while scorers are free, first come, first served."""
        most = self.p.scorers
        while self.to_score and (most is None or self.num_scoring - len(self.to_score) < most):
            self.after(float(self._scores(1)[0]), self.scored, self.to_score.popleft())

    def scored(self, group: _Group) -> None:
        """Make a scored group ready."""
        self.num_scoring -= 1
        group.ready = True
        self.num_ready += 1
        self.score()
        self._advance()
        self.draw()

    def _advance(self) -> None:
        """Advance to the lowest pending group that is not ready."""
        while self.first_unready < self.next_group:
            group = self.pending.get(self.first_unready)
            if group is not None:
                if not group.ready:
                    return
                self.leading += 1
            self.first_unready += 1

    def _drop_stale(self) -> None:
        """Drop ready groups that are too stale, and admit fresh ones instead."""
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
        """Select the next step's groups (as select.select, rank strict), fewer if not full."""
        most = self.p.groups_per_step
        groups = list(islice(self.pending.values(), min(self.leading, most)))
        blocker = self.first_unready
        window = (self.pending.get(blocker + i) for i in range(1, self.p.lookahead + 1))
        groups += [g for g in window if g is not None and g.ready]
        return groups[:most]

    # ---- the trainer

    def draw(self) -> None:
        """Begin an update if the trainer waits and a step's groups are ready."""
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
        if drops:  # their slots are free at once
            self.admit()
        else:
            self.taken[self.version] = len(groups)
        tokens += len(groups) * self.p.group_size * self.p.prompt_tokens
        update_s = self.p.update_s + tokens * self.p.update_token_s
        self.totals.train_s += update_s
        self.after(update_s, self.learnt)

    def learnt(self) -> None:
        """Finish an update: a new version."""
        self.version += 1
        self.learnt_at = self.now
        self.publish()

    def publish(self) -> None:
        """Publish it once every sampler has taken the version before."""
        self.waits_to_publish = any(s.staged is not None for s in self.samplers)
        if not self.waits_to_publish:
            self.after(self.p.publish_s, self.published)

    def published(self) -> None:
        """Start the transfer to the samplers; the next step begins."""
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
        """Begin a step: wait for groups."""
        self.waits, self.step_from = True, self.now
        self.draw()


def block_of(left: Longs, slots: int, block: int) -> tuple[Longs, int, int]:
    """Simulate one decode block; return (tokens drawn by each [n], steps run, rows).

    left: [n] tokens that each sequence may still draw, >= 1, oldest first. The first `slots` of
    them have rows; a finished row is taken over by the next of the others at the next step. The
    block ends early if no row runs.
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
    """Return a function that draws n random values [n]."""
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
    """Count the tokens drawn for groups that are neither trained on nor dropped."""
    running = sum(int(s.seqs[_Sampler.DRAWN, : s.held].sum()) for s in run.samplers)
    return running + sum(g.tokens for g in run.pending.values())
