"""Run a user's functions, each call with its own timeout. Needs no JAX.

rollouts' loop ───┐          ┌─> queue ─> a few daemon threads    plain functions
                  ├─ a call ─┤
evaluation's loop ┘          └─> one event loop on its own thread    async functions
"""

import asyncio
import contextlib
import ctypes
import functools
import inspect
import logging
import threading
import time
import traceback
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from concurrent.futures import Future as ThreadFuture
from concurrent.futures import InvalidStateError, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from jaxrl_async.errors import RolloutError, is_the_runs_own_end
from jaxrl_async.outages import time_limit

T = TypeVar("T")

HERE = Path(__file__).resolve().parent.parent
CALLERS = ("usercode.py", "results.py", "reward_call.py", "reward_process.py", "rewards.py")
"""Files of this package that tracebacks do not show."""
SHOWN_FRAMES = 12
"""Maximum number of calls of a traceback that are shown."""
MAX_STUCK = 64
"""Maximum number of threads stuck in calls that never return: a thread cannot be stopped."""
LOOP_THREADS = 32
"""Maximum threads of an event loop's asyncio.to_thread, as many as asyncio has on large
machines."""
LEFT_S = 5.0
"""Time after which a cancelled async call counts as abandoned, seconds."""
REAP_S = 5.0
"""Maximum wait at a loop's end for cancelled tasks, seconds."""

CANCEL_AGAIN_S = 5.0
"""Time after which a task that has not ended is cancelled again, seconds. An orderly end, such as
of a killed program, has this long."""

log = logging.getLogger(__name__)


class TooLate(Exception):
    """A call took longer than its timeout."""

    overdue_s = 0.0  # delay beyond the timeout: long if the call held Python's lock


@dataclass(frozen=True, slots=True)
class CallOutcome:
    """The value or exception of a call.

    The exception is passed as a value, because futures and tasks treat StopIteration, SystemExit
    and
    KeyboardInterrupt specially.
    """

    value: Any = None
    error: BaseException | None = None

    def get(self) -> Any:
        """Return the value, or raise RolloutError from any exception of the function."""
        if isinstance(self.error, RolloutError):  # raised by a built-in function
            raise self.error
        if self.error is not None:
            raise RolloutError(describe_error(self.error)) from self.error
        return self.value


def describe_error(error: BaseException) -> str:
    """Describe an exception of a user's function: the first line has type, text, file and line; the
    traceback follows."""
    kind, words = type(error).__name__, _message_of(error)
    frames = _frames_of_user(error)
    if not frames:
        return f"raised {kind}: {words}. Correct the function."
    own = [frame for frame in frames if frame.filename == frames[0].filename][-1]
    where = f"{own.filename}, line {own.lineno}, in {own.name}"
    left_out = ["  ...\n"] if len(frames) > SHOWN_FRAMES else []
    shown = traceback.format_list(frames[:1]) if left_out else []
    shown += [*left_out, *traceback.format_list(frames[-SHOWN_FRAMES + len(shown) :])]
    lines = "".join(shown).rstrip()
    head = f"raised {kind}: {words} ({where}). Correct the function."
    return f"{head}\nTraceback (most recent call last):\n{lines}\n{kind}: {words}"


def _frames_of_user(error: BaseException) -> list[traceback.FrameSummary]:
    """Return the calls that led to an exception, starting with the first outside of this
    package."""
    frames = list(traceback.extract_tb(error.__traceback__))
    first = next((i for i, f in enumerate(frames) if not _is_ours(f.filename)), len(frames))
    return frames[first:]


def _is_ours(file: str) -> bool:
    """Return whether this package calls users' functions in a file."""
    path = Path(file)
    return path.parent.parent == HERE and path.name in CALLERS


def _message_of(error: BaseException) -> str:
    try:
        return f"{error}"[:2000]
    except Exception:
        return "(its message cannot be shown)"


@dataclass(slots=True, eq=False)
class _Call:
    work: Callable[[], Any]
    settle: Callable[[CallOutcome], None]
    begun_s: float | None = None  # time.monotonic() at its start in a thread
    over: bool = False  # it has an outcome, or its caller gave it up


class Threads:
    """At most `most` daemon threads that make calls, for any thread and any event loop.

    A call that timed out keeps its thread until it returns, and another thread replaces it, for at
    most MAX_STUCK threads. Idle threads end.
    """

    def __init__(self, most: int, *, replaced: bool = True) -> None:
        """replaced: False for calls that end on their own. The thread of an abandoned call makes
        the next call when it has ended, and no other thread replaces it."""
        self._most, self._lock, self._replaced = most, threading.Lock(), replaced
        self._waiting: deque[_Call] = deque()
        self._serving = 0
        self.stuck: set[_Call] = set()

    async def run(self, work: Callable[[], object], timeout_s: float) -> CallOutcome:
        """Run `work` on a thread; raise TooLate `timeout_s` seconds after its start."""
        loop = asyncio.get_running_loop()
        done: asyncio.Future[CallOutcome] = loop.create_future()

        def settle(outcome: CallOutcome) -> None:
            with contextlib.suppress(RuntimeError):  # the loop has ended, so no caller waits
                loop.call_soon_threadsafe(_set_outcome, done, outcome)

        call = _Call(work, settle)
        self._queue(call)
        try:
            while not done.done():
                begun = time.monotonic() if call.begun_s is None else call.begun_s
                left_s = begun + timeout_s - time.monotonic()
                if left_s <= 0:
                    late = TooLate()
                    late.overdue_s = -left_s
                    raise late
                await asyncio.wait([done], timeout=left_s)
        finally:
            self._give_up(call)
        return done.result()

    def submit(self, work: Callable[[], T]) -> "ThreadFuture[T]":
        """Run `work` on a thread; cancelling the future abandons the call, even while it runs."""
        future: _Submitted[T] = _Submitted(self._give_up)
        self._queue(future.call_of(work))
        return future

    def _queue(self, call: _Call) -> None:
        with self._lock:
            if len(self.stuck) >= MAX_STUCK:
                raise RolloutError(
                    f"is not called: {len(self.stuck)} earlier calls have not returned, so no "
                    "further calls are made. Set a timeout in everything that the function waits "
                    "for."
                )
            self._waiting.append(call)
            self._add_thread()

    def _add_thread(self) -> None:
        """Start one more thread if there is work and room for it. Called under the lock."""
        if self._waiting and self._serving < self._most:
            self._serving += 1
            threading.Thread(target=self._serve, name="user-call", daemon=True).start()

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
                if call.over and self._replaced:  # abandoned
                    self.stuck.discard(call)
                    return
                given_up, call.over = call.over, True
            if not given_up:
                call.settle(outcome)
            del call, outcome  # an idle thread must not keep arrays alive

    def _give_up(self, call: _Call) -> None:
        """Abandon a call whose caller no longer waits; do nothing if the call is over."""
        with self._lock:
            if call.over:
                return
            call.over = True
            if call.begun_s is None:
                self._waiting.remove(call)
                return
            if not self._replaced:
                return
            self.stuck.add(call)
            self._serving -= 1
            self._add_thread()


class _Submitted(ThreadFuture[T]):
    """The future of a call; never RUNNING, so it can be cancelled at any time."""

    def __init__(self, give_up: Callable[[_Call], None]) -> None:
        super().__init__()
        self._give_up = give_up

    def call_of(self, work: Callable[[], T]) -> _Call:
        """Return the call that settles this future."""
        self._call = _Call(work, self._settle)
        return self._call

    def cancel(self) -> bool:
        """Abandon the call."""
        self._give_up(self._call)
        return super().cancel()

    def _settle(self, outcome: CallOutcome) -> None:
        with contextlib.suppress(InvalidStateError):  # it was just cancelled
            if outcome.error is not None:
                self.set_exception(outcome.error)
            else:
                self.set_result(outcome.value)


def _set_outcome(future: "asyncio.Future[CallOutcome]", outcome: CallOutcome) -> None:
    if not future.done():
        future.set_result(outcome)


def _outcome(work: Callable[[], object]) -> CallOutcome:
    try:
        return CallOutcome(work())
    except BaseException as error:  # on our own thread: every exception belongs to the call
        return CallOutcome(error=error)


async def run_either(
    work: functools.partial[Any], threads: Threads, timeout_s: float
) -> CallOutcome:
    """Run a user's function in a thread, or on the loop for user code if it is async."""
    if inspect.iscoroutinefunction(work.func):
        return await run_async(work, timeout_s)
    return await settled(await threads.run(work, timeout_s), timeout_s)


async def settled(outcome: CallOutcome, timeout_s: float) -> CallOutcome:
    """Return the outcome of a call, awaited if it is awaitable."""
    if not inspect.isawaitable(waiting := outcome.value):
        return outcome
    return await run_async(lambda: waiting, timeout_s)


async def run_async(
    work: Callable[[], Awaitable[Any]],
    timeout_s: float | None,
    *,
    reap_s: float = 0.0,
    name: str = "an async function",
) -> CallOutcome:
    """Run a user's coroutine on the loop for user code; raise TooLate after `timeout_s` seconds.

    All user coroutines of the process share that loop, so a session or semaphore in a user's file
    works for training, evaluation and the next run. Callers do not wait for a coroutine that
    swallows its cancellation: it is abandoned, which is logged.

    Args:
        work: starts it.
        timeout_s: timeout, seconds; None: no limit.
        reap_s: maximum wait for its end after a cancellation, seconds.
        name: its name in the log.
    """
    call = _AsyncCall(work, name)
    try:
        async with time_limit(timeout_s):
            call.start()  # inside, so the coroutine knows its time limits
            return await asyncio.wrap_future(call.outcome)
    except TimeoutError:  # only from the timeout; the function's own is in the outcome
        raise TooLate from None
    finally:
        if not call.outcome.done():
            call.cancel()
            if reap_s:
                await asyncio.wait([asyncio.wrap_future(call.outcome)], timeout=reap_s)


class _AsyncCall:
    """A user's coroutine on the loop for user code."""

    def __init__(self, work: Callable[[], Awaitable[object]], name: str) -> None:
        self.outcome: ThreadFuture[CallOutcome] = ThreadFuture()
        self.outcome.set_running_or_notify_cancel()  # a caller that stops waiting does not end it
        self._work, self._name = work, name
        self._task: asyncio.Task[CallOutcome] | None = None

    def start(self) -> None:
        """Start it, in the context of the caller."""
        _own_loop().call_soon_threadsafe(self._begin)

    def cancel(self) -> None:
        """Cancel it; log a warning later if it has not ended by then."""
        _own_loop().call_soon_threadsafe(self._cancel)

    def _begin(self) -> None:
        _pin(self)
        self._task = _own_loop().create_task(_awaited(self._work))
        self._task.add_done_callback(self._end)

    def _end(self, task: "asyncio.Task[CallOutcome]") -> None:
        """Store its outcome, even if it was cancelled before it started."""
        error = asyncio.CancelledError() if task.cancelled() else task.exception()
        self.outcome.set_result(task.result() if error is None else CallOutcome(error=error))
        _unpin(self)

    def _cancel(self) -> None:
        assert self._task is not None, "it was begun before"
        self._task.cancel()
        _own_loop().call_later(LEFT_S, self._warn_if_left)

    def _warn_if_left(self) -> None:
        if not self.outcome.done():
            log.warning(
                "%s does not end %g s after it was cancelled, and is abandoned: raise "
                "CancelledError again in code that catches BaseException.",
                self._name,
                LEFT_S,
            )


_pin, _unpin = ctypes.pythonapi.Py_IncRef, ctypes.pythonapi.Py_DecRef
"""Keep an object from being collected, also while the interpreter exits, and release it. A
collected coroutine is asked to end once more, on the thread of the collection; a coroutine that
swallows everything would block that thread forever."""
for _call in (_pin, _unpin):
    _call.argtypes, _call.restype = [ctypes.py_object], None


def start_async(work: Callable[[], Coroutine[None, None, T]]) -> "ThreadFuture[T]":
    """Start a coroutine on the loop for user code; return its future, for any other thread."""
    return asyncio.run_coroutine_threadsafe(work(), _own_loop())


async def _awaited(work: Callable[[], Awaitable[object]]) -> CallOutcome:
    try:
        return CallOutcome(await work())
    except BaseException as error:
        if is_the_runs_own_end(error):
            raise
        return CallOutcome(error=error)


@functools.cache
def _own_loop() -> asyncio.AbstractEventLoop:
    loop = asyncio.new_event_loop()
    loop.set_default_executor(DaemonThreads())
    threading.Thread(target=loop.run_forever, name="user-code", daemon=True).start()
    return loop


class DaemonThreads(ThreadPoolExecutor):
    """Threads for asyncio.to_thread on a loop for user code: a few threads with a queue. Neither
    the end of the loop nor the end of the process waits for them. A call that is cancelled while it
    runs keeps its thread, and another one replaces it."""

    def __init__(self, most: int = LOOP_THREADS) -> None:
        """most: maximum number of threads, without the threads of cancelled calls."""
        super().__init__(1)  # it starts no threads itself
        self._calls = Threads(most)

    def submit(
        self, function: Callable[..., T], /, *args: object, **named: object
    ) -> "ThreadFuture[T]":
        """Call a function on one of the threads. Raises RolloutError if MAX_STUCK are stuck."""
        return self._calls.submit(functools.partial(function, *args, **named))


def run_loop(work: Coroutine[None, None, T], *, reap_s: float = REAP_S) -> T:
    """Run a coroutine to its end on a separate event loop, as asyncio.run does, but abandon tasks
    that do not end within reap_s seconds after their cancellation, and wait for no thread."""
    loop = asyncio.new_event_loop()
    loop.set_default_executor(DaemonThreads())
    try:
        asyncio.set_event_loop(loop)
        return loop.run_until_complete(work)
    finally:
        left = asyncio.all_tasks(loop)
        for task in left:
            task.cancel()
        if left:
            _, left = loop.run_until_complete(asyncio.wait(left, timeout=reap_s))
        for task in left:
            log.warning("%r does not end when it is cancelled, and is abandoned", task)
            _pin(task)
        loop.run_until_complete(asyncio.wait_for(loop.shutdown_asyncgens(), reap_s))
        asyncio.set_event_loop(None)
        loop.close()


async def side_by_side(work: Iterable[Coroutine[None, None, T]]) -> list[T]:
    """Return all results in order, or raise the first exception and cancel the others.

    asyncio.TaskGroup is not used: in Python 3.11 it loses a cancellation that arrives while one of
    its tasks fails.
    """
    tasks = [asyncio.ensure_future(one) for one in work]
    failed: list[BaseException] = []

    def note_failure(task: "asyncio.Task[T]") -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            failed.append(error)

    for task in tasks:
        task.add_done_callback(note_failure)
    try:
        if tasks:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
        if failed:
            raise failed[0]
        return [task.result() for task in tasks]
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def end_tasks(tasks: Iterable["asyncio.Task[object]"]) -> None:
    """Cancel tasks until each of them has ended, again every CANCEL_AGAIN_S, since a task may have
    mistaken its cancellation for something else.

    Raises CancelledError at the end if this call is cancelled meanwhile.
    """
    tasks, cancelled = list(tasks), None
    while left := [task for task in tasks if not task.done()]:
        for task in left:
            task.cancel()
        try:
            await asyncio.wait(left, timeout=CANCEL_AGAIN_S)
        except asyncio.CancelledError as error:
            cancelled = error
    if cancelled is not None:
        raise cancelled
