"""Where a user's reward functions run, each call with a time limit of its own. Needs no JAX.

rollouts' loop ───┐          ┌─> queue ─> a few daemon threads    plain functions
                  ├─ a call ─┤
evaluation's loop ┘          └─> one event loop on its own thread    async functions
"""

import asyncio
import contextlib
import functools
import threading
import time
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from dataclasses import dataclass
from typing import Any, TypeVar

from jaxrl_async.errors import RolloutError, is_the_runs_own_end

T = TypeVar("T")

MAX_STUCK = 64
"""Threads of functions that never came back, at most: a thread cannot be stopped."""


class TooLate(Exception):
    """A call took longer than its limit."""


@dataclass(frozen=True, slots=True)
class CallOutcome:
    """What a call came to. A result in place of an exception: a future or a task that is given
    StopIteration, SystemExit or KeyboardInterrupt does something else with it."""

    value: Any = None
    error: BaseException | None = None

    def get(self) -> Any:
        """The value. Raises RolloutError from the function's exception, of whatever kind."""
        if isinstance(self.error, RolloutError):  # a built-in's own
            raise self.error
        if self.error is not None:
            told = f"raised {type(self.error).__name__}: {_words(self.error)}"
            raise RolloutError(f"{told}. Correct the function.") from self.error
        return self.value


def _words(error: BaseException) -> str:
    try:
        return f"{error}"[:2000]
    except Exception:
        return "(its message cannot be shown)"


@dataclass(slots=True, eq=False)
class _Call:
    work: Callable[[], Any]
    settle: Callable[[CallOutcome], None]
    begun_s: float | None = None
    over: bool = False  # it has an outcome, or nobody waits for it any more


class Threads:
    """At most `most` daemon threads that make calls one after another. Any thread, any loop.

    A call that is given up keeps its thread until it comes back, and another takes its place;
    MAX_STUCK of them at most. Threads without work end.
    """

    def __init__(self, most: int) -> None:
        self._most, self._lock = most, threading.Lock()
        self._waiting: deque[_Call] = deque()
        self._serving = 0
        self.stuck: set[_Call] = set()

    async def run(self, work: Callable[[], Any], timeout_s: float) -> CallOutcome:
        """What `work` came to. Raises TooLate timeout_s after a thread has begun it."""
        loop = asyncio.get_running_loop()
        done: asyncio.Future[CallOutcome] = loop.create_future()

        def settle(outcome: CallOutcome) -> None:
            with contextlib.suppress(RuntimeError):  # the loop has ended: nobody waits any more
                loop.call_soon_threadsafe(_give, done, outcome)

        call = _Call(work, settle)
        self._queue(call)
        try:
            while not done.done():
                begun = time.monotonic() if call.begun_s is None else call.begun_s
                left_s = begun + timeout_s - time.monotonic()
                if left_s <= 0:
                    raise TooLate
                await asyncio.wait([done], timeout=left_s)
        finally:
            self._give_up(call)
        return done.result()

    def _queue(self, call: _Call) -> None:
        with self._lock:
            if len(self.stuck) >= MAX_STUCK:
                raise RolloutError(
                    f"is not called: {len(self.stuck)} earlier calls have not come back, and no "
                    "further one is begun. Give what the function waits for a time limit."
                )
            self._waiting.append(call)
            self._hire()

    def _hire(self) -> None:
        """One more thread, where there is work for it and room. Under the lock."""
        if self._waiting and self._serving < self._most:
            self._serving += 1
            threading.Thread(target=self._serve, name="reward", daemon=True).start()

    def _serve(self) -> None:
        while True:
            with self._lock:
                if not self._waiting:
                    self._serving -= 1
                    return
                call = self._waiting.popleft()
                call.begun_s = time.monotonic()
            outcome = _outcome(call.work)
            with self._lock:
                if call.over:  # given up: another thread is in this one's place
                    self.stuck.discard(call)
                    return
                call.over = True
            call.settle(outcome)
            del call, outcome  # a thread that waits holds nobody's arrays

    def _give_up(self, call: _Call) -> None:
        """Nobody waits for this call any more; nothing where it is over."""
        with self._lock:
            if call.over:
                return
            call.over = True
            if call.begun_s is None:
                self._waiting.remove(call)
                return
            self.stuck.add(call)
            self._serving -= 1
            self._hire()


def _give(future: "asyncio.Future[CallOutcome]", outcome: CallOutcome) -> None:
    if not future.done():
        future.set_result(outcome)


def _outcome(work: Callable[[], Any]) -> CallOutcome:
    try:
        return CallOutcome(work())
    except BaseException as error:  # of a thread of ours: no exception is meant for anybody else
        return CallOutcome(error=error)


async def run_async(work: Callable[[], Awaitable[Any]], timeout_s: float) -> CallOutcome:
    """What a user's coroutine came to, on the loop for them. Raises TooLate after timeout_s.

    All coroutines of the process are on that one loop, so that a session or a semaphore that a
    user's file keeps serves training, evaluation and the next run alike.
    """
    running = asyncio.run_coroutine_threadsafe(_awaited(work), _own_loop())
    try:
        async with asyncio.timeout(timeout_s):
            return await asyncio.wrap_future(running)
    except TimeoutError:  # nothing else here raises one: what the function raises is an Outcome
        raise TooLate from None


async def _awaited(work: Callable[[], Awaitable[Any]]) -> CallOutcome:
    try:
        return CallOutcome(await work())
    except BaseException as error:
        if is_the_runs_own_end(error):
            raise
        return CallOutcome(error=error)


@functools.cache
def _own_loop() -> asyncio.AbstractEventLoop:
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, name="async-rewards", daemon=True).start()
    return loop


async def side_by_side(work: Iterable[Coroutine[None, None, T]]) -> list[T]:
    """All results in order, or the first exception; then nobody waits for the others."""
    failed: Exception | None = None
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(one) for one in work]
    except ExceptionGroup as errors:
        failed = errors.exceptions[0]
    if failed is not None:
        raise failed
    return [task.result() for task in tasks]
