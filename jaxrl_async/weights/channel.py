"""The way of the weights: publish on the trainer's thread, poll on a sampler's, one flip between.

publish(v, params) ──Push──> staged (copying) ──poll: every array ready──> taken ──live(v)──┐
      ^                                           │                                         │
      └────────── may publish v + 1 <─────────────┘       on_live(lowest of all samplers) <─┘

Weights are there twice at most in a sampler: those it draws from and those that are staged.
"""

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax

from jaxrl_async.errors import Closed, WeightsError
from jaxrl_async.ports import Clock
from jaxrl_async.types import VersionedParams
from jaxrl_async.weights.local import Push
from jaxrl_async.weights.manifest import Manifest, compare, manifest_of

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


class Subscription:
    """One sampler's end of the channel, a ports.WeightSource: used by its thread alone."""

    def __init__(self, channel: "WeightChannel", push: Move, version: int) -> None:
        self._channel = channel
        self.push: Move = push.start if isinstance(push, Push) else push
        self.finish: Move | None = push.finish if isinstance(push, Push) and push.grows else None
        self.staged: VersionedParams | None = None
        self.finished = False  # whether `finish` has been applied to what is staged
        self.live_version = version
        self.wake: threading.Event | None = None

    def poll(self, *, wait: bool = False) -> VersionedParams | None:
        """The staged update once every array of it is there; None before.

        wait: finish the copy first. Never a mix of versions: it is staged whole and taken whole.
        """
        return self._channel._poll(self, wait)

    def live(self, version: int) -> None:
        """From now on every new token of this sampler comes from this version."""
        self._channel._set_live(self, version)

    def attach(self, wake: threading.Event) -> None:
        """Set this event at every publish and at close; now, where one has been already."""
        self._channel._attach(self, wake)


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
        clock: Clock = time.perf_counter,
    ) -> None:
        """push: params to arrays on the sampler's devices; one for each sampler where they differ.

        on_live is called on a sampler's thread, outside the lock, with the version that has become
        live in every sampler. expected: what the trainer publishes; null: as the first time.
        version: what the samplers were built with: it is live from the start.
        """
        pushes = [push] * num_samplers if callable(push) else list(push)
        self._on_live, self._expected, self._clock = on_live, expected, clock
        self._changed = threading.Condition()
        self._ends = [Subscription(self, p, version) for p in pushes]
        self._subscribed = 0
        self._live = self._published = version
        self._published_at: dict[int, float] = {}  # of versions that are not live everywhere
        self._closed = False
        self._stats = ChannelStats()

    # ---- the trainer

    def publish(self, version: int, params: Any, probe_logprobs: Any = None) -> None:
        """Start the copies and return; waits only while a sampler has not taken the update before.

        params may be donated right after. Raises Closed, WeightsError where the manifest differs.
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
        copies = [end.push(params) for end in self._ends]
        with self._changed:
            self._raise_if_closed()
            for end, copy in zip(self._ends, copies, strict=True):
                end.staged = VersionedParams(
                    version=version, params=copy, probe_logprobs=probe_logprobs
                )
                end.finished = end.finish is None
            self._published = version
            self._published_at[version] = start
            self._stats = replace(
                self._stats,
                published=self._stats.published + 1,
                transfer_bytes=sum(x.nbytes for x in jax.tree.leaves(copies[0])),
                publish_s=self._clock() - start,
                wait_s=waited_s,
            )
        self._wake_all()

    def wait_taken(self) -> None:
        """Block until every sampler has taken the last update. Raises Closed."""
        with self._changed:
            self._changed.wait_for(
                lambda: self._closed or all(end.staged is None for end in self._ends)
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
            return self._ends[self._subscribed - 1]

    def poll(self, *, wait: bool = False) -> VersionedParams | None:
        """Of the only sampler: see Subscription.poll."""
        return self._only().poll(wait=wait)

    def live(self, version: int) -> None:
        """Of the only sampler: see Subscription.live."""
        self._only().live(version)

    def attach(self, wake: threading.Event) -> None:
        """Of the only sampler: see Subscription.attach."""
        self._only().attach(wake)

    # ---- anybody

    @property
    def live_version(self) -> int:
        """What every sampler draws from, or something newer."""
        return self._live

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
        return self._ends[0]

    def _attach(self, end: Subscription, wake: threading.Event) -> None:
        with self._changed:
            end.wake = wake
            if end.staged is not None or self._closed:
                wake.set()

    def _poll(self, end: Subscription, wait: bool) -> VersionedParams | None:
        staged = end.staged  # set by publish only while it is None, so this thread may work on it
        if staged is None or not _arrived(staged, wait):
            return None
        if end.finish is not None and not end.finished:
            end.staged = staged = replace(staged, params=end.finish(staged.params))
            end.finished = True
            if not _arrived(staged, wait):
                return None
        with self._changed:
            end.staged = None
            if all(e.staged is None for e in self._ends):
                since = self._published_at.get(staged.version, self._clock())
                self._stats = replace(self._stats, transfer_s=self._clock() - since)
            self._changed.notify_all()
        return staged

    def _set_live(self, end: Subscription, version: int) -> None:
        with self._changed:
            end.live_version = version
            lowest = min(e.live_version for e in self._ends)
            if lowest <= self._live:
                return
            self._live = lowest
            since = self._published_at.get(lowest, self._clock())
            self._published_at = {v: t for v, t in self._published_at.items() if v > lowest}
            self._stats = replace(self._stats, live_s=self._clock() - since)
            self._changed.notify_all()
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
