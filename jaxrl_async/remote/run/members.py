"""The trainer's side of samplers in separate processes: admits them and gives them their
configuration.

    Hello ──checked──> Welcome ──> an end of the weight channel ──entered──> a router replica
      ^                                   │                                      │
      └── refused, with the reason        └── the session ends: the end leaves ──┴─ it is removed

The hub listens for the whole run; its address is in the run's folder.
"""

import dataclasses
import logging
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from jaxrl_async.codec import Bytes
from jaxrl_async.config.schema import AxesSection, Config
from jaxrl_async.errors import Disconnected, JoinRefused, RolloutError
from jaxrl_async.metrics.trace_file import SUFFIXES, sampler_process
from jaxrl_async.model.spec import ModelSpec
from jaxrl_async.profiling import MOST_SAMPLERS, keep_trace
from jaxrl_async.remote.sampler.remote_replica import RemoteReplica
from jaxrl_async.remote.weights.outbox import WeightOutbox
from jaxrl_async.remote.weights.remote_link import RemoteEnd
from jaxrl_async.remote.wire.address import (
    Address,
    advertised_address,
    share_secret_by_port,
    write_join_file,
)
from jaxrl_async.remote.wire.listener import Hub
from jaxrl_async.remote.wire.messages import Hello, Leave, Prepared, Profile, Profiled, Welcome
from jaxrl_async.remote.wire.session import WireLimits, WireSession
from jaxrl_async.remote.wire.tls import TlsFiles
from jaxrl_async.run.signals import Stop
from jaxrl_async.sampler.request_checks import RequestCheck
from jaxrl_async.sampler.router.router import Router
from jaxrl_async.types import IntArray
from jaxrl_async.weights.channel import WeightChannel

log = logging.getLogger(__name__)

LEAVE_S = 5.0
"""Maximum wait for all samplers to leave when the run ends, seconds."""
PATIENCE = 0.5
"""Fraction of remote.silence_s after which a silent sampler loses its name to another one that
requests it. A live sampler sends at least two messages in that time."""
LEAST_CLOSE_S = 1.0
"""Minimum part of LEAVE_S reserved for closing the connections, seconds."""
RUN_ENDED = "the run has ended"
"""Reason that samplers get when the run ends."""
POLL_S = 0.1
"""Interval at which a run that waits for its first samplers checks for a stop, seconds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Invitation:
    """Configuration for every sampler of a run; it is also checked against the sampler's slice."""

    config: Config
    spec: ModelSpec
    capacity: int  # requests that a sampler holds at the same time
    probe_ids: IntArray | None = None  # tokens to check new weights on; None: any
    tokenizer: Bytes | None = None  # as in Welcome

    def welcome(self, hello: Hello) -> Welcome:
        """Return the Welcome for a sampler. Raises JoinRefused."""
        axes = dict(hello.mesh) or self.config.mesh.sampler.model_dump()
        try:
            shape = AxesSection(**axes)
        except ValueError as error:
            raise JoinRefused(f"--mesh of {hello.name} is invalid for a sampler: {error}") from None
        if shape.context > 1:
            raise JoinRefused(
                f"--mesh of {hello.name} has context={shape.context}: a sampler decodes one token "
                "of each sequence at a time and cannot shard the length. Use tensor."
            )
        return Welcome(
            config=self.config.model_dump(mode="json"),
            spec=dataclasses.asdict(self.spec),
            mesh=shape.model_dump(),
            seed=self.config.run.seed,
            run=self.config.run.name,
            probe_ids=self.probe_ids,
            tokenizer=self.tokenizer,
        )


class Members:
    """The samplers that have joined a run. Thread-safe.

    Attributes:
        address: address at which samplers join.
    """

    def __init__(
        self,
        invitation: Invitation,
        channel: WeightChannel,
        outbox: WeightOutbox,
        router: Router,
        check: RequestCheck,
        *,
        secret: bytes,
        tls: TlsFiles | None,
        count: Callable[[str, int], None],
        own_secret: bytes = b"",
    ) -> None:
        """Listen for samplers.

        Args:
            invitation: configuration for the samplers.
            channel: includes them in the live version.
            outbox: sends them the weights.
            router: sends them the requests.
            check: of the requests.
            secret: they must prove it; empty: none.
            tls: files for encrypted connections; None: they are not encrypted.
            count: called with the name of each fault and its number of occurrences.
            own_secret: the secret, if the run generated it for manually started samplers.
                They find it in the run's folder or, for this user, by the port until `close`.

        Raises ConfigError if remote.listen cannot be listened on, or needs a secret.
        """
        self._invitation, self._channel, self._router = invitation, channel, router
        self._outbox = outbox
        self._check, self._count = check, count
        self._changed = threading.Condition()
        self._joined: dict[str, tuple[WireSession, Hello]] = {}  # by name
        self._generating: set[str] = set()  # names of those that have entered
        self._closing = False
        self._profiled: dict[str, set[int]] = {}  # steps for which each still has to send a trace
        self._folder: Path | None = None  # the run's
        self._own_secret, self._secret_files = own_secret, ExitStack()
        remote = invitation.config.remote_settings
        self._name_kept_s = remote.silence_s * PATIENCE
        self._hub = Hub(
            remote.listen,
            secret=secret,
            tls=tls,
            limits=WireLimits.of(remote),
            on_join=self._join,
            on_bound=lambda bound: self._secret_files.enter_context(
                share_secret_by_port(bound, own_secret)
            ),
        )
        self.address = advertised_address(self._hub.address, remote.advertise)

    @property
    def local_address(self) -> Address:
        """The address for processes of this machine."""
        return self._hub.address

    def announce(self, folder: Path) -> None:
        """Write the address, and the secret if the run generated it, into the run's folder; log the
        address."""
        self._folder = folder
        write_join_file(folder, self.address, self._invitation.config.run.name, self._own_secret)
        log.info("samplers join at %s", self.address)

    def wait_for_least(self, stop: Stop, started: Callable[[], int] = lambda: 0) -> None:
        """Wait until enough samplers are generating to begin the run, or a stop is requested.

        Args:
            stop: ends the wait.
            started: supervises the processes that the run starts itself, which must all have
                joined. Returns their number, and raises RolloutError if they fail.

        Raises RolloutError if fewer than remote.min_samplers have joined after remote.wait_s.
        """
        remote = self._invitation.config.remote_settings
        end, warned = time.monotonic() + remote.wait_s, False
        while not stop.is_set():
            least = max(remote.min_samplers, started())
            with self._changed:
                entered = len(self._generating)
                if entered >= least:
                    return
                self._changed.wait(POLL_S)
            if not warned:
                warned = True
                log.warning("waiting for %d samplers at %s", least - entered, self.address)
            if time.monotonic() > end:
                raise RolloutError(
                    f"{entered} samplers are generating after remote.wait_s ({remote.wait_s:g} s), "
                    f"but the run needs {least} (remote.min_samplers). Restart the run, and while "
                    "it waits start samplers with `python -m jaxrl_async.sample --join HOST:PORT` "
                    f"(here it was {self.address}), or check their output."
                )

    def profile(self, step: int, *, on: bool) -> None:
        """Ask the first MOST_SAMPLERS samplers to start the trace of a step, or to end and send it.
        A sampler whose connection is full is skipped: the trainer does not wait for it."""
        with self._changed:
            generating = sorted(self._generating)
            if on:
                names = generating[:MOST_SAMPLERS]
                for name in names:
                    self._profiled.setdefault(name, set()).add(step)
            else:
                names = [n for n in generating if step in self._profiled.get(n, ())]
            sessions = [self._joined[name][0] for name in names]
        if on and len(generating) > len(names):
            log.info("profile: step %d of %d samplers of %d", step, len(names), len(generating))
        for name, session in zip(names, sessions, strict=True):
            try:
                if session.send_now(Profile(step=step, on=on)):
                    continue
                why = "its connection is full"
            except Disconnected as error:
                why = str(error)
            log.warning("profile: step %d of %s is not traced: %s", step, name, why)
            with self._changed:
                self._profiled[name].discard(step)

    def begin_close(self) -> None:
        """Admit no more samplers; from now on, leaving samplers cause no warnings. Idempotent."""
        with self._changed:
            self._closing = True

    def close(self) -> None:
        """Tell all samplers that the run has ended, and stop listening. Idempotent."""
        with self._changed:
            self._closing = True
            sessions = [session for session, _ in self._joined.values()]
        end_s = time.monotonic() + LEAVE_S
        for session in sessions:  # one that does not respond must not delay the others
            threading.Thread(
                target=_ask_to_leave, args=(session,), name="ask to leave", daemon=True
            ).start()
        with self._changed:
            self._changed.wait_for(lambda: not self._joined, LEAVE_S)
        self._secret_files.close()
        self._hub.close(RUN_ENDED, max(LEAST_CLOSE_S, end_s - time.monotonic()))

    def _join(self, session: WireSession, hello: Hello) -> Welcome:
        """Admit a sampler that has proved the secret. Raises JoinRefused."""
        welcome = self._invitation.welcome(hello)
        earlier = self._take_name(session, hello)
        if earlier is not None:
            earlier.lost(f"another {hello.name} has joined in its place")
        session.on_end(lambda reason: self._on_end(hello.name, session, reason))
        replica = RemoteReplica(
            session,
            self._check,
            capacity=self._invitation.capacity,
            newest=lambda: self._channel.published_version,
            count=self._count,
        )
        session.on(Prepared, lambda prepared: self._admit(session, hello, prepared, replica))
        session.on(Profiled, lambda profiled: self._take_trace(hello.name, profiled))
        log.info("%s joins (process %d on %s)", hello.name, hello.process, hello.host or "?")
        return welcome

    def _take_name(self, session: WireSession, hello: Hello) -> WireSession | None:
        """Assign a sampler its name; return the session that held it before, which must end.

        A sampler keeps its name while it sends messages. A second sampler with the name is then
        refused, so two live samplers cannot evict each other. The same sampler, after its
        connection broke, does not wait. Raises JoinRefused.
        """
        unresponsive: WireSession | None = None
        while True:
            with self._changed:
                if self._closing:
                    raise JoinRefused("the run is about to end")
                earlier, other = self._joined.get(hello.name, (None, hello))
                rejoins = bool(hello.instance) and other.instance == hello.instance
                if earlier is None or earlier is unresponsive or rejoins:
                    self._joined[hello.name] = session, hello
                    self._generating.discard(hello.name)  # until it has weights again
                    return earlier
            if earlier.wait_for_frame(self._name_kept_s):
                raise JoinRefused(
                    f"a sampler named {hello.name!r} has already joined: give each a different "
                    "--name."
                )
            unresponsive = earlier

    def _admit(
        self, session: WireSession, hello: Hello, prepared: Prepared, replica: RemoteReplica
    ) -> None:
        """Offer the weights to a sampler that is ready for them."""
        end = RemoteEnd(
            session,
            prepared.data_address,
            self._channel.exchange,
            self._outbox,
            on_entered=lambda: self._add_replica(session, hello, replica),
        )
        replica.track_version(lambda: end.live_version)

    def _take_trace(self, name: str, profiled: Profiled) -> None:
        """Write a trace that was requested from a sampler. Raises RolloutError for any other
        trace."""
        with self._changed:
            steps = self._profiled.get(name, set())
            if profiled.step not in steps:
                raise RolloutError(f"it sent an unrequested trace of step {profiled.step}")
            steps.discard(profiled.step)
        if profiled.error:
            log.warning(
                "profile: step %d of %s has no trace: %s", profiled.step, name, profiled.error
            )
            return
        files = {suffix: profiled.files.get(suffix) for suffix in SUFFIXES}
        if any(getattr(data, "dtype", None) != np.uint8 for data in files.values()):
            raise RolloutError(f"its trace of step {profiled.step} is not a pair of files")
        whole = {suffix: np.asarray(data).tobytes() for suffix, data in files.items()}
        if self._folder is not None:
            keep_trace(self._folder, profiled.step, sampler_process(name), whole)

    def _add_replica(self, session: WireSession, hello: Hello, replica: RemoteReplica) -> None:
        number = self._router.join(replica)
        log.info("%s is generating as replica %d", hello.name, number)
        with self._changed:
            if self._holds_name(hello.name, session):
                self._generating.add(hello.name)
            self._changed.notify_all()

    def _holds_name(self, name: str, session: WireSession) -> bool:
        """Return True if this session still holds the sampler's name."""
        return name in self._joined and self._joined[name][0] is session

    def _on_end(self, name: str, session: WireSession, reason: str) -> None:
        with self._changed:
            if self._holds_name(name, session):
                del self._joined[name]
                self._generating.discard(name)
            self._changed.notify_all()
        log.log(logging.INFO if self._closing else logging.WARNING, "%s is gone: %s", name, reason)


def _ask_to_leave(session: WireSession) -> None:
    """Ask a sampler to leave, unless its session has ended. Blocks while it receives nothing."""
    if session.ended is None:
        try:
            session.send(Leave(reason=RUN_ENDED))
        except ConnectionError as error:
            log.debug("%s: %s", session.peer, error)
