"""KV that outlives its request: full pages, found again by their tokens. Pure host code.

    tokens              0..3   4..7   8..11  12..15        pages of 4 tokens
    group 0, all          5      9      2       7
    group 1, window 6     -      -      4       8          found up to 16, and not up to 12: what
                                                           follows there would see page 1, too

A page's name is a hash chained over all tokens up to its end, so that equal names mean equal
prefixes by equal weights: the chain of an adapter's pages begins with its name and version. What
other weights made is forgotten when they change, so that stale KV is never used. Pages that only
the store holds are evicted, least recently used first, when memory runs short.
"""

import hashlib
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from jaxrl_async.sampler.batch.page_tables import Table, TableForm
from jaxrl_async.sampler.batch.pages import Pages
from jaxrl_async.types import IntArray

Key = tuple[int, bytes]
"""A group of layers, and the name of a page of it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefixStats:
    """Totals since the start."""

    hit_tokens: int = 0  # prompt tokens found in the store
    hidden_tokens: int = 0  # found but for layers with a window: computed again
    asked_tokens: int = 0  # prompt tokens looked up
    evicted_pages: int = 0


def page_names(token_ids: IntArray, page_tokens: int, salt: bytes = b"") -> list[bytes]:
    """Return one name for each full page of a sequence. salt: of the adapter that made its KV."""
    names, chained = [], salt
    for start in range(0, len(token_ids) - page_tokens + 1, page_tokens):
        content = token_ids[start : start + page_tokens].astype("<i4").tobytes()
        chained = hashlib.blake2b(chained + content, digest_size=16).digest()
        names.append(chained)
    return names


class PrefixStore:
    """Names to pages, for one version of each adapter. Owned by the sampler's thread."""

    def __init__(self, pages: Pages, form: TableForm, *, enabled: bool = True) -> None:
        self._pages, self._form, self.enabled = pages, form, enabled
        self._by_key: OrderedDict[Key, int] = OrderedDict()  # least recently used first
        self._salts: dict[Key, bytes] = {}  # of those pages that an adapter made
        self._hit = self._asked = self._evicted = self._hidden = 0

    def stats(self) -> PrefixStats:
        """Return the totals so far."""
        return PrefixStats(
            hit_tokens=self._hit,
            hidden_tokens=self._hidden,
            asked_tokens=self._asked,
            evicted_pages=self._evicted,
        )

    @property
    def held(self) -> tuple[int, ...]:
        """Pages in the store."""
        return tuple(self._by_key.values())

    def match(self, token_ids: IntArray, salt: bytes = b"") -> tuple[Table, int]:
        """Return the pages of the longest stored prefix, [groups, n], of each group those that what
        follows sees; the caller holds them from now on, too. And how many more pages there are but
        for layers with a window.

        At least one token stays unmatched: its logits must be computed. salt: of the adapter that
        computes them.
        """
        form = self._form
        if not self.enabled:
            return np.full((form.groups, 0), form.no_page, np.int32), 0
        names = page_names(token_ids[:-1], form.page_tokens, salt)
        count, of_all_tokens = self._longest(names)
        table = np.full((form.groups, count), form.no_page, np.int32)
        firsts = form.first_pages(count * form.page_tokens + 1)
        for g, first in enumerate(firsts):
            for number in reversed(range(first, count)):  # ends first: they are evicted first
                key = g, names[number]
                table[g, number] = self._by_key[key]
                self._by_key.move_to_end(key)
        self._pages.hold(form.pages_in(table))
        return table, of_all_tokens - count

    def _longest(self, names: Sequence[bytes]) -> tuple[int, int]:
        """Return behind how many of these pages a prompt can go on, and how many of them the layers
        that see everything have; where there are no such layers, the same number."""
        form, count = self._form, len(names)
        rows = [
            (group, [(g, name) in self._by_key for name in names])
            for g, group in enumerate(form.layout.groups)
        ]
        for group, there in rows:
            if not group.window and False in there:
                count = min(count, there.index(False))
        windowed = [(group, there) for group, there in rows if group.window]

        def can_go_on(end: int) -> bool:
            tokens, G = end * form.page_tokens + 1, form.page_tokens
            return all(all(there[group.first_page(tokens, G) : end]) for group, there in windowed)

        end = next(end for end in range(count, -1, -1) if can_go_on(end))
        return end, count if len(windowed) < len(rows) else end

    def count(self, *, matched_pages: int, hidden_pages: int, asked_tokens: int) -> None:
        """Count a match that was used."""
        self._hit += matched_pages * self._form.page_tokens
        self._hidden += hidden_pages * self._form.page_tokens
        self._asked += asked_tokens

    def put(self, token_ids: IntArray, table: Table, salt: bytes = b"") -> None:
        """Keep the full pages that a sequence has. salt: of the adapter that made them."""
        if not self.enabled:
            return
        names = page_names(token_ids, self._form.page_tokens, salt)
        for g, row in enumerate(table):
            for name, page in reversed(list(zip(names, row.tolist(), strict=False))):
                if page == self._form.no_page:
                    continue
                key = g, name
                if key not in self._by_key:
                    self._pages.hold([page])
                    self._by_key[key] = page
                    if salt:
                        self._salts[key] = salt
                self._by_key.move_to_end(key)

    def evict(self, count: int) -> int:
        """Free up to `count` pages that only the store holds; return how many."""
        evicted: list[Key] = []
        for key, page in self._by_key.items():
            if len(evicted) == count:
                break
            if self._pages.holders(page) == 1:
                evicted.append(key)
        self._drop(evicted)
        self._evicted += len(evicted)
        return len(evicted)

    def clear(self) -> None:
        """Forget everything: the weights have changed."""
        self._drop(list(self._by_key))

    def forget(self, salt: bytes) -> None:
        """Forget what an adapter's weights have made: they have changed, or are gone."""
        self._drop([key for key, of in self._salts.items() if of == salt])

    def _drop(self, keys: list[Key]) -> None:
        for key in keys:
            self._pages.release([self._by_key.pop(key)])
            self._salts.pop(key, None)
