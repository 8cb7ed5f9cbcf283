"""One sampler on several processes: the leading process.

    process 0     callers ──> Sampler ──round──┬──> own batch
                                               ├──> process 1, which follows (follower.py)
                                               └──> process 2 ...

All processes hold the same batch and dispatch the same programs in the same order. The batch
depends only on its inputs, the block before which each is applied, and the device results, which
are equal everywhere. So the leader decides on all inputs that depend on time and threads (requests,
cancellations, new weights), and sends them to the followers before it applies them.

A program over all devices waits for every process. When one of them ends, the others hang in the
next program. The end of a session with a follower therefore ends this process.
"""

import hashlib
import logging
import os
import sys
import threading
import zlib
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import numpy as np

from jaxrl_async.errors import Closed, Disconnected, JoinRefused, RolloutError
from jaxrl_async.ports.run import NotYet
from jaxrl_async.ports.weights import WeightSource
from jaxrl_async.remote.wire.messages import Begin, Dismissed, JointRound, Leave, Ready
from jaxrl_async.remote.wire.session_port import Session
from jaxrl_async.sampler.batch.batch import Batch
from jaxrl_async.sampler.batch.sequence import LiveRequest, live_of
from jaxrl_async.sampler.intake import Taken, TakesIn
from jaxrl_async.sampler.sampler import Sampler
from jaxrl_async.sampler.setup import SamplerSetup
from jaxrl_async.types import VersionedParams

log = logging.getLogger(__name__)

NO_IDS = np.zeros(0, np.int32)
LOST_CODE = 1
"""Exit code of a process whose sampler has lost another process."""

Lost = Callable[[str], None]
"""Called with the reason, on a session's thread, when the sampler has lost a process."""


def end_process(reason: str) -> None:
    """End this process immediately: its programs wait for a lost process, and a regular exit would
    wait for the programs."""
    log.error("the sampler ends with all its processes: %s", reason)
    logging.shutdown()
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(LOST_CODE)


def setup_hash(setup: SamplerSetup) -> str:
    """Return a hash of everything that must be equal in all processes of a sampler."""
    settings, spec = setup.settings, setup.engine.spec
    mesh = spec.mesh
    assert mesh is not None, "a sampler of several processes has a mesh"
    probe, devices = settings.probe, list(mesh.devices.flat)
    ids = np.array([d.id for d in devices])
    parts = (
        replace(spec, mesh=None),
        mesh.shape,
        [(d.process_index, int(order)) for d, order in zip(devices, ids.argsort(), strict=True)],
        setup.section.model_dump_json(),
        setup.seed,
        setup.plan,
        None if probe is None else (probe.token_ids.tolist(), replace(probe, token_ids=NO_IDS)),
    )
    return hashlib.blake2b(repr(parts).encode(), digest_size=16).hexdigest()


def state_hash(batch: Batch) -> int:
    """Return a hash of the state that determines a batch's next decisions. If it differs between
    two processes, they have diverged."""
    slots = batch.slots
    last = np.maximum(slots.num_sampled - 1, 0)
    arrays = (slots.lengths, slots.num_sampled, slots.tokens[np.arange(len(last)), last])
    text = f"{batch.version} {len(batch.queue)} {batch.cache.pages.num_free} {[*batch.admitted]}"
    value = zlib.crc32(text.encode())
    for array in arrays:
        value = zlib.crc32(np.ascontiguousarray(array).tobytes(), value)
    return value


class FollowerGroup:
    """The other processes of a sampler, from the leader's side (sampler.intake.Followers).

    Thread-safe, except that only the sampler's thread calls `send_round`.
    """

    def __init__(
        self,
        sessions: Sequence[Session],
        *,
        lost: Lost = end_process,
        on_leave: Callable[[str], None] = lambda reason: None,
    ) -> None:
        """Control the followers at the other ends of these sessions.

        Args:
            sessions: one for each other process.
            lost: called when a session ends before the sampler does.
            on_leave: called with the reason when a follower must leave (preemption).
        """
        self.sessions = tuple(sessions)
        self._lost = lost
        self._changed = threading.Condition()
        self._ready: dict[Session, Ready] = {}
        self._over = False
        for session in self.sessions:
            session.on(Ready, partial(self._note_ready, session))
            session.on(Leave, lambda leave: on_leave(leave.reason))
            session.on_end(partial(self._session_ended, session))

    def wait_ready(self, setup: SamplerSetup, timeout_s: float) -> None:
        """Wait until every follower has built its engine. Raises JoinRefused if one differs from
        this setup or is not ready in time, and Disconnected."""
        with self._changed:
            expected = len(self.sessions)
            self._changed.wait_for(lambda: len(self._ready) == expected or self._over, timeout_s)
            if self._over:
                raise Disconnected("a process of the sampler was lost before it began")
            late = [s.peer for s in self.sessions if s not in self._ready]
        if late:
            raise JoinRefused(
                f"{', '.join(late)} did not build the sampler's engine within {timeout_s:.0f} s. "
                "Check the logs of these processes."
            )
        own = setup_hash(setup)
        for session, ready in self._ready.items():
            if ready.alike != own:
                raise JoinRefused(
                    f"{session.peer} (process {ready.process}) has different settings, a different "
                    "model or a different mesh than this one: start all processes of a sampler "
                    "with the same arguments and the same version."
                )

    # ---- sampler.intake.Followers

    def led(self, receiver: TakesIn) -> TakesIn:
        """See Followers."""
        return LeadingReceiver(receiver, self)

    def dismiss(self) -> None:
        """See Followers."""
        if self._begin_end():
            for session in self.sessions:
                try:
                    session.send(Dismissed())
                except Disconnected as error:
                    log.warning("could not send the end to a follower: %s", error)
            for session in self.sessions:
                session.end("the sampler is closed")

    def fail(self, error: BaseException) -> None:
        """See Followers."""
        if self._begin_end():
            for session in self.sessions:
                session.end(f"the leading process has failed: {type(error).__name__}: {error}")

    # ---- its thread

    def begin(self, version: int) -> None:
        """Make the followers begin with weights of this version, which they hold."""
        for session in self.sessions:
            session.send(Begin(version=version))

    def send_round(self, message: JointRound) -> None:
        """Make the followers run this round. Raises Disconnected."""
        for session in self.sessions:
            session.send(message)

    # ---- the sessions' threads

    def _begin_end(self) -> bool:
        """Mark the end; return True on the first call."""
        with self._changed:
            first, self._over = not self._over, True
            self._changed.notify_all()
        return first

    def _note_ready(self, session: Session, ready: Ready) -> None:
        with self._changed:
            self._ready[session] = ready
            self._changed.notify_all()

    def _session_ended(self, session: Session, reason: str) -> None:
        if self._begin_end():
            self._lost(f"lost {session.peer}: {reason}")


class LeadingReceiver:
    """Wraps another receiver, and sends its inputs to the followers before they are applied."""

    def __init__(self, receiver: TakesIn, followers: FollowerGroup) -> None:
        self._receiver, self._followers = receiver, followers
        self._arrived = 0  # requests so far
        self._stopped: list[LiveRequest] = []  # removed by commands in this round

    def take(self, batch: Batch, *, block: int, idle: bool, wants_weights: bool) -> Taken | NotYet:
        """See TakesIn. Saved KV is dropped: each process would need its own part of it. Raises
        RolloutError in a replay, and Disconnected."""
        before = state_hash(batch)
        first, self._stopped = self._arrived, []
        taken = self._receiver.take(batch, block=block, idle=idle, wants_weights=wants_weights)
        if isinstance(taken, NotYet):
            raise RolloutError(
                "a sampler on several processes cannot follow a recorded schedule: replay the "
                "run with samplers of one process each."
            )
        for live in taken.incoming:
            live.number, self._arrived = self._arrived, self._arrived + 1
            if live.partial is not None:
                live.partial = replace(live.partial, kv=None, kv_version=None)
        cancelled = [*self._stopped, *(live_of(stage) for stage in taken.cancelled)]
        update = taken.update
        probe = None if update is None else update.probe_logprobs
        self._followers.send_round(
            JointRound(
                requests=tuple(live.partial or live.request for live in taken.incoming),
                first_number=first,
                cancelled=tuple(live.number for live in cancelled),
                version=None if update is None else update.version,
                probe_logprobs=None if probe is None else np.asarray(probe),
                state_hash=before,
            )
        )
        return taken

    def stopped(self, live: LiveRequest) -> None:
        """See TakesIn."""
        self._stopped.append(live)


def leading_sampler(
    setup: SamplerSetup, followers: FollowerGroup, first: VersionedParams, weights: WeightSource
) -> Sampler:
    """Return the sampler of the leading process, once all processes have these first weights.

    Args:
        setup: its settings have these followers.
        followers: `wait_ready` has returned.
        first: initial weights; each follower's source provides the same version.
        weights: source of new weights in all processes: JointWeights.
    """
    if setup.settings.followers is not followers:
        raise Closed("leading_sampler: create the setup with SamplerSettings(followers=...).")
    followers.begin(first.version)
    sampler = Sampler.from_setup(setup, setup.engine.prepare(first.params), first.version, weights)
    weights.live(first.version)
    return sampler
