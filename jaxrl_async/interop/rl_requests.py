"""Convert requests of the RL sampler protocol (rl_sampler.py) to ours. Unsupported parameters are
rejected by name, never ignored silently. Pure."""

import dataclasses
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np

from jaxrl_async.errors import RolloutError
from jaxrl_async.sampler.request_checks import checked_ids
from jaxrl_async.types import Request, SamplingParams

SEEDED = -2
"""First part of the keys of requests with a seed; no prompt and no other request uses it."""
SEED_END = 2**31

SERVED = (
    "max_tokens", "temperature", "top_k", "top_p", "min_p", "seed", "stop_token_ids", "ignore_eos",
    "return_logprobs", "logprobs", "return_routed_experts", "routed_experts_prompt_start",
)  # fmt: skip
WITHOUT_EFFECT = ("detokenize", "output_kind", "route_key")
"""Parameters that change no token: the answer's text (always returned), streaming (not supported)
and the choice of a sampler (only one exists)."""

AGAIN = "send the request several times: each one samples different tokens"
ANOTHER_DISTRIBUTION = (
    "tokens are sampled from the policy's own distribution, with temperature, top_k, top_p and "
    "min_p only: remove it"
)
NO_BEAMS = "beam search is not supported: remove it"
BY_IDS = "answers end at tokens, not at texts: pass the tokens' ids as stop_token_ids"
FROM_IDS = "decode the response's token_ids yourself, and remove it"

NOT_SERVED: dict[str, tuple[tuple[Any, ...], str]] = {
    "n": ((1,), AGAIN),
    "best_of": ((1,), AGAIN),
    "beam_size": ((0,), NO_BEAMS),
    "use_beam_search": ((False,), NO_BEAMS),
    "length_penalty": ((1,), NO_BEAMS),
    "early_stopping": ((False,), NO_BEAMS),
    "presence_penalty": ((0,), ANOTHER_DISTRIBUTION),
    "frequency_penalty": ((0,), ANOTHER_DISTRIBUTION),
    "repetition_penalty": ((1,), ANOTHER_DISTRIBUTION),
    "min_tokens": ((0,), ANOTHER_DISTRIBUTION),
    "logit_bias": (({}, []), ANOTHER_DISTRIBUTION),
    "allowed_token_ids": (([],), ANOTHER_DISTRIBUTION),
    "bad_words": (([],), ANOTHER_DISTRIBUTION),
    "logits_processors": (([],), ANOTHER_DISTRIBUTION),
    "guided_decoding": ((), ANOTHER_DISTRIBUTION),
    "structured_outputs": ((), ANOTHER_DISTRIBUTION),
    "stop": (("", []), BY_IDS),
    "stop_sequences": (("", []), BY_IDS),
    "include_stop_str_in_output": ((False,), BY_IDS),
    "skip_special_tokens": ((True,), FROM_IDS),
    "spaces_between_special_tokens": ((True,), FROM_IDS),
    "return_logits": ((False,), "return_logprobs gives log-probs of sampled tokens: remove it"),
    "prompt_logprobs": ((False,), "only sampled tokens have log-probs here: remove it"),
    "truncate_prompt_tokens": ((-1,), "prompts are not truncated: shorten the prompt"),
}
"""Unsupported parameters: the values that have no effect, and what to do instead."""
KNOWN = frozenset((*SERVED, *WITHOUT_EFFECT, *NOT_SERVED))
OF_A_REQUEST = ("prompt", "request_id", "sampling_params", "metadata")
"""Fields of a request; the last is for the caller's own use."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckedRequest:
    """A request, and what its response must contain."""

    name: str  # given by the caller
    request: Request
    wants_logprobs: bool
    wants_experts: bool
    experts_from: int  # first token whose experts the response has


def value_of(record: object, key: str, default: object = None) -> Any:
    """Return a field of a record or a mapping; default: if it is missing or None."""
    value = record.get(key) if isinstance(record, Mapping) else getattr(record, key, None)
    return default if value is None else value


def name_of(given: object, number: int) -> str:
    """Return a request's name: its own, or one made from its number."""
    own = "" if _is_prompt(given) else str(value_of(given, "request_id") or "")
    return own or f"request-{number}"


def checked_request_of(
    given: object,
    usual: Mapping[str, object],
    number: int,
    tokenizer: Any,
    *,
    usual_length: int,
    keeps_experts: bool,
) -> CheckedRequest:
    """Convert a request.

    Args:
        given: a text, token ids, or a record or mapping with `prompt` and, optionally, `request_id`
            and `sampling_params`.
        usual: defaults for sampling parameters that it does not set.
        number: makes its id unique here.
        tokenizer: the tokenizer of data.tokenizer.
        usual_length: maximum tokens of an answer without max_tokens.
        keeps_experts: whether completions contain their tokens' experts, if the model has any.

    Raises RolloutError that names the parameter and the fix.
    """
    name, is_prompt = name_of(given, number), _is_prompt(given)
    if not is_prompt:
        _check_request(given)
    own = None if is_prompt else value_of(given, "sampling_params")
    params = {**_params_of(usual), **_params_of(own)}
    _check_served(params)
    prompt = given if is_prompt else value_of(given, "prompt")
    tokens = np.asarray(tokenizer.encode_prompt(prompt) if isinstance(prompt, str) else prompt)
    if tokens.ndim != 1 or tokens.dtype.kind not in "iu" or not len(tokens):
        raise RolloutError("prompt is neither a text nor a list of token ids.")
    ids = checked_ids(tokens, None)
    if isinstance(ids, str):
        raise RolloutError(f"prompt: token ids {ids}.")
    wants_experts = bool(params.get("return_routed_experts", False))
    if wants_experts and not keeps_experts:
        raise RolloutError(
            "return_routed_experts: this sampler does not keep them. Make it with "
            "RLSampler(..., settings=SamplerSettings(keep_routing=True))."
        )
    top_k, logprobs = params.get("top_k", 0), params.get("logprobs", False)
    experts_from = params.get("routed_experts_prompt_start", 0)
    if not (_is_whole(experts_from) and 0 <= experts_from <= len(tokens)):
        raise RolloutError(
            f"routed_experts_prompt_start must be a whole number from 0 to {len(tokens)}, the "
            f"prompt's length, not {experts_from!r}."
        )
    if not (isinstance(logprobs, bool) or (_is_whole(logprobs) and 0 <= logprobs <= 1)):
        raise RolloutError(
            f"logprobs is {logprobs!r}, but responses have only the log-probs of sampled tokens: "
            "set it to 1, or use return_logprobs."
        )
    request = Request(
        request_id=f"{name}#{number}",  # unique here, whatever name the caller gave
        token_ids=ids,
        max_new_tokens=params.get("max_tokens", usual_length),
        sampling=SamplingParams(
            temperature=params.get("temperature", 1.0),
            top_k=0 if _is_whole(top_k) and top_k == -1 else top_k,  # vLLM's -1 means all
            top_p=params.get("top_p", 1.0),
            min_p=params.get("min_p", 0.0),
        ),
        stop_token_ids=_stops(params, tokenizer.eos_ids),
        key=_key(params.get("seed", -1)),
    )
    return CheckedRequest(
        name=name,
        request=request,
        wants_logprobs=bool(params.get("return_logprobs", False)) or logprobs is not False,
        wants_experts=wants_experts,
        experts_from=int(experts_from),
    )


def _is_prompt(given: object) -> bool:
    return isinstance(given, str | np.ndarray | list | tuple)


def _is_whole(value: object) -> bool:
    return isinstance(value, int | np.integer) and not isinstance(value, bool)


def _params_of(params: object) -> dict[str, Any]:
    """Return the sampling parameters of a record or a mapping that are not None. Raises
    RolloutError if it is neither."""
    fields = _fields(params, KNOWN)
    if not isinstance(params, Mapping | None) and not any(hasattr(params, key) for key in KNOWN):
        raise RolloutError(
            f"sampling_params is {params!r:.80}, neither a record of sampling parameters nor a "
            "mapping."
        )
    return {key: value for key, value in fields.items() if value is not None}


def _fields(record: object, named: Collection[str]) -> dict[str, Any]:
    """Return the fields of a record or a mapping: all fields of a mapping or a namespace, else the
    `named` ones. For a dataclass, other fields are included if they differ from their defaults."""
    if isinstance(record, Mapping | SimpleNamespace):
        return dict(record if isinstance(record, Mapping) else vars(record))
    fields = {key: getattr(record, key) for key in named if hasattr(record, key)}
    if dataclasses.is_dataclass(record):
        for one in dataclasses.fields(record):
            value = getattr(record, one.name)
            if one.name not in named and not _same(value, _default(one)):
                fields[one.name] = value
    return fields


def _check_request(given: object) -> None:
    """Raise RolloutError for unknown or misplaced fields of a request."""
    fields = _fields(given, OF_A_REQUEST)
    others = {key: fields[key] for key in sorted(fields.keys() - set(OF_A_REQUEST))}
    if misplaced := [key for key in others if key in KNOWN]:
        raise RolloutError(f"{', '.join(misplaced)}: put sampling parameters into sampling_params.")
    for key, value in others.items():
        if value is not None and value is not False:
            raise RolloutError(
                f"{key} is {value!r:.80}, but requests to this sampler have no such field: remove "
                f"it. Requests have {', '.join(OF_A_REQUEST)}."
            )


def _default(field: Any) -> Any:
    if field.default_factory is not dataclasses.MISSING:
        return field.default_factory()
    return None if field.default is dataclasses.MISSING else field.default


def _check_served(params: Mapping[str, object]) -> None:
    """Raise RolloutError for a parameter that this sampler does not support."""
    for key, value in params.items():
        neutral, instead = NOT_SERVED.get(key, ((), ""))
        if instead and not any(_same(value, none) for none in neutral):
            raise RolloutError(f"{key} is {value!r:.80}, which is not served: {instead}.")
        if key not in KNOWN and value is not False:
            raise RolloutError(
                f"{key} is {value!r:.80}, but this sampler has no such parameter: remove it. "
                f"Supported are {', '.join(SERVED)}."
            )


def _same(value: Any, neutral: Any) -> bool:
    if isinstance(neutral, bool) or isinstance(value, bool):
        return value is neutral
    return bool(np.array_equal(value, neutral))


def _stops(params: Mapping[str, object], eos_ids: Iterable[int]) -> tuple[int, ...]:
    """Return the tokens that end an answer, from the tokenizer and the request."""
    own = params.get("stop_token_ids", ())
    if isinstance(own, str) or not isinstance(own, Iterable):
        raise RolloutError(f"stop_token_ids must be a list of token ids, not {own!r:.80}.")
    usual = () if params.get("ignore_eos", False) else eos_ids
    return tuple(dict.fromkeys([*usual, *own]))


def _key(seed: Any) -> tuple[int, int] | None:
    """Return the key of a request with this seed; None for -1, which means no seed."""
    if not (_is_whole(seed) and -1 <= seed < SEED_END):
        raise RolloutError(
            f"seed must be a whole number from 0 to {SEED_END - 1}, not {seed!r}. Without a seed, "
            "each request samples different tokens."
        )
    return None if seed == -1 else (SEEDED, int(seed))
