"""The way of the weights: publish on the trainer's thread, poll on the sampler's, one flip between.

publish(v, params) ──Push──> staged (copying) ──poll: every array ready──> taken ──live(v)──> on_live
"""

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import jax

from jaxrl_async.errors import Closed, WeightsError
from jaxrl_async.ports import Clock
from jaxrl_async.types import VersionedParams
from jaxrl_async.weights.manifest import Manifest, compare, manifest_of


@dataclass(frozen=True, slots=True, kw_only=True)
class ChannelStats:
    """Of all transfers so far, and of the last."""

    published: int = 0
    transfer_bytes: int = 0  # of one copy of the weights
    publish_s: float = 0.0  # the trainer's time in the last publish, waiting included, seconds
    transfer_s: float = 0.0  # from the last publish to its weights being live, seconds


class WeightChannel:
    """One trainer, one sampler; at most one update under way. The sampler side is a WeightSource."""

    def __init__(
        self,
        push: Callable[[Any], Any],
        *,
        on_live: Callable[[int], None] = lambda version: None,
        expected: Manifest | None = None,
        version: int = 0,
        clock: Clock = time.perf_counter,
    ) -> None:
        """on_live is called on the sampler's thread, outside the lock; expected: what the trainer publishes."""
        self._push, self._on_live, self._expected, self._clock = push, on_live, expected, clock
        self._changed = threading.Condition()
        self._staged: VersionedParams | None = None
        self._live = version
        self._closed = False
        self._wake: threading.Event | None = None
        self._published_at = 0.0
        self._stats = ChannelStats()

    # ---- the trainer

    def publish(self, version: int, params: Any, probe_logprobs: Any = None) -> None:
        """Start the copy and return; waits only while the update before has not been taken.

        params may be donated right after. Raises Closed, WeightsError where the manifest differs.
        """
        start = self._clock()
        manifest = manifest_of(params)
        if self._expected is not None:
            compare(manifest, self._expected)
        with self._changed:
            self._changed.wait_for(lambda: self._closed or self._staged is None)
            self._raise_if_closed()
        staged = VersionedParams(
            version=version, params=self._push(params), probe_logprobs=probe_logprobs
        )
        with self._changed:
            self._raise_if_closed()
            self._staged = staged
            self._published_at = start
            self._stats = replace(
                self._stats,
                published=self._stats.published + 1,
                transfer_bytes=manifest.num_bytes,
                publish_s=self._clock() - start,
            )
        if self._wake is not None:
            self._wake.set()

    def wait_live(self, version: int, timeout_s: float) -> None:
        """Block until the sampler draws from `version`. Raises Closed, WeightsError after timeout_s."""
        with self._changed:
            done = self._changed.wait_for(lambda: self._closed or self._live >= version, timeout_s)
            if self._live >= version:
                return
            self._raise_if_closed()
            if not done:
                raise WeightsError(
                    f"version {version} was not live in the sampler after {timeout_s:.0f} s (it draws from "
                    f"{self._live}). Look at the sampler's thread: a block may hang or still compile."
                )

    # ---- the sampler

    def attach(self, wake: threading.Event) -> None:
        """Set this event at every publish."""
        self._wake = wake

    def poll(self, *, wait: bool = False) -> VersionedParams | None:
        """The staged update once every array of it is there; None before. wait: finish the copy first."""
        with self._changed:
            staged = self._staged
        if staged is None:
            return None
        leaves = jax.tree.leaves(staged.params)
        if wait:
            jax.block_until_ready(leaves)
        elif not all(leaf.is_ready() for leaf in leaves):
            return None
        with self._changed:
            self._staged = None
            self._changed.notify_all()
        return staged

    def live(self, version: int) -> None:
        """From now on every new token comes from this version."""
        with self._changed:
            self._live = version
            self._stats = replace(self._stats, transfer_s=self._clock() - self._published_at)
            self._changed.notify_all()
        self._on_live(version)

    # ---- anybody

    @property
    def live_version(self) -> int:
        """What the sampler draws from."""
        return self._live

    def stats(self) -> ChannelStats:
        """A consistent reading."""
        return self._stats

    def close(self) -> None:
        """Wake every waiter with Closed. Idempotent."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        if self._wake is not None:
            self._wake.set()

    def _raise_if_closed(self) -> None:
        if self._closed:
            raise Closed("the weight channel is closed: the run is stopping")
