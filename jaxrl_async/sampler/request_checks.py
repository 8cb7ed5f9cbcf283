"""Checks of requests at submit: from a request as it arrives to one that a sampler can serve. Pure
host code.

All checks run on the caller's thread. The result is a copy in exactly the types that the sampler
uses: later changes of the caller's arrays do not reach the sampler's thread.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np

from jaxrl_async.data.images import ImageStore
from jaxrl_async.errors import RequestRefused, RolloutError
from jaxrl_async.later import Later
from jaxrl_async.sampler.batch.adapter_slots import AdapterSlots
from jaxrl_async.sampler.grammar import KINDS, LONGEST, Grammars
from jaxrl_async.types import (
    MAX_BIASED,
    MAX_STOP_TOKENS,
    Constraint,
    IntArray,
    KeptTokens,
    LogitShaping,
    Partial,
    Request,
    SamplingParams,
    TokenRecord,
)

if TYPE_CHECKING:
    from jaxrl_async.sampler import logprob_checks
else:
    logprob_checks = Later("jaxrl_async.sampler.logprob_checks")

LEAST_TEMPERATURE = 1e-6
"""Minimum temperature above 0 (greedy): below it, logits / temperature exceed float32's range."""
LARGEST = float(np.finfo(np.float32).max)
"""Maximum of float32, the type on the device."""
INT32_END = 2**31
"""The maximum of int32 plus 1: keys, branches and counts are below it."""
LARGEST_BIAS, LARGEST_PENALTY = 100, 2
"""Limits of a logit bias, and of frequency and presence penalties, as of OpenAI's API."""
LEAST_REPETITION = 1e-6
"""Minimum of a repetition penalty, and 1 / its maximum: logits / 1e-40 are infinite in float32, and
their log-probs NaN."""
LARGEST_VOCAB = 2**24
"""Limit of the vocabulary of a sampling mask, to refuse masks that would not fit in memory."""
FRESH = -1
"""First number of the keys that requests without a key get; no prompt has it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestLimits:
    """The limits of a sampler, which requests are checked against; None: unknown."""

    max_length: int  # prompt and answer, tokens
    max_new_tokens: int | None = None
    vocab: int | None = None
    seed: int | None = None
    kv_shape: tuple[int, int, int, int] | None = None  # layers and ModelSpec.cached_shape
    kv_dtype: str | None = None
    experts: tuple[int, int, int] | None = None  # layers, experts per token, experts of a layer
    images: ImageStore | None = None  # whose ids follow the vocabulary's in prompts
    grammars: Grammars | None = None  # which constraints are checked with


class RequestCheck:
    """Checks requests on arrival, for any sampler that will serve them, and gives requests without
    a key a fresh one."""

    def __init__(
        self, limits: RequestLimits, fresh_keys: Iterator[int], adapters: AdapterSlots | None = None
    ) -> None:
        """Make the check.

        Args:
            limits: the sampler's.
            fresh_keys: numbers for requests without a key.
            adapters: that requests may name; None: no adapters.
        """
        self.limits, self._keys = limits, fresh_keys
        self._adapters = AdapterSlots() if adapters is None else adapters

    def checked(self, requests: Sequence[Request | Partial]) -> list[Request | Partial]:
        """Return the requests as a sampler will serve them. Raises RolloutError, which names the
        field, for a request that cannot be served."""
        return [self._checked(r) for r in requests]

    def _checked(self, given: Request | Partial) -> Request | Partial:
        if isinstance(given, Partial):
            saved = checked_partial(given, self.limits)
            self.check_adapter(saved.request)
            return saved
        request = checked_request(given, self.limits)
        if request.key is None:
            request = replace(request, key=(FRESH, next(self._keys) % INT32_END))
        self.check_adapter(request)
        return request

    def check_adapter(self, request: Request) -> None:
        """Raise RolloutError unless the request's adapter takes new requests now."""
        self._adapters.check(request.adapter, f"request {request.request_id!r}")


def checked_request(
    request: Request | Partial, limits: RequestLimits, *, answer_fits: bool = True
) -> Request:
    """Return a copy of the request in the sampler's types. Raises RolloutError, which names the
    field.

    Args:
        request: as it arrived.
        limits: the sampler's.
        answer_fits: also require prompt and answer together to fit in limits.max_length.
    """
    if not isinstance(request, Request):
        raise RolloutError(
            f"{type(request).__name__} is not a request. Submit a jaxrl_async.Request, or a saved "
            "Partial."
        )
    if not isinstance(request.request_id, str):
        _refuse(request, "request_id", request.request_id, "text")
    if not isinstance(request.extras, bool | np.bool_):
        _refuse(request, "extras", request.extras, "True or False")
    if not isinstance(request.for_training, bool | np.bool_):
        _refuse(request, "for_training", request.for_training, "True or False")
    if not isinstance(request.adapter, str):
        _refuse(request, "adapter", request.adapter, "text")
    token_ids = _prompt(request, limits)
    logprobs = request.logprobs
    if logprobs is not None:
        logprobs = logprob_checks.checked_logprobs(request, len(token_ids), limits.vocab)
    forced = request.forced_length
    _check_lengths(request, len(token_ids), limits, answer_fits=answer_fits)
    checked = replace(
        request,
        token_ids=token_ids,
        max_new_tokens=int(request.max_new_tokens),
        sampling=_sampling(request),
        stop_token_ids=_stop_ids(request, limits),
        key=None
        if request.key is None
        else _two_whole(
            request, "key", request.key, "two whole numbers of 32 bits, or None for a fresh one"
        ),
        branch=_whole(request, "branch", request.branch, 0, INT32_END),
        priority=_two_whole(request, "priority", request.priority, "two whole numbers of 32 bits"),
        forced_length=None if forced is None else int(forced),
        extras=bool(request.extras),
        for_training=bool(request.for_training),
        shaping=_shaping(request, limits),
        logprobs=logprobs,
    )
    if limits.grammars is not None:
        limits.grammars.check(checked)
    return checked


def num_requested(request: Request) -> int:
    """Return the maximum number of tokens that a request asks for."""
    return request.max_new_tokens if request.forced_length is None else request.forced_length


def checked_partial(saved: Partial, limits: RequestLimits) -> Partial:
    """Return a copy of a saved request that this sampler can continue, as `checked_request`. Raises
    RolloutError."""
    request = checked_request(saved.request, limits)
    name = f"saved request {request.request_id!r}"
    if saved.seed != limits.seed:
        raise RolloutError(
            f"{name} was saved by a sampler of seed {saved.seed!r}, this one has {limits.seed}: it "
            "would not continue with the same tokens. Give this sampler that seed."
        )
    if request.key is None:
        raise RolloutError(
            f"{name}: key is None, but its sampled tokens depend on one. Give that key."
        )
    token_ids = checked_ids(saved.token_ids, limits.vocab)
    if isinstance(token_ids, str):
        raise RolloutError(f"{name}: token_ids {token_ids}. Give what a sampler saved.")
    count, most = len(token_ids), num_requested(request)
    if count and count >= most:
        raise RolloutError(
            f"{name} has {count} sampled tokens of at most {most} (max_new_tokens): nothing is "
            "left to do. Raise its max_new_tokens."
        )
    columns = {
        "logprobs": _row(saved.logprobs, count, np.float32),
        "versions": _row(saved.versions, count, np.int32),
    }
    if saved.full_logprobs is not None:
        columns["full_logprobs"] = _row(saved.full_logprobs, count, np.float32)
    for field, value in columns.items():
        if value is None:
            raise RolloutError(
                f"{name}: {field} is not one number for each of its {count} tokens. Give what a "
                "sampler saved."
            )
    check_masks(name, saved, request, count)
    logprob_checks.check_logprobs(name, saved, request)
    logprob_checks.check_has_logprobs(name, saved, request)
    _check_kv(name, saved, len(request.token_ids) + count, limits)
    check_expert_ids(name, saved, len(request.token_ids) + count - 1, limits)
    return replace(saved, request=request, token_ids=token_ids, **columns)


def _refuse(request: Request, field: str, value: object, expected: str) -> NoReturn:
    """Raise RolloutError for a field that is not as expected."""
    reason = f"must be {expected}, not {_shown(value)}."
    raise RequestRefused(f"request {request.request_id!r}", field, reason)


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def _is_whole(value: object) -> bool:
    return isinstance(value, int | np.integer) and not isinstance(value, bool)


def _whole(request: Request, field: str, value: Any, least: int, end: int) -> int:
    if not (_is_whole(value) and least <= value < end):
        _refuse(request, field, value, f"a whole number from {least} to {end - 1}")
    return int(value)


def checked_ids(values: object, vocab: int | None) -> IntArray | str:
    """Return token ids as a new array, or a text that says what is wrong with them."""
    try:
        given = np.asarray(values)
    except (TypeError, ValueError) as error:
        return f"are not an array ({error})"
    if given.size and not np.issubdtype(given.dtype, np.integer):
        return f"must be whole numbers, not {given.dtype}"
    if given.ndim != 1:
        return f"must be one row, not an array of shape {given.shape}"
    end = INT32_END if vocab is None else vocab
    wrong = given[(given < 0) | (given >= end)]
    if wrong.size:
        return f"must be from 0 to {end - 1}, the model's vocabulary, but {wrong[0]} is among them"
    return given.astype(np.int32)


def _prompt(request: Request, limits: RequestLimits) -> IntArray:
    ids = checked_ids(
        request.token_ids, limits.vocab if limits.images is None else limits.images.end
    )
    if isinstance(ids, str):
        raise RequestRefused(f"request {request.request_id!r}", "token_ids", f"{ids}.")
    if not len(ids):
        raise RolloutError(
            f"request {request.request_id!r}: token_ids is empty, and there is nothing to continue "
            "from. Give at least one token, such as the model's BOS token."
        )
    return ids


def _check_lengths(
    request: Request, prompt: int, limits: RequestLimits, *, answer_fits: bool
) -> None:
    """Raise RolloutError, which names the setting, unless prompt and answer fit. Nothing is cut."""
    only_scores = (
        request.scores_prompt and request.max_new_tokens == 0 and request.forced_length is None
    )
    if prompt >= limits.max_length + only_scores:
        new = "" if only_scores else " with at least one new token"
        raise RolloutError(
            f"request {request.request_id!r}: the prompt has {prompt} tokens, but a slot holds "
            f"{limits.max_length}{new}. Shorten the prompt or raise "
            "sampler.max_length."
        )
    for field in ("max_new_tokens", "forced_length"):
        count = getattr(request, field)
        if count is None and field == "forced_length":
            continue
        count = _whole(request, field, count, 1 - request.scores_prompt, INT32_END)
        if field == "max_new_tokens" and request.forced_length is not None:
            continue  # forced_length counts instead
        if limits.max_new_tokens is not None and count > limits.max_new_tokens:
            raise RolloutError(
                f"request {request.request_id!r}: {field} is {count}, more than "
                f"sampler.max_new_tokens ({limits.max_new_tokens}). Ask for fewer, or raise that: "
                "Sampler(policy, section=jaxrl_async.config.schema.SamplerSection("
                "max_new_tokens=..., max_length=...))."
            )
        if answer_fits and prompt + count > limits.max_length:
            raise RolloutError(
                f"request {request.request_id!r}: {prompt} tokens of prompt and {field} of {count} "
                f"are more than sampler.max_length ({limits.max_length}). Ask for at most "
                f"{limits.max_length - prompt}, or raise that: Sampler(policy, "
                "section=jaxrl_async.config.schema.SamplerSection(max_length=..., "
                "max_new_tokens=...))."
            )


def _two_whole(request: Request, field: str, value: Any, expected: str) -> tuple[int, int]:
    good = isinstance(value, tuple | list) and len(value) == 2 and all(map(_is_whole, value))
    if not (good and all(-INT32_END <= part < INT32_END for part in value)):
        _refuse(request, field, value, expected)
    return int(value[0]), int(value[1])


def _stop_ids(request: Request, limits: RequestLimits) -> tuple[int, ...]:
    ids: Any = request.stop_token_ids
    row = ids.ndim == 1 if isinstance(ids, np.ndarray) else isinstance(ids, Sequence)
    if not row or isinstance(ids, str | bytes):
        _refuse(request, "stop_token_ids", ids, "a tuple of token ids")
    if len(ids) > MAX_STOP_TOKENS:
        _refuse(request, "stop_token_ids", ids, f"at most {MAX_STOP_TOKENS} token ids")
    end = INT32_END if limits.vocab is None else limits.vocab
    return tuple(_whole(request, "stop_token_ids", i, 0, end) for i in ids)


def _sampling(request: Request) -> SamplingParams:
    given = request.sampling
    if not isinstance(given, SamplingParams):
        _refuse(request, "sampling", given, "SamplingParams")
    temperature = _number(request, "sampling.temperature", given.temperature)
    if not (temperature == 0 or LEAST_TEMPERATURE <= temperature <= LARGEST):
        _refuse(
            request,
            "sampling.temperature",
            given.temperature,
            f"0 (greedy) or a number from {LEAST_TEMPERATURE:g} on",
        )
    top_p = _number(request, "sampling.top_p", given.top_p)
    if not 0 < top_p <= 1:
        _refuse(request, "sampling.top_p", given.top_p, "above 0 and at most 1")
    min_p = _number(request, "sampling.min_p", given.min_p)
    if not 0 <= min_p < 1:
        _refuse(request, "sampling.min_p", given.min_p, "at least 0 and below 1")
    return SamplingParams(
        temperature=temperature,
        top_k=_whole(request, "sampling.top_k", given.top_k, 0, INT32_END),
        top_p=top_p,
        min_p=min_p,
    )


def _shaping(request: Request, limits: RequestLimits) -> LogitShaping | None:
    """Return what shapes the logits; None if it changes nothing."""
    given = request.shaping
    if given is None:
        return None
    if not isinstance(given, LogitShaping):
        _refuse(request, "shaping", given, "LogitShaping or None")
    constraint = given.constraint
    good = constraint is None or (
        isinstance(constraint, Constraint)
        and constraint.kind in KINDS
        and isinstance(constraint.text, str)
        and len(constraint.text) <= LONGEST
    )
    if not good:
        wanted = f"a Constraint of kind {', '.join(KINDS)}, of at most {LONGEST} characters"
        _refuse(request, "shaping.constraint", constraint, wanted)
    repetition = _number(request, "shaping.repetition_penalty", given.repetition_penalty)
    if not LEAST_REPETITION <= repetition <= 1 / LEAST_REPETITION:  # float32 has these logits
        wanted = f"from {LEAST_REPETITION:g} to {1 / LEAST_REPETITION:g}"
        _refuse(request, "shaping.repetition_penalty", repetition, wanted)
    least = _whole(request, "shaping.min_tokens", given.min_tokens, 0, INT32_END)
    if least > num_requested(request):
        _refuse(
            request, "shaping.min_tokens", least, f"at most {num_requested(request)}, its length"
        )
    checked = LogitShaping(
        bias=_bias(request, given.bias, limits),
        min_tokens=least,
        frequency_penalty=_penalty(request, "frequency_penalty", given.frequency_penalty),
        presence_penalty=_penalty(request, "presence_penalty", given.presence_penalty),
        repetition_penalty=repetition,
        constraint=constraint,
    )
    return None if checked == LogitShaping() else checked


def _bias(request: Request, given: Any, limits: RequestLimits) -> tuple[tuple[int, float], ...]:
    pairs = isinstance(given, tuple | list) and all(
        isinstance(pair, tuple | list) and len(pair) == 2 for pair in given
    )
    if not pairs or len(given) > MAX_BIASED:
        expected = f"at most {MAX_BIASED} pairs of a token id and a number"
        _refuse(request, "shaping.bias", given, expected)
    end = INT32_END if limits.vocab is None else limits.vocab
    name = "shaping.bias"
    checked = tuple((_whole(request, name, i, 0, end), _number(request, name, b)) for i, b in given)
    if any(abs(value) > LARGEST_BIAS for _, value in checked):
        _refuse(request, name, given, f"pairs with a number of -{LARGEST_BIAS} to {LARGEST_BIAS}")
    if len(dict(checked)) < len(checked):
        _refuse(request, name, given, "pairs with different token ids")
    return checked


def _penalty(request: Request, field: str, value: object) -> float:
    number = _number(request, f"shaping.{field}", value)
    if abs(number) > LARGEST_PENALTY:
        limits = f"from -{LARGEST_PENALTY} to {LARGEST_PENALTY}"
        _refuse(request, f"shaping.{field}", value, limits)
    return number


def _number(request: Request, field: str, value: Any) -> float:
    is_number = isinstance(value, int | float | np.integer | np.floating)
    if not is_number or isinstance(value, bool) or not math.isfinite(value):
        _refuse(request, field, value, "a finite number")
    return float(value)


def _row(values: Any, count: int, dtype: type) -> Any:
    """Return a copy of an array of `count` numbers in this type; None if it is anything else."""
    kind = np.floating if dtype is np.float32 else np.integer
    good = isinstance(values, np.ndarray) and values.shape == (count,)
    if not good or (count and not np.issubdtype(values.dtype, kind)):
        return None
    return values.astype(dtype)


def check_masks(name: str, saved: TokenRecord, request: Request, count: int) -> None:
    """Raise RolloutError unless the columns that `extras` asks for cover every sampled token."""
    kept = saved.kept
    if request.constraint is not None and count and kept is None:
        raise RolloutError(
            f"{name}: it has a constraint, but kept of its tokens was not saved. Start it again."
        )
    if request.extras and count and not saved.has_extras:
        raise RolloutError(
            f"{name}: it asks for extras, but full_logprobs and kept of its tokens were not "
            "saved. Resume it without extras, or start it again."
        )
    if kept is None:
        return
    good = isinstance(kept, KeptTokens) and all(
        isinstance(a, np.ndarray) and a.ndim == 1 and np.issubdtype(a.dtype, np.integer)
        for a in (kept.ids, kept.starts)
    )
    if good:
        starts = kept.starts
        good = len(starts) > 0 and starts[0] == 0 and starts[-1] == len(kept.ids)
        good = good and bool((np.diff(starts) >= 0).all()) and _shares_sets(kept, count)
    if not good:
        raise RolloutError(
            f"{name}: kept is not one set of token ids for each of its {count} tokens. Give what a "
            "sampler saved."
        )


def _shares_sets(kept: KeptTokens, count: int) -> bool:
    """Return whether each of `count` tokens has one of the sets, and each set its kind."""
    sets, which, left_out = len(kept.starts) - 1, kept.which, kept.left_out
    if not _is_whole(kept.vocab) or not 0 <= kept.vocab < LARGEST_VOCAB:
        return False
    if left_out is not None:
        good = isinstance(left_out, np.ndarray) and left_out.dtype == np.bool_
        if not good or left_out.shape != (sets,) or (kept.ids >= kept.vocab).any():
            return False
    if which is None:
        return sets == count
    good = isinstance(which, np.ndarray) and which.shape == (count,)
    good = good and bool(np.issubdtype(which.dtype, np.integer))
    return good and bool(((which >= 0) & (which < sets)).all())


def _check_kv(name: str, saved: Partial, tokens: int, limits: RequestLimits) -> None:
    """Raise RolloutError unless saved KV fits this sampler's cache."""
    kv: Any = saved.kv
    if kv is None:
        return
    hint = "Resume it without: dataclasses.replace(partial, kv=None, kv_version=None)."
    if not isinstance(kv, np.ndarray) or not _is_whole(saved.kv_version):
        raise RolloutError(f"{name}: kv is not an array, or has no kv_version. {hint}")
    if not _is_whole(saved.kv_page_tokens) or saved.kv_page_tokens < 0:
        raise RolloutError(f"{name}: kv_page_tokens is no number of tokens. {hint}")
    if limits.kv_shape is None:
        return
    layers, sides, heads, width = limits.kv_shape
    fits = kv.ndim == 5 and kv.shape[:2] == (layers, sides) and kv.shape[3:] == (heads, width)
    if not fits or kv.shape[2] > tokens:
        raise RolloutError(
            f"{name}: kv has shape {kv.shape}, but this sampler's cache needs ({layers}, {sides}, "
            f"up to {tokens}, {heads}, {width}): another model made it. {hint}"
        )
    if kv.dtype.name != limits.kv_dtype:
        raise RolloutError(
            f"{name}: kv is {kv.dtype.name}, but this sampler's cache is {limits.kv_dtype}. {hint}"
        )


def check_expert_ids(name: str, saved: TokenRecord, tokens: int, limits: RequestLimits) -> None:
    """Raise RolloutError unless the saved experts are experts of this sampler's model, for every
    token but the last, which no expert has processed."""
    ids: Any = saved.expert_ids
    if ids is None or limits.experts is None or not len(saved.token_ids):
        return
    layers, chosen, experts = limits.experts
    good = isinstance(ids, np.ndarray) and np.issubdtype(ids.dtype, np.integer)
    good = good and ids.shape == (tokens, layers, chosen)
    if not (good and bool(((ids >= 0) & (ids < experts)).all())):
        raise RolloutError(
            f"{name}: expert_ids are not [{tokens}, {layers}, {chosen}] numbers of experts from 0 "
            f"to {experts - 1}, one row for each token but the last. Give what a sampler saved, or "
            "resume it without: dataclasses.replace(partial, expert_ids=None, kv=None, "
            "kv_version=None)."
        )
