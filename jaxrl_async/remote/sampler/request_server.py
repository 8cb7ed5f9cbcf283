"""Serves a sampler over a session: the sampler's side, in its own process.

    │ wire │ ──Start, Cancel──> Sampler ──futures──> done ──one Answers for all──> │ wire │
    │      │ ──Ask──> task thread: progress, save ───────────────RemoteReply──> │      │
    │      │ ──Profile──> task thread: a trace of this process ──Profiled─────> │      │
    │      │ ──Leave, or a signal──> partials, between two blocks ──Leaving─────> │      │

Each request is answered or handed back exactly once; a cancelled request is answered by a
RemoteFailure. Requests that arrive after the decision to leave are ignored: the trainer reassigns
them when it receives the Leaving message after all answers. One thread sends; another runs the
calls to the sampler that may take a decode block.
"""

import concurrent.futures
import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import asdict, replace
from functools import partial

import numpy as np

from jaxrl_async.errors import Closed, ConfigError, Disconnected, RolloutError
from jaxrl_async.profiling import MOST_SENT_BYTES, SAMPLER_S, ProcessTrace, ProfileError
from jaxrl_async.remote.sampler.message_batches import send_all
from jaxrl_async.remote.wire.messages import (
    Answers,
    Ask,
    Beat,
    Cancel,
    Died,
    Leave,
    Leaving,
    Profile,
    Profiled,
    RemoteFailure,
    RemoteReply,
    Start,
)
from jaxrl_async.remote.wire.session_port import Session
from jaxrl_async.sampler.lifetime import Lifetime
from jaxrl_async.sampler.requests import request_of
from jaxrl_async.sampler.sampler import Sampler
from jaxrl_async.sampler.stats import SamplerStats
from jaxrl_async.types import Completion, Partial

log = logging.getLogger(__name__)

HAND_BACK_S = 60.0
"""Maximum wait for the partials when it leaves, seconds: a block, and a swap before it."""
STOP_S = 10.0
"""Maximum wait for a thread at the end, seconds."""
FRESH_S = 0.02
"""Maximum age of the statistics when answers are sent, seconds: a step's metrics are read when its
last answer has arrived."""


class ReplicaServer:
    """Serves the requests of one session with a sampler. It closes neither of them.

    Attributes:
        over: Set when the session has ended, for any reason.
        reason: Why it ended.
        dismissed: True if the trainer asked the sampler to leave.
    """

    def __init__(self, session: Session, sampler: Sampler, *, beat_s: float) -> None:
        """Create the server; start() begins serving.

        Args:
            session: With the trainer.
            sampler: Gets all its requests from this session.
            beat_s: Time between two reports of the statistics, seconds.
        """
        self.over, self.reason, self.dismissed = threading.Event(), "", False
        self._session, self._sampler, self._beat_s = session, sampler, beat_s
        self._sender = Lifetime(self, ReplicaServer.send_done, name="answers")
        self._task_runner = Lifetime(self, ReplicaServer.run_tasks, name="questions")
        self._lock = threading.Lock()  # guards everything below
        self._held: dict[str, Future[Completion]] = {}  # neither answered nor handed back
        self._completions: list[Completion] = []
        self._failures: list[RemoteFailure] = []
        self._messages: list[tuple[object, Callable[[str], object]]] = []  # see _queue
        self._tasks: deque[Callable[[], None]] = deque()  # for the task thread
        self._is_leaving = False  # takes no more requests
        self._leaving: Leaving | None = None  # the final message
        self._next_beat_s = 0.0
        self._sent_swaps = 0  # in the last beat
        self._trace: ProcessTrace | None = None  # running; used by the task thread only

    def start(self) -> None:
        """Start serving the session's requests."""
        self._sampler.start()  # it applies new weights before its first request
        self._session.on_end(self._ended)
        self._session.on(Start, self._take_start)
        self._session.on(Cancel, self._take_cancel)
        self._session.on(Ask, lambda ask: self._queue_task(partial(self._answer, ask)))
        self._session.on(Profile, lambda m: self._queue_task(partial(self._profile, m)))
        self._session.on(Leave, self._take_leave)
        self._sender.start()
        self._task_runner.start()

    def leave(self, reason: str, timeout_s: float = HAND_BACK_S) -> bool:
        """Hand back running requests and end the session; block until then. Returns False if the
        sampler does not finish a block in that time; its requests then restart elsewhere."""
        self.begin_to_leave(reason)
        if self.over.wait(timeout_s):
            return True
        log.error(
            "no block finished within %.0f s: the sampler leaves without its requests", timeout_s
        )
        self._queue_leaving(reason, ())
        self.over.wait(STOP_S)
        return False

    def begin_to_leave(self, reason: str) -> None:
        """Start to leave without waiting. Idempotent."""
        with self._lock:
            if self._is_leaving:
                return
            self._is_leaving = True
        self._queue_task(lambda: self._hand_back(reason))

    def close(self) -> None:
        """End the session without handing anything back. Idempotent."""
        if self._sender.is_forked:
            return
        if not self.over.is_set():
            self._session.end("the sampler has been closed")
        self._sender.stop(STOP_S)
        self._task_runner.stop(STOP_S)

    # ---- the session's thread

    def _take_start(self, message: Start) -> None:
        """Queue the requests; one that cannot be served fails separately. Raises RolloutError for
        an id that is in use."""
        with self._lock:
            if self._is_leaving:
                return  # the trainer reassigns them
            good, ids = [], []
            for given in message.requests:
                wire_id = request_of(given).request_id
                if wire_id in self._held or wire_id in ids:
                    raise RolloutError(f"request {wire_id!r} is already running.")
                try:
                    good += self._sampler.checked([given])
                    ids.append(wire_id)
                except RolloutError as error:
                    self._failures.append(RemoteFailure(request_id=wire_id, error=str(error)))
            try:
                futures = self._sampler.start_many(good)
            except Exception as error:
                if self._sampler.error is None:
                    raise  # ends the session; other samplers get the requests
                log.error("the sampler accepts no requests: %s", error)
                futures = []
            self._held |= zip(ids, futures, strict=False)
        for wire_id, future in zip(ids, futures, strict=False):
            future.add_done_callback(partial(self._done, wire_id))
        self._sender.wake.set()

    def _take_cancel(self, message: Cancel) -> None:
        with self._lock:
            futures = [self._held.get(wire_id) for wire_id in message.request_ids]
        for future in futures:
            if future is not None:  # else it was just answered
                future.cancel()

    def _queue_task(self, task: Callable[[], None]) -> None:
        """Queue a task of the task thread."""
        with self._lock:
            self._tasks.append(task)
        self._task_runner.wake.set()

    def _take_leave(self, message: Leave) -> None:
        self.dismissed = True
        self.begin_to_leave(message.reason)

    def _ended(self, reason: str) -> None:
        """Stop serving, and cancel the running requests."""
        with self._lock:
            held, self._held = list(self._held.values()), {}
        for future in held:
            future.cancel()
        self.reason = self.reason or reason
        self.over.set()
        for lifetime in (self._sender, self._task_runner):
            with lifetime.lock:
                lifetime.closed = True
            lifetime.wake.set()

    # ---- the sampler's thread

    def _done(self, wire_id: str, future: "Future[Completion]") -> None:
        """Queue the answer to a request, unless it was handed back. May also run on a cancelling
        thread."""
        error = None if future.cancelled() else future.exception()
        with self._lock:
            if isinstance(error, Closed) or self._sampler.error is not None:
                pass  # reported with the session's end
            elif self._held.pop(wire_id, None) is None:
                return
            elif future.cancelled():
                self._failures.append(RemoteFailure(request_id=wire_id, error="cancelled"))
            elif error is not None:
                self._failures.append(RemoteFailure(request_id=wire_id, error=str(error)))
            else:
                self._completions.append(future.result())
        self._sender.wake.set()

    # ---- the sending thread

    def send_done(self) -> float | None:
        """Send everything that is done; return how long to sleep (Lifetime), None at the end.

        consumes      answers of the sampler's thread and of the task thread
        waits for     `wake`, the next beat, and the connection while its queue is full
        produces      Answers, then replies to earlier questions and Profiled; Beat; finally Died
                      or Leaving
        on failure    the session has ended: `over` is set by the session
        """
        if self._sender.closed:
            return None
        with self._lock:
            completions, self._completions = self._completions, []
            failures, self._failures = self._failures, []
            messages, self._messages = self._messages, []
            leaving = self._leaving
        try:
            if completions:
                self._refresh_stats()
            self._send_answers(completions, failures)
            for message, fallback in messages:
                self._send(message, fallback)
            died = self._sampler.error
            if died is not None:
                blamed = tuple(self._sampler.blamed)
                self._session.send(Died(error=f"{type(died).__name__}: {died}", blamed=blamed))
                self._session.end(f"the sampler died: {died}")
                return None
            if leaving is not None:
                self._send(leaving, lambda error: replace(leaving, partials=()))
                self._session.end(f"it leaves: {leaving.reason}")
                return None
            return self._beat()
        except Disconnected as error:
            log.debug("the session has ended: %s", error)
            return None

    def _send_answers(self, completions: list[Completion], failures: list[RemoteFailure]) -> None:
        too_large = send_all(self._session, completions, lambda c: Answers(completions=c))
        failures += [RemoteFailure(request_id=c.request_id, error=str(e)) for c, e in too_large]
        send_all(self._session, failures, lambda f: Answers(failures=f))

    def _send(self, message: object, fallback: Callable[[str], object]) -> None:
        """Send a message. If it is too large, log that, and send what `fallback` returns for the
        error."""
        try:
            self._session.send(message)
        except ConfigError as error:
            log.error("not sent: %s", error)
            self._session.send(fallback(str(error)))

    def _beat(self) -> float:
        """Send the statistics if they are due; return the time until they are due again."""
        now = time.monotonic()
        if now >= self._next_beat_s:
            self._send_beat(self._sampler.stats(), now)
        return max(self._next_beat_s - now, 0.001)

    def _refresh_stats(self) -> None:
        """Send the statistics before answers if they are old, or older than the weights that
        generated the answers."""
        stats, now = self._sampler.stats(), time.monotonic()
        sent_s = self._next_beat_s - self._beat_s
        if stats.swaps != self._sent_swaps or now > sent_s + FRESH_S:
            self._send_beat(stats, now)

    def _send_beat(self, stats: SamplerStats, now: float) -> None:
        """Send the statistics; the next regular beat is timed from now."""
        self._next_beat_s, self._sent_swaps = now + self._beat_s, stats.swaps
        self._session.send(Beat(stats=asdict(stats), places=self._sampler.capacity))

    # ---- the task thread

    def run_tasks(self) -> float | None:
        """Run the queued tasks in order; return how long to sleep (Lifetime)."""
        while not self._task_runner.closed:
            with self._lock:
                if not self._tasks:
                    return math.inf
                task = self._tasks.popleft()
            task()
        if self._trace is not None:
            self._trace.drop()
        return None

    def _answer(self, ask: Ask) -> None:
        try:
            if ask.request_id is None:
                partials = self._sampler.progress()
            else:
                saved = self._sampler.save(ask.request_id, stop=ask.stop, with_kv=False)
                partials = (saved,)
            reply = RemoteReply(number=ask.number, partials=partials)
        except Exception as error:
            reply = RemoteReply(number=ask.number, error=f"{type(error).__name__}: {error}")
        self._queue(reply, lambda error: RemoteReply(number=ask.number, error=error))

    def _profile(self, message: Profile) -> None:
        """Begin the trace of a step, or end it and queue it for sending."""
        trace, self._trace = self._trace, None
        try:
            if message.on:
                if trace is not None:
                    trace.drop()
                self._trace = ProcessTrace(SAMPLER_S)
                return
            if trace is None:
                return  # it failed to begin, which was reported
            files = {k: np.frombuffer(v, np.uint8) for k, v in trace.files().items()}
            if (size := sum(f.nbytes for f in files.values())) > MOST_SENT_BYTES:
                raise ProfileError(
                    f"the trace has {size / 2**20:.0f} MiB, above the limit of "
                    f"{MOST_SENT_BYTES >> 20}"
                )
            profiled = Profiled(step=message.step, files=files)
        except (ProfileError, OSError) as error:
            profiled = Profiled(step=message.step, files={}, error=str(error))
        self._queue(profiled, lambda error: Profiled(step=message.step, files={}, error=error))

    def _queue(self, message: object, fallback: Callable[[str], object]) -> None:
        """Queue a message; see _send."""
        with self._lock:
            self._messages.append((message, fallback))
        self._sender.wake.set()

    def _hand_back(self, reason: str) -> None:
        """Take the partials out of the sampler, wait for finished answers, and leave."""
        try:
            unfinished = self._sampler.unfinished()
        except Exception as error:
            if self.over.is_set():
                return  # the session is over: nothing can be handed back
            log.error("the partials cannot be handed back: %s", error)
            self._queue_leaving(reason, ())
            return
        with self._lock:
            partials = [p for p in unfinished if p.request.request_id in self._held]
            futures = [self._held.pop(p.request.request_id) for p in partials]
            done = list(self._held.values())  # their answers are about to be sent
        for future in futures:
            future.cancel()
        concurrent.futures.wait(done, STOP_S)
        self._queue_leaving(reason, tuple(p for p in partials if len(p.token_ids)))

    def _queue_leaving(self, reason: str, partials: tuple[Partial, ...]) -> None:
        """Queue the final message; requests not answered by now are not answered."""
        with self._lock:
            self._held.clear()
            self._leaving = self._leaving or Leaving(reason=reason, partials=partials)
        self._sender.wake.set()
