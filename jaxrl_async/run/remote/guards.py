"""What guards the connections over which weights travel: the secret, and TLS where files are
given."""

import socket

from jaxrl_async.weights.remote.piece_protocol import Guard
from jaxrl_async.wire.secret import check_of, prove_to
from jaxrl_async.wire.tls import TlsFiles

PURPOSE = b"weights"
"""What these connections are for, in the proof of the secret."""
PROVE_S = 10.0
"""Longest time for a proof, and for TLS, seconds."""


def make_guard(secret: bytes, tls: TlsFiles | None) -> Guard:
    """Return the guard of both sides; an empty secret is no secret, but still has to be equal."""

    def client(connection: socket.socket) -> socket.socket:
        connection.settimeout(PROVE_S)
        if tls is not None:
            connection = tls.socket_context(server=False).wrap_socket(connection)
        prove_to(connection, secret, purpose=PURPOSE, timeout_s=PROVE_S)
        return connection

    def server(connection: socket.socket) -> socket.socket:
        connection.settimeout(PROVE_S)
        if tls is not None:
            connection = tls.socket_context(server=True).wrap_socket(connection, server_side=True)
        check_of(connection, secret, purpose=PURPOSE, timeout_s=PROVE_S)
        return connection

    return Guard(client=client, server=server)
