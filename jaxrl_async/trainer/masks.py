"""What the sampler chose from, as arrays beside the packed tokens: NumPy, pure."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from jaxrl_async.errors import DataError
from jaxrl_async.types import BoolArray, IntArray, KeptTokens

ALL_BITS = 0xFF
"""A byte of the mask where nothing was drawn: any token."""
UNKNOWN_EXPERT = -1
"""Expert of a token whose routing the sampler did not tell."""


def sequence_bits(
    kept: KeptTokens | None, token_ids: IntArray, drawn: BoolArray, vocab: int
) -> NDArray[np.uint8]:
    """[length, ceil(vocab / 8)] sampling masks as in PackedBatch.kept.

    kept: of the drawn tokens, in order. Raises DataError where it is missing, does not fit, or
    refuses a token that was drawn.
    """
    places = np.flatnonzero(drawn)
    bits = np.full((len(token_ids), -(-vocab // 8)), ALL_BITS, np.uint8)
    if not len(places):
        return bits
    if kept is None or len(kept.starts) - 1 != len(places):
        told = "no tokens" if kept is None else f"{len(kept.starts) - 1} tokens"
        raise DataError(
            f"an episode with {len(places)} drawn tokens has sampling masks for {told}. "
            "algorithm.keep_sampling_mask needs a sampler that gives Completion.kept for every "
            "token; set it to false for any other."
        )
    bits[places] = mask_bits(kept, vocab)
    targets = token_ids[places]
    refused = np.flatnonzero((bits[places, targets >> 3] >> (targets & 7)) & 1 == 0)
    if len(refused):
        raise DataError(
            f"token {targets[refused[0]]} at place {places[refused[0]]} of an episode was drawn, "
            "but its sampling mask refuses it. The sampler's Completion.kept must hold what was "
            "drawn; correct the sampler or set algorithm.keep_sampling_mask=false."
        )
    return bits


def mask_bits(kept: KeptTokens, vocab: int) -> NDArray[np.uint8]:
    """[drawn, ceil(vocab / 8)] uint8, as np.packbits(mask, bitorder="little") of each token."""
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
    return flat.reshape(drawn, width)


def sequence_experts(expert_ids: IntArray | None, drawn: BoolArray, shape: Any) -> IntArray:
    """[length, *shape] int32 as in PackedBatch.expert_ids, shape (layers, k).

    expert_ids [drawn, layers, k]: of the pass that made each drawn token's logits, which is that
    of the token before it.
    """
    experts = np.full((len(drawn), *shape), UNKNOWN_EXPERT, np.int32)
    places = np.flatnonzero(drawn)
    if expert_ids is None or not len(places):
        return experts
    if expert_ids.shape != (len(places), *shape):
        raise DataError(
            f"an episode with {len(places)} drawn tokens has expert ids of shape "
            f"{expert_ids.shape}, not {(len(places), *shape)}. algorithm.keep_routing needs "
            "[drawn, layers, experts per token] from the sampler, the same for all."
        )
    experts[places[places > 0] - 1] = expert_ids[places > 0]
    return experts
