"""Texts that a policy scores: what may be scored, and the log-probs of their tokens."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from jaxrl_async.data.tokenizer import Tokenizer
from jaxrl_async.errors import DataError
from jaxrl_async.types import Completion, FloatArray, IntArray, Message, Request

TokenIds = Sequence[int] | IntArray
Scored = str | TokenIds | tuple[str | TokenIds | Sequence[Message], str | TokenIds]
"""A text or its token ids, or a pair of a prompt (a text, token ids, or messages) and its
completion."""
VERBATIM = "{prompt}"
"""A template that leaves a text as it is: a chat template applies to messages alone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoredText:
    """The log-probs of a text's n tokens, each given the tokens before it. The first token, and
    the tokens of a pair's prompt, have NaN and top_ids of -1."""

    text: str  # of all tokens, special ones included
    token_ids: IntArray  # [n] int32
    starts: IntArray  # [n] int32, index in `text` of the character where each token begins
    logprobs: FloatArray  # [n] float32, natural logarithms
    total: float  # sum of the log-probs; of a pair, of its completion
    greedy: bool | None  # whether each of these tokens is the likeliest; None: `top` is 0
    top_ids: IntArray  # [n, top] int32, the likeliest tokens
    top_logprobs: FloatArray  # [n, top] float32, descending
    id_logprobs: FloatArray  # [n, ids] float32
    version: int  # of the weights


def listed_texts(texts: Scored | Sequence[Scored]) -> list[Scored]:
    """Return one thing to score or several as a list. A tuple is a pair. Raises DataError."""
    if isinstance(texts, str | bytes | tuple) or _are_ids(texts):
        return [texts]  # type: ignore[list-item]
    if not isinstance(texts, Sequence):
        raise DataError(
            f"texts is a {type(texts).__name__}. Give a text, token ids, or a list of texts, token "
            "ids or pairs (prompt, completion)."
        )
    return list(texts)  # type: ignore[arg-type]


def tokens_to_score(
    item: object, index: int, tokenizer: Tokenizer, opening: Callable[[list[Any]], IntArray]
) -> tuple[IntArray, int]:
    """Return the tokens of something to score, [n] int32, and the first of them that is scored.

    Args:
        item: what `texts` has at `index`.
        index: for messages.
        tokenizer: of the policy.
        opening: writes messages as tokens, up to where the policy's turn begins.

    Raises DataError.
    """
    if isinstance(item, str):
        return tokenizer.encode_prompt(item, VERBATIM), 0
    if _are_ids(item):
        return np.asarray(item, np.int32), 0
    if not (isinstance(item, tuple) and len(item) == 2):
        raise DataError(
            f"texts[{index}] is {item!r:.80}. Give a text, token ids, or (prompt, completion)."
        )
    prompt, completion = item
    if isinstance(prompt, str):
        before = tokenizer.encode_prompt(prompt, VERBATIM)
    elif _are_ids(prompt):
        before = np.asarray(prompt, np.int32)
    elif prompt and isinstance(prompt, Sequence) and all(isinstance(m, Mapping) for m in prompt):
        before = opening(list(prompt))
    else:
        raise DataError(f"texts[{index}]: the prompt is {prompt!r:.80}, not a text or messages.")
    if isinstance(completion, str):
        joins = isinstance(prompt, str)
        after = (
            tokenizer.encode_after(prompt, completion) if joins else tokenizer.encode(completion)
        )
    elif _are_ids(completion):
        after = np.asarray(completion, np.int32)
    else:
        raise DataError(f"texts[{index}]: the completion is {completion!r:.80}, not a text.")
    if not len(before) or not len(after):
        which = "prompt" if not len(before) else "completion"
        raise DataError(f"texts[{index}]: the {which} has no tokens, so there is nothing to score.")
    return np.concatenate([before, after]).astype(np.int32), len(before)


def scored_text(request: Request, done: Completion, tokenizer: Tokenizer) -> ScoredText:
    """Return a sampler's answer to a request that scores its prompt."""
    scores, options = done.prompt_logprobs, request.logprobs
    assert scores is not None and scores.version is not None and options is not None
    pieces = [tokenizer.token_bytes(int(i)) for i in request.token_ids]
    first, ids = max(options.start, 1), request.token_ids
    greedy = bool((scores.top_ids[first:, 0] == ids[first:]).all()) if options.top else None
    return ScoredText(
        text=b"".join(pieces).decode(errors="replace"),
        token_ids=ids,
        starts=_starts(pieces),
        logprobs=scores.logprobs,
        total=float(scores.logprobs[first:].sum(dtype=np.float64)),
        greedy=greedy,
        top_ids=scores.top_ids,
        top_logprobs=scores.top_logprobs,
        id_logprobs=scores.id_logprobs,
        version=scores.version,
    )


def _are_ids(value: object) -> bool:
    if isinstance(value, np.ndarray):
        return value.ndim == 1 and np.issubdtype(value.dtype, np.integer)
    whole = (int, np.integer)
    return (
        isinstance(value, Sequence)
        and not isinstance(value, bytes)
        and len(value) > 0
        and all(isinstance(i, whole) for i in value)
    )


def _starts(pieces: Sequence[bytes]) -> IntArray:
    """Return the index of the character that holds the first byte of each token."""
    before = np.cumsum([0, *map(_characters, pieces[:-1])])
    inside = [_characters(piece[:1]) == 0 and len(piece) > 0 for piece in pieces]
    return np.maximum(before - inside, 0).astype(np.int32)


def _characters(piece: bytes) -> int:
    """Return the number of characters of UTF-8 that begin in these bytes."""
    return sum(byte & 0xC0 != 0x80 for byte in piece)
