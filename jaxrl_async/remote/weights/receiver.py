"""The sampler's side of weight transfer from another process: a thread that fetches offered
versions.

    Offer ──> fetching ──checksums──> staged ──poll──> taken ──live──> fetches again
                 │ corrupted, or a newer offer            (the sampler swaps to it)
                 └──> waits for the next offer

There is at most one other set of weights than the sampler's live ones: the next version is fetched
only when the last one is live.
"""

import logging
import threading
import time
from collections import deque
from dataclasses import dataclass, replace

from jaxrl_async.errors import Closed, Disconnected, WeightsError
from jaxrl_async.ports.run import Clock
from jaxrl_async.remote.weights.base_delivery import BaseLoader
from jaxrl_async.remote.weights.protocols import Fetching
from jaxrl_async.remote.weights.verification import fetch_verified
from jaxrl_async.remote.wire.messages import Live, Offer, Staged, Torn
from jaxrl_async.remote.wire.session_port import Session
from jaxrl_async.types import VersionedParams

log = logging.getLogger(__name__)

CLOSE_S = 10.0
"""Maximum wait for the thread on close, seconds."""
ERROR_CHARACTERS = 2000
"""Maximum length of the sent description of a failed transfer, characters."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Transfer:
    """An offer, and the event that aborts its transfer."""

    offer: Offer
    at_s: float  # time of arrival
    abort: threading.Event


class WeightReceiver:
    """The ports.WeightSource of a sampler in a separate process: fetches concurrently with the
    sampler. Thread-safe."""

    def __init__(
        self,
        session: Session,
        fetching: Fetching,
        *,
        clock: Clock = time.monotonic,
        base: BaseLoader | None = None,
    ) -> None:
        """Start fetching the versions that the trainer offers on this session.

        Args:
            session: with the trainer.
            fetching: the transport; close() also closes it.
            clock: monotonic, seconds.
            base: loads the base of the offered adapters; None: full weights are offered.
        """
        self._session, self._fetching = session, fetching
        self._base, self._clock = base, clock
        self._changed = threading.Condition()  # guards everything below
        self.staged: VersionedParams | None = None
        self._taken: int | None = None  # version given to the sampler, not live yet
        self._live_version: int | None = None
        self._wake = threading.Event()  # a placeholder before `attach`
        self._next: _Transfer | None = None  # newest, not started yet
        self._running: _Transfer | None = None
        self._unsent: deque[Staged | Torn | Live] = deque()
        self._closed = False
        self._lost: str | None = None  # reason of the session's end
        self._thread = threading.Thread(target=self._run, name="fetch weights", daemon=True)
        self._thread.start()
        session.on(Offer, self._on_offer)
        session.on_end(self._on_end)

    # ---- the sampler

    def first(self, timeout_s: float) -> VersionedParams:
        """Wait for the initial weights of the sampler; the caller reports them live when it is
        built.

        Raises WeightsError after the timeout, Disconnected if the session has ended.
        """
        with self._changed:
            self._changed.wait_for(lambda: self.staged is not None or self.over, timeout_s)
            if (update := self.poll()) is not None:
                return update
            if self.over:
                reason = self._lost or "closed here"
                raise Disconnected(f"no weights arrived before the session ended: {reason}")
        raise WeightsError(
            f"no weights arrived within {timeout_s:.0f} s. Check the trainer's log for its offers, "
            "and the network between the two machines."
        )

    def poll(self, *, wait: bool = False) -> VersionedParams | None:
        """Take the staged weights, complete and verified, an adapter together with its frozen base
        until `begun`; None if no weights are staged.

        Never blocks, regardless of `wait`: a network transfer may take minutes, and the event of
        `attach` wakes an idle sampler when it ends.
        """
        with self._changed:
            update, self.staged = self.staged, None
            if update is None:
                return None
            self._taken = update.version
            if self._base is None:
                return update
            return replace(update, params=self._base.merge(update.params))

    def begun(self) -> None:
        """Release the frozen base: the sampler's engine has it. Idempotent."""
        if self._base is not None:
            self._base.release()

    def live(self, version: int) -> None:
        """Report that the sampler generates every new token with a version; never blocks."""
        with self._changed:
            self._live_version, self._taken = version, None
            self._unsent.append(Live(version=version))
            self._changed.notify_all()

    def attach(self, wake: threading.Event) -> None:
        """Set this event when weights are staged, and now if they already are."""
        with self._changed:
            self._wake = wake
            if self.staged is not None or self.over:
                wake.set()

    def leave(self) -> None:
        """Fetch no more weights, and give none. Idempotent and thread-safe."""
        with self._changed:
            self.staged = None
            self._on_end("the sampler has left")

    def rejoin(self) -> "WeightReceiver":
        """Raise Closed: another process replaces this one with its sampler."""
        raise Closed("a sampler that joined a run is not replaced within its process: restart it")

    def close(self) -> None:
        """Abort the current transfer and stop the thread. Idempotent."""
        with self._changed:
            self._closed = True
            self._abort()
            self._changed.notify_all()
        self._thread.join(CLOSE_S)
        self._fetching.close()
        if self._base is not None:
            self._base.close()
        self._wake.set()

    @property
    def over(self) -> bool:
        """True if no more weights will arrive."""
        return self._closed or self._lost is not None

    # ---- the session's thread

    def _on_offer(self, offer: Offer) -> None:
        with self._changed:
            self._next = _Transfer(offer=offer, at_s=self._clock(), abort=threading.Event())
            self._abort()
            self._changed.notify_all()

    def _on_end(self, reason: str) -> None:
        with self._changed:
            self._lost = reason
            self._abort()
            self._changed.notify_all()

    def _abort(self) -> None:
        if self._running is not None:
            self._running.abort.set()

    # ---- its own thread

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(self._has_work)
                if self.over:
                    return
                unsent, self._unsent = self._unsent, deque()
                transfer = None
                if not unsent:
                    transfer = self._running = self._next
                    self._next = None
            try:
                for message in unsent:
                    self._session.send(message)
            except Disconnected as error:
                log.info("%s", error)
            if transfer is not None:
                self._serve(transfer)

    def _has_work(self) -> bool:
        if self.over or self._unsent:
            return True
        if self._next is None:
            return False
        return self._has(self._next.offer.version) or (self.staged is None and self._taken is None)

    def _has(self, version: int) -> bool:
        """Return True if this version, or a newer one, is already here."""
        staged = None if self.staged is None else self.staged.version
        held = (v for v in (staged, self._taken, self._live_version) if v is not None)
        return version <= max(held, default=-1)

    def _serve(self, transfer: _Transfer) -> None:
        """Fetch an offered version, and report the result."""
        version = transfer.offer.version
        answer: Staged | Torn
        if self._has(version):  # re-offered before the answer arrived
            answer = Staged(version=version, num_bytes=0, seconds=0.0, source="")
        else:
            try:
                answer = self._fetch(transfer)
            except Exception as error:
                if not transfer.abort.is_set():
                    log.warning("fetching version %d of the weights failed: %s", version, error)
                answer = Torn(version=version, error=str(error)[:ERROR_CHARACTERS])
        with self._changed:
            self._running = None
            if isinstance(answer, Staged) or not transfer.abort.is_set():
                self._unsent.append(answer)
        if isinstance(answer, Staged):
            self._wake.set()

    def _fetch(self, transfer: _Transfer) -> Staged:
        """Fetch a version, verify and stage it. Raises any error of the transfer."""
        offer = transfer.offer
        base_bytes = 0
        if self._base is not None:
            base_bytes = self._base.load(offer.where, offer.sources, transfer.abort)
        fetched = fetch_verified(
            self._fetching, offer.version, offer.where, offer.sources, transfer.abort
        )
        seconds = self._clock() - transfer.at_s
        with self._changed:
            if transfer.abort.is_set():
                raise WeightsError("the transfer was aborted")
            self.staged = VersionedParams(
                version=offer.version,
                params=fetched.params,
                probe_logprobs=offer.probe_logprobs,
                compared=fetched.compared,
            )
            self._changed.notify_all()
        return Staged(
            version=offer.version,
            num_bytes=fetched.num_bytes,
            seconds=seconds,
            source=fetched.source,
            base_bytes=base_bytes,
            fallbacks=fetched.fallbacks,
        )
