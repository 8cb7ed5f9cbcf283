"""Step a run's components one by one, without threads, devices or time.

    SteppedLoop     an event loop: run_ready() runs what is ready; calls to other threads wait
    MemorySampler   decodes a block at a time from weights that may change between two blocks
    Transfer        weights in transfer to a sampler, which arrive when the test says so

The test decides the order of events, so it can run, and rerun, any interleaving.
"""

import asyncio
import contextvars
from asyncio import Future, Handle, Task, TimerHandle
from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np

from jaxrl_async.ports.weights import WeightSource
from jaxrl_async.testing.fakes import LOGPROB
from jaxrl_async.types import Completion, Partial, Request, StopReason


class SteppedLoop(asyncio.AbstractEventLoop):
    """A minimal event loop for tasks, futures and asyncio.to_thread.

    A call to another thread waits in `calls` until call() makes it, so the test decides when it
    may block. `errors` records uncaught exceptions.
    """

    def __init__(self) -> None:
        self._ready: deque[Handle] = deque()
        self.calls: deque[tuple[Callable[[], Any], Future[Any]]] = deque()
        self.errors: list[dict[str, Any]] = []

    def run_ready(self) -> None:
        """Run until every task waits for an outside event."""
        asyncio._set_running_loop(self)
        try:
            while self._ready:
                handle = self._ready.popleft()
                if not handle.cancelled():
                    handle._run()
        finally:
            asyncio._set_running_loop(None)

    def call(self) -> None:
        """Make the oldest call to another thread, and run everything that becomes ready."""
        function, future = self.calls.popleft()
        try:
            result = function()
        except Exception as error:
            if not future.done():
                future.set_exception(error)
        else:
            if not future.done():
                future.set_result(result)
        self.run_ready()

    # ---- asyncio's side

    def call_soon(  # type: ignore[override]
        self,
        callback: Callable[..., object],
        *args: Any,
        context: contextvars.Context | None = None,
    ) -> Handle:
        """See asyncio."""
        handle = Handle(callback, args, self, context)
        self._ready.append(handle)
        return handle

    def call_soon_threadsafe(  # type: ignore[override]
        self,
        callback: Callable[..., object],
        *args: Any,
        context: contextvars.Context | None = None,
    ) -> Handle:
        """See asyncio; there is only one thread."""
        return self.call_soon(callback, *args, context=context)

    def call_later(  # type: ignore[override]
        self,
        delay: float,
        callback: Callable[..., object],
        *args: Any,
        context: contextvars.Context | None = None,
    ) -> TimerHandle:
        """See asyncio; time never passes, so it is never called."""
        return TimerHandle(delay, callback, args, self, context)

    def _timer_handle_cancelled(self, handle: TimerHandle) -> None:
        """See asyncio."""

    def create_future(self) -> Future[Any]:
        """See asyncio."""
        return Future(loop=self)

    def create_task(self, coro: Coroutine[Any, Any, Any], **options: Any) -> Task[Any]:  # type: ignore[override]
        """See asyncio."""
        return Task(coro, loop=self, **options)

    def run_in_executor(  # type: ignore[override]
        self, executor: object, func: Callable[..., Any], *args: Any
    ) -> Future[Any]:
        """See asyncio; the call waits in `calls`."""
        future = self.create_future()
        self.calls.append((partial(func, *args), future))
        return future

    def time(self) -> float:
        """See asyncio."""
        return 0.0

    def get_debug(self) -> bool:
        """See asyncio."""
        return False

    def is_closed(self) -> bool:
        """See asyncio."""
        return False

    def call_exception_handler(self, context: dict[str, object]) -> None:
        """See asyncio."""
        self.errors.append(context)


@dataclass(slots=True)
class Transfer:
    """One array of weights in transfer: it has arrived once `ready` is set."""

    version: int
    ready: bool = False
    nbytes: int = 4

    def is_ready(self) -> bool:
        """Return True if the array has arrived, like jax.Array."""
        return self.ready


@dataclass(slots=True, eq=False)
class _Running:
    request: Request
    future: Future[Completion]
    length: int  # tokens to generate
    versions: list[int] = field(default_factory=list)


class MemorySampler:
    """A ports.Generate that generates `block` tokens for each of `places` requests per round().

    A token's version is the version of the weights at the start of its round. Running requests can
    be saved.
    """

    seed = 0

    def __init__(
        self,
        weights: WeightSource,
        *,
        length: Callable[[Request], int],
        version: int = 0,
        block: int = 2,
        places: int = 4,
    ) -> None:
        """Create a sampler; `length` returns the number of tokens of a request."""
        self._weights, self._length, self.version = weights, length, version
        self._block, self.places = block, places
        self.waiting: deque[_Running] = deque()
        self.running: list[_Running] = []

    def submit_many(self, requests: Sequence[Request | Partial]) -> list[Future[Completion]]:
        """Implement ports.Generate."""
        loop = asyncio.get_running_loop()
        futures: list[Future[Completion]] = [loop.create_future() for _ in requests]
        for given, future in zip(requests, futures, strict=True):
            if isinstance(given, Partial):
                assert given.seed == self.seed, "saved by a sampler with a different seed"
                request, versions = given.request, given.versions.tolist()
            else:
                request, versions = given, []
            self.waiting.append(_Running(request, future, self._length(request), versions))
        return futures

    def progress(self) -> tuple[Partial, ...]:
        """Implement ports.Generate."""
        return tuple(
            Partial(
                request=running.request,
                token_ids=np.arange(100, 100 + len(running.versions), dtype=np.int32),
                logprobs=np.full(len(running.versions), LOGPROB, np.float32),
                versions=np.array(running.versions, np.int32),
                seed=self.seed,
            )
            for running in (*self.running, *self.waiting)
            if running.versions and not running.future.done()
        )

    def round(self) -> None:
        """Do what a sampler does between two blocks, then one block."""
        self.waiting = deque(r for r in self.waiting if not r.future.cancelled())
        self.running = [r for r in self.running if not r.future.cancelled()]
        update = self._weights.poll()
        if update is not None:
            self.version = update.version
            self._weights.live(update.version)
        while self.waiting and len(self.running) < self.places:
            self.running.append(self.waiting.popleft())
        for running in self.running:
            left = running.length - len(running.versions)
            running.versions += [self.version] * min(self._block, left)
        done = [r for r in self.running if len(r.versions) == r.length]
        self.running = [r for r in self.running if len(r.versions) < r.length]
        for running in done:
            running.future.set_result(_completion(running))

    def fail(self, index: int, error: Exception) -> None:
        """Fail a running request."""
        future = self.running.pop(index).future
        if not future.done():  # cancelled since the last round
            future.set_exception(error)


def _completion(running: _Running) -> Completion:
    """Return a completion; it ends with the first stop token if the request has one."""
    stops, n = running.request.stop_token_ids, running.length
    token_ids = np.arange(100, 100 + n, dtype=np.int32)
    token_ids[-1:] = stops[:1] or token_ids[-1:]
    return Completion(
        request_id=running.request.request_id,
        token_ids=token_ids,
        logprobs=np.full(n, LOGPROB, np.float32),
        versions=np.array(running.versions, np.int32),
        stop=StopReason.EOS if stops else StopReason.LENGTH,
    )
