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
class Stranger:
    """One connection. Set `greeted` once it has sent the first frame of a handshake."""

    number: int  # in order of arrival
    site: str
    close: Callable[[], None]
    greeted: bool = False


class Strangers:
    """At most `most` connections. If a newcomer arrives when all places are taken, the address with
    the most places loses one: its oldest silent connection, or its oldest if none is silent.

    A sampler needs its place only briefly. It is served unless its own address takes all places
    again in that time. Thread-safe.
    """

    def __init__(self, most: int) -> None:
        """Start with no connections."""
        self._most, self._lock = most, threading.Lock()
        self._here: set[Stranger] = set()
        self._numbers = itertools.count()

    @contextmanager
    def place(self, host: str, close: Callable[[], None]) -> Iterator[Stranger]:
        """Give a connection a place while the body runs.

        Args:
            host: address of the peer.
            close: closes it without blocking; called on another thread if a newcomer takes its
                place.
        """
        newcomer = Stranger(number=next(self._numbers), site=site_of(host), close=close)
        gone = None
        with self._lock:
            self._here.add(newcomer)
            if len(self._here) > self._most:
                gone = self._who_goes()
                self._here.discard(gone)
        if gone is not None:
            gone.close()
        try:
            yield newcomer
        finally:
            with self._lock:
                self._here.discard(newcomer)

    def _who_goes(self) -> Stranger:
        held = Counter(s.site for s in self._here)
        return min(self._here, key=lambda s: (-held[s.site], s.greeted, s.number))


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
