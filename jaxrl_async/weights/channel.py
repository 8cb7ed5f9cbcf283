"""The way of the weights: publish on the trainer's thread, poll on a sampler's, one flip between.

publish(v, params) ──Push──> staged (copying) ──poll: every array sound──> taken ──live(v)──┐
      ^                        ^  │               │                                         │
      │                        └──┘ torn: again   │                                         │
      └────────── may publish v + 1 <─────────────┘       on_live(lowest of all samplers) <─┘

Staged for all samplers or for none; taken whole, and only where every array is there and adds up to
the checksum of what was sent. Until then the sampler draws from the weights it has. Weights are
there twice at most in a sampler, and once more on the trainer's side until they are taken.

A sampler that is taken out leaves: nobody waits for it, and the newest weights lie ready for the
one that rejoins in its place.
"""

import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax

from jaxrl_async.errors import Closed, WeightsError
from jaxrl_async.ports import Clock
from jaxrl_async.types import VersionedParams
from jaxrl_async.weights.checksum import Sums
from jaxrl_async.weights.local import Push
from jaxrl_async.weights.manifest import Manifest, compare, manifest_of

log = logging.getLogger(__name__)

Move = Callable[[Any], Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class ChannelStats:
    """Of the last transfer, but for `published`."""

    published: int = 0  # updates since the start
    transfer_bytes: int = 0  # moved to one sampler
    publish_s: float = 0.0  # the trainer's time in publish, waiting included, seconds
    wait_s: float = 0.0  # of that, until the update before was taken, seconds
    transfer_s: float = 0.0  # from publish to complete, as the samplers' polls saw it, seconds
    live_s: float = 0.0  # from publish to live in every sampler, seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class _Sent:
    """One update on its way to one sampler."""

    update: VersionedParams  # params: on the sampler's devices, once they are there
    held: Any  # what was moved: on the trainer's devices, to be moved again
    sums: Sums | None  # of it; None: not compared
    finished: bool  # whether `finish` has been applied to params
    again: bool = False  # moved for the second time


class _End:
    """One sampler's place at the channel. Changed under the channel's lock."""

    def __init__(self, push: Move, version: int) -> None:
        self.cast: Move = push.cast if isinstance(push, Push) else lambda params: params
        self.move: Move = push.move if isinstance(push, Push) else push
        self.finish: Move | None = push.finish if isinstance(push, Push) and push.grows else None
        self.crosses = isinstance(push, Push) and not push.stays  # from devices to others
        self.staged: _Sent | None = None
        self.taken: _Sent | None = None  # polled, and not live yet
        self.live_version = version
        self.holder = 0  # number of the subscription that holds it: of older ones nothing counts
        self.away = False  # nobody draws here now
        self.wake: threading.Event | None = None


class Subscription:
    """One sampler's end of the channel, a ports.WeightSource: used by its thread alone."""

    def __init__(self, channel: "WeightChannel", end: _End) -> None:
        self._channel, self._end, self._number = channel, end, end.holder

    def poll(self, *, wait: bool = False) -> VersionedParams | None:
        """The staged update once every array of it is there and sound; None before.

        wait: finish the copy first. Never a mix of versions: it is staged whole and taken whole.
        Raises WeightsError where it did not arrive sound, twice.
        """
        return self._channel._poll(self, wait)

    def live(self, version: int) -> None:
        """From now on every new token of this sampler comes from this version."""
        self._channel._set_live(self, version)

    def attach(self, wake: threading.Event) -> None:
        """Set this event at every publish and at close; now, where one has been already."""
        self._channel._attach(self, wake)

    def leave(self) -> None:
        """Nobody draws here any more: no update waits for this sampler, and `live` is the lowest
        of the others. From any thread. Idempotent."""
        self._channel._leave(self)

    def rejoin(self) -> "Subscription":
        """For a sampler in the place of this one, which has left: the first poll gives the newest
        weights, None where this one drew from them already. Raises Closed."""
        return self._channel._rejoin(self)

    @property
    def holds(self) -> bool:
        """Whether this is the sampler's end still; False once it has left."""
        return self._number == self._end.holder


class WeightChannel:
    """One trainer, any number of samplers; at most one update under way to each.

    With one sampler the channel itself is its WeightSource; else each takes a subscribe().
    """

    def __init__(
        self,
        push: Move | Sequence[Move],
        *,
        on_live: Callable[[int], None] = lambda version: None,
        expected: Manifest | None = None,
        version: int = 0,
        num_samplers: int = 1,
        checksum: bool = False,
        count: Callable[[str], None] = lambda name: None,
        clock: Clock = time.perf_counter,
    ) -> None:
        """push: params to arrays on the sampler's devices; one for each sampler where they differ.

        on_live is called outside the lock, on the thread of the sampler that was last, with the
        version that has become live in every sampler. checksum: compare what a Push moves with what
        it moved from. count: told the name of each fault (metrics.faults). expected: what the
        trainer publishes; null: as the first time.
        version: what the samplers were built with: it is live from the start.
        """
        pushes = [push] * num_samplers if callable(push) else list(push)
        self._on_live, self._expected, self._clock = on_live, expected, clock
        self._checksum, self._count = checksum, count
        self._changed = threading.Condition()
        self._ends = [_End(p, version) for p in pushes]
        self._first = Subscription(self, self._ends[0])
        self._subscribed = 0
        self._live = self._published = version
        self._published_at: dict[int, float] = {}  # of versions that are not live everywhere
        self._closed = False
        self._stats = ChannelStats()

    # ---- the trainer

    def publish(self, version: int, params: Any, probe_logprobs: Any = None) -> None:
        """Start the copies and return; waits only while a sampler has not taken the update before.

        params may be donated right after. Raises Closed, and WeightsError where the manifest
        differs or the copies could not be started, twice: then no sampler gets any of it.
        Where trainer and sampler take turns, call wait_taken() first, outside the turn: a sampler
        that waits for its turn does not poll.
        """
        start = self._clock()
        assert version > self._published, f"version {version} after {self._published}"
        manifest = manifest_of(params)
        self._expected = self._expected or manifest
        compare(manifest, self._expected)
        self.wait_taken()
        waited_s = self._clock() - start
        sent = self._sent(version, params, probe_logprobs)
        with self._changed:
            self._raise_if_closed()
            for end, one in zip(self._ends, sent, strict=True):
                end.staged = one
            self._published = version
            self._published_at[version] = start
            self._stats = replace(
                self._stats,
                published=self._stats.published + 1,
                transfer_bytes=sum(x.nbytes for x in jax.tree.leaves(sent[0].update.params)),
                publish_s=self._clock() - start,
                wait_s=waited_s,
            )
        self._wake_all()

    def wait_taken(self) -> None:
        """Block until every sampler has taken the last update. Raises Closed."""
        with self._changed:
            self._changed.wait_for(
                lambda: self._closed or all(e.away or e.staged is None for e in self._ends)
            )
            self._raise_if_closed()

    def wait_live(self, version: int, timeout_s: float) -> None:
        """Block until all samplers draw from `version`. Raises Closed, WeightsError if late."""
        with self._changed:
            self._changed.wait_for(lambda: self._closed or self._live >= version, timeout_s)
            if self._live >= version:
                return
            self._raise_if_closed()
            raise WeightsError(
                f"version {version} was not live in the sampler after {timeout_s:.0f} s (it draws "
                f"from {self._live}). Look at the sampler's thread: it may hang or still compile."
            )

    # ---- the samplers

    def subscribe(self) -> Subscription:
        """The next sampler's end. Raises WeightsError where every one is taken."""
        with self._changed:
            if self._subscribed == len(self._ends):
                raise WeightsError(
                    f"the weight channel was made for {len(self._ends)} samplers, and all have "
                    "subscribed. Make it with a larger num_samplers."
                )
            self._subscribed += 1
            return Subscription(self, self._ends[self._subscribed - 1])

    def poll(self, *, wait: bool = False) -> VersionedParams | None:
        """Of the only sampler: see Subscription.poll."""
        return self._only().poll(wait=wait)

    def live(self, version: int) -> None:
        """Of the only sampler: see Subscription.live."""
        self._only().live(version)

    def attach(self, wake: threading.Event) -> None:
        """Of the only sampler: see Subscription.attach."""
        self._only().attach(wake)

    def leave(self) -> None:
        """Of the only sampler: see Subscription.leave."""
        self._only().leave()

    def rejoin(self) -> Subscription:
        """Of the only sampler: see Subscription.rejoin."""
        return self._only().rejoin()

    # ---- anybody

    @property
    def live_version(self) -> int:
        """What every sampler draws from, or something newer."""
        return self._live

    @property
    def published_version(self) -> int:
        """The newest that the samplers were sent."""
        return self._published

    def stats(self) -> ChannelStats:
        """A consistent reading."""
        return self._stats

    def close(self) -> None:
        """Wake every waiter with Closed. Idempotent."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._wake_all()

    # ---- inside

    def _only(self) -> Subscription:
        assert len(self._ends) == 1, "several samplers: each uses its own subscribe()"
        return self._first

    def _sent(self, version: int, params: Any, probe_logprobs: Any) -> list[_Sent]:
        """The update on its way to every sampler; tried twice. Raises WeightsError."""
        try:
            return [self._send(end, version, params, probe_logprobs) for end in self._ends]
        except Exception as error:
            self._count("transfer_retries")
            log.warning("version %d could not be sent; once more: %s", version, error)
        try:
            return [self._send(end, version, params, probe_logprobs) for end in self._ends]
        except Exception as error:
            raise WeightsError(
                f"version {version} could not be sent to the samplers, twice: {error}. They still "
                f"have version {self._published}, and no part of this one. Look at the memory of "
                "their devices."
            ) from error

    def _send(self, end: _End, version: int, params: Any, probe_logprobs: Any) -> _Sent:
        held = end.cast(params)
        return _Sent(
            update=VersionedParams(
                version=version, params=end.move(held), probe_logprobs=probe_logprobs
            ),
            held=held,
            sums=Sums(held) if self._checksum and end.crosses else None,
            finished=end.finish is None,
        )

    def _attach(self, by: Subscription, wake: threading.Event) -> None:
        with self._changed:
            if not by.holds:
                return
            by._end.wake = wake
            if by._end.staged is not None or self._closed:
                wake.set()

    def _poll(self, by: Subscription, wait: bool) -> VersionedParams | None:
        end, sent = by._end, by._end.staged
        if sent is None or not by.holds:
            return None
        try:
            if not _arrived(sent.update, wait):
                return None
            if end.finish is not None and not sent.finished:
                finished = replace(sent.update, params=end.finish(sent.update.params))
                sent = self._restage(by, sent, replace(sent, update=finished, finished=True))
                if not _arrived(sent.update, wait):
                    return None
            if sent.sums is not None:
                _compare(sent)
        except (jax.errors.JaxRuntimeError, WeightsError) as error:
            self._send_again(by, sent, error)
            return self._poll(by, wait) if wait else None
        with self._changed:
            if end.staged is sent and by.holds:
                end.staged, end.taken = None, replace(sent, held=None, sums=None)
                if all(e.away or e.staged is None for e in self._ends):
                    since = self._published_at.get(sent.update.version, self._clock())
                    self._stats = replace(self._stats, transfer_s=self._clock() - since)
                self._changed.notify_all()
                return sent.update
        return self._poll(by, wait)  # a newer one was staged while this sampler joined

    def _restage(self, by: Subscription, old: _Sent, new: _Sent) -> _Sent:
        with self._changed:
            if by.holds and by._end.staged is old:
                by._end.staged = new
        return new

    def _send_again(self, by: Subscription, sent: _Sent, error: Exception) -> None:
        """The second try, from what the trainer's side still holds. Raises WeightsError after
        it."""
        self._count("torn_transfers")
        version = sent.update.version
        if sent.again:
            raise WeightsError(
                f"version {version} did not arrive sound, twice, and was not used: {error}. Look "
                "at the devices and what connects them; the run can be resumed."
            ) from error
        log.warning("version %d did not arrive sound; once more: %s", version, error)
        self._count("transfer_retries")
        moved = replace(sent.update, params=by._end.move(sent.held))
        again = replace(sent, update=moved, finished=by._end.finish is None, again=True)
        self._restage(by, sent, again)
        if by._end.wake is not None:
            by._end.wake.set()  # a sampler that has nothing else to do waits for it

    def _set_live(self, by: Subscription, version: int) -> None:
        with self._changed:
            if not by.holds:
                return
            by._end.live_version, by._end.taken = version, None
            lowest = self._lowest()
        self._tell_live(lowest)

    def _leave(self, by: Subscription) -> None:
        with self._changed:
            if not by.holds:
                return
            end = by._end
            end.holder += 1
            end.away = True
            end.staged, end.taken = end.staged or end.taken, None
            lowest = self._lowest()
            self._changed.notify_all()
        self._tell_live(lowest)

    def _rejoin(self, by: Subscription) -> Subscription:
        with self._changed:
            self._raise_if_closed()
            end = by._end
            assert end.away and end.holder == by._number + 1, "it left, and nobody came since"
            end.away, end.wake = False, None
            return Subscription(self, end)

    def _lowest(self) -> int | None:
        """The version that has just become live everywhere; None: none has."""
        lowest = min((e.live_version for e in self._ends if not e.away), default=self._live)
        if lowest <= self._live:
            return None
        self._live = lowest
        since = self._published_at.get(lowest, self._clock())
        self._published_at = {v: t for v, t in self._published_at.items() if v > lowest}
        self._stats = replace(self._stats, live_s=self._clock() - since)
        self._changed.notify_all()
        return lowest

    def _tell_live(self, lowest: int | None) -> None:
        if lowest is not None:
            self._on_live(lowest)

    def _wake_all(self) -> None:
        for end in self._ends:
            if end.wake is not None:
                end.wake.set()

    def _raise_if_closed(self) -> None:
        if self._closed:
            raise Closed("the weight channel is closed: the run is stopping")


def _arrived(update: VersionedParams, wait: bool) -> bool:
    """Whether every array is there, the trainer's log-probs on the probe too. wait: until it is."""
    leaves = jax.tree.leaves((update.params, update.probe_logprobs))
    if wait:
        jax.block_until_ready(leaves)
    return all(leaf.is_ready() for leaf in leaves if hasattr(leaf, "is_ready"))


def _compare(sent: _Sent) -> None:
    """Raise WeightsError unless what arrived adds up to what was sent."""
    assert sent.sums is not None
    theirs, ours = sent.sums.read(), Sums(sent.update.params).read()
    if theirs is None or ours is None:
        raise WeightsError("copies of one array differ between devices")
    if (theirs != ours).any():
        names = [name for name, _, _ in manifest_of(sent.update.params).entries]
        wrong = [name for name, a, b in zip(names, theirs, ours, strict=True) if a != b]
        raise WeightsError(
            f"{len(wrong)} of {len(names)} arrays differ from what was sent, first {wrong[0]!r}"
        )
