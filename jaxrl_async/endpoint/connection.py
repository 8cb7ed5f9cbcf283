"""Limits of the endpoint's TCP connections: their number, the time for a request to arrive, and the
time for a client to read its answer."""

import asyncio
from collections import Counter
from collections.abc import Callable
from typing import Any

from jaxrl_async.errors import extra_module
from jaxrl_async.remote.wire.pending_connections import site_of

HEAD_S = 20.0
"""Maximum time for a request's head to arrive, seconds."""

TOGETHER = 16
"""When there are too many connections, one in this many of an address's idle ones is closed."""


def serving_module(name: str) -> Any:
    """Return a module of the extra [serve]. Raises MissingExtraError."""
    return extra_module(name, "serve", f"the endpoint needs {name.partition('.')[0]}")


class ConnectionBounds:
    """Adds two timers to a uvicorn connection: one for the head of a request, and one for reading
    its answer. A mixin; `bounded_connections` sets the durations."""

    most: int
    stall_s: float
    stalled: Callable[[], None]
    # attributes of uvicorn's class
    connections: set[Any]
    client: tuple[str, int] | None
    cycle: Any
    loop: asyncio.AbstractEventLoop
    transport: asyncio.Transport
    _head_timer: asyncio.TimerHandle | None = None
    _stall_timer: asyncio.TimerHandle | None = None
    _start_s: float = 0.0
    _site: str = ""

    def connection_made(self, transport: asyncio.Transport) -> None:
        """Accept the connection; if there are too many, close some without a request."""
        self._super().connection_made(transport)
        self._start_s, self._site = self.loop.time(), site_of(self.client[0] if self.client else "")
        self._await_head()
        if len(self.connections) > self.most:
            for one in self._to_close():
                one._end_head_timer()
                one.transport.abort()

    def connection_lost(self, error: Exception | None) -> None:
        """Cancel the timers."""
        for timer in (self._head_timer, self._stall_timer):
            if timer is not None:
                timer.cancel()
        self._super().connection_lost(error)

    def data_received(self, data: bytes) -> None:
        """Receive bytes. The first bytes of a request start its timer; a complete head ends it."""
        if self._head_timer is None and not self._is_answering():
            self._await_head()
        self._super().data_received(data)
        if self._is_answering():
            self._end_head_timer()

    def pause_writing(self) -> None:
        """Start the timer within which the client must read."""
        self._super().pause_writing()
        self._stall_timer = self.loop.call_later(self.stall_s, self._stall)

    def resume_writing(self) -> None:
        """Continue: the client reads."""
        self._super().resume_writing()
        if self._stall_timer is not None:
            self._stall_timer.cancel()

    def _to_close(self) -> "list[ConnectionBounds]":
        """Return connections to close, of those whose request has not arrived. These are the oldest
        ones of the address with most of them, several at a time, because a flood has more than one.
        If all others are being served, this is the new connection."""
        idle = [c for c in self.connections if c._head_timer is not None]
        ((most, _),) = Counter(c._site for c in idle).most_common(1)
        of_site = sorted((c for c in idle if c._site == most), key=lambda c: c._start_s)
        return of_site[: max(1, len(of_site) // TOGETHER)]

    def _end_head_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _super(self) -> Any:
        return super()

    def _is_answering(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def _await_head(self) -> None:
        self._head_timer = self.loop.call_later(HEAD_S, self._head_is_late)

    def _head_is_late(self) -> None:
        if not self._is_answering():
            self.transport.abort()

    def _stall(self) -> None:
        self.stalled()
        self.transport.abort()


def bounded_connections(most: int, stall_s: float, stalled: Callable[[], None]) -> type:
    """Return uvicorn's connection class with ConnectionBounds. Raises MissingExtraError.

    Args:
        most: maximum number of connections; beyond it, some without a request are closed.
        stall_s: maximum time for a client to read its answer, seconds.
        stalled: called when a connection is closed because of stall_s.
    """
    base = serving_module("uvicorn.protocols.http.h11_impl").H11Protocol
    own = {"most": most, "stall_s": stall_s, "stalled": staticmethod(stalled)}
    return type("BoundedConnection", (ConnectionBounds, base), own)
