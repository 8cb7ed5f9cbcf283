"""The simulated samplers: which ones run, which requests and weights each of them has.

    queue ──> [ sampler: queue > columns > blocks of K steps ] ... ──> finished answers
                   ^ swap, between two blocks             └── leaves: its requests go to others
                   └── sent by the trainer, or along a WeightTree

Without a tree all samplers are threads of the run and stay: a version is sent to all of them at the
same time, and the trainer sends the next one when it is taken. With a tree they may join and leave
(Turnover).
"""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from jaxrl_async.plan.pipeline import Pipeline, Turnover
from jaxrl_async.plan.simulated_sampler import (
    BEGUN,
    SAMPLED,
    BlockTimes,
    Doubles,
    Longs,
    SimulatedSampler,
    block_of,
    fresh_sequences,
    sampled_in,
)
from jaxrl_async.plan.simulated_turnover import SimulatedTurnover, check_wait
from jaxrl_async.plan.timeline import Timeline
from jaxrl_async.plan.weight_tree import Sending, WeightTree
from jaxrl_async.sampler.router.dealing import Candidate

NO_ROOM = 2**62
"""Load of a sampler that cannot be given requests."""


@dataclass(slots=True)
class FleetTotals:
    """Counters since the start; a measurement is the difference of two."""

    sampled: int = 0  # tokens
    slot_steps: int = 0
    idle_s: float = 0.0  # all samplers together
    present_s: float = 0.0  # all samplers together
    live_s: float = 0.0  # from publish until live in all samplers, all versions together
    versions: int = 0  # that became live in all samplers
    joins: int = 0
    leaves: int = 0
    kills: int = 0
    moved: int = 0  # answers
    restarted: int = 0  # answers
    lost: int = 0  # tokens
    prefilled_again: int = 0  # tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetEvents:
    """Callbacks to the rest of the pipeline."""

    on_finished: Callable[[Sequence[list[int]]], None]
    """Finished answers, each [tokens, sum of versions, group's number, oldest version]."""
    on_swap: Callable[[], None]  # a sampler begins to swap
    on_live: Callable[[int], None]  # a version is live in every sampler


class SimulatedTransfers:
    """The transfers of a WeightTree: starts all that can begin, and polls each one until its
    weights have arrived."""

    def __init__(
        self,
        tree: WeightTree,
        timeline: Timeline,
        stage_s: float,
        staged: Callable[[Sending], None],
    ) -> None:
        """staged: called with a transfer stage_s after it is done, when its weights can be swapped
        in."""
        self._tree, self._time, self._stage_s, self._staged = tree, timeline, stage_s, staged

    def offer(self, version: int) -> None:
        """Offer a newer version from now on."""
        self._tree.publish(version)
        self.start()

    def ready(self, sampler: int, version: int) -> None:
        """Record that a sampler has room for a version newer than this one; start() begins its
        transfer."""
        self._tree.ready(sampler, version)

    def start(self) -> None:
        """Start all transfers that can begin."""
        for sending in self._tree.start(self._time.now):
            self._poll(sending)

    def end(self, sampler: int) -> None:
        """Remove a sampler; transfers from it continue with another source."""
        for sending in self._tree.remove(sampler, self._time.now):
            self._poll(sending)
        self.start()

    def _poll(self, sending: Sending) -> None:
        """Stage the weights if they have arrived, otherwise check again when they may have."""
        seconds = self._tree.poll(sending, self._time.now)
        if seconds is not None and seconds > 0:
            self._time.after(seconds, self._poll, sending)
        elif seconds is not None:
            self._time.after(self._stage_s, self._staged, sending)
            self.start()


class SimulatedFleet:
    """All samplers, and the requests that no sampler has."""

    def __init__(
        self, pipeline: Pipeline, timeline: Timeline, events: FleetEvents, seed: int
    ) -> None:
        self._p, self._time, self._events = pipeline, timeline, events
        side = pipeline.samplers
        capacity = side.slots + side.reserve
        self.running = {n: SimulatedSampler(n, capacity) for n in range(side.count)}
        self.unnoticed: dict[int, SimulatedSampler] = {}  # killed, but still counted
        self.loads = np.zeros(side.count, np.int64)  # unfinished answers, by sampler
        self.totals = FleetTotals()
        self.live = 0
        self.tree: WeightTree | None = None
        self._transfers: SimulatedTransfers | None = None  # along the tree
        self._published_at: dict[int, float] = {}  # of versions that are not live in all samplers
        self._joining: set[int] = set()  # fetching their first weights
        self._moving: list[Longs] = []  # requests between two samplers
        self._queue: deque[Longs] = deque()  # until a sampler has room; a group's requests together
        self._empty_since = 0.0  # valid while no sampler runs
        self._times = BlockTimes(pipeline)
        if pipeline.tree is not None:
            self.tree = WeightTree(pipeline.tree)
            self._transfers = SimulatedTransfers(
                self.tree, timeline, pipeline.tree.stage_s, self._staged
            )
            for number in self.running:
                self._transfers.ready(number, 0)
        self._turnover = pipeline.turnover or Turnover()
        self._chance = np.random.default_rng([seed, 2])
        SimulatedTurnover(  # its events keep it alive
            self._turnover, timeline, self._chance, self._request_weights, self._remove_random
        )

    # ---- requests

    def submit(self, group: int, lengths: Doubles) -> None:
        """Give a group's answers to the least loaded sampler, once there is room
        (router/dealing.py)."""
        self._queue.append(fresh_sequences(group, lengths))
        self._fill()

    def _fill(self, only: int | None = None) -> None:
        """Deal waiting answers while any sampler, or `only` one, has room."""
        side = self._p.samplers
        while self._queue:
            index = int(self.loads.argmin()) if only is None else only
            load, places = int(self.loads[index]), side.slots + side.reserve
            candidate = Candidate(in_flight=load, capacity=places, rows=side.slots)
            if not candidate.has_room_for(self._queue[0].shape[1] * len(self._queue)):
                break
            self._deal(index, self._queue.popleft())

    def _redeal(self, groups: Sequence[Longs]) -> None:
        """Deal the requests of a sampler that is gone, in order of submission. Started requests go
        immediately, with room or not; the rest go before or behind all waiting requests."""
        first = self._turnover.again_first
        for columns in reversed(groups) if first else groups:
            index = int(self.loads.argmin())
            if columns[BEGUN].any() and self.loads[index] < NO_ROOM:
                self._deal(index, columns, first=first)
            elif first:
                self._queue.appendleft(columns)
            else:
                self._queue.append(columns)
        self._fill()

    def _deal(self, index: int, columns: Longs, *, first: bool = False) -> None:
        """Deal answers of one group to a sampler.

        first: they overtake the answers that wait there.
        """
        sampler = self.running.get(index) or self.unnoticed[index]
        if first:
            sampler.queue.appendleft(columns)
        else:
            sampler.queue.append(columns)
        self.loads[index] += columns.shape[1]
        if sampler.idle_since is not None and not sampler.waking:
            sampler.waking = True
            self._time.after(0.0, self._wake, sampler)

    @property
    def left_tokens(self) -> int:
        """Generated tokens of unfinished answers."""
        holders = [*self.running.values(), *self.unnoticed.values()]
        waiting = sampled_in(self._moving) + sampled_in(self._queue)
        return waiting + sum(s.sampled_tokens for s in holders)

    def reading(self) -> FleetTotals:
        """Return the current counters."""
        now = self._time.now
        idle_s = sum(s.idle_until(now) for s in self.running.values())
        return replace(self.totals, idle_s=self.totals.idle_s + idle_s)

    # ---- weights

    @property
    def may_publish(self) -> bool:
        """Whether the trainer may publish: always with a tree, otherwise once all have taken the
        last
        version."""
        return self.tree is not None or all(s.staged is None for s in self.running.values())

    def send(self, version: int) -> None:
        """Send a version to all samplers."""
        self._published_at[version] = self._time.now
        if self._p.tree is not None:
            self._time.after(self._p.tree.offer_s, self._offer, version)
            return
        more_s = max(0.0, self._p.transfer_s - self._p.publish_s)
        for sampler in self.running.values():
            sampler.staged, sampler.arrives_s = version, self._time.now + more_s
            self._time.after(more_s, self._wake, sampler)

    def _offer(self, version: int) -> None:
        """Let the samplers fetch a version along the tree."""
        assert self._transfers is not None
        self._transfers.offer(version)

    def _staged(self, sending: Sending) -> None:
        """Let the sampler swap; a joining sampler starts."""
        assert self._transfers is not None
        number, version = sending.sampler, sending.version
        if number in self._joining:
            if version < self.live:
                self._transfers.ready(number, version)
            else:
                self._enter(number, version)
            self._transfers.start()
        elif (sampler := self.running.get(number)) is not None:
            sampler.staged, sampler.arrives_s = version, self._time.now
            self._wake(sampler)

    def _raise_live(self) -> None:
        """Report a newer version that is now live in every sampler."""
        counted = (*self.running.values(), *self.unnoticed.values())
        lowest = min((sampler.version for sampler in counted), default=self.live)
        if lowest <= self.live:
            return
        self.live = lowest
        for version in [v for v in self._published_at if v <= lowest]:
            self.totals.live_s += self._time.now - self._published_at.pop(version)
            self.totals.versions += 1
        self._events.on_live(lowest)

    # ---- a sampler

    def _wake(self, sampler: SimulatedSampler) -> None:
        """Begin a round if the sampler is idle."""
        sampler.waking = False
        if sampler.idle_since is not None and not sampler.removed:
            sampler.end_idling(self._time.now)
            self._round(sampler)

    def _round(self, sampler: SimulatedSampler) -> None:
        """Swap the weights if new ones have arrived, otherwise start a block."""
        if sampler.leaves:
            self._leave(sampler)
            return
        if sampler.staged is None or sampler.arrives_s > self._time.now:
            self._block(sampler)
            return
        sampler.version, sampler.staged = sampler.staged, None
        self._events.on_swap()
        if self._transfers is not None:
            self._transfers.ready(sampler.number, sampler.version)
            self._transfers.start()
        self._time.after(self._p.samplers.swap_s, self._swapped, sampler)

    def _swapped(self, sampler: SimulatedSampler) -> None:
        """Start the next block after a swap; slots that it frees are filled in the block after
        it."""
        if sampler.removed:
            return
        self._block(sampler)
        self._raise_live()

    def _block(self, sampler: SimulatedSampler) -> None:
        """Admit sequences, prefill a round and decode a block, or become idle."""
        side = self._p.samplers
        sampler.admit(self._p.prompt_tokens)
        if not sampler.held:
            sampler.idle_since = self._time.now
            if sampler.staged is not None:  # sent during the last swap
                wait_s = max(0.0, sampler.arrives_s - self._time.now)
                self._time.after(wait_s, self._wake, sampler)
            return
        prefilled = min(sampler.to_prefill - sampler.prefilled, side.prefill_chunk)
        sampler.prefilled += prefilled
        sampled, steps, rows = block_of(sampler.decodable(), side.slots, side.block)
        block_s = self._times.block(prefilled, steps, sampler.seqs[SAMPLED, :rows])
        self._time.after(block_s, self._block_done, sampler, sampled, steps)

    def _block_done(self, sampler: SimulatedSampler, sampled: Longs, steps: int) -> None:
        """Count the generated tokens; start the next block before handing out answers."""
        if sampler.removed:
            return
        self.totals.sampled += int(sampled.sum())
        self.totals.slot_steps += steps * self._p.samplers.slots
        done = sampler.add_sampled(sampled)
        self.loads[sampler.number] -= len(done)
        self._round(sampler)
        self._fill(sampler.number)
        self._events.on_finished(done)

    # ---- samplers that join and leave

    def _request_weights(self) -> None:
        """Let a new sampler request its first weights; it gets the next number."""
        assert self._transfers is not None
        number = len(self.loads)
        self.loads = np.append(self.loads, NO_ROOM)
        self._joining.add(number)
        self._transfers.ready(number, -1)
        self._transfers.start()

    def _enter(self, number: int, version: int) -> None:
        """Start a sampler that has its first weights."""
        now, side = self._time.now, self._p.samplers
        assert self._transfers is not None
        self._transfers.ready(number, version)
        self._joining.remove(number)
        if not self.running and not self.unnoticed:
            check_wait(self._turnover, now - self._empty_since)
        self.running[number] = SimulatedSampler(
            number, side.slots + side.reserve, version=version, now=now
        )
        self.totals.joins += 1
        self.loads[number] = 0
        self._fill()
        self._raise_live()

    def _remove_random(self, notice: bool) -> bool:
        """Remove a running sampler, chosen at random; return False if there is none to remove.

        notice: it hands its requests back; otherwise it ends without notice.
        """
        staying = [s for s in self.running.values() if not s.leaves]
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
            self._time.after(self._turnover.noticed_s, self._noticed, sampler)
        return True

    def _remove(self, sampler: SimulatedSampler) -> None:
        """Stop a sampler and its transfers."""
        assert self._transfers is not None
        sampler.end_idling(self._time.now)
        sampler.removed = True
        del self.running[sampler.number]
        self.totals.idle_s += sampler.idle_s
        self._transfers.end(sampler.number)

    def _leave(self, sampler: SimulatedSampler) -> None:
        """Remove a sampler that hands its requests back."""
        self._remove(sampler)
        groups = self._uncount(sampler, with_tokens=True)
        self._moving += groups
        self._time.after(self._turnover.handover_s, self._handed_over, groups)

    def _noticed(self, sampler: SimulatedSampler) -> None:
        """Count a killed sampler as lost; its requests start over."""
        del self.unnoticed[sampler.number]
        self._redeal(self._uncount(sampler, with_tokens=False))

    def _uncount(self, sampler: SimulatedSampler, *, with_tokens: bool) -> list[Longs]:
        """Unregister a sampler from the gate and the router; return its requests."""
        begun = int((sampler.seqs[SAMPLED, : sampler.held] > 0).sum())
        groups, lost = sampler.hand_back(with_tokens=with_tokens)
        if with_tokens:
            self.totals.moved += begun
            self.totals.prefilled_again += sum(int(g[BEGUN].sum()) for g in groups)
        else:
            self.totals.restarted += begun
            self.totals.lost += lost
        self.loads[sampler.number] = NO_ROOM
        if not self.running and not self.unnoticed:
            self._empty_since = self._time.now
        self._raise_live()
        return groups

    def _handed_over(self, groups: list[Longs]) -> None:
        """Deal requests that a sampler handed back."""
        moved = {id(columns) for columns in groups}
        self._moving = [columns for columns in self._moving if id(columns) not in moved]
        self._redeal(groups)
