"""The sampling masks of packed rows, expanded where they are put on devices. NumPy, pure.

Of a vocabulary of 151,936 a mask is 19 kB of bits and often a few token ids: a step of 512 answers
of 2048 tokens would be 20 GB at once, and a micro-batch alone is held as bits.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from jaxrl_async.algorithms.columns import ALL_BITS
from jaxrl_async.types import KeptTokens

NO_MASK = -1


@dataclass(frozen=True, slots=True, eq=False)
class SparseBits:
    """PackedBatch.kept as an array that is made by np.asarray: [rows, length, ceil(vocab / 8)]."""

    masks: KeptTokens  # of all drawn tokens of the step
    index: NDArray[np.int64]  # [rows, length] the token's place in them; NO_MASK: all bits are set
    vocab: int

    @property
    def shape(self) -> tuple[int, ...]:
        """The array's."""
        return (*self.index.shape, -(-self.vocab // 8))

    @property
    def dtype(self) -> np.dtype[np.uint8]:
        """The array's."""
        return np.dtype(np.uint8)

    @property
    def nbytes(self) -> int:
        """Bytes of the array, once it is made."""
        return int(np.prod(self.shape, dtype=np.int64))

    def __len__(self) -> int:
        return len(self.index)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> NDArray[np.uint8]:
        """Make the array."""
        places = self.index.ravel()
        kept, starts = self.masks, self.masks.starts
        counts = np.where(places < 0, 0, starts[places + 1] - starts[places])
        bits = np.zeros((len(places), self.shape[-1]), np.uint8)
        bits[counts == 0] = ALL_BITS
        rows = np.repeat(np.arange(len(places)), counts)
        within = np.arange(len(rows)) - np.repeat(np.cumsum(counts) - counts, counts)
        ids = kept.ids[np.repeat(np.where(places < 0, 0, starts[places]), counts) + within]
        flat = rows * bits.shape[1] + (ids >> 3)
        firsts = np.flatnonzero(np.diff(flat, prepend=-1))  # of the ids that share a byte
        if len(firsts):
            values = np.left_shift(1, ids & 7, dtype=np.uint8, casting="unsafe")
            bits.reshape(-1)[flat[firsts]] = np.bitwise_or.reduceat(values, firsts)
        return bits.reshape(self.shape)


def joined_masks(masks: Sequence[KeptTokens]) -> KeptTokens:
    """Return the masks of several sequences one behind the other."""
    ends = np.cumsum([0, *(len(m.ids) for m in masks)])
    starts = [m.starts[:-1] + begin for m, begin in zip(masks, ends, strict=False)]
    return KeptTokens(
        ids=np.concatenate([np.zeros(0, np.int32), *(m.ids for m in masks)]),
        starts=np.concatenate([*starts, ends[-1:]]).astype(np.int64),
    )
