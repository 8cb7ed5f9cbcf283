"""Rendezvous of the processes of one sampler: the first listens and broadcasts its address through
JAX; the others dial it.

    process 0   FollowerHub ──address, secret──> broadcast_text (collective) ──> processes 1, 2, ...
                     ^                                                                  │
                     └───────────────────────── dial_leader ────────────────────────────┘

A new secret is generated for each rendezvous; only the processes of the JAX world know it.
"""

import secrets
import threading
from dataclasses import dataclass, field

import numpy as np
from jax.experimental import multihost_utils

from jaxrl_async.errors import ConfigError, JoinRefused
from jaxrl_async.remote.wire.client import dial
from jaxrl_async.remote.wire.listener import Hub
from jaxrl_async.remote.wire.messages import Hello, Welcome
from jaxrl_async.remote.wire.secret import SECRET_VARIABLE
from jaxrl_async.remote.wire.session import WireLimits, WireSession
from jaxrl_async.remote.wire.session_port import Session

TEXT_BYTES = 2048
"""Maximum length of a broadcast text, bytes."""


def broadcast_text(text: str, *, leads: bool) -> str:
    """Return the leading process's text, in every process of this JAX world; all must call this.
    Raises ConfigError for a text longer than TEXT_BYTES.

    Args:
        text: "" in the others.
        leads: True in the leading process.
    """
    content = text.encode()
    if len(content) > TEXT_BYTES:
        raise ConfigError(
            f"an address and a secret of {len(content)} bytes together are longer than "
            f"{TEXT_BYTES}: give {SECRET_VARIABLE} a shorter value, such as 64 digits"
        )
    padded = np.zeros(TEXT_BYTES, np.uint8)
    padded[: len(content)] = np.frombuffer(content, np.uint8)
    received = multihost_utils.broadcast_one_to_all(padded, is_source=leads)
    return bytes(np.asarray(received, np.uint8)).rstrip(b"\0").decode()


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaderAddress:
    """Address of the leading process, and the secret that proves that a process belongs to its
    sampler."""

    address: str  # HOST:PORT
    secret: str = field(repr=False)
    shared: bytes = field(default=b"", repr=False)  # secret shared with the run's trainer

    @classmethod
    def broadcast(
        cls, hub: "FollowerHub | None", host: str = "", *, leads: bool, shared: bytes = b""
    ) -> "LeaderAddress | None":
        """Broadcast the address to all processes of this JAX world; all must call this. Returns
        None if the leading process has no hub, because the sampler does not start (again).

        Args:
            hub: of the leading process; None in the others.
            host: name or address of the leading process for the others.
            leads: True in the leading process.
            shared: the leading process's shared secret with the run's trainer.
        """
        text = "" if hub is None else f"{hub.secret} {host} {hub.port} {shared.decode()}"
        received = broadcast_text(text, leads=leads)
        if not received:
            return None
        secret, host, port, trainer_secret = received.split(" ", 3)
        address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        return cls(address=address, secret=secret, shared=trainer_secret.encode())


class FollowerHub:
    """Listener of a sampler's leading process, which waits for the others."""

    def __init__(
        self, num_processes: int, welcome: Welcome, *, limits: WireLimits, listen: str = "0.0.0.0:0"
    ) -> None:
        """Start listening. Raises ConfigError if the address cannot be listened on.

        Args:
            num_processes: of the sampler, including this one.
            welcome: the trainer's Welcome, which each follower gets.
            limits: of the sessions.
            listen: HOST:PORT; port 0 takes a free one.
        """
        self._num_processes, self._welcome = num_processes, welcome
        self._changed = threading.Condition()
        self._sessions: dict[int, Session] = {}
        self.secret = secrets.token_hex(32)
        self._hub = Hub(
            listen, secret=self.secret.encode(), tls=None, limits=limits, on_join=self._join
        )

    @property
    def port(self) -> int:
        """Port on which it listens."""
        return self._hub.address.port

    def wait_for_all(self, timeout_s: float) -> list[Session]:
        """Return the sessions with processes 1, 2, ... Raises JoinRefused if one does not join."""
        with self._changed:
            processes = range(1, self._num_processes)
            self._changed.wait_for(lambda: len(self._sessions) == len(processes), timeout_s)
            missing = [n for n in processes if n not in self._sessions]
            if missing:
                raise JoinRefused(
                    f"processes {missing} of the sampler did not join within {timeout_s:.0f} s. "
                    "Check their logs, and that this host's ports are open to the other hosts."
                )
            return [self._sessions[n] for n in processes]

    def close(self) -> None:
        """Stop listening, and end the sessions. Idempotent."""
        self._hub.close("the sampler is closed")

    def _join(self, session: WireSession, hello: Hello) -> Welcome:
        with self._changed:
            if not 0 < hello.process < self._num_processes:
                raise JoinRefused(
                    f"process {hello.process} is not one of this sampler's {self._num_processes}"
                )
            if hello.process in self._sessions:
                raise JoinRefused(f"process {hello.process} has already joined")
            self._sessions[hello.process] = session
            self._changed.notify_all()
        return self._welcome


def dial_leader(
    leader: LeaderAddress, process: int, *, limits: WireLimits, timeout_s: float
) -> tuple[Session, Welcome]:
    """Join the leading process as this process; return the session and the trainer's Welcome.
    Raises JoinRefused and Disconnected."""
    hello = Hello(name=f"process {process}", process=process)
    return dial(
        leader.address,
        hello,
        secret=leader.secret.encode(),
        tls=None,
        limits=limits,
        timeout_s=timeout_s,
    )
