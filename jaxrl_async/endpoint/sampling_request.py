"""Sampling parameters of a call, the limits of its caller, and the resulting request. Pure."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jaxrl_async.data.tokenizer import Tokenizer
from jaxrl_async.endpoint.body_fields import BodyFields
from jaxrl_async.endpoint.http_errors import CallRefused
from jaxrl_async.ports.rollout import ChatFormat
from jaxrl_async.sampler.request_checks import (
    LARGEST,
    LEAST_TEMPERATURE,
)
from jaxrl_async.types import MAX_STOP_TOKENS, SamplingParams

TOO_LONG = "context_length_exceeded"
"""Error code for a prompt that leaves no room for an answer, as in OpenAI's API."""
MAX_COUNT = 128
"""Maximum number of answers of one call."""
MAX_STOPS = 16
"""Maximum number of stop strings of one call."""
MAX_STOP_LENGTH = 256
"""Maximum length of a stop string, characters."""
MAX_ASKED = 2**63
"""Largest number of tokens that a client may request; the actual number is capped."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingOptions:
    """The sampling parameters of a call of any protocol. None: as in the caller's terms."""

    count: int = 1  # number of answers
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    max_new_tokens: int | None = None
    stops: tuple[str, ...] = ()  # strings that end an answer
    stop_token_ids: tuple[int, ...] = ()
    ends_at_eos: bool = True  # whether the model's stop tokens also end an answer
    seed: int | None = None  # of the random numbers, 32 bits
    extras: bool = False  # whether sampling masks are returned, too


@dataclass(frozen=True, slots=True, kw_only=True)
class CallerLimits:
    """The settings and limits of the answers to a caller."""

    sampling: SamplingParams
    stop_token_ids: tuple[int, ...]  # of the model
    max_new_tokens: int  # of one answer
    max_length: int  # prompt and answer, tokens
    fixed_sampling: bool = False  # whether calls cannot change `sampling`: a run trains on it
    extras: bool = False  # whether a run keeps sampling masks
    priority: tuple[int, int] = (0, 0)  # of a guest's requests


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestDraft:
    """A wish under a caller's terms."""

    sampling: SamplingParams
    stop_token_ids: tuple[int, ...]
    max_new_tokens: int
    extras: bool
    capped: bool  # whether more tokens were requested than allowed
    overridden: bool  # whether a distribution was requested that is not allowed


def drafted(wish: SamplingOptions, terms: CallerLimits, prompt: int) -> RequestDraft:
    """Apply a caller's terms to a wish. Raises CallRefused if the prompt leaves no room.

    Args:
        wish: parameters of the call.
        terms: terms of its caller.
        prompt: length of the prompt, tokens.
    """
    room = terms.max_length - prompt
    if room < 1:
        raise CallRefused(
            f"This model's maximum context length is {terms.max_length} tokens, but the prompt has "
            f"{prompt}: there is no room for an answer. Shorten it, or start a new conversation.",
            code=TOO_LONG,
        )
    stops = tuple(
        dict.fromkeys((*(terms.stop_token_ids if wish.ends_at_eos else ()), *wish.stop_token_ids))
    )
    if len(stops) > MAX_STOP_TOKENS:
        raise CallRefused(
            f"including the model's, there are {len(stops)} stop tokens; at most "
            f"{MAX_STOP_TOKENS} are allowed",
            field="stop_token_ids",
        )
    wanted = wish_sampling(wish, terms.sampling)
    most = min(terms.max_new_tokens, room)
    asked = most if wish.max_new_tokens is None else wish.max_new_tokens
    return RequestDraft(
        sampling=terms.sampling if terms.fixed_sampling else wanted,
        stop_token_ids=stops,
        max_new_tokens=min(asked, most),
        extras=wish.extras or terms.extras,
        capped=asked > most,
        overridden=terms.fixed_sampling and wanted != terms.sampling,
    )


def stop_ids(tokenizer: Tokenizer, chat: ChatFormat | None) -> tuple[int, ...]:
    """Return the tokens that end an answer, from the chat format and the tokenizer."""
    ids = (*(() if chat is None else chat.stop_token_ids), *tokenizer.eos_ids)
    return tuple(dict.fromkeys(ids))[:MAX_STOP_TOKENS]


def wish_sampling(wish: SamplingOptions, default: SamplingParams) -> SamplingParams:
    """Return the sampling distribution of a wish."""
    return SamplingParams(
        temperature=default.temperature if wish.temperature is None else wish.temperature,
        top_k=default.top_k if wish.top_k is None else wish.top_k,
        top_p=default.top_p if wish.top_p is None else wish.top_p,
        min_p=default.min_p if wish.min_p is None else wish.min_p,
    )


# ---- fields that several protocols share


def temperature_of(fields: BodyFields) -> float | None:
    """Return the temperature; None: not given. Raises CallRefused."""
    value = fields.number("temperature", 0.0, LARGEST)
    if value is not None and 0 < value < LEAST_TEMPERATURE:
        fields.refuse("temperature", f"0 (greedy) or at least {LEAST_TEMPERATURE:g}")
    return value


def top_p_of(fields: BodyFields) -> float | None:
    """Return top-p; None: not given. Raises CallRefused."""
    value = fields.number("top_p", 0.0, 1.0)
    if value == 0:
        fields.refuse("top_p", "above 0 and at most 1")
    return value


def top_k_of(fields: BodyFields) -> int | None:
    """Return top-k, 0 for all tokens (-1 in other servers); None: not given."""
    value = fields.whole("top_k", -1, 2**31 - 1)
    return value if value is None else max(value, 0)


def min_p_of(fields: BodyFields) -> float | None:
    """Return min-p; None: not given. Raises CallRefused."""
    value = fields.number("min_p", 0.0, 1.0)
    if value == 1:
        fields.refuse("min_p", "at least 0 and below 1")
    return value


def seed_of(fields: BodyFields) -> int | None:
    """Return the low 32 bits of a seed, as a signed number; None: not given."""
    value = fields.whole("seed", -(2**63), 2**64 - 1)
    return value if value is None else (value + 2**31) % 2**32 - 2**31


def stops_of(fields: BodyFields, field: str) -> tuple[str, ...]:
    """Return the stop strings, given as one text or a list. Raises CallRefused."""
    value: Any = fields.value(field)
    given: Sequence[Any] = [value] if isinstance(value, str) else fields.rows(field, MAX_STOPS)
    for stop in given:
        if not isinstance(stop, str) or not 1 <= len(stop) <= MAX_STOP_LENGTH:
            raise CallRefused(
                f"must hold texts of 1 to {MAX_STOP_LENGTH} characters", field=fields.name(field)
            )
    return tuple(given)


NEUTRAL_SAMPLING: Mapping[str, Any] = {
    "frequency_penalty": (0,),
    "presence_penalty": (0,),
    "repetition_penalty": (1,),
    "logit_bias": ({},),
    "response_format": ({"type": "text"},),
    "best_of": (1,),
    "use_beam_search": (False,),
    "length_penalty": (1,),
    "bad_words": ([],),
    "include_stop_str_in_output": (False,),
    "skip_special_tokens": (True,),
    "spaces_between_special_tokens": (True,),
    "truncate_prompt_tokens": (),
    "allowed_token_ids": (),
    "logits_processors": ([],),
    "echo": (False,),
    "suffix": (),
    "prompt_logprobs": (),
    "modalities": (["text"],),
    "audio": (),
    "prediction": (),
    "reasoning_effort": (),
    "verbosity": (),
    "web_search_options": (),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "continue_final_message": (False,),
    "add_generation_prompt": (True,),
    "guided_json": (),
    "guided_regex": (),
    "structured_outputs": (),
}
"""Unsupported fields of completions, with the values that have no effect."""
HARMLESS_FIELDS = frozenset(
    {
        "model",  # there is only one
        "user",
        "metadata",
        "store",
        "service_tier",
        "safety_identifier",
        "prompt_cache_key",
        "prompt_cache_retention",
        "cache_salt",
        "priority",
        "request_id",
        "parallel_tool_calls",
        "detokenize",
    }
)
"""Fields that do not affect the answer."""
