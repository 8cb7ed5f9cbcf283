"""Validates the answers of samplers in other processes on arrival: an answer must be possible for
its request. Pure host code."""

import math
from collections.abc import Mapping
from dataclasses import fields, replace
from typing import Any

import numpy as np
from numpy.typing import DTypeLike

from jaxrl_async.errors import RolloutError, printable
from jaxrl_async.sampler.logprob_checks import (
    check_has_logprobs,
    check_logprobs,
)
from jaxrl_async.sampler.request_checks import (
    RequestLimits,
    check_expert_ids,
    check_masks,
    checked_ids,
    checked_partial,
    num_requested,
)
from jaxrl_async.sampler.stats import SamplerStats
from jaxrl_async.types import Completion, Partial, Request, StopReason, TokenRecord

LONGEST_TEXT = 2000
"""Maximum length of an error's text, characters; the rest is dropped."""
HIGHEST_LOGPROB = 1e-3
"""Maximum valid log-prob: 0 plus rounding errors."""
LOWEST_LOGPROB = -200.0
"""Minimum valid log-prob of a token under the distribution that it was sampled from. Sampling with
float32 noise yields none below about -17 - log(vocabulary), for any model."""


def checked_completion(
    completion: Completion,
    sent: Request | Partial,
    room: RequestLimits,
    *,
    newest: int,
    stopped: bool,
    oldest: int = 0,
) -> Completion:
    """Return the answer under the request's own id. Raises RolloutError with what is invalid.

    Args:
        completion: As received.
        sent: The request, or one partially completed by another sampler.
        room: The samplers' limits.
        newest: The newest version that a sampler may have.
        oldest: The version of this sampler when it got the request.
        stopped: True if the request was stopped early (ports.Replica.save).
    """
    request, begun = _request_and_partial(sent)
    name = f"the answer to request {request.request_id!r}"
    _check_columns(name, completion, room, newest)
    _check_new(name, completion, request, begun, oldest)
    count = len(completion.token_ids)
    _check_stop(name, completion, request, stopped=stopped)
    for field in ("queued_s", "first_token_s", "latency_s"):
        if not _is_count(getattr(completion, field)):
            raise RolloutError(f"{name}: {field} is not a non-negative number.")
    full: Any = completion.full_logprobs
    if full is not None and not _is_column(full, np.float32, count):
        raise RolloutError(f"{name}: full_logprobs is not one number for each token.")
    check_masks(name, completion, request, count)
    check_logprobs(name, completion, request)
    check_has_logprobs(name, completion, request)
    _check_scores(name, completion, request, newest, stopped=stopped)
    _check_kept(name, completion, room)
    check_expert_ids(name, completion, len(request.token_ids) + count - 1, room)
    return replace(completion, request_id=request.request_id)


def checked_remote_partial(
    partial: Partial, sent: Request | Partial, room: RequestLimits, *, newest: int, oldest: int = 0
) -> Partial:
    """Return a partial that a sampler reports or hands back, under the request's own id and without
    KV. Raises RolloutError with what is invalid. Takes the arguments of checked_completion."""
    request, begun = _request_and_partial(sent)
    name = f"the partial of request {request.request_id!r}"
    partial = replace(partial, request=request, kv=None, kv_version=None)
    _check_columns(name, partial, room, newest)
    _check_new(name, partial, request, begun, oldest)
    checked = checked_partial(partial, room)
    _check_kept(name, checked, room)
    return checked


def checked_stats(values: Mapping[str, float]) -> SamplerStats:
    """Return statistics received as a mapping. Raises RolloutError unless each is a known field
    with a finite, non-negative number."""
    kinds: dict[str, type] = {f.name: type(f.default) for f in fields(SamplerStats)}
    if not kinds.keys() >= values.keys():
        raise RolloutError("a sampler's statistics have an unknown name.")
    wrong = [name for name, value in values.items() if not _is_count(value)]
    if wrong:
        raise RolloutError(f"a sampler's statistics: {wrong[0]} is not a non-negative number.")
    numbers: dict[str, Any] = {name: kinds[name](value) for name, value in values.items()}
    return SamplerStats(**numbers)


def checked_text(text: object) -> str:
    """Return a printable text, truncated and on one line."""
    return printable(str(text), LONGEST_TEXT)


def _check_columns(name: str, sampled: Any, room: RequestLimits, newest: int) -> None:
    """Raise RolloutError unless tokens, log-probs and versions have equal lengths and are in
    range."""
    if not _is_column(sampled.token_ids, np.int32):
        raise RolloutError(f"{name}: token_ids is not a row of int32.")
    ids = checked_ids(sampled.token_ids, room.vocab)
    if isinstance(ids, str):
        raise RolloutError(f"{name}: token_ids {ids}.")
    versions = sampled.versions
    if not _is_column(sampled.logprobs, np.float32, len(ids)):
        raise RolloutError(f"{name}: logprobs is not one float32 for each of {len(ids)} tokens.")
    if not _is_column(versions, np.int32, len(ids)):
        raise RolloutError(f"{name}: versions is not one int32 for each of {len(ids)} tokens.")
    if len(ids) and (versions[0] < 0 or versions[-1] > newest or (np.diff(versions) < 0).any()):
        raise RolloutError(
            f"{name}: versions go from {versions[0]} to {versions[-1]}; they must not decrease, "
            f"and lie between 0 and {newest}, the newest."
        )


def _request_and_partial(sent: Request | Partial) -> tuple[Request, Partial | None]:
    return (sent.request, sent) if isinstance(sent, Partial) else (sent, None)


def _check_new(
    name: str, sampled: Any, request: Request, begun: Partial | None, oldest: int
) -> None:
    """Raise RolloutError unless the tokens continue the given ones, with possible log-probs, and
    with the sampler's version at that time or a newer one."""
    count = 0
    if begun is not None:
        count = len(begun.token_ids)
        for field in ("token_ids", "versions"):
            if not np.array_equal(getattr(sampled, field)[:count], getattr(begun, field)):
                raise RolloutError(f"{name}: {field} do not begin with the given ones.")
    new = sampled.versions[count:]
    if len(new) and not request.adapter and new[0] < oldest:
        raise RolloutError(
            f"{name}: a token has version {new[0]}, but the sampler used version {oldest} when it "
            "got the request."
        )
    temperature = max(1.0, request.sampling.temperature)
    for field, lowest in (
        ("logprobs", LOWEST_LOGPROB),
        ("full_logprobs", LOWEST_LOGPROB * temperature),
    ):
        values: Any = getattr(sampled, field)
        if values is None or not _is_column(values, np.float32):
            continue  # missing full_logprobs are checked elsewhere
        bad = values[(values > HIGHEST_LOGPROB) | (values < lowest)]
        if len(bad):
            raise RolloutError(
                f"{name}: {field} have {bad[0]:g}, which is not a log-prob of a sampled token: it "
                f"must lie between {lowest:g} and 0."
            )


def _check_scores(
    name: str, completion: Completion, request: Request, newest: int, *, stopped: bool
) -> None:
    """Raise RolloutError unless an answer has possible log-probs of the prompt and of named tokens,
    if the request wants them. A request that was stopped early may lack the prompt's."""
    prompt = completion.prompt_logprobs
    if request.scores_prompt and prompt is None and not stopped:
        raise RolloutError(f"{name}: prompt_logprobs are missing.")
    version = None if prompt is None else prompt.version
    if prompt is not None and not (type(version) is int and 0 <= version <= newest):
        raise RolloutError(
            f"{name}: prompt_logprobs have version {version}, but {newest} is newest."
        )
    for field, scores in (("prompt_logprobs", prompt), ("top_logprobs", completion.top_logprobs)):
        if scores is not None and any(
            (values > HIGHEST_LOGPROB).any()
            for values in (scores.logprobs, scores.top_logprobs, scores.id_logprobs)
        ):
            raise RolloutError(f"{name}: {field} have a number above 0, which is no log-prob.")


def _check_kept(name: str, sampled: TokenRecord, room: RequestLimits) -> None:
    """Raise RolloutError unless each token is among the tokens that its sampling mask kept."""
    kept = sampled.kept
    if kept is None:
        return
    if isinstance(checked_ids(kept.ids, room.vocab), str):
        raise RolloutError(f"{name}: kept has ids outside the vocabulary.")
    if not 0 <= kept.vocab <= (room.vocab or kept.vocab):
        raise RolloutError(f"{name}: kept is of {kept.vocab} ids, not of the vocabulary.")
    missing = np.flatnonzero(kept.excludes(sampled.token_ids))
    if len(missing):
        raise RolloutError(f"{name}: token {missing[0]} is not among the tokens in kept.")


def _check_stop(name: str, completion: Completion, request: Request, *, stopped: bool) -> None:
    """Raise RolloutError unless the answer ends where the request requires it."""
    count, most, stop = len(completion.token_ids), num_requested(request), completion.stop
    stops = () if request.forced_length is not None else request.stop_token_ids
    ends = np.isin(completion.token_ids, stops)
    good = count <= most and not ends[:-1].any()
    if stop is StopReason.EOS:
        good = good and bool(ends[-1:].any())
    elif stop is StopReason.LENGTH:
        good = good and count == most and not ends.any()
    else:
        good = good and stop is StopReason.CANCELLED and stopped
    if not good:
        raise RolloutError(
            f"{name}: {count} tokens that end by {stop!r} do not match the request: at most "
            f"{most}, up to the first stop token."
        )


def _is_column(values: Any, dtype: DTypeLike, count: int | None = None) -> bool:
    good = isinstance(values, np.ndarray) and values.ndim == 1 and values.dtype == dtype
    return good and (count is None or len(values) == count)


def _is_count(value: float) -> bool:
    return 0 <= value < math.inf
