"""The transfer of weights to one sampler, in the three steps that the weight channel times.

    params ──cast──> private copy ──move──> on the sampler's devices ──finish──> in its shardings
          trainer's thread         any thread, repeatable         sampler's thread

Weights that need no cast are moved at once, and the private copy is for a second try alone.

weights.local.Push is the product's link. Two threads must not dispatch collective programs to the
same devices at once: hence `cast` runs on the trainer's thread and `finish` on the sampler's.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from jaxrl_async.model.spec import Params


class Link(Protocol):
    """What the channel uses of a transfer; `cast` and `move` never wait for the devices."""

    @property
    def crosses(self) -> bool:
        """Whether `move` copies from device to device, so that a copy may arrive torn."""
        ...

    def cast(self, params: Params) -> Params:
        """Return a private copy on the trainer's devices, in the sampler's dtypes."""
        ...

    def is_cast(self, params: Params) -> bool:
        """Return whether these weights are what `cast` would copy, so that `move` may take them."""
        ...

    def move(self, cast: Params) -> Params:
        """Copy what `cast` returned to the sampler's devices. Runs no program."""
        ...

    def finish(self, moved: Params) -> Params:
        """Return what `move` returned, which has arrived, in the sampler's shardings."""
        ...


@dataclass(frozen=True, slots=True)
class FunctionLink:
    """A link made of one function that moves the weights: no private copy, no checksum."""

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
