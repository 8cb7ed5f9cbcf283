"""The private copy of the weights that samplers get: in their dtypes, or in 8 bits."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from jaxrl_async.model.spec import Params


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversion:
    """What is made of the trainer's weights for the samplers: all new arrays."""

    dtype: Any = None  # of floating-point weights; None: as they are
    convert: Callable[[Params], Params] | None = None  # replaces the cast

    def copied(self, params: Params) -> Params:
        """Copy and cast, inside a compiled program: the source may be donated right after."""
        if self.convert is not None:
            return self.convert(params)
        return jax.tree.map(lambda p: jnp.array(p, self._dtype_of(p), copy=True), params)

    def keeps(self, params: Params) -> bool:
        """Return whether `copied` changes nothing: whether it copies alone."""
        leaves = jax.tree.leaves(params)
        return self.convert is None and all(leaf.dtype == self._dtype_of(leaf) for leaf in leaves)

    def _dtype_of(self, leaf: jax.Array) -> Any:
        floating = jnp.issubdtype(leaf.dtype, jnp.floating)
        return self.dtype if self.dtype is not None and floating else leaf.dtype


class PrivateCopy:
    """The compiled copy for samplers in processes of their own: in the trainer's shardings."""

    def __init__(self, shardings: Any, conversion: Conversion) -> None:
        """Plan the copy; shardings: pytree of the trainer's, for what the conversion returns."""
        self._copy = jax.jit(conversion.copied, out_shardings=shardings)

    def __call__(self, params: Params) -> Params:
        """Return the copy before it is made. params may be donated right after."""
        copied: Params = self._copy(params)
        return copied
