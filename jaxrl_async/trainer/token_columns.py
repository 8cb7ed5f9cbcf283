"""The sampler's choices as columns of packed tokens: masks and expert ids. NumPy, pure."""

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import DTypeLike, NDArray

from jaxrl_async.algorithms.columns import ALL_BITS, UNKNOWN_EXPERT
from jaxrl_async.data.images import ImageStore
from jaxrl_async.errors import DataError
from jaxrl_async.types import BoolArray, IntArray, KeptTokens

NO_MASK = -1


@dataclass(frozen=True, slots=True, eq=False)
class SparseBits:
    """PackedBatch.kept, expanded by np.asarray: [rows, length, ceil(vocab / 8)] uint8.

    For a vocabulary of 151,936 a mask is 19 kB of bits, but often only a few token ids. As bits a
    step of 512 answers of 2048 tokens would be 20 GB, so only one micro-batch is expanded at a
    time.
    """

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

    def __array__(
        self, dtype: DTypeLike | None = None, copy: bool | None = None
    ) -> NDArray[np.uint8]:
        """Expand the masks to bits."""
        indices, masks = self.index.ravel(), self.masks
        if masks.which is None and masks.left_out is None:
            return self._bits_of(indices).reshape(self.shape)
        sets = np.where(indices < 0, NO_MASK, np.append(masks.set_of, NO_MASK)[indices])
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


class Routing(NamedTuple):
    """The shape of a token's expert ids."""

    layers: int
    chosen: int  # in each layer
    dtype: DTypeLike  # of the ids: model.moe.id_dtype


class SamplerColumns(NamedTuple):
    """The sampler's choices that are packed with the tokens."""

    mask_vocab: int | None = None  # vocabulary size of sampling masks; None: masks are not packed
    routing: Routing | None = None  # of expert ids; None: these are not packed
    images: ImageStore | None = None  # referenced by token ids; None: no images
    masks_all: bool = True  # False: a sequence without masks was sampled from the whole vocabulary


NO_SAMPLER_COLUMNS = SamplerColumns()
NO_MASKS = KeptTokens(ids=np.zeros(0, np.int32), starts=np.zeros(1, np.int32))


def sequence_masks(
    kept: KeptTokens | None, token_ids: IntArray, sampled: BoolArray, vocab: int
) -> KeptTokens:
    """Return the masks of a sequence's sampled tokens.

    Raise DataError if the masks are missing, do not fit, or exclude a sampled token.

    Args:
        kept: the masks of the sampled tokens, in order.
        token_ids: [length].
        sampled: [length] True where the policy sampled the token.
        vocab: size of the vocabulary.
    """
    indices = np.flatnonzero(sampled)
    if not len(indices):
        return NO_MASKS
    if kept is None or kept.num_tokens != len(indices):
        masked = "no tokens" if kept is None else f"{kept.num_tokens} tokens"
        raise DataError(
            f"an episode with {len(indices)} sampled tokens has sampling masks for {masked}. "
            "algorithm.keep_sampling_mask needs a sampler that returns Completion.kept for every "
            "token; set it to false for any other."
        )
    if len(kept.ids) and not 0 <= kept.ids.min() <= kept.ids.max() < vocab:
        raise DataError(
            f"a sampling mask holds token ids from {kept.ids.min()} to {kept.ids.max()}, but the "
            f"vocabulary has {vocab}. Give the sampler and the trainer the same model."
        )
    counts = np.diff(kept.starts)
    keys = np.repeat(np.arange(len(counts)), counts) * vocab + kept.ids
    if (np.diff(keys) <= 0).any():
        raise DataError(
            "a sampling mask holds token ids out of order or twice. The sampler's KeptTokens.ids "
            "must ascend for each sampled token; correct the sampler."
        )
    excluded = np.flatnonzero(kept.excludes(token_ids[indices]))
    if len(excluded):
        index = indices[excluded[0]]
        raise DataError(
            f"token {token_ids[index]} at index {index} of an episode was sampled, "
            "but its sampling mask excludes it. The sampler's Completion.kept must contain every "
            "sampled token; correct the sampler or set algorithm.keep_sampling_mask=false."
        )
    return kept


def sequence_experts(expert_ids: IntArray | None, length: int, routing: Routing) -> IntArray:
    """Return a sequence's expert ids [length, layers, k], as in PackedBatch.expert_ids.

    They are UNKNOWN_EXPERT for a sequence without any (nothing sampled, or a demonstration). Raise
    DataError if they do not fit.
    """
    shape = (length, routing.layers, routing.chosen)
    if expert_ids is None:
        return np.full(shape, UNKNOWN_EXPERT, routing.dtype)
    if expert_ids.shape != shape:
        raise DataError(
            f"an episode of {length} tokens has expert ids of shape {expert_ids.shape}, not "
            f"{shape}. algorithm.keep_routing needs [tokens, layers, experts per token] of the "
            "model that is trained; give the sampler and the trainer the same model."
        )
    return expert_ids.astype(routing.dtype)
