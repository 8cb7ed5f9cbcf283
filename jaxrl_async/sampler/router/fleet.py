"""The replicas in their slots: the requests of each, and which replicas are active or replaced.

    [ slot: replica ] ──dead, hangs, samples NaN──> out ──backoff──> [ slot: its successor ]
        ^                                            └── too often ──> lost
        └── join                 process ended, or it left ──> the slot is removed

supervise.py decides on each action and its time. The router's threads share all state under `lock`.
No replica is called while the lock is held, except to hand it requests.
"""

import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from jaxrl_async.errors import Closed, SamplersLost, WeightsError
from jaxrl_async.ports.generate import Replica, ReplicaStats
from jaxrl_async.ports.run import Clock
from jaxrl_async.sampler.batch.admission import WaitingQueue
from jaxrl_async.sampler.router.dealing import Candidate
from jaxrl_async.sampler.router.job import RouterJob, refusal
from jaxrl_async.sampler.router.supervise import (
    FORGIVEN_S,
    Act,
    Health,
    RestartLimits,
    Trouble,
    decide,
    messages_due,
    trouble,
)
from jaxrl_async.sampler.stats import RouterTotals

log = logging.getLogger(__name__)

FAULT_OF = {
    Trouble.LEFT: "samplers_left",
    Trouble.CUT_OFF: "samplers_cut_off",
    Trouble.DEAD: "sampler_deaths",
    Trouble.HANGS: "sampler_hangs",
}
"""Fault counter of each reason to take a replica out; refused completions are counted singly."""


@dataclass(slots=True, kw_only=True, eq=False)
class ReplicaSlot:
    """One of the N positions for a replica, and the state of its replica."""

    number: int
    replica: Replica
    up_at: float  # when the replica started
    moved_at: float  # when it last made progress, or got work
    jobs: dict[RouterJob, None] = field(default_factory=dict)  # unanswered, in the order of dealing
    has_suspects: bool = False  # whether a request under suspicion is among them
    work_done: tuple[int, ...] = ()  # see ReplicaStats.work_done
    before: ReplicaStats | None = None  # of the earlier replicas in this slot
    nonfinite: int = 0  # refused completions in a row
    restarts: int = 0  # in a row
    excused: bool = False  # a request caused the last death
    out_at: float | None = None  # when the replica was taken out; None: it is active
    lost: bool = False  # given up, no more restarts

    @property
    def is_active(self) -> bool:
        """Whether requests may be dealt here."""
        return self.out_at is None

    @property
    def stats(self) -> ReplicaStats:
        """Statistics of the replica, including the replicas that it replaced."""
        now = self.replica.stats()
        return now if self.before is None else now.after(self.before)

    @property
    def candidate(self) -> Candidate:
        """The replica's load, for dealing."""
        return Candidate(
            slot=self.number,
            in_flight=len(self.jobs),
            capacity=self.replica.capacity,
            rows=self.replica.rows,
            tries_suspect=self.has_suspects,
        )


class Fleet:
    """The replicas in their slots, and the requests that no replica has now."""

    def __init__(
        self,
        replicas: Sequence[Replica],
        *,
        limits: RestartLimits,
        count: Callable[[str, int], None],
        clock: Clock,
        wait_s: float | None = None,
    ) -> None:
        """Put the replicas into slots.

        Args:
            replicas: all serve the same requests.
            limits: when a replica is taken out, and when it is given up.
            count: called with the name and number of each fault (metrics.fault_counts).
            clock: seconds, monotonic.
            wait_s: maximum time without any replica, seconds; None: no replica will join.
        """
        assert replicas or wait_s is not None, "at least one sampler, or wait for one"
        self.limits, self._count, self.clock, self._wait_s = limits, count, clock, wait_s
        self.lock = threading.RLock()
        self.slots: tuple[ReplicaSlot, ...] = ()  # replaced as a whole: any thread may read it
        self._by_number: dict[int, ReplicaSlot] = {}
        for number, replica in enumerate(replicas):
            self._add_slot(number, replica)
        self._next_number = len(replicas)
        self._totals = RouterTotals()
        self.queue: WaitingQueue[RouterJob] = WaitingQueue()  # jobs for any replica with room
        self.waiting: list[RouterJob] = []  # other jobs that no replica has
        self._blamed_in_a_row = 0  # requests blamed for deaths since one was answered
        self._empty_at: float | None = None  # when the last replica was lost
        self._num_warnings = 0  # warnings about it so far

    @property
    def replicas(self) -> tuple[Replica, ...]:
        """The replicas in the slots, active or not."""
        return tuple(slot.replica for slot in self.slots)

    @property
    def num_jobs(self) -> int:
        """Number of requests that are not answered."""
        return self.num_undealt + sum(len(slot.jobs) for slot in self.slots)

    @property
    def num_undealt(self) -> int:
        """Number of requests that no replica has."""
        return len(self.waiting) + len(self.queue)

    @property
    def jobs(self) -> list[RouterJob]:
        """All requests that are not answered; read under the lock."""
        dealt = (job for slot in self.slots for job in slot.jobs)
        return [*self.waiting, *self.queue, *dealt]

    def slot(self, number: int) -> ReplicaSlot | None:
        """Return the slot with this number; None if it was removed."""
        return self._by_number.get(number)

    def stats(self) -> ReplicaStats:
        """Return the merged statistics of all replicas, including replaced and removed ones, and of
        the requests that wait for a replica."""
        with self.lock:
            return self._totals.read(self._readings()).with_waiting(self.num_undealt)

    def join(self, replica: Replica) -> int:
        """Add a replica in a new slot; return the slot's number."""
        with self.lock:
            self._totals.change(self._readings())
            number, self._next_number = self._next_number, self._next_number + 1
            self._add_slot(number, replica)
            waiting = self.num_undealt
        self._count("samplers_joined", 1)
        log.info("sampler %d has joined: %s; %d requests wait", number, replica, waiting)
        return number

    def _add_slot(self, number: int, replica: Replica) -> None:
        now = self.clock()
        slot = ReplicaSlot(number=number, replica=replica, up_at=now, moved_at=now)
        self._by_number[number] = slot
        self.slots = (*self.slots, slot)

    def _readings(self) -> dict[int, ReplicaStats]:
        return {slot.number: slot.stats for slot in self.slots}

    def hand_over(self, slot: ReplicaSlot, jobs: Sequence[RouterJob]) -> bool:
        """Give jobs to the replica in this slot. Returns False if it has just died: the jobs wait.

        Raises the errors of a healthy replica.
        """
        try:
            inners = slot.replica.start_many([job.begun or job.request for job in jobs])
        except BaseException:
            if slot.replica.error is None:
                raise
            self.waiting += jobs
            return False
        now = self.clock()
        if not slot.jobs:
            slot.moved_at = now
        slot.has_suspects |= any(job.suspect for job in jobs)
        for job, inner in zip(jobs, inners, strict=True):
            job.inner, job.dealt_at, job.slot_known = inner, now, False
            slot.jobs[job] = None
        return True

    @staticmethod
    def release(slot: ReplicaSlot, job: RouterJob) -> None:
        """Remove a job that the replica in this slot has answered."""
        del slot.jobs[job]
        job.inner = None
        if job.suspect:
            slot.has_suspects = any(other.suspect for other in slot.jobs)

    def count_finite(self, slot: ReplicaSlot) -> None:
        """Reset the count of refused completions after one was accepted."""
        slot.nonfinite = self._blamed_in_a_row = 0

    def count_nonfinite(self, slot: ReplicaSlot) -> None:
        """Count a refused completion."""
        slot.nonfinite += 1
        self._count("nonfinite_completions", 1)

    def drain(self) -> list[RouterJob]:
        """Remove and return all unanswered requests, which no replica will answer."""
        jobs, self.waiting = self.jobs, []
        self.queue.clear()
        for slot in self.slots:
            slot.jobs.clear()
        for job in jobs:
            job.inner = None
        return jobs

    # ---- supervision of the replicas, on the router's thread

    def retire(self, slot: ReplicaSlot) -> None:
        """Take the replica out if it failed, and give it up if it failed too often.

        The slot of a replica that cannot be replaced is removed. Raises RolloutError if it was the
        last one and no replica will join, and WeightsError if the weights caused the failure.
        """
        if slot.lost:
            return
        act = decide(self._health(slot), self.limits)
        if act is Act.TAKE_OUT:
            self._take_out(slot)
            act = decide(self._health(slot), self.limits)
        if act is Act.GIVE_UP:
            self._give_up(slot)
        elif act is Act.REMOVE:
            self._remove(slot)

    def watch_vacancy(self) -> None:
        """Log a warning while there is no replica, immediately and every REMIND_S seconds. Raises
        RolloutError after wait_s seconds without a replica."""
        now = self.clock()
        if any(not slot.lost for slot in self.slots):
            if self._num_warnings and self._empty_at is not None:
                log.warning("a sampler is available again after %.1f s", now - self._empty_at)
            self._empty_at, self._num_warnings = None, 0
            return
        self._empty_at = now if self._empty_at is None else self._empty_at
        empty_s, wait_s = now - self._empty_at, self._wait_s or 0.0
        if empty_s >= wait_s:
            raise SamplersLost(
                f"no sampler is available, and none joined within {wait_s:.0f} s (remote.wait_s). "
                "Start samplers (python -m jaxrl_async.sample --join HOST:PORT) and resume the "
                "run, or raise remote.wait_s."
            )
        if self._num_warnings < messages_due(empty_s):
            self._num_warnings = messages_due(empty_s)
            log.warning(
                "no sampler is available: %d requests wait for one to join (python -m "
                "jaxrl_async.sample --join HOST:PORT); the run ends in %.0f s (remote.wait_s)",
                self.num_jobs,
                wait_s - empty_s,
            )

    def restart(self, slot: ReplicaSlot) -> bool:
        """Start a successor with the newest weights if the backoff is over; return whether it is
        active. May be slow. Raises Closed and WeightsError."""
        if slot.lost or decide(self._health(slot), self.limits) is not Act.START:
            return False
        slot.restarts += not slot.excused
        try:
            successor = slot.replica.successor()
        except (Closed, WeightsError):
            raise
        except Exception as error:
            log.error("sampler %d could not be restarted: %s", slot.number, error)
            slot.out_at = self.clock()
            return False
        successor.start()
        with self.lock:
            slot.before = slot.stats.ended()
            slot.replica, slot.nonfinite, slot.work_done = successor, 0, ()
            slot.up_at = slot.moved_at = self.clock()
            out_s = slot.up_at - (slot.out_at or slot.up_at)
            slot.out_at = None
        self._count("sampler_restarts", 1)
        log.warning("sampler %d works again after %.1f s", slot.number, out_s)
        return True

    def _health(self, slot: ReplicaSlot) -> Health:
        now = self.clock()
        if slot.out_at is not None:
            return Health(
                restarts=slot.restarts,
                out_s=now - slot.out_at,
                replaceable=slot.replica.replaceable,
            )
        work_done = slot.replica.stats().work_done
        with self.lock:
            if work_done != slot.work_done or not slot.jobs:
                slot.work_done, slot.moved_at = work_done, now
            if slot.restarts and now - slot.up_at > FORGIVEN_S:
                slot.restarts = 0
            return Health(
                error=slot.replica.error,
                working=bool(slot.jobs),
                quiet_s=now - slot.moved_at,
                nonfinite=slot.nonfinite,
                restarts=slot.restarts,
                left=slot.replica.departure is not None,
                replaceable=slot.replica.replaceable,
            )

    def _take_out(self, slot: ReplicaSlot) -> None:
        """Stop dealing to this slot. Its requests wait; one that caused the end is refused."""
        health = self._health(slot)
        if isinstance(health.error, WeightsError):
            raise health.error  # the other replicas get the same weights
        kind = trouble(health, self.limits)
        if kind is None:  # it made progress just now
            return
        with self.lock:
            slot.out_at = self.clock()
            jobs = list(slot.jobs)
            slot.jobs.clear()
            slot.has_suspects = False
            moved = self._judge(slot, kind, jobs)
            for job in jobs:
                job.inner = None
            guilty = jobs if kind is not Trouble.LEFT and self._is_to_blame(jobs) else []
            self._blamed_in_a_row += len(guilty)
            back = [job for job in jobs if job not in guilty]
            self.waiting += back
            slot.excused = bool(guilty)
            for earlier in (number for job in guilty for number in job.died[:-1]):
                if (other := self.slot(earlier)) is not None:
                    other.restarts = max(0, other.restarts - 1)
        slot.replica.abandon()
        if kind in FAULT_OF:
            self._count(FAULT_OF[kind], 1)
        self._count("moved_requests", moved)
        self._count("redone_requests", 0 if kind is Trouble.LEFT else len(back))
        for job in guilty:
            job.settle(refusal(job, health.error))
        reasons = {
            Trouble.HANGS: f"no block for {health.quiet_s:.1f} s",
            Trouble.NONFINITE: f"{health.nonfinite} refused completions in a row",
        }
        log.log(
            logging.WARNING if kind is Trouble.LEFT else logging.ERROR,
            "sampler %d is taken out (%s); its %d requests move to other samplers, %d of them with "
            "their sampled tokens: %s",
            slot.number,
            kind,
            len(back),
            moved,
            reasons.get(kind, health.error),
        )

    @staticmethod
    def _judge(slot: ReplicaSlot, kind: Trouble, jobs: Sequence[RouterJob]) -> int:
        """Record in the requests what the end of their replica implies for them; return the number
        that continue from tokens that it handed back."""
        departure, blamed, moved = slot.replica.departure, slot.replica.blamed, 0
        for job in jobs:
            if departure is not None:
                partial = departure.partials.get(job.inner) if job.inner is not None else None
                job.moved(partial)
                moved += partial is not None
            elif job.request.request_id not in blamed:
                continue
            elif kind is Trouble.DEAD:
                job.died.append(slot.number)
            elif kind is Trouble.CUT_OFF:
                job.cut_off += 1
        return moved

    def _is_to_blame(self, jobs: Sequence[RouterJob]) -> bool:
        """Return whether the only request of a replica caused its death.

        False if as many requests in a row were blamed as a replica may restart: then the replicas
        fail with any request.
        """
        alone = len(jobs) == 1 and jobs[0].to_blame
        return alone and self._blamed_in_a_row < self.limits.restarts

    def _remove(self, slot: ReplicaSlot) -> None:
        """Remove the slot of a replica that cannot be replaced; its counts stay."""
        with self.lock:
            self._totals.change(self._readings())
            self.slots = tuple(s for s in self.slots if s is not slot)
            del self._by_number[slot.number]
        log.warning("sampler %d is gone; %d remain", slot.number, len(self.slots))

    def _give_up(self, slot: ReplicaSlot) -> None:
        slot.lost = True
        self._count("samplers_lost", 1)
        log.error("sampler %d is given up after %d restarts", slot.number, slot.restarts)
        if all(s.lost for s in self.slots) and self._wait_s is None:
            cause = slot.replica.error
            raise SamplersLost(
                f"no sampler is left: the last one failed {slot.restarts + 1} times in a row "
                f"({cause or 'no error: it hung, or its log-probs were not finite'}). Correct the "
                "cause, or raise faults.sampler_restarts or faults.sampler_hang_s."
            ) from cause
