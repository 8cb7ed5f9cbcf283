"""Prove to each other the knowledge of a shared secret, which itself is never sent.

    asks                                answers
      │ nonce ─────────────────────────────> │
      │ <───────────────────────────── nonce │
      │ proof of the one who asks ─────────> │   wrong: it hangs up and says so
      │ <──────── proof of the one who answers │   wrong: the same

A proof is HMAC-SHA256(secret, purpose, side, both nonces): it fits no other connection, purpose or
direction. Without TLS, whoever can change the packets on their way can still do so after the
proofs. No gRPC here: the sessions and the weights' own connections use these functions.
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
"""Of a secret that is known to other machines."""

WRONG_SECRET = (
    f"the two sides have different secrets: set the environment variable {SECRET_VARIABLE} to the "
    "same value on the trainer and on every sampler. Where it is not set, a trainer on loopback "
    "makes one at each start: samplers of the same user on its machine find it by --join HOST:PORT "
    "or --join RUN_FOLDER"
)


def read_secret(environ: Mapping[str, str] = os.environ) -> bytes:
    """Return the shared secret of the environment; empty: there is none."""
    return environ.get(SECRET_VARIABLE, "").strip().encode()


def check_secret(secret: bytes, host: str, *, loopback: bool) -> None:
    """Raise ConfigError if a process that listens at this host needs a secret and has none, or one
    that whoever sees a proof could guess."""
    if not is_strong(secret) and not loopback:
        raise ConfigError(
            f"remote.listen={host} can be reached from other machines, and the shared secret "
            f"{_lack(secret)}: set the environment variable {SECRET_VARIABLE} to the same long "
            "random value here and for every sampler (for example the output of `openssl rand "
            "-hex 32`), or listen on 127.0.0.1."
        )


def check_dialled(secret: bytes, where: str, *, loopback: bool) -> None:
    """Raise ConfigError if a process is to dial another machine and has no secret, or one that
    whoever sees a proof could guess: anybody there could tell it what to do.

    where: the address, named in the error.
    """
    if not is_strong(secret) and not loopback:
        raise ConfigError(
            f"--join {where}: a trainer on another machine is joined only with the secret that it "
            f"shares, and the one here {_lack(secret)}. Set the environment variable "
            f"{SECRET_VARIABLE} to the trainer's value (there and here the same, for example the "
            "output of `openssl rand -hex 32`). Of a trainer that listens on loopback on this "
            "machine give the run's folder instead: its join.json holds the secret."
        )


def is_strong(secret: bytes) -> bool:
    """Return whether a proof of this secret shows that the other side knows it: it is there, and
    nobody can guess it from a proof."""
    return len(secret) >= LEAST_BYTES


def new_secret() -> bytes:
    """Make a secret for one start of a trainer: hexadecimal digits."""
    return secrets.token_hex(32).encode()


def new_nonce() -> bytes:
    """Draw the random number that makes a proof good for one connection."""
    return secrets.token_bytes(NONCE_BYTES)


def proof(secret: bytes, purpose: bytes, side: bytes, asked: bytes, answered: bytes) -> bytes:
    """Return what proves the knowledge of the secret.

    Args:
        purpose: what the connection is for.
        side: b"asks" or b"answers": whose proof it is.
        asked, answered: the nonces of the two sides.
    """
    return hmac.digest(
        secret, b"\0".join((b"jaxrl_async", purpose, side, asked + answered)), "sha256"
    )


def is_proof(given: bytes, wanted: bytes) -> bool:
    """Compare two proofs in a time that does not depend on where they differ."""
    return hmac.compare_digest(given, wanted)


def prove_to(sock: socket.socket, secret: bytes, *, purpose: bytes, timeout_s: float) -> None:
    """Prove the secret over a connection that this process opened, and check the other side's.

    Leaves the socket without a timeout. Raises JoinRefused for a wrong secret and for a side that
    says nothing in time, OSError for a broken connection.
    """
    until_s = time.monotonic() + timeout_s
    mine = new_nonce()
    sock.settimeout(timeout_s)
    sock.sendall(mine)
    theirs = receive_by(sock, NONCE_BYTES, until_s)
    sock.sendall(proof(secret, purpose, b"asks", mine, theirs))
    given = receive_by(sock, PROOF_BYTES, until_s)
    if not is_proof(given, proof(secret, purpose, b"answers", mine, theirs)):
        raise WrongSecret(WRONG_SECRET)
    sock.settimeout(None)


def check_of(sock: socket.socket, secret: bytes, *, purpose: bytes, timeout_s: float) -> None:
    """Do the other side's part, over a connection that this process accepted.

    Raises as `prove_to`; the caller closes the socket then.
    """
    until_s = time.monotonic() + timeout_s
    mine = new_nonce()
    sock.settimeout(timeout_s)
    theirs = receive_by(sock, NONCE_BYTES, until_s)
    sock.sendall(mine)
    given = receive_by(sock, PROOF_BYTES, until_s)
    if not is_proof(given, proof(secret, purpose, b"asks", theirs, mine)):
        raise WrongSecret(WRONG_SECRET)
    sock.sendall(proof(secret, purpose, b"answers", theirs, mine))
    sock.settimeout(None)


def receive_by(sock: socket.socket, count: int, until_s: float) -> bytes:
    """Read `count` bytes; a peer that sends one at a time gets no more time for it.

    until_s: of time.monotonic(). Raises JoinRefused if they have not come by then, OSError for a
    broken connection.
    """
    got = b""
    while len(got) < count:
        sock.settimeout(left_of(until_s))
        try:
            more = sock.recv(count - len(got))
        except TimeoutError:
            continue  # the time is over
        if not more:
            raise JoinRefused(f"the other side hung up before the proof; perhaps {WRONG_SECRET}")
        got += more
    return got


def left_of(until_s: float) -> float:
    """Return the seconds until then, by time.monotonic(). Raises JoinRefused if there are none."""
    left_s = until_s - time.monotonic()
    if left_s <= 0:
        raise JoinRefused("the other side did not prove the shared secret in time")
    return left_s


def _lack(secret: bytes) -> str:
    """Say what a secret lacks that is not strong."""
    return f"is shorter than {LEAST_BYTES} characters" if secret else "is missing"
