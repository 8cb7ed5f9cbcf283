"""What a sampler in another process has to answer, until it has answered or has ended. Pure host
code.

    add ──> unsent ──take_sendable──> sent ──pop──> answered
              └── withdraw, once nobody waits       └── finish: all that is left fails

The threads of callers, of the sender and of the session share it.
"""

import itertools
import threading
from collections.abc import Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import Any

from jaxrl_async.errors import Closed, RolloutError
from jaxrl_async.ports.sampling import Departure
from jaxrl_async.remote.sampler.answer_checks import checked_text
from jaxrl_async.sampler.batch.admission import WaitingQueue
from jaxrl_async.sampler.requests import CLOSED, CLOSED_TOO_EARLY
from jaxrl_async.sampler.router.job import fulfil
from jaxrl_async.types import Completion, Partial, Request

WIRE_PLACES = 3
"""Most requests that the sampler is sent, as a multiple of its places: its queue never runs dry
while there are more, and however many the router deals at once, the wire is not filled."""


@dataclass(slots=True, kw_only=True, eq=False)
class Outstanding:
    """A request that is not answered."""

    wire_id: str
    given: Request | Partial
    future: Future[Completion]
    sent: bool = False  # or being sent
    stopped: bool = False  # it was told to end early
    oldest: int = 0  # version from which the sampler drew before it was sent this

    @property
    def request(self) -> Request:
        """The request, under its caller's id."""
        return request_of(self.given)

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

    number: int
    about: Outstanding | None  # None: all that is running
    answer: Future[tuple[Partial, ...]]


class OutstandingRequests:
    """The requests and questions that one sampler has not answered, and how it ended. Thread safe.

    Attributes:
        places: Requests that the sampler holds at once.
        error: Why it ended; set once, before anything fails.
        blamed: Ids of the requests that may have been on its device then.
        departure: How it left; None: it did not.
        closed: Whether nobody is to ask for more.
    """

    def __init__(self, places: int) -> None:
        """Begin without any."""
        self.places = places
        self.error: BaseException | None = None
        self.blamed: frozenset[str] = frozenset()
        self.departure: Departure | None = None
        self.closed = False
        self._lock = threading.Lock()  # guards all below, and the above as they are set
        self._all: dict[str, Outstanding] = {}  # by wire id, in the order of sending
        self._unsent: WaitingQueue[Outstanding] = WaitingQueue()  # of all
        self._questions: dict[int, Question] = {}
        self._numbers = itertools.count()

    def __len__(self) -> int:
        return len(self._all)

    def add(self, requests: Sequence[Request | Partial]) -> list[Outstanding]:
        """Take requests in. Raises the error that ended the sampler, and Closed."""
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
        """Return all requests as of now, in the order of sending."""
        with self._lock:
            return dict(self._all)

    def take_sendable(self, version: int = 0) -> list[Outstanding]:
        """Count as many of the unsent requests as sent as the sampler has room for, the most urgent
        first. version: from which the sampler draws now."""
        with self._lock:
            room = WIRE_PLACES * self.places - (len(self._all) - len(self._unsent))
            taken: list[Outstanding] = []
            while len(taken) < room and (out := self._unsent.head()) is not None:
                self._unsent.admit(out)
                out.sent, out.oldest = True, version
                taken.append(out)
        return taken

    def pop(self, wire_ids: Iterable[str]) -> list[Outstanding | None]:
        """Remove requests that have an answer; None for one that is not there any more."""
        with self._lock:
            return [self._all.pop(wire_id, None) for wire_id in wire_ids]

    def find(self, wire_id: Any) -> Outstanding | None:
        """Return the request that an answer names; None: everything has ended. Raises RolloutError
        for one that the sampler was not sent, or has answered."""
        with self._lock:
            if self.error is not None or self.closed:
                return None
            out = self._all.get(wire_id) if isinstance(wire_id, str) else None
        if out is None or not out.sent:
            raise RolloutError(f"request {checked_text(wire_id)!r} is not outstanding.")
        return out

    def withdraw(self, out: Outstanding) -> bool:
        """Forget a request that nobody waits for, if it is unsent; return whether the sampler has
        it, and must be told."""
        with self._lock:
            if out in self._unsent:
                self._unsent.remove(out)
                del self._all[out.wire_id]
            return out.wire_id in self._all

    def to_save(self, request_id: str, *, stop: bool) -> Outstanding | None:
        """Return the request of this caller's id that runs there, the last one if several do.

        stop: it will be told to end early.
        """
        with self._lock:
            found = [
                out
                for out in self._all.values()
                if out.request.request_id == request_id and out.sent and not out.future.done()
            ]
            if not found:
                return None
            found[-1].stopped |= stop
            return found[-1]

    # ---- questions

    def ask(self, about: Outstanding | None) -> Question:
        """Take a question in. Raises the error that ended the sampler, and Closed."""
        question = Question(number=next(self._numbers), about=about, answer=Future())
        with self._lock:
            self._check_open()
            self._questions[question.number] = question
        return question

    def question(self, number: int) -> Question | None:
        """Return the question of this number; None: nobody waits for its answer any more."""
        with self._lock:
            return self._questions.get(number)

    def forget(self, question: Question) -> None:
        """Remove a question, answered or not."""
        with self._lock:
            self._questions.pop(question.number, None)

    # ---- the end

    def close(self) -> None:
        """Take nothing in from now on."""
        with self._lock:
            self.closed = True

    def finish(
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
                if self.closed:
                    error = Closed(CLOSED_TOO_EARLY)
                else:
                    self.error = error
            outs, self._all = list(self._all.values()), {}
            questions, self._questions = list(self._questions.values()), {}
            self._unsent.clear()
        for future in (*(out.future for out in outs), *(asked.answer for asked in questions)):
            fulfil(future, error)

    def _check_open(self) -> None:
        if self.error is not None:
            raise self.error
        if self.closed:
            raise Closed(CLOSED)


def request_of(given: Request | Partial) -> Request:
    """Return the request, also of one that is half drawn."""
    return given.request if isinstance(given, Partial) else given
