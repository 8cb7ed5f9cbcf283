"""The first bytes of a real TLS client, and how they come one by one."""

import socket
import ssl
import time

from jaxrl_async.remote.wire.tls import TlsFiles


def client_hello(files: TlsFiles) -> bytes:
    """Return what a client with these files says first."""
    out = ssl.MemoryBIO()
    client = files.socket_context(server=False).wrap_bio(ssl.MemoryBIO(), out)
    try:
        client.do_handshake()
    except ssl.SSLWantReadError:
        return out.read()
    raise AssertionError("it waits for no answer")


def dripped(connection: socket.socket, data: bytes, pause_s: float) -> int:
    """Send bytes one by one until the other side hangs up; return how many went."""
    connection.settimeout(0)
    for count in range(len(data)):
        try:
            if connection.recv(1) == b"":
                return count
        except BlockingIOError:
            pass
        except ConnectionError:
            return count
        try:
            connection.send(data[count : count + 1])
        except ConnectionError:
            return count
        time.sleep(pause_s)
    return len(data)
