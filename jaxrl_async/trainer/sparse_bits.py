"""The sampling masks of packed rows, expanded when they are put on devices. NumPy, pure.

For a vocabulary of 151,936 a mask is 19 kB of bits, but often only a few token ids. As bits a step
of 512 answers of 2048 tokens would be 20 GB, so only one micro-batch is expanded at a time.
"""

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
        places, masks = self.index.ravel(), self.masks
        if masks.which is None and masks.left_out is None:
            return self._bits_of(places).reshape(self.shape)
        sets = np.where(places < 0, NO_MASK, np.append(masks.set_of, NO_MASK)[places])
        distinct, of_token = np.unique(sets, return_inverse=True)
        bits = self._bits_of(distinct)
        listed = np.diff(masks.starts, append=masks.starts[-1:]) > 0
        bits[np.append(masks.holds_impossible, False)[distinct] & listed[distinct]] ^= ALL_BITS
        return bits[of_token].reshape(self.shape)

    def _bits_of(self, sets: NDArray[Any]) -> NDArray[np.uint8]:
        """Return the ids of sets [n] as bits, [n, ceil(vocab / 8)]; all bits for NO_MASK and for
        sets without ids."""
        kept, starts = self.masks, self.masks.starts
        counts = np.where(sets < 0, 0, starts[sets + 1] - starts[sets])
        bits = np.zeros((len(sets), self.shape[-1]), np.uint8)
        bits[counts == 0] = ALL_BITS
        rows = np.repeat(np.arange(len(sets)), counts)
        within = np.arange(len(rows)) - np.repeat(np.cumsum(counts) - counts, counts)
        ids = kept.ids[np.repeat(np.where(sets < 0, 0, starts[sets]), counts) + within]
        flat = rows * bits.shape[1] + (ids >> 3)
        firsts = np.flatnonzero(np.diff(flat, prepend=-1))  # of the ids that share a byte
        if len(firsts):
            values = np.left_shift(1, ids & 7, dtype=np.uint8, casting="unsafe")
            bits.reshape(-1)[flat[firsts]] = np.bitwise_or.reduceat(values, firsts)
        return bits
