"""The sampling masks of packed rows, expanded when they are put on devices. NumPy, pure.

For a vocabulary of 151,936 a mask is 19 kB of bits, but often only a few token ids. As bits a step
of 512 answers of 2048 tokens would be 20 GB, so only one micro-batch is expanded at a time.
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
    """PackedBatch.kept, expanded by np.asarray: [rows, length, ceil(vocab / 8)] uint8."""

    masks: KeptTokens  # of all sampled tokens of the step
    index: NDArray[np.int64]  # [rows, length] index of the token's mask; NO_MASK: all bits are set
    vocab: int

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the expanded array."""
        return (*self.index.shape, -(-self.vocab // 8))

    @property
    def dtype(self) -> np.dtype[np.uint8]:
        """The dtype of the expanded array."""
        return np.dtype(np.uint8)

    @property
    def nbytes(self) -> int:
        """Bytes of the expanded array."""
        return int(np.prod(self.shape, dtype=np.int64))

    def __len__(self) -> int:
        return len(self.index)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> NDArray[np.uint8]:
        """Expand the masks to bits."""
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
    """Return the concatenated masks of several sequences."""
    ends = np.cumsum([0, *(len(m.ids) for m in masks)])
    starts = [m.starts[:-1] + begin for m, begin in zip(masks, ends, strict=False)]
    return KeptTokens(
        ids=np.concatenate([np.zeros(0, np.int32), *(m.ids for m in masks)]),
        starts=np.concatenate([*starts, ends[-1:]]).astype(np.int64),
    )
