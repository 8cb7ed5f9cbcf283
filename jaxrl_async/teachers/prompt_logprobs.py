"""Bodies that ask a server for the log-probs of a prompt's tokens, and what it answers. Pure.

    completions  POST /v1/completions          {prompt: ids, prompt_logprobs: k}
    generate     POST /inference/v1/generate   {token_ids: ids, sampling_params: {prompt_logprobs}}
    echo         POST /v1/completions          {prompt: ids, echo, logprobs}

The first two are vLLM's, and name tokens by id; the last is OpenAI's first protocol.
"""

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from jaxrl_async.types import FloatArray, IntArray

Protocol = Literal["completions", "generate", "echo"]


class UnreadableLogprobs(ValueError):
    """A server's answer has not the log-probs that it was asked for; the message says which."""


class ContextLogprobs(NamedTuple):
    """The log-probs of a context's tokens, each given the tokens before it; n tokens. The first
    token's are NaN, with ids of 0."""

    logprobs: FloatArray  # [n] float32
    top_ids: IntArray  # [n, k] int32
    top_logprobs: FloatArray  # [n, k] float32, descending

    def at(self, indices: NDArray[np.integer[Any]]) -> "ContextLogprobs":
        """Return the log-probs of some of the tokens."""
        return ContextLogprobs(
            self.logprobs[indices], self.top_ids[indices], self.top_logprobs[indices]
        )


def address_of(url: str, protocol: Protocol) -> str:
    """Return the full address of a protocol at a server's `url`, which ends in /v1."""
    base = url.rstrip("/")
    if protocol == "generate":
        return f"{base.removesuffix('/v1')}/inference/v1/generate"
    return f"{base}/completions"


def scoring_body(
    protocol: Protocol, model: str | None, token_ids: IntArray, top_k: int
) -> dict[str, Any]:
    """Return the body that asks for the log-probs of these tokens, [n] int32.

    vLLM samples at least one token: it is asked for one, which is not used.
    """
    ids = token_ids.tolist()
    if protocol == "generate":
        wanted = {"prompt_logprobs": top_k, "max_tokens": 1, "temperature": 1.0}
        return {"model": model, "token_ids": ids, "sampling_params": wanted}
    common = {"model": model, "prompt": ids, "max_tokens": 1, "temperature": 1.0}
    if protocol == "completions":
        return {**common, "prompt_logprobs": top_k}
    return {**common, "echo": True, "logprobs": 1}


def read_scores(
    protocol: Protocol, content: bytes, token_ids: IntArray, top_k: int, vocab: int
) -> ContextLogprobs:
    """Return the log-probs in an answer to `scoring_body`. Raises UnreadableLogprobs.

    vocab: the policy's number of tokens; a likely token beyond is refused.
    """
    try:
        answer = json.loads(content)
        if protocol == "echo":
            items = answer["choices"][0]["logprobs"]["token_logprobs"]
        elif protocol == "generate":
            items = answer["prompt_logprobs"]
        else:
            items = answer["choices"][0]["prompt_logprobs"]
    except (ValueError, LookupError, TypeError, RecursionError):
        text = content[:200].decode(errors="replace")
        raise UnreadableLogprobs(f"it has no log-probs of the prompt: {text}") from None
    if not isinstance(items, list) or len(items) < len(token_ids):
        count = len(items) if isinstance(items, list) else "no"
        raise UnreadableLogprobs(f"it has log-probs of {count} tokens for {len(token_ids)}")
    if protocol == "echo":
        return _echoed(items[: len(token_ids)])
    return _by_id(items, token_ids, top_k, vocab)


def _echoed(items: Sequence[object]) -> ContextLogprobs:
    logprobs = [
        math.nan,
        *(_logprob(value, index) for index, value in enumerate(items[1:], 1)),
    ]
    none = np.zeros((len(items), 0))
    return ContextLogprobs(np.array(logprobs, np.float32), none.astype(np.int32), none.astype("f4"))


def _by_id(items: Sequence[object], token_ids: IntArray, top_k: int, vocab: int) -> ContextLogprobs:
    count = len(token_ids)
    logprobs = np.full(count, np.nan, np.float32)
    ids = np.zeros((count, top_k), np.int32)
    likely = np.full((count, top_k), np.nan, np.float32)
    for index in range(1, count):
        known = _position(items[index], index)
        own = int(token_ids[index])
        if own not in known:
            raise UnreadableLogprobs(f"position {index} has no log-prob of its token {own}")
        logprobs[index] = known[own]
        best = sorted(known.items(), key=lambda pair: (-pair[1], pair[0]))[:top_k]
        if len(best) < top_k:
            raise UnreadableLogprobs(
                f"position {index} has {len(best)} likely tokens and not {top_k} (teacher.top_k)"
            )
        if beyond := [token for token, _ in best if not 0 <= token < vocab]:
            raise UnreadableLogprobs(
                f"position {index} names the token {beyond[0]}, and the policy has {vocab}: their "
                "vocabularies differ"
            )
        ids[index] = [token for token, _ in best]
        likely[index] = [logprob for _, logprob in best]
    return ContextLogprobs(logprobs, ids, likely)


def _position(items: object, index: int) -> dict[int, float]:
    """Return the log-probs of a position by token id."""
    if not isinstance(items, Mapping):
        raise UnreadableLogprobs(f"position {index} is {str(items)[:80]}, not an object")
    try:
        return {int(token): _logprob(one["logprob"], index) for token, one in items.items()}
    except (ValueError, TypeError, KeyError) as error:
        if isinstance(error, UnreadableLogprobs):
            raise
        raise UnreadableLogprobs(f"position {index} is {str(items)[:80]}") from None


def _logprob(value: Any, index: int) -> float:
    """Return a log-prob: a finite number; rounding may put it a little above 0."""
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if not number or not math.isfinite(value) or value > 1e-3:
        raise UnreadableLogprobs(f"the log-prob of position {index} is {value!r}")
    return min(float(value), 0.0)
