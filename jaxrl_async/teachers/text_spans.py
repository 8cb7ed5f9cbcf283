"""Aligns the tokens of two tokenizers by the bytes of a text that they cover. Pure.

    the policy's tokens   |hel|lo| wor|ld|!|
    the teacher's tokens  |hello| w|orld|!|
    spans                 |  0  |   1   |2|      a span ends where a token of both ends

The alignment is GOLD's (Patiño et al. 2025, "Unlocking On-Policy Distillation for Any Model Family
with GOLD").
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from jaxrl_async.types import BoolArray, IntArray


class Spans(NamedTuple):
    """Spans of a text: the tokens of both that cover each, as [first, one after the last]."""

    policy: IntArray  # [spans, 2] int32, indices of the policy's tokens
    teacher: IntArray  # [spans, 2] int32, indices of the teacher's tokens

    @property
    def one_to_one(self) -> BoolArray:
        """Whether a span is one token of both, [spans]."""
        return (_widths(self.policy) == 1) & (_widths(self.teacher) == 1)

    def at(self, chosen: NDArray[np.bool_]) -> "Spans":
        """Return some of the spans."""
        return Spans(self.policy[chosen], self.teacher[chosen])

    def moved(self, policy: int, teacher: int) -> "Spans":
        """Return the spans of tokens that stand behind so many others."""
        return Spans(self.policy + np.int32(policy), self.teacher + np.int32(teacher))


NO_SPANS = Spans(np.zeros((0, 2), np.int32), np.zeros((0, 2), np.int32))


def spans_of(
    policy: Sequence[bytes], teacher: Sequence[bytes], usual: Sequence[bytes] | None = None
) -> Spans:
    """Return the spans of a text that two tokenizers have split, up to where their bytes differ.

    Args:
        policy: bytes of the policy's tokens, each at least one.
        teacher: bytes of the teacher's tokens. An empty one belongs to the span that follows.
        usual: bytes of the tokens that the policy's tokenizer splits the text into. A span that
            the policy has split in another way is left out: the teacher says how likely the text
            is, and every further way to write it would count as likely. None: keep all spans.
    """
    policy_ends, teacher_ends = _ends(policy), _ends(teacher)
    same = _common(b"".join(policy), b"".join(teacher))
    borders = np.intersect1d(policy_ends, teacher_ends)
    borders = borders[(borders > 0) & (borders <= same)]
    if not len(borders):
        return NO_SPANS
    spans = Spans(_between(policy_ends, borders), _between(teacher_ends, borders))
    if usual is None:
        return spans
    begins, usual_ends = np.concatenate([[0], borders]), np.concatenate([[0], _ends(usual)])
    differing = np.setxor1d(np.concatenate([[0], policy_ends]), usual_ends)
    before = np.searchsorted(differing, begins, side="right")
    return spans.at((np.diff(before) == 0) & np.isin(begins[:-1], usual_ends))


def _between(ends: NDArray[np.int64], borders: NDArray[np.int64]) -> IntArray:
    """Return the tokens between each border and the one before it, [borders, 2]."""
    last = np.searchsorted(ends, borders) + 1
    return np.stack([np.concatenate([[0], last[:-1]]), last], axis=-1).astype(np.int32)


def _widths(tokens: IntArray) -> IntArray:
    widths: IntArray = tokens[:, 1] - tokens[:, 0]
    return widths


def _ends(pieces: Sequence[bytes]) -> NDArray[np.int64]:
    """Return where each token ends, bytes from the start of the text."""
    return np.cumsum([len(piece) for piece in pieces], dtype=np.int64)


def _common(a: bytes, b: bytes) -> int:
    """Return the number of first bytes that are equal."""
    length = min(len(a), len(b))
    x, y = (np.frombuffer(text, np.uint8, length) for text in (a, b))
    differing = np.flatnonzero(x != y)
    return int(differing[0]) if len(differing) else length
