"""An episode of several turns for people: a tree of its contexts, each split into sampled and other
parts."""

import itertools
from typing import Any

import numpy as np

from jaxrl_async.data.tokenizer import Tokenizer
from jaxrl_async.types import BoolArray, Episode, IntArray


def contexts_of(episode: Episode, tokenizer: Tokenizer) -> list[dict[str, Any]]:
    """Return the contexts of an episode, each without the beginning that it shares with an earlier
    one.

    Each has `parts`, pairs of a flag (sampled by the policy) and the text with special tokens. A
    context with a shared beginning has `after`, the number of the earlier context with which it
    shares most, and `shared`, the number of shared tokens.
    """
    bounds = (*episode.starts, len(episode.token_ids))
    spans = [slice(begin, end) for begin, end in itertools.pairwise(bounds)]
    contexts = []
    for number, span in enumerate(spans):
        ids, sampled = episode.token_ids[span], episode.drawn[span]
        given = ids[: int(sampled.argmax()) if sampled.any() else len(ids)]
        common = [common_tokens(given, episode.token_ids[other]) for other in spans[:number]]
        shared = max(common, default=0)
        context: dict[str, Any] = {"parts": _parts(ids[shared:], sampled[shared:], tokenizer)}
        if shared:
            context |= {"after": common.index(shared), "shared": shared}
        contexts.append(context)
    return contexts


def common_tokens(first: IntArray, other: IntArray) -> int:
    """Return the number of tokens that two contexts, [length] each, share at their beginnings."""
    length = min(len(first), len(other))
    differ = np.flatnonzero(first[:length] != other[:length])
    return int(differ[0]) if len(differ) else length


def _parts(ids: IntArray, sampled: BoolArray, tokenizer: Tokenizer) -> list[tuple[bool, str]]:
    if not len(ids):
        return []
    cuts = [0, *(np.flatnonzero(sampled[1:] != sampled[:-1]) + 1).tolist(), len(ids)]
    return [
        (bool(sampled[begin]), tokenizer.decode_all(ids[begin:end]))
        for begin, end in itertools.pairwise(cuts)
    ]
