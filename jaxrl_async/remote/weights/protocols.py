"""The interfaces between weight transports and the logic that decides which version goes to which
sampler.

    trainer: Offering.offer ──where──> Offer ──session──> Fetching.fetch :sampler
                ^                                             │
                └── pieces, from the first source that has them

Transports know arrays, shards and addresses; outbox.py and receiver.py know versions and samplers.
"""

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from jaxrl_async.model.spec import Params

BASE = -1
"""Pseudo-version of the frozen base weights of adapters, which do not change."""


class Offering(Protocol):
    """The trainer's side of a transport."""

    @property
    def address(self) -> str:
        """HOST:PORT from which the pieces can be fetched; "": none (folder)."""
        ...

    def offer(self, version: int, params: Params) -> Mapping[str, Any]:
        """Make weights available until they are withdrawn; return the JSON that a Fetching needs.

        params: a private copy on the trainer's devices; this process holds its part. Waits for the
        arrays. Called on one thread, never on the trainer's.
        """
        ...

    def compares(self, params: Params) -> bool:
        """Return True if every sampler compares its copy with these exact arrays, because they are
        where the transport computes its checksums: in host memory or on the devices."""
        ...

    def withdraw(self, version: int) -> None:
        """Release a version that is no longer fetched. Idempotent."""
        ...

    def close(self) -> None:
        """Release everything. Idempotent."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Fetched:
    """Fetched weights."""

    params: Params  # the arrays, complete, in the sampler's shardings
    num_bytes: int  # fetched
    source: str  # of most of the bytes
    compared: bool = False  # the checksums of these exact arrays were compared, with no copy to a
    # device after that
    fallbacks: int = 0  # times that a faster transport failed and TCP was used instead


class Fetching(Protocol):
    """The sampler's side of a transport; it also relays what it has fetched."""

    @property
    def address(self) -> str:
        """HOST:PORT at which it relays weights; "": it does not."""
        ...

    def fetch(
        self,
        version: int,
        where: Mapping[str, object],
        sources: Sequence[str],
        abort: threading.Event,
    ) -> Fetched:
        """Fetch the pieces that this process's devices need, into arrays in the sampler's
        shardings, and compare their checksums with the trainer's.

        Args:
            version: of the weights, or BASE.
            where: returned by `Offering.offer`.
            sources: addresses to fetch from, best first. If a source fails, the next is used, and
                pieces that have arrived are kept.
            abort: set when a newer version is offered.

        Raises WeightsError for arrays of another layout, before any is transferred; if no source
        has them, if a checksum differs or if it was aborted.
        """
        ...

    def for_base(self, target: Params) -> "Fetching":
        """Return a Fetching for the frozen base (arrays as ShapeDtypeStructs with shardings). The
        base is relayed alongside the versions until either is closed."""
        ...

    def close(self) -> None:
        """Stop relaying, and release everything. Idempotent."""
        ...
