"""The choice of a replica for each request: a pure function of earlier requests and current loads.

All members of a group (equal prompts in sequence) go to one replica, where they share a prefill. It
is the replica that had their prefix last, unless that one is much busier than the least loaded. A
later turn (the same key, a longer prompt) goes to the replica that had the previous turn. Requests
under suspicion (RouterJob.suspect) run alone in a slot, one at a time.

No replica gets more requests than it can use (Candidate.room), except that a group is never split.
The lengths of answers are unknown, so the replica that finishes first takes the next request.
"""

import itertools
import math
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeVar

import numpy as np

from jaxrl_async.sampler.batch.admission import WaitingQueue
from jaxrl_async.sampler.router.job import RouterJob

K = TypeVar("K")
V = TypeVar("V")

AFFINITY_TOKENS = 32
"""Leading tokens that identify a prefix, to find the replica that is likely to hold it."""
AFFINITY_SLACK = 0.25
"""Maximum load of that replica above the least loaded one, as a share of its capacity."""
REFILL = 4
"""A replica gets more requests once its room is 1/REFILL of its capacity, not one at a time."""
REMEMBERED = 4096
"""Maximum prefixes whose replica is remembered."""
CONVERSATIONS = 16
"""Maximum conversations whose replica is remembered, as a multiple of the requests that the
replicas hold; at least REMEMBERED. The oldest are forgotten: the end of a conversation is not
reported."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """The state of one active replica that the choice depends on."""

    in_flight: int  # requests dealt to it and not answered
    capacity: int  # requests that it can hold
    rows: int = 0  # requests that it decodes in a step
    slot: int = 0  # number of its slot
    tries_suspect: bool = False  # whether one of its requests is under suspicion

    @property
    def load(self) -> float:
        """Requests in flight over capacity."""
        return self.in_flight / self.capacity

    @property
    def room(self) -> int:
        """Requests that may be dealt to it now; below 0: it has more than its share.

        Its total is twice its rows, so as many requests wait as decode, and at least 1.25 times its
        capacity.
        """
        return max(2 * self.rows, math.ceil(1.25 * self.capacity)) - self.in_flight

    def has_room_for(self, waiting: int) -> bool:
        """Return whether it has room for `waiting` requests, or enough to deal some of them."""
        return self.room >= max(1, min(self.capacity // REFILL, waiting))


@dataclass(frozen=True, slots=True, kw_only=True)
class Deal:
    """The jobs for each slot, and the jobs that wait."""

    shares: dict[int, list[RouterJob]] = field(default_factory=dict)  # by the number of the slot
    waiting: list[RouterJob] = field(default_factory=list)  # jobs that no replica can take now


def choose(candidates: Sequence[Candidate], previous: int | None, count: int = 1) -> int:
    """Return the index of the candidate for `count` requests of one prefix.

    previous: index of the candidate that had the prefix last, preferred unless it is much
    busier than the least loaded one; None: no candidate had it. Ties go to the lowest index.
    """
    loads = [(c.in_flight + count) / c.capacity for c in candidates]
    least = min(range(len(loads)), key=loads.__getitem__)
    if previous is not None and loads[previous] <= loads[least] + AFFINITY_SLACK:
        return previous
    return least


def suspects_slot(candidates: Sequence[Candidate], any_wait: bool) -> int | None:
    """Return the slot that is reserved for suspects while there are suspects, else None.

    It is the slot where a suspect runs, or the least loaded slot if suspects wait.
    """
    trying = [c for c in candidates if c.tries_suspect]
    if trying or not (any_wait and candidates):
        return trying[0].slot if trying else None
    return min(candidates, key=lambda c: c.in_flight).slot


def unrecorded(request_id: str) -> int | None:
    """Return None: no request has a recorded slot."""
    return None


class Dealer:
    """Deals requests to slots and remembers which slot had which prefix last."""

    def __init__(self, recorded: Callable[[str], int | None] = unrecorded) -> None:
        """recorded: in a replay, returns the slot of a request, or None to have one chosen."""
        self._recorded = recorded
        self._prefix_slots: OrderedDict[bytes, int] = OrderedDict()
        # by key: the slot, and the tokens of the prompt
        self._conversations: OrderedDict[tuple[int, int] | None, tuple[int, int]] = OrderedDict()
        self._max_conversations = REMEMBERED

    def may_wait(self, job: RouterJob, is_active: Callable[[int], bool]) -> bool:
        """Return whether a job may wait in the router's queue for room in any replica.

        It may not if it has begun, was on the device of a replica that died, is a later turn of a
        conversation that a replica has, or is bound to or barred from a replica. Nor if it names an
        adapter (the replica that unloads it must know the waiting requests) or is more urgent than
        others: it then overtakes the requests that wait in the replica.

        is_active: returns whether the replica in a slot is active.
        """
        begun = job.begun is not None or bool(job.died or job.cut_off)
        bound = job.avoid is not None or bool(job.request.adapter) or job.request.priority < (0, 0)
        if begun or bound or self._recorded_slot(job) is not None:
            return False
        slot = self._slot_of_conversation(job)
        return slot is None or not is_active(slot)

    def fill(
        self,
        queue: WaitingQueue[RouterJob],
        candidates: Sequence[Candidate],
        reserved: int | None = None,
    ) -> dict[int, list[RouterJob]]:
        """Take jobs out of the queue while there is room; return them by slot number.

        Args:
            queue: of jobs that may wait.
            candidates: active replicas, with their slots.
            reserved: the slot that is reserved for suspects.
        """
        self._remember_more(candidates)
        free = {c.slot: c for c in candidates if c.slot != reserved and c.has_room_for(len(queue))}
        shares: dict[int, list[RouterJob]] = {}
        while free and queue:
            slot = self._assign(_next_group(queue), free, shares)
            if free[slot].room <= 0:
                del free[slot]
        return shares

    def deal(
        self,
        jobs: Sequence[RouterJob],
        candidates: Sequence[Candidate],
        *,
        suspects_wait: bool = False,
        together: bool = False,
    ) -> Deal:
        """Return a slot for each job, and the jobs that must wait.

        Args:
            jobs: in the order of submission.
            candidates: active replicas, with their slots.
            suspects_wait: whether other jobs under suspicion wait already.
            together: deal all jobs to one slot.
        """
        self._remember_more(candidates)
        suspects = [job for job in jobs if job.suspect]
        others = [job for job in jobs if not job.suspect]
        reserved = suspects_slot(candidates, suspects_wait or bool(suspects))
        deal = Deal()
        idle = any(c.slot == reserved and not c.in_flight for c in candidates)
        if suspects and idle and reserved is not None:
            deal.shares[reserved] = [suspects.pop(0)]
        deal.waiting.extend(suspects)
        free = {c.slot: c for c in candidates if c.slot != reserved}
        if not free:
            deal.waiting.extend(others)
            return deal
        for group in [others] if together and others else self._groups(others):
            self._assign(group, free, deal.shares)
        return deal

    def _remember_more(self, candidates: Sequence[Candidate]) -> None:
        """Raise the number of remembered conversations to what the replicas' capacity needs."""
        capacity = sum(c.capacity for c in candidates)
        self._max_conversations = max(self._max_conversations, CONVERSATIONS * capacity)

    def _assign(
        self,
        group: Sequence[RouterJob],
        free: dict[int, Candidate],
        shares: dict[int, list[RouterJob]],
    ) -> int:
        """Add jobs that must stay together to a slot's share and load; return the slot."""
        slot = self._slot_of(group, list(free.values()))
        shares.setdefault(slot, []).extend(group)
        if (
            dealt := free.get(slot)
        ) is not None:  # with many slots, recomputing all loads is too slow
            free[slot] = replace(dealt, in_flight=dealt.in_flight + len(group))
        return slot

    def _slot_of(self, group: Sequence[RouterJob], free: Sequence[Candidate]) -> int:
        """Return the slot for jobs that must stay together."""
        job = group[0]
        recorded = self._recorded_slot(job)
        if recorded is not None:
            return recorded
        candidates = [c for c in free if c.slot != job.avoid] or free
        slots = [c.slot for c in candidates]
        prefix = job.request.token_ids[:AFFINITY_TOKENS].tobytes()
        previous = self._slot_of_conversation(job)
        previous = self._prefix_slots.get(prefix) if previous is None else previous
        index = choose(candidates, slots.index(previous) if previous in slots else None, len(group))
        _remember(self._prefix_slots, prefix, slots[index], REMEMBERED)
        for request in (job.request for job in group):
            if request.key is not None:
                turn = slots[index], len(request.token_ids)
                _remember(self._conversations, request.key, turn, self._max_conversations)
        return slots[index]

    def _recorded_slot(self, job: RouterJob) -> int | None:
        """Return the recorded slot; the recording is read once for each dealing."""
        if not job.slot_known:
            job.recorded_slot = self._recorded(job.request.request_id)
            job.slot_known = True
        return job.recorded_slot

    def _groups(self, jobs: Sequence[RouterJob]) -> Iterator[list[RouterJob]]:
        """Split jobs into runs of equal prompts and equal recorded slots."""

        def group_key(job: RouterJob) -> tuple[bytes, int | None]:
            return job.request.token_ids.tobytes(), self._recorded_slot(job)

        for _, run in itertools.groupby(jobs, group_key):
            yield list(run)

    def _slot_of_conversation(self, job: RouterJob) -> int | None:
        """Return the slot of the previous turn; None for a first turn, or if it is forgotten."""
        slot, before = self._conversations.get(job.request.key, (None, 0))
        return slot if len(job.request.token_ids) > before else None


def _remember(table: OrderedDict[K, V], key: K, value: V, most: int) -> None:
    """Store a value as the newest; drop the oldest if there are more than `most`."""
    table[key] = value
    table.move_to_end(key)
    if len(table) > most:
        table.popitem(last=False)  # a dict would skip all removed entries to find its oldest


def _next_group(queue: WaitingQueue[RouterJob]) -> list[RouterJob]:
    """Take the next job out of the queue, and the jobs with equal prompts right behind it."""
    group: list[RouterJob] = []
    while (job := queue.head()) is not None:
        if group and not np.array_equal(job.request.token_ids, group[0].request.token_ids):
            break
        queue.admit(job)
        group.append(job)
    return group
