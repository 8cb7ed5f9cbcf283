"""The sending thread of a RemoteReplica, so that nobody else waits for the wire. Pure host code."""

import logging
import math
from collections.abc import Callable, Sequence
from typing import Any

from jaxrl_async.errors import Disconnected
from jaxrl_async.remote.sampler.message_batches import send_all
from jaxrl_async.remote.sampler.outstanding import Outstanding, OutstandingRequests, request_of
from jaxrl_async.remote.wire.messages import Cancel, Leave, Start
from jaxrl_async.remote.wire.session_port import Session
from jaxrl_async.sampler.lifetime import Lifetime
from jaxrl_async.sampler.router.job import fulfil

log = logging.getLogger(__name__)


class SendLoop:
    """Sends a sampler its requests, as it has room, and all else that is to be said."""

    def __init__(self, session: Session, lifetime: Lifetime, requests: OutstandingRequests) -> None:
        """lifetime: of the thread that calls step()."""
        self.version: Callable[[], int] = lambda: 0  # from which the sampler draws, at least
        self._session, self._lifetime, self._requests = session, lifetime, requests
        self._queued: list[Any] = []  # messages; the lifetime's lock guards it, and the next
        self._ending: str | None = None  # why the session is to end

    def send(self, message: Any) -> None:
        """Have a message sent, after the requests that are there now."""
        with self._lifetime.lock:
            self._queued.append(message)
        self.wake()

    def end(self, reason: str) -> None:
        """Have the session ended."""
        with self._lifetime.lock:
            self._ending = self._ending or reason
        self.wake()

    def wake(self) -> None:
        """Look for what is to be sent: there are requests, or there is room for more."""
        self._lifetime.start()
        self._lifetime.wake.set()

    def step(self) -> float | None:
        """Send what has been asked for since the last round; return how long to sleep (Lifetime).

        consumes      requests and questions of other threads
        waits for     lifetime.wake; the wire, while too much is on it
        produces      messages
        on failure    the session has ended: whoever is told so (Arrivals) fails the requests
        """
        requests = self._requests.take_sendable(self.version())
        with self._lifetime.lock:
            others, self._queued = self._queued, []
            ending = self._ending
        try:
            if ending is None:
                self._start(requests)
                for message in _joined(others):
                    self._session.send(message)
                return math.inf
            if self._requests.closed:
                self._session.send(Leave(reason=ending))
            self._session.end(ending)
        except Disconnected as error:
            log.debug("%s: %s", self._session.peer, error)
        return None

    def _start(self, requests: Sequence[Outstanding]) -> None:
        """Send requests; one that is too large for a message fails alone."""
        on_wire = [out.on_wire for out in requests]
        for refused, error in send_all(self._session, on_wire, lambda r: Start(requests=r)):
            (out,) = self._requests.pop([request_of(refused).request_id])
            if out is not None:
                fulfil(out.future, error)


def _joined(messages: Sequence[Any]) -> list[Any]:
    """Return the messages with all cancellations in one, in front."""
    ids = tuple(i for m in messages if isinstance(m, Cancel) for i in m.request_ids)
    rest = [m for m in messages if not isinstance(m, Cancel)]
    return [Cancel(request_ids=ids), *rest] if ids else rest
