"""The replicas in their seats: which request is where, who is at work, and who is replaced.

    [ seat: replica ] ──dead, hangs, draws NaN──> out ──backoff──> [ seat: its successor ]
                                                   └── too often ──> lost

supervise.py decides what to do, and when. The router's threads share all of it under `lock`; a
replica is never called while the lock is held, except to hand it requests.
"""

import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from jaxrl_async.errors import Closed, RolloutError, WeightsError
from jaxrl_async.ports import Clock, Replica, ReplicaStats
from jaxrl_async.sampler.router.dealing import Candidate
from jaxrl_async.sampler.router.job import SUSPECT_AFTER, RouterJob, refusal
from jaxrl_async.sampler.router.supervise import (
    FORGIVEN_S,
    Act,
    Health,
    RestartLimits,
    Trouble,
    decide,
    trouble,
)

log = logging.getLogger(__name__)


@dataclass(slots=True, kw_only=True, eq=False)
class Seat:
    """One of the N places for a replica, and what is known of the replica there."""

    number: int
    replica: Replica
    up_at: float  # when the replica began
    moved_at: float  # when it last made progress, or got work
    jobs: dict[RouterJob, None] = field(default_factory=dict)  # unanswered, in the order of dealing
    work_done: tuple[int, ...] = ()  # see ReplicaStats.work_done
    before: ReplicaStats | None = None  # of the replicas that sat here before
    nonfinite: int = 0  # refused completions in a row
    restarts: int = 0  # in a row
    excused: bool = False  # whether a request was to blame for the last death
    out_at: float | None = None  # when the replica was taken out; None: it is at work
    lost: bool = False  # given up

    @property
    def at_work(self) -> bool:
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
            seat=self.number,
            in_flight=len(self.jobs),
            places=self.replica.places,
            tries_suspect=any(job.suspect for job in self.jobs),
        )


class Fleet:
    """The replicas in their seats, and the requests that no replica has now."""

    def __init__(
        self,
        replicas: Sequence[Replica],
        *,
        limits: RestartLimits,
        count: Callable[[str, int], None],
        clock: Clock,
    ) -> None:
        """Seat the replicas.

        Args:
            replicas: At least one; all serve the same requests.
            limits: When a replica is taken out, and when it is given up.
            count: Called with the name of each fault and how often (metrics.fault_counts).
            clock: Seconds, monotone.
        """
        assert replicas, "at least one sampler"
        self.limits, self._count, self._clock = limits, count, clock
        self.lock = threading.RLock()
        self.seats = tuple(
            Seat(number=number, replica=replica, up_at=clock(), moved_at=clock())
            for number, replica in enumerate(replicas)
        )
        self.waiting: list[RouterJob] = []  # no replica has them now
        self._blamed_in_a_row = 0  # requests blamed for deaths since one was answered

    @property
    def replicas(self) -> tuple[Replica, ...]:
        """The replicas in the seats now, at work or not."""
        return tuple(seat.replica for seat in self.seats)

    @property
    def num_jobs(self) -> int:
        """Number of requests that are not answered."""
        return len(self.waiting) + sum(len(seat.jobs) for seat in self.seats)

    @property
    def jobs(self) -> list[RouterJob]:
        """All requests that are not answered; read it under the lock."""
        return [*self.waiting, *(job for seat in self.seats for job in seat.jobs)]

    def stats(self) -> ReplicaStats:
        """Return one reading of all replicas, including those that were replaced."""
        first, *others = [seat.stats for seat in self.seats]
        return first.beside(others)

    def hand_over(self, seat: Seat, jobs: Sequence[RouterJob]) -> bool:
        """Give jobs to the replica in this seat; False: it has just died, and they wait.

        Raises whatever a healthy replica raises.
        """
        try:
            inners = seat.replica.start_many([job.begun or job.request for job in jobs])
        except BaseException:
            if seat.replica.error is None:
                raise
            self.waiting += jobs
            return False
        if not seat.jobs:
            seat.moved_at = self._clock()
        for job, inner in zip(jobs, inners, strict=True):
            job.inner = inner
            seat.jobs[job] = None
        return True

    def draws_well(self, seat: Seat) -> None:
        """Reset the count of refused completions: one was passed on."""
        seat.nonfinite = self._blamed_in_a_row = 0

    def draws_nonfinite(self, seat: Seat) -> None:
        """Count a refused completion."""
        seat.nonfinite += 1
        self._count("nonfinite_completions", 1)

    def drain(self) -> list[RouterJob]:
        """Remove and return all unanswered requests: no replica will answer them."""
        jobs, self.waiting = self.jobs, []
        for seat in self.seats:
            seat.jobs.clear()
        for job in jobs:
            job.inner = None
        return jobs

    # ---- looking after the replicas, on the router's thread

    def retire(self, seat: Seat) -> None:
        """Take the replica out if it failed, and give it up if it failed too often.

        Raises RolloutError if it was the last one, and WeightsError if the weights are to blame.
        """
        if seat.lost:
            return
        act = decide(self._health(seat), self.limits)
        if act is Act.TAKE_OUT:
            self._take_out(seat)
            act = decide(self._health(seat), self.limits)
        if act is Act.GIVE_UP:
            self._give_up(seat)

    def restart(self, seat: Seat) -> bool:
        """Seat a successor with the newest weights if the backoff is over, and return whether it is
        at work. May take a while. Raises Closed and WeightsError."""
        if seat.lost or decide(self._health(seat), self.limits) is not Act.START:
            return False
        seat.restarts += not seat.excused
        try:
            successor = seat.replica.successor()
        except (Closed, WeightsError):
            raise
        except Exception as error:
            log.error("sampler %d could not be restarted: %s", seat.number, error)
            seat.out_at = self._clock()
            return False
        successor.start()
        with self.lock:
            seat.before = seat.stats.ended()
            seat.replica, seat.nonfinite, seat.work_done = successor, 0, ()
            seat.up_at = seat.moved_at = self._clock()
            out_s = seat.up_at - (seat.out_at or seat.up_at)
            seat.out_at = None
        self._count("sampler_restarts", 1)
        log.warning("sampler %d is at work again after %.1f s", seat.number, out_s)
        return True

    def _health(self, seat: Seat) -> Health:
        now = self._clock()
        if seat.out_at is not None:
            return Health(restarts=seat.restarts, out_s=now - seat.out_at)
        work_done = seat.replica.stats().work_done
        with self.lock:
            if work_done != seat.work_done or not seat.jobs:
                seat.work_done, seat.moved_at = work_done, now
            if seat.restarts and now - seat.up_at > FORGIVEN_S:
                seat.restarts = 0
            return Health(
                error=seat.replica.error,
                working=bool(seat.jobs),
                quiet_s=now - seat.moved_at,
                nonfinite=seat.nonfinite,
                restarts=seat.restarts,
            )

    def _take_out(self, seat: Seat) -> None:
        """Stop dealing to this seat; its requests wait, or are refused if one is to blame."""
        health = self._health(seat)
        if isinstance(health.error, WeightsError):
            raise health.error  # every other replica would get the same weights
        kind = trouble(health, self.limits)
        if kind is None:  # it made progress just now
            return
        blamed = seat.replica.blamed
        with self.lock:
            seat.out_at = self._clock()
            jobs = list(seat.jobs)
            seat.jobs.clear()
            for job in jobs:
                job.inner = None
                if kind is Trouble.DEAD and job.request.request_id in blamed:
                    job.died.append(seat.number)
            guilty = jobs if self._is_to_blame(jobs) else []
            self._blamed_in_a_row += len(guilty)
            self.waiting += [job for job in jobs if job not in guilty]
            seat.excused = bool(guilty)
            for earlier in (number for job in guilty for number in job.died[:-1]):
                self.seats[earlier].restarts = max(0, self.seats[earlier].restarts - 1)
        seat.replica.abandon()
        if kind is not Trouble.NONFINITE:
            self._count("sampler_deaths" if kind is Trouble.DEAD else "sampler_hangs", 1)
        self._count("redone_requests", len(jobs) - len(guilty))
        for job in guilty:
            job.settle(refusal(job, health.error))
        reasons = {
            Trouble.DEAD: health.error,
            Trouble.HANGS: f"no block for {health.quiet_s:.1f} s",
            Trouble.NONFINITE: f"{health.nonfinite} refused completions in a row",
        }
        log.error(
            "sampler %d is taken out (%s), and its %d requests begin again elsewhere: %s",
            seat.number,
            kind,
            len(jobs) - len(guilty),
            reasons[kind],
        )

    def _is_to_blame(self, jobs: Sequence[RouterJob]) -> bool:
        """Return whether the only request of a replica caused its death.

        Not if as many requests were blamed in a row as a replica may restart: then the replicas
        fail whatever they are given.
        """
        alone = len(jobs) == 1 and len(jobs[0].died) > SUSPECT_AFTER
        return alone and self._blamed_in_a_row < self.limits.restarts

    def _give_up(self, seat: Seat) -> None:
        seat.lost = True
        self._count("samplers_lost", 1)
        log.error("sampler %d is given up after %d restarts", seat.number, seat.restarts)
        if all(s.lost for s in self.seats):
            cause = seat.replica.error
            raise RolloutError(
                f"no sampler is left: the last one failed {seat.restarts + 1} times in a row "
                f"({cause or 'no error: it hung, or its log-probs were not finite'}). Correct the "
                "cause, or raise faults.sampler_restarts or faults.sampler_hang_s."
            ) from cause
