"""What to prefill next and where: a pure function of the queue and the free slots. No clock, no
JAX."""

from collections.abc import Sequence
from dataclasses import dataclass

from jaxrl_async.types import Request

SMALLEST_BUCKET = 16
"""Shortest prefill length compiled for, tokens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prefill:
    """One prefill program: distinct prompts of one length bucket, and the requests that use each
    row."""

    bucket: int  # padded prompt length, tokens
    prompts: tuple[Request, ...]  # one request for each row's tokens
    rows: tuple[int, ...]  # of each inserted request
    requests: tuple[Request, ...]  # inserted requests, in queue order
    slots: tuple[int, ...]  # of each inserted request


def bucket_of(length: int, max_length: int) -> int:
    """The power of two, from SMALLEST_BUCKET on, that holds `length`; never above max_length."""
    bucket = SMALLEST_BUCKET
    while bucket < length:
        bucket *= 2
    return min(bucket, max_length)


def rows_bucket(rows: int) -> int:
    """Padded number of prompts in a prefill: 1, 4, 16, 64, ..."""
    bucket = 1
    while bucket < rows:
        bucket *= 4
    return bucket


def plan(
    queue: Sequence[Request], free_slots: Sequence[int], max_length: int
) -> tuple[Prefill, ...]:
    """First come, first served: the oldest requests take the free slots, prefilled by length
    bucket.

    Requests with equal prompts share one prefilled row, so a group of G costs one prefill.
    """
    admitted = list(zip(queue, sorted(free_slots), strict=False))
    by_bucket: dict[int, list[tuple[Request, int]]] = {}
    for request, slot in admitted:
        by_bucket.setdefault(bucket_of(len(request.token_ids), max_length), []).append(
            (request, slot)
        )
    return tuple(_prefill(bucket, of_bucket) for bucket, of_bucket in sorted(by_bucket.items()))


def _prefill(bucket: int, admitted: Sequence[tuple[Request, int]]) -> Prefill:
    row_of: dict[bytes, int] = {}
    prompts: list[Request] = []
    rows: list[int] = []
    for request, _ in admitted:
        content = request.token_ids.tobytes()
        if content not in row_of:
            row_of[content] = len(prompts)
            prompts.append(request)
        rows.append(row_of[content])
    return Prefill(
        bucket=bucket,
        prompts=tuple(prompts),
        rows=tuple(rows),
        requests=tuple(r for r, _ in admitted),
        slots=tuple(s for _, s in admitted),
    )


def live_bucket(longest: int, steps: int, max_length: int) -> int:
    """Cache positions to read in a block of `steps` that starts at `longest`: a power of two from
    32 on."""
    bucket = 32
    while bucket < longest + steps:
        bucket *= 2
    return min(bucket, max_length)
