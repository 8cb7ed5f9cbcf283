"""Authentication of a connection for weights before any request: TLS and the shared secret."""

import socket
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from jaxrl_async.remote.wire.secret import check_proof, prove_secret, seconds_left
from jaxrl_async.remote.wire.tls import TlsFiles

PURPOSE = b"weights"
GREETING_S = 5.0
"""Maximum total time of the authentication of a connection, seconds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerAuth:
    """The secret and the certificates, used on both sides."""

    secret: bytes = field(default=b"", repr=False)
    tls: TlsFiles | None = None

    def as_client(self, connection: socket.socket) -> socket.socket:
        """Authenticate, and return the connection, encrypted if there are certificates. Raises
        OSError (JoinRefused, SSLError), after GREETING_S at the latest."""
        return self._authenticate(connection, GREETING_S, prove_secret, server=False)

    def as_server(self, connection: socket.socket, timeout_s: float = GREETING_S) -> socket.socket:
        """Perform the server's part for an accepted connection, within timeout_s."""
        return self._authenticate(connection, timeout_s, check_proof, server=True)

    def _authenticate(
        self,
        raw: socket.socket,
        timeout_s: float,
        handshake: Callable[..., None],
        *,
        server: bool,
    ) -> socket.socket:
        until_s, connection = time.monotonic() + timeout_s, raw
        if self.tls is not None:
            context = self.tls.socket_context(server=server)
            raw.settimeout(seconds_left(until_s))  # covers the whole handshake, see ssl.SSLSocket
            connection = context.wrap_socket(raw, server_side=server)
        try:
            handshake(connection, self.secret, purpose=PURPOSE, timeout_s=seconds_left(until_s))
        except BaseException:
            if connection is not raw:  # which the caller does not have
                connection.close()
            raise
        return connection
