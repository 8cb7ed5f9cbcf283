"""The handshake before a session: versions, proofs of the secret, Hello, Welcome.

Pure: each side is a generator that yields the frame to send and receives the answer. The sides send
one frame at a time, of fixed or bounded size. Nothing from a peer is decoded before it has proved
the secret.
"""

import struct
from collections.abc import Generator, Mapping
from dataclasses import fields

from jaxrl_async import __version__, codec
from jaxrl_async.errors import JoinRefused, WrongSecret, printable
from jaxrl_async.remote.wire.frames import FRAME_BYTES, REASON_BYTES
from jaxrl_async.remote.wire.messages import PROTOCOL, Hello, Welcome
from jaxrl_async.remote.wire.secret import (
    NONCE_BYTES,
    PROOF_BYTES,
    WRONG_SECRET,
    is_proof,
    new_nonce,
    proof,
)
from jaxrl_async.remote.wire.validation import check_fits

OPEN, PROOF, HELLO, WELCOME, REFUSED = (bytes([kind]) for kind in range(16, 21))
MAGIC = b"jaxrl_async\0"
HELLO_BYTES = 64 << 10
PACKAGE_BYTES = 64
TEXT_CHARACTERS = 256
"""Maximum length of a text in a Hello, characters."""
PURPOSE = b"session"

_OPEN = struct.Struct(f"<{len(MAGIC)}sI{NONCE_BYTES}s")


def refused_frame(reason: str) -> bytes:
    """Return the frame that gives a sampler the reason why it may not join."""
    return REFUSED + reason.encode("utf-8", "replace")[:REASON_BYTES]


def welcome_frame(welcome: Welcome) -> bytes:
    """Return the frame that admits a sampler. Raises JoinRefused if it is too large."""
    data = codec.dumps(welcome).tobytes()
    if len(data) > FRAME_BYTES:
        raise JoinRefused(f"the run's configuration is too large to send: {len(data)} bytes")
    return WELCOME + data


def admit_sampler(secret: bytes) -> Generator[bytes, bytes, Hello]:
    """Perform the trainer's part; return the Hello.

    The first yielded frame is empty. Raises JoinRefused with the reason to send to the sampler, and
    ValueError for bytes that no sampler sends.
    """
    protocol, package, peer_nonce = _read_open((yield b""))
    _check_versions(protocol, package)
    own_nonce = new_nonce()
    received = _content((yield _open_frame(own_nonce)), PROOF, PROOF_BYTES)
    if not is_proof(received, proof(secret, PURPOSE, b"asks", peer_nonce, own_nonce)):
        raise WrongSecret(WRONG_SECRET)
    frame = yield PROOF + proof(secret, PURPOSE, b"answers", peer_nonce, own_nonce)
    hello = codec.loads(memoryview(_content(frame, HELLO, HELLO_BYTES)), (Hello,))
    if not isinstance(hello, Hello):
        raise ValueError("no Hello")
    check_fits(hello)
    _check_texts(hello)
    return hello


def ask_to_join(secret: bytes, hello: Hello) -> Generator[bytes, bytes, Welcome]:
    """Perform the sampler's part; return the Welcome. Raises JoinRefused with the trainer's reason,
    and ValueError for bytes that no trainer sends."""
    own_nonce = new_nonce()
    _, _, peer_nonce = _read_open(_check_refused((yield _open_frame(own_nonce))))
    answer = _check_refused((yield PROOF + proof(secret, PURPOSE, b"asks", own_nonce, peer_nonce)))
    received = _content(answer, PROOF, PROOF_BYTES)
    if not is_proof(received, proof(secret, PURPOSE, b"answers", own_nonce, peer_nonce)):
        raise WrongSecret(WRONG_SECRET)
    frame = _check_refused((yield HELLO + codec.dumps(hello).tobytes()))
    welcome = codec.loads(memoryview(_content(frame, WELCOME, FRAME_BYTES)), (Welcome,))
    if not isinstance(welcome, Welcome):
        raise ValueError("no Welcome")
    check_fits(welcome)
    return welcome


def _open_frame(nonce: bytes) -> bytes:
    return OPEN + _OPEN.pack(MAGIC, PROTOCOL, nonce) + __version__.encode()[:PACKAGE_BYTES]


def _read_open(frame: bytes) -> tuple[int, str, bytes]:
    """Return protocol, package version and nonce."""
    content = _content(frame, OPEN, _OPEN.size + PACKAGE_BYTES)
    if len(content) < _OPEN.size:
        raise ValueError("a torn greeting")
    magic, protocol, nonce = _OPEN.unpack_from(content)
    if magic != MAGIC:
        raise ValueError("the greeting of another program")
    return protocol, printable(content[_OPEN.size :].decode("ascii", "replace")), nonce


def _check_versions(protocol: int, package: str) -> None:
    if (protocol, package) != (PROTOCOL, __version__):
        raise JoinRefused(
            f"the trainer is jaxrl_async {__version__} (protocol {PROTOCOL}), this sampler "
            f"{package} (protocol {protocol}): install jaxrl_async {__version__} where the sampler "
            "runs"
        )


def _check_texts(hello: Hello) -> None:
    """Raise JoinRefused unless the texts of a Hello are short and printable, since logs show
    them."""
    for field in fields(hello):
        value = getattr(hello, field.name)
        texts = value if isinstance(value, Mapping) else [value]
        for text in (text for text in texts if isinstance(text, str)):
            if len(text) > TEXT_CHARACTERS or not text.isprintable():
                raise JoinRefused(
                    f"the sampler's {field.name} is not a line of at most {TEXT_CHARACTERS} "
                    f"printable characters: {printable(text, 64)!r}. Give it another --name."
                )


def _check_refused(frame: bytes) -> bytes:
    if frame[:1] == REFUSED:
        text = frame[1 : 1 + REASON_BYTES].decode("utf-8", "replace")
        error_class = WrongSecret if text == WRONG_SECRET else JoinRefused
        raise error_class(printable(text))
    return frame


def _content(frame: bytes, kind: bytes, most: int) -> bytes:
    if frame[:1] != kind or len(frame) > 1 + most:
        raise ValueError(f"an unexpected frame of {len(frame)} bytes in the handshake")
    return frame[1:]
