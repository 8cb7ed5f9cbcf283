"""The division of prefills, and the few shapes that programs are compiled for. Pure: no JAX.

A long prompt is prefilled in chunks, one per round, and the running slots decode a block between
two rounds; short prompts are packed into one program by their lengths.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

SMALLEST_BUCKET = 16
"""Minimum prefill length that is compiled, tokens."""

FEW_TOKENS = 256
"""Minimum of coarse_bucket, packed tokens."""
FILLED_TOKENS = 128
"""Minimum of filled_buckets, packed tokens."""
MAX_SEQUENCES = 64
"""Maximum sequences of a prefill whose number of sequences is padded to a constant."""

FilledRun = tuple[list[tuple[int, int]], int]
"""(sequence, number of its tokens) pairs, and the size of the program for them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """Some tokens of one sequence that is being prefilled."""

    index: int  # of the sequence, in the order they wait
    start: int  # tokens of it that are prefilled already
    count: int  # tokens to prefill now, >= 1


def plan_prefill(waiting: Sequence[tuple[int, int]], budget: int) -> tuple[Piece, ...]:
    """Divide a budget of tokens among sequences in their order: first come, first served.

    waiting: (prefilled, total) tokens of each sequence. The sequence that reaches the budget gets
    the rest of it; its own rest is prefilled in a later round.
    """
    pieces = []
    for index, (start, total) in enumerate(waiting):
        if budget <= 0:
            break
        count = min(total - start, budget)
        pieces.append(Piece(index=index, start=start, count=count))
        budget -= count
    return tuple(pieces)


def length_bucket(length: int) -> int:
    """Return the smallest power of two, at least SMALLEST_BUCKET, that holds `length`."""
    return max(SMALLEST_BUCKET, 1 << (length - 1).bit_length())


def rows_bucket(rows: int) -> int:
    """Return the padded number of sequences in a prefill: 1, 4, 16, 64, ..."""
    bucket = 1
    while bucket < rows:
        bucket *= 4
    return bucket


def tokens_bucket(tokens: int, most: int) -> int:
    """Return the padded number of packed tokens: as steps_of_half, at most `most`."""
    return min(max(SMALLEST_BUCKET, steps_of_half(tokens)), most)


def coarse_bucket(tokens: int, most: int) -> int:
    """Return the padded number of packed tokens where padding costs little: 256, 2048, 16384, ...,
    or `most` if that is smaller and holds them."""
    bucket = FEW_TOKENS
    while bucket < tokens:
        bucket *= 8
    return most if tokens <= most < bucket else bucket


def filled_buckets(most: int, factor: int = 4) -> list[int]:
    """Return the numbers of packed tokens that programs are compiled for where padding costs as
    much as tokens, ascending: 128, 512, 2048, ..., below `most`, and `most`."""
    found = [FILLED_TOKENS]
    while found[-1] < most:
        found.append(factor * found[-1])
    return [*found[:-1], most]


def filled(counts: Sequence[int], rows: int, buckets: Sequence[int]) -> Iterator[FilledRun]:
    """Divide sequences among programs of few sizes, each more than half full except the smallest. A
    sequence may continue in the next program. Yield the sequences with their numbers of tokens, and
    the size, of each program.

    Args:
        counts: new tokens of each sequence, at least 1.
        rows: most sequences of a program.
        buckets: its possible sizes, ascending.
    """
    left, first = list(counts), 0
    while first < len(left):
        remaining = sum(left[first : first + rows])
        room = size = max((b for b in buckets if 2 * remaining > b), default=buckets[0])
        run: list[tuple[int, int]] = []
        while first < len(left) and room and len(run) < rows:
            taken = min(left[first], room)
            run.append((first, taken))
            left[first] -= taken
            room -= taken
            first += not left[first]
        yield run, size


def whole_runs(counts: Sequence[int], rows: int, buckets: Sequence[int]) -> Iterator[FilledRun]:
    """Divide sequences among programs as `filled` does, but each sequence into one program.

    Args:
        counts: new tokens of each sequence, at most the largest size.
        rows: most sequences of a program.
        buckets: its possible sizes, ascending.
    """
    for run in _runs(counts, rows, buckets[-1]):
        size = next(b for b in buckets if b >= sum(counts[run]))
        yield [(i, counts[i]) for i in range(run.start, run.stop)], size


def divided(counts: Sequence[int], rows: int, most: int) -> list[slice]:
    """Return the runs of neighbouring sequences that one program prefills, where padding costs
    little: runs as long as possible, or runs within FEW_TOKENS if these need at most half of the
    tokens, padding included.

    Args:
        counts: new tokens of each sequence, `most` in all.
        rows: most sequences of a program.
        most: as of coarse_bucket.
    """

    def padded(runs: list[slice]) -> int:
        return sum(coarse_bucket(sum(counts[run]), most) for run in runs)

    few, many = _runs(counts, rows, FEW_TOKENS), _runs(counts, rows, max(most, sum(counts)))
    return few if 2 * padded(few) <= padded(many) else many


def _runs(counts: Sequence[int], rows: int, tokens: int) -> list[slice]:
    """Divide sequences, in order, into runs of at most `rows` with at most `tokens`; a longer
    sequence is a run of one."""
    runs, begin, held = list[slice](), 0, 0
    for index, count in enumerate(counts):
        if index > begin and (index - begin == rows or held + count > tokens):
            runs.append(slice(begin, index))
            begin, held = index, 0
        held += count
    return [*runs, slice(begin, len(counts))] if counts else runs


def coarse_buckets(most: int) -> list[int]:
    """Return all values of coarse_bucket for numbers of tokens up to `most`, ascending."""
    found = [coarse_bucket(1, most)]
    while found[-1] < most:
        found.append(coarse_bucket(found[-1] + 1, most))
    return found


def steps_of_half(count: int) -> int:
    """Return the smallest of 1, 2, 3, 4, 6, 8, 12, 16, ... that is at least `count`; 0 for 0."""
    if count <= 0:
        return 0
    power = 1 << (count - 1).bit_length()
    return power * 3 // 4 if power >= 4 and power * 3 // 4 >= count else power


def decode_rows(running: int, slots: int) -> int:
    """Return the number of rows that decode: all slots, or a half, a quarter or an eighth of them
    if that holds the running requests."""
    rows = slots
    while rows % 2 == 0 and rows // 2 >= max(running, 4, slots // 8):
        rows //= 2
    return rows


def coarse_rows(running: int, slots: int) -> int:
    """Return the number of rows that decode where idle rows cost little: all slots, or an eighth of
    them if that holds the running requests."""
    few = max(slots // 8, 4)
    return few if running <= few < slots else slots


def pad_to(
    size: int,
    values: Sequence[object] | NDArray[np.generic],
    fill: object,
    dtype: DTypeLike = np.int32,
) -> NDArray[Any]:
    """Return the values in an array of `size`; the rest of it is `fill`."""
    padded = np.full(size, fill, dtype)
    padded[: len(values)] = values
    return padded
