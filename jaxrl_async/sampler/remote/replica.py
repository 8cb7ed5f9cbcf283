"""A sampler in another process as one of the router's replicas: the trainer's side.

    start_many ──> unsent ──Start, as it has room──> │ wire │ ──Answers──> checked ──> futures
    cancelled futures ──────────────one Cancel────> │      │
    progress, save ────────────────────────Ask────> │      │ ──Reply──> whoever asked

A thread of its own sends, so that nobody waits for the wire; the session's thread takes in.
Requests go under ids of the wire's own: a caller may use an id twice. What cannot be true ends the
session, and the router gives the requests to another sampler. Works without JAX.
"""

import itertools
import logging
import math
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from jaxrl_async.errors import Closed, Disconnected, RolloutError
from jaxrl_async.ports import Departure, Session
from jaxrl_async.sampler.lifetime import Lifetime
from jaxrl_async.sampler.remote.answer_checks import (
    checked_completion,
    checked_drawn,
    checked_stats,
    checked_text,
)
from jaxrl_async.sampler.remote.batching import send_all
from jaxrl_async.sampler.request_checks import RequestCheck
from jaxrl_async.sampler.router.job import fulfil
from jaxrl_async.sampler.stats import SamplerStats
from jaxrl_async.types import Completion, Partial, Request
from jaxrl_async.wire.messages import (
    Answers,
    Ask,
    Beat,
    Cancel,
    Died,
    Failure,
    Leave,
    Leaving,
    Reply,
    Start,
)

log = logging.getLogger(__name__)

PROGRESS_WAIT_S = 10.0
"""Longest wait for a sampler's report of what it is drawing, seconds; then the last one counts."""
SAVE_WAIT_S = 60.0
"""Longest wait for a request as data, seconds: a decode block, and the wire."""
WIRE_PLACES = 3
"""Most requests that the sampler is sent, as a multiple of its places: its queue never runs dry
while there are more, and those that wait here can go to a sampler that joins."""
CLOSE_WAIT_S = 10.0
"""Longest wait for the sending thread at the end, seconds."""
CLOSED_TOO_EARLY = "the sampler was closed before the request was done"
"""The message to callers whose request was not done when the replica was closed."""


@dataclass(slots=True, kw_only=True, eq=False)
class Outstanding:
    """A request that is not answered."""

    wire_id: str
    given: Request | Partial
    future: Future[Completion]
    sent: bool = False  # or being sent
    stopped: bool = False  # it was told to end early

    @property
    def request(self) -> Request:
        """The request, under its caller's id."""
        return self.given.request if isinstance(self.given, Partial) else self.given

    @property
    def on_wire(self) -> Request | Partial:
        """The request as it is sent: under the wire's id, without KV."""
        request = replace(self.request, request_id=self.wire_id)
        if isinstance(self.given, Partial):
            return replace(self.given, request=request, kv=None, kv_version=None)
        return request


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """What the sampler was asked, and who waits for the answer."""

    about: Outstanding | None  # None: all that is running
    answer: Future[tuple[Partial, ...]]


class RemoteReplica:
    """A ports.Replica over a session with the ReplicaServer of a sampler that has joined.

    Attributes:
        places: Requests that the sampler holds at once; its beats say how many.
        error: Why it ended: it left, died, or was cut off (Disconnected).
        blamed: Ids of the requests that may have been on its device then.
        departure: How it left; None: it did not.
    """

    replaceable = False

    def __init__(
        self,
        session: Session,
        check: RequestCheck,
        *,
        places: int,
        newest: Callable[[], int],
        count: Callable[[str, int], None] = lambda name, number: None,
        has_logprobs: bool = True,
    ) -> None:
        """Take the session's messages about requests from now on.

        Args:
            session: With the sampler.
            check: Of the requests; the same for all samplers.
            places: Requests that the sampler holds at once, until it says so itself.
            newest: Returns the newest version that any sampler may have.
            count: Called with the name of each fault and how often (metrics.fault_counts).
            has_logprobs: See ports.Replica.
        """
        self.places, self.has_logprobs = places, has_logprobs
        self.error: BaseException | None = None
        self.blamed: frozenset[str] = frozenset()
        self.departure: Departure | None = None
        self._session, self._check, self._newest, self._count = session, check, newest, count
        self._lifetime = Lifetime(self, RemoteReplica.send_queued, name=f"replica {session.peer}")
        self._lock = threading.Lock()  # guards all below, and the three above as they are set
        self._outstanding: dict[str, Outstanding] = {}  # by wire id, in the order of sending
        self._unsent: dict[str, Outstanding] = {}  # of the outstanding, in order
        self._to_send: list[Any] = []  # other messages
        self._asked: dict[int, Question] = {}
        self._numbers = itertools.count()
        self._closed = False
        self._ending: str | None = None  # why the session is to end
        self._stats = SamplerStats()
        self._reported: dict[str, Partial] = {}  # by the last progress, by wire id
        self._session_thread: int | None = None
        session.on(Answers, self._take_answers)
        session.on(Reply, self._take_reply)
        session.on(Beat, self._take_beat)
        session.on(Died, self._take_died)
        session.on(Leaving, self._take_leaving)
        session.on_end(self._cut_off)

    def __str__(self) -> str:
        return self._session.peer

    @property
    def unsent(self) -> list[Future[Completion]]:
        """See ports.Replica: those beyond what the sampler is sent at a time."""
        with self._lock:
            return [out.future for out in self._unsent.values()]

    @property
    def seed(self) -> int | None:
        """See ports.Generate."""
        return self._check.room.seed

    def stats(self) -> SamplerStats:
        """Return the statistics of the last beat."""
        return self._stats

    # ---- its life

    def start(self) -> None:
        """Start the thread that sends."""
        self._lifetime.start()

    def close(self) -> None:
        """Tell the sampler to go, and end the session; requests that are not done fail with Closed.
        Idempotent."""
        if self._lifetime.is_forked:
            return
        with self._lock:
            self._closed = True
        self._end_session("the run has ended")
        self._lifetime.stop(CLOSE_WAIT_S)
        self._finish(Closed(CLOSED_TOO_EARLY))

    def abandon(self) -> None:
        """End the session without waiting, and ignore whatever it still brings."""
        self._end_session(f"taken out by the trainer: {self.error or 'no progress'}")
        self._finish(Disconnected(f"{self._session.peer} was taken out"))

    def successor(self) -> "RemoteReplica":
        """Raise RolloutError: another process must join."""
        raise RolloutError(f"{self._session.peer} is a process of its own: nobody can replace it.")

    def leave(self, reason: str) -> None:
        """Ask the sampler to hand back its requests and to go."""
        self._send(Leave(reason=reason))

    def check_waits(self) -> None:
        """Raise RolloutError where waiting for an answer would never end: on the session's thread,
        which brings it, or in a forked process."""
        self._lifetime.check_process()
        if self._session_thread == threading.get_ident():
            raise RolloutError(
                "a callback of a request waits for a sampler on the thread that brings its "
                "answers: it would wait for ever. Use start_many, or another thread."
            )

    # ---- requests

    def checked(self, requests: Sequence[Request | Partial]) -> list[Request | Partial]:
        """See ports.Replica."""
        return self._check.checked(requests)

    def start_many(self, requests: Sequence[Request | Partial]) -> list[Future[Completion]]:
        """See ports.Replica; returns at once, whatever the wire does."""
        self._lifetime.check_process()
        new = [
            Outstanding(
                wire_id=f"{_request_of(given).request_id}#{next(self._numbers)}",
                given=given,
                future=Future(),
            )
            for given in self.checked(requests)
        ]
        with self._lock:
            self._check_open()
            self._unsent |= {out.wire_id: out for out in new}
            self._outstanding |= {out.wire_id: out for out in new}
        for out in new:
            out.future.add_done_callback(partial(self._done, out))
        self._wake()
        return [out.future for out in new]

    def progress(self) -> tuple[Partial, ...]:
        """See ports.Generate. If the sampler does not answer in time: what it reported last, of the
        requests that are still running."""
        self.check_waits()
        try:
            return self._ask(Ask(number=next(self._numbers)), None, PROGRESS_WAIT_S)
        except TimeoutError:
            log.warning("%s does not report its progress: its last report counts", self)
        with self._lock:
            reported = self._reported
            return tuple(p for i, p in reported.items() if i in self._outstanding)

    def save(self, request_id: str, *, stop: bool = False, with_kv: bool = True) -> Partial:
        """See ports.Replica; always without KV, which is larger than what it saves. Raises
        TimeoutError if the sampler does not answer."""
        self.check_waits()
        with self._lock:
            found = [
                out
                for out in self._outstanding.values()
                if out.request.request_id == request_id and out.sent and not out.future.done()
            ]
            if found:
                found[-1].stopped |= stop
        if not found:
            raise RolloutError(f"request {request_id!r} is not running in {self}.")
        ask = Ask(number=next(self._numbers), request_id=found[-1].wire_id, stop=stop)
        (saved,) = self._ask(ask, found[-1], SAVE_WAIT_S)
        return saved

    def _ask(self, ask: Ask, about: Outstanding | None, wait_s: float) -> tuple[Partial, ...]:
        """Return the sampler's answer. Raises TimeoutError, RolloutError, and the error that ended
        the replica."""
        answer: Future[tuple[Partial, ...]] = Future()
        with self._lock:
            self._check_open()
            self._asked[ask.number] = Question(about=about, answer=answer)
        self._send(ask)
        try:
            return answer.result(wait_s)
        except TimeoutError:
            raise TimeoutError(f"{self} did not answer within {wait_s:.0f} s") from None
        finally:
            with self._lock:
                self._asked.pop(ask.number, None)

    def _check_open(self) -> None:
        if self.error is not None:
            raise self.error
        if self._closed:
            raise Closed("the sampler is closed")

    def _done(self, out: Outstanding, future: "Future[Completion]") -> None:
        """Tell the sampler that nobody waits any more, if the caller has given up."""
        if not future.cancelled():
            return
        with self._lock:
            if self._unsent.pop(out.wire_id, None) is not None:
                del self._outstanding[out.wire_id]
            if out.wire_id not in self._outstanding:
                return
        self._send(Cancel(request_ids=(out.wire_id,)))

    # ---- the sending thread

    def _send(self, message: Any) -> None:
        with self._lock:
            self._to_send.append(message)
        self._wake()

    def _wake(self) -> None:
        self._lifetime.start()
        self._lifetime.wake.set()

    def _end_session(self, reason: str) -> None:
        with self._lock:
            self._ending = self._ending or reason
        self._wake()

    def send_queued(self) -> float | None:
        """Send what has been asked for since the last round; return how long to sleep (Lifetime).

        consumes      requests and questions of other threads
        waits for     lifetime.wake; the wire, while too much is on it
        produces      messages
        on failure    the session has ended: whoever watches it (_cut_off) fails the requests
        """
        with self._lock:
            starts = self._next_starts()
            others, self._to_send = self._to_send, []
            ending = self._ending
        try:
            if ending is None:
                self._send_starts(starts)
                for message in _joined(others):
                    self._session.send(message)
                return math.inf
            if self._closed:
                self._session.send(Leave(reason=ending))
            self._session.end(ending)
        except Disconnected as error:
            log.debug("%s: %s", self, error)
        return None

    def _next_starts(self) -> list[Outstanding]:
        """Take as many of the unsent requests as the sampler has room for. Under the lock."""
        room = WIRE_PLACES * self.places - (len(self._outstanding) - len(self._unsent))
        starts: list[Outstanding] = []
        while self._unsent and len(starts) < room:
            out = self._unsent.pop(next(iter(self._unsent)))
            out.sent = True
            starts.append(out)
        return starts

    def _send_starts(self, starts: Sequence[Outstanding]) -> None:
        requests = [out.on_wire for out in starts]
        for given, error in send_all(self._session, requests, lambda r: Start(requests=r)):
            with self._lock:
                out = self._outstanding.pop(_request_of(given).request_id, None)
            if out is not None:
                fulfil(out.future, error)

    # ---- the session's thread

    def _take_answers(self, message: Answers) -> None:
        """Check the answers, all before any counts, and pass them on. Raises RolloutError."""
        results = self._checked("an answer", lambda: self._results(message))
        with self._lock:
            done = [(self._outstanding.pop(wire_id, None), r) for wire_id, r in results.items()]
        self._wake()  # there is room for more
        for out, result in done:
            if out is not None:  # else it was closed meanwhile
                fulfil(out.future, result)

    def _results(self, message: Answers) -> dict[str, Completion | RolloutError]:
        if not (
            isinstance(message.completions, tuple)
            and isinstance(message.failures, tuple)
            and all(isinstance(c, Completion) for c in message.completions)
            and all(isinstance(f, Failure) for f in message.failures)
        ):
            raise RolloutError("Answers must hold completions and failures.")
        results: dict[str, Completion | RolloutError] = {}
        answers: list[Completion | Failure] = [*message.completions, *message.failures]
        for answer in answers:
            if answer.request_id in results:
                raise RolloutError(f"request {answer.request_id!r} is answered twice.")
            out = self._found(answer.request_id)
            if out is None:
                continue
            if isinstance(answer, Failure):
                results[out.wire_id] = RolloutError(f"{self}: {checked_text(answer.error)}")
                continue
            results[out.wire_id] = checked_completion(
                answer,
                out.request,
                self._check.room,
                newest=self._newest(),
                stopped=out.stopped,
            )
        return results

    def _found(self, wire_id: Any) -> Outstanding | None:
        """Return the request of this id; None: the replica has ended. Raises RolloutError for one
        that is not outstanding."""
        with self._lock:
            if self.error is not None or self._closed:
                return None
            out = self._outstanding.get(wire_id) if isinstance(wire_id, str) else None
        if out is None or not out.sent:
            raise RolloutError(f"request {checked_text(wire_id)!r} is not outstanding.")
        return out

    def _take_reply(self, message: Reply) -> None:
        """Give what is drawn to whoever asked. Raises RolloutError."""
        with self._lock:
            asked = self._asked.get(message.number)
        if asked is None:
            return  # nobody waits any more
        if message.error:
            fulfil(asked.answer, RolloutError(f"{self}: {checked_text(message.error)}"))
        elif asked.about is None:
            fulfil(asked.answer, self._checked("a report", lambda: self._report(message.partials)))
        else:
            out = asked.about
            fulfil(asked.answer, self._checked("a save", lambda: self._saved(message, out)))

    def _report(self, partials: Any) -> tuple[Partial, ...]:
        """Return what all running requests have drawn, and keep it."""
        drawn = self._drawn(partials)
        with self._lock:
            given = {i: out.given for i, out in self._outstanding.items()}
        waiting = {i: g for i, g in given.items() if isinstance(g, Partial)}  # here, or there
        self._reported = waiting | drawn
        return tuple(self._reported.values())

    def _saved(self, message: Reply, out: Outstanding) -> tuple[Partial, ...]:
        """Return the one request that was saved, which may have ended since."""
        (saved,) = message.partials
        return (checked_drawn(saved, out.request, self._check.room, newest=self._newest()),)

    def _take_beat(self, message: Beat) -> None:
        """Keep the statistics. Raises RolloutError."""
        self._stats = self._checked("a beat", lambda: checked_stats(message.stats))
        if isinstance(message.places, int) and 0 < message.places < 2**31:
            self.places = message.places

    def _take_died(self, message: Died) -> None:
        with self._lock:
            outs = [self._outstanding.get(i) for i in message.blamed if isinstance(i, str)]
        blamed = frozenset(out.request.request_id for out in outs if out is not None)
        self._finish(RolloutError(f"{self} died: {checked_text(message.error)}"), blamed=blamed)

    def _take_leaving(self, message: Leaving) -> None:
        """Take back the requests. Raises RolloutError."""
        drawn = self._checked("what it hands back", lambda: self._drawn(message.partials))
        with self._lock:
            partials = {
                self._outstanding[i].future: p for i, p in drawn.items() if i in self._outstanding
            }
        departure = Departure(reason=checked_text(message.reason), partials=partials)
        gone = Disconnected(f"{self} has left: {departure.reason}")
        self._finish(gone, departure=departure)

    def _cut_off(self, reason: str) -> None:
        """Fail the requests: the session has ended. Those that were sent first may have been on the
        device."""
        with self._lock:
            sent = [out for out in self._outstanding.values() if out.sent]
        blamed = frozenset(out.request.request_id for out in sent[: self.places])
        self._finish(Disconnected(f"{self}: {reason}"), blamed=blamed)

    def _drawn(self, partials: Any) -> dict[str, Partial]:
        """Return the checked partials of requests that are still outstanding, by wire id. One with
        a log-prob that is not finite is left out: its request begins again."""
        if not isinstance(partials, tuple) or not all(isinstance(p, Partial) for p in partials):
            raise RolloutError("it must hold Partials.")
        with self._lock:
            known = [(p, self._outstanding.get(p.request.request_id)) for p in partials]
        drawn = {
            out.wire_id: checked_drawn(p, out.request, self._check.room, newest=self._newest())
            for p, out in known
            if out is not None and not out.future.done()
        }
        if not self.has_logprobs:
            return drawn
        return {i: p for i, p in drawn.items() if np.isfinite(p.logprobs).all()}

    def _checked(self, what: str, check: Callable[[], Any]) -> Any:
        """Return what the check returns. What it refuses is counted, ends the replica at once, and
        the session by raising RolloutError."""
        self._session_thread = threading.get_ident()
        try:
            return check()
        except (RolloutError, TypeError, AttributeError, ValueError) as error:
            self._count("refused_answers", 1)
            self._cut_off(f"{what} cannot be true: {error}")
            raise RolloutError(f"{what} of {self} cannot be true: {error}") from error

    def _finish(
        self,
        error: BaseException,
        *,
        departure: Departure | None = None,
        blamed: frozenset[str] = frozenset(),
    ) -> None:
        """Fail everything with this error, the first time; the router looks at the rest."""
        with self._lock:
            if self.error is None:
                self.departure, self.blamed = departure, blamed
                if self._closed:
                    error = Closed(CLOSED_TOO_EARLY)
                else:
                    self.error = error
            outs, self._outstanding = list(self._outstanding.values()), {}
            asked, self._asked = list(self._asked.values()), {}
            self._unsent.clear()
        for future in (*(out.future for out in outs), *(question.answer for question in asked)):
            fulfil(future, error)


def _request_of(given: Request | Partial) -> Request:
    return given.request if isinstance(given, Partial) else given


def _joined(messages: Sequence[Any]) -> list[Any]:
    """Return the messages with all cancellations in one, in front."""
    ids = tuple(i for m in messages if isinstance(m, Cancel) for i in m.request_ids)
    rest = [m for m in messages if not isinstance(m, Cancel)]
    return [Cancel(request_ids=ids), *rest] if ids else rest
