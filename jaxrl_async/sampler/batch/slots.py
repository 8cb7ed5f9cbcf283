"""What each slot holds: the host's side of the decode state, in NumPy. Pure host code.

S slots and reserve places, W pages of the longest sequence, M most new tokens. A place from 0 to
S - 1 is a slot or a reserve place: the device treats them alike, and which ones decode is said
anew for each block.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from jaxrl_async.types import BoolArray, FloatArray, IntArray, Partial


class Span(NamedTuple):
    """What one slot drew in a block."""

    slot: int
    start: int  # tokens drawn before
    end: int


class Slots:
    """Lengths, page tables and drawn tokens. Changed by the sampler's thread alone."""

    def __init__(
        self, places: int, *, max_length: int, max_new: int, page_tokens: int, no_page: int
    ) -> None:
        """no_page: the number that stands for no page (the device drops what goes there)."""
        self.page_tokens, self._no_page = page_tokens, no_page
        self.pages: list[list[int]] = [[] for _ in range(places)]
        self.lengths = np.zeros(places, np.int32)
        self.drawn = np.zeros(places, np.int32)
        self.logits_versions = np.zeros(places, np.int32)
        self.tokens = np.zeros((places, max_new), np.int32)
        self.logprobs = np.zeros((places, max_new), np.float32)
        self.versions = np.zeros((places, max_new), np.int32)
        self.full_logprobs = np.zeros((places, max_new), np.float32)
        self.kept: list[list[IntArray]] = [[] for _ in range(places)]

    def occupy(self, slot: int, length: int, pages: Sequence[int], version: int) -> None:
        """A sequence of `length` tokens, prefilled by weights of `version`."""
        self.pages[slot] = list(pages)
        self.lengths[slot], self.drawn[slot] = length, 0
        self.logits_versions[slot] = version
        self.kept[slot] = []

    def recall(self, slot: int, partial: Partial) -> None:
        """Tokens drawn before the sequence came to this slot; they count as drawn."""
        n = len(partial.token_ids)
        self.tokens[slot, :n], self.logprobs[slot, :n] = partial.token_ids, partial.logprobs
        self.versions[slot, :n], self.drawn[slot] = partial.versions, n
        if partial.full_logprobs is not None:
            self.full_logprobs[slot, :n] = partial.full_logprobs
        if partial.kept is not None:
            self.kept[slot] = [partial.kept.of(t) for t in range(n)]

    def free(self, slot: int) -> list[int]:
        """Empty a slot; its pages, for whoever counts them."""
        pages, self.pages[slot] = self.pages[slot], []
        self.lengths[slot] = self.drawn[slot] = 0
        self.kept[slot] = []
        return pages

    def missing_pages(self, slot: int, steps: int, limit: int) -> int:
        """Pages that the slot still needs for `steps` more tokens, `limit` of them at most."""
        tokens = int(self.lengths[slot]) + min(steps, limit)
        return max(0, -(-tokens // self.page_tokens) - len(self.pages[slot]))

    def tables(self, width: int) -> IntArray:
        """[S, width] int32 page tables."""
        tables = np.full((len(self.pages), width), self._no_page, np.int32)
        for slot, pages in enumerate(self.pages):
            tables[slot, : len(pages)] = pages[:width]
        return tables

    def table(self, pages: Sequence[int], width: int) -> IntArray:
        """[width] int32, one table."""
        row = np.full(width, self._no_page, np.int32)
        row[: len(pages)] = pages[:width]
        return row

    def take(
        self,
        tokens: IntArray,
        logprobs: FloatArray,
        owners: IntArray,
        version: int,
        full_logprobs: FloatArray | None = None,
        kept: Any = None,
    ) -> list[Span]:
        """Add a block's tokens [R, block] to their slots; what each slot drew.

        A slot's first token of the block comes from logits that were there before, and has their
        version; the others have the block's.
        """
        flat = owners.reshape(-1)
        order = np.argsort(flat, kind="stable")
        slots, starts, counts = np.unique(flat[order], return_index=True, return_counts=True)
        spans = []
        for slot, start, count in zip(slots, starts, counts, strict=True):
            if slot >= len(self.pages):
                continue
            taken = order[start : start + count]
            begin = int(self.drawn[slot])
            end = begin + int(count)
            self.tokens[slot, begin:end] = tokens.reshape(-1)[taken]
            self.logprobs[slot, begin:end] = logprobs.reshape(-1)[taken]
            self.versions[slot, begin:end] = version
            self.versions[slot, begin] = self.logits_versions[slot]
            if full_logprobs is not None:
                self.full_logprobs[slot, begin:end] = full_logprobs.reshape(-1)[taken]
            if kept is not None:
                words = kept.reshape(-1, kept.shape[-1])[taken]
                self.kept[slot] += [unpacked_bits(row) for row in words]
            self.logits_versions[slot] = version
            self.drawn[slot] = end
            self.lengths[slot] += int(count)
            spans.append(Span(int(slot), begin, end))
        return spans


def unpacked_bits(words: Any) -> IntArray:
    """[V / 32] uint32 -> the numbers of the bits that are set, ascending."""
    bits: BoolArray = np.unpackbits(
        np.ascontiguousarray(words, "<u4").view(np.uint8), bitorder="little"
    ).astype(bool)
    return np.flatnonzero(bits).astype(np.int32)
