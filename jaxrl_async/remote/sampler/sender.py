"""The sending thread of a RemoteReplica, so other threads never wait for the connection. Pure host
code."""

import logging
import math
from collections.abc import Callable, Sequence
from typing import Any

from jaxrl_async.errors import Disconnected
from jaxrl_async.remote.sampler.message_batches import send_all
from jaxrl_async.remote.sampler.outstanding import Outstanding, OutstandingRequests
from jaxrl_async.remote.wire.messages import Cancel, Leave, Start
from jaxrl_async.remote.wire.session_port import Session
from jaxrl_async.sampler.lifetime import Lifetime
from jaxrl_async.sampler.requests import request_of
from jaxrl_async.sampler.router.job import fulfil

log = logging.getLogger(__name__)


class SendLoop:
    """Sends a sampler its requests, as it has room, and all other messages."""

    def __init__(self, session: Session, lifetime: Lifetime, requests: OutstandingRequests) -> None:
        """lifetime: of the thread that calls step()."""
        self.version: Callable[[], int] = lambda: 0  # the sampler's version, at least
        self._session, self._lifetime, self._requests = session, lifetime, requests
        self._queued: list[Any] = []  # messages; guarded by the lifetime's lock, like the next
        self._end_reason: str | None = None  # reason to end the session

    def send(self, message: object) -> None:
        """Queue a message, to be sent after the current requests."""
        with self._lifetime.lock:
            self._queued.append(message)
        self.wake()

    def end(self, reason: str) -> None:
        """Request the end of the session."""
        with self._lifetime.lock:
            self._end_reason = self._end_reason or reason
        self.wake()

    def wake(self) -> None:
        """Wake the sending thread: there are requests, or there is room for more."""
        self._lifetime.start()
        self._lifetime.wake.set()

    def step(self) -> float | None:
        """Send everything queued since the last round; return how long to sleep (Lifetime).

        consumes      requests and questions of other threads
        waits for     lifetime.wake; the connection, while its queue is full
        produces      messages
        on failure    the session has ended: its end callback (ReplicaMessages) fails the requests
        """
        requests = self._requests.take_sendable(self.version())
        with self._lifetime.lock:
            messages, self._queued = self._queued, []
            end_reason = self._end_reason
        try:
            if end_reason is None:
                self._start(requests)
                for message in _merge_cancels(messages):
                    self._session.send(message)
                return math.inf
            if self._requests.closed:
                self._session.send(Leave(reason=end_reason))
            self._session.end(end_reason)
        except Disconnected as error:
            log.debug("%s: %s", self._session.peer, error)
        return None

    def _start(self, requests: Sequence[Outstanding]) -> None:
        """Send requests; one that is too large for a message fails separately."""
        on_wire = [out.on_wire for out in requests]
        for refused, error in send_all(self._session, on_wire, lambda r: Start(requests=r)):
            (out,) = self._requests.pop([request_of(refused).request_id])
            if out is not None:
                fulfil(out.future, error)


def _merge_cancels(messages: Sequence[object]) -> list[Any]:
    """Return the messages with all cancellations merged into one at the front."""
    ids = tuple(i for m in messages if isinstance(m, Cancel) for i in m.request_ids)
    rest = [m for m in messages if not isinstance(m, Cancel)]
    return [Cancel(request_ids=ids), *rest] if ids else rest
