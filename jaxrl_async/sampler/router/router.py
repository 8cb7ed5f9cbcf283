"""N samplers behind one ports.Generate: requests go where there is room and where their prefix is.

    submit ──> job ──dealt──> [ seat: sampler ] ──Completion──> checked ──> the caller's future
                 ^                 │ died, hangs, draws NaN
                 └── dealt again ──┘ taken out; started again in the same seat after a while

Samplers know nothing of each other; each swaps weights on its own. All members of a group go to
one sampler, where they share a prefill. Requests of one call are dealt by a pure function of what
was dealt before and of who has answered, so equal calls to idle samplers are dealt equally.

A request that was under way in a sampler that failed begins again from its prompt in another: its
randomness is keyed by identity, so the same weights draw the same tokens. One that was on the
device in two samplers that died begins again alone: if that one dies too, the request is to blame
and is refused, and nobody else is taken along, unless one request after another is blamed so and
none answered: then it is the samplers that fail. Each caller gets exactly one answer; what a
sampler says after it was taken out is ignored. One thread looks after the samplers; what is done
when is decided in supervise.py.
"""

import asyncio
import contextlib
import logging
import os
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import Future, InvalidStateError
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Self

import numpy as np

from jaxrl_async.errors import Closed, RolloutError, WeightsError
from jaxrl_async.ports import Clock
from jaxrl_async.sampler.lifetime import check_here, close_at_exit, serve
from jaxrl_async.sampler.partial import branches
from jaxrl_async.sampler.router.supervise import (
    FORGIVEN_S,
    Act,
    Health,
    RestartLimits,
    Trouble,
    decide,
    trouble,
)
from jaxrl_async.types import Completion, Partial, Request

log = logging.getLogger(__name__)

AFFINITY_TOKENS = 32
"""Leading tokens that say which sampler is likely to hold a request's prefix."""
AFFINITY_SLACK = 0.25
"""How much more loaded than the least loaded one that sampler may be, as a share of its places."""
REMEMBERED = 4096
"""Prefixes whose sampler is remembered."""
LOOK_S = 0.2
"""Time between two looks at the samplers, seconds; a death is seen at once."""
SUSPECT_AFTER = 2
"""Deaths of samplers that had a request on the device, after which it is tried alone."""
JOIN_S = 10.0
"""Longest wait for the thread that looks after the samplers, seconds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """What the choice depends on, of one sampler."""

    in_flight: int  # requests dealt to it and not answered
    places: int  # requests that it holds at once

    @property
    def load(self) -> float:
        """In flight over places."""
        return self.in_flight / self.places


def choose(candidates: Sequence[Candidate], home: int | None, count: int = 1) -> int:
    """The sampler for `count` requests of one prefix: its home unless that is much busier.

    home: the sampler that had the prefix last; None: nobody. Ties go to the lowest number.
    """
    loads = [(c.in_flight + count) / c.places for c in candidates]
    least = min(range(len(loads)), key=loads.__getitem__)
    if home is not None and loads[home] <= loads[least] + AFFINITY_SLACK:
        return home
    return least


@dataclass(slots=True, kw_only=True, eq=False)
class _Job:
    """A request, and who waits for it."""

    request: Request
    begun: Partial | None = None  # where it goes on from
    future: Any  # asyncio.Future or concurrent.futures.Future of the caller
    loop: asyncio.AbstractEventLoop | None = None  # of the caller; None: a thread waits
    inner: Future[Completion] | None = None  # of the sampler that has it now
    avoid: int | None = None  # seat that drew a log-prob that is not finite
    died: list["_Seat"] = field(default_factory=list)  # of samplers that had it on the device

    @property
    def suspect(self) -> bool:
        """Whether it is to be tried alone."""
        return len(self.died) >= SUSPECT_AFTER


@dataclass(slots=True, kw_only=True, eq=False)
class _Seat:
    """One of the N places for a sampler."""

    sampler: Any
    up_at: float  # when the sampler began
    moved_at: float  # when it last got on, or got work
    jobs: dict[_Job, None] = field(default_factory=dict)  # not answered, in the order of dealing
    progress: tuple[int, ...] = ()
    before: Any = None  # counters of the samplers that sat here before
    nonfinite: int = 0
    restarts: int = 0
    excused: bool = False  # the last death was a request's doing
    out_at: float | None = None  # None: the sampler is at work
    lost: bool = False


class Router:
    """Deals requests to samplers and looks after them. Thread safe: submit from anywhere.

    A context manager: leaving it closes it and its samplers.
    """

    def __init__(
        self,
        samplers: Sequence[Any],
        *,
        limits: RestartLimits | None = None,
        count: Callable[[str, int], None] = lambda name, number: None,
        clock: Clock = time.monotonic,
        recorded: Callable[[str], int | None] | None = None,
    ) -> None:
        """limits: null takes the defaults. count: told of each fault (metrics.faults). recorded: in
        a replay, the number of the sampler for a request; None of it: choose."""
        assert samplers, "at least one sampler"
        self._recorded = recorded or (lambda request_id: None)
        self._limits, self._count, self._clock = limits or RestartLimits(), count, clock
        self._seats = [_Seat(sampler=s, up_at=clock(), moved_at=clock()) for s in samplers]
        self._waiting: list[_Job] = []  # nobody has them now
        self._blamed_in_a_row = 0  # requests blamed for deaths since one was answered
        self._homes: dict[bytes, int] = {}
        self._lock, self._wake = threading.RLock(), threading.Event()
        self._thread: threading.Thread | None = None
        self._closed = False
        self._pid = os.getpid()
        self.error: BaseException | None = None  # no sampler is left, or the weights are wrong

    @property
    def samplers(self) -> tuple[Any, ...]:
        """Those that sit in the seats now, at work or not."""
        return tuple(seat.sampler for seat in self._seats)

    @property
    def living(self) -> int:
        """Samplers at work."""
        return sum(seat.out_at is None for seat in self._seats)

    @property
    def num_waiting(self) -> int:
        """Requests that are not answered."""
        return len(self._waiting) + sum(len(seat.jobs) for seat in self._seats)

    def start(self) -> None:
        """Start every sampler; done by the first request where nobody did it."""
        for sampler in self.samplers:
            sampler.start()
        with self._lock:
            if self._thread is None and not self._closed:
                self._thread = threading.Thread(
                    target=serve,
                    args=(weakref.ref(self), self._wake, Router._look_after),
                    name="router",
                    daemon=True,
                )
                close_at_exit(self)
                self._thread.start()

    def close(self) -> None:
        """Stop every sampler; who still waits gets Closed. Idempotent."""
        if os.getpid() != self._pid:
            return  # a fork: everything is the other process's
        self._closed = True
        self._wake.set()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(JOIN_S)
        for sampler in self.samplers:
            sampler.close()
        self._end(self.error or Closed("the samplers were closed before the request was done"))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def check_waits(self) -> None:
        """As Sampler.check_waits, for every thread that answers requests."""
        check_here(self, self._pid, (self._thread,))
        for sampler in self.samplers:
            sampler.check_waits()

    def stats(self) -> Any:
        """Counters of all samplers, those that were replaced included: sums, the largest pause and
        error, mean shares."""
        return add_stats([followed(seat.before, seat.sampler.stats()) for seat in self._seats])

    def submit_many(
        self, requests: Sequence[Request | Partial]
    ) -> "list[asyncio.Future[Completion]]":
        """ports.Generate: each sampler gets its share in one call. Raises RolloutError for one that
        cannot be served."""
        loop = asyncio.get_running_loop()
        given = self._checked(requests)
        return self._submit([_job(r, loop.create_future(), loop) for r in given])

    async def submit(self, request: Request) -> Completion:
        """Complete one request."""
        return await self.submit_many([request])[0]

    def generate(self, requests: Sequence[Request]) -> list[Completion]:
        """Complete all requests, in order; blocks. As Sampler.generate."""
        return self._wait_for(requests, together=False)

    @property
    def seed(self) -> int:
        """Of every sampler."""
        return int(self._seats[0].sampler.seed)

    def progress(self) -> tuple[Partial, ...]:
        """As Sampler.progress, of all samplers at work, and of what waits for one; of one that has
        just died, what its requests had drawn when it was given them."""
        with self._lock:
            at_work = [seat.sampler for seat in self._seats if seat.out_at is None]
            jobs = [*self._waiting, *(job for seat in self._seats for job in seat.jobs)]
        known = {job.request.request_id: job.begun for job in jobs if job.begun is not None}
        for sampler in at_work:
            try:
                known |= {p.request.request_id: p for p in sampler.progress()}
            except Exception as error:
                log.warning("a sampler does not say what it has drawn: %s", error)
        return tuple(known.values())

    def save(self, request_id: str, *, stop: bool = False, with_kv: bool = True) -> Partial:
        """As Sampler.save, wherever the request is. Raises RolloutError where it is nowhere."""
        with self._lock:
            holders = [
                seat.sampler
                for seat in self._seats
                if any(job.request.request_id == request_id for job in seat.jobs)
            ]
        if not holders:
            raise RolloutError(
                f"request {request_id!r} is not under way: it is done, cancelled, was never "
                "submitted, or waits for a sampler."
            )
        saved: Partial = holders[0].save(request_id, stop=stop, with_kv=with_kv)
        return saved

    def resume(self, partials: Sequence[Partial]) -> list[Completion]:
        """As Sampler.resume: all on one sampler."""
        return self._wait_for(partials, together=True)

    def fork(self, partial: Partial, count: int) -> list[Completion]:
        """As Sampler.fork: all branches on one sampler, where they share the prefix."""
        return self.resume(branches(partial, count))

    def _checked(self, requests: Sequence[Request | Partial]) -> list[Request | Partial]:
        """As Sampler.checked, also where no sampler is at work: all are alike."""
        check_here(self, self._pid)
        checked: list[Request | Partial] = self._seats[0].sampler.checked(requests)
        return checked

    def _wait_for(self, given: Sequence[Request | Partial], *, together: bool) -> list[Completion]:
        self.check_waits()
        jobs = [_job(r, Future()) for r in self._checked(given)]
        try:
            return [f.result() for f in self._submit(jobs, together=together)]
        except BaseException:  # Ctrl-C too: nobody waits for the others
            for job in jobs:
                job.future.cancel()
            raise

    # ---- dealing, under the lock

    def _submit(self, jobs: list[_Job], *, together: bool = False) -> list[Any]:
        """The callers' futures, once every job has been dealt."""
        self.start()
        with self._lock:
            if self.error is not None:
                raise self.error
            if self._closed:
                raise Closed("the samplers are closed")
            try:
                self._deal(jobs, together=together)
            except BaseException:
                for job in jobs:
                    self._withdraw(job)
                raise
        for job in jobs:
            job.future.add_done_callback(partial(self._settled, job))
        return [job.future for job in jobs]

    def _deal(self, jobs: Sequence[_Job], *, together: bool = False) -> None:
        """Each job to a sampler at work; all wait where there is none.

        Groups (equal tokens, one after another) stay together. Raises what a sampler that is well
        raises.
        """
        suspects = [job for job in jobs if job.suspect]
        jobs = [job for job in jobs if not job.suspect]
        lonely = self._lonely_seat(suspects)
        self._waiting += suspects if lonely is None else self._deal_alone(lonely, suspects)
        open_seats = [
            i for i, seat in enumerate(self._seats) if seat.out_at is None and i != lonely
        ]
        if not open_seats:
            self._waiting += jobs
            return
        shares: dict[int, list[_Job]] = {}
        start = 0
        while start < len(jobs):
            content = jobs[start].request.token_ids.tobytes()
            end = start + 1
            while end < len(jobs) and (
                together or jobs[end].request.token_ids.tobytes() == content
            ):
                end += 1
            chosen = self._choose(open_seats, jobs[start], end - start, shares)
            shares.setdefault(chosen, []).extend(jobs[start:end])
            start = end
        for index in sorted(shares):
            self._give(index, shares[index])

    def _lonely_seat(self, suspects: Sequence[_Job]) -> int | None:
        """The seat that is kept for suspects, one after another, while there are any: where one
        runs, else the one with the least to do."""
        waiting = [*suspects, *(job for job in self._waiting if job.suspect)]
        at_work = [i for i, seat in enumerate(self._seats) if seat.out_at is None]
        taken = [i for i in at_work if any(job.suspect for job in self._seats[i].jobs)]
        if taken or not (waiting and at_work):
            return taken[0] if taken else None
        return min(at_work, key=lambda i: len(self._seats[i].jobs))

    def _deal_alone(self, index: int, suspects: list[_Job]) -> list[_Job]:
        """The first suspect to this seat, where nobody else has requests there; who still waits."""
        if not suspects or self._seats[index].jobs:
            return suspects
        self._give(index, suspects[:1])
        return suspects[1:]

    def _deal_waiting(self) -> None:
        waiting, self._waiting = self._waiting, []
        try:
            self._deal(waiting)
        except BaseException:
            self._waiting += [job for job in waiting if job.inner is None]
            raise

    def _choose(
        self, open_seats: list[int], job: _Job, count: int, shares: dict[int, list[_Job]]
    ) -> int:
        recorded = self._recorded(job.request.request_id)
        if recorded is not None:
            return recorded
        seats = [i for i in open_seats if i != job.avoid] or open_seats
        candidates = [
            Candidate(
                in_flight=len(self._seats[i].jobs) + len(shares.get(i, ())),
                places=self._seats[i].sampler.engine.spec.total_slots,
            )
            for i in seats
        ]
        prefix = job.request.token_ids[:AFFINITY_TOKENS].tobytes()
        home = self._homes.get(prefix)
        chosen = seats[choose(candidates, seats.index(home) if home in seats else None, count)]
        self._remember(prefix, chosen)
        return chosen

    def _remember(self, prefix: bytes, index: int) -> None:
        self._homes.pop(prefix, None)
        self._homes[prefix] = index
        if len(self._homes) > REMEMBERED:
            del self._homes[next(iter(self._homes))]

    def _give(self, index: int, jobs: list[_Job]) -> None:
        """All at once to the sampler in this seat; they wait where it has just died."""
        seat = self._seats[index]
        try:
            inners = seat.sampler.start_many([job.begun or job.request for job in jobs])
        except BaseException:
            if seat.sampler.error is None:
                raise
            self._waiting += jobs
            self._wake.set()
            return
        if not seat.jobs:
            seat.moved_at = self._clock()
        for job, inner in zip(jobs, inners, strict=True):
            job.inner = inner
            seat.jobs[job] = None
            inner.add_done_callback(partial(self._answered, index, job))

    def _settled(self, job: _Job, future: Any) -> None:
        if future.cancelled():
            self._withdraw(job)

    def _withdraw(self, job: _Job) -> None:
        """Nobody waits for it any more."""
        with self._lock:
            if job in self._waiting:
                self._waiting.remove(job)
            if job.inner is not None:
                job.inner.cancel()

    # ---- answers, on the samplers' threads

    def _answered(self, index: int, job: _Job, inner: "Future[Completion]") -> None:
        """Pass the completion on; one that is refused is drawn once more."""
        result: Completion | BaseException
        with self._lock:
            seat = self._seats[index]
            if job.inner is not inner:
                return  # the sampler was taken out: another has the request
            error = None if inner.cancelled() else inner.exception()
            if error is not None and seat.sampler.error is not None and not self._closed:
                self._wake.set()  # it died; look_after() gives the request to another
                return
            del seat.jobs[job]
            job.inner = None
            if not seat.jobs and any(waits.suspect for waits in self._waiting):
                self._wake.set()  # the seat is free for it
            if inner.cancelled():
                return
            if error is not None:
                result = error
            else:
                completion = inner.result()
                if np.isfinite(completion.logprobs).all():
                    seat.nonfinite = self._blamed_in_a_row = 0
                    result = completion
                elif self._draws_again(index, job):
                    return
                else:
                    result = RolloutError(
                        f"request {job.request.request_id}: the sampler gave log-probs that are "
                        "not finite, twice. The weights are likely to have diverged: look at "
                        "train/grad_norm, or lower algorithm.learning_rate."
                    )
        _settle(job, result)

    def _draws_again(self, index: int, job: _Job) -> bool:
        self._count("nonfinite_completions", 1)
        self._seats[index].nonfinite += 1
        if job.avoid is not None:
            return False
        job.avoid = index
        self._waiting.append(job)
        self._wake.set()
        return True

    # ---- looking after the samplers, on the router's thread

    def _look_after(self) -> float | None:
        """Take out what failed, start it again, deal again what it had; how long to sleep then
        (lifetime.serve), None: closed.

        consumes      requests of samplers that failed
        waits for     self._wake: set by a death, a refused completion, and close
        produces      samplers in the place of those that failed
        on failure    `error`, and every caller gets it
        """
        try:
            if not self._closed:
                self.look()
                return LOOK_S
        except Closed as error:
            log.debug("the router ended: closed")
            self._end(error)
        except BaseException as error:
            self._end(error)
        return None

    def look(self) -> None:
        """One look at all samplers, and what follows from it."""
        for index, seat in enumerate(self._seats):
            if seat.lost:
                continue
            act = decide(self._health(seat), self._limits)
            if act is Act.TAKE_OUT:
                self._take_out(index)
                act = decide(self._health(seat), self._limits)
            if act is Act.GIVE_UP:
                self._give_up(index)
        with self._lock:
            self._deal_waiting()
        for index, seat in enumerate(self._seats):
            if not seat.lost and decide(self._health(seat), self._limits) is Act.START:
                self._start_again(index)

    def _health(self, seat: _Seat) -> Health:
        now = self._clock()
        if seat.out_at is not None:
            return Health(restarts=seat.restarts, out_s=now - seat.out_at)
        stats = seat.sampler.stats()
        progress = (stats.blocks, stats.prefill_tokens, stats.swaps)
        with self._lock:
            if progress != seat.progress or not seat.jobs:
                seat.progress, seat.moved_at = progress, now
            if seat.restarts and now - seat.up_at > FORGIVEN_S:
                seat.restarts = 0
            return Health(
                error=seat.sampler.error,
                working=bool(seat.jobs),
                quiet_s=now - seat.moved_at,
                nonfinite=seat.nonfinite,
                restarts=seat.restarts,
            )

    def _take_out(self, index: int) -> None:
        """No request goes there any more, and no update of the weights waits for it."""
        seat = self._seats[index]
        health = self._health(seat)
        if isinstance(health.error, WeightsError):
            raise health.error  # any other sampler would get the same weights
        why = trouble(health, self._limits)
        if why is None:  # it got on just now
            return
        blamed = seat.sampler.blamed
        with self._lock:
            seat.out_at = self._clock()
            jobs = list(seat.jobs)
            seat.jobs.clear()
            for job in jobs:
                job.inner = None
                if why is Trouble.DEAD and job.request.request_id in blamed:
                    job.died.append(seat)
            guilty = jobs if self._is_to_blame(jobs) else []
            self._blamed_in_a_row += len(guilty)
            self._waiting += [job for job in jobs if job not in guilty]
            seat.excused = bool(guilty)
            for excused in (died for job in guilty for died in job.died[:-1]):
                excused.restarts = max(0, excused.restarts - 1)
        seat.sampler.abandon()
        if why is not Trouble.NONFINITE:
            self._count("sampler_deaths" if why is Trouble.DEAD else "sampler_hangs", 1)
        self._count("redone_requests", len(jobs) - len(guilty))
        for job in guilty:
            _settle(job, _refusal(job, health.error))
        log.error(
            "sampler %d is taken out (%s), and its %d requests begin again elsewhere: %s",
            index,
            why,
            len(jobs) - len(guilty),
            {
                Trouble.DEAD: health.error,
                Trouble.HANGS: f"no block for {health.quiet_s:.1f} s",
                Trouble.NONFINITE: f"{health.nonfinite} refused completions in a row",
            }[why],
        )

    def _is_to_blame(self, jobs: Sequence[_Job]) -> bool:
        """Whether the one request that a sampler had was its end. Where as many requests as a
        sampler may start again were blamed, and nothing answered since, samplers fail whatever they
        are given."""
        alone = len(jobs) == 1 and len(jobs[0].died) > SUSPECT_AFTER
        return alone and self._blamed_in_a_row < self._limits.restarts

    def _give_up(self, index: int) -> None:
        seat = self._seats[index]
        seat.lost = True
        self._count("samplers_lost", 1)
        log.error("sampler %d is given up after %d restarts", index, seat.restarts)
        if all(s.lost for s in self._seats):
            cause = seat.sampler.error
            raise RolloutError(
                f"no sampler is left: the last one failed {seat.restarts + 1} times in a row "
                f"({cause or 'no error: it hung, or its log-probs were not finite'}). Correct the "
                "cause, or raise faults.sampler_restarts or faults.sampler_hang_s."
            ) from cause

    def _start_again(self, index: int) -> None:
        """Another sampler in this seat, with the newest weights; may take a while."""
        seat = self._seats[index]
        seat.restarts += not seat.excused
        old = seat.sampler
        try:
            new = old.successor()
        except (Closed, WeightsError):
            raise
        except Exception as error:
            log.error("sampler %d could not be started again: %s", index, error)
            seat.out_at = self._clock()
            return
        new.start()
        with self._lock:
            seat.before = followed(seat.before, old.stats(), ended=True)
            seat.sampler, seat.nonfinite, seat.progress = new, 0, ()
            seat.up_at = seat.moved_at = self._clock()
            out_s = seat.up_at - (seat.out_at or seat.up_at)
            seat.out_at = None
            self._deal_waiting()
        self._count("sampler_restarts", 1)
        log.warning("sampler %d is at work again after %.1f s", index, out_s)

    def _end(self, error: BaseException) -> None:
        """Every caller gets the error."""
        with self._lock:
            if not self._closed:
                self.error = self.error or error
            jobs = [*self._waiting, *(job for seat in self._seats for job in seat.jobs)]
            self._waiting = []
            for seat in self._seats:
                seat.jobs.clear()
            for job in jobs:
                job.inner = None
        for job in jobs:
            _settle(job, error)


def _job(given: Request | Partial, future: Any, loop: Any = None) -> _Job:
    if isinstance(given, Partial):
        return _Job(request=given.request, begun=given, future=future, loop=loop)
    return _Job(request=given, future=future, loop=loop)


def _refusal(job: _Job, cause: BaseException | None) -> RolloutError:
    error = RolloutError(
        f"request {job.request.request_id}: {len(job.died)} samplers died that had it on the "
        f"device, the last with nothing else to do ({cause}). It is not begun again: look at what "
        "it asks."
    )
    error.__cause__ = cause
    return error


def _settle(job: _Job, result: Completion | BaseException) -> None:
    """The answer into the caller's future, on its own loop."""
    if job.loop is None:
        _set(job.future, result)
    else:
        with contextlib.suppress(RuntimeError):  # closed just now: nobody waits any more
            job.loop.call_soon_threadsafe(_set, job.future, result)


def _set(future: Any, result: Completion | BaseException) -> None:
    try:
        if isinstance(result, BaseException):
            future.set_exception(result)
        else:
            future.set_result(result)
    except (InvalidStateError, asyncio.InvalidStateError):  # cancelled meanwhile
        pass
    except BaseException as error:  # SystemExit and the like; others the future catches
        log.error("a callback of a request raised: %r", error, exc_info=error)


LARGEST = ("swap_pause_s", "max_swap_pause_s", "probe_error", "max_probe_error")
"""Counters of which the largest says most."""
NOW = ("in_flight", "waiting", "used_page_share")
"""Readings of this moment, which end with the sampler."""


def followed(before: Any, now: Any, *, ended: bool = False) -> Any:
    """Counters of a sampler with those of the ones that sat in its seat before it (None: nobody).

    ended: the sampler has gone too, and what holds only now is 0.
    """
    fields = {}
    for name in type(now).__dataclass_fields__:
        mine = getattr(now, name)
        if name in NOW:
            fields[name] = type(mine)(0) if ended else mine
        elif before is None:
            fields[name] = mine
        else:
            theirs = getattr(before, name)
            largest = name in (*LARGEST, "compiled_programs")  # the programs outlive a sampler
            fields[name] = max(mine, theirs) if largest else mine + theirs
    return type(now)(**fields)


def add_stats(stats: Sequence[Any]) -> Any:
    """One reading for several samplers; times are means: shares of wall time stay shares."""
    if len(stats) == 1:
        return stats[0]
    first = type(stats[0])
    fields = {name: [getattr(s, name) for s in stats] for name in first.__dataclass_fields__}
    means = ("busy_s", "idle_s", "used_page_share")
    return first(
        **{
            name: max(v) if name in LARGEST else sum(v) / len(v) if name in means else sum(v)
            for name, v in fields.items()
        }
    )
