"""Requests between their callers and the sampler's thread: queued on one side, answered on the
other.

    caller ──checked──> Inbox ──take──> the sampler's thread ──Completion──> resolve ──> future

Any thread may use the Inbox; futures of an event loop are set on that loop. Pure host code.
"""

import asyncio
import contextlib
import logging
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from jaxrl_async.ports.run import Clock
from jaxrl_async.sampler.batch.adapter_slots import AdapterSlots
from jaxrl_async.sampler.batch.sequence import LiveRequest, Stage
from jaxrl_async.sampler.lifetime import Lifetime
from jaxrl_async.sampler.request_checks import RequestCheck, RequestLimits, num_requested
from jaxrl_async.sampler.router.job import fulfil
from jaxrl_async.types import Completion, Partial, Request, StopReason, TokenRecord

log = logging.getLogger(__name__)

CLOSED = "the sampler is closed"
CLOSED_TOO_EARLY = "the sampler was closed before the request was done"
"""The message to callers whose request was not done when their sampler was closed."""
AnyFuture = Any
"""An asyncio.Future or a concurrent.futures.Future."""


@dataclass(slots=True, kw_only=True)
class Waiter:
    """The caller that waits for a request, and the times that its Completion reports."""

    queued_at: float
    future: AnyFuture
    loop: asyncio.AbstractEventLoop | None = None  # of the future; None: a thread waits
    started_at: float | None = None
    first_token_at: float | None = None

    @property
    def gave_up(self) -> bool:
        """Whether the caller has cancelled its future."""
        return bool(self.future.cancelled())


class Inbox:
    """Requests, and commands to run between two blocks, from other threads for the sampler's
    thread."""

    def __init__(
        self,
        lifetime: Lifetime,
        limits: RequestLimits,
        clock: Clock,
        fresh_keys: Iterator[int],
        adapters: AdapterSlots | None = None,
    ) -> None:
        """fresh_keys, adapters: see RequestCheck."""
        self._lifetime, self._clock = lifetime, clock
        self._check = RequestCheck(limits, fresh_keys, adapters)
        self._requests: list[LiveRequest] = []
        self._commands: list[tuple[Callable[[], Any], Future[Any]]] = []

    # ---- callers

    def checked(self, requests: Sequence[Request | Partial]) -> list[Request | Partial]:
        """Return the requests as the sampler will serve them; requests without a key get a fresh
        one. Raises RolloutError, which names the field, for a request that cannot be served."""
        return self._check.checked(requests)

    def submit(
        self,
        requests: Sequence[Request | Partial],
        futures: Sequence[AnyFuture],
        loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        """Queue all requests together, in this order, and start the thread. Raises RolloutError as
        `checked` does, the error that ended the thread, and Closed.

        Args:
            requests: a Partial continues where it was saved.
            futures: one for each request.
            loop: the futures' event loop; None: threads wait for them.
        """
        self._lifetime.check_process()
        now = self._clock()
        live = [
            live_request(given, Waiter(queued_at=now, future=future, loop=loop))
            for given, future in zip(self.checked(requests), futures, strict=True)
        ]
        self._lifetime.start()
        with self._lifetime.lock:
            self._lifetime.check_open(CLOSED)
            for one in live:  # again: its adapter may have been unloaded since
                self._check.check_adapter(one.request)
            self._requests.extend(live)
        self._lifetime.rouse()

    def run(self, command: Callable[[], object]) -> Any:
        """Run a command on the sampler's thread between two blocks; return its result or raise its
        exception. Blocks."""
        self._lifetime.check_waits()
        future: Future[Any] = Future()
        self._lifetime.start()
        with self._lifetime.lock:
            self._lifetime.check_open(CLOSED)
            self._commands.append((command, future))
        self._lifetime.rouse()
        return future.result()

    # ---- the sampler's thread

    def __bool__(self) -> bool:
        return bool(self._requests or self._commands)

    def requests(self) -> list[LiveRequest]:
        """Return the queued requests; they stay queued."""
        with self._lifetime.lock:
            return list(self._requests)

    def take(self, request_ids: Sequence[str] | None = None) -> list[LiveRequest]:
        """Remove and return the queued requests: all of them, or the ones with these ids, in the
        order of the ids."""
        with self._lifetime.lock:
            queued, self._requests = self._requests, []
            if request_ids is None:
                return queued
            by_id = {s.request.request_id: s for s in queued}
            taken = [by_id[i] for i in request_ids]
            self._requests = [s for s in queued if s not in taken]
            return taken

    def run_commands(self) -> None:
        """Run the queued commands; their callers get the results."""
        for command, future in self._take_commands():
            try:
                future.set_result(command())
            except Exception as error:
                future.set_exception(error)

    def fail_commands(self, error: BaseException) -> None:
        """Answer the queued commands with this error."""
        for _, future in self._take_commands():
            future.set_exception(error)

    def _take_commands(self) -> list[tuple[Callable[[], Any], Future[Any]]]:
        with self._lifetime.lock:
            commands, self._commands = self._commands, []
        return commands


def request_of(given: Request | Partial) -> Request:
    """Return the request, also for a partial."""
    return given.request if isinstance(given, Partial) else given


def live_request(given: Request | Partial, waiter: Waiter) -> LiveRequest:
    """Return a checked request in the form that the batch takes."""
    saved, request = given if isinstance(given, Partial) else None, request_of(given)
    return LiveRequest(request=request, max_new=num_requested(request), owner=waiter, partial=saved)


# ---- answers


def completion_of(stage: Stage, output: TokenRecord, now: float) -> Completion:
    """Return the answer to a request, given its tokens so far and the time."""
    tokens, request, waiter = output.token_ids, stage.request, stage.owner
    stopped = (
        request.forced_length is None
        and len(tokens) > 0
        and int(tokens[-1]) in request.stop_token_ids
    )
    first = now if waiter.first_token_at is None else waiter.first_token_at
    started = now if waiter.started_at is None else waiter.started_at
    return Completion(
        request_id=request.request_id,
        stop=StopReason.EOS if stopped else StopReason.LENGTH,
        queued_s=started - waiter.queued_at,
        first_token_s=first - waiter.queued_at,
        latency_s=now - waiter.queued_at,
        **output.columns,
    )


def resolve(answers: Sequence[tuple[Waiter, Completion | BaseException]]) -> None:
    """Set results or exceptions; futures of an event loop on that loop, in one call per loop."""
    by_loop: dict[Any, list[tuple[AnyFuture, Completion | BaseException]]] = {}
    for waiter, answer in answers:
        by_loop.setdefault(waiter.loop, []).append((waiter.future, answer))
    for loop, on_loop in by_loop.items():
        if loop is None:
            _set_futures(on_loop)
        else:
            with contextlib.suppress(RuntimeError):  # the loop and its tasks are closed
                loop.call_soon_threadsafe(_set_futures, on_loop)


def _set_futures(answers: Sequence[tuple[AnyFuture, Completion | BaseException]]) -> None:
    """Set the futures that are not done."""
    for future, answer in answers:
        if not future.done():
            fulfil(future, answer)


@contextlib.contextmanager
def cancelled_on_error(futures: list[Future[object]]) -> Iterator[list[Future[Any]]]:
    """Cancel these futures if the block raises: no slot serves them then."""
    try:
        yield futures
    except BaseException:
        for future in futures:
            future.cancel()
        raise
