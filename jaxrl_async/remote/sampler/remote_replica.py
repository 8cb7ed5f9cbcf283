"""A sampler in another process as one of the router's replicas: the trainer's side.

    start_many ──> unsent ──Start, as it has room──> │ wire │ ──Answers──> checked ──> futures
    cancelled futures ──────────────one Cancel────> │      │
    progress, save ────────────────────────Ask────> │      │ ──RemoteReply──> whoever asked

RemoteReplica is what other threads use; a thread of its own sends (sending.py), so that nobody
waits for the wire, and the session's thread takes in (arrivals.py). They share what is not answered
(outstanding.py). Requests go under ids of the wire's own: a caller may use an id twice. What cannot
be true ends the session, and the router gives the requests to another sampler. Works without JAX.
"""

import logging
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial

from jaxrl_async.errors import Closed, Disconnected, RolloutError
from jaxrl_async.ports.sampling import Departure
from jaxrl_async.remote.sampler.arrivals import Arrivals
from jaxrl_async.remote.sampler.outstanding import (
    Outstanding,
    OutstandingRequests,
    Question,
)
from jaxrl_async.remote.sampler.sender import SendLoop
from jaxrl_async.remote.wire.messages import (
    Answers,
    Ask,
    Beat,
    Cancel,
    Died,
    Leave,
    Leaving,
    RemoteReply,
)
from jaxrl_async.remote.wire.session_port import Session
from jaxrl_async.sampler.lifetime import Lifetime
from jaxrl_async.sampler.request_checks import RequestCheck
from jaxrl_async.sampler.requests import CLOSED_TOO_EARLY
from jaxrl_async.sampler.stats import SamplerStats
from jaxrl_async.types import Completion, Partial, Request

log = logging.getLogger(__name__)

PROGRESS_WAIT_S = 10.0
"""Longest wait for a sampler's report of what it is drawing, seconds; then the last one counts."""
SAVE_WAIT_S = 60.0
"""Longest wait for a request as data, seconds: a decode block, and the wire."""
CLOSE_WAIT_S = 10.0
"""Longest wait for the sending thread at the end, seconds."""


class RemoteReplica:
    """A ports.Replica over a session with the ReplicaServer of a sampler that has joined."""

    replaceable = False
    has_logprobs = True  # see ports.Replica

    def __init__(
        self,
        session: Session,
        check: RequestCheck,
        *,
        places: int,
        newest: Callable[[], int],
        count: Callable[[str, int], None] = lambda name, number: None,
    ) -> None:
        """Take the session's messages about requests from now on.

        Args:
            session: With the sampler.
            check: Of the requests; the same for all samplers.
            places: Requests that the sampler holds at once, until it says so itself.
            newest: Returns the newest version that any sampler may have.
            count: Called with the name of each fault and how often (metrics.fault_counts).
        """
        self._session, self._check = session, check
        self._lifetime = Lifetime(self, lambda r: r.loop.step(), name=f"replica {session.peer}")
        self._outstanding = OutstandingRequests(places)
        self.loop = SendLoop(session, self._lifetime, self._outstanding)
        self._arrivals = arrivals = Arrivals(
            session.peer,
            self._outstanding,
            check,
            newest=newest,
            count=count,
            on_room=self.loop.wake,
        )
        session.on(Answers, arrivals.take_answers)
        session.on(RemoteReply, arrivals.take_reply)
        session.on(Beat, arrivals.take_beat)
        session.on(Died, arrivals.take_died)
        session.on(Leaving, arrivals.take_leaving)
        session.on_end(self._cut_off)

    def __str__(self) -> str:
        return self._session.peer

    @property
    def places(self) -> int:
        """Requests that the sampler holds at once; its beats say how many."""
        return self._outstanding.places

    @property
    def rows(self) -> int:
        """See ports.Replica."""
        return self.places

    @property
    def error(self) -> BaseException | None:
        """Why it ended: it left, died, or was cut off (Disconnected)."""
        return self._outstanding.error

    @property
    def blamed(self) -> frozenset[str]:
        """Ids of the requests that may have been on its device then."""
        return self._outstanding.blamed

    @property
    def departure(self) -> Departure | None:
        """How it left; None: it did not."""
        return self._outstanding.departure

    @property
    def seed(self) -> int | None:
        """See ports.Generate."""
        return self._check.room.seed

    def stats(self) -> SamplerStats:
        """Return the statistics of the last beat."""
        return self._arrivals.stats

    def draws_from(self, version: Callable[[], int]) -> None:
        """Refuse tokens of versions older than that from which the sampler drew when it was sent
        the request. version: returns the last one that it has reported live."""
        self.loop.version = version

    # ---- its life

    def start(self) -> None:
        """Start the thread that sends."""
        self._lifetime.start()

    def close(self) -> None:
        """Tell the sampler to go, and end the session; requests that are not done fail with Closed.
        Idempotent."""
        if self._lifetime.is_forked:
            return
        self._outstanding.close()
        self.loop.end("the run has ended")
        self._lifetime.stop(CLOSE_WAIT_S)
        self._outstanding.finish(Closed(CLOSED_TOO_EARLY))

    def abandon(self) -> None:
        """End the session without waiting, and ignore whatever it still brings."""
        self.loop.end(f"taken out by the trainer: {self.error or 'no progress'}")
        self._outstanding.finish(Disconnected(f"{self} was taken out"))

    def successor(self) -> "RemoteReplica":
        """Raise RolloutError: another process must join."""
        raise RolloutError(f"{self} is a process of its own: nobody can replace it.")

    def leave(self, reason: str) -> None:
        """Ask the sampler to hand back its requests and to go."""
        self.loop.send(Leave(reason=reason))

    def check_waits(self) -> None:
        """Raise RolloutError where waiting for an answer would never end: on the session's thread,
        which brings it, or in a forked process."""
        self._lifetime.check_process()
        if self._arrivals.thread == threading.get_ident():
            raise RolloutError(
                "a callback of a request waits for a sampler on the thread that brings its "
                "answers: it would wait for ever. Use start_many, or another thread."
            )

    def _cut_off(self, reason: str) -> None:
        """Fail the requests: the session, which kept the replica alive until now, has ended."""
        self._arrivals.cut_off(reason)

    # ---- requests

    def checked(self, requests: Sequence[Request | Partial]) -> list[Request | Partial]:
        """See ports.Replica."""
        return self._check.checked(requests)

    def start_many(self, requests: Sequence[Request | Partial]) -> list[Future[Completion]]:
        """See ports.Replica; returns at once, whatever the wire does."""
        self._lifetime.check_process()
        new = self._outstanding.add(self.checked(requests))
        for out in new:
            out.future.add_done_callback(partial(self._done, out))
        self.loop.wake()
        return [out.future for out in new]

    def progress(self) -> tuple[Partial, ...]:
        """See ports.Generate. If the sampler does not answer in time: what it reported last, of the
        requests that are still running."""
        self.check_waits()
        try:
            return self._answer(self._outstanding.ask(None), PROGRESS_WAIT_S)
        except TimeoutError:
            log.warning("%s does not report its progress: its last report counts", self)
        running = self._outstanding.by_wire_id()
        return tuple(p for i, p in self._arrivals.reported.items() if i in running)

    def save(self, request_id: str, *, stop: bool = False, with_kv: bool = True) -> Partial:
        """See ports.Replica; always without KV, which is larger than what it saves. Raises
        TimeoutError if the sampler does not answer."""
        self.check_waits()
        about = self._outstanding.to_save(request_id, stop=stop)
        if about is None:
            raise RolloutError(f"request {request_id!r} is not running in {self}.")
        (saved,) = self._answer(self._outstanding.ask(about), SAVE_WAIT_S, stop=stop)
        return saved

    def _answer(
        self, question: Question, wait_s: float, *, stop: bool = False
    ) -> tuple[Partial, ...]:
        """Ask the sampler, and return its answer. Raises TimeoutError, RolloutError, and the error
        that ended the replica."""
        about = None if question.about is None else question.about.wire_id
        self.loop.send(Ask(number=question.number, request_id=about, stop=stop))
        try:
            return question.answer.result(wait_s)
        except TimeoutError:
            raise TimeoutError(f"{self} did not answer within {wait_s:.0f} s") from None
        finally:
            self._outstanding.forget(question)

    def _done(self, out: Outstanding, future: "Future[Completion]") -> None:
        """Tell the sampler that nobody waits any more, if the caller has given up."""
        if future.cancelled() and self._outstanding.withdraw(out):
            self.loop.send(Cancel(request_ids=(out.wire_id,)))
