"""Which pages a sequence has: a table with a row for each group of layers. Pure host code.

    tokens             0..3   4..7   8..11  12..15  16..19        pages of 4 tokens, 18 of them
    group 0, all         5      9      2       7      11
    group 1, window 6    -      -      4       8       3          the page of the last token, and 2
                                                                  before: 5 tokens that it sees
A group's pages before `first_pages` are hidden by its window for good: they are given back.
"""

from dataclasses import dataclass

import numpy as np

from jaxrl_async.model.kv_layout import KvLayout
from jaxrl_async.types import BoolArray, IntArray

Table = IntArray
"""[groups, width] int32, the pages of one sequence in order; no_page where it has none."""


@dataclass(frozen=True, kw_only=True)
class TableForm:
    """What all tables of a sampler have in common."""

    layout: KvLayout
    page_tokens: int
    width: int  # pages of the longest table that a program takes
    no_page: int  # the number of no page: the device drops what is written there

    @property
    def groups(self) -> int:
        """Rows of a table."""
        return len(self.layout.groups)

    def num_pages(self, tokens: int) -> int:
        """Return how many pages of a group hold so many tokens."""
        return -(-tokens // self.page_tokens)

    def empty(self) -> Table:
        """Return the table of a sequence without pages."""
        return np.full((self.groups, self.width), self.no_page, np.int32)

    def first_pages(self, tokens: int) -> IntArray:
        """Return the first page that each group of a sequence of so many tokens keeps, [groups]."""
        groups = self.layout.groups
        return np.array([g.first_page(tokens, self.page_tokens) for g in groups], np.int32)

    def missing(self, table: Table, first: IntArray | int, tokens: int) -> BoolArray:
        """Return where a table lacks pages for so many tokens, [groups, width]; first: the first
        page that is needed, of each group or of all."""
        numbers, firsts = np.arange(self.width), np.reshape(first, (-1, 1))
        needed = (numbers >= firsts) & (numbers < self.num_pages(tokens))
        return needed & (table == self.no_page)

    def hidden(self, table: Table, tokens: int) -> BoolArray:
        """Return which pages of a table no token behind so many sees any more, [groups, width]."""
        numbers = np.arange(self.width)
        return (numbers < self.first_pages(tokens)[:, None]) & (table != self.no_page)

    def end(self, table: Table) -> int:
        """Return up to where a table names pages; computed again, a sequence has some ahead."""
        named = np.flatnonzero((table != self.no_page).any(axis=0))
        return int(named[-1]) + 1 if named.size else 0

    def pages_in(self, table: Table) -> list[int]:
        """Return the pages that a table names."""
        pages: list[int] = table[table != self.no_page].tolist()
        return pages
