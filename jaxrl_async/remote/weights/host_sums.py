"""Checksums of weights in host memory, at memory speed: 8 bytes per array.

    sum over all words of word * (2 * position + 1), modulo 2^64

A word is 8 bytes of a row (the last axis), padded with zeros at the row's end; `position` is its
index in the array. As in weights.manifest, the parts of an array add up to the same number however
it was cut, and a change or move of a single word is always detected. weights.manifest multiplies
each element, which is fast on an accelerator but slow on a CPU. Here rows and columns are summed
first:

    sum over rows of 2 * (position of its first word) * (sum of the row)
    + sum over columns of (2 * column + 1) * (sum of the column)
"""

import math

import jax
import numpy as np
from numpy.typing import NDArray

from jaxrl_async.model.spec import Params
from jaxrl_async.weights.host_reshard import Box

MODULUS = 2**64
WORD = 8
"""Bytes per word."""
BLOCK_BYTES = 1 << 19
"""Bytes that are summed by rows and then by columns, the second time from the cache."""
LONG_ROW = 2048
"""Maximum row length in words; longer rows are cut to keep the number of column sums small."""


def in_host_memory(params: Params) -> bool:
    """Return True if all arrays are in host memory, so these checksums cover the arrays
    themselves."""
    leaves = jax.tree.leaves(params)
    return all(d.platform == "cpu" for leaf in leaves for d in leaf.sharding.device_set)


def host_sum(data: NDArray[np.generic], box: Box, shape: tuple[int, ...]) -> int:
    """Return a part's share of its array's checksum.

    Args:
        data: The part, with the box's shape, of any dtype.
        box: Its position in the array.
        shape: Of the whole array.
    """
    if not data.size:
        return 0
    row_words = -(-(shape[-1] if shape else 1) * data.itemsize // WORD)
    words, column, merged = _words(data, box, shape, row_words)
    positions = _row_positions(box[: len(box) - 1 - merged], shape, row_words)
    return _sum_of_rows(*_cut_rows(words, positions, column))


def _words(
    data: NDArray[np.generic], box: Box, shape: tuple[int, ...], row_words: int
) -> tuple[NDArray[np.uint64], int, int]:
    """Return the words as [rows, columns], the first column's index, and the number of axes before
    the last that belong to the columns."""
    raw = np.ascontiguousarray(data).reshape(-1).view(np.uint8)
    start, stop = box[-1] if box else (0, 1)
    first, end = start * data.itemsize, stop * data.itemsize
    if first % WORD or end % WORD:  # pad with zeros, which change no sum
        before, after = first % WORD, -end % WORD
        rows = raw.reshape(-1, end - first)
        return np.pad(rows, ((0, 0), (before, after))).view(np.uint64), first // WORD, 0
    whole_row, merged, columns = (end - first) // WORD == row_words, 0, row_words
    while whole_row and merged < len(box) - 1 and columns < LONG_ROW:
        axis = len(box) - 2 - merged
        if box[axis] != (0, shape[axis]):
            break
        columns, merged = columns * shape[axis], merged + 1
    columns = columns if whole_row else (end - first) // WORD
    return raw.view(np.uint64).reshape(-1, columns), first // WORD, merged


def _row_positions(box: Box, shape: tuple[int, ...], row_words: int) -> NDArray[np.uint64]:
    """Return the position of the first word of every row, flattened over these leading axes."""
    positions = np.zeros((1,), np.uint64)
    for axis, (start, stop) in enumerate(box):
        stride = math.prod(shape[axis + 1 : -1]) * row_words % MODULUS
        along = np.arange(start, stop, dtype=np.uint64) * np.uint64(stride)
        positions = np.add.outer(positions, along).reshape(-1)
    return positions


def _cut_rows(
    words: NDArray[np.uint64], positions: NDArray[np.uint64], column: int
) -> tuple[NDArray[np.uint64], NDArray[np.uint64], int]:
    """Cut long rows into shorter ones of equal length, if possible."""
    length = words.shape[1]
    if length <= LONG_ROW:
        return words, positions, column
    short = next((n for n in range(LONG_ROW, LONG_ROW // 8, -1) if length % n == 0), length)
    starts = np.arange(0, length, short, dtype=np.uint64)
    return words.reshape(-1, short), np.add.outer(positions, starts).reshape(-1), column


def _sum_of_rows(words: NDArray[np.uint64], positions: NDArray[np.uint64], column: int) -> int:
    columns = words.shape[1]
    column_sums = np.zeros(columns, np.uint64)
    rows_at_once = max(BLOCK_BYTES // (columns * WORD), 1)
    total = 0
    for first in range(0, len(words), rows_at_once):
        block = words[first : first + rows_at_once]
        column_sums += block.sum(axis=0)
        row_sums = block.sum(axis=1) * positions[first : first + rows_at_once]
        total += 2 * int(row_sums.sum())
    factors = 2 * (np.arange(columns, dtype=np.uint64) + np.uint64(column)) + np.uint64(1)
    return (total + int((column_sums * factors).sum())) % MODULUS
