"""The outstanding requests and questions of a sampler in another process. Pure host code.

    add ──> unsent ──take_sendable──> sent ──pop──> answered
              └── withdraw, once cancelled          └── finish: all remaining ones fail

Shared by the threads of the callers, the sender and the session.
"""

import itertools
import threading
from collections.abc import Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace

from jaxrl_async.errors import Closed, RolloutError
from jaxrl_async.ports.generate import Departure
from jaxrl_async.remote.sampler.answer_checks import checked_text
from jaxrl_async.sampler.batch.admission import WaitingQueue
from jaxrl_async.sampler.requests import CLOSED, CLOSED_TOO_EARLY, request_of
from jaxrl_async.sampler.router.job import fulfil
from jaxrl_async.types import Completion, Partial, Request

SENT_FACTOR = 3
"""Maximum number of requests sent to the sampler, as a multiple of its capacity. Its queue never
runs empty while there are more requests, and a burst from the router does not fill the
connection."""


@dataclass(slots=True, kw_only=True, eq=False)
class Outstanding:
    """A request that is not yet answered."""

    wire_id: str
    given: Request | Partial
    future: Future[Completion]
    sent: bool = False  # or being sent
    stopped: bool = False  # asked to end early
    oldest: int = 0  # version that the sampler used when this was sent

    @property
    def request(self) -> Request:
        """The request, under its caller's id."""
        return request_of(self.given)

    @property
    def on_wire(self) -> Request | Partial:
        """The request as it is sent: under its wire id, without KV."""
        request = replace(self.request, request_id=self.wire_id)
        if isinstance(self.given, Partial):
            return replace(self.given, request=request, kv=None, kv_version=None)
        return request


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """A question to the sampler, with a future for the answer."""

    number: int
    about: Outstanding | None  # None: all running requests
    answer: Future[tuple[Partial, ...]]


class OutstandingRequests:
    """Unanswered requests and questions of one sampler, and how it ended. Thread-safe.

    Attributes:
        capacity: Requests that the sampler holds at the same time.
        error: Error that ended it; set once, before anything fails.
        blamed: Ids of the requests that may have been on its device at that time.
        departure: How it left; None if it did not leave.
        closed: True if no more requests are accepted.
    """

    def __init__(self, capacity: int) -> None:
        """Start empty."""
        self.capacity = capacity
        self.error: BaseException | None = None
        self.blamed: frozenset[str] = frozenset()
        self.departure: Departure | None = None
        self.closed = False
        self._lock = threading.Lock()  # guards everything below, and writes to the above
        self._all: dict[str, Outstanding] = {}  # by wire id, in order of sending
        self._unsent: WaitingQueue[Outstanding] = WaitingQueue()  # subset of _all
        self._questions: dict[int, Question] = {}
        self._numbers = itertools.count()

    def __len__(self) -> int:
        return len(self._all)

    def add(self, requests: Sequence[Request | Partial]) -> list[Outstanding]:
        """Add requests. Raises the error that ended the sampler, and Closed."""
        new = [
            Outstanding(
                wire_id=f"{request_of(given).request_id}#{next(self._numbers)}",
                given=given,
                future=Future(),
            )
            for given in requests
        ]
        with self._lock:
            self._check_open()
            self._unsent.add(new)
            self._all |= {out.wire_id: out for out in new}
        return new

    def by_wire_id(self) -> dict[str, Outstanding]:
        """Return all current requests, in order of sending."""
        with self._lock:
            return dict(self._all)

    def take_sendable(self, version: int = 0) -> list[Outstanding]:
        """Take as many unsent requests as the sampler has room for, most urgent first, and mark
        them as sent. version: the sampler's current version."""
        with self._lock:
            room = SENT_FACTOR * self.capacity - (len(self._all) - len(self._unsent))
            taken: list[Outstanding] = []
            while len(taken) < room and (out := self._unsent.head()) is not None:
                self._unsent.admit(out)
                out.sent, out.oldest = True, version
                taken.append(out)
        return taken

    def pop(self, wire_ids: Iterable[str]) -> list[Outstanding | None]:
        """Remove answered requests; returns None for one that no longer exists."""
        with self._lock:
            return [self._all.pop(wire_id, None) for wire_id in wire_ids]

    def find(self, wire_id: str) -> Outstanding | None:
        """Return the request that an answer names; None: everything has ended. Raises RolloutError
        for a request that was not sent or is already answered."""
        with self._lock:
            if self.error is not None or self.closed:
                return None
            out = self._all.get(wire_id)
        if out is None or not out.sent:
            raise RolloutError(f"request {checked_text(wire_id)!r} is not outstanding.")
        return out

    def withdraw(self, out: Outstanding) -> bool:
        """Drop a cancelled request if it is unsent. Returns True if the sampler has it and must be
        notified."""
        with self._lock:
            if out in self._unsent:
                self._unsent.remove(out)
                del self._all[out.wire_id]
            return out.wire_id in self._all

    def find_running(self, request_id: str, *, stop: bool) -> Outstanding | None:
        """Return the running request with this caller's id, the last one if there are several.

        stop: it will be asked to end early.
        """
        with self._lock:
            running = [
                out
                for out in self._all.values()
                if out.request.request_id == request_id and out.sent and not out.future.done()
            ]
            if not running:
                return None
            running[-1].stopped |= stop
            return running[-1]

    # ---- questions

    def ask(self, about: Outstanding | None) -> Question:
        """Add a question. Raises the error that ended the sampler, and Closed."""
        question = Question(number=next(self._numbers), about=about, answer=Future())
        with self._lock:
            self._check_open()
            self._questions[question.number] = question
        return question

    def question(self, number: int) -> Question | None:
        """Return the question with this number; None: its answer is no longer awaited."""
        with self._lock:
            return self._questions.get(number)

    def forget(self, question: Question) -> None:
        """Remove a question, answered or not."""
        with self._lock:
            self._questions.pop(question.number, None)

    # ---- the end

    def close(self) -> None:
        """Accept no more requests or questions."""
        with self._lock:
            self.closed = True

    def finish(
        self,
        error: BaseException,
        *,
        departure: Departure | None = None,
        blamed: frozenset[str] = frozenset(),
    ) -> None:
        """Fail all requests and questions with this error; keep how it ended from the first
        call."""
        with self._lock:
            if self.error is None:
                self.departure, self.blamed = departure, blamed
                if self.closed:
                    error = Closed(CLOSED_TOO_EARLY)
                else:
                    self.error = error
            outs, self._all = list(self._all.values()), {}
            questions, self._questions = list(self._questions.values()), {}
            self._unsent.clear()
        for future in (*(out.future for out in outs), *(question.answer for question in questions)):
            fulfil(future, error)

    def _check_open(self) -> None:
        if self.error is not None:
            raise self.error
        if self.closed:
            raise Closed(CLOSED)
