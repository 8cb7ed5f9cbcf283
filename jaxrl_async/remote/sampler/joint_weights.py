"""New weights of a sampler on several processes: every process fetches its own part of a version,
and the sampler swaps to the version once all have it.

    trainer ──Offer──> leader: OfferRelay ──Offer──┬──> its own source ────Staged──┐
       ^                                           └──> each follower's ───Staged──┤
       └──────────────── Staged, Torn <── all of them, or one that could not ──────┘

Only one version is in transfer at a time. The next is offered when all processes have swapped to
the previous version, or when that could not be fetched. A process therefore always holds the
version that the leader refers to.
"""

import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from jaxrl_async.errors import Closed, Disconnected, WeightsError
from jaxrl_async.ports.weights import WeightSource
from jaxrl_async.remote.wire.messages import GivenUpRequest, Live, Offer, Staged, Torn
from jaxrl_async.remote.wire.session_port import Session, WireMessage
from jaxrl_async.types import VersionedParams

log = logging.getLogger(__name__)

LEADER = 0
"""Index of the leading process; the followers come after it."""
POLL_S = 0.5
"""Interval at which a wait for weights checks whether the session has ended, seconds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Change:
    """Messages to send when another offer becomes the current one."""

    offer: Offer | None = None
    to: tuple[int, ...] = ()  # processes that get it
    forget: tuple[tuple[int, int], ...] = ()  # processes, and the version that each releases


NO_CHANGE = _Change()


class OfferRelay:
    """The leader's session with the trainer, as seen by its own source of weights.
    Offers are also sent to the followers, and the source's reports count as one process's."""

    def __init__(self, trainer: Session, followers: Sequence[Session]) -> None:
        self._trainer = trainer
        self._lock = threading.Lock()
        self._current: Offer | None = None
        self._waiting: Offer | None = None  # the newest that arrived in the meantime
        self._staged: dict[int, Staged] = {}  # of the current version, by process
        self._live: set[int] = set()  # processes that use it
        self._finished: Staged | None = None  # the last version that all processes used
        self._given_up: dict[int, set[int]] = {}  # version: processes that may still get it
        self._torn = False  # a process could not fetch the current version
        # by process; the leader's own are set by `on` and `attach_source`
        self._offer: list[Callable[[Any], None]] = [lambda _: None, *(s.send for s in followers)]
        self._forget: list[Callable[[int], None]] = [
            lambda _: None,
            *(lambda v, s=s: s.send(GivenUpRequest(version=v)) for s in followers),
        ]
        self._wake: threading.Event | None = None
        for number, session in enumerate(followers, start=1):
            session.on(Staged, partial(self._note_staged, number))
            session.on(Torn, self._note_torn)
            session.on(Live, partial(self._note_live, number))

    # ---- Session, for the leader's source

    @property
    def peer(self) -> str:
        """See Session."""
        return self._trainer.peer

    @property
    def ended(self) -> str | None:
        """See Session."""
        return self._trainer.ended

    def send(self, message: object) -> None:
        """See Session; a report of the source counts as one process's report."""
        if isinstance(message, Staged):
            self._note_staged(LEADER, message)
        elif isinstance(message, Torn):
            self._note_torn(message)
        elif isinstance(message, Live):
            self._note_live(LEADER, message)
        else:
            self._trainer.send(message)

    def send_now(self, message: object) -> bool:
        """See Session."""
        if not isinstance(message, Staged | Torn | Live):
            return self._trainer.send_now(message)
        self.send(message)
        return True

    def on(self, kind: type[WireMessage], handler: Callable[[WireMessage], None]) -> None:
        """See Session."""
        if kind is Offer:
            self._offer[LEADER] = handler
            self._trainer.on(Offer, self._note_offer)
        else:
            self._trainer.on(kind, handler)

    def on_end(self, callback: Callable[[str], None]) -> None:
        """See Session."""
        self._trainer.on_end(callback)

    def end(self, reason: str) -> None:
        """See Session."""
        self._trainer.end(reason)

    # ---- for JointWeights

    def attach_source(self, forget: Callable[[int], None]) -> None:
        """Register a function to call with a version that the leader's source must release."""
        self._forget[LEADER] = forget

    def attach(self, wake: threading.Event) -> None:
        """Set this event whenever all processes have a version, and now if they already have."""
        self._wake = wake
        if self.staged_version is not None:
            wake.set()

    @property
    def staged_version(self) -> int | None:
        """The version that all processes have; None if there is no such version or it is live
        here."""
        with self._lock:
            if self._current is None or not self._all_staged or LEADER in self._live:
                return None
            return self._current.version

    # ---- reports of trainer and processes, on their sessions' threads

    @property
    def _all_staged(self) -> bool:
        return len(self._staged) == len(self._offer)

    def _note_offer(self, offer: Offer) -> None:
        combined, change = None, NO_CHANGE
        with self._lock:
            current, finished = self._current, self._finished
            if finished is not None and finished.version >= offer.version:
                combined = finished  # re-offered before the answer arrived
            elif current is not None and current.version == offer.version:  # again, after a Torn
                self._current, self._torn = offer, False
                to = tuple(n for n in range(len(self._offer)) if n not in self._staged)
                change = _Change(offer=offer, to=to)
                combined = _combined(self._staged) if self._all_staged else None
            else:
                self._waiting = offer
                if current is None or self._torn:
                    change = self._begin_next()
        if combined is not None:
            self._trainer.send(combined)
        self._apply(change)

    def _note_staged(self, number: int, staged: Staged) -> None:
        version, combined = staged.version, None
        with self._lock:
            current, wake = self._current, self._wake
            late = number in self._given_up.get(version, ())  # arrived while it was given up
            if late:
                self._given_up[version].remove(number)
            elif current is not None and current.version == version:
                self._staged[number] = staged
                if self._all_staged:  # the leader may use it now: it can no longer be given up
                    combined, self._torn = _combined(self._staged), False
        if late:
            self._forget[number](version)
        if combined is not None:
            self._trainer.send(combined)
            if wake is not None:
                wake.set()

    def _note_torn(self, torn: Torn) -> None:
        with self._lock:
            if self._current is None or self._current.version != torn.version or self._all_staged:
                return  # re-offered and fetched before this report arrived
            first, self._torn = not self._torn, True
            change = NO_CHANGE if self._waiting is None else self._begin_next()
        if change.offer is not None:
            log.warning("version %d is skipped in favor of the next: %s", torn.version, torn.error)
            self._apply(change)
        elif first:
            self._trainer.send(torn)

    def _note_live(self, number: int, live: Live) -> None:
        with self._lock:
            current = self._current
            known = current is not None and current.version == live.version
            if known:
                self._live.add(number)
            done = known and len(self._live) == len(self._offer)
            if done:
                self._finished = _combined(self._staged)
                self._given_up.clear()
            change = self._begin_next(given_up=False) if done else NO_CHANGE
        if number == LEADER and known:
            self._trainer.send(live)
        self._apply(change)

    def _begin_next(self, *, given_up: bool = True) -> _Change:
        """Make the waiting offer, if any, the current one; return the messages to send. Needs the
        lock.

        given_up: the processes release the previous version, now or as soon as they have it.
        """
        processes = range(len(self._offer))
        forget: tuple[tuple[int, int], ...] = ()
        if self._current is not None and given_up:
            version = self._current.version
            forget = tuple((n, version) for n in self._staged)
            self._given_up[version] = {*processes} - {*self._staged}
        change = _Change(
            offer=self._waiting,
            to=() if self._waiting is None else tuple(processes),
            forget=forget,
        )
        self._current, self._waiting = self._waiting, None
        self._staged, self._live, self._torn = {}, set(), False
        return change

    def _apply(self, change: _Change) -> None:
        for number, version in change.forget:
            self._forget[number](version)
        for number in change.to:
            self._offer[number](change.offer)


def _combined(parts: Mapping[int, Staged]) -> Staged:
    """Combine the processes' reports into the sampler's."""
    own = parts[LEADER]
    return Staged(
        version=own.version,
        num_bytes=sum(part.num_bytes for part in parts.values()),
        seconds=max(part.seconds for part in parts.values()),
        source=own.source,
        base_bytes=sum(part.base_bytes for part in parts.values()),
        fallbacks=sum(part.fallbacks for part in parts.values()),
    )


def forget_version(source: WeightSource, version: int) -> None:
    """Make a source release staged weights that will not be used. It counts them as live, and
    fetches the next offer."""
    update = source.poll()
    if update is not None:
        source.live(update.version)
        if update.version != version:
            raise WeightsError(
                f"version {version} was given up, but version {update.version} is staged: all "
                "processes of a sampler must get their offers through its leader."
            )


class JointWeights:
    """The ports.WeightSource of the process that leads a sampler."""

    def __init__(self, relay: OfferRelay, own: WeightSource) -> None:
        """own: created with the relay instead of the session with the trainer."""
        self._relay, self._own = relay, own
        relay.attach_source(partial(forget_version, own))

    def first(self, timeout_s: float) -> VersionedParams:
        """Wait until all processes have the first weights. Raises WeightsError after the timeout,
        Disconnected if the session with the trainer has ended."""
        wake, until = threading.Event(), time.monotonic() + timeout_s
        self.attach(wake)
        while (update := self.poll()) is None:
            if self._relay.ended is not None:
                raise Disconnected(f"no weights before the session ended: {self._relay.ended}")
            left = until - time.monotonic()
            if left <= 0:
                raise WeightsError(
                    f"the processes of the sampler did not all get weights within {timeout_s:.0f} "
                    "s. Check the trainer's log for its offers, and their logs."
                )
            wake.wait(min(left, POLL_S))
            wake.clear()
        return update

    def poll(self, *, wait: bool = False) -> VersionedParams | None:
        """See ports.WeightSource; never blocks, since the last process to have a version wakes the
        sampler."""
        return None if self._relay.staged_version is None else self._own.poll()

    def live(self, version: int) -> None:
        """See ports.WeightSource."""
        self._own.live(version)

    def attach(self, wake: threading.Event) -> None:
        """See ports.WeightSource."""
        self._relay.attach(wake)

    def leave(self) -> None:
        """See ports.WeightSource."""
        self._own.leave()

    def rejoin(self) -> "JointWeights":
        """Raise Closed: the processes of a sampler end together and are replaced by new ones."""
        raise Closed("a sampler on several processes cannot be replaced within them: restart them")
