"""The endpoint's server thread: a socket and uvicorn."""

import asyncio
import logging
import socket
import threading
from typing import Any, Self

from jaxrl_async.endpoint.app import EndpointApp
from jaxrl_async.endpoint.connection import bounded_connections, serving_module
from jaxrl_async.endpoint.service import EndpointCounts, EndpointService
from jaxrl_async.errors import ConfigError

log = logging.getLogger(__name__)

LOOPBACK = "127.0.0.1"
"""An address that only this machine can reach."""
GRACE_S = 2
"""Time for open calls at shutdown, seconds; then they are answered with 503."""
SEND_BUFFER = 2**18
"""Kernel buffer for answers that a client has not read yet, bytes."""
JOIN_S = 15.0
"""Maximum wait for the thread to end, seconds."""
MORE_CONNECTIONS = 64
"""Connections in addition to those of open calls, for keep-alive clients."""


class Endpoint:
    """An HTTP server in a thread of this process. A context manager that closes it at the end."""

    def __init__(self, service: EndpointService, *, host: str = LOOPBACK, port: int = 0) -> None:
        """Open the socket; `start` serves it. Raises ConfigError if the address is not available,
        and MissingExtraError.

        Args:
            service: serves the calls.
            host: the address to listen on.
            port: 0 uses any free one.
        """
        uvicorn = serving_module("uvicorn")
        logging.getLogger("uvicorn").setLevel(logging.WARNING)
        self._service = service
        most = 2 * service.limits.max_open_calls + MORE_CONNECTIONS
        connection = bounded_connections(
            most, service.limits.stall_s, lambda: service.count(stalled=1)
        )
        self._socket = _listening_socket(host, port)
        config = uvicorn.Config(
            EndpointApp(service),
            http=connection,
            ws="none",
            lifespan="off",
            interface="asgi3",
            log_config=None,
            access_log=False,
            server_header=False,
            timeout_graceful_shutdown=GRACE_S,
        )
        self._server: Any = uvicorn.Server(config)
        self._thread = threading.Thread(target=self._run, name="endpoint", daemon=True)
        self.host, self.port = host, int(self._socket.getsockname()[1])

    @property
    def address(self) -> str:
        """Its address on this machine, without /v1."""
        host = LOOPBACK if self.host in ("0.0.0.0", "::") else self.host
        return f"http://[{host}]:{self.port}" if ":" in host else f"http://{host}:{self.port}"

    def counts(self) -> EndpointCounts:
        """Return its counts since the start."""
        return self._service.counts

    def start(self) -> Self:
        """Start serving calls."""
        self._thread.start()
        return self

    def close(self) -> None:
        """Shut down; open calls have GRACE_S to finish. Idempotent."""
        self._server.should_exit = True
        if not self._thread.ident:
            self._socket.close()
            return
        self._thread.join(JOIN_S)
        if self._thread.is_alive():
            log.error("the endpoint's thread did not end within %.0f s", JOIN_S)

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, *error: object) -> None:
        self.close()

    def _run(self) -> None:
        """Serve until `close`.

        consumes      calls of clients
        waits for     sockets, and the sampler's answers
        produces      answers
        on failure    the error is logged, and no calls are served any more
        """
        try:
            asyncio.run(self._serve())
        except Exception as error:
            log.error("the endpoint ended: %s", error, exc_info=error)

    async def _serve(self) -> None:
        try:
            await self._server.serve(sockets=[self._socket])
        finally:
            await self._service.close()


def _listening_socket(host: str, port: int) -> socket.socket:
    """Return a listening socket. Raises ConfigError."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # asyncio turns TCP_NODELAY on for sockets that name their protocol, and for no others
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER)  # of each connection
        listener.bind((host, port))
        listener.listen(1024)
    except (OSError, OverflowError) as error:  # a port above 65535 overflows
        listener.close()
        raise ConfigError(
            f"the endpoint cannot listen on {host}, port {port}: {error}. Choose another address, "
            "or port 0 for any free one."
        ) from None
    return listener
