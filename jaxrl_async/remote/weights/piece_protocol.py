"""What a piece server and its clients say to each other over a socket.

    client                                       server
      │ greeting, 8 bytes ─────────────────────> │   then TLS, and the secret's proof
      │ request: kind, version, array, box ────> │   several may be under way
      │ <──────────────── answer: status, size, checksum │ the piece's bytes
      │ <──────────────── WAIT: it is to come, 10 a second
      │ NAME, NAME, ..., PUBLISH ──────────────> │   pieces for one pull from device to device
      │ <──────────── answer: status, size, number │ 8 bytes each: their checksums on the devices

All numbers are big-endian and of fixed size; no size is taken on trust: the client knows each
piece's, and a request has at most 16 axes.
"""

import socket
import struct
import time
from collections.abc import Callable
from dataclasses import dataclass

from jaxrl_async.errors import WeightsError
from jaxrl_async.remote.weights.locations import MOST_AXES
from jaxrl_async.weights.boxes import Box

GREETING = b"JXRLPCS1"
PIECE, PUBLISH, NAME = 1, 2, 3
"""Kinds of request: a piece's bytes; the publication of all pieces that were named before, without
an answer to those, for one pull from device to device."""
MOST_NAMED = 1 << 17
"""Most pieces that are named for one pull."""
HERE, NOT_HERE, WAIT = 1, 2, 3
"""Kinds of answer."""
REQUEST, RANGE, ANSWER = struct.Struct("!BqIB"), struct.Struct("!QQ"), struct.Struct("!BQQ")
SUM = struct.Struct("!Q")
SLICE_S = 0.2
"""Longest single wait on a socket; aborts are looked at in between, seconds."""


class PeerError(WeightsError):
    """The other side of a connection broke it, was silent, or said what makes no sense."""


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


class Line:
    """A connection with a limit on silence, which can be stopped. Used by one thread.

    Attributes:
        received_bytes: How many came in `receive`.
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
            silence_s: Longest time in which nothing comes, or goes, seconds.
            stopped: Says why to stop; "": go on.
        """
        self._socket, self._silence_s, self._stopped = connection, silence_s, stopped
        self.received_bytes = 0
        connection.settimeout(min(SLICE_S, silence_s))

    def send(self, *parts: bytes | memoryview) -> None:
        """Send everything. Raises PeerError."""
        for part in parts:
            left = memoryview(part)
            heard = time.monotonic()
            while left:
                try:
                    left = left[self._socket.send(left) :]
                    heard = time.monotonic()
                except TimeoutError:
                    self._check(heard)
                except OSError as error:
                    raise PeerError(f"the connection broke: {error}") from None

    def receive(self, into: memoryview) -> None:
        """Fill this memory, of bytes. Raises PeerError."""
        heard = time.monotonic()
        while into:
            try:
                count = self._socket.recv_into(into)
            except TimeoutError:
                self._check(heard)
                continue
            except OSError as error:
                raise PeerError(f"the connection broke: {error}") from None
            if not count:
                raise PeerError("the other side closed the connection")
            heard = time.monotonic()
            self.received_bytes += count
            into = into[count:]
            if reason := self._stopped():
                raise PeerError(reason)

    def receive_bytes(self, count: int) -> bytes:
        """Return so many bytes. Raises PeerError."""
        data = bytearray(count)
        self.receive(memoryview(data))
        return bytes(data)

    def receive_request(self) -> PieceRequest:
        """Return the next request. Raises PeerError, also if it makes no sense."""
        kind, version, array, axes = REQUEST.unpack(self.receive_bytes(REQUEST.size))
        if kind not in (PIECE, PUBLISH, NAME) or axes > MOST_AXES:
            raise PeerError(f"no such request: kind {kind}, {axes} axes")
        ranges = RANGE.iter_unpack(self.receive_bytes(axes * RANGE.size))
        return PieceRequest(version=version, array=array, box=tuple(ranges), kind=kind)

    def receive_answer(self, num_bytes: int) -> tuple[bool, int]:
        """Wait for the answer about a piece of this size; return whether it is here, and its
        checksum. Raises PeerError."""
        while True:
            status, size, checksum = ANSWER.unpack(self.receive_bytes(ANSWER.size))
            if status == HERE and size == num_bytes:
                return True, checksum
            if status == NOT_HERE and not size:
                return False, 0
            if status != WAIT or size:
                raise PeerError(f"an answer of kind {status} with {size} bytes, not {num_bytes}")

    def _check(self, heard: float) -> None:
        if reason := self._stopped():
            raise PeerError(reason)
        if time.monotonic() - heard > self._silence_s:
            raise PeerError(f"nothing came or went for {self._silence_s:g} s")
