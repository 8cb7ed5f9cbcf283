"""Somebody else's JetStream engine as our sampler: it draws, our rollouts and trainer do the rest.

        submit_many ──> queue ──> prefill, insert into a free slot ──> generate ──> futures

Both shapes of the contract are driven: 0.2.2 (prefill gives the prefix) and 0.3.0 (it gives the
first token too). Such an engine tells no log-probs: completions carry NaN, which says
that the trainer must compute them itself (and its metrics then say for how many tokens it did).
"""

import asyncio
import contextlib
import logging
import math
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

import jax
import numpy as np

from jaxrl_async.errors import Closed
from jaxrl_async.interop.jetstream import engine_api
from jaxrl_async.ports import FIXED_WEIGHTS, WeightSource
from jaxrl_async.sampler.lifetime import check_here, close_at_exit, serve
from jaxrl_async.sampler.request_checks import Room, checked_request
from jaxrl_async.types import Completion, Partial, Request, SamplingParams, StopReason

log = logging.getLogger(__name__)


@dataclass(slots=True, kw_only=True)
class _Running:
    """A request in a slot."""

    request: Request
    future: Any
    loop: asyncio.AbstractEventLoop
    queued_at: float
    started_at: float = 0.0
    tokens: list[int] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)

    @property
    def stopped(self) -> bool:
        """Whether its last token is a stop token."""
        return bool(self.tokens) and self.tokens[-1] in self.request.stop_token_ids

    @property
    def done(self) -> bool:
        """Whether it ended."""
        return self.stopped or len(self.tokens) >= self.request.max_new_tokens


class ForeignSampler:
    """ports.Generate over any JetStream engine. One thread of its own drives the engine.

    Temperature, top-k and the like are the engine's own: a request that asks for something is
    served all the same, and a warning says so once.
    """

    seed: int | None = None  # it continues no Partial

    def __init__(
        self,
        engine: Any,
        *,
        params: Any = None,
        weights: WeightSource = FIXED_WEIGHTS,
        version: int = 0,
        to_params: Callable[[Any], Any] = lambda params: params,
    ) -> None:
        """params: null: the engine's own load_params(). to_params: of what the weight source gives
        to what the engine takes."""
        self.engine, self.version = engine, version
        self._params = engine.load_params() if params is None else params
        self._weights, self._to_params = weights, to_params
        self._gives_first = "bulk_insert" in engine_api().Engine.__abstractmethods__
        self._queue: deque[_Running] = deque()
        self._running: dict[int, _Running] = {}
        self._wake, self._lock = threading.Event(), threading.Lock()
        self._closed = False
        self._pid = os.getpid()
        self._state: Any = None
        self.error: BaseException | None = None
        self._thread: threading.Thread | None = None
        self._warned = False
        weights.attach(self._wake)

    # ---- any thread

    def start(self) -> None:
        """Start the thread; done by the first request where nobody did it."""
        with self._lock:
            if self._thread is None and not self._closed:
                self._thread = threading.Thread(
                    target=serve,
                    args=(weakref.ref(self), self._wake, ForeignSampler._go_on),
                    name="foreign",
                    daemon=True,
                )
                close_at_exit(self)
                self._thread.start()

    def close(self) -> None:
        """Stop after the step under way; who still waits gets Closed. Idempotent."""
        if os.getpid() != self._pid:
            return  # a fork: the thread is the other process's
        with self._lock:
            self._closed = True
        self._wake.set()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()
        self._fail_all(self.error or Closed("the sampler was closed before the request was done"))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    async def submit(self, request: Request) -> Completion:
        """Complete one request."""
        return await self.submit_many([request])[0]

    def progress(self) -> tuple[Partial, ...]:
        """See ports.Generate: a foreign engine does not say."""
        return ()

    def submit_many(
        self, requests: Sequence[Request | Partial]
    ) -> "list[asyncio.Future[Completion]]":
        """Queue all requests at once, in order (ports.Generate). Raises RolloutError for one that
        cannot be served, which names the field."""
        check_here(self, self._pid)
        loop = asyncio.get_running_loop()
        room = Room(max_length=self.engine.max_prefill_length + 1)
        checked = [checked_request(r, room, answer_fits=False) for r in requests]
        now = time.perf_counter()
        waiting = [
            _Running(request=r, future=loop.create_future(), loop=loop, queued_at=now)
            for r in checked
        ]
        self.start()
        with self._lock:
            if self.error is not None:
                raise self.error
            if self._closed:
                raise Closed("the sampler is closed")
            self._queue.extend(waiting)
        self._wake.set()
        return [w.future for w in waiting]

    # ---- the thread

    def _go_on(self) -> float | None:
        """One step of the engine, and how long to sleep after it (lifetime.serve); None: it is
        over.

        consumes      requests, weights
        waits for     self._wake when there is nothing to do
        produces      completions into futures
        on failure    a prompt that the engine does not prefill fails alone; else every waiter gets
                      the exception; `error` keeps it
        """
        try:
            if self._closed:
                return None
            if self._state is None:
                self._state = self.engine.init_decode_state()
            self._take_weights()
            self._drop_cancelled()
            self._fill()
            if self._running:
                self._step()
        except BaseException as error:
            with self._lock:
                self.error, self._closed = error, True
            log.error("the foreign engine stopped: %s", error)
            self._fail_all(error)
            return None
        return 0.0 if self._running or self._queue or self._closed else math.inf

    def _take_weights(self) -> None:
        update = self._weights.poll(wait=not self._running)
        if update is not None:
            self._params, self.version = self._to_params(update.params), update.version
            self._weights.live(update.version)

    def _drop_cancelled(self) -> None:
        for slot in [s for s, r in self._running.items() if r.future.cancelled()]:
            del self._running[slot]
        with self._lock:
            self._queue = deque(r for r in self._queue if not r.future.cancelled())

    def _fill(self) -> None:
        """Requests into free slots, oldest first."""
        for slot in range(self.engine.max_concurrent_decodes):
            if slot in self._running:
                continue
            with self._lock:
                if not self._queue:
                    return
                running = self._queue.popleft()
            running.started_at = time.perf_counter()
            self._warn_of(running.request)
            prefilled = self._prefill(running)
            if prefilled is not None:
                self._insert(slot, running, *prefilled)

    def _prefill(self, running: _Running) -> tuple[Any, Any] | None:
        """The prefix, and the first token where the engine gives it; None: it raised, and this
        request alone has failed."""
        tokens = running.request.token_ids
        bucket = 16
        while bucket < len(tokens):
            bucket *= 2
        padded = np.zeros(min(bucket, self.engine.max_prefill_length), np.int32)
        padded[: len(tokens)] = tokens
        try:
            result = self.engine.prefill(
                params=self._params,
                padded_tokens=jax.numpy.asarray(padded),
                true_length=len(tokens),
            )
        except Exception as error:
            log.error("request %s failed, alone: %s", running.request.request_id, error)
            _give(running, error)
            return None
        return result if self._gives_first else (result, None)

    def _insert(self, slot: int, running: _Running, prefix: Any, first: Any) -> None:
        self._state = self.engine.insert(prefix, self._state, slot=slot)
        self._running[slot] = running
        if first is not None:
            self._add(running, first.convert_to_numpy(), 0)
            self._finish([slot])

    def _step(self) -> None:
        """One `generate`; what ended leaves its slot."""
        self._state, result = self.engine.generate(self._params, self._state)
        result = result.convert_to_numpy()
        for slot, running in self._running.items():
            self._add(running, result, slot)
        self._finish(list(self._running))

    def _add(self, running: _Running, result: Any, slot: int) -> None:
        """A slot's new tokens, as far as the request wants them."""
        found = result.get_result_at_slot(slot)
        for token, valid in zip(found.tokens[0], found.valid[0], strict=True):
            if valid and not running.done:
                running.tokens.append(int(token))
                running.versions.append(self.version)

    def _finish(self, slots: Sequence[int]) -> None:
        now = time.perf_counter()
        for slot in slots:
            if self._running[slot].done:
                running = self._running.pop(slot)
                _give(running, _completion(running, now))

    def _warn_of(self, request: Request) -> None:
        if not self._warned and request.sampling != SamplingParams():
            self._warned = True
            log.warning(
                "request %s asks for %s, but a foreign engine samples as it was set up",
                request.request_id,
                request.sampling,
            )

    def _fail_all(self, error: BaseException) -> None:
        with self._lock:
            waiting = [*self._queue, *self._running.values()]
            self._queue.clear()
            self._running.clear()
        for running in waiting:
            _give(running, error)


def _completion(running: _Running, now: float) -> Completion:
    n = len(running.tokens)
    return Completion(
        request_id=running.request.request_id,
        token_ids=np.array(running.tokens, np.int32),
        logprobs=np.full(n, np.nan, np.float32),
        versions=np.array(running.versions, np.int32),
        stop=StopReason.EOS if running.stopped else StopReason.LENGTH,
        queued_s=running.started_at - running.queued_at,
        latency_s=now - running.queued_at,
    )


def _give(running: _Running, result: Completion | BaseException) -> None:
    """Set the future on its own loop."""

    def put() -> None:
        if running.future.done():
            return
        if isinstance(result, BaseException):
            running.future.set_exception(result)
        else:
            running.future.set_result(result)

    with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
        running.loop.call_soon_threadsafe(put)
