"""Checks of the log-probs that requests want, and of those in records of other processes. Pure host
code."""

from typing import Any

import numpy as np

from jaxrl_async.errors import RequestRefused, RolloutError
from jaxrl_async.types import (
    MAX_LOGPROB_IDS,
    MAX_TOP_LOGPROBS,
    LogprobRequest,
    PositionLogprobs,
    Request,
    TokenRecord,
)


def checked_logprobs(request: Request, tokens: int, vocab: int | None) -> LogprobRequest | None:
    """Return a copy of what log-probs a request wants, in the sampler's types. Raises RolloutError,
    which names the field.

    Args:
        request: as it arrived.
        tokens: of its prompt.
        vocab: of the model; None: unknown.
    """
    logprobs = request.logprobs
    if logprobs is None:
        return None
    name = f"request {request.request_id!r}"
    if not isinstance(logprobs, LogprobRequest):
        reason = f"must be a LogprobRequest or None, not {logprobs!r:.80}."
        raise RequestRefused(name, "logprobs", reason)
    if not isinstance(logprobs.prompt, bool | np.bool_):
        reason = f"must be True or False, not {logprobs.prompt!r:.80}."
        raise RequestRefused(name, "logprobs.prompt", reason)
    given: Any = logprobs.ids
    if not isinstance(given, tuple | list | np.ndarray) or len(given) > MAX_LOGPROB_IDS:
        reason = f"must be a tuple of at most {MAX_LOGPROB_IDS} token ids."
        raise RequestRefused(name, "logprobs.ids", reason)
    most = MAX_TOP_LOGPROBS if vocab is None else min(MAX_TOP_LOGPROBS, vocab)
    end = 2**31 if vocab is None else vocab
    return LogprobRequest(
        prompt=bool(logprobs.prompt),
        start=_whole(name, "logprobs.start", logprobs.start, tokens),
        top=_whole(name, "logprobs.top", logprobs.top, most),
        ids=tuple(_whole(name, "logprobs.ids", one, end - 1) for one in given),
    )


def _whole(name: str, field: str, value: Any, most: int) -> int:
    whole = isinstance(value, int | np.integer) and not isinstance(value, bool)
    if not (whole and 0 <= value <= most):
        reason = f"must be a whole number from 0 to {most}, not {value!r:.80}."
        raise RequestRefused(name, field, reason)
    return int(value)


def check_logprobs(name: str, record: TokenRecord, request: Request) -> None:
    """Raise RolloutError unless a record of another process has log-probs of the prompt, and of
    named tokens, only in the shapes that the request wants.

    name: of the record.
    """
    logprobs = request.logprobs or LogprobRequest()
    for field, rows, expected in (
        ("top_logprobs", len(record.token_ids), logprobs.names_tokens),
        ("prompt_logprobs", len(request.token_ids), logprobs.prompt),
    ):
        values: Any = getattr(record, field)
        if values is None:
            continue
        shapes = {
            "logprobs": (rows,),
            "top_ids": (rows, logprobs.top),
            "top_logprobs": (rows, logprobs.top),
            "id_logprobs": (rows, len(logprobs.ids)),
        }
        good = expected and isinstance(values, PositionLogprobs)
        if not (good and all(_fits(getattr(values, n), n, s) for n, s in shapes.items())):
            raise RolloutError(
                f"{name}: {field} are not what request {request.request_id!r} wants of {rows} "
                f"tokens: {logprobs.top} likeliest tokens and {len(logprobs.ids)} named ids each."
            )


def check_has_logprobs(name: str, record: TokenRecord, request: Request) -> None:
    """Raise RolloutError unless a record has the log-probs of named tokens that its request wants
    at its generated tokens. name: of the record."""
    named = request.logprobs is not None and request.logprobs.names_tokens
    if named and len(record.token_ids) > 0 and record.top_logprobs is None:
        raise RolloutError(
            f"{name}: it wants log-probs of named tokens (logprobs.top, .ids), but has none "
            "of its generated tokens. Resume it without, or start it again."
        )


def _fits(values: Any, name: str, shape: tuple[int, ...]) -> bool:
    kind = np.integer if name == "top_ids" else np.floating
    good = isinstance(values, np.ndarray) and values.shape == shape
    return good and np.issubdtype(values.dtype, kind)
