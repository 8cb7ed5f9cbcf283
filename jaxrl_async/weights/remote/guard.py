"""What a connection for weights has to pass before any request: TLS, and the shared secret."""

import socket
from dataclasses import dataclass, field

from jaxrl_async.wire.secret import check_of, prove_to
from jaxrl_async.wire.tls import TlsFiles

PURPOSE = b"weights"
GREETING_S = 5.0
"""Longest wait for the other side's proof, seconds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Guard:
    """The secret and the certificates, the same on both sides."""

    secret: bytes = field(default=b"", repr=False)
    tls: TlsFiles | None = None

    def as_client(self, connection: socket.socket) -> socket.socket:
        """Return the connection, encrypted if there are certificates, once both sides have proved
        the secret. Raises OSError (JoinRefused, SSLError)."""
        if self.tls is not None:
            connection = self.tls.socket_context(server=False).wrap_socket(connection)
        prove_to(connection, self.secret, purpose=PURPOSE, timeout_s=GREETING_S)
        return connection

    def as_server(self, connection: socket.socket) -> socket.socket:
        """Do the other side's part, for a connection that was accepted."""
        if self.tls is not None:
            connection = self.tls.socket_context(server=True).wrap_socket(
                connection, server_side=True
            )
        check_of(connection, self.secret, purpose=PURPOSE, timeout_s=GREETING_S)
        return connection
