"""A sampler in another process as a replica of the router: the trainer's side.

    start_many ──> unsent ──Start, as it has room──> │ wire │ ──Answers──> checked ──> futures
    cancelled futures ───────────────one Cancel────> │      │
    progress, save ─────────────────────────Ask────> │      │ ──RemoteReply──> the caller

RemoteReplica is the interface for other threads. A separate thread sends (sender.py), so callers
never wait for the connection; the session's thread receives (replica_messages.py). They share the
unanswered requests (outstanding.py). Requests are sent under separate wire ids, since a caller may
use an id twice. An invalid message ends the session, and the router gives the requests to another
sampler. Works without JAX.
"""

import logging
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial

from jaxrl_async.errors import Closed, Disconnected, RolloutError
from jaxrl_async.ports.generate import Departure
from jaxrl_async.remote.sampler.outstanding import (
    Outstanding,
    OutstandingRequests,
    Question,
)
from jaxrl_async.remote.sampler.replica_messages import ReplicaMessages
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
"""Maximum wait for a sampler's progress report, seconds; after that the last report is used."""
SAVE_WAIT_S = 60.0
"""Maximum wait for a saved request, seconds: a decode block and the transfer."""
CLOSE_WAIT_S = 10.0
"""Maximum wait for the sending thread on close, seconds."""


class RemoteReplica:
    """A ports.Replica over a session with the ReplicaServer of a sampler that has joined."""

    replaceable = False
    has_logprobs = True  # see ports.Replica

    def __init__(
        self,
        session: Session,
        check: RequestCheck,
        *,
        capacity: int,
        newest: Callable[[], int],
        count: Callable[[str, int], None] = lambda name, number: None,
    ) -> None:
        """Register the handlers of the session's messages about requests.

        Args:
            session: With the sampler.
            check: Of the requests; the same for all samplers.
            capacity: Requests that the sampler holds at the same time, until it reports the number
                itself.
            newest: Returns the newest version that any sampler may have.
            count: Called with the name and number of each fault (metrics.fault_counts).
        """
        self._session, self._check = session, check
        self._lifetime = Lifetime(self, lambda r: r.loop.step(), name=f"replica {session.peer}")
        self._outstanding = OutstandingRequests(capacity)
        self.loop = SendLoop(session, self._lifetime, self._outstanding)
        self._messages = messages = ReplicaMessages(
            session.peer,
            self._outstanding,
            check,
            newest=newest,
            count=count,
            on_room=self.loop.wake,
        )
        session.on(Answers, messages.take_answers)
        session.on(RemoteReply, messages.take_reply)
        session.on(Beat, messages.take_beat)
        session.on(Died, messages.take_died)
        session.on(Leaving, messages.take_leaving)
        session.on_end(messages.cut_off)  # it kept the replica alive until now

    def __str__(self) -> str:
        return self._session.peer

    @property
    def capacity(self) -> int:
        """Number of requests that the sampler holds at the same time, as reported in its beats."""
        return self._outstanding.capacity

    @property
    def rows(self) -> int:
        """See ports.Replica."""
        return self.capacity

    @property
    def error(self) -> BaseException | None:
        """The error that ended it: it left, died, or was disconnected (Disconnected)."""
        return self._outstanding.error

    @property
    def blamed(self) -> frozenset[str]:
        """Ids of the requests that may have been on its device when it ended."""
        return self._outstanding.blamed

    @property
    def departure(self) -> Departure | None:
        """How it left; None if it did not leave."""
        return self._outstanding.departure

    @property
    def seed(self) -> int | None:
        """See ports.Generate."""
        return self._check.limits.seed

    def stats(self) -> SamplerStats:
        """Return the statistics of the last beat."""
        return self._messages.stats

    def track_version(self, version: Callable[[], int]) -> None:
        """Refuse tokens of versions older than the sampler's version when the request was sent.
        version: returns the last version that the sampler has reported live."""
        self.loop.version = version

    # ---- its life

    def start(self) -> None:
        """Start the sending thread."""
        self._lifetime.start()

    def close(self) -> None:
        """Ask the sampler to leave, and end the session; unfinished requests fail with Closed.
        Idempotent."""
        if self._lifetime.is_forked:
            return
        self._outstanding.close()
        self.loop.end("the run has ended")
        self._lifetime.stop(CLOSE_WAIT_S)
        self._outstanding.finish(Closed(CLOSED_TOO_EARLY))

    def abandon(self) -> None:
        """End the session without waiting, and ignore any further messages."""
        self.loop.end(f"removed by the trainer: {self.error or 'no progress'}")
        self._outstanding.finish(Disconnected(f"{self} was removed"))

    def successor(self) -> "RemoteReplica":
        """Raise RolloutError: another process must join."""
        raise RolloutError(f"{self} is a separate process and cannot be replaced.")

    def leave(self, reason: str) -> None:
        """Ask the sampler to hand back its requests and to leave."""
        self.loop.send(Leave(reason=reason))

    def check_waits(self) -> None:
        """Raise RolloutError where waiting for an answer would deadlock: on the session's thread,
        which receives the answer, or in a forked process."""
        self._lifetime.check_process()
        if self._messages.thread == threading.get_ident():
            raise RolloutError(
                "a callback of a request waits for a sampler on the thread that receives its "
                "answers, which would deadlock. Use start_many, or another thread."
            )

    # ---- requests

    def checked(self, requests: Sequence[Request | Partial]) -> list[Request | Partial]:
        """See ports.Replica."""
        return self._check.checked(requests)

    def start_many(self, requests: Sequence[Request | Partial]) -> list[Future[Completion]]:
        """See ports.Replica; returns immediately, regardless of the connection."""
        self._lifetime.check_process()
        new = self._outstanding.add(self.checked(requests))
        for out in new:
            out.future.add_done_callback(partial(self._done, out))
        self.loop.wake()
        return [out.future for out in new]

    def progress(self) -> tuple[Partial, ...]:
        """See ports.Generate. If the sampler does not answer in time, returns its last report of
        the requests that are still running."""
        self.check_waits()
        try:
            return self._answer(self._outstanding.ask(None), PROGRESS_WAIT_S)
        except TimeoutError:
            log.warning("%s does not report its progress: using its last report", self)
        running = self._outstanding.by_wire_id()
        return tuple(p for i, p in self._messages.reported.items() if i in running)

    def save(self, request_id: str, *, stop: bool = False, with_kv: bool = True) -> Partial:
        """See ports.Replica; always without KV, whose transfer would cost more than it saves.
        Raises TimeoutError if the sampler does not answer."""
        self.check_waits()
        about = self._outstanding.find_running(request_id, stop=stop)
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
        """Notify the sampler if the caller has cancelled the request."""
        if future.cancelled() and self._outstanding.withdraw(out):
            self.loop.send(Cancel(request_ids=(out.wire_id,)))
