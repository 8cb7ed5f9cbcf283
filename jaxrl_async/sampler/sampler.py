"""The sampler: one thread that decodes without ever stopping while there is work.

        submit ──> queue ──admit──> prefill ──> [ decode block ] ──> finished ──> futures
                                                  ^      │ 12 bytes a token
        WeightSource.poll ──between two blocks────┘      v
                                          host work while the next block runs

What happens on the device, and to whom, is decided in batch/batch.py; this file is the thread,
the futures, and the moment of the swap. Only the sampler's thread changes the batch, and while it
waits for a block nothing of it changes: then any thread may read it (`progress`).
"""

import asyncio
import contextlib
import copy
import itertools
import logging
import math
import os
import threading
import time
import traceback
import weakref
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, InvalidStateError
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Self

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from jaxrl_async.config import schema
from jaxrl_async.errors import Closed, ConfigError, RolloutError, WeightsError
from jaxrl_async.mesh import NO_DEVICE_LOCK, SAMPLER_RULES, shardings
from jaxrl_async.model.decoder import DecoderSettings, TokenRows
from jaxrl_async.model.logprobs import token_logprobs
from jaxrl_async.model.quantize import table_of
from jaxrl_async.model.spec import ModelSpec, check_positions, weight_table
from jaxrl_async.ports import Clock, Intake, NotYet, Schedule, WeightSource
from jaxrl_async.sampler.batch.batch import Batch, Output, Sequence_
from jaxrl_async.sampler.batch.kv_budget import MemoryPlan, plan_memory
from jaxrl_async.sampler.device.engine import Engine
from jaxrl_async.sampler.lifetime import check_here, close_at_exit, serve
from jaxrl_async.sampler.partial import branches
from jaxrl_async.sampler.request_checks import (
    INT32_END,
    Room,
    checked_partial,
    checked_request,
    num_wanted,
)
from jaxrl_async.types import Completion, IntArray, Partial, Request, StopReason, VersionedParams

log = logging.getLogger(__name__)

PROGRESS_S = 30.0
"""Longest wait of `progress` for a moment when the batch does not change, seconds."""
LEAST_WAIT_S = 0.1
"""How often `progress` looks whether the sampler was given up meanwhile, seconds."""
LOOK_S = 0.002
"""How often a replay looks whether what was recorded has come, seconds."""
CLOSE_S = 60.0
"""Longest wait for the thread to end, seconds; one that hangs is left alone."""
LONGEST = 2048
"""Longest sequence of a sampler that was given no settings, tokens, where the model goes so far."""
CLOSED = "the sampler was closed before the request was done"
"""What is told to who waits for one that is closed."""
FRESH = -1
"""First number of the keys of requests that came without one: no prompt has it."""


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
    row_steps: int = 0  # rows that were computed times decode steps
    used_slot_steps: int = 0  # of slot_steps, the ones that drew a token
    waiting_slot_steps: int = 0  # slot_steps of blocks at whose end requests still waited
    waiting_used_slot_steps: int = 0
    generated_tokens: int = 0
    prefill_tokens: int = 0  # computed, padding not counted
    recomputed_tokens: int = 0  # of those, a second time: after a swap or a preemption
    prefix_hit_tokens: int = 0  # prompt tokens found in the prefix store
    prefix_asked_tokens: int = 0  # prompt tokens looked up there
    evicted_pages: int = 0
    requests_done: int = 0
    truncated: int = 0  # ended by length
    cancelled: int = 0
    failed: int = 0  # requests that raised on the sampler's thread, each alone
    preempted: int = 0  # gave their pages up for a while: memory was short
    restarted: int = 0  # began again after a swap
    discarded_tokens: int = 0  # drawn, then thrown away by a restart
    in_flight: int = 0  # requests with a place now
    waiting: int = 0  # requests without one now
    used_page_share: float = 0.0  # of the KV pages, now; the prefix store's included
    swaps: int = 0
    swap_pause_s: float = 0.0  # the last swap's pause between two blocks, probe included, seconds
    max_swap_pause_s: float = 0.0
    probe_error: float = 0.0  # largest difference on the last probe, nats
    max_probe_error: float = 0.0
    compiled_programs: int = 0


@dataclass(slots=True, kw_only=True)
class _Waiter:
    """Who waits for a request, and since when."""

    request: Request
    queued_at: float
    future: Any  # asyncio.Future or concurrent.futures.Future
    loop: asyncio.AbstractEventLoop | None = None
    started_at: float | None = None
    first_token_at: float | None = None


class Sampler:
    """Continuous batching over slots and pages. Thread safe: submit from anywhere.

    A context manager: leaving it closes it. One that nobody holds any more ends once its requests
    are done, and what is still open when the program ends is closed.
    """

    def __init__(
        self,
        policy: Any,
        *,
        section: schema.SamplerSection | None = None,
        mesh: Mesh | None = None,
        seed: int = 0,
        dtype: Any = jnp.float32,
        weights: WeightSource | None = None,
        version: int = 0,
        probe: Probe | None = None,
        device_lock: AbstractContextManager[Any] = NO_DEVICE_LOCK,
        schedule: Schedule | None = None,
        clock: Clock = time.perf_counter,
        one_thread: bool = False,
        keep_routing: bool = False,
        name: str = "sampler",
    ) -> None:
        """policy: a Policy, or (ModelSpec, params). Parameters are placed on the mesh by
        SAMPLER_RULES. section: null: any prompt and answer up to LONGEST tokens together, or what
        the model was made for, in as much KV memory as the section's defaults take. schedule:
        told of what is taken in between which blocks, or prescribes it.
        one_thread: on a CPU, use one core only (several samplers side by side). keep_routing:
        completions tell each token's experts; of a mixture of experts alone (ConfigError)."""
        if not isinstance(seed, int | np.integer) or not -INT32_END <= seed < INT32_END:
            raise ConfigError(f"Sampler: seed must be a whole number of 32 bits, not {seed!r}.")
        spec, params = policy if isinstance(policy, tuple) else (policy.spec, policy.params)
        self.section = section or roomy_section(spec, dtype)
        check_positions(spec, self.section.max_length, "sampler.max_length", "the policy")
        self.plan = kv_plan(spec, self.section, dtype)
        self.engine = make_engine(
            spec,
            self.plan,
            self.section,
            mesh,
            dtype=dtype,
            one_thread=one_thread,
            keep_routing=keep_routing,
        )
        if mesh is not None:
            table = table_of(weight_table(spec), params)
            params = jax.device_put(params, shardings(table, mesh, SAMPLER_RULES))
        self.seed, self._name, self._schedule = seed, name, schedule
        self._keys = itertools.count()  # of requests that came without one
        self._room = Room(
            max_length=self.section.max_length,
            max_new_tokens=self.section.max_new_tokens,
            vocab=spec.vocab,
            seed=seed,
            kv_shape=(spec.layers, spec.kv_heads, spec.head_dim),
            kv_dtype=jnp.dtype(dtype).name,
            experts=(spec.layers, spec.experts_per_token, spec.experts) if keep_routing else None,
        )
        self._rounds = 0  # that ran: waiting does not count
        self._idle_s: float | None = None  # longest sleep; a replay may sleep through a wake-up
        self._probe, self._device_lock, self._clock = probe, device_lock, clock
        self._probe_logprobs = lambda p, t: _sequence_logprobs(spec, p, t, jnp.dtype(dtype))
        self._begin(version, self.engine.prepare(params), weights)

    def _begin(self, version: int, prepared: Any, weights: WeightSource | None) -> None:
        """Everything that changes, as it is before the first request."""
        self.version, self._prepared, self._weights = version, prepared, weights
        self._incoming: list[Sequence_] = []
        self._commands: list[tuple[Callable[[], Any], Future[Any]]] = []
        self._arrived: VersionedParams | None = None  # polled, not taken yet (in a replay)
        self._staged: VersionedParams | None = None  # waits until running sequences are done
        self._wake, self._lock = threading.Event(), threading.Lock()
        self._changing = threading.Lock()  # held while the batch, or what it finished, changes
        self._closed = False
        self._pid = os.getpid()
        self._idle_from: float | None = None  # since when it has had nothing to do
        self.error: BaseException | None = None
        self.blamed: frozenset[str] = frozenset()  # ids that were on the device when it failed
        self._finished: list[tuple[Sequence_, Output]] = []  # not handed out yet
        self._stats = SamplerStats()
        self._thread: threading.Thread | None = None
        self._batch: Any = None  # a Batch, once the thread has begun
        self._heir: Any = None  # the end of the weights that a successor was to have
        if weights is not None and hasattr(weights, "attach"):
            weights.attach(self._wake)

    # ---- any thread

    def start(self) -> None:
        """Start the thread; done by the first request where nobody did it."""
        with self._lock:
            if self._thread is None and not self._closed:
                self._thread = threading.Thread(
                    target=serve,
                    args=(weakref.ref(self), self._wake, Sampler._go_on),
                    name=self._name,
                    daemon=True,
                )
                close_at_exit(self)
                self._thread.start()

    def close(self) -> None:
        """Stop at the next block boundary; who still waits gets Closed. Idempotent."""
        if os.getpid() != self._pid:
            return  # a fork: the thread, and who waits, are the other process's
        with self._lock:
            self._closed = True
        self._wake.set()
        if self._thread is threading.current_thread():
            return  # in a callback: the thread fails the others itself
        if self._thread is not None:
            self._thread.join(CLOSE_S)
            if self._thread.is_alive():
                log.error("the thread of %s did not end within %.0f s", self._name, CLOSE_S)
        self._fail_all(self.error or Closed(CLOSED))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def check_waits(self) -> None:
        """Raise RolloutError where waiting for this sampler would never end: on its own thread, or
        in a forked process."""
        check_here(self, self._pid, (self._thread,))

    def abandon(self) -> None:
        """Leave the thread to itself, dead or hanging: what it still says is ignored, no update of
        the weights waits for it, and it ends where it ever wakes up."""
        with self._lock:
            self._closed = True
            commands, self._commands = self._commands, []
        self._wake.set()
        weights: Any = self._weights
        if hasattr(weights, "leave"):
            weights.leave()
        for _, future in commands:
            future.set_exception(self.error or Closed("the sampler was taken out: it hangs"))

    def successor(self) -> "Sampler":
        """Another in the place of this one, which was abandoned: same engine, seed and settings,
        the newest weights, nothing under way. Waits for weights that are on their way.

        Raises Closed and WeightsError, as the channel does.
        """
        if self.error is not None:  # it holds the KV, and there is no room for another
            traceback.clear_frames(self.error.__traceback__)
            self._batch = None
        weights: Any = self._heir or self._weights
        if not hasattr(weights, "rejoin"):
            return self._replaced(weights, None)
        weights = self._heir = weights.rejoin()
        try:
            return self._replaced(weights, weights.poll(wait=True))
        except BaseException:
            weights.leave()
            raise

    def _replaced(self, weights: Any, update: VersionedParams | None) -> "Sampler":
        """A copy that begins anew; update: null where this one drew from the newest weights."""
        version, prepared = self.version, self._prepared
        if update is not None:
            version, prepared = update.version, self.engine.prepare(update.params)
        assert prepared is not None, "what was taken and is not live is staged again"
        other = copy.copy(self)
        other._begin(version, prepared, weights)
        if update is not None:
            weights.live(version)
        return other

    def generate(self, requests: Sequence[Request]) -> list[Completion]:
        """Complete all requests, in order; blocks. Raises RolloutError for one that cannot be
        served. Where it ends by an exception, Ctrl-C's too, what is not done is cancelled."""
        self.check_waits()
        with cancelled_on_error([Future() for _ in requests]) as futures:
            self._enqueue(requests, futures, None)
            return [f.result() for f in futures]

    def start_many(self, requests: Sequence[Request | Partial]) -> list[Future[Completion]]:
        """Queue all requests at once, in order; futures for threads. As submit_many."""
        futures: list[Future[Completion]] = [Future() for _ in requests]
        self._enqueue(requests, futures, None)
        return futures

    def checked(self, requests: Sequence[Request | Partial]) -> list[Request | Partial]:
        """The requests as this sampler will serve them, those without a key with a fresh one.
        Raises RolloutError for one that cannot be served, which names the field."""
        return [
            checked_partial(r, self._room)
            if isinstance(r, Partial)
            else self._keyed(checked_request(r, self._room))
            for r in requests
        ]

    def _keyed(self, request: Request) -> Request:
        if request.key is not None:
            return request
        return replace(request, key=(FRESH, next(self._keys) % INT32_END))

    async def submit(self, request: Request) -> Completion:
        """Complete one request; cancelling the task frees its slot at the next block."""
        return await self.submit_many([request])[0]

    def submit_many(
        self, requests: Sequence[Request | Partial]
    ) -> list[asyncio.Future[Completion]]:
        """Queue all requests at once, in order; futures of the running event loop (ports.Generate).

        A Partial in place of a request goes on where it was saved, as in `resume`.
        """
        loop = asyncio.get_running_loop()
        futures: list[asyncio.Future[Completion]] = [loop.create_future() for _ in requests]
        self._enqueue(requests, futures, loop)
        return futures

    def progress(self) -> tuple[Partial, ...]:
        """All requests under way that have drawn something (ports.SavesProgress), without KV, as
        the last block left them; does not wait for the one that runs. What is done by then is in
        its future already. Raises TimeoutError where the batch changes for PROGRESS_S."""
        self.check_waits()
        until = time.monotonic() + PROGRESS_S
        while time.monotonic() < until:
            held = self._changing.acquire(timeout=LEAST_WAIT_S)
            try:
                if self._closed:  # also where a thread that hangs never lets go
                    raise self.error or Closed("the sampler is closed")
                if held and not self._finished:  # else handed out soon, when a replay does it, too
                    return self._progress()
            finally:
                if held:
                    self._changing.release()
            time.sleep(LOOK_S)
        raise TimeoutError(f"{self._name} did not come to a block for {PROGRESS_S:.0f} s")

    def save(self, request_id: str, *, stop: bool = False, with_kv: bool = True) -> Partial:
        """A request under way as data, between two blocks; blocks until then.

        stop: it ends here, with what it drew and StopReason.CANCELLED. with_kv: its KV too, where
        one version of the weights made all of it. Raises RolloutError where there is none such.
        """
        return self._on_thread(lambda: self._save(request_id, stop, with_kv))

    def resume(self, partials: Sequence[Partial]) -> list[Completion]:
        """Go on with saved requests; blocks. Completions hold what was drawn before as well.

        With the weights that drew it, the tokens are those of an uninterrupted run. Raises
        RolloutError for one of another seed (its random numbers would be others), and for one that
        may draw no further token.
        """
        self.check_waits()
        with cancelled_on_error([Future() for _ in partials]) as futures:
            self._enqueue(partials, futures, None)
            return [f.result() for f in futures]

    def fork(self, partial: Partial, count: int) -> list[Completion]:
        """Continue one saved prefix in `count` ways; blocks. Its KV is restored once and shared."""
        return self.resume(branches(partial, count))

    def has(self, request_id: str) -> bool:
        """Whether a request of this id is under way; answered between two blocks."""
        return bool(self._on_thread(lambda: self._find(request_id) is not None))

    def stats(self) -> SamplerStats:
        """A consistent reading of the counters."""
        return self._stats

    def _enqueue(
        self, requests: Sequence[Request | Partial], futures: Sequence[Any], loop: Any
    ) -> None:
        check_here(self, self._pid)
        now = self._clock()
        sequences = []
        for given, future in zip(self.checked(requests), futures, strict=True):
            request = given.request if isinstance(given, Partial) else given
            sequences.append(
                Sequence_(
                    request=request,
                    max_new=num_wanted(request),
                    owner=_Waiter(request=request, queued_at=now, future=future, loop=loop),
                    partial=given if isinstance(given, Partial) else None,
                )
            )
        self.start()
        with self._lock:
            if self.error is not None:
                raise self.error
            if self._closed:
                raise Closed("the sampler is closed")
            self._incoming.extend(sequences)
        self._wake.set()

    def _on_thread(self, command: Callable[[], Any]) -> Any:
        """Run something on the sampler's thread between two blocks, and wait for its result."""
        self.check_waits()
        future: Future[Any] = Future()
        self.start()
        with self._lock:
            if self._closed:
                raise self.error or Closed("the sampler is closed")
            self._commands.append((command, future))
        self._wake.set()
        return future.result()

    # ---- the sampler's thread

    def _go_on(self) -> float | None:
        """One round, and how long to sleep after it (lifetime.serve); None: it is over.

        consumes      requests and commands of other threads, weights from the source
        waits for     self._wake, only when idle: set by submit, by new weights and by close
        produces      completions into the waiters' futures
        on failure    what one request caused is that request's; else every waiter gets the
                      exception, and `error` keeps it
        """
        came = True
        try:
            if self._closed:
                self._fail_all(self.error or Closed(CLOSED))
                return None
            if self._batch is None:
                self._open_batch()
            else:
                came = self._round()
        except BaseException as error:
            with self._lock:
                self.blamed = frozenset(s.request.request_id for s in self._on_device())
                self.error, self._closed = error, True
            log.error("the sampler stopped: %s", error, exc_info=error)
            self._fail_all(error)
            return None
        if self._busy:
            return 0.0 if came else LOOK_S
        self._idle_from = self._clock()
        sleep_s = math.inf if self._idle_s is None else self._idle_s
        return sleep_s if came else LOOK_S

    @property
    def _busy(self) -> bool:
        """Whether there is anything to do."""
        batch = self._batch
        work = batch.placed or batch.queue or self._incoming or self._commands or self._closed
        return bool(work) or self._staged is not None

    def _open_batch(self) -> None:
        with self._device_lock:
            self._batch = Batch(
                self.engine,
                max_new=self.section.max_new_tokens,
                seed=self.seed,
                prefill_chunk=self.section.prefill_chunk,
                prefix_cache=self.section.prefix_cache,
                one_version=self.section.on_new_weights == "restart",
            )
        self._batch.new_version(self.version)

    def _round(self) -> bool:
        """What happens between two blocks, and one block. False: what a replay waits for has not
        come."""
        start, batch = self._clock(), self._batch
        since, self._idle_from = self._idle_from, None
        with self._changing:
            if not self._take_in(wait=since is not None):
                return False
        if batch.placed or batch.queue:
            self._rounds += 1
            with self._device_lock:
                with self._changing:
                    batch.admit(only_begun=self._staged is not None)
                    self._mark_started()
                    batch.prefill(self._prepared)
                    batch.start_block(self._prepared)
                    self._hand_out()
                block = batch.wait_for_block()
                with self._changing:
                    for sequence in batch.finish_block(block):
                        batch.guarded(sequence, self._end)
        with self._changing:
            self._mark_drawn()
            if not batch.placed:  # no block will run: nothing to overlap with
                self._hand_out()
            self._count(
                idle_s=start - since if since is not None else 0.0, busy_s=self._clock() - start
            )
        return True

    def _end(self, sequence: Sequence_) -> None:
        self._finished.append((sequence, self._batch.end(sequence)))

    def _run_commands(self) -> None:
        with self._lock:
            commands, self._commands = self._commands, []
        for command, future in commands:
            try:
                future.set_result(command())
            except Exception as error:
                future.set_exception(error)

    def _take_in(self, *, wait: bool) -> bool:
        """Requests and commands of other threads, and weights; requests that nobody waits for any
        more go.

        In a replay exactly what was recorded here; False: it has not all come yet.
        """
        working = bool(self._batch.placed or self._batch.queue)
        schedule = self._schedule
        due = schedule.due(self._name, self._rounds, working) if schedule is not None else None
        self._idle_s = None if due is None else LOOK_S
        if isinstance(due, NotYet) or (due is not None and not self._has_come(due)):
            self._run_commands()
            self._take_weights(None)  # recorded when they were staged
            self._hand_out()  # no block may run for long, and `progress` waits for this
            return False
        with self._lock:
            incoming, self._incoming = self._incoming, []
            if due is not None:
                by_id = {s.request.request_id: s for s in incoming}
                taken = [by_id[i] for i in due.requests]
                self._incoming = [s for s in incoming if s not in taken]
                incoming = taken
        self._batch.queue.extend(incoming)
        self._run_commands()
        gone = [s for s in self._given_up() if due is None or s.request.request_id in due.cancelled]
        for sequence in gone:
            self._batch.cancel(sequence)
        self._count(cancelled=len(gone))
        update = self._next_weights(due, wait)
        if schedule is not None and (incoming or gone or update):
            schedule.write(
                sampler=self._name,
                block=self._rounds,
                take=[s.request.request_id for s in incoming],
                cancel=[s.request.request_id for s in gone],
                version=update.version if update else None,
            )
        self._take_weights(update)
        return True

    def _given_up(self) -> list[Sequence_]:
        """Whom nobody waits for any more, of those with a place, and of the queue as far as any
        could get one now: a look costs no more where many wait."""
        gone = [s for s in self._batch.placed.values() if s.owner.future.cancelled()]
        wanted = 0
        for sequence in self._batch.queue:
            if sequence.owner.future.cancelled():
                gone.append(sequence)
            else:
                wanted += 1
                if wanted == self.engine.places:
                    break
        return gone

    def _has_come(self, due: Intake) -> bool:
        """Whether all that was recorded for this moment is here."""
        with self._lock:
            incoming = {s.request.request_id: s for s in self._incoming}
        if not incoming.keys() >= {*due.requests}:
            return False
        known = [*self._batch.queue, *self._batch.placed.values()]
        by_id = {s.request.request_id: s for s in known} | incoming
        if not all(i in by_id and by_id[i].owner.future.cancelled() for i in due.cancelled):
            return False
        if due.version is not None and self._arrived is None and self._weights is not None:
            self._arrived = self._weights.poll(wait=True)
        return due.version is None or self._arrived is not None

    def _next_weights(self, due: Intake | None, wait: bool) -> VersionedParams | None:
        if due is not None:
            update, self._arrived = self._arrived, None
            return update
        if self._weights is None or self._staged is not None:
            return None
        return self._weights.poll(wait=wait)

    def _mark_started(self) -> None:
        now = self._clock()
        for sequence in self._batch.placed.values():
            if sequence.owner.started_at is None:
                sequence.owner.started_at = now

    def _mark_drawn(self) -> None:
        now = self._clock()
        for sequence in self._batch.placed.values():
            if sequence.owner.first_token_at is None and self._batch.num_drawn(sequence):
                sequence.owner.first_token_at = now

    def _hand_out(self) -> None:
        """Completions into futures, one wake-up per event loop."""
        finished, self._finished = self._finished, []
        failed = self._batch.take_failed()
        if not finished and not failed:
            return
        now = self._clock()
        done = [(s.owner, _completion(s, output, now)) for s, output in finished]
        self._count(
            requests_done=len(done),
            truncated=sum(c.stop is StopReason.LENGTH for _, c in done),
            failed=len(failed),
        )
        _resolve([*done, *((s.owner, error) for s, error in failed)])

    def _save(self, request_id: str, stop: bool, with_kv: bool) -> Partial:
        batch, sequence = self._batch, self._find(request_id)
        if sequence is None:
            raise RolloutError(
                f"request {request_id!r} is not under way: it is done, cancelled, or was never "
                "submitted to this sampler."
            )
        with self._device_lock:
            partial = batch.snapshot(sequence, with_kv=with_kv)
        if stop:
            output = batch.output(sequence)
            batch.cancel(sequence)
            done = _completion(sequence, output, self._clock())
            _resolve([(sequence.owner, replace(done, stop=StopReason.CANCELLED))])
            self._count(cancelled=1)
        return partial

    def _progress(self) -> tuple[Partial, ...]:
        batch = self._batch
        with self._lock:
            queued = list(self._incoming)
        placed = []
        if batch is not None:
            placed = [batch.snapshot(s, with_kv=False) for s in batch.placed.values()]
            queued += batch.queue
        known = [s.partial for s in queued if s.partial is not None]
        waiting = [replace(p, kv=None, kv_version=None) for p in known]
        return tuple(p for p in (*placed, *waiting) if len(p.token_ids))

    def _find(self, request_id: str) -> Sequence_ | None:
        return next(
            (
                s
                for s in (*self._batch.placed.values(), *self._batch.queue)
                if s.request.request_id == request_id
            ),
            None,
        )

    def _take_weights(self, update: VersionedParams | None) -> None:
        """Swap to new weights, or to those that wait until running sequences are done: a pointer,
        between two blocks; no recompilation.

        sampler.on_new_weights says what becomes of running sequences. The pause counts from here
        until the next block can start.
        """
        update = self._staged or update
        if update is None:
            return
        assert self._weights is not None
        start = self._clock()
        if self.section.on_new_weights == "drain" and self._batch.under_way:
            self._staged = update
            return
        self._staged = None
        error = self._check_probe(update)
        self._prepared = None  # room for the new ones
        self._prepared, self.version = self.engine.prepare(update.params), update.version
        self._batch.new_version(update.version)
        if self.section.on_new_weights == "recompute":
            with self._device_lock:
                self._batch.recompute()
                while self._batch.prefilling:
                    self._batch.prefill(self._prepared)
                jax.block_until_ready(self._batch.state.logits)
        elif self.section.on_new_weights == "restart":
            self._batch.restart()
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
        with self._device_lock:
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
        batch, store = self._batch.stats, self._batch.store.stats()
        self._stats = replace(
            self._stats,
            **added,
            blocks=batch.blocks,
            slot_steps=batch.slot_steps,
            row_steps=batch.row_steps,
            used_slot_steps=batch.used_slot_steps,
            waiting_slot_steps=batch.waiting_slot_steps,
            waiting_used_slot_steps=batch.waiting_used_slot_steps,
            generated_tokens=batch.used_slot_steps,
            prefill_tokens=batch.prefill_tokens,
            recomputed_tokens=batch.recomputed_tokens,
            prefix_hit_tokens=store.hit_tokens,
            prefix_asked_tokens=store.asked_tokens,
            evicted_pages=store.evicted_pages,
            preempted=batch.preempted,
            restarted=batch.restarted,
            discarded_tokens=batch.discarded_tokens,
            in_flight=len(self._batch.placed),
            waiting=len(self._batch.queue),
            used_page_share=self._batch.pages.used_share,
            compiled_programs=self.engine.num_compiled,
        )

    def _on_device(self) -> list[Sequence_]:
        """Who has a place, or had one until just now."""
        placed = () if self._batch is None else self._batch.placed.values()
        return [*placed, *(s for s, _ in self._finished)]

    def _fail_all(self, error: BaseException) -> None:
        with self._lock:
            sequences, self._incoming = self._incoming, []
            commands, self._commands = self._commands, []
        batch = self._batch
        held = self._changing.acquire(timeout=LEAST_WAIT_S)  # a thread that hangs may keep it
        if batch is not None:
            sequences = [*sequences, *batch.queue, *self._on_device()]
            sequences += [s for s, _ in batch.take_failed()]
            batch.queue.clear()
            batch.placed.clear()
        if held:
            self._changing.release()
        _resolve([(s.owner, error) for s in sequences])
        for _, future in commands:
            future.set_exception(error)


def roomy_section(spec: ModelSpec, dtype: Any) -> schema.SamplerSection:
    """Settings for who gave none: sequences as long as the model, LONGEST at most, in the KV memory
    that the defaults of schema.SamplerSection take."""
    usual = schema.SamplerSection()
    plan = kv_plan(spec, usual, dtype)
    longest = min(spec.max_positions, LONGEST)
    needed = -(-longest // plan.page_tokens) * plan.page_bytes
    return usual.model_copy(
        update={
            "max_length": longest,
            "max_new_tokens": longest - 1,
            "kv_memory_mib": max(plan.kv_bytes, needed) / 2**20,
        }
    )


def kv_plan(spec: ModelSpec, section: schema.SamplerSection, dtype: Any) -> MemoryPlan:
    """Slots and pages for a model and a configuration. Raises ConfigError."""
    each = spec.kv_heads * spec.head_dim * jnp.dtype(dtype).itemsize
    mib = section.kv_memory_mib
    return plan_memory(
        token_bytes=2 * spec.layers * each,
        max_length=section.max_length,
        page_tokens=section.page_tokens,
        slots=section.slots,
        reserve_share=section.reserve,
        budget_bytes=None if mib is None else int(mib * 2**20),
    )


def make_engine(
    spec: ModelSpec,
    plan: MemoryPlan,
    section: schema.SamplerSection,
    mesh: Mesh | None,
    *,
    dtype: Any,
    one_thread: bool = False,
    keep_routing: bool = False,
) -> Engine:
    """The programs of a sampler on this mesh. Raises ConfigError."""
    if keep_routing and not spec.experts:
        raise ConfigError(
            f"keep_routing needs a mixture of experts, but the {spec.family} model is dense: its "
            "tokens are not routed. Leave it out."
        )
    return Engine(
        spec,
        slots=plan.slots,
        reserve=plan.reserve,
        max_length=section.max_length,
        pages=plan.pages,
        page_tokens=plan.page_tokens,
        block=section.block,
        mesh=mesh,
        dtype=dtype,
        ragged=uses_ragged(section.attention, mesh),
        one_thread=one_thread,
        mixed=section.matmul == "bfloat16",
        keeps_routes=keep_routing,
    )


def uses_ragged(attention: str, mesh: Mesh | None) -> bool:
    """Whether the decode loop reads the pages through the TPU kernel."""
    if attention != "auto":
        return attention == "ragged"
    device = jax.devices()[0] if mesh is None else mesh.devices.flat[0]
    return bool(device.platform == "tpu")


def _completion(sequence: Sequence_, output: Output, now: float) -> Completion:
    tokens, request, waiter = output.token_ids, sequence.request, sequence.owner
    stopped = (
        request.forced_length is None
        and len(tokens) > 0
        and int(tokens[-1]) in request.stop_token_ids
    )
    first = now if waiter.first_token_at is None else waiter.first_token_at
    started = now if waiter.started_at is None else waiter.started_at
    return Completion(
        request_id=request.request_id,
        token_ids=tokens,
        logprobs=output.logprobs,
        versions=output.versions,
        stop=StopReason.EOS if stopped else StopReason.LENGTH,
        queued_s=started - waiter.queued_at,
        first_token_s=first - waiter.queued_at,
        latency_s=now - waiter.queued_at,
        full_logprobs=output.full_logprobs,
        kept=output.kept,
        expert_ids=output.expert_ids,
    )


def _resolve(done: Sequence[tuple[_Waiter, Completion | BaseException]]) -> None:
    """Set results; asyncio futures on their own loop, all of a loop in one call."""
    by_loop: dict[Any, list[tuple[Any, Completion | BaseException]]] = {}
    for waiter, result in done:
        by_loop.setdefault(waiter.loop, []).append((waiter.future, result))
    for loop, results in by_loop.items():
        if loop is None:
            _set(results)
        else:
            with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
                loop.call_soon_threadsafe(_set, results)


def _set(results: Sequence[tuple[Any, Completion | BaseException]]) -> None:
    for future, result in results:
        if future.done():
            continue
        try:
            if isinstance(result, BaseException):
                future.set_exception(result)
            else:
                future.set_result(result)
        except InvalidStateError:  # cancelled just now, by another thread
            pass
        except BaseException as error:  # SystemExit and the like; others the future catches
            log.error("a callback of a request raised: %r", error, exc_info=error)


@contextlib.contextmanager
def cancelled_on_error(futures: list[Future[Any]]) -> Iterator[list[Future[Any]]]:
    """Cancel these futures where the block ends by an exception: nobody waits for them."""
    try:
        yield futures
    except BaseException:
        for future in futures:
            future.cancel()
        raise


@partial(jax.jit, static_argnums=(0, 3))
def _sequence_logprobs(spec: ModelSpec, params: Any, token_ids: Any, dtype: Any) -> Any:
    """[n - 1] float32: log-probs of token_ids[1:] of one sequence."""
    ids = jnp.asarray(token_ids)[None]
    tokens = TokenRows(ids, jnp.arange(ids.shape[1])[None], jnp.ones_like(ids))
    settings = DecoderSettings(dtype=dtype, chunk=ids.shape[1])
    return token_logprobs(spec, params, tokens, settings).logprobs[0, 1:]
