"""Reshard between CPU devices of this process: each byte is copied once, in host memory.

    source's shards, read in place ──cut and assembled──> host memory ──> target's shards

The memory of a CPU device is host memory. XLA's collectives between such devices copy through extra
buffers and cost four times the CPU time of this copy. JAX uses aligned host memory directly as an
array's memory, so nothing is copied twice, and devices with the same shard share it.
"""

import math
import mmap
import threading
import weakref
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Sharding
from numpy.typing import NDArray

from jaxrl_async.model.spec import Params

SMALL_BYTES = 1 << 16
"""Minimum size of pooled arrays, bytes."""


def raw_dtype(dtype: str) -> np.dtype[Any]:
    """Return the unsigned integer dtype of the same size: NumPy copies its native types many times
    faster than bfloat16."""
    return np.dtype(f"u{np.dtype(dtype).itemsize}")


class BufferPool:
    """Blocks of page-aligned host memory for repeated transfers, by size. Thread-safe.

    Fresh memory from the kernel costs more than the copy into it, so blocks are reused. On a CPU,
    JAX does not copy aligned host memory but uses it as the array's memory. A block is therefore
    free only when nothing refers to it any more: no view here, no jax.Array, no computation.
    """

    def __init__(self, spare: int = 2) -> None:
        """Create an empty pool. It keeps at most `spare` free blocks of a size in addition to one
        per block in use."""
        self._spare = spare
        self._free: dict[int, list[mmap.mmap]] = {}
        self._in_use: dict[int, int] = {}
        self._lock = threading.RLock()  # a finalizer may run inside `take`

    def take(self, shape: tuple[int, ...], dtype: Any) -> NDArray[Any]:
        """Return an array with arbitrary contents."""
        dtype = np.dtype(dtype)
        size = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
        if size < SMALL_BYTES:
            return np.empty(shape, dtype)
        with self._lock:
            free = self._free.get(size)
            block = free.pop() if free else None
            self._in_use[size] = self._in_use.get(size, 0) + 1
        if block is None:
            block = mmap.mmap(-1, size)
            if hasattr(mmap, "MADV_HUGEPAGE"):
                block.madvise(mmap.MADV_HUGEPAGE)
        raw = np.frombuffer(block, np.uint8)  # all views refer to this array
        weakref.finalize(raw, self._give_back, size, block).atexit = False
        return raw.view(dtype).reshape(shape)

    def _give_back(self, size: int, block: mmap.mmap) -> None:
        with self._lock:
            self._in_use[size] -= 1
            free = self._free.setdefault(size, [])
            if len(free) < self._in_use[size] + self._spare:
                free.append(block)


Box = tuple[tuple[int, int], ...]
"""(start, stop) along every axis; () for a scalar."""


def volume(box: Box) -> int:
    """Return the number of elements."""
    return math.prod(stop - start for start, stop in box)


def box_of(index: tuple[slice, ...], shape: tuple[int, ...]) -> Box:
    """Return the box of a shard's index, as returned by JAX."""
    return tuple(s.indices(size)[:2] for s, size in zip(index, shape, strict=True))


def boxes_here(sharding: Sharding, shape: tuple[int, ...]) -> dict[Box, list[object]]:
    """Return the distinct boxes that this process's devices hold, each with its devices."""
    held: dict[Box, list[object]] = {}
    for device, index in sharding.addressable_devices_indices_map(shape).items():
        held.setdefault(box_of(index or (), shape), []).append(device)
    return held


def intersection(one: Box, other: Box) -> Box | None:
    """Return the intersection of two boxes; None if it is empty."""
    both = tuple((max(a, c), min(b, d)) for (a, b), (c, d) in zip(one, other, strict=True))
    return both if all(start < stop for start, stop in both) else None


def common(one: Box, other: Box) -> int:
    """Return the number of elements in the intersection of two boxes."""
    both = intersection(one, other)
    return 0 if both is None else volume(both)


def inside(inner: Box, outer: Box) -> tuple[Any, ...]:
    """Return the index of a box within the array of a box that contains it. Indexing with it gives
    a view, also for a scalar."""
    return (*(slice(a - c, b - c) for (a, b), (c, _) in zip(inner, outer, strict=True)), ...)


def contains(outer: Box, inner: Box) -> bool:
    """Return True if a box lies within another."""
    return all(c <= a and b <= d for (a, b), (c, d) in zip(inner, outer, strict=True))


def cut(box: Box, most: int) -> Iterator[Box]:
    """Cut a box along its first axes into boxes of at most `most` elements (but at least one), in
    array order."""
    size = volume(box)
    if size <= max(most, 1):
        if size:
            yield box
        return
    axis = next(n for n, (start, stop) in enumerate(box) if stop - start > 1)
    start, stop = box[axis]
    row = size // (stop - start)
    rows = max(most // row, 1)
    for first in range(start, stop, rows):
        part = (first, min(first + rows, stop))
        yield from cut((*box[:axis], part, *box[axis + 1 :]), most)


def distinct_shards(params: Params) -> list[tuple[int, Box, Any]]:
    """Return (array, box, its data on a device) of every distinct shard of this process."""
    shards = []
    for number, leaf in enumerate(jax.tree.leaves(params)):
        boxes: dict[Box, Any] = {}
        for shard in leaf.addressable_shards:
            boxes.setdefault(box_of(shard.index, leaf.shape), shard.data)
        shards += [(number, box, data) for box, data in boxes.items()]
    return shards


Index = tuple[Any, ...]


class HostReshard:
    """Reshards from the shardings of the first given tree to a target's. Thread-safe.

    The memory of a released set of weights is kept for the next one.
    """

    def __init__(self, target: object) -> None:
        """target: pytree of jax.sharding.Sharding, on CPU devices of this process."""
        self._target = jax.tree.leaves(target)
        self._pool = BufferPool(spare=0)
        self._plans: list[list[_Shard]] | None = None

    def __call__(self, params: Params) -> Params:
        """Return the arrays in the target's shards; wait for params to be computed.

        params: with the same shapes and shardings on every call, and not donated before this
        returns. The result shares no memory with them.
        """
        leaves, structure = jax.tree.flatten(params)
        if self._plans is None:
            self._plans = [_plan_shards(*pair) for pair in zip(leaves, self._target, strict=True)]
        shards, devices = list[Any](), list[Any]()
        for leaf, plan in zip(leaves, self._plans, strict=True):
            for shard in plan:
                shards += [self._assemble(leaf, shard)] * len(shard.devices)
                devices += shard.devices
        placed = iter(jax.device_put(shards, devices))
        arrays = [
            jax.make_array_from_single_device_arrays(
                leaf.shape, sharding, [next(placed) for shard in plan for _ in shard.devices]
            )
            for leaf, sharding, plan in zip(leaves, self._target, self._plans, strict=True)
        ]
        return jax.tree.unflatten(structure, arrays)

    def _assemble(self, leaf: jax.Array, shard: "_Shard") -> np.ndarray:
        """Copy a shard's parts into one array."""
        whole = self._pool.take(shard.shape, leaf.dtype)
        raw = raw_dtype(str(leaf.dtype))
        for part in shard.parts:
            piece = np.asarray(leaf.addressable_data(part.shard)).view(raw)
            whole.view(raw)[part.target] = piece[part.source]
        return whole


class _Part(NamedTuple):
    """The part of a target shard that one source shard has."""

    shard: int  # index of the source's shard in this process
    source: Index  # within the source's shard
    target: Index  # within the target's


class _Shard(NamedTuple):
    """One of the target's shards."""

    shape: tuple[int, ...]
    parts: list[_Part]  # without overlap
    devices: list[Any]  # that hold it


def _plan_shards(leaf: jax.Array, target: Any) -> list[_Shard]:
    """Plan the shards of one array. If the source has several copies, the first is read."""
    source: dict[Box, int] = {}
    for index, shard in enumerate(leaf.addressable_shards):
        source.setdefault(box_of(shard.index, leaf.shape), index)
    shards = []
    for box, devices in boxes_here(target, leaf.shape).items():
        parts = list[_Part]()
        for held, index in source.items():
            both = intersection(box, held)
            if both is not None:
                parts.append(_Part(index, inside(both, held), inside(both, box)))
        shape = tuple(stop - start for start, stop in box)
        shards.append(_Shard(shape, parts, devices))
    return shards
