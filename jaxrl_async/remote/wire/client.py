"""The sampler's side of a connection: finds the trainer, proves the secret, and asks to join."""

import logging
import queue
import random
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

from jaxrl_async.errors import Disconnected, JoinRefused, WrongSecret
from jaxrl_async.remote.wire.address import JoinAddress, locate_trainer
from jaxrl_async.remote.wire.grpc_link import OPTIONS, PATH, describe_error, grpc, pump_frames
from jaxrl_async.remote.wire.handshake import HELLO, ask_to_join
from jaxrl_async.remote.wire.messages import Hello, Welcome
from jaxrl_async.remote.wire.secret import check_dialled
from jaxrl_async.remote.wire.session import WireLimits, WireSession
from jaxrl_async.remote.wire.tls import TlsFiles

log = logging.getLogger(__name__)

FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.1, 3.0
"""Pauses between two attempts grow from the first to the longest, seconds."""
REREAD_S = 10.0
"""Maximum time to look a secret up again after the trainer has refused it, seconds. A restarted
trainer listens shortly before it writes its new secret."""


def dial(
    where: str,
    hello: Hello,
    *,
    secret: bytes,
    tls: TlsFiles | None,
    limits: WireLimits,
    timeout_s: float,
    stopped: Callable[[], bool] = lambda: False,
) -> tuple[WireSession, Welcome]:
    """Join a trainer; retry until it answers.

    Args:
        where: see address.locate_trainer; looked up before each attempt.
        secret: see secret.read_secret; empty: the secret that the trainer generated for this start,
            if it did (address.JoinAddress). The session's `secret` was proved by both sides.
        tls: None: not encrypted.
        timeout_s: maximum time for all attempts.
        stopped: called between two attempts; True ends them.

    Raises:
        JoinRefused: the trainer refuses, with its reason. A retry would not help.
        Disconnected: no trainer answered in time, or `stopped` returned True.
        ConfigError: `where` cannot be an address, or is on another machine and no secret is set.
    """
    until_s, pause_s = time.monotonic() + timeout_s, FIRST_PAUSE_S
    logged, refused_s = "", None
    while True:
        from_file = b""
        try:
            trainer = locate_trainer(where)
            from_file = b"" if secret else trainer.secret
            known = secret or from_file
            check_dialled(known, str(trainer.address), loopback=trainer.address.is_loopback)
            left_s = max(until_s - time.monotonic(), 0.1)
            return _JoinAttempt(trainer, hello, tls, limits).join(known, left_s)
        except (Disconnected, WrongSecret) as error:
            if isinstance(error, WrongSecret):
                refused_s = refused_s or time.monotonic()
                if not from_file or time.monotonic() - refused_s > REREAD_S:
                    raise
            else:
                refused_s = None
            if stopped():
                raise Disconnected("asked to stop before a trainer answered") from error
            if time.monotonic() + pause_s > until_s:
                raise Disconnected(
                    f"no trainer let this sampler join within {timeout_s:g} s at {where}; the last "
                    f"try: {error}. Check that it runs, that the address is right, and that this "
                    "machine can reach it over the network."
                ) from error
            if str(error) != logged:
                logged = str(error)
                log.info("no trainer at %s yet (%s); retrying", where, logged)
        time.sleep(pause_s * random.uniform(0.7, 1.0))  # samplers of one run come apart
        pause_s = min(pause_s * 1.6, LONGEST_PAUSE_S)


class _JoinAttempt:
    """One attempt."""

    def __init__(
        self, trainer: JoinAddress, hello: Hello, tls: TlsFiles | None, limits: WireLimits
    ) -> None:
        self._trainer, self._hello, self._limits = trainer, hello, limits
        target = str(trainer.address)
        if tls is None:
            self._channel = grpc.insecure_channel(target, options=OPTIONS)
        else:
            credentials = grpc.ssl_channel_credentials(tls.authority, tls.key, tls.certificate)
            self._channel = grpc.secure_channel(target, credentials, options=OPTIONS)
        self._outgoing: queue.SimpleQueue[bytes | Iterator[bytes]] = queue.SimpleQueue()
        self._incoming: Any = self._channel.stream_stream(PATH)(self._requests())

    def join(self, secret: bytes, timeout_s: float) -> tuple[WireSession, Welcome]:
        """Perform the handshake and start the session. Raises JoinRefused, Disconnected."""
        try:
            welcome = self._handshake(secret, timeout_s)
            if self._trainer.run not in (None, welcome.run):
                raise Disconnected(
                    f"{self._trainer.address} belongs to the run {welcome.run!r} now, not to "
                    f"{self._trainer.run!r}"
                )
        except BaseException:
            self._outgoing.put(iter(()))
            self._channel.close()
            # gRPC's call takes a lock when it is deleted. A thread that the interpreter froze at
            # exit may hold this lock forever, so the call is deleted here, not with the error's
            # traceback.
            self._incoming = None
            raise
        session = WireSession("trainer", self._limits, close_stream=self._cancel, secret=secret)
        session.start()
        self._outgoing.put(session.frames())
        threading.Thread(
            target=self._read, args=(session,), name="read trainer", daemon=True
        ).start()
        return session, welcome

    def _handshake(self, secret: bytes, timeout_s: float) -> Welcome:
        timer = self._cancel_after(min(timeout_s, self._limits.join_s))
        steps = ask_to_join(secret, self._hello)
        frame = next(steps)
        try:
            while True:
                self._outgoing.put(frame)
                if frame.startswith(HELLO):  # the trainer is alive, and may be busy
                    timer.cancel()
                    timer = self._cancel_after(timeout_s)
                answer = next(self._incoming, None)
                if answer is None:
                    raise Disconnected(f"{self._trainer.address} hung up")
                frame = steps.send(answer)
        except StopIteration as done:
            return done.value
        except ValueError as error:
            raise JoinRefused(
                f"{self._trainer.address} is not a compatible trainer: {error}"
            ) from None
        except grpc.RpcError as error:
            failure = self._failure(error)
            error.__traceback__ = None  # its frames would keep the call, see join
        finally:
            timer.cancel()
        raise failure  # here: an error's context would keep gRPC's, which is the call itself

    def _cancel(self) -> None:
        if (incoming := self._incoming) is not None:
            incoming.cancel()

    def _cancel_after(self, timeout_s: float) -> threading.Timer:
        timer = threading.Timer(timeout_s, self._cancel)
        timer.daemon = True
        timer.start()
        return timer

    def _failure(self, error: grpc.RpcError) -> Exception:
        """Turn a gRPC error into Disconnected if a retry may help, else into JoinRefused."""
        text = describe_error(error)
        code = error.code() if isinstance(error, grpc.Call) else None
        if code == grpc.StatusCode.CANCELLED:  # by this side, which waited long enough
            return Disconnected(
                f"{self._trainer.address} gave no answer in time; another program may listen there"
            )
        if code == grpc.StatusCode.UNIMPLEMENTED:
            return JoinRefused(f"{self._trainer.address} is not a trainer of jaxrl_async: {text}")
        if "CERTIFICATE_VERIFY_FAILED" in text:
            return JoinRefused(
                f"the certificate of {self._trainer.address} does not match remote.tls_authority, "
                f"or does not contain this name: {text}"
            )
        return Disconnected(text)

    def _requests(self) -> Iterator[bytes]:
        """Yield the frames of the handshake, then the frames of the session."""
        while isinstance(frame := self._outgoing.get(), bytes):
            yield frame
        yield from frame

    def _read(self, session: WireSession) -> None:
        pump_frames(self._incoming, session)
        self._channel.close()
