"""The sampler: one thread that decodes without ever stopping while there is work.

        submit ──> queue ──plan──> prefill ──> insert ──> [ decode block ] ──> finished ──> futures
                                                             ^      │ a few bytes per slot
        WeightSource.poll ──between two blocks──> params ────┘      v
                                                          host work while the next block runs

The schedule depends on the queue and on what was drawn, never on time: the same requests given at
once to an idle sampler always run the same way. Only the sampler's thread touches the device state.
"""

import asyncio
import logging
import threading
import time
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from jaxrl_async.config import schema
from jaxrl_async.errors import Closed, RolloutError, WeightsError
from jaxrl_async.mesh import NO_TURNS, SAMPLER_RULES, shardings
from jaxrl_async.model.logprobs import token_logprobs
from jaxrl_async.model.spec import ModelSpec, weight_table
from jaxrl_async.ports import Clock, WeightSource
from jaxrl_async.sampler.engine import (
    MAX_STOP_TOKENS,
    Engine,
    Output,
    Slot,
    Status,
    pad_stop_ids,
    request_keys,
)
from jaxrl_async.sampler.sampling import Controls
from jaxrl_async.sampler.schedule import Prefill, live_bucket, plan, rows_bucket
from jaxrl_async.types import Completion, IntArray, Request, StopReason, VersionedParams

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Probe:
    """A fixed sequence on which the sampler's log-probs must agree with the trainer's."""

    token_ids: IntArray  # [probe] int32
    tolerance: float  # largest difference, nats


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplerStats:
    """Counters since the start; read the difference of two."""

    busy_s: float = 0.0  # thread at work, seconds
    idle_s: float = 0.0  # nothing to decode, seconds
    blocks: int = 0
    slot_steps: int = 0  # slots times decode steps
    used_slot_steps: int = 0  # of those, the ones that drew a token
    generated_tokens: int = 0
    prefill_tokens: int = 0  # of distinct prompts, padding not counted
    requests_done: int = 0
    truncated: int = 0  # ended by length
    cancelled: int = 0
    swaps: int = 0
    swap_pause_s: float = 0.0  # the last swap's pause between two blocks, probe included, seconds
    max_swap_pause_s: float = 0.0
    probe_error: float = 0.0  # largest difference on the last probe, nats
    max_probe_error: float = 0.0
    compiled_programs: int = 0


@dataclass(slots=True, kw_only=True)
class _Waiter:
    """A request on its way: who waits for it, and where it is."""

    request: Request
    max_new: int
    queued_at: float
    future: Any  # asyncio.Future or concurrent.futures.Future
    loop: asyncio.AbstractEventLoop | None = None
    started_at: float = 0.0
    length: int = 0  # upper bound of the tokens in its slot's cache

    @property
    def cancelled(self) -> bool:
        return bool(self.future.cancelled())


class Sampler:
    """Continuous batching over fixed slots. Thread safe: submit from anywhere."""

    def __init__(
        self,
        policy: Any,
        *,
        section: schema.Sampler | None = None,
        mesh: Mesh | None = None,
        seed: int = 0,
        dtype: Any = jnp.float32,
        weights: WeightSource | None = None,
        version: int = 0,
        probe: Probe | None = None,
        turns: AbstractContextManager[Any] = NO_TURNS,
        clock: Clock = time.perf_counter,
    ) -> None:
        """policy: a Policy, or (ModelSpec, params). Parameters are placed on the mesh by
        SAMPLER_RULES."""
        spec, params = policy if isinstance(policy, tuple) else (policy.spec, policy.params)
        self.section = section or schema.Sampler()
        self.engine = Engine(
            spec,
            slots=self.section.slots,
            max_length=self.section.max_length,
            max_new_tokens=self.section.max_new_tokens,
            mesh=mesh,
            dtype=dtype,
        )
        if mesh is not None:
            params = jax.device_put(params, shardings(weight_table(spec), mesh, SAMPLER_RULES))
        self._spec, self._params, self.version = spec, params, version
        self._weights, self._probe, self._turns, self._clock = weights, probe, turns, clock
        self._keys_of = lambda ids: request_keys(seed, ids)
        self._probe_logprobs = jax.jit(lambda p, t: _sequence_logprobs(spec, p, t, dtype))
        self._queue: deque[_Waiter] = deque()
        self._running: dict[int, _Waiter] = {}
        self._wake, self._lock = threading.Event(), threading.Lock()
        self._closed = False
        self.error: BaseException | None = None
        self._stats = SamplerStats()
        self._thread: threading.Thread | None = None
        if weights is not None and hasattr(weights, "attach"):
            weights.attach(self._wake)

    # ---- any thread

    def start(self) -> None:
        """Start the thread; done by the first request where nobody did it."""
        with self._lock:
            if self._thread is None and not self._closed:
                self._thread = threading.Thread(target=self._main, name="sampler", daemon=True)
                self._thread.start()

    def close(self) -> None:
        """Stop at the next block boundary; who still waits gets Closed. Idempotent."""
        with self._lock:
            self._closed = True
        self._wake.set()
        if self._thread is not None:
            self._thread.join()
        self._fail_all(self.error or Closed("the sampler was closed before the request was done"))

    def generate(self, requests: Sequence[Request]) -> list[Completion]:
        """Complete all requests, in order; blocks. Raises RolloutError for one that cannot be
        served."""
        futures: list[Future[Completion]] = [Future() for _ in requests]
        self._enqueue(requests, futures, None)
        return [f.result() for f in futures]

    async def submit(self, request: Request) -> Completion:
        """Complete one request; cancelling the task frees its slot at the next block."""
        return await self.submit_many([request])[0]

    def submit_many(self, requests: Sequence[Request]) -> list[asyncio.Future[Completion]]:
        """Queue all requests at once, in order; futures of the running event loop
        (ports.Generate)."""
        loop = asyncio.get_running_loop()
        futures: list[asyncio.Future[Completion]] = [loop.create_future() for _ in requests]
        self._enqueue(requests, futures, loop)
        return futures

    def stats(self) -> SamplerStats:
        """A consistent reading of the counters."""
        return self._stats

    def _enqueue(self, requests: Sequence[Request], futures: Sequence[Any], loop: Any) -> None:
        now = self._clock()
        waiters = [
            _Waiter(request=r, max_new=self._max_new(r), queued_at=now, future=f, loop=loop)
            for r, f in zip(requests, futures, strict=True)
        ]
        self.start()
        with self._lock:
            if self.error is not None:
                raise self.error
            if self._closed:
                raise Closed("the sampler is closed")
            self._queue.extend(waiters)
        self._wake.set()

    def _max_new(self, request: Request) -> int:
        """Tokens to draw at most: the request's wish within what the slot can hold. Raises
        RolloutError."""
        prompt, longest = len(request.token_ids), self.engine.max_length
        asked = request.forced_length or request.max_new_tokens
        if not 0 < prompt < longest:
            raise RolloutError(
                f"request {request.request_id}: the prompt has {prompt} tokens, but a slot holds "
                f"{longest} "
                "with at least one new token. Shorten the prompt or raise sampler.max_length."
            )
        if asked < 1 or len(request.stop_token_ids) > MAX_STOP_TOKENS:
            raise RolloutError(
                f"request {request.request_id}: needs max_new_tokens >= 1 (got {asked}) and at "
                "most "
                f"{MAX_STOP_TOKENS} stop tokens (got {len(request.stop_token_ids)})."
            )
        return min(asked, self.engine.max_new, longest - prompt)

    # ---- the sampler's thread

    def _main(self) -> None:
        """Decode for ever.

        consumes      requests from the queue, weights from the source
        waits for     self._wake            set by submit, by new weights and by close, only when
        idle produces      completions into the waiters' futures
        on failure    every waiter gets the exception; `error` keeps it
        """
        try:
            with self._turns:
                self._state = self.engine.init_decode_state()
            while not self._closed:
                start = self._clock()
                idle = not self._running and not self._queue
                if idle:
                    self._wake.wait()
                    self._wake.clear()
                woken = self._clock()
                self._take_weights(wait=idle)
                self._cancel()
                self._one_block()
                self._count(
                    idle_s=woken - start if idle else 0.0,
                    busy_s=self._clock() - (woken if idle else start),
                )
        except BaseException as error:
            with self._lock:
                self.error, self._closed = error, True
            log.error("the sampler stopped: %s", error)
            self._fail_all(error)

    def _one_block(self) -> None:
        """Fill free slots, decode one block, hand out what finished while the next thing
        happens."""
        with self._turns:
            self._admit()
            if not self._running:
                return
            status = self._dispatch()
            finished = [s for s in self._running if not status.active[s]]
            output = self._take(finished) if finished else None
        if output is not None:
            self._finish(finished, output)

    def _admit(self) -> None:
        """Prefill and insert as many queued requests as there are free slots."""
        free = [s for s in range(self.engine.slots) if s not in self._running]
        if not free or not self._queue:
            return
        with self._lock:
            wanted = [w for w in self._queue if not w.cancelled]
            self._count(cancelled=len(self._queue) - len(wanted))
            waiters = wanted[: len(free)]
            self._queue = deque(wanted[len(free) :])
        if not waiters:
            return
        by_request = {id(w.request): w for w in waiters}
        now = self._clock()
        for prefill in plan([w.request for w in waiters], free, self.engine.max_length):
            self._start(prefill, [by_request[id(r)] for r in prefill.requests])
        for waiter in waiters:
            waiter.started_at = now

    def _start(self, prefill: Prefill, waiters: Sequence[_Waiter]) -> None:
        """One prefill program and one bulk insert."""
        rows = rows_bucket(len(prefill.prompts))
        tokens = np.zeros((rows, prefill.bucket), np.int32)
        lengths = np.ones(rows, np.int32)
        for row, request in enumerate(prefill.prompts):
            lengths[row] = len(request.token_ids)
            tokens[row, : lengths[row]] = request.token_ids
        prefix = self.engine.prefill_multisampling(self._params, tokens, lengths, self.version)
        size = self.engine.slots
        self._state = self.engine.bulk_insert(
            prefix,
            self._state,
            rows=_padded(prefill.rows, size, 0),
            slots=_padded(prefill.slots, size, size),
            ask=self._ask(waiters, size),
        )
        for waiter, slot in zip(waiters, prefill.slots, strict=True):
            waiter.length = len(waiter.request.token_ids)
            self._running[slot] = waiter
        self._count(prefill_tokens=int(lengths[: len(prefill.prompts)].sum()))

    def _ask(self, waiters: Sequence[_Waiter], size: int) -> Slot:
        """The requests' wishes as arrays [size]; the rest is padding."""
        requests = [w.request for w in waiters]
        sampling = [r.sampling for r in requests]
        ids = np.zeros((size, 2), np.int32)
        ids[: len(requests)] = [r.key for r in requests]
        stops = np.full((size, MAX_STOP_TOKENS), -1, np.int32)
        stops[: len(requests)] = [pad_stop_ids(r.stop_token_ids) for r in requests]
        return Slot(
            Controls(
                _padded([s.temperature for s in sampling], size, 1.0, np.float32),
                _padded([s.top_k for s in sampling], size, 0),
                _padded([s.top_p for s in sampling], size, 1.0, np.float32),
                _padded([s.min_p for s in sampling], size, 0.0, np.float32),
            ),
            np.asarray(self._keys_of(ids)),
            stops,
            _padded([w.max_new for w in waiters], size, 1),
            _padded([r.forced_length is not None for r in requests], size, False, np.bool_),
        )

    def _dispatch(self) -> Status:
        """One decode block; waits for its status, a few bytes per slot."""
        steps = self.section.block
        longest = max(w.length for w in self._running.values())
        self._state, status = self.engine.generate(
            self._params,
            self._state,
            version=self.version,
            steps=steps,
            live=live_bucket(longest, steps, self.engine.max_length),
            plain=not any(_truncates(w.request) for w in self._running.values()),
        )
        status = Status(*jax.device_get(status))
        for waiter in self._running.values():
            waiter.length += int(status.steps)
        self._count(
            blocks=1,
            slot_steps=int(status.steps) * self.engine.slots,
            used_slot_steps=int(status.used),
            generated_tokens=int(status.used),
        )
        return status

    def _take(self, slots: Sequence[int]) -> Output:
        """Drawn tokens of finished slots, on the host; the slots are free afterwards."""
        size = 8
        while size < len(slots):
            size *= 4
        return Output(*jax.device_get(self.engine.take(self._state, _padded(slots, size, 0))))

    def _finish(self, slots: Sequence[int], output: Output) -> None:
        """Completions into futures, one wake-up per event loop."""
        done = []
        now = self._clock()
        for i, slot in enumerate(slots):
            waiter = self._running.pop(slot)
            done.append((waiter, _completion(waiter, output, i, now)))
        self._count(
            requests_done=len(done), truncated=sum(c.stop is StopReason.LENGTH for _, c in done)
        )
        _resolve(done)

    def _cancel(self) -> None:
        """Free the slots of requests that nobody waits for any more."""
        slots = [s for s, w in self._running.items() if w.cancelled]
        if slots:
            for slot in slots:
                del self._running[slot]
            with self._turns:
                size = self.engine.slots
                self._state = self.engine.free_resource(self._state, _padded(slots, size, size))
            self._count(cancelled=len(slots))

    def _take_weights(self, *, wait: bool) -> None:
        """Swap to the newest complete weights: a pointer, between two blocks. KV and programs
        stay."""
        if self._weights is None:
            return
        start = self._clock()
        update = self._weights.poll(wait=wait)
        if update is None:
            return
        error = self._check_probe(update)
        self._params, self.version = update.params, update.version
        pause = self._clock() - start
        self._count(swaps=1)
        self._stats = replace(
            self._stats,
            swap_pause_s=pause,
            max_swap_pause_s=max(pause, self._stats.max_swap_pause_s),
            probe_error=error,
            max_probe_error=max(error, self._stats.max_probe_error),
        )
        self._weights.live(update.version)

    def _check_probe(self, update: VersionedParams) -> float:
        """Largest difference to the trainer's log-probs, nats. Raises WeightsError above the
        tolerance."""
        if self._probe is None or update.probe_logprobs is None:
            return 0.0
        with self._turns:
            ours = np.asarray(self._probe_logprobs(update.params, self._probe.token_ids))
            theirs = np.asarray(update.probe_logprobs)
        error = float(np.max(np.abs(ours - theirs)))
        if not error <= self._probe.tolerance:
            raise WeightsError(
                f"weights of version {update.version}: the sampler's log-probs on the probe "
                "differ from the "
                f"trainer's by {error:.3g} nats, more than weights.probe_tolerance "
                f"({self._probe.tolerance:.3g}). The transfer or the sampler's number type is to "
                "blame: "
                "compare weights.dtype with model.dtype, or raise the tolerance for bfloat16."
            )
        return error

    def _count(self, **more: float) -> None:
        """Add to the counters. The tuple is replaced whole, so that readers never see half a
        change."""
        added = {k: getattr(self._stats, k) + v for k, v in more.items()}
        self._stats = replace(self._stats, **added, compiled_programs=self.engine.num_compiled)

    def _fail_all(self, error: BaseException) -> None:
        with self._lock:
            waiters = [*self._queue, *self._running.values()]
            self._queue.clear()
            self._running.clear()
        _resolve([(w, error) for w in waiters])


def _completion(waiter: _Waiter, output: Output, row: int, now: float) -> Completion:
    n = int(output.drawn[row])
    tokens = output.tokens[row, :n].copy()
    request = waiter.request
    stopped = request.forced_length is None and n and int(tokens[-1]) in request.stop_token_ids
    return Completion(
        request_id=request.request_id,
        token_ids=tokens,
        logprobs=output.logprobs[row, :n].copy(),
        versions=output.versions[row, :n].copy(),
        stop=StopReason.EOS if stopped else StopReason.LENGTH,
        queued_s=waiter.started_at - waiter.queued_at,
        latency_s=now - waiter.queued_at,
    )


def _resolve(done: Sequence[tuple[_Waiter, Completion | BaseException]]) -> None:
    """Set results; asyncio futures on their own loop, all of a loop in one call."""
    by_loop: dict[Any, list[tuple[Any, Completion | BaseException]]] = {}
    for waiter, result in done:
        by_loop.setdefault(waiter.loop, []).append((waiter.future, result))
    for loop, results in by_loop.items():
        if loop is None:
            _set(results)
        elif not loop.is_closed():
            loop.call_soon_threadsafe(_set, results)


def _set(results: Sequence[tuple[Any, Completion | BaseException]]) -> None:
    for future, result in results:
        if future.cancelled() or future.done():
            continue
        if isinstance(result, BaseException):
            future.set_exception(result)
        else:
            future.set_result(result)


def _truncates(request: Request) -> bool:
    s = request.sampling
    return s.top_k > 0 or s.top_p < 1.0 or s.min_p > 0.0


def _padded(values: Sequence[Any], size: int, fill: Any, dtype: Any = np.int32) -> np.ndarray:
    padded = np.full(size, fill, dtype)
    padded[: len(values)] = values
    return padded


def _sequence_logprobs(spec: ModelSpec, params: Any, token_ids: Any, dtype: Any) -> Any:
    """[n - 1] float32: log-probs of token_ids[1:] of one sequence."""
    tokens = jnp.asarray(token_ids)[None]
    positions = jnp.arange(tokens.shape[1])[None]
    logprobs, _ = token_logprobs(
        spec, params, tokens, positions, jnp.ones_like(tokens), dtype=dtype, chunk=tokens.shape[1]
    )
    return logprobs[0, 1:]
