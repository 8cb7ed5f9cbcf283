"""The transfer of weights to one sampler, in the three steps that the weight channel schedules.

    params ──cast──> private copy ──move──> on the sampler's devices ──finish──> in its shardings
          trainer's thread         any thread, repeatable         sampler's thread

Weights that need no cast are moved directly; the private copy is then used only for a retry.

weights.local.Push is the link used in runs. Two threads must not dispatch collective programs to
the same devices concurrently, so `cast` runs on the trainer's thread and `finish` on the sampler's.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from jaxrl_async.model.spec import Params


class Link(Protocol):
    """The channel's interface of a transfer; `cast` and `move` never wait for the devices."""

    @property
    def crosses(self) -> bool:
        """True if `move` copies from device to device, so a copy may arrive corrupted."""
        ...

    def cast(self, params: Params) -> Params:
        """Return a private copy on the trainer's devices, in the sampler's dtypes."""
        ...

    def is_cast(self, params: Params) -> bool:
        """Return True if `cast` would only copy these weights, so `move` may take them directly."""
        ...

    def move(self, cast: Params) -> Params:
        """Copy the result of `cast` to the sampler's devices. Runs no program."""
        ...

    def finish(self, moved: Params) -> Params:
        """Return the arrived result of `move` in the sampler's shardings."""
        ...


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
