"""The weight channel: the trainer's thread publishes weights, each sampler's thread polls for them.

publish(v, params) ──Link──> staged (copying) ──poll: all arrays valid───> taken ──live(v)──┐
      ^                        ^  │               │                                         │
      │                        └──┘ torn: retry   │                                         │
      └────────── may publish v + 1 <─────────────┘       on_live(lowest of all samplers) <─┘

An update is staged for all samplers or for none. A sampler takes the whole update, and only when
every array has arrived with the checksum of its source; until then it generates with its current
weights. A sampler holds at most two sets of weights. The trainer's side holds one more set until it
is taken.

A removed sampler leaves the channel: no publish waits for it, and the newest weights are kept for
the replacement that rejoins in its place.

Samplers in separate processes join and leave at any time (remote_port.py); the newest weights are
kept available for them to fetch. No publish waits for these samplers. The live version waits for
them once they have entered.
"""

import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import jax

from jaxrl_async.errors import WeightsError
from jaxrl_async.model.spec import Params
from jaxrl_async.ports.run import Clock
from jaxrl_async.types import VersionedParams
from jaxrl_async.weights.delivery import Delivery, Link, send
from jaxrl_async.weights.exchange import ChannelStats, Exchange, ExchangeEntry
from jaxrl_async.weights.manifest import Manifest, compare, manifest_of
from jaxrl_async.weights.remote_port import NO_REMOTE, RemoteSamplers

log = logging.getLogger(__name__)

POLL_S = 0.1
"""Interval at which a wait for live weights checks whether it is given up, seconds."""


@dataclass(slots=True, kw_only=True, eq=False)
class _End(ExchangeEntry):
    """The channel's state of one local sampler. Changed under the channel's lock."""

    link: Link
    staged: Delivery | None = None
    taken: Delivery | None = None  # polled, not live yet
    subscription: int = 0  # number of the current subscription; older ones are ignored
    wake: threading.Event = field(default_factory=threading.Event)  # a placeholder before `attach`

    @property
    def pending(self) -> bool:
        """True if the sampler still has to take its update."""
        return self.staged is not None and self.counts


class Subscription:
    """One sampler's end of the channel, a ports.WeightSource; used only by the sampler's thread."""

    def __init__(self, exchange: Exchange, end: _End) -> None:
        self._exchange, self._end, self._number = exchange, end, end.subscription

    @property
    def is_current(self) -> bool:
        """True if this end is still the sampler's; False once the sampler has left."""
        return self._number == self._end.subscription

    @property
    def under_way(self) -> VersionedParams | None:
        """The update staged for this sampler, complete or not; None if no update is staged."""
        staged = self._end.staged
        return staged.update if staged is not None and self.is_current else None

    def poll(self, *, wait: bool = False) -> VersionedParams | None:
        """Take the staged update once all its arrays have arrived and are verified; return None
        before.

        wait: wait for the copy. Versions are never mixed: an update is staged and taken as a whole.
        Raises WeightsError if it arrived corrupted twice.
        """
        end, delivery = self._end, self._end.staged
        if delivery is None or not self.is_current:
            return None
        try:
            if not delivery.arrived(wait=wait):
                return None
            if not delivery.finished:
                delivery = self._restage(delivery, delivery.finish(end.link))
                if not delivery.arrived(wait=wait):
                    return None
            delivery.check()
        except (jax.errors.JaxRuntimeError, WeightsError) as error:
            self._repeat(delivery, error)
            return self.poll(wait=wait) if wait else None
        if self._take(delivery):
            return delivery.verified
        return self.poll(wait=wait)  # a newer update was staged while this sampler joined

    def live(self, version: int) -> None:
        """Report that this sampler generates every new token with this version."""
        with self._exchange.changed:
            if not self.is_current:
                return
            self._end.live_version, self._end.taken = version, None
            self._exchange.raise_live()
        self._exchange.report_live()

    def attach(self, wake: threading.Event) -> None:
        """Set this event at every publish and at close, and now if either has happened."""
        with self._exchange.changed:
            if not self.is_current:
                return
            self._end.wake = wake
            if self._end.staged is not None or self._exchange.closed:
                wake.set()

    def leave(self) -> None:
        """Leave the channel: no publish waits for this sampler, and the live version becomes the
        lowest of the others. Thread-safe and idempotent."""
        with self._exchange.changed:
            if not self.is_current:
                return
            end = self._end
            end.subscription += 1
            end.counts = False
            end.staged, end.taken = end.staged or end.taken, None
            self._exchange.raise_live()
            self._exchange.changed.notify_all()
        self._exchange.report_live()

    def rejoin(self) -> "Subscription":
        """Return a new end for the replacement of this sampler, which has left.

        Its first poll returns the newest weights, or None if this sampler already used them. Raises
        Closed.
        """
        with self._exchange.changed:
            self._exchange.raise_if_closed()
            end = self._end
            assert not end.counts and end.subscription == self._number + 1, (
                "it left, and no replacement has rejoined"
            )
            end.counts, end.wake = True, threading.Event()
            return Subscription(self._exchange, end)

    def _take(self, delivery: Delivery) -> bool:
        """Mark a verified update as taken, unless another has been staged in the meantime."""
        exchange, end = self._exchange, self._end
        with exchange.changed:
            if end.staged is not delivery or not self.is_current:
                return False
            end.staged, end.taken = None, delivery.released()
            if exchange.all_taken:
                exchange.note_transfer(delivery.update.version)
            exchange.changed.notify_all()
            return True

    def _restage(self, old: Delivery, new: Delivery) -> Delivery:
        """Replace the staged update by its next state, and return this."""
        with self._exchange.changed:
            if self.is_current and self._end.staged is old:
                self._end.staged = new
        return new

    def _repeat(self, delivery: Delivery, error: Exception) -> None:
        """Resend a corrupted update from the source that the trainer's side still holds.

        Raises WeightsError if this was the second attempt.
        """
        self._exchange.count("torn_transfers")
        version = delivery.update.version
        if delivery.repeated:
            raise WeightsError(
                f"version {version} arrived corrupted twice and was not used: {error}. Check the "
                "devices and their interconnect; the run can be resumed."
            ) from error
        log.warning("version %d arrived corrupted; retrying: %s", version, error)
        self._exchange.count("transfer_retries")
        self._restage(delivery, delivery.repeat(self._end.link))
        self._end.wake.set()  # an idle sampler waits for it


class WeightChannel:
    """One trainer and any number of samplers, with at most one update in transfer to each.

    Each local sampler uses one `subscribe()` as its ports.WeightSource. Samplers in separate
    processes enter the `exchange` themselves.
    """

    def __init__(
        self,
        links: Sequence[Link] = (),
        *,
        remote: RemoteSamplers = NO_REMOTE,
        on_live: Callable[[int], None] = lambda version: None,
        expected: Manifest | None = None,
        version: int = 0,
        checksum: bool = False,
        count: Callable[[str], None] = lambda name: None,
        clock: Clock = time.perf_counter,
    ) -> None:
        """Create one end per link.

        Args:
            links: The transfer to each local sampler.
            remote: Serves samplers in separate processes; the channel closes it.
            on_live: Called with each version that has become live in every sampler, in ascending
                order, without the lock, on a sampler's thread.
            expected: Manifest of the published weights. None: taken from the first publish.
            version: The samplers' initial version; it is live from the start.
            checksum: Compare the checksums of received and sent weights, on links that cross
                devices.
            count: Called with the name of each fault (metrics.fault_counts).
            clock: Monotonic, seconds.
        """
        self.links = tuple(links)
        self._remote, self._expected, self._checksum = remote, expected, checksum
        self._ends = tuple(_End(link=link, live_version=version) for link in self.links)
        self.exchange = Exchange(
            entries=list(self._ends),
            live_version=version,
            on_live=on_live,
            count=count,
            clock=clock,
        )
        self._subscribed = 0
        self._published = version

    # ---- the trainer

    def begin(
        self, params: Params, probe_logprobs: object = None, base: Params | None = None
    ) -> None:
        """Let samplers in separate processes fetch the run's initial weights.

        base: frozen base of an adapter, in the sent form; it must not change.
        """
        if base is not None:
            self._remote.begin(base)
        self._expected = self._expected or manifest_of(params)
        self._remote.publish(
            VersionedParams(version=self._published, params=params, probe_logprobs=probe_logprobs)
        )

    def publish(self, version: int, params: Params, probe_logprobs: object = None) -> None:
        """Start the copies and return; wait only while a local sampler still has to take the last
        update.

        params may be donated immediately afterwards. Raises Closed, and WeightsError if the
        manifest differs or starting the copies failed twice; no sampler then gets any part of the
        update. If trainer and sampler share a device lock, call wait_taken() first, without the
        lock: a sampler that waits for the lock does not poll.
        """
        exchange = self.exchange
        start = exchange.clock()
        assert version > self._published, f"version {version} after {self._published}"
        manifest = manifest_of(params)
        self._expected = self._expected or manifest
        compare(manifest, self._expected)
        self.wait_taken()
        waited_s = exchange.clock() - start
        update = VersionedParams(version=version, params=params, probe_logprobs=probe_logprobs)
        deliveries = self._send(update)
        with exchange.changed:
            exchange.raise_if_closed()
            exchange.published_at[version] = start
            self._published = version  # before any remote sampler can use it
        self._remote.publish(update)
        with exchange.changed:
            for end, delivery in zip(self._ends, deliveries, strict=True):
                end.staged = delivery
            exchange.stats = replace(
                exchange.stats,
                published=exchange.stats.published + 1,
                transfer_bytes=self._num_bytes(deliveries),
                publish_s=exchange.clock() - start,
                wait_s=waited_s,
            )
        self._wake_all()

    def wait_taken(self) -> None:
        """Block until every sampler has taken the last update. Raises Closed."""
        exchange = self.exchange
        with exchange.changed:
            exchange.changed.wait_for(lambda: exchange.closed or exchange.all_taken)
            exchange.raise_if_closed()

    def wait_live(
        self, version: int, timeout_s: float, given_up: Callable[[], bool] = lambda: False
    ) -> None:
        """Block until all samplers use `version`, or the wait is given up.

        Args:
            version: A version that has been published.
            timeout_s: Maximum wait, seconds. If samplers join and leave, it starts at the last
                moment without samplers, and is extended by the maximum time of a transfer with its
                retries. Time without samplers is bounded by remote.wait_s.
            given_up: Called repeatedly under the channel's lock; True ends the wait.

        Raises Closed, and WeightsError after the timeout.
        """
        exchange, remote = self.exchange, self._remote
        empty, since = False, time.monotonic()
        with exchange.changed:
            while exchange.live_version < version and not given_up():
                exchange.raise_if_closed()
                if empty != (remote.may_join and exchange.is_empty):
                    empty, since = not empty, time.monotonic()
                limit_s = remote.wait_s if empty else timeout_s + remote.transfer_limit_s
                left_s = since + limit_s - time.monotonic()
                if left_s <= 0:
                    raise _not_live(version, exchange.live_version, limit_s, empty=empty)
                exchange.changed.wait(min(POLL_S, left_s))

    # ---- any thread

    def subscribe(self) -> Subscription:
        """Return the next sampler's end. Raises WeightsError if there are no more links."""
        exchange = self.exchange
        with exchange.changed:
            if self._subscribed == len(self._ends):
                raise WeightsError(
                    f"the weight channel was created for {len(self._ends)} samplers, and all have "
                    "subscribed. Create it with one link per sampler."
                )
            self._subscribed += 1
            return Subscription(exchange, self._ends[self._subscribed - 1])

    @property
    def live_version(self) -> int:
        """The live version: every sampler uses it, or a newer one."""
        return self.exchange.live_version

    @property
    def published_version(self) -> int:
        """The newest version sent to the samplers."""
        return self._published

    def stats(self) -> ChannelStats:
        """Return a consistent snapshot."""
        return replace(self.exchange.stats, remote=self._remote.traffic())

    def close(self) -> None:
        """Wake every waiter with Closed. Idempotent."""
        with self.exchange.changed:
            self.exchange.closed = True
            self.exchange.changed.notify_all()
        self._wake_all()
        self._remote.close()

    def _send(self, update: VersionedParams) -> list[Delivery]:
        """Start the copies to every sampler, with one retry. Raises WeightsError if that fails."""
        try:
            return [send(link, update, checksum=self._checksum) for link in self.links]
        except Exception as error:
            self.exchange.count("transfer_retries")
            log.warning("version %d could not be sent; retrying: %s", update.version, error)
        try:
            return [send(link, update, checksum=self._checksum) for link in self.links]
        except Exception as error:
            raise WeightsError(
                f"version {update.version} could not be sent to the samplers, twice: {error}. They "
                f"still have version {self._published}, and no part of this one. Check the "
                "memory of their devices."
            ) from error

    def _wake_all(self) -> None:
        for end in self._ends:
            end.wake.set()

    def _num_bytes(self, deliveries: Sequence[Delivery]) -> int:
        """Return the number of bytes sent to one sampler."""
        if not deliveries:
            return self._remote.num_bytes
        return sum(leaf.nbytes for leaf in jax.tree.leaves(deliveries[0].update.params))


def _not_live(version: int, live_version: int, waited_s: float, *, empty: bool) -> WeightsError:
    if empty:
        return WeightsError(
            f"version {version} is not live in any sampler: none has joined within {waited_s:g} s "
            "(remote.wait_s). Start samplers, and resume the run."
        )
    return WeightsError(
        f"version {version} was not live in the sampler after {waited_s:.0f} s (it uses "
        f"{live_version}). Check the sampler's thread: it may hang or still be compiling."
    )
