"""The manifest of a set of weights, compared before any transfer, and checksums of weights on their
devices: 4 bytes per array, independent of its sharding.

    sum over all elements of bits * (2 * position + 1), modulo 2^32

`position` is the element's index in the whole, flattened array. Shards therefore add up to the same
number on any mesh, and a misplaced block changes the sum. The factor is odd, so a change of a
single element is always detected. Each shard is summed on its own device, without collectives, so
any thread may compute checksums.
"""

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from numpy.typing import NDArray

from jaxrl_async.errors import WeightsError
from jaxrl_async.model.spec import Params


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """Name, shape and dtype of every array, in tree order."""

    entries: tuple[tuple[str, tuple[int, ...], str], ...]

    @property
    def num_bytes(self) -> int:
        """Size of one copy, bytes."""
        return sum(math.prod(shape) * np.dtype(dtype).itemsize for _, shape, dtype in self.entries)

    @property
    def layout_hash(self) -> str:
        """Hex digest of all entries in order; equal digests mean equal manifests."""
        return hashlib.sha256(repr(self.entries).encode()).hexdigest()[:16]


def manifest_of(params: Params) -> Manifest:
    """Return the manifest of a tree of arrays (or ShapeDtypeStructs); move no data."""
    leaves = jax.tree_util.tree_leaves_with_path(params)
    return Manifest(
        entries=tuple(
            (jax.tree_util.keystr(path, simple=True, separator="/"), tuple(x.shape), str(x.dtype))
            for path, x in leaves
        )
    )


def compare(published: Manifest, expected: Manifest) -> None:
    """Raise WeightsError with the name of the first array that differs, if any."""
    if published == expected:
        return
    sent, needed = ({n: (s, d) for n, s, d in m.entries} for m in (published, expected))
    for name in sorted(sent.keys() | needed.keys()):
        if sent.get(name) != needed.get(name):
            raise WeightsError(
                f"weights {name!r}: published {_describe(sent.get(name))}; the sampler expects "
                f"{_describe(needed.get(name))}. Trainer and sampler were built from different "
                "models: use one model section for both."
            )
    names = zip(published.entries, expected.entries, strict=True)
    first = next(a[0] for a, b in names if a[0] != b[0])
    raise WeightsError(
        f"weights {first!r}: the arrays are the expected ones, but in another order (layout "
        f"{published.layout_hash} instead of {expected.layout_hash}). Publish the tree that the "
        "sampler was built with."
    )


def _describe(entry: tuple[tuple[int, ...], str] | None) -> str:
    return "nothing" if entry is None else f"{entry[1]}{list(entry[0])}"


# ---- checksums


Checksum = NDArray[np.uint32]
"""[arrays] in tree order."""


class PartSums:
    """Checksums of parts of arrays, computed asynchronously, each on the device of its part."""

    def __init__(self, parts: Sequence[tuple[Array, Sequence[int], tuple[int, ...]]]) -> None:
        """Start the computation; do not wait.

        parts: each on one device, with the index of its first element in the whole array, and the
        whole array's shape.
        """
        by_device: dict[Any, list[int]] = {}
        for number, (data, _, _) in enumerate(parts):
            by_device.setdefault(next(iter(data.devices())), []).append(number)
        self._sums = [
            (
                numbers,
                _sums_of(
                    [parts[n][0] for n in numbers],
                    [np.asarray([i % 2**32 for i in parts[n][1]], np.uint32) for n in numbers],
                    tuple(_strides(parts[n][2]) for n in numbers),
                ),
            )
            for numbers in by_device.values()
        ]

    def read(self) -> list[int]:
        """Wait for the checksums and return each part's share of its array's, in order."""
        by_part = {
            n: int(s)
            for numbers, sums in self._sums
            for n, s in zip(numbers, np.asarray(sums), strict=True)
        }
        return [by_part[number] for number in range(len(by_part))]


class Sums:
    """Checksums of a tree, computed asynchronously: the constructor does not wait for them."""

    def __init__(self, params: Params) -> None:
        leaves = [jnp.asarray(leaf) for leaf in jax.tree.leaves(params)]
        self._num_arrays = len(leaves)
        shards = [(n, leaf, s) for n, leaf in enumerate(leaves) for s in leaf.addressable_shards]
        starts = [tuple(i.start or 0 for i in shard.index) for _, _, shard in shards]
        self._keys = [(n, start) for (n, _, _), start in zip(shards, starts, strict=True)]
        self._sums = PartSums(
            [
                (shard.data, start, leaf.shape)
                for (_, leaf, shard), start in zip(shards, starts, strict=True)
            ]
        )

    def of_shards(self) -> dict[tuple[int, tuple[int, ...]], int] | None:
        """Wait, and return each distinct shard's share, by (array, index of its first element);
        None if copies of one shard differ."""
        shards: dict[tuple[int, tuple[int, ...]], int] = {}
        for key, shard_sum in zip(self._keys, self._sums.read(), strict=True):
            if shards.setdefault(key, shard_sum) != shard_sum:
                return None
        return shards

    def read(self) -> Checksum | None:
        """Wait for the checksums and return them; None if copies of one shard differ."""
        shards = self.of_shards()
        if shards is None:
            return None
        whole = np.zeros(self._num_arrays, np.uint64)
        for (array, _), shard_sum in shards.items():
            whole[array] += np.uint64(shard_sum)
        return (whole % 2**32).astype(np.uint32)


def _strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the stride of each axis, in elements, modulo 2^32."""
    return tuple(math.prod(shape[axis + 1 :]) % 2**32 for axis in range(len(shape)))


@partial(jax.jit, static_argnums=2)
def _sums_of(shards: Any, offsets: Any, strides: tuple[tuple[int, ...], ...]) -> Array:
    """Return [shards] uint32: each shard's part of its array's checksum."""
    return jnp.stack([_sum_of(*shard) for shard in zip(shards, offsets, strides, strict=True)])


def _sum_of(x: Array, offset: Array, strides: tuple[int, ...]) -> Array:
    bits, steps = _bits(x), np.asarray(strides, np.uint32)
    position = jnp.sum(offset * steps, dtype=jnp.uint32)  # of the first element
    if strides == _strides(x.shape):  # a contiguous piece: positions count up (fast on a CPU)
        bits = bits.reshape(-1)
        position += jax.lax.iota(jnp.uint32, bits.size)
    else:
        for axis, step in enumerate(steps):
            position += jax.lax.broadcasted_iota(jnp.uint32, x.shape, axis) * step
    return jnp.sum(bits * (2 * position + 1), dtype=jnp.uint32)


def _bits(x: Array) -> Array:
    """Return the bits of each element as uint32."""
    if x.dtype == jnp.bool_:
        return x.astype(jnp.uint32)
    unsigned = {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32}[x.dtype.itemsize]
    return jax.lax.bitcast_convert_type(x, unsigned).astype(jnp.uint32)
