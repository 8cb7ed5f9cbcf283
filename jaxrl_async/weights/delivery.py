"""The transfer of one update to one sampler. Immutable: each step returns the next state.

send ──all arrays there──> arrived ──finish──> finished ──checksums agree──> valid
  ^                                                                │
  └───────────────────────── repeat, once ────────────── corrupted ┘
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Protocol

import jax

from jaxrl_async.errors import WeightsError
from jaxrl_async.model.spec import Params
from jaxrl_async.types import VersionedParams
from jaxrl_async.weights.manifest import Sums, manifest_of


class Link(Protocol):
    """The channel's interface of a transfer; `cast` and `move` never wait for the devices.

    params ──cast──> private copy ──move──> on the sampler's devices ──finish──> in its shardings
          trainer's thread         any thread, repeatable         sampler's thread

    Weights that need no cast are moved directly; the private copy is then used only for a retry.
    Two threads must not dispatch collective programs to the same devices concurrently, so `cast`
    runs on the trainer's thread and `finish` on the sampler's. Runs use weights.local.Push.
    """

    @property
    def crosses(self) -> bool:
        """True if `move` copies from device to device, so a copy may arrive corrupted."""

    def cast(self, params: Params) -> Params:
        """Return a private copy on the trainer's devices, in the sampler's dtypes."""

    def is_cast(self, params: Params) -> bool:
        """Return True if `cast` would only copy these weights, so `move` may take them directly."""

    def move(self, cast: Params) -> Params:
        """Copy the result of `cast` to the sampler's devices. Runs no program."""

    def finish(self, moved: Params) -> Params:
        """Return the arrived result of `move` in the sampler's shardings."""


@dataclass(frozen=True, slots=True)
class FunctionLink:
    """A link with one function that moves the weights, without a private copy or checksums."""

    function: Callable[[Params], Params]

    @property
    def crosses(self) -> bool:
        """See Link."""
        return False

    def cast(self, params: Params) -> Params:
        """Return the weights themselves."""
        return params

    def is_cast(self, params: Params) -> bool:
        """See Link."""
        return False

    def move(self, cast: Params) -> Params:
        """Call the function."""
        return self.function(cast)

    def finish(self, moved: Params) -> Params:
        """Return the weights themselves."""
        return moved


@dataclass(frozen=True, slots=True, kw_only=True)
class Delivery:
    """The transfer of one update to one sampler."""

    update: VersionedParams  # params: on the sampler's devices once they have arrived
    held: Params  # the source of `move`, on the trainer's devices, kept for a retry
    sums: Sums | None  # checksums of `held`; None: arrays are not compared
    finished: bool = False  # the link's `finish` was applied
    repeated: bool = False  # this is the retry

    def arrived(self, *, wait: bool = False) -> bool:
        """Return True if all arrays have arrived, including the trainer's log-probs on the probe.

        wait: block until all have arrived.
        """
        leaves = jax.tree.leaves((self.update.params, self.update.probe_logprobs))
        if wait:
            jax.block_until_ready(leaves)
        # NumPy arrays have no is_ready: they are always ready
        return all(leaf.is_ready() for leaf in leaves if hasattr(leaf, "is_ready"))

    def finish(self, link: Link) -> "Delivery":
        """Apply the link's last step, on the sampler's thread."""
        update = replace(self.update, params=link.finish(self.update.params))
        return replace(self, update=update, finished=True)

    def check(self) -> None:
        """Raise WeightsError unless the arrays have the checksums of their source."""
        if self.sums is None:
            return
        sent, received = self.sums.read(), Sums(self.update.params).read()
        if sent is None or received is None:
            raise WeightsError("copies of one array differ between devices")
        if (sent != received).any():
            names = [name for name, _, _ in manifest_of(self.update.params).entries]
            wrong = [n for n, a, b in zip(names, sent, received, strict=True) if a != b]
            raise WeightsError(
                f"{len(wrong)} of {len(names)} arrays differ from the sent ones, first {wrong[0]!r}"
            )

    def repeat(self, link: Link) -> "Delivery":
        """Move the weights a second time."""
        update = replace(self.update, params=link.move(self.held))
        return replace(self, update=update, finished=False, repeated=True)

    @property
    def verified(self) -> VersionedParams:
        """The update, after `check` has passed."""
        return replace(self.update, compared=self.update.compared or self.sums is not None)

    def released(self) -> "Delivery":
        """Release the source: the update has been verified."""
        return replace(self, update=self.verified, held=None, sums=None)


def send(link: Link, update: VersionedParams, *, checksum: bool) -> Delivery:
    """Start the copies of an update with the trainer's params to one sampler."""
    moved = link.move(update.params) if link.is_cast(update.params) else None
    held = link.cast(update.params)
    return Delivery(
        update=replace(update, params=link.move(held) if moved is None else moved),
        held=held,
        sums=Sums(held) if checksum and link.crosses else None,
    )
