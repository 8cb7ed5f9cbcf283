"""Spatial index of the arrived boxes of an array: neighbors are found without scanning all boxes.

cells have the size of the whole array's pieces       a box is listed in all cells it touches
"""

import itertools
from collections.abc import Iterator

import numpy as np

from jaxrl_async.remote.weights.pieces import PIECE_BYTES
from jaxrl_async.weights.host_reshard import Box, common, cut


class BoxGrid:
    """Non-overlapping boxes of one array. Not locked."""

    def __init__(self, shape: tuple[int, ...], dtype: str) -> None:
        """Create an empty grid for an array of this shape and dtype."""
        whole = tuple((0, size) for size in shape)
        first = next(cut(whole, PIECE_BYTES // np.dtype(dtype).itemsize), whole)
        self._widths = [max(stop - start, 1) for start, stop in first]
        self._cells: dict[tuple[int, ...], list[Box]] = {}

    def add(self, box: Box) -> None:
        """Add a box."""
        for cell in self._touched(box):
            self._cells.setdefault(cell, []).append(box)

    def clear(self) -> None:
        """Remove all boxes."""
        self._cells.clear()

    def covered(self, box: Box) -> int:
        """Return the number of elements of a box that the held boxes cover."""
        near = {held for cell in self._touched(box) for held in self._cells.get(cell, ())}
        return sum(common(held, box) for held in near)

    def _touched(self, box: Box) -> Iterator[tuple[int, ...]]:
        """Yield the cells that a box touches."""
        ranges = [
            range(start // width, -(-stop // width))
            for (start, stop), width in zip(box, self._widths, strict=True)
        ]
        return itertools.product(*ranges)
