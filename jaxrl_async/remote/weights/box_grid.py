"""The boxes of an array that have arrived. Those near a place are found without a look at all.

cells as wide as the pieces of the whole array would be       a box lies in the cells it touches
"""

import itertools
from collections.abc import Iterator

import numpy as np

from jaxrl_async.remote.weights.pieces import PIECE_BYTES
from jaxrl_async.weights.boxes import Box, common, cut


class BoxGrid:
    """Boxes of one array that do not overlap. Not locked."""

    def __init__(self, shape: tuple[int, ...], dtype: str) -> None:
        """Hold none yet, of an array of this shape and dtype."""
        whole = tuple((0, size) for size in shape)
        first = next(cut(whole, PIECE_BYTES // np.dtype(dtype).itemsize), whole)
        self._widths = [max(stop - start, 1) for start, stop in first]
        self._cells: dict[tuple[int, ...], list[Box]] = {}

    def add(self, box: Box) -> None:
        """Take in a box."""
        for cell in self._touched(box):
            self._cells.setdefault(cell, []).append(box)

    def clear(self) -> None:
        """Hold none again."""
        self._cells.clear()

    def covered(self, box: Box) -> int:
        """Return how many elements of a box lie in the boxes held."""
        near = {held for cell in self._touched(box) for held in self._cells.get(cell, ())}
        return sum(common(held, box) for held in near)

    def _touched(self, box: Box) -> Iterator[tuple[int, ...]]:
        """Yield the cells that a box touches."""
        ranges = [
            range(start // width, -(-stop // width))
            for (start, stop), width in zip(box, self._widths, strict=True)
        ]
        return itertools.product(*ranges)
