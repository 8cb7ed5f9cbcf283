"""Reshard between CPU devices of this process: each byte is copied once, in host memory.

    source's shards, read in place ──cut and assembled──> host memory ──> target's shards

The memory of a CPU device is host memory. XLA's collectives between such devices copy through extra
buffers and cost four times the CPU time of this copy. JAX uses aligned host memory directly as an
array's memory, so nothing is copied twice, and devices with the same shard share it.
"""

from typing import Any, NamedTuple

import jax
import numpy as np

from jaxrl_async.model.spec import Params
from jaxrl_async.weights.boxes import Box, box_of, boxes_here, inside, intersection
from jaxrl_async.weights.buffers import BufferPool, raw_dtype

Index = tuple[Any, ...]


class HostReshard:
    """Reshards from the shardings of the first given tree to a target's. Thread-safe.

    The memory of a released set of weights is kept for the next one.
    """

    def __init__(self, target: Any) -> None:
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
            self._plans = [_planned(*pair) for pair in zip(leaves, self._target, strict=True)]
        shards, devices = list[Any](), list[Any]()
        for leaf, plan in zip(leaves, self._plans, strict=True):
            for shard in plan:
                shards += [self._put_together(leaf, shard)] * len(shard.devices)
                devices += shard.devices
        placed = iter(jax.device_put(shards, devices))
        arrays = [
            jax.make_array_from_single_device_arrays(
                leaf.shape, goal, [next(placed) for shard in plan for _ in shard.devices]
            )
            for leaf, goal, plan in zip(leaves, self._target, self._plans, strict=True)
        ]
        return jax.tree.unflatten(structure, arrays)

    def _put_together(self, leaf: jax.Array, shard: "_Shard") -> np.ndarray:
        """Copy a shard's parts into one array."""
        whole = self._pool.take(shard.shape, leaf.dtype)
        raw = raw_dtype(str(leaf.dtype))
        for part in shard.parts:
            piece = np.asarray(leaf.addressable_data(part.place)).view(raw)
            whole.view(raw)[part.into] = piece[part.of]
        return whole


class _Part(NamedTuple):
    """The part of a target shard that one source shard has."""

    place: int  # index of the source's shard in this process
    of: Index  # within the source's shard
    into: Index  # within the target's


class _Shard(NamedTuple):
    """One of the target's shards."""

    shape: tuple[int, ...]
    parts: list[_Part]  # without overlap
    devices: list[Any]  # that hold it


def _planned(leaf: jax.Array, target: Any) -> list[_Shard]:
    """Plan the shards of one array. If the source has several copies, the first is read."""
    source: dict[Box, int] = {}
    for place, shard in enumerate(leaf.addressable_shards):
        source.setdefault(box_of(shard.index, leaf.shape), place)
    shards = []
    for box, devices in boxes_here(target, leaf.shape).items():
        parts = list[_Part]()
        for held, place in source.items():
            common = intersection(box, held)
            if common is not None:
                parts.append(_Part(place, inside(common, held), inside(common, box)))
        shape = tuple(stop - start for start, stop in box)
        shards.append(_Shard(shape, parts, devices))
    return shards
