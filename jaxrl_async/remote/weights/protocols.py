"""The seam between what weights travel over and who sends which version to whom.

    trainer: Offering.offer ──where──> Offer ──session──> Fetching.fetch :sampler
                ^                                             │
                └── pieces, from the first source that has them

Transports know arrays, shards and addresses; outbox.py and source.py know versions and samplers.
"""

import threading
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from jaxrl_async.model.spec import Params

BASE = -1
"""In a version's place: the frozen weights that adapters change, which do not change themselves."""


class Offering(Protocol):
    """The trainer's side of a transport."""

    @property
    def address(self) -> str:
        """HOST:PORT from which the pieces can be fetched; "": there is none (folder)."""
        ...

    def offer(self, version: int, params: Params) -> Mapping[str, Any]:
        """Make weights available until they are withdrawn; return what a Fetching needs, as JSON.

        params: a private copy, on the trainer's devices, of which this process holds its part.
        Waits for the arrays. Called on one thread, never the trainer's.
        """
        ...

    def compares(self, params: Params) -> bool:
        """Return whether every sampler compares what it gets with these very arrays: they lie where
        the transport takes its checksums, in host memory or on the devices."""
        ...

    def withdraw(self, version: int) -> None:
        """Let go of a version: nobody fetches it any more. Idempotent."""
        ...

    def close(self) -> None:
        """Let go of everything. Idempotent."""
        ...


class Fetching(Protocol):
    """The sampler's side of a transport; it passes on what it has fetched, too."""

    @property
    def address(self) -> str:
        """HOST:PORT at which it passes weights on; "": it does not."""
        ...

    def fetch(
        self, version: int, where: Mapping[str, Any], sources: Sequence[str], abort: threading.Event
    ) -> "Fetched":
        """Fetch the pieces that this process's devices need, into arrays in the sampler's
        shardings, and compare their checksums with the trainer's.

        Args:
            version: of the weights, or BASE.
            where: what `Offering.offer` returned.
            sources: addresses to fetch from, the best first; a source that fails is left for the
                next, and pieces that have come are kept.
            abort: set when a newer version is offered.

        Raises WeightsError if no source has them, if a checksum differs or if it was aborted.
        """
        ...

    def for_base(self, target: Params) -> "Fetching":
        """Return what fetches the frozen base (arrays as ShapeDtypeStructs with shardings), which
        is passed on beside the versions until either is closed."""
        ...

    def close(self) -> None:
        """Stop passing on, and let go of everything. Idempotent."""
        ...


class Fetched(Protocol):
    """Weights that have come."""

    @property
    def params(self) -> Params:
        """The arrays, complete, in the sampler's shardings."""
        ...

    @property
    def num_bytes(self) -> int:
        """Bytes that were fetched."""
        ...

    @property
    def source(self) -> str:
        """Where most of them came from."""
        ...

    @property
    def compared(self) -> bool:
        """Whether the checksums of these very arrays were compared: nothing was copied to a device
        after that."""
        ...

    @property
    def fallbacks(self) -> int:
        """How often one way of the transport failed, and TCP took its place."""
        ...
