"""A remote sampler's end of the weight channel, in the trainer's process."""

import logging
import threading
from collections.abc import Callable

from jaxrl_async.errors import Disconnected
from jaxrl_async.remote.weights.outbox import WeightOutbox
from jaxrl_async.remote.wire.messages import Live, Offer, Staged, Torn
from jaxrl_async.remote.wire.session_port import Session
from jaxrl_async.weights.exchange import Exchange, ExchangeEntry

log = logging.getLogger(__name__)


class RemoteEnd:
    """One joined sampler. It takes weights at its own pace, and counts for the live version from
    the moment it enters until it leaves or its session ends."""

    def __init__(
        self,
        session: Session,
        address: str,
        exchange: Exchange,
        outbox: WeightOutbox,
        on_entered: Callable[[], None] = lambda: None,
    ) -> None:
        """Offer the sampler the newest weights.

        Args:
            session: with the sampler.
            address: HOST:PORT at which it relays weights; "": it does not.
            exchange: counts it for the live version.
            outbox: offers it the versions.
            on_entered: called once, on the session's thread, when the sampler has entered; not if
                it leaves before.
        """
        self.name, self._on_entered = session.peer, on_entered
        self._session, self._exchange, self._outbox = session, exchange, outbox
        self._entry = ExchangeEntry(live_version=-1, counts=False)
        self._entered = self._left = False
        with exchange.changed:
            exchange.raise_if_closed()
            exchange.entries.append(self._entry)
        self._recipient = outbox.join(self.name, address, self)
        session.on(Staged, self._on_staged)
        session.on(Torn, self._on_torn)
        session.on(Live, self._on_live)
        session.on_end(lambda reason: self.leave())

    @property
    def entered(self) -> bool:
        """True if its version counts, so it may get requests."""
        return self._entered and not self._left

    @property
    def live_version(self) -> int:
        """The last version that the sampler has reported live; -1: none yet."""
        return self._entry.live_version

    def leave(self) -> None:
        """Stop waiting for this sampler: the live version becomes the lowest of the others. Send it
        no requests after this. Thread-safe and idempotent; the session's end also calls it."""
        self._outbox.leave(self._recipient)
        with self._exchange.changed:
            if self._left:
                return
            self._left = True
            self._exchange.remove(self._entry)
        self._exchange.report_live()

    # ---- for the outbox

    def send(self, offer: Offer, sent: Callable[[], None]) -> None:
        """Send an offer without blocking, and call `sent` once the session has accepted it or never
        will. A sampler with a full queue does not delay the others."""

        def wait() -> None:
            self._try_send(offer, self._session.send)
            sent()

        if self._try_send(offer, self._session.send_now):
            sent()
        else:  # the queue is full: wait on a separate thread
            name = f"offer to {self.name}"
            threading.Thread(target=wait, name=name, daemon=True).start()

    def _try_send(self, offer: Offer, send: Callable[[Offer], bool | None]) -> bool:
        """Send an offer; return False if the queue is full."""
        try:
            return send(offer) is not False
        except Disconnected as error:
            log.info("%s was not offered version %d: %s", self.name, offer.version, error)
        except Exception as error:
            log.exception("%s could not be offered version %d", self.name, offer.version)
            self.give_up(f"version {offer.version} could not be offered: {error}")
        return True

    def hold(self, version: int) -> None:
        """Keep the live version from advancing past this one until the sampler has joined."""
        with self._exchange.changed:
            if not (self._left or self._entered):
                self._entry.live_version, self._entry.counts = version, True
                self._exchange.raise_live()

    def release(self) -> None:
        """Undo `hold`."""
        with self._exchange.changed:
            if not self._entered:
                self._entry.counts = False
                self._exchange.raise_live()

    def report_live(self) -> None:
        """Report versions that have become live. Called without locks."""
        self._exchange.report_live()

    def give_up(self, reason: str) -> None:
        """End the session with the sampler, without waiting. The sampler leaves when it has
        ended."""
        name = f"end of {self.name}"
        threading.Thread(target=self._session.end, args=(reason,), name=name, daemon=True).start()

    # ---- the sampler's reports, on the session's thread

    def _on_staged(self, message: Staged) -> None:
        if not self._left and self._outbox.staged(self._recipient, message):
            self._exchange.arrived(message.version)

    def _on_torn(self, message: Torn) -> None:
        self._outbox.torn(self._recipient, message.version, message.error)

    def _on_live(self, message: Live) -> None:
        before = self._entered
        if not self._left:
            self._outbox.live(self._recipient, message.version, self._enter)
        self._exchange.report_live()
        if self.entered and not before:
            self._on_entered()

    def _enter(self, version: int) -> bool:
        """Start to count with this version; return False if it is too old."""
        with self._exchange.changed:
            if self._left:
                return True
            if not self._exchange.enter(self._entry, version):
                return False
            joins, self._entered = not self._entered, True
        if joins:
            self._outbox.joined()
        return True
