"""The trainer's side of connections: listens and admits samplers that know the secret.

Traffic that is not HTTP/2 never reaches Python: gRPC drops it after join_s at the latest. A gRPC
client without the secret has a few bytes read within join_s. It counts towards max_joining, and
newer connections can replace it (pending_connections.py).
"""

import logging
import resource
import threading
import time
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import Executor, Future
from contextlib import suppress
from typing import Any
from urllib.parse import unquote

from jaxrl_async.errors import ConfigError, JoinRefused, printable
from jaxrl_async.remote.wire.address import Address, parse_address
from jaxrl_async.remote.wire.grpc_link import (
    METHOD,
    OPTIONS,
    SERVICE,
    describe_error,
    grpc,
    pump_frames,
)
from jaxrl_async.remote.wire.handshake import admit_sampler, refused_frame, welcome_frame
from jaxrl_async.remote.wire.messages import Hello, Welcome
from jaxrl_async.remote.wire.pending_connections import (
    PendingConnection,
    PendingConnections,
    Refusals,
)
from jaxrl_async.remote.wire.secret import check_secret
from jaxrl_async.remote.wire.session import WireLimits, WireSession
from jaxrl_async.remote.wire.tls import TlsFiles

log = logging.getLogger(__name__)

CLOSE_S = 5.0
"""Maximum wait for all sessions to end when the hub closes, seconds."""

IDLE_CONNECTIONS = 2048
"""Maximum number of open connections without a call. gRPC refuses further connections, and those
that would take more than half of the process's file descriptors."""
HANDSHAKE_MS = 3000
"""Maximum time in which a connection must start HTTP/2, milliseconds."""

OnJoin = Callable[[WireSession, Hello], Welcome]


class Hub:
    """Accepts samplers until it is closed.

    Args:
        listen: HOST:PORT; port 0 takes a free one.
        secret: see secret.read_secret.
        tls: None: not encrypted.
        on_join: called on a separate thread with each sampler that has proved the secret. It
            registers the session's handlers and returns the Welcome, or raises JoinRefused with the
            reason. Messages that it sends arrive after the Welcome; on_end may be called at any
            time from then on.
        on_bound: called with the address before any connection is answered there.

    Raises:
        ConfigError: the address cannot be listened on, or it needs a secret.
    """

    def __init__(
        self,
        listen: str,
        *,
        secret: bytes,
        tls: TlsFiles | None,
        limits: WireLimits,
        on_join: OnJoin,
        on_bound: Callable[[Address], None] = lambda address: None,
    ) -> None:
        requested = parse_address(listen, what="remote.listen")
        check_secret(secret, listen, loopback=requested.is_loopback)
        self._secret, self._limits, self._on_join = secret, limits, on_join
        self._pending = PendingConnections(limits.max_joining)
        self._lock = threading.Lock()
        self._sessions: set[WireSession] = set()
        self._closing = False
        self._refusals = Refusals()
        self._server = _make_server(limits)
        handler = grpc.stream_stream_rpc_method_handler(self._serve)
        self._server.add_generic_rpc_handlers(
            (grpc.method_handlers_generic_handler(SERVICE, {METHOD: handler}),)
        )
        self.address = Address(requested.host, _bind(self._server, requested, tls))
        """Address at which it listens."""
        on_bound(self.address)
        self._server.start()

    @property
    def refused(self) -> int:
        """Number of refused connections."""
        return self._refusals.count

    def close(self, reason: str = "the trainer has ended", limit_s: float = CLOSE_S) -> None:
        """End all sessions concurrently with this reason, and stop listening. Idempotent.

        limit_s: maximum time for all sessions to end, seconds; the connections of the others are
        closed.
        """
        with self._lock:
            self._closing = True
            sessions = tuple(self._sessions)
        for session in sessions:
            session.begin_end(reason)
        end_s = time.monotonic() + limit_s
        for session in sessions:
            if not session.wait_over(max(0.0, end_s - time.monotonic())):
                session.lost(f"{session.peer} did not end the session in time")
        self._server.stop(grace=1.0).wait()

    def _serve(self, incoming: Iterator[bytes], context: Any) -> Iterator[bytes]:
        """Serve one connection: yield the frames to send."""
        timer = threading.Timer(self._limits.join_s, context.cancel)
        timer.daemon = True
        timer.start()
        try:
            with self._pending.track(_host(context.peer()), context.cancel) as pending:
                hello = yield from self._admit(incoming, context.peer(), pending)
        finally:
            timer.cancel()
        if hello is not None:
            yield from self._joined(hello, incoming, context)

    def _admit(
        self, incoming: Iterator[bytes], peer: str, pending: PendingConnection
    ) -> Generator[bytes, None, Hello | None]:
        """Yield the frames of the handshake; return the Hello, or None."""
        steps = admit_sampler(self._secret)
        next(steps)
        try:
            while True:
                frame = next(incoming, None)
                if frame is None:
                    raise ValueError("hung up")
                answer = steps.send(frame)
                pending.greeted = True
                yield answer
        except StopIteration as done:
            return done.value
        except JoinRefused as error:
            self._refusals.note(peer, str(error))
            yield refused_frame(str(error))
        except (ValueError, grpc.RpcError) as error:
            broken = isinstance(error, grpc.RpcError)
            self._refusals.note(peer, describe_error(error) if broken else printable(str(error)))
        return None

    def _joined(self, hello: Hello, incoming: Iterator[bytes], context: Any) -> Iterator[bytes]:
        session = WireSession(
            hello.name, self._limits, close_stream=context.cancel, secret=self._secret
        )
        try:
            welcome = welcome_frame(self._on_join(session, hello))
            with self._lock:
                if self._closing:
                    raise JoinRefused("the trainer is about to end")
                self._sessions.add(session)
        except Exception as error:  # a failure of the trainer must not look like a network failure
            if not isinstance(error, JoinRefused):
                log.exception("%s (%s) could not be admitted", hello.name, context.peer())
            self._refusals.note(context.peer(), str(error))
            session.discard(f"refused: {error}")
            yield refused_frame(str(error))
            return
        session.on_end(lambda _: self._forget(session))
        session.start()
        reason = f"{session.peer} is gone: its connection broke"
        if not context.add_callback(lambda: session.lost(reason)):
            session.lost(reason)
        yield welcome
        threading.Thread(
            target=pump_frames, args=(incoming, session), name=f"read {hello.name}", daemon=True
        ).start()
        yield from session.frames()

    def _forget(self, session: WireSession) -> None:
        with self._lock:
            self._sessions.discard(session)


def _host(peer: str) -> str:
    """Return the host in gRPC's name of a peer: ipv4:10.0.0.1:80, ipv6:%5B::1%5D:80."""
    host = unquote(peer).partition(":")[2].rpartition(":")[0]
    return host.removeprefix("[").removesuffix("]")


class _DaemonThreads(Executor):
    """Runs each call on a separate daemon thread. The threads of ThreadPoolExecutor would keep the
    process alive when a run fails. gRPC bounds the number of threads."""

    def submit(
        self, fn: Callable[..., object], /, *args: object, **kwargs: object
    ) -> "Future[Any]":
        """See Executor."""
        future: Future[Any] = Future()

        def work() -> None:
            try:
                future.set_result(fn(*args, **kwargs))
            except BaseException as error:  # as the pool does: it belongs to the future
                future.set_exception(error)

        threading.Thread(target=work, name="grpc", daemon=True).start()
        return future


def _make_server(limits: WireLimits) -> grpc.Server:
    join_ms = int(limits.join_s * 1000)
    most = limits.max_sessions + limits.max_joining
    open_most = most + IDLE_CONNECTIONS
    options = (
        *OPTIONS,
        ("grpc.so_reuseport", 0),  # else two trainers could share a port unnoticed
        ("grpc.max_concurrent_streams", 4),
        ("grpc.max_allowed_incoming_connections", min(open_most, _half_of_files(open_most))),
        ("grpc.server_handshake_timeout_ms", min(join_ms, HANDSHAKE_MS)),
        ("grpc.max_connection_idle_ms", join_ms),  # connections without a call
    )
    return grpc.server(_DaemonThreads(), options=options, maximum_concurrent_rpcs=most)


def _half_of_files(connections: int) -> int:
    """Return half of the limit of open files of this process; raise the limit to twice this
    number if the system allows it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return 2**30
    most = 2 * connections if hard == resource.RLIM_INFINITY else min(2 * connections, hard)
    if soft < most:
        with suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
            log.info("raised this process's limit of open files to %d, from %d", most, soft)
            soft = most
    if soft < 2 * connections:
        log.info(
            "%d open files (ulimit -n) allow %d sampler connections",
            soft,
            soft // 2,
        )
    return max(1, soft // 2)


def _bind(server: grpc.Server, address: Address, tls: TlsFiles | None) -> int:
    """Start listening; return the port."""
    try:
        if tls is None:
            return server.add_insecure_port(str(address))
        credentials = grpc.ssl_server_credentials(
            [(tls.key, tls.certificate)], tls.authority, require_client_auth=True
        )
        return server.add_secure_port(str(address), credentials)
    except RuntimeError as error:
        raise ConfigError(
            f"remote.listen={address}: cannot listen there; choose another port (0 takes a "
            f"free one), or an address of this machine"
        ) from error
