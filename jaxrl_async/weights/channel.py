"""How weights reach the samplers: the trainer's thread publishes, each sampler's thread polls.

publish(v, params) ──Link──> staged (copying) ──poll: every array sound──> taken ──live(v)──┐
      ^                        ^  │               │                                         │
      │                        └──┘ torn: again   │                                         │
      └────────── may publish v + 1 <─────────────┘       on_live(lowest of all samplers) <─┘

An update is staged for all samplers or for none. A sampler takes it whole, and only once every
array is there and has the checksum of its source; until then the sampler draws from the weights
that it has. A sampler holds at most two sets of weights, and the trainer's side holds one more
until they are taken.

A sampler that is taken out leaves: no publish waits for it, and the newest weights are kept for the
replacement that rejoins in its place.

Samplers in processes of their own come and go (elsewhere.py): what serves them keeps the newest
weights where they can fetch them. No publish waits for one of these; the live version does, once it
has entered.
"""

import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import jax

from jaxrl_async.errors import WeightsError
from jaxrl_async.model.spec import Params
from jaxrl_async.ports.run import Clock
from jaxrl_async.types import VersionedParams
from jaxrl_async.weights.delivery import Delivery, send
from jaxrl_async.weights.elsewhere import NO_REMOTE, RemoteSamplers
from jaxrl_async.weights.exchange import ChannelStats, Exchange, Standing
from jaxrl_async.weights.link import Link
from jaxrl_async.weights.manifest import Manifest, compare, manifest_of

log = logging.getLogger(__name__)

LOOK_S = 0.1
"""How often a wait for live weights asks whether it is given up, seconds."""


@dataclass(slots=True, kw_only=True, eq=False)
class _End(Standing):
    """One local sampler's place at the channel. Changed under the channel's lock."""

    link: Link
    staged: Delivery | None = None
    taken: Delivery | None = None  # polled, but not live yet
    holder: int = 0  # number of the subscription that holds it; older ones are ignored
    wake: threading.Event = field(default_factory=threading.Event)  # a placeholder before `attach`

    @property
    def pending(self) -> bool:
        """Whether a sampler has yet to take its update."""
        return self.staged is not None and self.counts


class Subscription:
    """One sampler's end of the channel, a ports.WeightSource: used by its thread alone."""

    def __init__(self, exchange: Exchange, end: _End) -> None:
        self._exchange, self._end, self._number = exchange, end, end.holder

    @property
    def holds(self) -> bool:
        """Whether this end is still the sampler's; False once the sampler has left."""
        return self._number == self._end.holder

    @property
    def under_way(self) -> VersionedParams | None:
        """The update that is staged for this sampler, complete or not; None if there is none."""
        staged = self._end.staged
        return staged.update if staged is not None and self.holds else None

    def poll(self, *, wait: bool = False) -> VersionedParams | None:
        """Take the staged update once every array of it is there and sound; return None before.

        wait: finish the copy first. Never a mix of versions: an update is staged and taken whole.
        Raises WeightsError if it arrived torn twice.
        """
        end, delivery = self._end, self._end.staged
        if delivery is None or not self.holds:
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
            return delivery.sound
        return self.poll(wait=wait)  # a newer one was staged while this sampler joined

    def live(self, version: int) -> None:
        """Report that every new token of this sampler comes from this version."""
        with self._exchange.changed:
            if not self.holds:
                return
            self._end.live_version, self._end.taken = version, None
            self._exchange.raise_live()
        self._exchange.tell()

    def attach(self, wake: threading.Event) -> None:
        """Set this event at every publish and at close, and now if either has happened."""
        with self._exchange.changed:
            if not self.holds:
                return
            self._end.wake = wake
            if self._end.staged is not None or self._exchange.closed:
                wake.set()

    def leave(self) -> None:
        """Stop drawing here: no publish waits for this sampler, and the live version is the lowest
        of the others. Callable from any thread; idempotent."""
        with self._exchange.changed:
            if not self.holds:
                return
            end = self._end
            end.holder += 1
            end.counts = False
            end.staged, end.taken = end.staged or end.taken, None
            self._exchange.raise_live()
            self._exchange.changed.notify_all()
        self._exchange.tell()

    def rejoin(self) -> "Subscription":
        """Return the end for the replacement of this sampler, which has left.

        Its first poll gives the newest weights, or None if this sampler drew from them already.
        Raises Closed.
        """
        with self._exchange.changed:
            self._exchange.raise_if_closed()
            end = self._end
            assert not end.counts and end.holder == self._number + 1, (
                "it left, and nobody came since"
            )
            end.counts, end.wake = True, threading.Event()
            return Subscription(self._exchange, end)

    def _take(self, delivery: Delivery) -> bool:
        """Mark a sound update as taken, unless another has been staged meanwhile."""
        exchange, end = self._exchange, self._end
        with exchange.changed:
            if end.staged is not delivery or not self.holds:
                return False
            end.staged, end.taken = None, delivery.released()
            if exchange.all_taken:
                exchange.note_transfer(delivery.update.version)
            exchange.changed.notify_all()
            return True

    def _restage(self, old: Delivery, new: Delivery) -> Delivery:
        """Put the next state of the staged update in its place, and return it."""
        with self._exchange.changed:
            if self.holds and self._end.staged is old:
                self._end.staged = new
        return new

    def _repeat(self, delivery: Delivery, error: Exception) -> None:
        """Send a torn update once more, from the source that the trainer's side still holds.

        Raises WeightsError if that was the second try.
        """
        self._exchange.count("torn_transfers")
        version = delivery.update.version
        if delivery.repeated:
            raise WeightsError(
                f"version {version} did not arrive sound, twice, and was not used: {error}. Look "
                "at the devices and what connects them; the run can be resumed."
            ) from error
        log.warning("version %d did not arrive sound; once more: %s", version, error)
        self._exchange.count("transfer_retries")
        self._restage(delivery, delivery.repeat(self._end.link))
        self._end.wake.set()  # a sampler that has nothing else to do waits for it


class WeightChannel:
    """One trainer, any number of samplers; at most one update is under way to each.

    Each local sampler takes one `subscribe()` as its ports.WeightSource. Samplers in processes of
    their own enter the `exchange` by themselves.
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
        """Make one end per link.

        Args:
            links: The transfer to each local sampler.
            remote: What serves samplers in processes of their own; the channel closes it.
            on_live: Called with each version that has become live in every sampler, in rising
                order, outside the lock, on the thread of a sampler.
            expected: What the trainer publishes. None: what it publishes first.
            version: What the samplers were built with; it is live from the start.
            checksum: Compare what arrives with what was sent, on links that cross devices.
            count: Called with the name of each fault (metrics.fault_counts).
            clock: Seconds, monotone.
        """
        self.links = tuple(links)
        self._remote, self._expected, self._checksum = remote, expected, checksum
        self._ends = tuple(_End(link=link, live_version=version) for link in self.links)
        self.exchange = Exchange(
            standings=list(self._ends),
            live_version=version,
            on_live=on_live,
            count=count,
            clock=clock,
        )
        self._subscribed = 0
        self._published = version

    # ---- the trainer

    def begin(self, params: Params, probe_logprobs: Any = None, base: Params | None = None) -> None:
        """Let samplers in processes of their own fetch the weights that the run begins with.

        base: what they change if they are an adapter, as it is sent; it must stay as it is.
        """
        if base is not None:
            self._remote.begin(base)
        self._expected = self._expected or manifest_of(params)
        self._remote.publish(
            VersionedParams(version=self._published, params=params, probe_logprobs=probe_logprobs)
        )

    def publish(self, version: int, params: Params, probe_logprobs: Any = None) -> None:
        """Start the copies and return; wait only while a local sampler has yet to take the last
        update.

        params may be donated right after. Raises Closed, and WeightsError if the manifest differs
        or the copies could not be started twice: then no sampler gets any of it. If trainer and
        sampler share a device lock, call wait_taken() first, without the lock: a sampler that waits
        for the lock does not poll.
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
            self._published = version  # before any remote sampler can draw from it
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
        """Block until all samplers draw from `version`, or the wait is given up.

        Args:
            version: Published before.
            timeout_s: Longest wait, seconds. Where samplers come and go, it is counted from the
                last moment without any, plus the time of the tries that a transfer has; a time
                without any is bounded by remote.wait_s.
            given_up: Asked again and again, under the channel's lock; True ends the wait.

        Raises Closed, and WeightsError after the timeout.
        """
        exchange, remote = self.exchange, self._remote
        alone, since = False, time.monotonic()
        with exchange.changed:
            while exchange.live_version < version and not given_up():
                exchange.raise_if_closed()
                if alone != (remote.may_come and exchange.deserted):
                    alone, since = not alone, time.monotonic()
                limit_s = remote.wait_s if alone else timeout_s + remote.patience_s
                left_s = since + limit_s - time.monotonic()
                if left_s <= 0:
                    raise _not_live(version, exchange.live_version, limit_s, alone=alone)
                exchange.changed.wait(min(LOOK_S, left_s))

    # ---- any thread

    def subscribe(self) -> Subscription:
        """Return the next sampler's end. Raises WeightsError once there are no more links."""
        exchange = self.exchange
        with exchange.changed:
            if self._subscribed == len(self._ends):
                raise WeightsError(
                    f"the weight channel was made for {len(self._ends)} samplers, and all have "
                    "subscribed. Make it with one link for each sampler."
                )
            self._subscribed += 1
            return Subscription(exchange, self._ends[self._subscribed - 1])

    @property
    def live_version(self) -> int:
        """The version that every sampler draws from, or a newer one."""
        return self.exchange.live_version

    @property
    def published_version(self) -> int:
        """The newest version that was sent to the samplers."""
        return self._published

    def stats(self) -> ChannelStats:
        """Return a consistent reading."""
        return replace(self.exchange.stats, remote=self._remote.traffic())

    def close(self) -> None:
        """Wake every waiter with Closed. Idempotent."""
        with self.exchange.changed:
            self.exchange.closed = True
            self.exchange.changed.notify_all()
        self._wake_all()
        self._remote.close()

    def _send(self, update: VersionedParams) -> list[Delivery]:
        """Start the copies to every sampler, in two tries. Raises WeightsError after the second."""
        try:
            return [send(link, update, checksum=self._checksum) for link in self.links]
        except Exception as error:
            self.exchange.count("transfer_retries")
            log.warning("version %d could not be sent; once more: %s", update.version, error)
        try:
            return [send(link, update, checksum=self._checksum) for link in self.links]
        except Exception as error:
            raise WeightsError(
                f"version {update.version} could not be sent to the samplers, twice: {error}. They "
                f"still have version {self._published}, and no part of this one. Look at the "
                "memory of their devices."
            ) from error

    def _wake_all(self) -> None:
        for end in self._ends:
            end.wake.set()

    def _num_bytes(self, deliveries: Sequence[Delivery]) -> int:
        """Return the size of what one sampler gets."""
        if not deliveries:
            return self._remote.num_bytes
        return sum(leaf.nbytes for leaf in jax.tree.leaves(deliveries[0].update.params))


def _not_live(version: int, live_version: int, waited_s: float, *, alone: bool) -> WeightsError:
    if alone:
        return WeightsError(
            f"version {version} is live nowhere: no sampler has joined within {waited_s:g} s "
            "(remote.wait_s). Start samplers, and resume the run."
        )
    return WeightsError(
        f"version {version} was not live in the sampler after {waited_s:.0f} s (it draws from "
        f"{live_version}). Look at the sampler's thread: it may hang or still compile."
    )
