"""Requests to replicas and answers to callers: each caller gets exactly one answer.

submit ──> queue ──room──> [ slot: replica ] ──Completion──> checked ──> the caller's future
             ^                    │ taken out, or a log-prob that is not finite
             └────── waiting <────┘
"""

from collections.abc import Iterable, Sequence
from concurrent.futures import Future
from dataclasses import replace
from functools import partial

import numpy as np

from jaxrl_async.errors import RolloutError
from jaxrl_async.sampler.lifetime import Lifetime
from jaxrl_async.sampler.router.dealing import Candidate, Dealer, suspects_slot
from jaxrl_async.sampler.router.fleet import Fleet, ReplicaSlot
from jaxrl_async.sampler.router.job import RouterJob
from jaxrl_async.types import Completion

Refused = list[tuple[RouterJob, Exception]]
"""Jobs that no replica will serve, with the errors."""


class Dispatcher:
    """Deals jobs to the fleet and settles them, under the fleet's lock."""

    def __init__(self, fleet: Fleet, dealer: Dealer, lifetime: Lifetime) -> None:
        """lifetime: the router's; its thread is woken when a replica needs attention."""
        self._fleet, self._dealer, self._lifetime = fleet, dealer, lifetime
        self._filling = False

    def submit(self, jobs: Sequence[RouterJob], *, together: bool = False) -> None:
        """Accept new jobs, all of them or none if it raises; deal them while there is room.

        together: deal all of them now, to one replica.

        Raises Closed, and the error that ended the router.
        """
        fleet = self._fleet
        with fleet.lock:
            self._lifetime.check_open("the samplers are closed")
            now = fleet.clock()
            for job in jobs:
                job.submitted_at = now
            patient, others = ([], jobs) if together else self._split(jobs)
            try:
                self._deal(others, together)
                fleet.queue.add(patient)
            except BaseException:
                for job in jobs:
                    self.withdraw(job)
                raise
            refused = self._fill(fleet.slots)
        _settle(refused)

    def deal_waiting(self) -> None:
        """Deal the jobs that no replica has, the most urgent first and equal ones in the order of
        submission: a job that a replica handed back overtakes later jobs."""
        fleet = self._fleet
        with fleet.lock:
            if fleet.waiting:
                jobs, fleet.waiting = (
                    sorted(fleet.waiting, key=lambda j: (j.request.priority, j.order)),
                    [],
                )
                patient, others = self._split(j for j in jobs if not j.future.cancelled())
                fleet.queue.put_back(patient)
                try:
                    self._deal(others)
                except BaseException:
                    fleet.waiting += [
                        job for job in others if job.inner is None and job not in fleet.waiting
                    ]
                    raise
            refused = self._fill(fleet.slots)
        _settle(refused)

    def withdraw(self, job: RouterJob) -> None:
        """Drop a job whose caller no longer waits."""
        with self._fleet.lock:
            if job in self._fleet.waiting:
                self._fleet.waiting.remove(job)
            if job in self._fleet.queue:
                self._fleet.queue.remove(job)
            if job.inner is not None:
                job.inner.cancel()

    def end(self, error: BaseException) -> None:
        """Fail every caller with the error, and end the router with it unless it is closed."""
        with self._fleet.lock:
            if not self._lifetime.closed:
                self._lifetime.fail(error)
            jobs = self._fleet.drain()
        for job in jobs:
            job.settle(error)

    def _split(self, jobs: Iterable[RouterJob]) -> tuple[list[RouterJob], list[RouterJob]]:
        """Return the jobs that may wait for room in any replica, and the others."""

        def is_active(number: int) -> bool:
            slot = self._fleet.slot(number)
            return slot is not None and slot.is_active

        patient, others = list[RouterJob](), list[RouterJob]()
        for job in jobs:
            (patient if self._dealer.may_wait(job, is_active) else others).append(job)
        return patient, others

    def _fill(self, slots: Sequence[ReplicaSlot]) -> Refused:
        """Deal jobs of the queue to the active slots among these that have room; return the jobs
        that a healthy replica refuses."""
        fleet = self._fleet
        refused: Refused = []
        if self._filling or self._lifetime.closed:  # a job was answered while it was dealt
            return refused
        self._filling = True
        refusing = set[int]()  # slots that refused all their jobs
        try:
            while fleet.queue:
                candidates = self._candidates(s for s in slots if s.number not in refusing)
                if not any(c.has_room_for(len(fleet.queue)) for c in candidates):
                    break
                shares = self._dealer.fill(fleet.queue, candidates, self._reserved_slot())
                if not shares:
                    break
                for number, share in shares.items():
                    share_refused = self._offer(number, share)
                    refused += share_refused
                    if len(share_refused) == len(share):
                        refusing.add(number)
        finally:
            self._filling = False
        return refused

    def _offer(self, number: int, share: Sequence[RouterJob]) -> Refused:
        """Hand jobs over to the replica in a slot; return the jobs that it refuses."""
        try:
            self._give(number, share)
        except Exception as error:
            if len(share) == 1:
                return [(share[0], error)]
            return [refused for job in share for refused in self._offer(number, [job])]
        return []

    def _reserved_slot(self) -> int | None:
        """Return the slot that is reserved for suspects, or None without suspects."""
        fleet = self._fleet
        wait = any(job.suspect for job in fleet.waiting)
        if not wait and not any(slot.has_suspects for slot in fleet.slots):
            return None
        return suspects_slot(self._candidates(fleet.slots), wait)

    def _candidates(self, slots: Iterable[ReplicaSlot]) -> list[Candidate]:
        """Return the loads of the slots that can take jobs. Wake the router's thread if a replica
        has died and is not taken out yet."""
        active = [slot for slot in slots if slot.is_active]
        living = [slot for slot in active if slot.replica.error is None]
        if len(living) < len(active):
            self._lifetime.wake.set()
        return [slot.candidate for slot in living]

    def _deal(self, jobs: Sequence[RouterJob], together: bool = False) -> None:
        """Give each job to an active replica, even without room; without a replica it waits.

        Raises the errors of a healthy replica.
        """
        if not jobs:
            return
        fleet = self._fleet
        deal = self._dealer.deal(
            jobs,
            self._candidates(fleet.slots),
            suspects_wait=any(job.suspect for job in fleet.waiting),
            together=together,
        )
        fleet.waiting += deal.waiting
        for number in sorted(deal.shares):
            self._give(number, deal.shares[number])

    def _give(self, number: int, share: Sequence[RouterJob]) -> None:
        """Hand jobs over to the replica in a slot; they wait if it is gone or has just died.

        Raises the errors of a healthy replica.
        """
        fleet = self._fleet
        slot = fleet.slot(number)
        if slot is None:  # recorded, but removed
            for job in share:
                job.slot_known = False
            fleet.waiting += share
        elif not fleet.hand_over(slot, share):
            self._lifetime.wake.set()
        else:
            for job in share:
                assert job.inner is not None
                job.inner.add_done_callback(partial(self._on_answer, slot, job))

    def _on_answer(self, slot: ReplicaSlot, job: RouterJob, inner: "Future[Completion]") -> None:
        """Pass a replica's answer to the caller, and deal the replica jobs while it has room. Runs
        on the replica's thread."""
        result: Completion | BaseException | None = None
        refused: Refused = []
        try:
            with self._fleet.lock:
                if job.inner is not inner:
                    return  # the replica was taken out and another one has the request
                error = None if inner.cancelled() else inner.exception()
                dead = slot.replica.error is not None and not self._lifetime.closed
                if error is not None and dead:
                    self._lifetime.wake.set()  # the router gives the request to another replica
                    return
                self._fleet.release(slot, job)
                result = error
                if error is None and not inner.cancelled():
                    result = self._checked(slot, job, inner.result())
                if not slot.jobs and any(waits.suspect for waits in self._fleet.waiting):
                    self._lifetime.wake.set()  # the slot is free for it
                if self._fleet.queue:
                    refused = self._fill([slot])
        finally:
            if result is not None:
                job.settle(result)
        _settle(refused)

    def _checked(
        self, slot: ReplicaSlot, job: RouterJob, completion: Completion
    ) -> Completion | RolloutError | None:
        """Return the completion if its log-probs are finite. Otherwise return None the first time
        (another replica samples it again), and an error the second time."""
        if not slot.replica.has_logprobs or np.isfinite(completion.logprobs).all():
            self._fleet.count_finite(slot)
            return _with_waiting(completion, job)
        self._fleet.count_nonfinite(slot)
        if job.avoid is None:
            job.avoid = slot.number
            self._fleet.waiting.append(job)
            self._lifetime.wake.set()
            return None
        return RolloutError(
            f"request {job.request.request_id}: the sampler gave log-probs that are not finite, "
            "twice. The weights are likely to have diverged: check train/grad_norm, or lower "
            "algorithm.learning_rate."
        )


def _with_waiting(completion: Completion, job: RouterJob) -> Completion:
    """Add the time that the job waited in the router to the completion's times."""
    waited_s = job.dealt_at - job.submitted_at
    if waited_s <= 0.0:
        return completion
    return replace(
        completion,
        queued_s=completion.queued_s + waited_s,
        first_token_s=completion.first_token_s + waited_s,
        latency_s=completion.latency_s + waited_s,
    )


def _settle(refused: Refused) -> None:
    """Fail the callers of refused jobs with the errors."""
    for job, error in refused:
        job.settle(error)
