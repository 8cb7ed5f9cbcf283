"""Boxes: index ranges along every axis of an array, used to identify shards and pieces."""

import math
from collections.abc import Iterator
from typing import Any

import jax
from jax.sharding import Sharding

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


def distinct_shards(params: Any) -> list[tuple[int, Box, Any]]:
    """Return (array, box, its data on a device) of every distinct shard of this process."""
    shards = []
    for number, leaf in enumerate(jax.tree.leaves(params)):
        boxes: dict[Box, Any] = {}
        for shard in leaf.addressable_shards:
            boxes.setdefault(box_of(shard.index, leaf.shape), shard.data)
        shards += [(number, box, data) for box, data in boxes.items()]
    return shards
