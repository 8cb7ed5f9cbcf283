"""Reshard between this process's CPU devices: each byte is copied once, in the host's memory.

    source's shards, read where they are ──cut and put together──> host memory ──> target's shards

A CPU device's memory is the host's. XLA's collectives between such devices copy through buffers of
their own and cost four times this copy's CPU time. JAX keeps aligned host memory as an
array's own, so that nothing is copied a second time, and devices with the same shard share it.
"""

from typing import Any, NamedTuple

import jax
import numpy as np

from jaxrl_async.model.spec import Params
from jaxrl_async.weights.boxes import Box, box_of, boxes_here, inside, intersection
from jaxrl_async.weights.buffers import BufferPool, raw_dtype

Index = tuple[Any, ...]


class HostReshard:
    """From the shardings of the first tree that is given to those of a target. Thread safe.

    The memory of a set of weights that nobody holds any more is kept for the next one.
    """

    def __init__(self, target: Any) -> None:
        """target: pytree of jax.sharding.Sharding, on CPU devices of this process."""
        self._target = jax.tree.leaves(target)
        self._pool = BufferPool(spare=0)
        self._plans: list[list[_Shard]] | None = None

    def __call__(self, params: Params) -> Params:
        """Return the arrays in the target's shards; wait until params are computed.

        params: in the same shapes and shardings at every call, and never donated before this
        returns. What is returned shares no memory with them.
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
        """Copy a shard's parts side by side."""
        whole = self._pool.take(shard.shape, leaf.dtype)
        raw = raw_dtype(str(leaf.dtype))
        for part in shard.parts:
            piece = np.asarray(leaf.addressable_data(part.place)).view(raw)
            whole.view(raw)[part.into] = piece[part.of]
        return whole


class _Part(NamedTuple):
    """What one of the source's shards has of a target's."""

    place: int  # of the source's shard among those of this process
    of: Index  # within the source's shard
    into: Index  # within the target's


class _Shard(NamedTuple):
    """One of the target's shards."""

    shape: tuple[int, ...]
    parts: list[_Part]  # without overlap
    devices: list[Any]  # that hold it


def _planned(leaf: jax.Array, target: Any) -> list[_Shard]:
    """Plan the shards of one array; of copies in the source, the first is read."""
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
