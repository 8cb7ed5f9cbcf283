"""The private copy of the weights for the samplers, in their dtypes or in 8 bits."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from jaxrl_async.model.spec import Params


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversion:
    """The conversion of the trainer's weights for the samplers. All arrays are new."""

    dtype: Any = None  # of floating-point weights; None: unchanged
    convert: Callable[[Params], Params] | None = None  # replaces the cast

    def copied(self, params: Params) -> Params:
        """Copy and cast, inside a compiled program; the source may be donated immediately
        afterwards."""
        if self.convert is not None:
            return self.convert(params)
        return jax.tree.map(lambda p: jnp.array(p, self._dtype_of(p), copy=True), params)

    def keeps(self, params: Params) -> bool:
        """Return True if `copied` only copies, and changes nothing."""
        leaves = jax.tree.leaves(params)
        return self.convert is None and all(leaf.dtype == self._dtype_of(leaf) for leaf in leaves)

    def _dtype_of(self, leaf: jax.Array) -> Any:
        floating = jnp.issubdtype(leaf.dtype, jnp.floating)
        return self.dtype if self.dtype is not None and floating else leaf.dtype


class PrivateCopy:
    """The compiled copy for samplers in separate processes, in the trainer's shardings."""

    def __init__(self, shardings: Any, conversion: Conversion) -> None:
        """Create the copy. shardings: pytree of the trainer's shardings for the conversion's
        result."""
        self._copy = jax.jit(conversion.copied, out_shardings=shardings)

    def __call__(self, params: Params) -> Params:
        """Dispatch the copy and return it. params may be donated immediately afterwards."""
        copied: Params = self._copy(params)
        return copied
