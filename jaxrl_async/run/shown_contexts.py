"""An episode of several turns for people: its contexts as a tree, each in parts that were drawn or
were not."""

import itertools
from typing import Any

import numpy as np

from jaxrl_async.data.tokenizer import Tokenizer
from jaxrl_async.types import BoolArray, Episode, IntArray


def contexts_of(episode: Episode, tokenizer: Tokenizer) -> list[dict[str, Any]]:
    """Return the contexts of an episode, each without what an earlier one begins with, too.

    Each has `parts`, pairs of whether the policy drew it and its text with special tokens; one that
    shares its beginning has `after`, the number of that earlier context (the one with which it has
    most in common), and `shared`, how many tokens that is.
    """
    bounds = (*episode.starts, len(episode.token_ids))
    spans = [slice(begin, end) for begin, end in itertools.pairwise(bounds)]
    contexts = []
    for number, span in enumerate(spans):
        ids, drawn = episode.token_ids[span], episode.drawn[span]
        told = ids[: int(drawn.argmax()) if drawn.any() else len(ids)]
        common = [common_tokens(told, episode.token_ids[other]) for other in spans[:number]]
        shared = max(common, default=0)
        context: dict[str, Any] = {"parts": _parts(ids[shared:], drawn[shared:], tokenizer)}
        if shared:
            context |= {"after": common.index(shared), "shared": shared}
        contexts.append(context)
    return contexts


def common_tokens(one: IntArray, other: IntArray) -> int:
    """Return how many tokens two contexts, [length] each, have in common from their beginnings."""
    length = min(len(one), len(other))
    differ = np.flatnonzero(one[:length] != other[:length])
    return int(differ[0]) if len(differ) else length


def _parts(ids: IntArray, drawn: BoolArray, tokenizer: Tokenizer) -> list[tuple[bool, str]]:
    if not len(ids):
        return []
    cuts = [0, *(np.flatnonzero(drawn[1:] != drawn[:-1]) + 1).tolist(), len(ids)]
    return [
        (bool(drawn[begin]), tokenizer.decode_all(ids[begin:end]))
        for begin, end in itertools.pairwise(cuts)
    ]
