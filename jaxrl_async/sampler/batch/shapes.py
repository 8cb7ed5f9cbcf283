"""What to prefill next, and the few shapes that programs are compiled for. Pure: no clock, no JAX.

A long prompt is prefilled in chunks, one per round, and the running slots decode a block between
two rounds; short prompts are packed into one program by their lengths.
"""

from collections.abc import Sequence
from dataclasses import dataclass

SMALLEST_BUCKET = 16
"""Shortest prefill length compiled for, tokens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """Some tokens of one sequence that is being prefilled."""

    index: int  # of the sequence, in the order they wait
    start: int  # tokens of it that are prefilled already
    count: int  # tokens to prefill now, >= 1


def plan_pieces(waiting: Sequence[tuple[int, int]], budget: int) -> tuple[Piece, ...]:
    """First come, first served: (prefilled, total) tokens of each sequence to at most `budget`.

    The sequence that reaches the budget gets what is left of it, and the rest in a later round.
    """
    pieces = []
    for index, (start, total) in enumerate(waiting):
        if budget <= 0:
            break
        count = min(total - start, budget)
        pieces.append(Piece(index=index, start=start, count=count))
        budget -= count
    return tuple(pieces)


def by_bucket(pieces: Sequence[Piece]) -> list[tuple[int, tuple[Piece, ...]]]:
    """Pieces of similar length together, each with the length that the program is compiled for."""
    buckets: dict[int, list[Piece]] = {}
    for piece in pieces:
        buckets.setdefault(length_bucket(piece.count), []).append(piece)
    return [(bucket, tuple(found)) for bucket, found in sorted(buckets.items())]


def length_bucket(length: int) -> int:
    """The power of two, from SMALLEST_BUCKET on, that holds `length`."""
    return max(SMALLEST_BUCKET, 1 << (length - 1).bit_length())


def rows_bucket(rows: int) -> int:
    """Padded number of sequences in a prefill: 1, 4, 16, 64, ..."""
    bucket = 1
    while bucket < rows:
        bucket *= 4
    return bucket


def tokens_bucket(tokens: int, most: int) -> int:
    """Padded number of packed tokens: powers of two and the middles between, at most `most`."""
    return min(max(SMALLEST_BUCKET, steps_of_half(tokens)), most)


def steps_of_half(count: int) -> int:
    """The least of 1, 2, 3, 4, 6, 8, 12, 16, 24, ... that is not below `count`; 0 for 0."""
    if count <= 0:
        return 0
    power = 1 << (count - 1).bit_length()
    return power * 3 // 4 if power >= 4 and power * 3 // 4 >= count else power


def decode_rows(running: int, slots: int) -> int:
    """Rows to decode: all slots, or a half, a quarter or an eighth where that holds who runs."""
    rows = slots
    while rows % 2 == 0 and rows // 2 >= max(running, 4, slots // 8):
        rows //= 2
    return rows
