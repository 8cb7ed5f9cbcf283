"""Sampling parameters of a call, the limits of its caller, and the resulting request. Pure."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from jaxrl_async.data.tokenizer import Tokenizer
from jaxrl_async.endpoint.answer_constraint import constraint_of
from jaxrl_async.endpoint.body_fields import BodyFields
from jaxrl_async.endpoint.http_errors import CallRefused
from jaxrl_async.ports.rollout import ChatFormat
from jaxrl_async.sampler.request_checks import (
    LARGEST,
    LEAST_TEMPERATURE,
)
from jaxrl_async.types import (
    MAX_BIASED,
    MAX_LOGPROB_IDS,
    MAX_STOP_TOKENS,
    LogitShaping,
    LogprobRequest,
    SamplingParams,
)

TOO_LONG = "context_length_exceeded"
"""Error code for a prompt that leaves no room for an answer, as in OpenAI's API."""
MAX_COUNT = 128
"""Maximum number of answers of one call."""
MAX_STOPS = 16
"""Maximum number of stop strings of one call."""
MAX_STOP_LENGTH = 256
"""Maximum length of a stop string, characters."""
MAX_STOP_IDS = 64
"""Maximum number of stop token ids in a call; the sampler checks a lower limit itself."""
MAX_TOP = 20
"""Maximum number of likeliest tokens whose log-probs a call gets for each position."""
MAX_REQUESTED = 2**63
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
    shaping: LogitShaping | None = None  # None: the model's logits
    logprobs: LogprobRequest | None = None  # None: only for the sampled tokens
    constrained_by: str | None = None  # the field that asks for the constraint


@dataclass(frozen=True, slots=True, kw_only=True)
class ShownLogprobs:
    """The log-probs that an answer shows in addition to its sampled tokens' log-probs."""

    top: int = 0  # of the likeliest tokens of each sampled position
    prompt: int | None = None  # the same of each token of the prompt; None: no prompt's log-probs
    ids: tuple[int, ...] = ()  # of these ids at each of these positions

    @property
    def request(self) -> LogprobRequest | None:
        """The request to the sampler; None: nothing."""
        top = max(self.top, self.prompt or 0)
        if not (top or self.ids or self.prompt is not None):
            return None
        return LogprobRequest(prompt=self.prompt is not None, top=top, ids=self.ids)


NO_OTHERS = ShownLogprobs()
"""Only the log-probs of the sampled tokens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CallerLimits:
    """The settings and limits of the answers to a caller."""

    sampling: SamplingParams
    stop_token_ids: tuple[int, ...]  # of the model
    max_new_tokens: int  # of one answer
    max_length: int  # prompt and answer, tokens
    fixed_sampling: bool = False  # whether calls cannot change `sampling`: a run trains on it
    extras: bool = False  # whether a run keeps sampling masks
    takes_constraints: bool = True  # False: its trainer would not know their masks
    priority: tuple[int, int] = (0, 0)  # of a guest's requests


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestDraft:
    """Options under a caller's terms."""

    sampling: SamplingParams
    stop_token_ids: tuple[int, ...]
    max_new_tokens: int
    extras: bool
    capped: bool  # whether more tokens were requested than allowed
    shaping: LogitShaping | None  # of a guest, whole; of a fixed distribution, its constraint


def draft_request(options: SamplingOptions, terms: CallerLimits, prompt: int) -> RequestDraft:
    """Apply a caller's terms to options. Raises CallRefused if the prompt leaves no room.

    Args:
        options: parameters of the call.
        terms: terms of its caller.
        prompt: length of the prompt, tokens.
    """
    room = terms.max_length - prompt
    scores = options.max_new_tokens == 0
    if scores and terms.fixed_sampling:
        raise CallRefused(
            "a session's call samples at least one token; score with a guest's key",
            field="max_tokens",
        )
    if room < (0 if scores else 1):
        raise CallRefused(
            f"This model's maximum context length is {terms.max_length} tokens, but the prompt has "
            f"{prompt}: there is no room for an answer. Shorten it, or start a new conversation.",
            code=TOO_LONG,
        )
    stops = tuple(
        dict.fromkeys(
            (*(terms.stop_token_ids if options.ends_at_eos else ()), *options.stop_token_ids)
        )
    )
    if len(stops) > MAX_STOP_TOKENS:
        raise CallRefused(
            f"including the model's, there are {len(stops)} stop tokens; at most "
            f"{MAX_STOP_TOKENS} are allowed",
            field="stop_token_ids",
        )
    fixed = terms.fixed_sampling
    most = min(terms.max_new_tokens, room)
    requested = most if options.max_new_tokens is None else options.max_new_tokens
    return RequestDraft(
        sampling=terms.sampling if fixed else sampling_of(options, terms.sampling),
        stop_token_ids=stops,
        max_new_tokens=min(requested, most),
        extras=options.extras or terms.extras,
        capped=requested > most,
        shaping=fixed_shaping(options.shaping, terms.takes_constraints)
        if fixed
        else options.shaping,
    )


def fixed_shaping(
    shaping: LogitShaping | None, takes_constraints: bool = True
) -> LogitShaping | None:
    """Return the part of a call's shaping that a run with its own distribution allows.

    Args:
        shaping: that the call asks for.
        takes_constraints: whether the trainer takes the recorded masks of constraints, and so
            knows the distribution.
    """
    if shaping is None or shaping.constraint is None or not takes_constraints:
        return None
    return LogitShaping(constraint=shaping.constraint)


def stop_ids(tokenizer: Tokenizer, chat: ChatFormat | None) -> tuple[int, ...]:
    """Return the tokens that end an answer, from the chat format and the tokenizer."""
    ids = (*(() if chat is None else chat.stop_token_ids), *tokenizer.eos_ids)
    return tuple(dict.fromkeys(ids))[:MAX_STOP_TOKENS]


def sampling_of(options: SamplingOptions, default: SamplingParams) -> SamplingParams:
    """Return the sampling distribution of options."""
    return SamplingParams(
        temperature=default.temperature if options.temperature is None else options.temperature,
        top_k=default.top_k if options.top_k is None else options.top_k,
        top_p=default.top_p if options.top_p is None else options.top_p,
        min_p=default.min_p if options.min_p is None else options.min_p,
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
    """Return a seed of 32 bits with a sign; None: not given. A larger one is hashed."""
    value = fields.whole("seed", -(2**63), 2**64 - 1)
    if value is None or -(2**31) <= value < 2**31:
        return value
    digest = hashlib.blake2s(str(value).encode(), digest_size=4).digest()
    return int.from_bytes(digest, "little", signed=True)


def logprobs_of(fields: BodyFields, top: int) -> ShownLogprobs:
    """Return the log-probs that a call asks for in addition to the sampled tokens'. Raises
    CallRefused.

    top: number of the likeliest tokens of each sampled position.
    """
    return ShownLogprobs(
        top=top,
        prompt=fields.whole("prompt_logprobs", 0, MAX_TOP),
        ids=tuple(fields.token_ids("logprob_token_ids", MAX_LOGPROB_IDS)),
    )


def shaping_of(fields: BodyFields) -> LogitShaping | None:
    """Return the changes of the logits, without a constraint; None: none. Raises CallRefused."""
    bias = fields.value("logit_bias")
    if bias is not None and not isinstance(bias, dict):
        fields.refuse("logit_bias", "an object from token ids to numbers")
    if len(bias or {}) > MAX_BIASED:
        fields.refuse("logit_bias", f"an object with at most {MAX_BIASED} token ids")
    if wrong := [name for name in bias or {} if not name.isdecimal() or int(name) >= 2**31]:
        raise CallRefused(
            f"must name token ids, but contains {wrong[0][:80]!r}", field=fields.name("logit_bias")
        )
    values = BodyFields(bias or {}, fields.name("logit_bias"))
    repetition = fields.number("repetition_penalty", 0.0, LARGEST)
    if repetition == 0:
        fields.refuse("repetition_penalty", "above 0")
    shaping = LogitShaping(
        bias=tuple((int(name), values.number(name, -100, 100) or 0.0) for name in bias or {}),
        min_tokens=fields.whole("min_tokens", 0, 2**31 - 1) or 0,
        frequency_penalty=fields.number("frequency_penalty", -2, 2) or 0.0,
        presence_penalty=fields.number("presence_penalty", -2, 2) or 0.0,
        repetition_penalty=1.0 if repetition is None else repetition,
    )
    return None if shaping == LogitShaping() else shaping


def sampling_options(
    fields: BodyFields, *, count: int = 1, usual: int | None = None, least: int = 1
) -> SamplingOptions:
    """Return the sampling parameters of a body in OpenAI's form, including vLLM's fields.

    Args:
        fields: fields of the body.
        count: number of answers.
        usual: default for the maximum tokens of an answer; None: as many as possible.
        least: minimum for the maximum tokens of an answer; 0 scores the prompt.
    """
    newer = fields.whole("max_completion_tokens", least, MAX_REQUESTED)
    older = fields.whole("max_tokens", least, MAX_REQUESTED)
    most = next((number for number in (newer, older) if number is not None), usual)
    shaping, (by, constraint) = shaping_of(fields), constraint_of(fields)
    if constraint is not None:
        shaping = replace(shaping or LogitShaping(), constraint=constraint)
    return SamplingOptions(
        count=count,
        temperature=temperature_of(fields),
        top_k=top_k_of(fields),
        top_p=top_p_of(fields),
        min_p=min_p_of(fields),
        max_new_tokens=most,
        stops=stops_of(fields, "stop"),
        stop_token_ids=tuple(fields.token_ids("stop_token_ids", MAX_STOP_IDS)),
        ends_at_eos=not fields.flag("ignore_eos"),
        seed=seed_of(fields),
        shaping=shaping,
        constrained_by=by,
    )


def stops_of(fields: BodyFields, field: str) -> tuple[str, ...]:
    """Return the stop strings, given as one text or a list. Raises CallRefused."""
    value: Any = fields.value(field)
    stops: Sequence[Any] = [value] if isinstance(value, str) else fields.rows(field, MAX_STOPS)
    for stop in stops:
        if not isinstance(stop, str) or not 1 <= len(stop) <= MAX_STOP_LENGTH:
            raise CallRefused(
                f"must hold texts of 1 to {MAX_STOP_LENGTH} characters", field=fields.name(field)
            )
    return tuple(stops)
