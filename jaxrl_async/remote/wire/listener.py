"""The trainer's end: listens, lets in who knows the secret, and keeps what others send harmless.

What is no HTTP/2 never reaches Python: gRPC drops it, after join_s at the latest. Whoever speaks
gRPC without the secret gets a few bytes read within join_s, in one of max_joining places, which it
loses to newcomers (strangers.py).
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
from jaxrl_async.remote.wire.secret import check_secret
from jaxrl_async.remote.wire.session import WireLimits, WireSession
from jaxrl_async.remote.wire.strangers import Stranger, Strangers
from jaxrl_async.remote.wire.tls import TlsFiles

log = logging.getLogger(__name__)

CLOSE_S = 5.0
"""Longest wait for all sessions to take their end when the hub closes, seconds."""

IDLE_CONNECTIONS = 2048
"""Connections that may be open before anything is asked on them; gRPC refuses those beyond, and
those with which half of the process's descriptors would be taken."""
HANDSHAKE_MS = 3000
"""Longest time in which a connection begins to speak HTTP/2, milliseconds."""

OnJoin = Callable[[WireSession, Hello], Welcome]


class Hub:
    """Accepts samplers until it is closed.

    Args:
        listen: HOST:PORT; port 0 takes a free one.
        secret: see secret.read_secret.
        tls: None: not encrypted.
        on_join: called on a thread of its own with each sampler that has proved the secret: give
            the session its handlers and return the Welcome, or raise JoinRefused with the reason.
            What it sends arrives after the Welcome; on_end may be called at any time from then on.
        on_bound: called with the address before anybody is answered there.

    Raises:
        ConfigError: nothing can listen there, or it would need a secret.
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
        wanted = parse_address(listen, what="remote.listen")
        check_secret(secret, listen, loopback=wanted.is_loopback)
        self._secret, self._limits, self._on_join = secret, limits, on_join
        self._strangers = Strangers(limits.max_joining)
        self._lock = threading.Lock()
        self._sessions: set[WireSession] = set()
        self._closing = False
        self._refusals = _Refusals()
        self._server = _make_server(limits)
        handler = grpc.stream_stream_rpc_method_handler(self._serve)
        self._server.add_generic_rpc_handlers(
            (grpc.method_handlers_generic_handler(SERVICE, {METHOD: handler}),)
        )
        self.address = Address(wanted.host, _bind(self._server, wanted, tls))
        """Where it listens."""
        on_bound(self.address)
        self._server.start()

    @property
    def refused(self) -> int:
        """Number of connections that were not let in."""
        return self._refusals.count

    def close(self, reason: str = "the trainer has ended", limit_s: float = CLOSE_S) -> None:
        """End all sessions with this reason, at once, and stop to listen. Idempotent.

        limit_s: time for all of them to take it, seconds; the connections of those that do not are
        broken.
        """
        with self._lock:
            self._closing = True
            sessions = tuple(self._sessions)
        for session in sessions:
            session.begin_end(reason)
        end_s = time.monotonic() + limit_s
        for session in sessions:
            if not session.wait_over(max(0.0, end_s - time.monotonic())):
                session.lost(f"{session.peer} did not take the end in time")
        self._server.stop(grace=1.0).wait()

    def _serve(self, incoming: Iterator[bytes], context: Any) -> Iterator[bytes]:
        """Serve one connection: yield the frames to send."""
        late = threading.Timer(self._limits.join_s, context.cancel)
        late.daemon = True
        late.start()
        try:
            with self._strangers.place(_host(context.peer()), context.cancel) as stranger:
                hello = yield from self._admit(incoming, context.peer(), stranger)
        finally:
            late.cancel()
        if hello is not None:
            yield from self._joined(hello, incoming, context)

    def _admit(
        self, incoming: Iterator[bytes], peer: str, stranger: Stranger
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
                stranger.greeted = True
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
        except Exception as error:  # a failure of the trainer must not look like a cut network
            if not isinstance(error, JoinRefused):
                log.exception("%s (%s) could not be let in", hello.name, context.peer())
            self._refusals.note(context.peer(), str(error))
            session.discard(f"not let in: {error}")
            yield refused_frame(str(error))
            return
        session.on_end(lambda _: self._forget(session))
        session.start()
        gone = f"{session.peer} is gone: its connection broke"
        if not context.add_callback(lambda: session.stream_ended(gone)):
            session.stream_ended(gone)
        yield welcome
        threading.Thread(
            target=pump_frames, args=(incoming, session), name=f"read {hello.name}", daemon=True
        ).start()
        yield from session.frames()

    def _forget(self, session: WireSession) -> None:
        with self._lock:
            self._sessions.discard(session)


def _host(peer: str) -> str:
    """Return the address in gRPC's name of a peer: ipv4:10.0.0.1:80, ipv6:%5B::1%5D:80."""
    host = unquote(peer).partition(":")[2].rpartition(":")[0]
    return host.removeprefix("[").removesuffix("]")


class _Refusals:
    """Counts who was not let in, and logs a line in LOG_S seconds at most."""

    LOG_S = 10.0

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.count = 0
        self._logged_count, self._logged_s = 0, float("-inf")

    def note(self, peer: str, reason: str) -> None:
        with self._lock:
            self.count += 1
            now_s = time.monotonic()
            if now_s - self._logged_s < self.LOG_S:
                return
            new, self._logged_count, self._logged_s = (
                self.count - self._logged_count,
                self.count,
                now_s,
            )
        log.warning("%s was not let in: %s (%d so far since the last line)", peer, reason, new)


class _DaemonThreads(Executor):
    """Runs each call on a thread of its own that does not keep the process alive, as those of
    ThreadPoolExecutor do when a run fails. gRPC bounds their number."""

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> "Future[Any]":
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
        ("grpc.so_reuseport", 0),  # else two trainers share a port, and neither knows
        ("grpc.max_concurrent_streams", 4),
        ("grpc.max_allowed_incoming_connections", min(open_most, _half_of_files(open_most))),
        ("grpc.server_handshake_timeout_ms", min(join_ms, HANDSHAKE_MS)),
        ("grpc.max_connection_idle_ms", join_ms),  # connections without a call
    )
    return grpc.server(_DaemonThreads(), options=options, maximum_concurrent_rpcs=most)


def _half_of_files(wanted: int) -> int:
    """Return half of the number of files that this process may have open; raise that limit to
    twice what is wanted, if the system allows it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return 2**30
    most = 2 * wanted if hard == resource.RLIM_INFINITY else min(2 * wanted, hard)
    if soft < most:
        with suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
            log.info("this process may have %d files open from now on, before: %d", most, soft)
            soft = most
    if soft < 2 * wanted:
        log.info("%d open files (ulimit -n) allow %d connections of samplers", soft, soft // 2)
    return max(1, soft // 2)


def _bind(server: grpc.Server, wanted: Address, tls: TlsFiles | None) -> int:
    """Start to listen; return the port."""
    try:
        if tls is None:
            return server.add_insecure_port(str(wanted))
        credentials = grpc.ssl_server_credentials(
            [(tls.key, tls.certificate)], tls.authority, require_client_auth=True
        )
        return server.add_secure_port(str(wanted), credentials)
    except RuntimeError as error:
        raise ConfigError(
            f"remote.listen={wanted}: nothing can listen there; choose another port (0 takes a "
            f"free one), or an address of this machine"
        ) from error
