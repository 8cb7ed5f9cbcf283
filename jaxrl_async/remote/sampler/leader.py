"""One sampler over several processes, on the side of the one that leads.

    process 0     callers ──> Sampler ──round──┬──> own batch
                                               ├──> process 1, which follows (follower.py)
                                               └──> process 2 ...

All processes hold the same batch and dispatch the same programs in the same order. What the batch
does is a function of what it takes in before which block, and of what the device returned, which is
the same everywhere. So the leader decides what is taken in and when (requests, cancellations, new
weights: all that depends on time and threads), and sends it to the followers before it acts.

A program over all devices waits for every process. When one of them ends, the others are stuck in
the next program for ever: the end of a session with a follower ends this process.
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
LOST_EXIT = 1
"""Exit code of a process whose sampler has lost another of its processes."""

Lost = Callable[[str], None]
"""Called with the reason, on a session's thread, when the sampler has lost a process."""


def end_process(reason: str) -> None:
    """End this process at once: its programs wait for a process that is gone, and an orderly exit
    would wait for them."""
    log.error("the sampler ends, all processes of it: %s", reason)
    logging.shutdown()
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(LOST_EXIT)


def alike_hash(setup: SamplerSetup) -> str:
    """Return a hash of all that must be the same in every process of a sampler."""
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
    """Return a hash of what a batch's next decisions depend on: if it differs between two
    processes, they have parted."""
    slots = batch.slots
    last = np.maximum(slots.drawn - 1, 0)
    arrays = (slots.lengths, slots.drawn, slots.tokens[np.arange(len(last)), last])
    text = f"{batch.version} {len(batch.queue)} {batch.cache.pages.num_free} {[*batch.placed]}"
    value = zlib.crc32(text.encode())
    for array in arrays:
        value = zlib.crc32(np.ascontiguousarray(array).tobytes(), value)
    return value


class FollowerCrew:
    """The other processes of a sampler, as the leader sees them: sampler.intake.Followers.

    Any thread may use it; `play` belongs to the sampler's.
    """

    def __init__(
        self,
        sessions: Sequence[Session],
        *,
        lost: Lost = end_process,
        asked_to_leave: Callable[[str], None] = lambda reason: None,
    ) -> None:
        """Take charge of the followers at the other ends of these sessions.

        Args:
            sessions: one for each other process.
            lost: called when a session ends before the sampler does.
            asked_to_leave: called with the reason when a follower has been told to go (preemption).
        """
        self.sessions = tuple(sessions)
        self._lost = lost
        self._changed = threading.Condition()
        self._ready: dict[Session, Ready] = {}
        self._over = False
        for session in self.sessions:
            session.on(Ready, partial(self._note_ready, session))
            session.on(Leave, lambda leave: asked_to_leave(leave.reason))
            session.on_end(partial(self._session_ended, session))

    def wait_ready(self, setup: SamplerSetup, timeout_s: float) -> None:
        """Wait until every follower has built its engine. Raises JoinRefused if one differs from
        this setup or does not come in time, and Disconnected."""
        with self._changed:
            self._changed.wait_for(lambda: self._all_ready or self._over, timeout_s)
            if self._over:
                raise Disconnected("a process of the sampler was lost before it began")
            late = [s.peer for s in self.sessions if s not in self._ready]
        if late:
            raise JoinRefused(
                f"{', '.join(late)} did not build the sampler's engine within {timeout_s:.0f} s. "
                "Look at the logs of those processes."
            )
        own = alike_hash(setup)
        for session, ready in self._ready.items():
            if ready.alike != own:
                raise JoinRefused(
                    f"{session.peer} (process {ready.process}) has other settings, another model "
                    "or another mesh than this one: start all processes of a sampler with the same "
                    "arguments and the same version."
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
                    log.warning("the end could not be told: %s", error)
            for session in self.sessions:
                session.end("the sampler is closed")

    def fail(self, error: BaseException) -> None:
        """See Followers."""
        if self._begin_end():
            for session in self.sessions:
                session.end(f"the leading process has failed: {type(error).__name__}: {error}")

    # ---- its thread

    def begin(self, version: int) -> None:
        """Have the followers begin with weights of this version, which they have."""
        for session in self.sessions:
            session.send(Begin(version=version))

    def play(self, following: JointRound) -> None:
        """Have the followers play this round. Raises Disconnected."""
        for session in self.sessions:
            session.send(following)

    # ---- the sessions' threads

    @property
    def _all_ready(self) -> bool:
        return len(self._ready) == len(self.sessions)

    def _begin_end(self) -> bool:
        """Return whether this is the first end."""
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
    """Takes in what another receiver does, and tells the followers before it is acted on."""

    def __init__(self, receiver: TakesIn, crew: FollowerCrew) -> None:
        self._receiver, self._crew = receiver, crew
        self._arrived = 0  # requests so far
        self._stopped: list[LiveRequest] = []  # that commands took out in this round

    def take(self, batch: Batch, *, block: int, idle: bool, wants_weights: bool) -> Taken | NotYet:
        """See TakesIn. Saved KV is left out: each process would need its own part of it. Raises
        RolloutError in a replay, and Disconnected."""
        before = state_hash(batch)
        first, self._stopped = self._arrived, []
        taken = self._receiver.take(batch, block=block, idle=idle, wants_weights=wants_weights)
        if isinstance(taken, NotYet):
            raise RolloutError(
                "a sampler over several processes cannot follow a recorded schedule: replay the "
                "run with samplers of one process each."
            )
        for live in taken.incoming:
            live.number, self._arrived = self._arrived, self._arrived + 1
            if live.partial is not None:
                live.partial = replace(live.partial, kv=None, kv_version=None)
        cancelled = [*self._stopped, *(live_of(stage) for stage in taken.cancelled)]
        update = taken.update
        probe = None if update is None else update.probe_logprobs
        self._crew.play(
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
    setup: SamplerSetup, crew: FollowerCrew, first: VersionedParams, weights: WeightSource
) -> Sampler:
    """Return the sampler of the process that leads, once all processes have these first weights.

    Args:
        setup: whose settings have the crew as followers.
        crew: `wait_ready` has returned.
        first: weights to begin with; each follower's source gives the same version.
        weights: where new ones come from, in all processes: JointWeights.
    """
    if setup.settings.followers is not crew:
        raise Closed("leading_sampler: make the setup with SamplerSettings(followers=crew).")
    crew.begin(first.version)
    sampler = Sampler.from_setup(setup, setup.engine.prepare(first.params), first.version, weights)
    weights.live(first.version)
    return sampler
