"""Connections that have not proved the secret yet. Their number is bounded, and no address can keep
a sampler out by holding many of them. No I/O but the log."""

import ipaddress
import itertools
import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

log = logging.getLogger(__name__)

SHARED_BITS = 64
"""Number of leading bits that the IPv6 addresses of one site share; they count as one address."""


@dataclass(slots=True, eq=False, kw_only=True)
class PendingConnection:
    """One connection. Set `greeted` once it has sent the first frame of a handshake."""

    number: int  # in order of arrival
    site: str
    close: Callable[[], None]
    greeted: bool = False


class PendingConnections:
    """At most `most` connections. If another arrives when there are that many, the address with the
    most connections loses one: its oldest that has not sent a frame, or its oldest.

    A sampler is in this state only briefly. It is served unless its own address opens `most` other
    connections in that time. Thread-safe.
    """

    def __init__(self, most: int) -> None:
        """Start with no connections."""
        self._most, self._lock = most, threading.Lock()
        self._open: set[PendingConnection] = set()
        self._numbers = itertools.count()

    @contextmanager
    def track(self, host: str, close: Callable[[], None]) -> Iterator[PendingConnection]:
        """Count a connection while the body runs.

        Args:
            host: address of the peer.
            close: closes it without blocking; called on another thread if a newer connection
                replaces it.
        """
        connection = PendingConnection(number=next(self._numbers), site=site_of(host), close=close)
        evicted = None
        with self._lock:
            self._open.add(connection)
            if len(self._open) > self._most:
                evicted = self._to_evict()
                self._open.discard(evicted)
        if evicted is not None:
            evicted.close()
        try:
            yield connection
        finally:
            with self._lock:
                self._open.discard(connection)

    def _to_evict(self) -> PendingConnection:
        by_site = Counter(s.site for s in self._open)
        return min(self._open, key=lambda s: (-by_site[s.site], s.greeted, s.number))


class Refusals:
    """Counts refused connections, and logs at most one line every LOG_S seconds. Thread-safe."""

    LOG_S = 10.0

    def __init__(self, what: str = "") -> None:
        """what: the connections, before the peer's name in the log."""
        self._what, self._lock = what, threading.Lock()
        self.count = 0
        self._logged_count, self._logged_s = 0, float("-inf")

    def note(self, peer: object, reason: str) -> None:
        """Count a refused connection."""
        with self._lock:
            self.count += 1
            now_s = time.monotonic()
            if now_s - self._logged_s < self.LOG_S:
                return
            new = self.count - self._logged_count
            self._logged_count, self._logged_s = self.count, now_s
        log.warning("%s%s was refused: %s (%d since the last line)", self._what, peer, reason, new)


def site_of(host: str) -> str:
    """Return the key under which an address is counted: itself, or its /64 network for IPv6."""
    try:
        address = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return host
    if address.version == 4:
        return str(address)
    mapped = address.ipv4_mapped
    return str(mapped or ipaddress.ip_network((int(address), SHARED_BITS), strict=False))
