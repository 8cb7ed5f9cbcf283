"""The sampler's choices as arrays beside the packed tokens: masks and expert ids. NumPy, pure."""

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from jaxrl_async.algorithms.columns import ALL_BITS, UNKNOWN_EXPERT
from jaxrl_async.data.images import ImageStore
from jaxrl_async.errors import DataError
from jaxrl_async.types import BoolArray, IntArray, KeptTokens


class Routing(NamedTuple):
    """The shape of a token's expert ids."""

    layers: int
    chosen: int  # in each layer
    dtype: Any  # of the ids: model.moe.id_dtype


class SamplerColumns(NamedTuple):
    """What is packed of the sampler's choices beside the tokens."""

    mask_vocab: int | None = None  # size of the vocabulary of sampling masks; None: none are packed
    routing: Routing | None = None  # of expert ids; None: none are packed
    images: ImageStore | None = None  # that token ids name; None: they name none


NO_SAMPLER_COLUMNS = SamplerColumns()


def sequence_bits(
    kept: KeptTokens | None, token_ids: IntArray, drawn: BoolArray, vocab: int
) -> NDArray[np.uint8]:
    """Return a sequence's sampling masks [length, ceil(vocab / 8)], as in PackedBatch.kept.

    Raise DataError if the masks are missing, do not fit, or exclude a token that was drawn.

    Args:
        kept: the masks of the drawn tokens, in order.
        token_ids: [length].
        drawn: [length].
        vocab: size of the vocabulary.
    """
    places = np.flatnonzero(drawn)
    bits = np.full((len(token_ids), -(-vocab // 8)), ALL_BITS, np.uint8)
    if not len(places):
        return bits
    if kept is None or len(kept.starts) - 1 != len(places):
        masked = "no tokens" if kept is None else f"{len(kept.starts) - 1} tokens"
        raise DataError(
            f"an episode with {len(places)} drawn tokens has sampling masks for {masked}. "
            "algorithm.keep_sampling_mask needs a sampler that gives Completion.kept for every "
            "token; set it to false for any other."
        )
    bits[places] = mask_bits(kept, vocab)
    targets = token_ids[places]
    excluded = np.flatnonzero((bits[places, targets >> 3] >> (targets & 7)) & 1 == 0)
    if len(excluded):
        raise DataError(
            f"token {targets[excluded[0]]} at index {places[excluded[0]]} of an episode was drawn, "
            "but its sampling mask excludes it. The sampler's Completion.kept must contain every "
            "drawn token; correct the sampler or set algorithm.keep_sampling_mask=false."
        )
    return bits


def mask_bits(kept: KeptTokens, vocab: int) -> NDArray[np.uint8]:
    """Return each token's mask as np.packbits(mask, bitorder="little") does: [drawn, bytes]; all
    bits where it holds no id (KeptTokens)."""
    if len(kept.ids) and not 0 <= kept.ids.min() <= kept.ids.max() < vocab:
        raise DataError(
            f"a sampling mask holds token ids from {kept.ids.min()} to {kept.ids.max()}, but the "
            f"vocabulary has {vocab}. Give the sampler and the trainer the same model."
        )
    drawn, width = len(kept.starts) - 1, -(-vocab // 8)
    tokens = np.repeat(np.arange(drawn), np.diff(kept.starts))
    if (np.diff(tokens * vocab + kept.ids) <= 0).any():
        raise DataError(
            "a sampling mask holds token ids out of order or twice. The sampler's KeptTokens.ids "
            "must ascend for each drawn token; correct the sampler."
        )
    places = tokens * width + (kept.ids >> 3)
    firsts = np.flatnonzero(np.diff(places, prepend=-1))  # of the ids that share a byte
    flat = np.zeros(drawn * width, np.uint8)
    if len(firsts):
        values = np.left_shift(1, kept.ids & 7, dtype=np.uint8, casting="unsafe")
        flat[places[firsts]] = np.bitwise_or.reduceat(values, firsts)
    bits = flat.reshape(drawn, width)
    bits[np.diff(kept.starts) == 0] = ALL_BITS
    return bits


def sequence_experts(expert_ids: IntArray | None, length: int, routing: Routing) -> IntArray:
    """Return a sequence's expert ids [length, layers, k], as in PackedBatch.expert_ids.

    They are UNKNOWN_EXPERT for a sequence without any (nothing drawn, or a worked answer). Raise
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
