"""Mutual proof of a shared secret, which itself is never sent.

    asks                               answers
      │ nonce ─────────────────────────────> │
      │ <───────────────────────────── nonce │
      │ its proof ─────────────────────────> │   wrong: it hangs up and says so
      │ <───────────────────────── its proof │   wrong: the same

A proof is HMAC-SHA256(secret, purpose, side, both nonces): it is valid for no other connection,
purpose or direction. Without TLS, an attacker who can modify packets in transit can still do so
after the proofs. This module does not use gRPC: the sessions and the separate connections for
weights share it.
"""

import hmac
import os
import secrets
import socket
import time
from collections.abc import Mapping

from jaxrl_async.errors import ConfigError, JoinRefused, WrongSecret

SECRET_VARIABLE = "JAXRL_ASYNC_SECRET"
NONCE_BYTES = 32
PROOF_BYTES = 32
LEAST_BYTES = 16
"""Minimum length of a secret that other machines share, bytes."""

WRONG_SECRET = (
    f"the two sides have different secrets: set the environment variable {SECRET_VARIABLE} to the "
    "same value on the trainer and on every sampler. If it is not set, a trainer on loopback "
    "generates one at each start: samplers of the same user on its machine find it by --join "
    "HOST:PORT or --join RUN_FOLDER"
)


def read_secret(environ: Mapping[str, str] = os.environ) -> bytes:
    """Return the shared secret from the environment; empty: it is not set."""
    return environ.get(SECRET_VARIABLE, "").strip().encode()


def check_secret(secret: bytes, host: str, *, loopback: bool) -> None:
    """Raise ConfigError if a process that listens on this host needs a secret and has none, or one
    that could be guessed from a proof."""
    if not is_strong(secret) and not loopback:
        raise ConfigError(
            f"remote.listen={host} can be reached from other machines, and the shared secret "
            f"{_weakness(secret)}: set the environment variable {SECRET_VARIABLE} to the same long "
            "random value here and for every sampler (for example the output of `openssl rand "
            "-hex 32`), or listen on 127.0.0.1."
        )


def check_dialled(secret: bytes, where: str, *, loopback: bool) -> None:
    """Raise ConfigError if a process is to dial another machine and has no secret, or one that
    could be guessed from a proof: any process there could control it.

    where: the address for the error message.
    """
    if not is_strong(secret) and not loopback:
        raise ConfigError(
            f"--join {where}: a trainer on another machine can be joined only with a shared "
            f"secret, and the secret here {_weakness(secret)}. Set the environment variable "
            f"{SECRET_VARIABLE} to the same value for the trainer and here (for example the output "
            "of `openssl rand -hex 32`). For a trainer on loopback on this machine, give "
            "the run's folder instead: its join.json holds the secret."
        )


def is_strong(secret: bytes) -> bool:
    """Return True if a proof of this secret shows that the other side knows it: the secret is set
    and cannot be guessed from a proof."""
    return len(secret) >= LEAST_BYTES


def new_secret() -> bytes:
    """Generate a secret for one start of a trainer: hexadecimal digits."""
    return secrets.token_hex(32).encode()


def new_nonce() -> bytes:
    """Generate the random number that makes a proof valid for only one connection."""
    return secrets.token_bytes(NONCE_BYTES)


def proof(secret: bytes, purpose: bytes, side: bytes, asker: bytes, answerer: bytes) -> bytes:
    """Return the proof of knowing the secret.

    Args:
        purpose: what the connection is for.
        side: b"asks" or b"answers": the side that sends the proof.
        asker, answerer: the nonces of the two sides.
    """
    return hmac.digest(
        secret, b"\0".join((b"jaxrl_async", purpose, side, asker + answerer)), "sha256"
    )


def is_proof(received: bytes, expected: bytes) -> bool:
    """Compare two proofs in constant time."""
    return hmac.compare_digest(received, expected)


def prove_secret(sock: socket.socket, secret: bytes, *, purpose: bytes, timeout_s: float) -> None:
    """Prove the secret over a connection that this process opened, and check the other side's
    proof.

    Leaves the socket without a timeout. Raises JoinRefused for a wrong secret and if the other side
    sends nothing in time, OSError for a broken connection.
    """
    until_s = time.monotonic() + timeout_s
    own_nonce = new_nonce()
    sock.settimeout(timeout_s)
    sock.sendall(own_nonce)
    peer_nonce = receive_by(sock, NONCE_BYTES, until_s)
    sock.sendall(proof(secret, purpose, b"asks", own_nonce, peer_nonce))
    received = receive_by(sock, PROOF_BYTES, until_s)
    if not is_proof(received, proof(secret, purpose, b"answers", own_nonce, peer_nonce)):
        raise WrongSecret(WRONG_SECRET)
    sock.settimeout(None)


def check_proof(sock: socket.socket, secret: bytes, *, purpose: bytes, timeout_s: float) -> None:
    """Perform the answering side's part, over a connection that this process accepted.

    Raises as `prove_secret`; the caller must then close the socket.
    """
    until_s = time.monotonic() + timeout_s
    own_nonce = new_nonce()
    sock.settimeout(timeout_s)
    peer_nonce = receive_by(sock, NONCE_BYTES, until_s)
    sock.sendall(own_nonce)
    received = receive_by(sock, PROOF_BYTES, until_s)
    if not is_proof(received, proof(secret, purpose, b"asks", peer_nonce, own_nonce)):
        raise WrongSecret(WRONG_SECRET)
    sock.sendall(proof(secret, purpose, b"answers", peer_nonce, own_nonce))
    sock.settimeout(None)


def receive_by(sock: socket.socket, count: int, until_s: float) -> bytes:
    """Read `count` bytes. The deadline is not extended for a peer that sends slowly.

    until_s: deadline on time.monotonic(). Raises JoinRefused if the bytes have not arrived by then,
    OSError for a broken connection.
    """
    got = b""
    while len(got) < count:
        sock.settimeout(seconds_left(until_s))
        try:
            more = sock.recv(count - len(got))
        except TimeoutError:
            continue  # the time is over
        if not more:
            raise JoinRefused(f"the other side hung up before the proof; perhaps {WRONG_SECRET}")
        got += more
    return got


def seconds_left(until_s: float) -> float:
    """Return the seconds until a time of time.monotonic(). Raises JoinRefused if it has passed."""
    left_s = until_s - time.monotonic()
    if left_s <= 0:
        raise JoinRefused("the other side did not prove the shared secret in time")
    return left_s


def _weakness(secret: bytes) -> str:
    """Describe why a secret is not strong."""
    return f"is shorter than {LEAST_BYTES} characters" if secret else "is missing"
