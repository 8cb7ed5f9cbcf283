"""The simulated samplers: who is at work, who has which requests, who draws from which weights.

    deal ──> [ sampler: queue > places > blocks of K steps ] ... ──> finished answers
                  ^ swap, between two blocks             └── leaves: its requests go to others
                  └── sent by the trainer, or along a WeightTree

Without a tree all samplers are threads of the run and stay: a version is sent to all at once, and
the trainer waits with the next until it is taken. With one they may come and go (Turnover).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from jaxrl_async.errors import ConfigError
from jaxrl_async.plan.pipeline import Pipeline, Turnover
from jaxrl_async.plan.simulated_sampler import (
    BEGUN,
    DRAWN,
    GROUP,
    Doubles,
    Longs,
    SimulatedSampler,
    block_of,
    drawing,
    drawn_of,
    fresh_sequences,
)
from jaxrl_async.plan.timeline import Timeline
from jaxrl_async.plan.weight_tree import Sending, WeightTree
from jaxrl_async.sampler.batch.shapes import decode_rows

WIRE_PLACES = 3
"""Requests that a sampler is sent, as a multiple of its places (sampler/remote/replica.py)."""
NOBODY = 2**62
"""Load of a sampler to which nothing can be dealt."""


@dataclass(slots=True)
class FleetTotals:
    """Counters since the start; a measurement is the difference of two."""

    drawn: int = 0  # tokens
    slot_steps: int = 0
    idle_s: float = 0.0  # all samplers together
    present_s: float = 0.0  # the same
    live_s: float = 0.0  # from publish until live in all, all versions together
    versions: int = 0  # that became live in all
    joins: int = 0
    leaves: int = 0
    kills: int = 0
    moved: int = 0  # answers
    begun_again: int = 0  # answers
    lost: int = 0  # tokens
    prefilled_again: int = 0  # tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetEvents:
    """What the rest of the pipeline is told."""

    on_finished: Callable[[Sequence[list[int]]], None]
    """Answers that are done, each [tokens, sum of versions, group's number, oldest version]."""
    on_taken: Callable[[], None]  # a sampler begins to swap
    on_live: Callable[[int], None]  # a version is live in every sampler


class SimulatedFleet:
    """All samplers, and the requests that none of them has."""

    def __init__(
        self, pipeline: Pipeline, timeline: Timeline, events: FleetEvents, seed: int
    ) -> None:
        self._p, self._time, self._tell = pipeline, timeline, events
        side = pipeline.samplers
        places = side.slots + side.reserve
        self.at_work = {n: SimulatedSampler(n, places) for n in range(side.count)}
        self.unnoticed: dict[int, SimulatedSampler] = {}  # killed, and still counted
        self.loads = np.zeros(side.count, np.int64)  # unfinished answers, by sampler
        self.totals = FleetTotals()
        self.live = 0
        self.tree = WeightTree(pipeline.tree) if pipeline.tree is not None else None
        self._drawn_from = {0: side.count}  # version -> samplers that draw from it
        self._published_at: dict[int, float] = {}  # of versions not live in all
        self._joining: set[int] = set()  # fetch their first weights
        self._moving: list[Longs] = []  # requests between two samplers
        self._homeless: list[Longs] = []  # of those, that nobody can take
        self._empty_since = 0.0  # meaningful while no sampler is at work
        self._step_s: dict[int, float] = {}  # by rows
        self._chance = np.random.default_rng([seed, 2])
        if self.tree is not None:
            for number in self.at_work:
                self.tree.ready(number, 0)
        if pipeline.turnover is not None:
            self._schedule(pipeline.turnover)

    # ---- requests

    def submit(self, group: int, lengths: Doubles) -> None:
        """Deal a group's answers."""
        self._deal(fresh_sequences(group, lengths))

    def _deal_again(self, groups: Sequence[Longs]) -> None:
        """Deal what a sampler that has gone leaves behind, in the order of asking."""
        assert self._p.turnover is not None
        first = self._p.turnover.again_first
        for columns in reversed(groups) if first else groups:
            self._deal(columns, first=first)

    def _deal(self, columns: Longs, *, first: bool = False) -> None:
        """Deal answers of one group to the least loaded sampler (router/dealing.choose).

        first: they overtake those that wait there.
        """
        index = int(self.loads.argmin())
        if self.loads[index] >= NOBODY:
            self._homeless.append(columns)
            return
        sampler = self.at_work.get(index) or self.unnoticed[index]
        if first:
            sampler.queue.appendleft(columns)
        else:
            sampler.queue.append(columns)
        self.loads[index] += columns.shape[1]
        if sampler.idle_since is not None and not sampler.called:
            sampler.called = True
            self._time.after(0.0, self._wake, sampler)

    @property
    def left_tokens(self) -> int:
        """Tokens drawn of unfinished answers."""
        holders = [*self.at_work.values(), *self.unnoticed.values()]
        waiting = drawn_of(self._moving) + drawn_of(self._homeless)
        return waiting + sum(s.drawn_tokens for s in holders)

    def reading(self) -> FleetTotals:
        """Return the counters now."""
        now = self._time.now
        idle_s = sum(
            s.idle_s + (0.0 if s.idle_since is None else now - s.idle_since)
            for s in self.at_work.values()
        )
        return replace(self.totals, idle_s=self.totals.idle_s + idle_s)

    # ---- weights

    @property
    def all_taken(self) -> bool:
        """Whether the trainer may publish: always with a tree, else once all have taken the last
        version."""
        return self.tree is not None or all(s.staged is None for s in self.at_work.values())

    def send(self, version: int) -> None:
        """Send a version to all samplers."""
        self._published_at[version] = self._time.now
        if self._p.tree is not None:
            self._time.after(self._p.tree.offer_s, self._offer, version)
            return
        more_s = max(0.0, self._p.transfer_s - self._p.publish_s)
        for sampler in self.at_work.values():
            sampler.staged, sampler.arrives_s = version, self._time.now + more_s
            self._time.after(more_s, self._wake, sampler)

    def _offer(self, version: int) -> None:
        assert self.tree is not None
        self.tree.publish(version)
        self._start_transfers()

    def _start_transfers(self) -> None:
        assert self.tree is not None
        for sending in self.tree.start(self._time.now):
            self._look(sending)

    def _look(self, sending: Sending) -> None:
        """Stage the weights if they have come, else look again when that may be."""
        assert self.tree is not None and self._p.tree is not None
        seconds = self.tree.look(sending, self._time.now)
        if seconds is not None and seconds > 0:
            self._time.after(seconds, self._look, sending)
        elif seconds is not None:
            self._time.after(self._p.tree.stage_s, self._staged, sending)
            self._start_transfers()

    def _staged(self, sending: Sending) -> None:
        """Let the sampler swap; one that joins begins its work."""
        assert self.tree is not None
        number, version = sending.sampler, sending.version
        if number in self._joining:
            if version < self.live:
                self.tree.ready(number, version)
            else:
                self._enter(number, version)
            self._start_transfers()
        elif (sampler := self.at_work.get(number)) is not None:
            sampler.staged, sampler.arrives_s = version, self._time.now
            self._wake(sampler)

    def _raise_live(self) -> None:
        lowest = min(self._drawn_from, default=self.live)
        if lowest <= self.live:
            return
        self.live = lowest
        for version in [v for v in self._published_at if v <= lowest]:
            self.totals.live_s += self._time.now - self._published_at.pop(version)
            self.totals.versions += 1
        self._tell.on_live(lowest)

    def _draws_from(self, old: int | None, new: int | None) -> None:
        if new is not None:
            self._drawn_from[new] = self._drawn_from.get(new, 0) + 1
        if old is not None:
            self._drawn_from[old] -= 1
            if not self._drawn_from[old]:
                del self._drawn_from[old]

    # ---- a sampler

    def _wake(self, sampler: SimulatedSampler) -> None:
        """Begin a round if the sampler is idle."""
        sampler.called = False
        if sampler.idle_since is not None and not sampler.gone:
            sampler.idle_s += self._time.now - sampler.idle_since
            sampler.idle_since = None
            self._round(sampler)

    def _round(self, sampler: SimulatedSampler) -> None:
        """Swap the weights if new ones have arrived, else start a block."""
        if sampler.leaves:
            self._leave(sampler)
            return
        if sampler.staged is None or sampler.arrives_s > self._time.now:
            self._block(sampler)
            return
        self._draws_from(sampler.version, sampler.staged)
        sampler.version, sampler.staged = sampler.staged, None
        self._tell.on_taken()
        if self.tree is not None:
            self.tree.ready(sampler.number, sampler.version)
            self._start_transfers()
        self._time.after(self._p.samplers.swap_s, self._swapped, sampler)

    def _swapped(self, sampler: SimulatedSampler) -> None:
        """Start the next block after a swap; slots freed by it are filled from the block after."""
        if sampler.gone:
            return
        self._block(sampler)
        self._raise_live()

    def _block(self, sampler: SimulatedSampler) -> None:
        """Admit sequences, prefill a round and decode a block, or become idle."""
        side = self._p.samplers
        sampler.place(self._p.prompt_tokens)
        if not sampler.held:
            sampler.idle_since = self._time.now
            if sampler.staged is not None:  # sent during the last swap
                wait_s = max(0.0, sampler.arrives_s - self._time.now)
                self._time.after(wait_s, self._wake, sampler)
            return
        taken_s = side.block_s
        prefilled = min(sampler.to_prefill - sampler.prefilled, side.prefill_chunk)
        if prefilled:
            sampler.prefilled += prefilled
            taken_s += side.prefill_s + prefilled * side.prefill_token_s
        drawn, steps, rows = block_of(sampler.decodable(), side.slots, side.block)
        if steps:
            context = int(sampler.seqs[DRAWN, :rows].sum())
            context += rows * (self._p.prompt_tokens + steps // 2)
            taken_s += steps * (self._step(rows) + context * side.context_token_s)
        self._time.after(taken_s, self._block_done, sampler, drawn, steps)

    def _step(self, running: int) -> float:
        """Return the seconds of a decode step without those for its context."""
        side = self._p.samplers
        rows = decode_rows(running, side.slots)
        if rows not in self._step_s:
            self._step_s[rows] = float(np.interp(rows, side.rows, side.step_s))
        return self._step_s[rows]

    def _block_done(self, sampler: SimulatedSampler, drawn: Longs, steps: int) -> None:
        """Count the drawn tokens; start the next block before handing out answers."""
        if sampler.gone:
            return
        self.totals.drawn += int(drawn.sum())
        self.totals.slot_steps += steps * self._p.samplers.slots
        done = sampler.drew(drawn)
        self.loads[sampler.number] -= len(done)
        self._round(sampler)
        self._tell.on_finished(done)

    # ---- samplers that come and go

    def _schedule(self, turnover: Turnover) -> None:
        for change in turnover.changes:
            self._time.after(change.at_s, self._change, change.joins, change.leaves, change.kills)
        self._next_preemption()

    def _next_preemption(self) -> None:
        turnover = self._p.turnover
        if turnover is not None and turnover.preempted_per_minute > 0:
            seconds = self._chance.exponential(60 / turnover.preempted_per_minute)
            self._time.after(float(seconds), self._preempted)

    def _change(self, joins: int, leaves: int, kills: int) -> None:
        turnover = self._p.turnover
        assert turnover is not None
        for _ in range(joins):
            self._time.after(turnover.start_s, self._ask)
        for number in range(leaves + kills):
            self._go(notice=number < leaves)

    def _preempted(self) -> None:
        """Take one sampler away, and have it replaced."""
        turnover = self._p.turnover
        assert turnover is not None
        if self._go(notice=self._chance.random() < turnover.handed_back_share):
            replaced_s = float(drawing(turnover.replaced_s, self._chance)(1)[0])
            self._time.after(replaced_s + turnover.start_s, self._ask)
        self._next_preemption()

    def _ask(self) -> None:
        """Let a new sampler ask for its first weights; it is the next number."""
        assert self.tree is not None
        number = len(self.loads)
        self.loads = np.append(self.loads, NOBODY)
        self._joining.add(number)
        self.tree.ready(number, -1)
        self._start_transfers()

    def _enter(self, number: int, version: int) -> None:
        """Let a sampler that has its first weights begin."""
        now, side = self._time.now, self._p.samplers
        assert self.tree is not None
        self.tree.ready(number, version)
        self._joining.remove(number)
        if not self.at_work and not self.unnoticed:
            self._check_wait(now - self._empty_since)
        self.at_work[number] = SimulatedSampler(
            number, side.slots + side.reserve, version=version, now=now
        )
        self._draws_from(None, version)
        self.totals.joins += 1
        self.loads[number] = 0
        waiting, self._homeless = self._homeless + self._take_back(), []
        for columns in sorted(waiting, key=lambda columns: int(columns[GROUP, 0])):
            self._deal(columns)
        self._raise_live()

    def _take_back(self) -> list[Longs]:
        """Take the requests back that no sampler was sent yet (Router.join)."""
        side = self._p.samplers
        room, taken = WIRE_PLACES * (side.slots + side.reserve), list[Longs]()
        for sampler in self.at_work.values():
            unsent = sampler.unsent(room)
            self.loads[sampler.number] -= sum(columns.shape[1] for columns in unsent)
            taken += unsent
        return taken

    def _check_wait(self, waited_s: float) -> None:
        turnover = self._p.turnover
        if turnover is not None and waited_s > turnover.wait_s:
            raise ConfigError(
                f"the simulated run was without any sampler for {waited_s:.0f} s and ended: "
                f"turnover.wait_s ({turnover.wait_s:g}) is the limit. Raise it (remote.wait_s), or "
                "let samplers be replaced sooner."
            )

    def _go(self, *, notice: bool) -> bool:
        """Take one of the samplers at work away, chosen at random; False: there is none."""
        staying = [s for s in self.at_work.values() if not s.leaves]
        if not staying:
            return False
        sampler = staying[int(self._chance.integers(len(staying)))]
        if notice:
            sampler.leaves = True
            self.totals.leaves += 1
            if sampler.idle_since is not None:
                self._wake(sampler)
        else:
            self.totals.kills += 1
            self._remove(sampler)
            self.unnoticed[sampler.number] = sampler
            assert self._p.turnover is not None
            self._time.after(self._p.turnover.noticed_s, self._noticed, sampler)
        return True

    def _remove(self, sampler: SimulatedSampler) -> None:
        """Stop a sampler's work and its transfers."""
        assert self.tree is not None
        now = self._time.now
        if sampler.idle_since is not None:
            sampler.idle_s += now - sampler.idle_since
            sampler.idle_since = None
        sampler.gone = True
        del self.at_work[sampler.number]
        self.totals.idle_s += sampler.idle_s
        for sending in self.tree.gone(sampler.number, now):
            self._look(sending)
        self._start_transfers()

    def _leave(self, sampler: SimulatedSampler) -> None:
        """Let a sampler go that hands its requests back."""
        assert self._p.turnover is not None
        self._remove(sampler)
        groups = self._uncount(sampler, with_tokens=True)
        self._moving += groups
        self._time.after(self._p.turnover.handover_s, self._handed_over, groups)

    def _noticed(self, sampler: SimulatedSampler) -> None:
        """Count a killed sampler as lost: its requests begin again."""
        del self.unnoticed[sampler.number]
        self._deal_again(self._uncount(sampler, with_tokens=False))

    def _uncount(self, sampler: SimulatedSampler, *, with_tokens: bool) -> list[Longs]:
        """Take a sampler off the gate's and the router's books; return its requests."""
        begun = int((sampler.seqs[DRAWN, : sampler.held] > 0).sum())
        groups, lost = sampler.hand_back(with_tokens=with_tokens)
        if with_tokens:
            self.totals.moved += begun
            self.totals.prefilled_again += sum(int(g[BEGUN].sum()) for g in groups)
        else:
            self.totals.begun_again += begun
            self.totals.lost += lost
        self.loads[sampler.number] = NOBODY
        if not self.at_work and not self.unnoticed:
            self._empty_since = self._time.now
        self._draws_from(sampler.version, None)
        self._raise_live()
        return groups

    def _handed_over(self, groups: list[Longs]) -> None:
        """Deal requests that a sampler has handed back."""
        moved = {id(columns) for columns in groups}
        self._moving = [columns for columns in self._moving if id(columns) not in moved]
        self._deal_again(groups)
