"""What a connection for weights has to pass before any request: TLS, and the shared secret."""

import socket
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from jaxrl_async.remote.wire.secret import check_of, left_of, prove_to
from jaxrl_async.remote.wire.tls import TlsFiles

PURPOSE = b"weights"
GREETING_S = 5.0
"""Longest time for all that a connection has to pass, however slowly it comes, seconds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Guard:
    """The secret and the certificates, the same on both sides."""

    secret: bytes = field(default=b"", repr=False)
    tls: TlsFiles | None = None

    def as_client(self, connection: socket.socket) -> socket.socket:
        """Return the connection, encrypted if there are certificates, once both sides have proved
        the secret. Raises OSError (JoinRefused, SSLError), after GREETING_S at the latest."""
        return self._passed(connection, GREETING_S, prove_to, server=False)

    def as_server(self, connection: socket.socket, timeout_s: float = GREETING_S) -> socket.socket:
        """Do the other side's part, for a connection that was accepted, within timeout_s."""
        return self._passed(connection, timeout_s, check_of, server=True)

    def _passed(
        self,
        raw: socket.socket,
        timeout_s: float,
        meet: Callable[..., None],
        *,
        server: bool,
    ) -> socket.socket:
        until_s, connection = time.monotonic() + timeout_s, raw
        if self.tls is not None:
            context = self.tls.socket_context(server=server)
            raw.settimeout(left_of(until_s))  # counts for the whole handshake, see ssl.SSLSocket
            connection = context.wrap_socket(raw, server_side=server)
        try:
            meet(connection, self.secret, purpose=PURPOSE, timeout_s=left_of(until_s))
        except BaseException:
            if connection is not raw:  # of which the caller does not know
                connection.close()
            raise
        return connection
