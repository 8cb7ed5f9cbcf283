"""Serve pieces of weights over TCP: the trainer's, and those that a sampler has fetched."""

import contextlib
import errno
import logging
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np

from jaxrl_async.errors import WeightsError
from jaxrl_async.remote.weights.assembly import Holdings
from jaxrl_async.remote.weights.peer_authentication import GREETING_S, PeerAuth
from jaxrl_async.remote.weights.piece_protocol import (
    ANSWER,
    GREETING,
    HERE,
    MOST_NAMED,
    NAME,
    NOT_HERE,
    PUBLISH,
    SUM,
    WAIT,
    PeerError,
    PeerLink,
    PieceRequest,
)
from jaxrl_async.remote.weights.progress_thread import result_of, run_in_thread
from jaxrl_async.remote.wire.address import Address, advertised_address, parse_address
from jaxrl_async.remote.wire.pending_connections import (
    PendingConnection,
    PendingConnections,
    Refusals,
)
from jaxrl_async.remote.wire.secret import check_secret, receive_by, seconds_left
from jaxrl_async.weights.host_reshard import Box, volume

log = logging.getLogger(__name__)

MAX_PENDING = 64
"""Maximum number of connections that have not proved the secret yet (wire.pending_connections
chooses which one is dropped)."""
FIRST_BYTES_S = 1.0
"""Maximum time for a connection's greeting, which a client sends immediately, seconds."""
PATIENCE_S = 3.0
"""Maximum wait for a version or piece that has yet to arrive here, seconds; then the client must
use another source."""
PAUSE_S = 0.05
"""Pause after a failed accept (too many open files), seconds."""
SOCKET_BUFFER = 4 << 20
MAX_PORT = 65535


Publish = Callable[[int, Sequence[tuple[int, Box]]], tuple[int, Sequence[int]] | None]
"""(version, pieces as (array, box)) -> the pull's number and the pieces' checksums, or None if they
are not here."""


class PieceServer:
    """A server with a thread that accepts connections, and one thread per connection that answers
    its requests in order.

    Attributes:
        address: HOST:PORT for clients.
    """

    def __init__(
        self,
        holdings: Holdings,
        *,
        listen: str = "127.0.0.1:0",
        ports: int = 1,
        advertise: str | None = None,
        auth: PeerAuth | None = None,
        silence_s: float = 20.0,
        publish: Publish | None = None,
    ) -> None:
        """Start listening.

        Args:
            holdings: The versions to serve; others add and remove versions concurrently.
            listen: HOST:PORT; port 0 takes a free one.
            ports: Number of ports to try, starting at the port of `listen`.
            advertise: Host name of this machine for clients; None: the host of `listen`.
            auth: Authenticates new connections.
            silence_s: Time after which a client that receives nothing is dropped, seconds.
            publish: Publishes pieces for a pull from device to device.

        Raises WeightsError if it cannot listen there, ConfigError if other machines can reach it
        and there is no secret.
        """
        self._holdings, self._auth, self._silence_s = holdings, auth or PeerAuth(), silence_s
        self._publish = publish
        self._counts, self._lock = Counter[str](), threading.Lock()
        self._open: set[socket.socket] = set()
        self._pending = PendingConnections(MAX_PENDING)
        self._refusals = Refusals("a connection for weights from ")
        self._closed = False
        requested = parse_address(listen, what="remote.listen")
        check_secret(self._auth.secret, listen, loopback=requested.is_loopback)
        self._socket = _listening(requested, ports)
        port = self._socket.getsockname()[1]
        host = advertised_address(Address(requested.host, port), advertise).host
        self.address = str(Address(host, port))
        self._thread = threading.Thread(target=self._accept, name="piece-server", daemon=True)
        self._thread.start()

    @property
    def counts(self) -> dict[str, int]:
        """Counts so far by name: bytes and pieces sent, refusals and others."""
        with self._lock:
            return dict(self._counts + Counter(refused=self._refusals.count))

    def close(self) -> None:
        """Stop serving; clients see a broken connection. Idempotent."""
        with self._lock:
            self._closed = True
            connections = list(self._open)
        for connection in [self._socket, *connections]:
            _break(connection)
            connection.close()
        self._thread.join(timeout=5.0)

    def _accept(self) -> None:
        while not self._closed:
            try:
                connection, peer = self._socket.accept()
            except OSError:
                if self._closed:
                    return
                time.sleep(PAUSE_S)
                continue
            with self._lock:
                self._open.add(connection)
                closed = self._closed
            if closed:
                connection.close()
                return
            try:
                threading.Thread(
                    target=self._serve, args=(connection, peer), name="piece-sender", daemon=True
                ).start()
            except RuntimeError as error:  # the system has no more threads
                self._refusals.note(peer, str(error))
                self._forget(connection)

    def _serve(self, raw: socket.socket, peer: tuple[Any, ...]) -> None:
        """Admit one connection and answer its requests until it ends."""
        connection = raw
        try:
            with (
                raw.dup() as handle,  # TLS takes ownership of `raw`
                self._pending.track(peer[0], partial(_break, handle)) as pending,
            ):
                connection = self._admit(raw, pending)
        except (OSError, WeightsError) as error:
            self._refusals.note(peer, str(error))
        else:
            link, named = PeerLink(connection, self._silence_s), list[tuple[int, Box]]()
            try:
                while not self._closed:
                    self._answer(link, link.receive_request(), named)
            except (PeerError, ValueError) as error:
                self._count("ended")
                log.debug("a connection from %s ended: %s", peer, error)
        finally:
            self._forget(raw, connection)

    def _forget(self, *connections: socket.socket) -> None:
        with self._lock:
            self._open.difference_update(connections)
        for connection in connections:
            connection.close()

    def _admit(self, raw: socket.socket, pending: PendingConnection) -> socket.socket:
        """Receive the greeting within FIRST_BYTES_S, and authenticate within GREETING_S. Raises
        OSError or PeerError."""
        raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SOCKET_BUFFER)
        began_s = time.monotonic()
        if receive_by(raw, len(GREETING), began_s + FIRST_BYTES_S) != GREETING:
            raise PeerError("it does not speak this protocol")
        pending.greeted = True
        connection = self._auth.as_server(raw, seconds_left(began_s + GREETING_S))
        with self._lock:
            self._open.add(connection)  # so `close` breaks it
        return connection

    def _answer(self, link: PeerLink, request: PieceRequest, named: list[tuple[int, Box]]) -> None:
        """Answer a request; named: pieces that this connection has named for a pull."""

        def waiting() -> None:
            link.send(ANSWER.pack(WAIT, 0, 0))

        if request.kind == NAME:
            if len(named) == MOST_NAMED:
                raise PeerError(f"more than {MOST_NAMED} pieces for one pull")
            named.append((request.array, request.box))
            return
        if request.kind == PUBLISH:
            published = self._published(request.version, tuple(named), waiting)
            named.clear()
            if published is None:
                link.send(ANSWER.pack(NOT_HERE, 0, 0))
                return
            number, sums = published
            self._count("published")
            data = b"".join(SUM.pack(checksum) for checksum in sums)
            link.send(ANSWER.pack(HERE, len(data), number), data)
            return
        assembly = self._holdings.find(request.version, PATIENCE_S, waiting)
        piece = None
        if assembly is not None:
            piece = assembly.read(request.array, request.box, PATIENCE_S, waiting)
        if assembly is None or piece is None:
            self._count("not_here")
            link.send(ANSWER.pack(NOT_HERE, 0, 0))
            return
        checksum = assembly.sum_of(request.array, request.box, piece)
        assert piece.size == volume(request.box), "Assembly.read returned another piece"
        raw = piece.reshape(-1).view(np.uint8).data
        self._count("pieces")
        self._count("sent_bytes", raw.nbytes)
        link.send(ANSWER.pack(HERE, raw.nbytes, checksum), raw)

    def _published(
        self, version: int, pieces: Sequence[tuple[int, Box]], waiting: Callable[[], None]
    ) -> tuple[int, Sequence[int]] | None:
        """Publish pieces; the devices first finish their current work, and may compile."""
        publish = self._publish
        if publish is None:
            return None
        try:
            return result_of(run_in_thread(lambda: publish(version, pieces), "publish"), waiting)
        except PeerError:
            raise
        except Exception as error:  # arrays deleted in the meantime, or out of memory
            log.warning("version %d cannot be published from devices: %s", version, error)
            return None

    def _count(self, name: str, count: int = 1) -> None:
        with self._lock:
            self._counts[name] += count


def _break(connection: socket.socket) -> None:
    """Break a connection immediately, even if another thread waits on it."""
    with contextlib.suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)


def _listening(requested: Address, ports: int) -> socket.socket:
    """Return a socket that listens on the first free port. Raises WeightsError."""
    family = socket.AF_INET6 if ":" in requested.host else socket.AF_INET
    last = min(requested.port + ports - 1, MAX_PORT)
    for port in range(requested.port, last + 1):
        try:
            listener = socket.create_server((requested.host, port), family=family, backlog=128)
        except OSError as error:
            if error.errno == errno.EADDRINUSE and port < last:
                continue
            where = str(requested) if last == requested.port else f"{requested} to {last}"
            raise WeightsError(
                f"cannot serve weights at {where}: {error}. Set remote.listen to an address of "
                "this machine, and remote.data_port (of a sampler: --data-port) to a free port "
                "there, or to 0, which takes any."
            ) from None
        if port != requested.port:
            log.info("port %d is in use: relaying weights at port %d", requested.port, port)
        return listener
    raise AssertionError("at least one port is tried")
