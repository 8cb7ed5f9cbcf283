"""Interfaces of the weights: where they are published, and where samplers get them."""

import threading
from collections.abc import Callable
from typing import Protocol

from jaxrl_async.types import (
    VersionedParams,
)


class WeightSource(Protocol):
    """The source of new weights for one sampler, polled between two decode blocks."""

    def poll(self, *, wait: bool = False) -> VersionedParams | None:
        """Return the newest complete version if it is newer than the last one returned, else None.

        Never blocks, unless wait=True (an idle sampler): it then completes a running transfer
        first.
        """

    def live(self, version: int) -> None:
        """Record that every new token of this sampler comes from this version."""

    def attach(self, wake: threading.Event) -> None:
        """Set this event whenever new weights arrive, and now if some already have."""

    def leave(self) -> None:
        """Stop waiting for this sampler, which no longer generates. Callable from any thread.
        Idempotent."""

    def rejoin(self) -> "WeightSource":
        """Return a source for the sampler that replaces this one, which has left. Its first poll
        gives the newest weights, or None if this sampler already used them. Raises Closed."""


class FixedWeights:
    """A WeightSource whose weights never change."""

    def poll(self, *, wait: bool = False) -> VersionedParams | None:
        """Return None."""
        return None

    def live(self, version: int) -> None:
        """Do nothing."""

    def attach(self, wake: threading.Event) -> None:
        """Do nothing: no weights will arrive."""

    def leave(self) -> None:
        """Do nothing: no update waits for this sampler."""

    def rejoin(self) -> "FixedWeights":
        """Return this source, which has no state."""
        return self


FIXED_WEIGHTS = FixedWeights()


class Publisher(Protocol):
    """The trainer side of the weight channel."""

    def publish(self, version: int, params: object, probe_logprobs: object = None) -> None:
        """Send weights to every sampler, device to device, without waiting for the copies."""

    def wait_taken(self) -> None:
        """Block until every sampler has taken the last published weights. Raises Closed."""

    def wait_live(
        self, version: int, timeout_s: float, given_up: Callable[[], bool] = lambda: False
    ) -> None:
        """Block until every sampler generates with this version, or `given_up` returns True. Raises
        WeightsError after timeout_s."""
