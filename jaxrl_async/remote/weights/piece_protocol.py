"""The protocol of a piece server and its clients over a socket.

    client                                       server
      │ greeting, 8 bytes ─────────────────────> │   then TLS, and the secret's proof
      │ request: kind, version, array, box ────> │   several may be pending
      │ <──────────────── answer: status, size, checksum │ the piece's bytes
      │ <──────────────── WAIT: still to arrive, 10 per second
      │ NAME, NAME, ..., PUBLISH ──────────────> │   pieces for one pull from device to device
      │ <──────────── answer: status, size, number │ 8 bytes each: their checksums on the devices

All numbers are big-endian with fixed sizes. No received size is trusted: the client knows the size
of each piece, and a request has at most 16 axes.
"""

import socket
import struct
import time
from collections.abc import Callable
from dataclasses import dataclass

from jaxrl_async.errors import WeightsError
from jaxrl_async.remote.weights.locations import MOST_AXES
from jaxrl_async.weights.host_reshard import Box

GREETING = b"JXRLPCS1"
PIECE, PUBLISH, NAME = 1, 2, 3
"""Kinds of request. PIECE: the bytes of a piece. NAME: names a piece, without an answer. PUBLISH:
publishes all named pieces for one pull from device to device."""
MOST_NAMED = 1 << 17
"""Maximum number of named pieces for one pull."""
HERE, NOT_HERE, WAIT = 1, 2, 3
"""Kinds of answer."""
REQUEST, RANGE, ANSWER = struct.Struct("!BqIB"), struct.Struct("!QQ"), struct.Struct("!BQQ")
SUM = struct.Struct("!Q")
SLICE_S = 0.2
"""Maximum single wait on a socket, seconds; aborts are checked in between."""


class PeerError(WeightsError):
    """The peer closed the connection, was silent, or sent invalid data."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PieceRequest:
    """A client asks for a piece."""

    version: int
    array: int
    box: Box
    kind: int = PIECE

    def encoded(self) -> bytes:
        """Return the bytes of this request."""
        head = REQUEST.pack(self.kind, self.version, self.array, len(self.box))
        return head + b"".join(RANGE.pack(*pair) for pair in self.box)


class PeerLink:
    """A connection with a limit on silence, which can be stopped. Used by one thread.

    Attributes:
        received_bytes: Number of bytes received by `receive`.
    """

    def __init__(
        self,
        connection: socket.socket,
        silence_s: float,
        stopped: Callable[[], str] = lambda: "",
    ) -> None:
        """Set the socket's timeout.

        Args:
            connection: Connected.
            silence_s: Maximum time without a received or sent byte, seconds.
            stopped: Returns the reason to stop; "": continue.
        """
        self._socket, self._silence_s, self._stopped = connection, silence_s, stopped
        self.received_bytes = 0
        connection.settimeout(min(SLICE_S, silence_s))

    def send(self, *parts: bytes | memoryview) -> None:
        """Send everything. Raises PeerError."""
        for part in parts:
            left = memoryview(part)
            progress_at = time.monotonic()
            while left:
                try:
                    left = left[self._socket.send(left) :]
                    progress_at = time.monotonic()
                except TimeoutError:
                    self._check(progress_at)
                except OSError as error:
                    raise PeerError(f"the connection broke: {error}") from None

    def receive(self, into: memoryview) -> None:
        """Fill this byte buffer. Raises PeerError."""
        progress_at = time.monotonic()
        while into:
            try:
                count = self._socket.recv_into(into)
            except TimeoutError:
                self._check(progress_at)
                continue
            except OSError as error:
                raise PeerError(f"the connection broke: {error}") from None
            if not count:
                raise PeerError("the other side closed the connection")
            progress_at = time.monotonic()
            self.received_bytes += count
            into = into[count:]
            if reason := self._stopped():
                raise PeerError(reason)

    def receive_bytes(self, count: int) -> bytes:
        """Receive `count` bytes. Raises PeerError."""
        data = bytearray(count)
        self.receive(memoryview(data))
        return bytes(data)

    def receive_request(self) -> PieceRequest:
        """Return the next request. Raises PeerError, also for an invalid request."""
        kind, version, array, axes = REQUEST.unpack(self.receive_bytes(REQUEST.size))
        if kind not in (PIECE, PUBLISH, NAME) or axes > MOST_AXES:
            raise PeerError(f"no such request: kind {kind}, {axes} axes")
        ranges = RANGE.iter_unpack(self.receive_bytes(axes * RANGE.size))
        return PieceRequest(version=version, array=array, box=tuple(ranges), kind=kind)

    def receive_answer(self, num_bytes: int) -> tuple[bool, int]:
        """Wait for the answer for a piece of this size; return whether the server has it, and its
        checksum. Raises PeerError."""
        while True:
            status, size, checksum = ANSWER.unpack(self.receive_bytes(ANSWER.size))
            if status == HERE and size == num_bytes:
                return True, checksum
            if status == NOT_HERE and not size:
                return False, 0
            if status != WAIT or size:
                raise PeerError(f"an answer of kind {status} with {size} bytes, not {num_bytes}")

    def _check(self, progress_at: float) -> None:
        if reason := self._stopped():
            raise PeerError(reason)
        if time.monotonic() - progress_at > self._silence_s:
            raise PeerError(f"nothing was received or sent for {self._silence_s:g} s")
