"""The replicas in their seats: which request is where, who is at work, and who is replaced.

    [ seat: replica ] ──dead, hangs, draws NaN──> out ──backoff──> [ seat: its successor ]
        ^                                          └── too often ──> lost
        └── join                 process ended, or it left ──> the seat is removed

supervise.py decides what to do, and when. The router's threads share all of it under `lock`; a
replica is never called while the lock is held, except to hand it requests.
"""

import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from jaxrl_async.errors import Closed, SamplersLost, WeightsError
from jaxrl_async.ports.generate import Replica, ReplicaStats
from jaxrl_async.ports.run import Clock
from jaxrl_async.sampler.batch.waiting import WaitingQueue
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
from jaxrl_async.sampler.router.totals import RouterTotals

log = logging.getLogger(__name__)

FAULT_OF = {
    Trouble.LEFT: "samplers_left",
    Trouble.CUT_OFF: "samplers_cut_off",
    Trouble.DEAD: "sampler_deaths",
    Trouble.HANGS: "sampler_hangs",
}
"""What is counted when a replica is taken out; refused completions are counted one by one."""


@dataclass(slots=True, kw_only=True, eq=False)
class Seat:
    """One of the N places for a replica, and what is known of the replica there."""

    number: int
    replica: Replica
    up_at: float  # when the replica began
    moved_at: float  # when it last made progress, or got work
    jobs: dict[RouterJob, None] = field(default_factory=dict)  # unanswered, in the order of dealing
    has_suspects: bool = False  # whether a request under suspicion is among them
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
            rows=self.replica.rows,
            tries_suspect=self.has_suspects,
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
        wait_s: float | None = None,
    ) -> None:
        """Seat the replicas.

        Args:
            replicas: All serve the same requests.
            limits: When a replica is taken out, and when it is given up.
            count: Called with the name of each fault and how often (metrics.fault_counts).
            clock: Seconds, monotone.
            wait_s: Longest time without any replica, seconds; None: none will join.
        """
        assert replicas or wait_s is not None, "at least one sampler, or wait for one"
        self.limits, self._count, self.clock, self._wait_s = limits, count, clock, wait_s
        self.lock = threading.RLock()
        self.seats: tuple[Seat, ...] = ()  # replaced whole, so that any thread may read it
        self._by_number: dict[int, Seat] = {}
        for number, replica in enumerate(replicas):
            self._seat(number, replica)
        self._next_number = len(replicas)
        self._totals = RouterTotals()
        self.queue: WaitingQueue[RouterJob] = WaitingQueue()  # until any replica has room
        self.waiting: list[RouterJob] = []  # all others that no replica has now
        self._blamed_in_a_row = 0  # requests blamed for deaths since one was answered
        self._empty_at: float | None = None  # since when there has been no replica
        self._said = 0  # how often a message said so

    @property
    def replicas(self) -> tuple[Replica, ...]:
        """The replicas in the seats now, at work or not."""
        return tuple(seat.replica for seat in self.seats)

    @property
    def num_jobs(self) -> int:
        """Number of requests that are not answered."""
        return self.num_undealt + sum(len(seat.jobs) for seat in self.seats)

    @property
    def num_undealt(self) -> int:
        """Number of requests that no replica has."""
        return len(self.waiting) + len(self.queue)

    @property
    def jobs(self) -> list[RouterJob]:
        """All requests that are not answered; read it under the lock."""
        dealt = (job for seat in self.seats for job in seat.jobs)
        return [*self.waiting, *self.queue, *dealt]

    def seat(self, number: int) -> Seat | None:
        """Return the seat of this number; None: it was removed."""
        return self._by_number.get(number)

    def stats(self) -> ReplicaStats:
        """Return one reading of all replicas, including those that were replaced, or are gone, and
        of the requests that wait for one."""
        with self.lock:
            return self._totals.read(self._readings()).with_waiting(self.num_undealt)

    def join(self, replica: Replica) -> int:
        """Give a replica a seat of its own; return the seat's number."""
        with self.lock:
            self._totals.change(self._readings())
            number, self._next_number = self._next_number, self._next_number + 1
            self._seat(number, replica)
            waiting = self.num_undealt
        self._count("samplers_joined", 1)
        log.info("sampler %d has joined: %s; %d requests wait", number, replica, waiting)
        return number

    def _seat(self, number: int, replica: Replica) -> None:
        now = self.clock()
        seat = Seat(number=number, replica=replica, up_at=now, moved_at=now)
        self._by_number[number] = seat
        self.seats = (*self.seats, seat)

    def _readings(self) -> dict[int, ReplicaStats]:
        return {seat.number: seat.stats for seat in self.seats}

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
        now = self.clock()
        if not seat.jobs:
            seat.moved_at = now
        seat.has_suspects |= any(job.suspect for job in jobs)
        for job, inner in zip(jobs, inners, strict=True):
            job.inner, job.dealt_at, job.seat_known = inner, now, False
            seat.jobs[job] = None
        return True

    @staticmethod
    def release(seat: Seat, job: RouterJob) -> None:
        """Take a job off the replica in this seat, which has answered it."""
        del seat.jobs[job]
        job.inner = None
        if job.suspect:
            seat.has_suspects = any(other.suspect for other in seat.jobs)

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
        self.queue.clear()
        for seat in self.seats:
            seat.jobs.clear()
        for job in jobs:
            job.inner = None
        return jobs

    # ---- looking after the replicas, on the router's thread

    def retire(self, seat: Seat) -> None:
        """Take the replica out if it failed, and give it up if it failed too often.

        A seat whose replica nobody can replace is removed. Raises RolloutError if it was the last
        one and none will join, and WeightsError if the weights are to blame.
        """
        if seat.lost:
            return
        act = decide(self._health(seat), self.limits)
        if act is Act.TAKE_OUT:
            self._take_out(seat)
            act = decide(self._health(seat), self.limits)
        if act is Act.GIVE_UP:
            self._give_up(seat)
        elif act is Act.REMOVE:
            self._remove(seat)

    def watch_vacancy(self) -> None:
        """Say that there is no replica, at once and from time to time. Raises RolloutError if that
        has lasted too long."""
        now = self.clock()
        if any(not seat.lost for seat in self.seats):
            if self._said and self._empty_at is not None:
                log.warning("a sampler is there again after %.1f s", now - self._empty_at)
            self._empty_at, self._said = None, 0
            return
        self._empty_at = now if self._empty_at is None else self._empty_at
        empty_s, wait_s = now - self._empty_at, self._wait_s or 0.0
        if empty_s >= wait_s:
            raise SamplersLost(
                f"no sampler is there, and none has joined within {wait_s:.0f} s (remote.wait_s). "
                "Start samplers (python -m jaxrl_async.sample --join HOST:PORT) and resume the "
                "run, or raise remote.wait_s."
            )
        if self._said < messages_due(empty_s):
            self._said = messages_due(empty_s)
            log.warning(
                "no sampler is there: %d requests wait for one to join (python -m "
                "jaxrl_async.sample --join HOST:PORT); the run ends in %.0f s (remote.wait_s)",
                self.num_jobs,
                wait_s - empty_s,
            )

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
            seat.out_at = self.clock()
            return False
        successor.start()
        with self.lock:
            seat.before = seat.stats.ended()
            seat.replica, seat.nonfinite, seat.work_done = successor, 0, ()
            seat.up_at = seat.moved_at = self.clock()
            out_s = seat.up_at - (seat.out_at or seat.up_at)
            seat.out_at = None
        self._count("sampler_restarts", 1)
        log.warning("sampler %d is at work again after %.1f s", seat.number, out_s)
        return True

    def _health(self, seat: Seat) -> Health:
        now = self.clock()
        if seat.out_at is not None:
            return Health(
                restarts=seat.restarts,
                out_s=now - seat.out_at,
                replaceable=seat.replica.replaceable,
            )
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
                left=seat.replica.departure is not None,
                replaceable=seat.replica.replaceable,
            )

    def _take_out(self, seat: Seat) -> None:
        """Stop dealing to this seat; its requests wait, or are refused if one is to blame."""
        health = self._health(seat)
        if isinstance(health.error, WeightsError):
            raise health.error  # every other replica would get the same weights
        kind = trouble(health, self.limits)
        if kind is None:  # it made progress just now
            return
        with self.lock:
            seat.out_at = self.clock()
            jobs = list(seat.jobs)
            seat.jobs.clear()
            seat.has_suspects = False
            moved = self._judge(seat, kind, jobs)
            for job in jobs:
                job.inner = None
            guilty = jobs if kind is not Trouble.LEFT and self._is_to_blame(jobs) else []
            self._blamed_in_a_row += len(guilty)
            back = [job for job in jobs if job not in guilty]
            self.waiting += back
            seat.excused = bool(guilty)
            for earlier in (number for job in guilty for number in job.died[:-1]):
                if (sat := self.seat(earlier)) is not None:
                    sat.restarts = max(0, sat.restarts - 1)
        seat.replica.abandon()
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
            "sampler %d is taken out (%s), its %d requests go to another, %d of them with what "
            "they have drawn: %s",
            seat.number,
            kind,
            len(back),
            moved,
            reasons.get(kind, health.error),
        )

    @staticmethod
    def _judge(seat: Seat, kind: Trouble, jobs: Sequence[RouterJob]) -> int:
        """Note in the requests what the end of their replica says about them; return how many
        continue from what it handed back."""
        departure, blamed, moved = seat.replica.departure, seat.replica.blamed, 0
        for job in jobs:
            if departure is not None:
                partial = departure.partials.get(job.inner) if job.inner is not None else None
                job.moved(partial)
                moved += partial is not None
            elif job.request.request_id not in blamed:
                continue
            elif kind is Trouble.DEAD:
                job.died.append(seat.number)
            elif kind is Trouble.CUT_OFF:
                job.cut_off += 1
        return moved

    def _is_to_blame(self, jobs: Sequence[RouterJob]) -> bool:
        """Return whether the only request of a replica caused its death.

        Not if as many requests were blamed in a row as a replica may restart: then the replicas
        fail whatever they are given.
        """
        alone = len(jobs) == 1 and jobs[0].to_blame
        return alone and self._blamed_in_a_row < self.limits.restarts

    def _remove(self, seat: Seat) -> None:
        """Take the seat of a replica away that nobody can replace; what it counted stays."""
        with self.lock:
            self._totals.change(self._readings())
            self.seats = tuple(s for s in self.seats if s is not seat)
            del self._by_number[seat.number]
        log.warning("sampler %d is gone; %d are there", seat.number, len(self.seats))

    def _give_up(self, seat: Seat) -> None:
        seat.lost = True
        self._count("samplers_lost", 1)
        log.error("sampler %d is given up after %d restarts", seat.number, seat.restarts)
        if all(s.lost for s in self.seats) and self._wait_s is None:
            cause = seat.replica.error
            raise SamplersLost(
                f"no sampler is left: the last one failed {seat.restarts + 1} times in a row "
                f"({cause or 'no error: it hung, or its log-probs were not finite'}). Correct the "
                "cause, or raise faults.sampler_restarts or faults.sampler_hang_s."
            ) from cause
