"""Pull pieces of weights from piece servers, over several connections, into an assembly.

Each piece is sent with a checksum. If TCP's 16-bit checksum misses a flipped bit, or a proxy
corrupts data, only one piece is lost, and no sampler relays it. The pieces' checksums add up to the
checksum of the whole array, which must equal the trainer's (host_sums).
"""

import logging
import socket
import threading
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np

from jaxrl_async.errors import ConfigError, WeightsError
from jaxrl_async.remote.weights.assembly import Assembly
from jaxrl_async.remote.weights.peer_authentication import PeerAuth
from jaxrl_async.remote.weights.piece_protocol import (
    GREETING,
    NAME,
    PUBLISH,
    SUM,
    PeerError,
    PeerLink,
    PieceRequest,
)
from jaxrl_async.remote.weights.pieces import WeightPiece
from jaxrl_async.remote.wire.address import parse_address

log = logging.getLogger(__name__)

CONNECT_S = 5.0
"""Maximum wait for a connection, seconds."""
REQUESTS_AHEAD = 8
"""Number of pending requests per connection, so the bytes of consecutive pieces follow without
gaps."""
STREAMS = 2
"""Number of connections to one source: one can receive while the other's piece is checked."""
SOCKET_BUFFER = 4 << 20


@dataclass(slots=True)
class Pulled:
    """The result of pulling from one source. Changed by its streams, under `lock`."""

    num_bytes: int = 0
    not_here: list[WeightPiece] = field(default_factory=list)  # the source lacks them
    errors: list[str] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)


@dataclass(frozen=True, slots=True, kw_only=True)
class PullSettings:
    """Settings of a client's connections to its sources."""

    auth: PeerAuth = field(default_factory=PeerAuth)
    silence_s: float = 20.0  # maximum time without data from a source, seconds


def pull(
    assembly: Assembly,
    version: int,
    requests: Sequence[tuple[str, Sequence[WeightPiece]]],
    settings: PullSettings,
    stopped: Callable[[], str],
) -> list[Pulled]:
    """Pull pieces from several servers concurrently; return the result of each when all have ended.

    Never raises for a server's failure: pieces that did not arrive remain missing in the assembly.

    Args:
        assembly: Destination of the pieces.
        version: Of the weights.
        requests: (HOST:PORT, its pieces).
        settings: The authentication and the limit on silence.
        stopped: Returns the reason to stop; "": continue.
    """
    results, threads = [], []
    for address, pieces in requests:
        left, result = deque(pieces), Pulled()
        results.append(result)
        for _ in range(min(STREAMS, len(pieces))):
            job = (assembly, version, address, left, result, settings, stopped)
            threads.append(threading.Thread(target=_stream, args=job, name="piece-receiver"))
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


def _stream(
    assembly: Assembly,
    version: int,
    address: str,
    left: deque[WeightPiece],
    result: Pulled,
    settings: PullSettings,
    stopped: Callable[[], str],
) -> None:
    """Pull pieces over one connection until none is left."""
    try:
        with _dial(address, settings, stopped) as server:
            _pull_over(server, assembly, version, left, result)
    except PeerError as error:
        with result.lock:
            result.errors.append(str(error))


def _pull_over(
    server: PeerLink, assembly: Assembly, version: int, left: deque[WeightPiece], result: Pulled
) -> None:
    pending: deque[WeightPiece] = deque()
    scratch = np.empty(0, np.uint8)
    while True:
        while len(pending) < REQUESTS_AHEAD and (piece := _next_piece(left)):
            request = PieceRequest(version=version, array=piece.array, box=piece.box)
            server.send(request.encoded())
            pending.append(piece)
        if not pending:
            return
        piece = pending.popleft()
        here, checksum = server.receive_answer(piece.num_bytes)
        if not here:
            with result.lock:
                result.not_here.append(piece)
            continue
        view = assembly.view(piece)
        if view.flags.c_contiguous:
            into = view.reshape(-1).view(np.uint8)
        else:
            scratch = (
                scratch if scratch.size >= piece.num_bytes else np.empty(piece.num_bytes, "u1")
            )
            into = scratch[: piece.num_bytes]
        server.receive(into.data)
        data = into.view(view.dtype).reshape(view.shape)
        if assembly.checksum(piece, data) != checksum:
            raise PeerError("a piece arrived corrupted: its checksum differs")
        if not view.flags.c_contiguous:
            np.copyto(view, data)
        assembly.arrived(piece, checksum)
        with result.lock:
            result.num_bytes += piece.num_bytes


def _next_piece(left: deque[WeightPiece]) -> WeightPiece | None:
    try:
        return left.popleft()
    except IndexError:
        return None


def ask_to_publish(
    address: str,
    version: int,
    pieces: Sequence[WeightPiece],
    settings: PullSettings,
    stopped: Callable[[], str],
) -> tuple[int, tuple[int, ...]]:
    """Ask a server to publish pieces for one pull from device to device; return its number, and
    the pieces' checksums (weights.manifest). Raises PeerError."""
    with _dial(address, settings, stopped) as server:
        named = [
            PieceRequest(version=version, array=p.array, box=p.box, kind=NAME).encoded()
            for p in pieces
        ]
        publish = PieceRequest(version=version, array=0, box=(), kind=PUBLISH)
        server.send(b"".join(named), publish.encoded())
        here, number = server.receive_answer(len(pieces) * SUM.size)
        if not here:
            raise PeerError(f"it does not publish version {version}")
        sums = SUM.iter_unpack(server.receive_bytes(len(pieces) * SUM.size))
        return number, tuple(checksum for (checksum,) in sums)


@contextmanager
def _dial(address: str, settings: PullSettings, stopped: Callable[[], str]) -> Iterator[PeerLink]:
    """Connect to a server while the body runs; its errors become PeerErrors with the address."""
    try:
        parsed = parse_address(address)
        with socket.create_connection((parsed.host, parsed.port), timeout=CONNECT_S) as raw:
            raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, SOCKET_BUFFER)
            raw.sendall(GREETING)
            with settings.auth.as_client(raw) as connection:
                yield PeerLink(connection, settings.silence_s, stopped)
    except (OSError, ConfigError, WeightsError) as error:
        raise PeerError(f"{address}: {error}") from None


def _requests(
    pieces: Sequence[WeightPiece], source: str | None, holders: Sequence[str]
) -> list[tuple[str, list[WeightPiece]]]:
    """Return the pieces to request from each address. source: None: the trainer's processes."""
    by_address: dict[str, list[WeightPiece]] = {}
    for piece in pieces:
        by_address.setdefault(source or holders[piece.holder], []).append(piece)
    return [(address, requested) for address, requested in by_address.items() if address]


def pull_all(
    assembly: Assembly,
    version: int,
    pieces: Sequence[WeightPiece],
    sources: Sequence[str],
    holders: Sequence[str],
    settings: PullSettings,
    stopped: Callable[[], str],
) -> Counter[str]:
    """Pull the missing pieces from one source after the other; return the bytes received from each
    address.

        members, best first ──> the trainer's processes, each for its pieces ──> none: failed

    A source whose connection breaks is retried as long as new pieces arrive from it.

    Args:
        assembly: Destination of the pieces.
        version: Of the weights.
        pieces: All of this process.
        sources: Addresses from the offer, best first; those of the trainer are replaced by all its
            processes.
        holders: Addresses of the trainer's processes.
        settings: The authentication and the limit on silence.
        stopped: Returns the reason to stop; "": continue.

    Raises WeightsError if pieces are missing when no source is left, or if stopped.
    """
    members = [s for s in dict.fromkeys(sources) if s and s not in holders]
    left: list[str | None] = [*members, *([None] if any(holders) else [])]  # None: the trainer
    received, errors = Counter[str](), list[str]()
    while missing := assembly.missing(pieces):
        if reason := stopped():
            raise WeightsError(f"version {version} was not fetched: {reason}")
        if not left:
            raise WeightsError(
                f"version {version}: no source has {len(missing)} of {len(pieces)} pieces. "
                + "; ".join(errors[-5:] or ["the offer contains no address to fetch from"])
            )
        requests = _requests(missing, left[0], holders)
        results = pull(assembly, version, requests, settings, stopped)
        for (address, _), result in zip(requests, results, strict=True):
            received[address] += result.num_bytes
            lacks = [f"{address} lacks {len(result.not_here)} pieces"] if result.not_here else []
            errors += result.errors + lacks
            for error in result.errors + lacks:
                log.warning("weights of version %d: %s", version, error)
        again = any(r.num_bytes for r in results) and any(r.errors for r in results)
        if not again:
            left.pop(0)
    return received
