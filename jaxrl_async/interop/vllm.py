"""A vLLM server as our sampler: it samples, over HTTP; our rollouts and trainer do the rest.

    submit ──> queue ──> POST /inference/v1/generate, concurrently ──> checked ──> futures
                              ^ paused while it loads
    weights ──> a folder ──> /pause, reload_weights, label the version, /resume, probe ──> live

Every token is returned with its log-prob and with the version of the weights that sampled it. The
server labels its samples, and an unknown label is an error. A VllmSampler is a ports.Replica: if
its server fails, the router removes it, and its successor loads the newest weights into the server
once that has recovered.
"""

import asyncio
import logging
import math
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from jaxrl_async.errors import Closed, RolloutError
from jaxrl_async.interop.vllm_client import RefusedRequest, VllmServer
from jaxrl_async.interop.vllm_messages import CheckedReply, checked_reply, label_of, request_body
from jaxrl_async.interop.weight_folder import WeightFolder
from jaxrl_async.ports.weights import WeightSource
from jaxrl_async.sampler.batch.admission import WaitingQueue
from jaxrl_async.sampler.lifetime import Lifetime, Living
from jaxrl_async.sampler.probe import Probe, ProbeJudge
from jaxrl_async.sampler.request_checks import RequestLimits, checked_request
from jaxrl_async.sampler.requests import CLOSED, CLOSED_TOO_EARLY, Waiter, resolve
from jaxrl_async.sampler.stats import SamplerStats
from jaxrl_async.types import Completion, Partial, Request, StopReason, VersionedParams

log = logging.getLogger(__name__)

TURN_S = 0.02
"""Maximum time the thread waits before it checks for new requests and weights, seconds."""
CLOSE_S = 10.0
"""Maximum wait for the thread to end, seconds."""
LEAST_TEMPERATURE = 0.01
"""vLLM raises lower temperatures above 0 to this value."""
ADVICE = (
    "Start the server with --dtype of model.dtype and without --quantization, and check that it "
    "reads the folder of the weights."
)
"""Advice if a server's results differ from the trainer's."""
MAX_ABORTS = 8
"""Maximum number of aborts of one request before they count as a fault of the server."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSettings:
    """Settings of a server; the same for all servers of a run."""

    run: str  # prefix of the labels of its weights; unique to this run
    slots: int  # maximum number of concurrent requests
    timeout_s: float  # timeout of an answer
    on_new_weights: str  # continue, recompute, drain or restart
    room: RequestLimits  # limits that requests are checked against
    probe: Probe | None
    count: Callable[[str], None]  # called with the name of each fault (metrics.fault_counts)


@dataclass(slots=True, kw_only=True, eq=False)
class _Pending:
    """A request in the queue or at the server."""

    request: Request
    waiter: Waiter
    sent: int = 0  # number of times it was sent
    aborts: int = 0


class VllmSampler(Living):
    """A ports.Replica over one vLLM server, driven by a separate thread.

    Requests cannot be saved, and two runs never sample the same tokens, because the server keeps
    the random numbers.
    """

    seed: int | None = None  # it cannot continue a Partial
    has_logprobs: bool = True  # see ports.Replica
    replaceable: bool = True
    departure: None = None

    def __init__(
        self,
        url: str,
        settings: EngineSettings,
        *,
        folder: WeightFolder,
        weights: WeightSource,
        update: VersionedParams,
    ) -> None:
        """Connect to nothing yet; the thread starts by loading `update` into the server.

        Args:
            url: URL of the server.
            settings: settings of the server.
            folder: folder from which the server reads weights; it may hold the update already.
            weights: source of new weights.
            update: the first weights. params None: they are in the folder.
        """
        self.url, self.settings, self.folder, self.weights = url, settings, folder, weights
        self.lifetime = Lifetime(self, lambda s: s.loop.step(), name="vllm")
        server = VllmServer(
            url, slots=settings.slots, timeout_s=settings.timeout_s, count=settings.count
        )
        self.loop = VllmLoop(server, settings, self.lifetime, weights, folder, update)
        self._rejoined: WeightSource | None = None  # of a successor that could not be made yet
        weights.attach(self.lifetime.wake)

    @property
    def version(self) -> int:
        """Version of the weights that the server samples with."""
        return self.loop.version

    @property
    def capacity(self) -> int:
        """Maximum number of concurrent requests to the server."""
        return self.settings.slots

    @property
    def rows(self) -> int:
        """See ports.Replica."""
        return self.capacity

    @property
    def blamed(self) -> frozenset[str]:
        """Ids of the requests whose answers ended the thread."""
        return self.loop.blamed

    def stats(self) -> SamplerStats:
        """Return a consistent reading; a block is an answer."""
        return self.loop.stats

    # ---- life cycle

    def close(self) -> None:
        """Stop; unfinished requests fail with Closed. Idempotent."""
        if self.lifetime.is_forked:
            return
        if not self.lifetime.stop(CLOSE_S):
            log.error("the thread of %s did not end within %.0f s", self.url, CLOSE_S)
        self.loop.fail_all(self.error or Closed(CLOSED_TOO_EARLY))
        self.folder.settle(self.url, None)

    def abandon(self) -> None:
        """Detach from the thread, and stop weight updates from waiting for it."""
        self.lifetime.detach()
        self.weights.leave()

    def successor(self) -> "VllmSampler":
        """Return a replacement for this abandoned sampler, with the same server, which gets the
        newest weights first.

        Raises ServerGone while the server is unavailable, and Closed and WeightsError as the weight
        source does.
        """
        asyncio.run(_check_health(self.url))
        source = self._rejoined = (self._rejoined or self.weights).rejoin()
        try:
            held = VersionedParams(version=self.loop.held, params=None)
            return VllmSampler(
                self.url,
                self.settings,
                folder=self.folder,
                weights=source,
                update=source.poll(wait=True) or held,
            )
        except BaseException:
            source.leave()
            raise

    # ---- requests

    def start_many(self, requests: Sequence[Request | Partial]) -> list[Future[Completion]]:
        """Queue all requests together, in this order. See ports.Replica."""
        self.lifetime.check_process()
        now = time.perf_counter()
        pending = [
            _Pending(request=r, waiter=Waiter(queued_at=now, future=Future()))
            for r in self._checked(requests)
        ]
        self.lifetime.start()
        with self.lifetime.lock:
            self.lifetime.check_open(CLOSED)
            self.loop.queue.add(pending)
        self.lifetime.wake.set()
        return [a.waiter.future for a in pending]

    def checked(self, requests: Sequence[Request | Partial]) -> list[Request | Partial]:
        """Return the requests as this sampler will serve them. Raises RolloutError that names the
        field if one cannot be served."""
        return [*self._checked(requests)]

    def progress(self) -> tuple[Partial, ...]:
        """Return nothing: a server's requests cannot be saved."""
        return ()

    def save(self, request_id: str, *, stop: bool = False, with_kv: bool = True) -> Partial:
        """Raise RolloutError: a server's requests cannot be saved."""
        raise RolloutError(
            f"request {request_id!r} cannot be saved: a vLLM server does not expose the state of "
            "its random numbers. Use jaxrl_async.Sampler for requests that are saved."
        )

    def _checked(self, requests: Sequence[Request | Partial]) -> list[Request]:
        checked = []
        for given in requests:
            if isinstance(given, Partial):
                raise RolloutError(
                    f"saved request {given.request.request_id!r} cannot be continued: a vLLM "
                    "server uses its own random numbers. Submit its request, which starts again "
                    "from the prompt."
                )
            request = checked_request(given, self.settings.room)
            refused = {
                f"adapter {request.adapter!r}: a vLLM server uses a single model here. Remove "
                "`adapter`, or use jaxrl_async.Sampler.": bool(request.adapter),
                "a vLLM server returns no extras. Submit it without them, or use "
                "jaxrl_async.Sampler.": request.extras,
                "shaping (a constraint, biases or penalties) is not passed on to a vLLM server. "
                "Remove it, or use jaxrl_async.Sampler.": request.shaping is not None,
                "logprobs: from a vLLM server only the log-probs of sampled tokens are read. "
                "Remove it, or use jaxrl_async.Sampler.": request.logprobs is not None,
                f"sampling.temperature must be 0 or at least {LEAST_TEMPERATURE} for vLLM, not "
                f"{request.sampling.temperature:g}.": (
                    0 < request.sampling.temperature < LEAST_TEMPERATURE
                ),
            }
            if why := next((text for text, is_so in refused.items() if is_so), None):
                raise RolloutError(f"request {request.request_id!r}: {why}")
            checked.append(request)
        return checked


class VllmLoop:
    """The thread's side: the queue, the requests at the server, and new weights.

    The queue is guarded by the lifetime's lock; any thread may read `stats` and call `fail_all`.
    """

    def __init__(
        self,
        server: VllmServer,
        settings: EngineSettings,
        lifetime: Lifetime,
        source: WeightSource,
        folder: WeightFolder,
        update: VersionedParams,
    ) -> None:
        """Start by loading `update`."""
        self._server, self._settings, self._lifetime = server, settings, lifetime
        self._source, self._folder = source, folder
        probe = settings.probe
        whose = f"the vLLM server at {server.url}: its"
        self._judge = None if probe is None else ProbeJudge(probe, whose, ADVICE)
        self._events: asyncio.AbstractEventLoop | None = None  # of the thread, once it runs
        self._paused = asyncio.Event()
        self._next: VersionedParams | None = update
        self._loading: asyncio.Task[float] | None = None
        self._sent: dict[asyncio.Task[CheckedReply], _Pending] = {}
        self._dropped: set[asyncio.Task[CheckedReply]] = set()  # cancelled, not ended yet
        self.version = self.held = update.version  # in use; in the folder
        self._is_loaded = False  # whether the server has loaded any weights of this run
        self.queue: WaitingQueue[_Pending] = WaitingQueue()
        self.stats = SamplerStats()
        self.blamed: frozenset[str] = frozenset()

    def step(self) -> float | None:
        """Run one iteration; return how long to sleep after it (Lifetime), None at the end.

        consumes      requests, weights
        waits for     the server's answers; lifetime.wake, only when idle
        produces      completions into the waiters' futures
        on failure    a request that the server rejects fails alone; any other exception fails all
                      requests and is kept in `VllmSampler.error`
        """
        began = time.perf_counter()
        try:
            if self._lifetime.closed:
                self._end(self._lifetime.error or Closed(CLOSED_TOO_EARLY))
                return None
            self._events = self._events or asyncio.new_event_loop()
            self._events.run_until_complete(self._iterate())
        except BaseException as error:
            self._lifetime.fail(error)
            log.error("the vLLM server at %s is abandoned for now: %s", self._server.url, error)
            self._end(error)
            return None
        works = bool(self._sent or self.queue or self._loading)
        self.stats = replace(
            self.stats,
            busy_s=self.stats.busy_s + (time.perf_counter() - began if works else 0.0),
            in_flight=len(self._sent),
            waiting=len(self.queue),
        )
        return 0.0 if works or self._lifetime.closed else math.inf

    def fail_all(self, error: BaseException) -> None:
        """Fail all requests with this error."""
        with self._lifetime.lock:
            waiting = [*self.queue, *self._sent.values()]
            self.queue.clear()
            self._sent.clear()
        resolve([(pending.waiter, error) for pending in waiting])

    async def _iterate(self) -> None:
        """Do all pending work, and wait briefly for the server."""
        self._drop_cancelled()
        if self._loading is None:
            update = self._next or self._source.poll(wait=not self._sent)
            if update is not None:
                self._next = None
                self._loading = asyncio.create_task(self._load(update))
        self._fill()
        waits: set[asyncio.Task[Any]] = {*self._sent}
        if self._loading is not None:
            waits.add(self._loading)
        if waits:
            await asyncio.wait(waits, timeout=TURN_S, return_when=asyncio.FIRST_COMPLETED)
        if self._loading is not None and self._loading.done():
            pause_s, self._loading = self._loading.result(), None
            longest = max(pause_s, self.stats.max_swap_pause_s)
            self.stats = replace(
                self.stats.plus(swaps=1), swap_pause_s=pause_s, max_swap_pause_s=longest
            )
        self._collect()

    # ---- requests

    def _drop_cancelled(self) -> None:
        """Drop requests whose callers no longer wait; the server ends them when their connection
        closes."""
        given_up = [task for task, pending in self._sent.items() if pending.waiter.gave_up]
        for task in given_up:
            task.cancel()
            del self._sent[task]
            self._dropped.add(task)
            task.add_done_callback(self._dropped.discard)
        with self._lifetime.lock:
            waiting = [pending for pending in self.queue if pending.waiter.gave_up]
            for pending in waiting:
                self.queue.remove(pending)
        cancelled = len(waiting) + len(given_up)
        if cancelled:
            self.stats = self.stats.plus(cancelled=cancelled)

    def _fill(self) -> None:
        """Send requests by priority, while the server has free slots and our weights."""
        while self._is_loaded and not self._paused.is_set():
            if len(self._sent) >= self._settings.slots:
                return
            with self._lifetime.lock:
                pending = self.queue.head()
                if pending is None:
                    return
                self.queue.admit(pending)
            now = time.perf_counter()
            pending.waiter.started_at = pending.waiter.started_at or now
            pending.sent += 1
            self._sent[asyncio.create_task(self._generate(pending))] = pending

    async def _generate(self, pending: _Pending) -> CheckedReply:
        """Let the server complete one request. Raises RefusedRequest, ServerGone, BadReply."""
        floor, run = self.version, self._settings.run
        body = request_body(pending.request, pending.sent, label_of(run, floor))
        return checked_reply(await self._server.generate(body), pending.request, run, floor)

    def _collect(self) -> None:
        """Resolve finished requests. Raises the first error that means that the server failed."""
        done = [task for task in self._sent if task.done()]
        answers: list[tuple[Waiter, Completion | BaseException]] = []
        failures: dict[str, BaseException] = {}
        for task in done:
            pending, error = self._sent[task], task.exception()
            if isinstance(error, RefusedRequest):
                log.error("%s", error)
                self.stats = self.stats.plus(failed=1)
                answers.append((pending.waiter, error))
            elif error is not None:
                failures[pending.request.request_id] = error
                continue  # fails with the others
            elif task.result().aborted:
                if pending.aborts == MAX_ABORTS:
                    failures[pending.request.request_id] = self._aborted_too_often(pending)
                    continue
                self._begin_again(pending, task.result())
            else:
                answers.append((pending.waiter, self._completion(pending, task.result())))
            del self._sent[task]
        resolve(answers)
        if failures:
            self.blamed = frozenset(failures)
            raise next(iter(failures.values()))

    def _begin_again(self, pending: _Pending, reply: CheckedReply) -> None:
        """Put a request that the server aborted at the front of the queue."""
        pending.aborts += 1
        self.stats = self.stats.plus(restarted=1, discarded_tokens=len(reply.token_ids))
        with self._lifetime.lock:
            self.queue.put_back([pending])

    def _aborted_too_often(self, pending: _Pending) -> RolloutError:
        return RolloutError(
            f"{self._server.url} has aborted request {pending.request.request_id!r} more than "
            f"{MAX_ABORTS} times. Check what else uses the server (/pause, /abort_requests), or "
            "set sampler.on_new_weights=continue."
        )

    def _completion(self, pending: _Pending, reply: CheckedReply) -> Completion:
        """Return the completion of a request, and update the statistics."""
        waiter, now = pending.waiter, time.perf_counter()
        self.stats = self.stats.plus(
            blocks=1,
            generated_tokens=len(reply.token_ids),
            aside_tokens=0 if pending.request.for_training else len(reply.token_ids),
            prefill_tokens=len(pending.request.token_ids),
            requests_done=1,
            truncated=not reply.stopped,
        )
        return Completion(
            request_id=pending.request.request_id,
            token_ids=reply.token_ids,
            logprobs=reply.logprobs,
            versions=reply.versions,
            stop=StopReason.EOS if reply.stopped else StopReason.LENGTH,
            queued_s=(waiter.started_at or now) - waiter.queued_at,
            first_token_s=now - waiter.queued_at,
            latency_s=now - waiter.queued_at,
        )

    # ---- weights

    async def _load(self, update: VersionedParams) -> float:
        """Load new weights into the server, and check them on the probe; return the duration of
        the pause, seconds. Raises ServerGone, WeightsError, OSError."""
        version, url = update.version, self._server.url
        folder = self._folder.path(version)
        if update.params is not None:
            folder = await asyncio.to_thread(self._folder.write, version, update.params, url)
            self.held = version
        began = time.perf_counter()
        label = label_of(self._settings.run, version)
        await self._server.load(folder, label, self._settings.on_new_weights, self._paused)
        pause_s = time.perf_counter() - began
        self.version, self._is_loaded = version, True
        await self._check(update)
        self._source.live(version)
        self._folder.settle(url, version)
        return pause_s

    async def _check(self, update: VersionedParams) -> None:
        """Raise WeightsError if the server's log-probs on the probe differ from the trainer's
        (ProbeJudge)."""
        judge = self._judge
        if judge is None or update.probe_logprobs is None:
            return
        theirs = await self._server.logprobs_of(judge.probe.token_ids)
        ours = await asyncio.to_thread(np.asarray, update.probe_logprobs)
        error = judge.judge(update.version, theirs, ours, compared=False)
        longest = max(error, self.stats.max_probe_error)
        self.stats = replace(self.stats, probe_error=error, max_probe_error=longest)

    # ---- the end

    def _end(self, error: BaseException) -> None:
        """Fail all requests, and close the connections."""
        tasks: list[asyncio.Task[Any]] = [*self._sent, *self._dropped]
        if self._loading is not None:
            tasks.append(self._loading)
        self.fail_all(error)
        if self._events is not None:
            self._events.run_until_complete(self._close(tasks))
            self._events.close()

    async def _close(self, tasks: Sequence[asyncio.Task[object]]) -> None:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._server.close()


async def _check_health(url: str) -> None:
    server = VllmServer(url)
    try:
        await server.check_health()
    finally:
        await server.close()
