"""The sampler's choices as columns of packed tokens: masks and expert ids. NumPy, pure."""

from typing import Any, NamedTuple

import numpy as np

from jaxrl_async.algorithms.columns import UNKNOWN_EXPERT
from jaxrl_async.data.images import ImageStore
from jaxrl_async.errors import DataError
from jaxrl_async.types import BoolArray, IntArray, KeptTokens


class Routing(NamedTuple):
    """The shape of a token's expert ids."""

    layers: int
    chosen: int  # in each layer
    dtype: Any  # of the ids: model.moe.id_dtype


class SamplerColumns(NamedTuple):
    """The sampler's choices that are packed with the tokens."""

    mask_vocab: int | None = None  # vocabulary size of sampling masks; None: masks are not packed
    routing: Routing | None = None  # of expert ids; None: these are not packed
    images: ImageStore | None = None  # referenced by token ids; None: no images
    masks_all: bool = True  # False: a sequence without masks was sampled from the whole vocabulary


NO_SAMPLER_COLUMNS = SamplerColumns()
NO_MASKS = KeptTokens(ids=np.zeros(0, np.int32), starts=np.zeros(1, np.int32))


def sequence_masks(
    kept: KeptTokens | None, token_ids: IntArray, drawn: BoolArray, vocab: int
) -> KeptTokens:
    """Return the masks of a sequence's sampled tokens.

    Raise DataError if the masks are missing, do not fit, or exclude a sampled token.

    Args:
        kept: the masks of the sampled tokens, in order.
        token_ids: [length].
        drawn: [length].
        vocab: size of the vocabulary.
    """
    places = np.flatnonzero(drawn)
    if not len(places):
        return NO_MASKS
    if kept is None or kept.num_tokens != len(places):
        masked = "no tokens" if kept is None else f"{kept.num_tokens} tokens"
        raise DataError(
            f"an episode with {len(places)} sampled tokens has sampling masks for {masked}. "
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
    excluded = np.flatnonzero(kept.excludes(token_ids[places]))
    if len(excluded):
        place = places[excluded[0]]
        raise DataError(
            f"token {token_ids[place]} at index {place} of an episode was sampled, "
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
