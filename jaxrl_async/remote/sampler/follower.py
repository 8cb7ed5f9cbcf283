"""One sampler on several processes: the processes that follow the first (leader.py).

    leader ──Begin, rounds ...──> queue ──> DecodeLoop: the same batch, the same programs

A follower has no callers: the leader answers the requests. It fetches the part of each version of
the weights that its own devices need, and swaps to it when the leader orders it.
"""

import logging
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import replace

from jaxrl_async.errors import Disconnected, RolloutError, WeightsError
from jaxrl_async.ports.weights import WeightSource
from jaxrl_async.remote.sampler.joint_weights import forget_version
from jaxrl_async.remote.sampler.leader import Lost, end_process, setup_hash, state_hash
from jaxrl_async.remote.wire.messages import (
    Begin,
    Dismissed,
    GivenUpRequest,
    JointRound,
    Leave,
    Ready,
)
from jaxrl_async.remote.wire.session_port import Session
from jaxrl_async.sampler.batch.batch import Batch
from jaxrl_async.sampler.batch.finish import give_up
from jaxrl_async.sampler.batch.sequence import LiveRequest, live_of
from jaxrl_async.sampler.decode_loop import DecodeLoop
from jaxrl_async.sampler.intake import Taken
from jaxrl_async.sampler.lifetime import Lifetime
from jaxrl_async.sampler.requests import Waiter, live_request
from jaxrl_async.sampler.setup import SamplerSetup
from jaxrl_async.types import Partial, Request, VersionedParams

log = logging.getLogger(__name__)

POLL_S = 0.5
"""Interval at which an idle follower checks whether its session has ended or it must leave,
seconds."""


def follow(
    session: Session,
    setup: SamplerSetup,
    weights: WeightSource,
    *,
    process: int,
    lost: Lost = end_process,
    must_leave: threading.Event | None = None,
    begun: Callable[[], None] = lambda: None,
) -> None:
    """Follow the leading process of this sampler until the sampler is closed; blocks.

    If this raises, the caller must end the process immediately (run.distributed.leave): the
    programs of all processes wait for one another.

    Args:
        session: with the leader.
        setup: equal to the leader's in everything but the followers.
        weights: provides this process's part of each version that the leader announces.
        process: number of this process in the sampler's JAX world.
        lost: called with the reason, on the session's thread, when the leader is lost.
        must_leave: set when this process must end soon (preemption). The leader is then asked to
            leave, and followed until it has left.
        begun: called when the sampler has its first weights.

    Raises Disconnected, WeightsError if the source does not have the leader's first version, and
    RolloutError if the processes have diverged.
    """
    follower = Follower(session, setup, weights, lost=lost, must_leave=must_leave)
    try:
        follower.run(process, begun)
    except BaseException as error:
        log.error("process %d of the sampler stopped: %s", process, error, exc_info=error)
        follower.end(f"process {process} has failed: {type(error).__name__}: {error}")
        raise
    follower.end("the sampler is closed")


class Follower:
    """A process of a sampler that follows the leader's orders."""

    def __init__(
        self,
        session: Session,
        setup: SamplerSetup,
        weights: WeightSource,
        *,
        lost: Lost,
        must_leave: threading.Event | None,
    ) -> None:
        """See follow."""
        self._session, self._setup, self._weights = session, setup, weights
        self._lost, self._must_leave = lost, must_leave
        self._over = False
        self._orders: queue.SimpleQueue[Begin | JointRound | Dismissed] = queue.SimpleQueue()
        session.on(Begin, self._orders.put)
        session.on(JointRound, self._orders.put)
        session.on(GivenUpRequest, lambda order: forget_version(weights, order.version))
        session.on(Dismissed, self._note_dismissed)
        session.on_end(self._session_ended)

    def run(self, process: int, begun: Callable[[], None] = lambda: None) -> None:
        """Follow until the sampler is closed; arguments and errors as in `follow`."""
        self._session.send(Ready(process=process, alike=setup_hash(self._setup)))
        begin = self._next()
        if isinstance(begin, Dismissed):
            return
        assert isinstance(begin, Begin), "the first order"
        first = take_version(self._weights, begin.version).params
        prepared = self._setup.engine.prepare(first)
        del first
        receiver = FollowingReceiver(self._weights)
        loop = DecodeLoop(
            self._setup,
            Lifetime(self, lambda _: None, name=self._setup.settings.name),
            self._weights,
            version=begin.version,
            prepared=prepared,
            receiver=receiver,
        )
        self._weights.live(begin.version)
        begun()
        del prepared
        batch = loop.open_batch()
        while isinstance(order := self._next(), JointRound):
            receiver.order = order
            loop.round(batch)

    def end(self, reason: str) -> None:
        """End the session; its end no longer counts as a loss."""
        self._over = True
        self._session.end(reason)

    def _next(self) -> Begin | JointRound | Dismissed:
        """Wait for the leader's next order. Raises Disconnected."""
        while True:
            if self._must_leave is not None and self._must_leave.is_set():
                self._must_leave = None
                self._session.send(Leave(reason="a process of the sampler was asked to leave"))
            try:
                order = self._orders.get(timeout=POLL_S)
            except queue.Empty:
                if self._session.ended is not None:
                    raise Disconnected(f"lost the leader: {self._session.ended}") from None
                continue
            return order

    # ---- the session's thread

    def _note_dismissed(self, order: Dismissed) -> None:
        self._over = True  # the session may end while the last rounds are played
        self._orders.put(order)

    def _session_ended(self, reason: str) -> None:
        if not self._over:
            self._lost(f"lost the leader {self._session.peer}: {reason}")


class FollowingReceiver:
    """Applies the inputs that the leader applied at the same block."""

    def __init__(self, weights: WeightSource) -> None:
        self.order = JointRound()  # to play next
        self._weights = weights

    def take(self, batch: Batch, *, block: int, idle: bool, wants_weights: bool) -> Taken:
        """See TakesIn. Raises RolloutError if the batch differs from the leader's, and
        WeightsError."""
        order = self.order
        if state_hash(batch) != order.state_hash:
            raise RolloutError(
                f"after {block} blocks this process's batch differs from the leader's: the "
                "processes of the sampler have sampled different tokens or applied different "
                "inputs. They must run the same versions of the code and of JAX, on devices of "
                "one kind."
            )
        incoming = [
            _leader_request(given, order.first_number + i) for i, given in enumerate(order.requests)
        ]
        batch.enqueue(incoming)
        cancelled = []
        if order.cancelled:
            known = (*batch.queue, *batch.admitted.values())
            by_number = {live_of(stage).number: stage for stage in known}
            cancelled = [by_number[number] for number in order.cancelled]
        for stage in cancelled:
            give_up(batch, stage)
        update = None
        if order.version is not None:
            update = take_version(self._weights, order.version)
            update = replace(update, probe_logprobs=order.probe_logprobs)
        return Taken(incoming=incoming, cancelled=cancelled, update=update, prescribed=False)

    def stopped(self, live: LiveRequest) -> None:
        """Do nothing: no command runs here."""


def _leader_request(given: Request | Partial, number: int) -> LiveRequest:
    """Return the leader's request; its answer is not used here."""
    live = live_request(given, Waiter(queued_at=0.0, future=Future()))
    live.number = number
    return live


def take_version(weights: WeightSource, version: int) -> VersionedParams:
    """Return the weights of this version, which the source has. Raises WeightsError."""
    update = weights.poll(wait=True)
    if update is None or update.version != version:
        has = "nothing new" if update is None else f"version {update.version}"
        raise WeightsError(
            f"the leader uses weights of version {version}, but this process has {has}. All "
            "processes must get their offers through the leader (remote/sampler/joint_weights.py)."
        )
    return update
