"""An external JetStream engine as our sampler: it samples, our rollouts and trainer do the rest.

    submit ──> queue ──> prefill, insert into a free slot ──> generate ──> futures

The engine has the contract of google-jetstream 0.2.2: prefill returns the prefix, and every token
is a result of `generate`. An invalid token ends the answer, as in JetStream's own orchestrator
(token_utils.process_result_tokens). The engine returns no log-probs, so completions carry NaN, and
the trainer computes them itself; its metrics report the number of such tokens. A ForeignSampler is
a ports.Replica, so several may be used behind a router.
"""

import asyncio
import logging
import math
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import numpy as np

from jaxrl_async.errors import Closed, RolloutError
from jaxrl_async.interop.jetstream import engine_api
from jaxrl_async.mesh import NO_DEVICE_LOCK, DeviceGuard
from jaxrl_async.model.spec import Params
from jaxrl_async.ports.weights import FIXED_WEIGHTS, WeightSource
from jaxrl_async.sampler.batch.admission import WaitingQueue
from jaxrl_async.sampler.lifetime import Lifetime, Living
from jaxrl_async.sampler.request_checks import RequestLimits, checked_request
from jaxrl_async.sampler.requests import CLOSED, CLOSED_TOO_EARLY, AnyFuture, Waiter, resolve
from jaxrl_async.sampler.stats import SamplerStats
from jaxrl_async.types import Completion, IntArray, Partial, Request, SamplingParams, StopReason

log = logging.getLogger(__name__)

CLOSE_S = 60.0
"""Maximum wait for the thread to end, seconds; a hanging engine is abandoned."""
LEAST_BUCKET = 16
"""Shortest prompt length that the engine compiles for, tokens; longer ones are powers of two."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ForeignWeights:
    """The weights that the engine samples with."""

    params: Params  # in the engine's format
    version: int


@dataclass(slots=True, kw_only=True, eq=False)
class _Running:
    """A request in the queue or in a slot, and its tokens so far."""

    request: Request
    waiter: Waiter
    tokens: list[int] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    ended: bool = False  # by the engine, which samples nothing more for it
    first_at: float | None = None  # arrival time of its first token

    @property
    def stopped(self) -> bool:
        """Whether its last token is a stop token."""
        return bool(self.tokens) and self.tokens[-1] in self.request.stop_token_ids

    @property
    def done(self) -> bool:
        """Whether it has ended."""
        return self.ended or self.stopped or len(self.tokens) >= self.request.max_new_tokens


class ForeignSampler(Living):
    """A ports.Replica and ports.Generate over any JetStream engine, driven by a separate thread.

    Temperature, top-k and the like are fixed by the engine. If they are known (`sampling`), a
    request with other values is rejected; otherwise it is served with one warning. Requests cannot
    be saved, because the engine keeps its random numbers.
    """

    seed: int | None = None  # it cannot continue a Partial
    has_logprobs: bool = False  # see ports.Replica
    replaceable: bool = True
    departure: None = None

    def __init__(
        self,
        engine: Any,
        *,
        params: Params | None = None,
        weights: WeightSource = FIXED_WEIGHTS,
        version: int = 0,
        to_params: Callable[[Params], Params] = lambda params: params,
        sampling: SamplingParams | None = None,
        device_lock: DeviceGuard = NO_DEVICE_LOCK,
        name: str = "foreign",
    ) -> None:
        """Use this engine; the first request starts the thread. Raises MissingExtraError.

        Args:
            engine: A jetstream.engine.engine_api.Engine.
            params: The engine's weights. None: its own load_params().
            weights: Source of new weights.
            version: Version of the first weights.
            to_params: Converts the weight source's parameters to the engine's format.
            sampling: The engine's settings for all requests; None: unknown.
            device_lock: Held while the engine computes, if it shares devices.
            name: Name of the thread.
        """
        engine_api()
        params = engine.load_params() if params is None else params
        self.engine, self.weights, self._to_params = engine, weights, to_params
        self._sampling, self._device_lock, self._name = sampling, device_lock, name
        self.lifetime = Lifetime(self, lambda s: s.loop.step(), name=name)
        self.loop = ForeignLoop(
            engine,
            self.lifetime,
            weights,
            to_params,
            ForeignWeights(params=params, version=version),
            device_lock,
            warns=sampling is None,
        )
        self._rejoined: WeightSource | None = None  # of a successor that could not be made yet
        weights.attach(self.lifetime.wake)

    @property
    def version(self) -> int:
        """Version of the weights that it samples with."""
        return self.loop.current.version

    @property
    def capacity(self) -> int:
        """Number of slots of the engine."""
        return int(self.engine.max_concurrent_decodes)

    @property
    def rows(self) -> int:
        """See ports.Replica."""
        return self.capacity

    @property
    def blamed(self) -> frozenset[str]:
        """Ids of the requests that had a slot when the thread ended with `error`."""
        return self.loop.blamed

    def stats(self) -> SamplerStats:
        """Return a consistent reading of the statistics: counts of steps, tokens and requests."""
        return self.loop.stats

    # ---- life cycle

    def close(self) -> None:
        """Stop after the current step; unfinished requests fail with Closed. Idempotent."""
        if self.lifetime.is_forked:
            return  # the thread and its callers are in the other process
        if not self.lifetime.stop(CLOSE_S):
            log.error("the external engine's thread did not end within %.0f s", CLOSE_S)
        if not self.lifetime.is_current:  # else in a callback: the thread fails the others itself
            self.loop.fail_all(self.error or Closed(CLOSED_TOO_EARLY))

    def abandon(self) -> None:
        """Detach from the thread, which is dead or hung: ignore anything that it still produces,
        and stop weight updates from waiting for it."""
        self.lifetime.detach()
        self.weights.leave()

    def successor(self) -> "ForeignSampler":
        """Return a replacement for this abandoned sampler: the same engine, the newest weights, no
        requests. Waits for weights that are being transferred.

        Raises Closed and WeightsError, as the weight source does.
        """
        if self.error is not None:  # free its decode state: there is no room for two
            self.lifetime.forget_frames()
            self.loop.state = None
        source = self._rejoined = (self._rejoined or self.weights).rejoin()
        try:
            weights, update = self.loop.current, source.poll(wait=True)
            if update is not None:
                params = self._to_params(update.params)
                weights = ForeignWeights(params=params, version=update.version)
            successor = ForeignSampler(
                self.engine,
                params=weights.params,
                weights=source,
                version=weights.version,
                to_params=self._to_params,
                sampling=self._sampling,
                device_lock=self._device_lock,
                name=self._name,
            )
            if update is not None:
                source.live(update.version)
            return successor
        except BaseException:
            source.leave()
            raise

    # ---- requests

    async def submit(self, request: Request) -> Completion:
        """Complete one request."""
        return await self.submit_many([request])[0]

    def submit_many(
        self, requests: Sequence[Request | Partial]
    ) -> "list[asyncio.Future[Completion]]":
        """Queue all requests together, in this order; return futures of the running event loop. See
        ports.Generate. Raises RolloutError that names the field if one cannot be served."""
        loop = asyncio.get_running_loop()
        futures: list[asyncio.Future[Completion]] = [loop.create_future() for _ in requests]
        self._queue(requests, futures, loop)
        return futures

    def start_many(self, requests: Sequence[Request | Partial]) -> list[Future[Completion]]:
        """Queue all requests together, in this order; return futures for threads. See
        submit_many."""
        futures: list[Future[Completion]] = [Future() for _ in requests]
        self._queue(requests, futures, None)
        return futures

    def checked(self, requests: Sequence[Request | Partial]) -> list[Request | Partial]:
        """Return the requests as this sampler will serve them. Raises RolloutError that names the
        field if one cannot be served."""
        return [*self._checked(requests)]

    def progress(self) -> tuple[Partial, ...]:
        """Return nothing: an external engine's requests cannot be saved."""
        return ()

    def save(self, request_id: str, *, stop: bool = False, with_kv: bool = True) -> Partial:
        """Raise RolloutError: an external engine's requests cannot be saved."""
        raise RolloutError(
            f"request {request_id!r} cannot be saved: an external engine does not expose the state "
            "of its random numbers. Use jaxrl_async.Sampler for requests that are saved."
        )

    def _checked(self, requests: Sequence[Request | Partial]) -> list[Request]:
        room = RequestLimits(max_length=self.engine.max_prefill_length + 1)
        for given in requests:
            if isinstance(given, Partial):
                raise RolloutError(
                    f"saved request {given.request.request_id!r} cannot be continued: an external "
                    "engine uses its own random numbers. Submit its request, which starts again "
                    "from the prompt."
                )
        checked = [checked_request(r, room, answer_fits=False) for r in requests]
        for request in checked:
            if problem := self._not_served(request):
                raise RolloutError(
                    f"request {request.request_id!r}: {problem}, which JetStream's engine "
                    "interface does not support. Remove it, or use sampler.engine=native."
                )
        return checked

    def _not_served(self, request: Request) -> str | None:
        """Return an unsupported part of a request; None: the interface supports all of it."""
        if self._sampling is not None and request.sampling != self._sampling:
            return f"sampling is {request.sampling}, but the engine samples with {self._sampling}"
        unsupported = {
            f"adapter is {request.adapter!r}": bool(request.adapter),
            "forced_length is set": request.forced_length is not None,
            "extras (sampling masks, experts) are requested": request.extras,
            "shaping (a constraint, biases or penalties) is set": request.shaping is not None,
            "logprobs are requested": request.logprobs is not None,
        }
        return next((part for part, is_set in unsupported.items() if is_set), None)

    def _queue(
        self,
        requests: Sequence[Request | Partial],
        futures: Sequence[AnyFuture],
        loop: asyncio.AbstractEventLoop | None,
    ) -> None:
        """Queue all requests together. loop: the futures' loop; None: threads wait for them."""
        self.lifetime.check_process()
        now = time.perf_counter()
        waiting = [
            _Running(request=request, waiter=Waiter(queued_at=now, future=future, loop=loop))
            for request, future in zip(self._checked(requests), futures, strict=True)
        ]
        self.lifetime.start()
        with self.lifetime.lock:
            self.lifetime.check_open(CLOSED)
            self.loop.queue.add(waiting)
        self.lifetime.wake.set()


class ForeignLoop:
    """The thread's side of an external sampler: the queue, the engine and its slots.

    The queue is guarded by the lifetime's lock; any thread may read `stats` and call `fail_all`.
    """

    def __init__(
        self,
        engine: Any,
        lifetime: Lifetime,
        source: WeightSource,
        to_params: Callable[[Params], Params],
        weights: ForeignWeights,
        device_lock: DeviceGuard = NO_DEVICE_LOCK,
        *,
        warns: bool = True,
    ) -> None:
        """Start with these weights; to_params and device_lock: see ForeignSampler. warns: log a
        warning if a request sets sampling parameters other than the defaults."""
        self._device_lock = device_lock
        self._engine, self._lifetime, self._source = engine, lifetime, source
        self._to_params, self.current = to_params, weights
        self.queue: WaitingQueue[_Running] = WaitingQueue()
        self._running: dict[int, _Running] = {}  # by slot
        self.state: Any = None  # the engine's decode state, made by the thread
        self.stats = SamplerStats()
        self.blamed: frozenset[str] = frozenset()
        self._warned, self._warned_of_ends = not warns, False
        self._ended_at: float | None = None  # end of the last step, while idle

    def step(self) -> float | None:
        """Run one step of the engine; return how long to sleep after it (Lifetime), None at
        the end.

        consumes      requests, weights
        waits for     lifetime.wake, only when idle
        produces      completions into the waiters' futures
        on failure    a prompt that the engine cannot prefill, or samples nothing for, fails alone;
                      any other exception fails all requests and is kept in `ForeignSampler.error`
        """
        began = time.perf_counter()
        idle_s, self._ended_at = began - (self._ended_at or began), None
        try:
            if self._lifetime.closed:
                self.fail_all(self._lifetime.error or Closed(CLOSED_TOO_EARLY))
                return None
            self._take_weights()
            self._drop_cancelled()
            with self._device_lock:
                if self.state is None:
                    self.state = self._engine.init_decode_state()
                self._fill()
                result = self._generated() if self._running else None
            if result is not None:
                self._add_tokens(result)
            self.stats = replace(self.stats, in_flight=len(self._running), waiting=len(self.queue))
            ended = time.perf_counter()
            self.stats = self.stats.plus(busy_s=ended - began, idle_s=idle_s)
            self._ended_at = None if self._running else ended
        except BaseException as error:
            self.blamed = frozenset(r.request.request_id for r in self._running.values())
            self._lifetime.fail(error)
            log.error("the external engine stopped: %s", error)
            self.fail_all(error)
            return None
        return 0.0 if self._running or self.queue or self._lifetime.closed else math.inf

    def fail_all(self, error: BaseException) -> None:
        """Fail all requests with this error."""
        with self._lifetime.lock:
            waiting = [*self.queue, *self._running.values()]
            self.queue.clear()
            self._running.clear()
        resolve([(running.waiter, error) for running in waiting])

    def _take_weights(self) -> None:
        """Swap to new weights if some have arrived."""
        update = self._source.poll(wait=not self._running)
        if update is None:
            return
        params = self._to_params(update.params)
        self.current = ForeignWeights(params=params, version=update.version)
        self.stats = replace(self.stats, swaps=self.stats.swaps + 1)
        self._source.live(update.version)

    def _drop_cancelled(self) -> None:
        """Free the slots of requests whose callers no longer wait."""
        slots = [s for s, r in self._running.items() if r.waiter.gave_up]
        lost = sum(len(self._running.pop(slot).tokens) for slot in slots)
        with self._lifetime.lock:
            waiting = [r for r in self.queue if r.waiter.gave_up]
            for running in waiting:
                self.queue.remove(running)
        cancelled = len(waiting) + len(slots)
        self.stats = self.stats.plus(cancelled=cancelled, cancelled_tokens=lost)

    def _fill(self) -> None:
        """Put requests into free slots, by priority."""
        for slot in range(self._engine.max_concurrent_decodes):
            if slot in self._running:
                continue
            with self._lifetime.lock:
                running = self.queue.head()
                if running is None:
                    return
                self.queue.admit(running)
            running.waiter.started_at = time.perf_counter()
            self._warn_of(running.request)
            try:
                prefix = self._engine.prefill(
                    params=self.current.params,
                    padded_tokens=jax.numpy.asarray(self._padded(running.request.token_ids)),
                    true_length=len(running.request.token_ids),
                )
            except Exception as error:
                self._fail_one(running, error)
                continue
            self._running[slot] = running
            self.state = self._engine.insert(prefix, self.state, slot=slot)
            prefilled = self.stats.prefill_tokens + len(running.request.token_ids)
            self.stats = replace(self.stats, prefill_tokens=prefilled)

    def _padded(self, token_ids: IntArray) -> IntArray:
        """Pad a prompt to a compiled length."""
        bucket = LEAST_BUCKET
        while bucket < len(token_ids):
            bucket *= 2
        padded = np.zeros(min(bucket, self._engine.max_prefill_length), np.int32)
        padded[: len(token_ids)] = token_ids
        return padded

    def _fail_one(self, running: _Running, error: Exception) -> None:
        """Fail one request that the engine did not prefill or did not continue."""
        log.error("request %s failed, alone: %s", running.request.request_id, error)
        self.stats = replace(self.stats, failed=self.stats.failed + 1)
        resolve([(running.waiter, error)])

    def _generated(self) -> Any:
        """Sample the next tokens of every slot; return JetStream's ResultTokens on the host."""
        self.state, result = self._engine.generate(self.current.params, self.state)
        return result.convert_to_numpy()

    def _add_tokens(self, result: object) -> None:
        """Add the tokens of every slot, and answer the requests that have ended."""
        each = [(r.request, self._add(r, result, slot)) for slot, r in self._running.items()]
        now = time.perf_counter()
        for running in self._running.values():
            if running.first_at is None and running.tokens:
                running.first_at = now
        over = {slot: running for slot, running in self._running.items() if running.done}
        for slot in over:
            del self._running[slot]
        done = [running for running in over.values() if running.tokens]
        empty = [running for running in over.values() if not running.tokens]
        self._warn_of_early_ends(done)
        self.stats = self.stats.plus(
            blocks=1,
            generated_tokens=sum(count for _, count in each),
            aside_tokens=sum(count for request, count in each if not request.for_training),
            requests_done=len(done),
            truncated=sum(not r.stopped for r in done),
        )
        resolve([(running.waiter, _completion(running, now)) for running in done])
        for running in empty:
            self._fail_one(running, _no_token_error(running.request))

    def _add(self, running: _Running, result: Any, slot: int) -> int:
        """Add a slot's new tokens, as many as the request wants, up to the first invalid one, which
        ends it; return their number."""
        before = len(running.tokens)
        in_slot = result.get_result_at_slot(slot)
        for token, valid in zip(in_slot.tokens[0], in_slot.valid[0], strict=True):
            if running.done:
                break
            running.ended = not valid
            if valid:
                running.tokens.append(int(token))
                running.versions.append(self.current.version)
        return len(running.tokens) - before

    def _warn_of_early_ends(self, done: Sequence[_Running]) -> None:
        """Warn once about an answer that the engine ended for an unknown reason."""
        early = next((r for r in done if r.ended and not r.stopped), None)
        if self._warned_of_ends or early is None:
            return
        self._warned_of_ends = True
        log.warning(
            "request %s: the engine ended the answer after %d of %d tokens, without one of the "
            "stop tokens %s. Such answers count as truncated (rollout/truncated_share). If the "
            "engine was not full, configure the same stop tokens in the engine and the request",
            early.request.request_id,
            len(early.tokens),
            early.request.max_new_tokens,
            early.request.stop_token_ids,
        )

    def _warn_of(self, request: Request) -> None:
        """Warn once that the engine uses its own sampling settings."""
        if not self._warned and request.sampling != SamplingParams():
            self._warned = True
            log.warning(
                "request %s asks for %s, but an external engine uses its own sampling settings",
                request.request_id,
                request.sampling,
            )


def _no_token_error(request: Request) -> RolloutError:
    return RolloutError(
        f"request {request.request_id!r}: the engine sampled no token after a prompt of "
        f"{len(request.token_ids)}: the first entry of ResultTokens.valid is 0, which ends an "
        "answer. If the engine samples later, make `generate` wait for the token; if its slots are "
        "full, lower its max_prefill_length."
    )


def _completion(running: _Running, now: float) -> Completion:
    """Return the completion of a request that has ended."""
    waiter, n = running.waiter, len(running.tokens)
    started = now if waiter.started_at is None else waiter.started_at
    return Completion(
        request_id=running.request.request_id,
        token_ids=np.array(running.tokens, np.int32),
        logprobs=np.full(n, np.nan, np.float32),
        versions=np.array(running.versions, np.int32),
        stop=StopReason.EOS if running.stopped else StopReason.LENGTH,
        queued_s=started - waiter.queued_at,
        first_token_s=(running.first_at or now) - waiter.queued_at,
        latency_s=now - waiter.queued_at,
    )
