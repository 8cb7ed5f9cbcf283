"""Pack messages into frames of bounded size and unpack them. Pure; no I/O, no threads.

    MESSAGES: size, message, size, message, ...   queued small messages, together
    PIECE: size of the message, bytes of it       a large message, in order, nothing in between
    BEAT                                          "still alive"
    BYE: reason                                   the last frame of a side

A large message is split into pieces. A slow connection then still shows progress, and the receiver
never allocates more memory than it has been sent.
"""

import struct
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from enum import IntEnum

from jaxrl_async.errors import printable

FRAME_BYTES = 1 << 20
"""Maximum content of a frame, bytes."""
FRAME_LIMIT = FRAME_BYTES + 64
"""Maximum size of a frame with its header, bytes."""
LEAST_PIECE = FRAME_BYTES // 2
"""Minimum content of a piece that is not the last of its message, bytes. Many smaller pieces would
take more memory here than bytes on the network."""
REASON_BYTES = 4096
"""Maximum length of the reason in a BYE, bytes; a longer one is truncated."""

_SMALL, _LARGE = struct.Struct("<I"), struct.Struct("<Q")


class FrameKind(IntEnum):
    """First byte of a frame."""

    MESSAGES = 1
    PIECE = 2
    BEAT = 3
    BYE = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Bye:
    """The other side ends the session and gives the reason."""

    reason: str


BEAT_FRAME = bytes([FrameKind.BEAT])


def bye_frame(reason: str) -> bytes:
    """Return the last frame of a side."""
    text = reason.encode("utf-8", "replace")[:REASON_BYTES]
    return bytes([FrameKind.BYE]) + text


class Outbox:
    """Queue of messages to send. Not locked."""

    def __init__(self) -> None:
        self._waiting: deque[memoryview] = deque()
        self._sent = 0  # bytes of the first message already sent as pieces
        self.num_bytes = 0

    def __bool__(self) -> bool:
        return bool(self._waiting)

    def put(self, message: memoryview) -> None:
        """Queue a message."""
        self._waiting.append(message)
        self.num_bytes += len(message)

    def next_frame(self) -> bytes:
        """Return the next frame: as many messages as fit, or a piece of a large one."""
        first = self._waiting[0]
        if len(first) + _SMALL.size > FRAME_BYTES:
            return self._next_piece(first)
        parts: list[bytes | memoryview] = [bytes([FrameKind.MESSAGES])]
        room = FRAME_BYTES
        while self._waiting and len(self._waiting[0]) + _SMALL.size <= room:
            message = self._waiting.popleft()
            parts += (_SMALL.pack(len(message)), message)
            room -= len(message) + _SMALL.size
            self.num_bytes -= len(message)
        return b"".join(parts)

    def _next_piece(self, message: memoryview) -> bytes:
        piece = message[self._sent : self._sent + FRAME_BYTES - _LARGE.size]
        self._sent += len(piece)
        self.num_bytes -= len(piece)
        if self._sent == len(message):
            self._waiting.popleft()
            self._sent = 0
        return b"".join((bytes([FrameKind.PIECE]), _LARGE.pack(len(message)), piece))


class FrameInbox:
    """Unpacks messages from received frames. Not locked.

    Args:
        max_message_bytes: a larger message is refused when its first piece arrives.
    """

    def __init__(self, max_message_bytes: int) -> None:
        self._max_message_bytes = max_message_bytes
        self._pieces: list[bytes] = []  # of a large message
        self._received_bytes = 0  # of these pieces
        self._size = 0  # of the whole message

    def take(self, frame: bytes) -> Iterator[memoryview | Bye]:
        """Yield the messages that this frame completes, or the Bye. Raises ValueError for bytes
        that no Outbox produces."""
        if not frame or len(frame) > FRAME_LIMIT:
            raise ValueError(f"a frame of {len(frame)} bytes")
        kind, content = frame[0], memoryview(frame)[1:]
        if kind == FrameKind.BYE:
            yield Bye(reason=printable(bytes(content[:REASON_BYTES]).decode("utf-8", "replace")))
        elif kind == FrameKind.PIECE:
            yield from self._take_piece(content)
        elif self._pieces and kind != FrameKind.BEAT:
            raise ValueError("a message begins within another one")
        elif kind == FrameKind.MESSAGES:
            yield from self._take_messages(content)
        elif kind != FrameKind.BEAT or content:
            raise ValueError(f"a frame of an unknown kind, {kind}")

    def _take_messages(self, content: memoryview) -> Iterator[memoryview]:
        while content:
            if len(content) < _SMALL.size:
                raise ValueError("a torn frame")
            (size,) = _SMALL.unpack_from(content)
            message, content = content[_SMALL.size : _SMALL.size + size], content[_SMALL.size :]
            if len(message) != size:
                raise ValueError("a torn frame")
            self._check_size(size)
            content = content[size:]
            yield message

    def _take_piece(self, content: memoryview) -> Iterator[memoryview]:
        if len(content) <= _LARGE.size:
            raise ValueError("a torn frame")
        (size,) = _LARGE.unpack_from(content)
        self._check_size(size)
        if self._pieces and size != self._size:
            raise ValueError("a message begins within another one")
        self._size = size
        self._pieces.append(bytes(content[_LARGE.size :]))
        self._received_bytes += len(self._pieces[-1])
        if self._received_bytes > size:
            raise ValueError("a message is longer than announced")
        if self._received_bytes < size and len(self._pieces[-1]) < LEAST_PIECE:
            raise ValueError(f"a piece of {len(self._pieces[-1])} bytes, which is not the last")
        if self._received_bytes == size:
            whole = b"".join(self._pieces)
            self._pieces, self._received_bytes = [], 0
            yield memoryview(whole)

    def _check_size(self, size: int) -> None:
        if size > self._max_message_bytes:
            raise ValueError(
                f"a message of {size} bytes, more than {self._max_message_bytes} allowed "
                "(remote.max_message_mib)"
            )
