"""N replicas of a sampler behind one ports.Generate. They share the requests, and failed replicas
are replaced.

    submit ──> queue ──room──> [ slot: replica ] ──Completion──> the caller's future
                 ^                │ died, hangs, samples NaN
                 └─ dealt again ──┘ taken out; after a backoff a successor takes its slot

Replicas are independent; each swaps weights separately. A replica gets as many requests as it can
use for a while. The rest wait in the queue for the first replica with room, since the lengths of
answers are unknown. Requests are dealt by a pure function of earlier deals and of the answered
requests (dealing.py).

Replicas in other processes join (Router.join) and leave. A leaving replica hands back its running
requests, which continue on other replicas without sampling any token again. Its slot is removed
when it leaves or fails; without any replica, requests wait up to a limit.

A request of a failed replica restarts from its prompt on another one: its randomness is keyed by
identity, so the same weights sample the same tokens. A request that was on the device of two
replicas when they died then runs alone: if that replica dies too, the request is refused. If
several requests in a row are refused so and none is answered, the replicas fail with any request,
and are given up. A lost connection does not count against a request, unless several in a row are
lost with that request on the device (job.py). Each caller gets exactly one answer; answers of a
replica that was taken out are ignored. One thread supervises the replicas; supervise.py decides its
actions.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from jaxrl_async.errors import Closed, RolloutError, SamplersLost, WeightsError
from jaxrl_async.ports.generate import PreparesConstraints, Replica
from jaxrl_async.ports.run import Clock
from jaxrl_async.sampler.lifetime import Lifetime, Living, close_side_by_side
from jaxrl_async.sampler.partial import branches
from jaxrl_async.sampler.request_checks import RequestCheck
from jaxrl_async.sampler.requests import request_of
from jaxrl_async.sampler.router.dealing import Dealer, unrecorded
from jaxrl_async.sampler.router.dispatch import Dispatcher
from jaxrl_async.sampler.router.fleet import Fleet
from jaxrl_async.sampler.router.job import RouterJob, job_for_loop, job_for_thread
from jaxrl_async.sampler.router.supervise import RestartLimits
from jaxrl_async.types import Completion, Constraint, Partial, Request

log = logging.getLogger(__name__)

CHECK_S = 0.2
"""Time between two checks of the replicas, seconds; a death is noticed immediately."""
JOIN_S = 10.0
"""Maximum wait for the thread that supervises the replicas, seconds."""
CLOSE_S = 10.0
"""Maximum wait until all replicas in other processes are closed, seconds: some may be dead."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Elastic:
    """The limits that a router needs without any replica, for replicas that join and leave."""

    check: RequestCheck  # of requests, for any replica
    wait_s: float = 600.0  # maximum time without any replica


class Router(Living):
    """Several replicas as one sampler, such as Router([Sampler(...), Sampler(...)]). Thread safe.

    A context manager: leaving it closes it and its replicas. Saved requests that are continued
    together stay on one replica. `error` says why it ended.
    """

    def __init__(
        self,
        samplers: Sequence[Replica],
        *,
        limits: RestartLimits | None = None,
        count: Callable[[str, int], None] = lambda name, number: None,
        clock: Clock = time.monotonic,
        recorded: Callable[[str], int | None] | None = None,
        elastic: Elastic | None = None,
        same_adapters: bool = False,
    ) -> None:
        """Put the replicas into slots; start() starts them.

        Args:
            samplers: the replicas, at least one unless `elastic`; all serve the same requests.
            limits: when a replica is taken out, and when it is given up. None: the defaults.
            count: called with the name and number of each fault (metrics.fault_counts).
            clock: seconds, monotonic.
            recorded: in a replay, returns the slot number for a request, or None to have one
                chosen. None: no replay.
            elastic: for replicas that join and leave; None: the router ends with its last replica.
            same_adapters: whether all replicas have the adapters that requests name.
        """
        self._elastic, self._same_adapters = elastic, same_adapters
        self.fleet = Fleet(
            samplers,
            limits=limits or RestartLimits(),
            count=count,
            clock=clock,
            wait_s=None if elastic is None else elastic.wait_s,
        )
        self.lifetime = Lifetime(self, Router.look_after, name="router")
        self._dispatcher = Dispatcher(self.fleet, Dealer(recorded or unrecorded), self.lifetime)
        self._started = False

    @property
    def samplers(self) -> tuple[Replica, ...]:
        """The replicas in the slots, active or not."""
        return self.fleet.replicas

    @property
    def living(self) -> int:
        """Number of active replicas."""
        return sum(slot.is_active for slot in self.fleet.slots)

    @property
    def num_waiting(self) -> int:
        """Number of requests that are not answered."""
        return self.fleet.num_jobs

    @property
    def seed(self) -> int | None:
        """Seed of every replica (ports.Generate)."""
        return self.samplers[0].seed if self._elastic is None else self._elastic.check.limits.seed

    def start(self, *, own_thread: bool = True) -> None:
        """Start every replica and the thread that supervises them, as the first request does.
        own_thread: False: no thread; the caller supervises with look_after()."""
        for sampler in self.samplers:
            sampler.start()
        self._started = True
        if own_thread:
            self.lifetime.start()

    def join(self, replica: Replica) -> int:
        """Add a replica at any time; it gets its share of the waiting requests. Return its
        slot's number. Raises Closed, and the error that ended the router."""
        with self.fleet.lock:
            self.lifetime.check_open("the samplers are closed")
            if self._started:
                replica.start()
            number = self.fleet.join(replica)
        self.lifetime.wake.set()
        return number

    def close(self) -> None:
        """Stop every replica; requests that are not done fail with Closed. Idempotent."""
        if self.lifetime.is_forked:
            return  # the other process owns everything
        self.lifetime.stop(JOIN_S)
        for sampler in self.samplers:
            if sampler.replaceable:
                sampler.close()
        close_side_by_side([s for s in self.samplers if not s.replaceable], CLOSE_S)
        closed = Closed("the samplers were closed before the request was done")
        self._dispatcher.end(self.error or closed)

    def check_waits(self) -> None:
        """Raise RolloutError where a wait for an answer would never end: on a thread that answers
        requests, or in a forked process."""
        super().check_waits()
        for sampler in self.samplers:
            sampler.check_waits()

    def stats(self) -> Any:  # SamplerStats, of our samplers
        """Return the merged statistics of all replicas, including replaced ones."""
        return self.fleet.stats()

    # ---- requests

    def submit_many(
        self, requests: Sequence[Request | Partial]
    ) -> "list[asyncio.Future[Completion]]":
        """Queue all requests together (ports.Generate); each replica gets its share in one call.

        Raises RolloutError for a request that cannot be served.
        """
        loop = asyncio.get_running_loop()
        jobs = [job_for_loop(r, loop) for r in self._checked(requests)]
        self._submit(jobs)
        futures: list[Any] = [job.future for job in jobs]
        return futures

    def prepare(self, constraint: Constraint) -> None:
        """Compile a constraint in every replica of this process; see ports.PreparesConstraints."""
        for sampler in self.samplers:
            if isinstance(sampler, PreparesConstraints):
                sampler.prepare(constraint)

    async def submit(self, request: Request) -> Completion:
        """Complete one request."""
        return await self.submit_many([request])[0]

    def start_many(self, requests: Sequence[Request | Partial]) -> list[Future[Completion]]:
        """Queue all requests together, as submit_many; return futures for threads."""
        jobs = [job_for_thread(r) for r in self._checked(requests)]
        self._submit(jobs)
        futures: list[Any] = [job.future for job in jobs]
        return futures

    def generate(self, requests: Sequence[Request]) -> list[Completion]:
        """Complete all requests, in order; blocks. As Sampler.generate."""
        return self._wait_for(requests, together=False)

    def resume(self, partials: Sequence[Partial]) -> list[Completion]:
        """Continue saved requests, all on one replica; blocks. As Sampler.resume."""
        return self._wait_for(partials, together=True)

    def fork(self, partial: Partial, count: int) -> list[Completion]:
        """Continue a saved request `count` times, all on one replica, where the continuations share
        the prefix; blocks. As Sampler.fork."""
        return self.resume(branches(partial, count))

    def progress(self) -> tuple[Partial, ...]:
        """Return all running requests that have sampled a token (ports.Generate).

        Requests of a replica that has just died, and requests that wait for a replica, are returned
        as they were submitted.
        """
        with self.fleet.lock:
            is_active = [slot.replica for slot in self.fleet.slots if slot.is_active]
            jobs = self.fleet.jobs
        partials = {job.request.request_id: job.begun for job in jobs if job.begun is not None}
        remote = [replica for replica in is_active if not replica.replaceable]
        with ThreadPoolExecutor(max(1, len(remote))) as pool:  # a replica may be slow to answer
            reports = [pool.submit(replica.progress) for replica in remote]
            for sampler in is_active:
                if sampler.replaceable:
                    partials |= _reported(sampler.progress)
            for report in reports:
                partials |= _reported(report.result)
        return tuple(partials.values())

    def save(self, request_id: str, *, stop: bool = False, with_kv: bool = True) -> Partial:
        """Return a running request as data (ports.Replica.save). Raises RolloutError if no replica
        has it."""
        with self.fleet.lock:
            holders = [
                slot.replica
                for slot in self.fleet.slots
                if any(job.request.request_id == request_id for job in slot.jobs)
            ]
        if not holders:
            raise RolloutError(
                f"request {request_id!r} is not running: it is done, cancelled, was never "
                "submitted, or waits for a sampler."
            )
        return holders[0].save(request_id, stop=stop, with_kv=with_kv)

    def _checked(self, requests: Sequence[Request | Partial]) -> list[Request | Partial]:
        """Return the requests as the replicas serve them; works without an active replica."""
        self.lifetime.check_process()
        if not self._same_adapters and (self._elastic is not None or len(self.samplers) > 1):
            _refuse_adapters(requests)
        if self._elastic is not None:
            return self._elastic.check.checked(requests)
        return self.samplers[0].checked(requests)

    def _submit(self, jobs: Sequence[RouterJob], *, together: bool = False) -> None:
        if not self._started:
            self.start()
        self._dispatcher.submit(jobs, together=together)
        for job in jobs:

            def settled(future: Any, job: RouterJob = job) -> None:
                """Withdraw a cancelled job. Keeps the router alive while a caller waits."""
                if future.cancelled():
                    self._dispatcher.withdraw(job)

            job.future.add_done_callback(settled)

    def _wait_for(
        self, requests: Sequence[Request | Partial], *, together: bool
    ) -> list[Completion]:
        self.check_waits()
        jobs = [job_for_thread(r) for r in self._checked(requests)]
        try:
            with ThreadPoolExecutor(1) as undisturbed:  # Ctrl-C leaves no request half dealt
                undisturbed.submit(self._submit, jobs, together=together).result()
            futures: list[Any] = [job.future for job in jobs]
            return [future.result() for future in futures]
        except BaseException:  # also Ctrl-C: cancel the others
            for job in reversed(jobs):  # waiting ones first: they must not get freed capacity
                job.future.cancel()
            raise

    # ---- supervision of the replicas, on the router's thread

    def look_after(self) -> float | None:
        """Check the replicas once, on the router's thread; return the seconds to sleep afterwards
        (Lifetime), or None after the router has ended.

        consumes      requests of replicas that failed
        waits for     the lifetime's `wake`: set by a death, a refused completion, and close
        produces      successors of the replicas that failed
        on failure    `error`, and every caller gets it
        """
        try:
            if not self.lifetime.closed:
                self.look()
                return CHECK_S
        except Closed as error:
            log.debug("the router ended: closed")
            self._dispatcher.end(error)
        except BaseException as error:
            self._dispatcher.end(error)
        return None

    def look(self) -> None:
        """Take out the replicas that failed, deal their requests again, and start successors whose
        backoff is over."""
        for slot in self.fleet.slots:
            self.fleet.retire(slot)
        self.fleet.watch_vacancy()
        self._dispatcher.deal_waiting()
        for slot in self.fleet.slots:
            if self.fleet.restart(slot):
                self._dispatcher.deal_waiting()


def _reported(report: Callable[[], tuple[Partial, ...]]) -> dict[str, Partial]:
    """Return the progress that a replica reports, by request id; empty if it fails to report."""
    try:
        return {p.request.request_id: p for p in report()}
    except Exception as error:
        ends_run = isinstance(error, WeightsError | SamplersLost)  # which is raised later
        level = logging.DEBUG if ends_run else logging.WARNING
        log.log(level, "a sampler did not report its progress: %s", error)
        return {}


def _refuse_adapters(requests: Sequence[Request | Partial]) -> None:
    """Raise RolloutError for a request that names an adapter: any replica may get it, and each has
    separate adapters."""
    for given in requests:
        request = request_of(given)
        if isinstance(request, Request) and request.adapter:
            raise RolloutError(
                f"request {request.request_id!r}: adapter {request.adapter!r}: several samplers "
                "behind one router share the same weights, and an adapter is loaded into one "
                "sampler by name. Leave `adapter` out, or send the request to that sampler."
            )
