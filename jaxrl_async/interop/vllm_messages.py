"""JSON requests to a vLLM server, and checks of its answers. Pure.

POST /inference/v1/generate takes token ids and returns token ids, log-probs, and for each span of
tokens the label of the weights that sampled it. The label is ours: RUN-VERSION.
"""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from jaxrl_async.errors import RolloutError
from jaxrl_async.sampler.request_checks import num_requested
from jaxrl_async.types import FloatArray, IntArray, Request

CLAMPED = -9990.0
"""Log-probs below this are not numbers: vLLM writes -9999 for NaN and minus infinity."""
VOCABULARY = re.compile(r"Vocabulary size: (\d+)")
NO_TOKEN = 2**31 - 1
"""A token id outside any vocabulary: the server's error message names the vocabulary size."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckedReply:
    """A checked answer to a request."""

    token_ids: IntArray  # [tokens] int32, including the stop token
    logprobs: FloatArray  # [tokens] float32; NaN if the server gave no number
    versions: IntArray  # [tokens] int32
    stopped: bool  # the last token is a stop token
    aborted: bool  # the server ended it before a stop token and before the last token


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerFacts:
    """Information about a server."""

    version: str  # of vLLM
    model: str  # directory or name that the server was started with
    max_length: int  # prompt and answer, tokens
    dtype: str
    logprobs_mode: str
    device: str  # cuda, cpu, ...
    vocab: int | None  # None: not reported


# ---- requests


def request_body(request: Request, number: int, label: str) -> dict[str, Any]:
    """Return the body of a generate call.

    Args:
        request: a checked request.
        number: makes the id unique when a request is sent again.
        label: label of the weights; KV of a prefix is only shared under the same label.
    """
    forced, sampling = request.forced_length, request.sampling
    return {
        "request_id": f"{request.request_id}#{number}",
        "token_ids": request.token_ids.tolist(),
        "cache_salt": label,
        "sampling_params": {
            "temperature": sampling.temperature,
            "top_k": sampling.top_k,
            "top_p": sampling.top_p,
            "min_p": sampling.min_p,
            "max_tokens": num_requested(request),
            "min_tokens": forced or 0,
            "stop_token_ids": list(request.stop_token_ids) if forced is None else [],
            "ignore_eos": True,  # the request sets its stop tokens
            "logprobs": 0,  # only of the sampled token
            "detokenize": False,
        },
    }


def probe_body(token_ids: IntArray) -> dict[str, Any]:
    """Return the body of a generate call that asks for the log-probs of a prompt."""
    return {
        "token_ids": token_ids.tolist(),
        "sampling_params": {"max_tokens": 1, "prompt_logprobs": 0, "detokenize": False},
    }


def vocabulary_body() -> dict[str, Any]:
    """Return the body of a generate call that the server rejects with its vocabulary's size."""
    return {
        "token_ids": [0],
        "sampling_params": {"max_tokens": 1, "stop_token_ids": [NO_TOKEN], "detokenize": False},
    }


def reply_limit(tokens: int) -> int:
    """Return the maximum size, in bytes, of an answer with this number of tokens."""
    return 64 * 1024 + 1024 * tokens


# ---- answers


class BadReply(RolloutError):
    """A server's answer does not have vLLM's format."""


def checked_reply(reply: object, request: Request, run: str, floor: int) -> CheckedReply:
    """Return the checked answer to a request.

    Args:
        reply: the JSON of a generate call.
        request: the request that it answers.
        run: prefix of our labels.
        floor: version of the server's weights when the request was sent. It applies to all tokens
            if the server returns no labels.

    Raises BadReply that says what is wrong.
    """
    name = f"request {request.request_id!r}"
    choice = _first(_field(reply, "choices", list, name), name)
    token_ids = _whole_numbers(_field(choice, "token_ids", list, name), f"{name}: token_ids")
    entries = _field(_field(choice, "logprobs", dict, name), "content", list, name)
    if len(entries) != len(token_ids):
        raise BadReply(f"{name}: {len(token_ids)} tokens, but {len(entries)} log-probs.")
    for token, entry in zip(token_ids, entries, strict=True):
        if _field(entry, "token_id", int, name) != token:
            raise BadReply(f"{name}: a log-prob is of token {entry['token_id']}, not of {token}.")
    logprobs = np.array([_logprob(e, name) for e in entries], np.float32)
    aborted = choice.get("finish_reason") == "abort"
    stopped = _check_end(token_ids, request, aborted, name)
    return CheckedReply(
        token_ids=token_ids,
        logprobs=logprobs,
        versions=versions_of(choice.get("weight_versions"), len(token_ids), run, floor, name),
        stopped=stopped,
        aborted=aborted,
    )


def _check_end(token_ids: IntArray, request: Request, aborted: bool, name: str) -> bool:
    """Return whether the last token is a stop token. Raises BadReply unless the answer ends as the
    request requires."""
    requested = num_requested(request)
    if len(token_ids) > requested:
        raise BadReply(f"{name}: {len(token_ids)} tokens, but {requested} were requested.")
    stops = request.stop_token_ids if request.forced_length is None else ()
    is_stop = np.isin(token_ids, stops)
    if is_stop[:-1].any():
        raise BadReply(f"{name}: tokens follow a stop token.")
    stopped = bool(len(token_ids) and is_stop[-1])
    if not (aborted or stopped or len(token_ids) == requested):
        raise BadReply(
            f"{name}: it ends after {len(token_ids)} of {requested} tokens without a stop token. "
            "Start the server with a --max-model-len of at least sampler.max_length."
        )
    return stopped


def versions_of(spans: object, count: int, run: str, floor: int, name: str) -> IntArray:
    """Return the version of each token from the server's labels, `floor` without labels.

    Raises BadReply if labels are missing, or if another run's weights sampled a token.
    """
    if spans is None:
        return np.full(count, floor, np.int32)
    versions = np.full(count, -1, np.int32)
    for span in spans if isinstance(spans, list) else [None]:
        start, end = _field(span, "start", int, name), _field(span, "end", int, name)
        label = _field(span, "version", str, name)
        if not 0 <= start <= end <= count:
            raise BadReply(f"{name}: weight_versions names tokens {start} to {end} of {count}.")
        if end > start:
            versions[start:end] = version_of(label, run)
    if (versions < 0).any() or (np.diff(versions) < 0).any():
        raise BadReply(f"{name}: weight_versions skips tokens, or decreases: {spans!r:.200}.")
    return versions


def label_of(run: str, version: int) -> str:
    """Return the label of a version of the weights."""
    return f"{run}-{version}"


def version_of(label: str, run: str) -> int:
    """Return the version in a label. Raises BadReply if it is not a label of this run."""
    ours, _, number = label.partition("-")
    if ours != run or not number.isdecimal() or int(number) > NO_TOKEN:
        raise BadReply(
            f"tokens were sampled by weights labelled {label[:80]!r}, which this run did not load: "
            "the server was restarted, or another program loads weights into it. Give each run "
            "its own servers."
        )
    return int(number)


def prompt_logprobs_of(reply: object, token_ids: IntArray) -> FloatArray:
    """Return the log-probs [n - 1] of a prompt's tokens after the first. Raises BadReply."""
    name = "the probe"
    entries = _field(reply, "prompt_logprobs", list, name)
    if len(entries) != len(token_ids):
        raise BadReply(f"{name}: {len(token_ids)} tokens, but {len(entries)} log-probs.")
    pairs = zip(entries[1:], token_ids[1:], strict=True)
    return np.array([_logprob(_field(e, str(t), dict, name), name) for e, t in pairs], np.float32)


def facts_of(info: object, version: object, refusal: str) -> ServerFacts:
    """Parse a server's information. Raises BadReply.

    Args:
        info: the JSON of /server_info.
        version: the JSON of /version.
        refusal: its error message for a token id outside any vocabulary.
    """
    name = "/server_info"
    config = _field(info, "vllm_config", dict, name)
    model = _field(config, "model_config", dict, name)
    size = VOCABULARY.search(refusal)
    return ServerFacts(
        version=_field(version, "version", str, "/version"),
        model=_field(model, "model", str, name),
        max_length=_field(model, "max_model_len", int, name),
        dtype=_field(model, "dtype", str, name).removeprefix("torch."),
        logprobs_mode=_field(model, "logprobs_mode", str, name),
        device=_field(_field(config, "device_config", dict, name), "device", str, name),
        vocab=None if size is None else int(size.group(1)),
    )


def problem_with(
    facts: ServerFacts, vocab: int, max_length: int, *, tied: bool, plain: bool, dtype: str
) -> str | None:
    """Return why a server cannot sample for a run, and how to fix it; None: it can.

    Args:
        facts: information about the server.
        vocab: size of the policy's vocabulary.
        tied: whether the policy's embedding is also its output head.
        max_length: maximum sequence length, tokens.
        plain: whether tokens are sampled from the unmodified logits.
        dtype: dtype of the trainer's computation.
    """
    if facts.vocab is not None and facts.vocab != vocab:
        return (
            f"it serves a model with a vocabulary of {facts.vocab}, but the policy's has {vocab}. "
            "Start it with the directory in model.path."
        )
    if tied and facts.device == "cpu":
        return (
            "vLLM's CPU build keeps the old output head when it loads new weights of a model whose "
            "embedding is also its head. Use a model with tie_word_embeddings=false "
            "(model.architecture.tied=false), or a server on an accelerator."
        )
    if facts.max_length < max_length:
        return (
            f"its sequences have at most {facts.max_length} tokens, but sampler.max_length is "
            f"{max_length}. Start it with --max-model-len {max_length}."
        )
    modes = ("processed_logprobs", "raw_logprobs") if plain else ("processed_logprobs",)
    if facts.logprobs_mode not in modes:
        return (
            f"it returns log-probs in the mode {facts.logprobs_mode}, not those of the sampling "
            "distribution. Start it with --logprobs-mode processed_logprobs."
        )
    if facts.dtype != dtype:
        return (
            f"it computes in {facts.dtype}, but model.dtype is {dtype}. Start it with --dtype "
            f"{dtype}, or change model.dtype."
        )
    return None


def refusal_text(reply: object) -> str:
    """Return the message of an error reply, shortened."""
    error = reply.get("error", reply) if isinstance(reply, Mapping) else reply
    message = error.get("message", error) if isinstance(error, Mapping) else error
    return str(message)[:300]


Kind = type[dict] | type[list] | type[int] | type[str]


def _field(record: object, key: str, kind: Kind, name: str) -> Any:
    """Return a field of a JSON object. Raises BadReply if it is missing or of another type."""
    value = record.get(key) if isinstance(record, dict) else None
    if not isinstance(value, kind) or isinstance(value, bool):
        raise BadReply(
            f"{name}: {key} is {value!r:.80} in the server's answer, not a {kind.__name__}. "
            "This package supports vLLM 0.32."
        )
    return value


def _first(choices: Sequence[object], name: str) -> dict[str, Any]:
    if len(choices) != 1 or not isinstance(choices[0], dict):
        raise BadReply(f"{name}: {len(choices)} answers, but one was requested.")
    return choices[0]


def _whole_numbers(values: Sequence[object], name: str) -> IntArray:
    if not all(type(v) is int and 0 <= v < NO_TOKEN for v in values):
        raise BadReply(f"{name} are not all token ids: {list(values)!r:.80}.")
    return np.array(values, np.int32)


def _logprob(entry: object, name: str) -> float:
    value = entry.get("logprob") if isinstance(entry, dict) else None
    if not isinstance(value, int | float) or isinstance(value, bool):
        raise BadReply(f"{name}: a log-prob is {value!r:.80}, not a number.")
    return value if CLAMPED < value < math.inf else math.nan


PauseMode = Literal["keep", "wait", "abort"]
PAUSES: dict[str, tuple[PauseMode, bool]] = {
    "continue": ("keep", False),
    "recompute": ("keep", True),
    "drain": ("wait", True),
    "restart": ("abort", True),
}
"""By sampler.on_new_weights: the server's pause mode, and whether it clears its KV cache."""
