"""Checksums of weights on their devices: 4 bytes for each array, whatever its sharding.

    sum over all elements of bits * (2 * place + 1), modulo 2^32

`place` is the element's index in the whole, flattened array, so that shards add up to the same
number on any mesh, and a block that was moved does not. The factor is odd: no single element can
change unseen. Each shard is summed on its own device, without collectives, so any thread may ask.
"""

import math
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from numpy.typing import NDArray

Checksum = NDArray[np.uint32]
"""[arrays] in tree order."""


class Sums:
    """Checksums of a tree, being computed: the constructor does not wait for them."""

    def __init__(self, params: Any) -> None:
        self._num_arrays = 0
        self._sums: list[tuple[list[tuple[int, Any]], Array]] = []  # (array, its shard's offsets)
        by_device: dict[Any, list[tuple[int, Any, Any]]] = {}
        for leaf in jax.tree.leaves(params):
            for shard in jnp.asarray(leaf).addressable_shards:
                parts = by_device.setdefault(shard.device, [])
                parts.append((self._num_arrays, shard, leaf.shape))
            self._num_arrays += 1
        for parts in by_device.values():
            offsets = [[s.start or 0 for s in shard.index] for _, shard, _ in parts]
            sums = _sums_of(
                [shard.data for _, shard, _ in parts],
                [np.asarray(o, np.uint32) for o in offsets],
                tuple(_strides(shape) for _, _, shape in parts),
            )
            places = [(n, tuple(o)) for (n, _, _), o in zip(parts, offsets, strict=True)]
            self._sums.append((places, sums))

    def read(self) -> Checksum | None:
        """Wait for the checksums and return them; None if copies of one shard differ."""
        shards: dict[tuple[int, Any], int] = {}
        for places, sums in self._sums:
            for place, shard_sum in zip(places, np.asarray(sums), strict=True):
                if shards.setdefault(place, int(shard_sum)) != int(shard_sum):
                    return None
        whole = np.zeros(self._num_arrays, np.uint64)
        for (array, _), shard_sum in shards.items():
            whole[array] += np.uint64(shard_sum)
        return (whole % 2**32).astype(np.uint32)


def _strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the distance between neighbours along each axis, in elements, modulo 2^32."""
    return tuple(math.prod(shape[axis + 1 :]) % 2**32 for axis in range(len(shape)))


@partial(jax.jit, static_argnums=2)
def _sums_of(shards: Any, offsets: Any, strides: tuple[tuple[int, ...], ...]) -> Array:
    """Return [shards] uint32: each shard's part of its array's checksum."""
    return jnp.stack([_sum_of(*shard) for shard in zip(shards, offsets, strides, strict=True)])


def _sum_of(x: Array, offset: Array, strides: tuple[int, ...]) -> Array:
    bits, steps = _bits(x), np.asarray(strides, np.uint32)
    place = jnp.sum(offset * steps, dtype=jnp.uint32)  # the first element's
    if strides == _strides(x.shape):  # a contiguous piece: places count up (quick on a CPU)
        bits = bits.reshape(-1)
        place += jax.lax.iota(jnp.uint32, bits.size)
    else:
        for axis, step in enumerate(steps):
            place += jax.lax.broadcasted_iota(jnp.uint32, x.shape, axis) * step
    return jnp.sum(bits * (2 * place + 1), dtype=jnp.uint32)


def _bits(x: Array) -> Array:
    """Return the bits of each element as uint32."""
    if x.dtype == jnp.bool_:
        return x.astype(jnp.uint32)
    unsigned = {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32}[x.dtype.itemsize]
    return jax.lax.bitcast_convert_type(x, unsigned).astype(jnp.uint32)
