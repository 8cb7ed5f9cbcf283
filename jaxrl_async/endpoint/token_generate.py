"""vLLM's /inference/v1/generate: token ids to token ids, with all data that a trainer needs.
Pure.

In addition to vLLM's fields, an answer has `kept_tokens` (as `sampling_mask`, its name there),
`routed_experts` and `weight_versions`.
"""

import base64
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from jaxrl_async.endpoint.body_fields import BodyFields
from jaxrl_async.endpoint.generation import GeneratedAnswer
from jaxrl_async.endpoint.http_answers import (
    AnswerFormat,
    AnswerHeader,
    TokenRow,
    openai_usage,
    prompt_row,
)
from jaxrl_async.endpoint.openai_text import MAX_PROMPT, USUAL_TOKENS
from jaxrl_async.endpoint.request_fields import GENERATE, SAMPLING_PARAMS
from jaxrl_async.endpoint.sampling_request import (
    MAX_COUNT,
    MAX_TOP,
    NO_OTHERS,
    SamplingOptions,
    ShownLogprobs,
    logprobs_of,
    sampling_options,
)
from jaxrl_async.types import Completion, ExpertIds


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenCall:
    """A checked call."""

    token_ids: tuple[int, ...]
    options: SamplingOptions
    request_id: str | None = None
    logprobs: bool = False
    shown: ShownLogprobs = NO_OTHERS
    ignored: tuple[str, ...] = ()
    routes_from: int = 0  # first token of the sequence whose experts are returned
    return_prompt: bool = False


def token_call(body: object) -> TokenCall:
    """Convert a body to a call. Raises CallRefused that names the field."""
    fields = BodyFields(body)
    token_ids = tuple(fields.token_ids("token_ids", MAX_PROMPT))
    if not token_ids:
        fields.refuse("token_ids", "a list of token ids")
    inner = fields.inner("sampling_params", {})
    logprobs = inner.whole("logprobs", 0, MAX_TOP)
    shown = logprobs_of(inner, logprobs or 0)
    count = inner.whole("n", 1, MAX_COUNT) or 1
    least = 1 if shown.prompt is None else 0
    options = sampling_options(inner, count=count, usual=USUAL_TOKENS, least=least)
    call = TokenCall(
        token_ids=token_ids,
        options=replace(
            options, extras=fields.flag("return_sampling_mask"), logprobs=shown.request
        ),
        request_id=fields.text("request_id"),
        logprobs=logprobs is not None,
        shown=shown,
        routes_from=inner.whole("routed_experts_prompt_start", 0) or 0,
        return_prompt=fields.flag("return_token_ids"),
    )
    return replace(call, ignored=(*fields.settle(GENERATE), *inner.settle(SAMPLING_PARAMS)))


def token_body(
    call: TokenCall, heading: AnswerHeader, answers: Sequence[GeneratedAnswer], words: AnswerFormat
) -> dict[str, Any]:
    """Return the body of an answer. Serialise without spaces: clients search it for the experts."""
    prompt = np.array(call.token_ids, np.int32)
    row = prompt_row(prompt, answers[0].completion.prompt_logprobs)
    return {
        "request_id": call.request_id or heading.id,
        "choices": [_choice(call, i, answer, words) for i, answer in enumerate(answers)],
        "prompt_logprobs": None
        if call.shown.prompt is None
        else words.prompt_logprobs(row, call.shown),
        "prompt_token_ids": list(call.token_ids) if call.return_prompt else None,
        "usage": openai_usage(len(prompt), answers),
    }


def _choice(
    call: TokenCall, index: int, answer: GeneratedAnswer, words: AnswerFormat
) -> dict[str, Any]:
    completion = answer.completion
    choice: dict[str, Any] = {
        "index": index,
        "token_ids": completion.token_ids.tolist(),
        "finish_reason": answer.finish,
        "stop_reason": answer.stop,
        "logprobs": {"content": _entries(call, completion, words)} if call.logprobs else None,
        **words.origin(completion),
    }
    if (kept := completion.kept) is not None:
        choice["sampling_mask"] = [kept.of(i).tolist() for i in range(len(completion.token_ids))]
    if completion.expert_ids is not None:
        choice["routed_experts"] = routed_experts(completion.expert_ids, call.routes_from)
    return choice


def _entries(call: TokenCall, completion: Completion, words: AnswerFormat) -> list[dict[str, Any]]:
    entries = words.entries(TokenRow.of(completion), call.shown, ids_as_tokens=True)
    return [
        {**entry, "token_id": token}
        for entry, token in zip(entries, completion.token_ids.tolist(), strict=True)
    ]


def routed_experts(expert_ids: ExpertIds, start: int) -> dict[str, Any]:
    """Return the experts of tokens from `start`: base64 of [tokens, layers, k], `data` first."""
    rows = expert_ids[start:]
    dtype = np.uint8 if expert_ids.dtype.itemsize == 1 else np.uint16
    array = np.ascontiguousarray(rows.astype(dtype))
    return {
        "data": base64.b64encode(array.tobytes()).decode("ascii"),
        "shape": list(array.shape),
        "dtype": np.dtype(dtype).name,
        "start": min(start, len(expert_ids)),
    }
