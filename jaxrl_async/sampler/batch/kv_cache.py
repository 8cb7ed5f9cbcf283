"""The KV cache on the host's side: page tables, pages, stored prefixes and the cache itself.

A sequence has a table with a row for each group of layers:

    tokens             0..3   4..7   8..11  12..15  16..19        pages of 4 tokens, 18 of them
    group 0, all         5      9      2       7      11
    group 1, window 6    -      -      4       8       3          the page of the last token, and 2
                                                                  before: 5 tokens that it sees
Pages before `first_pages` are hidden by the group's window permanently: they are released.

A page has one holder for each slot whose table names it, and one more if the prefix store has it. A
page without holders is free. A page with several holders is never written: it is copied first.

Full pages outlive their request in the prefix store, which finds them by their tokens:

    tokens              0..3   4..7   8..11  12..15        pages of 4 tokens
    group 0, all          5      9      2       7
    group 1, window 6     -      -      4       8          matches 16 tokens, but not 12: the next
                                                           token there would need page 1

A page's name is a hash chained over all tokens up to its end: equal names mean equal prefixes by
equal weights, because the chain of an adapter's pages begins with its name and version. When
weights change, the pages that the old ones computed are forgotten: stale KV is never used. Pages
that only the store holds are evicted, least recently used first, when memory runs short.
"""

import hashlib
from collections import OrderedDict, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from jaxrl_async.model.kv_layout import KvLayout
from jaxrl_async.types import BoolArray, IntArray

Table = IntArray
"""[groups, width] int32: the pages of one sequence in order; `no_page` where it has no page."""


@dataclass(frozen=True, kw_only=True)
class TableForm:
    """The properties that all tables of a sampler share."""

    layout: KvLayout
    page_tokens: int
    width: int  # pages of the longest table that a program takes
    no_page: int  # stands for no page: the device drops writes to it

    @property
    def groups(self) -> int:
        """Rows of a table."""
        return len(self.layout.groups)

    def num_pages(self, tokens: int) -> int:
        """Return the number of pages that hold `tokens` tokens of a group."""
        return -(-tokens // self.page_tokens)

    def empty(self) -> Table:
        """Return the table of a sequence without pages."""
        return np.full((self.groups, self.width), self.no_page, np.int32)

    def first_pages(self, tokens: int) -> IntArray:
        """Return the first page that each group keeps of `tokens` tokens, [groups]."""
        groups = self.layout.groups
        return np.array([g.first_page(tokens, self.page_tokens) for g in groups], np.int32)

    def missing(self, table: Table, first: IntArray | int, tokens: int) -> BoolArray:
        """Return where a table lacks pages for `tokens` tokens, [groups, width] bool.

        first: the first page that is needed, of each group [groups] or of all groups.
        """
        numbers, firsts = np.arange(self.width), np.reshape(first, (-1, 1))
        needed = (numbers >= firsts) & (numbers < self.num_pages(tokens))
        return needed & (table == self.no_page)

    def hidden(self, table: Table, tokens: int) -> BoolArray:
        """Return which pages no token after the first `tokens` can see, [groups, width] bool."""
        numbers = np.arange(self.width)
        return (numbers < self.first_pages(tokens)[:, None]) & (table != self.no_page)

    def end(self, table: Table) -> int:
        """Return the end of the pages that a table names. A sequence that is recomputed has pages
        ahead of its tokens."""
        used = np.flatnonzero((table != self.no_page).any(axis=0))
        return int(used[-1]) + 1 if used.size else 0

    def pages_in(self, table: Table) -> list[int]:
        """Return the pages that a table names."""
        pages: list[int] = table[table != self.no_page].tolist()
        return pages


class Pages:
    """A free list with reference counts. Owned by the sampler's thread."""

    def __init__(self, count: int) -> None:
        self.count = count
        self._free = deque(range(count))
        self._holders = [0] * count

    @property
    def num_free(self) -> int:
        """Number of pages without a holder."""
        return len(self._free)

    @property
    def used_share(self) -> float:
        """Share of the pages that have a holder, 0 to 1."""
        return 1.0 - len(self._free) / self.count

    def allocate(self, count: int) -> list[int] | None:
        """Return `count` pages with one holder each; None, and take none, if too few are free."""
        if count > len(self._free):
            return None
        taken = [self._free.popleft() for _ in range(count)]
        for page in taken:
            self._holders[page] = 1
        return taken

    def hold(self, pages: Iterable[int]) -> None:
        """Add a holder to each page; it must have one already."""
        for page in pages:
            assert self._holders[page] > 0, f"page {page} is free"
            self._holders[page] += 1

    def release(self, pages: Iterable[int]) -> None:
        """Remove a holder from each page; free the pages that have none left."""
        for page in pages:
            assert self._holders[page] > 0, f"page {page} is free"
            self._holders[page] -= 1
            if not self._holders[page]:
                self._free.append(page)

    def holders(self, page: int) -> int:
        """Return how many holders a page has."""
        return self._holders[page]

    def check_integrity(self, held: Iterable[Sequence[int]]) -> None:
        """Raise AssertionError unless the counts and the free list match the holders' pages."""
        expected = [0] * self.count
        for pages in held:
            for page in pages:
                expected[page] += 1
        assert expected == self._holders, "holders do not add up"
        free = [page for page in range(self.count) if not expected[page]]
        assert sorted(self._free) == free, "the free list differs from the pages without holders"


Key = tuple[int, bytes]
"""A group of layers, and the name of one of its pages."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefixStats:
    """Totals since the start."""

    hit_tokens: int = 0  # prompt tokens found in the store
    hidden_tokens: int = 0  # found except in layers with a window: computed again
    asked_tokens: int = 0  # prompt tokens looked up
    evicted_pages: int = 0


def page_names(token_ids: IntArray, page_tokens: int, salt: bytes = b"") -> list[bytes]:
    """Return one name for each full page of a sequence. salt: of the adapter that computed it."""
    names, chained = [], salt
    for start in range(0, len(token_ids) - page_tokens + 1, page_tokens):
        content = token_ids[start : start + page_tokens].astype("<i4").tobytes()
        chained = hashlib.blake2b(chained + content, digest_size=16).digest()
        names.append(chained)
    return names


class PrefixStore:
    """Maps names to pages, for one version of each adapter. Owned by the sampler's thread."""

    def __init__(self, pages: Pages, form: TableForm, *, enabled: bool = True) -> None:
        self._pages, self._form, self.enabled = pages, form, enabled
        self._by_key: OrderedDict[Key, int] = OrderedDict()  # least recently used first
        self._salts: dict[Key, bytes] = {}  # of the pages that an adapter computed
        self._hit = self._asked = self._evicted = self._hidden = 0

    def stats(self) -> PrefixStats:
        """Return the totals since the start."""
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
        """Return the pages of the longest stored prefix, and hold them for the caller.

        At least one token stays unmatched: its logits must be computed.

        Args:
            token_ids: the prompt.
            salt: of the adapter that computes the prompt.

        Returns: a table [groups, n] with the pages that the next token sees, and the number of
        further pages that are stored for layers without a window only.
        """
        form = self._form
        if not self.enabled:
            return np.full((form.groups, 0), form.no_page, np.int32), 0
        names = page_names(token_ids[:-1], form.page_tokens, salt)
        count, unwindowed = self._longest(names)
        table = np.full((form.groups, count), form.no_page, np.int32)
        firsts = form.first_pages(count * form.page_tokens + 1)
        for g, first in enumerate(firsts):
            for number in reversed(range(first, count)):  # ends first: they are evicted first
                key = g, names[number]
                table[g, number] = self._by_key[key]
                self._by_key.move_to_end(key)
        self._pages.hold(form.pages_in(table))
        return table, unwindowed - count

    def _longest(self, names: Sequence[bytes]) -> tuple[int, int]:
        """Return after how many of these pages a prompt can continue, and how many of them are
        stored for the layers without a window; without such layers, the same number twice."""
        form, count = self._form, len(names)
        rows = [
            (group, [(g, name) in self._by_key for name in names])
            for g, group in enumerate(form.layout.groups)
        ]
        for group, stored in rows:
            if not group.window and False in stored:
                count = min(count, stored.index(False))
        windowed = [(group, stored) for group, stored in rows if group.window]

        def can_continue(end: int) -> bool:
            tokens, G = end * form.page_tokens + 1, form.page_tokens
            return all(all(stored[group.first_page(tokens, G) : end]) for group, stored in windowed)

        end = next(end for end in range(count, -1, -1) if can_continue(end))
        return end, count if len(windowed) < len(rows) else end

    def count(self, *, matched_pages: int, hidden_pages: int, asked_tokens: int) -> None:
        """Count a match that was used."""
        self._hit += matched_pages * self._form.page_tokens
        self._hidden += hidden_pages * self._form.page_tokens
        self._asked += asked_tokens

    def put(self, token_ids: IntArray, table: Table, salt: bytes = b"") -> None:
        """Keep the full pages of a sequence. salt: of the adapter that computed them."""
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
        """Free up to `count` pages that only the store holds; return their number."""
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
        """Forget all pages: the weights have changed."""
        self._drop(list(self._by_key))

    def forget(self, salt: bytes) -> None:
        """Forget the pages of an adapter, whose weights changed or were unloaded."""
        self._drop([key for key, own in self._salts.items() if own == salt])

    def _drop(self, keys: list[Key]) -> None:
        for key in keys:
            self._pages.release([self._by_key.pop(key)])
            self._salts.pop(key, None)


class KvCache:
    """The pages of a sampler's KV, shared by its requests and kept for later ones.

        allocate    a table for a new request: stored prefixes first, then free pages
        grow, fill  add pages to a table as its sequence gets longer
        share       hold the full pages of one table for another with the same tokens
        release     give up pages of a table: all, or the pages that no later token sees

    If too few pages are free, stored prefixes are evicted; if that is not enough, no page is taken.
    Owned by the sampler's thread.
    """

    def __init__(self, form: TableForm, num_pages: int, *, stores: bool = True) -> None:
        """Start with all pages free. stores: keep prefixes for later requests."""
        self.form = form
        self.pages = Pages(num_pages)
        self.prefixes = PrefixStore(self.pages, form, enabled=stores)

    def allocate(
        self,
        token_ids: IntArray,
        *,
        spare: int,
        salt: bytes = b"",
        reusable: int | None = None,
    ) -> tuple[Table | None, int]:
        """Return the table of a prompt, and the number of its tokens whose KV is there already.

        The table has the pages that the prompt keeps at its end. Pages that a window hides before
        the end are taken when the prefill reaches them (`fill`).

        Args:
            token_ids: the prompt.
            spare: pages that must stay free; the table is None if fewer would be left.
            salt: of the request's adapter.
            reusable: of the first tokens, all but the last may be found stored; None: of all.
        """
        form, tokens = self.form, len(token_ids)
        matched, hidden = self.prefixes.match(token_ids[:reusable], salt)
        table, found = form.empty(), matched.shape[1]
        table[:, :found] = matched
        firsts = np.maximum(form.first_pages(tokens), found)
        if not self.fill(table, firsts, tokens, spare=spare):
            self.release(matched)
            return None, 0
        self.prefixes.count(matched_pages=found, hidden_pages=hidden, asked_tokens=tokens)
        return table, found * form.page_tokens

    def allocate_follower(self, tokens: int, *, spare: int) -> Table | None:
        """Return the table of a request with the same `tokens` tokens as one that is being
        prefilled. It has a page for the last, partial page alone; `share` adds the full pages.
        None as for `allocate`."""
        table = self.form.empty()
        first = tokens // self.form.page_tokens
        return table if self.fill(table, first, tokens, spare=spare) else None

    def fill(self, table: Table, first: IntArray | int, tokens: int, *, spare: int = 0) -> bool:
        """Add the pages that a table lacks for `tokens` tokens; return False, and take none, if
        fewer than `spare` pages would be left.

        first: the first page that is needed, of each group [groups] or of all groups.
        """
        where = self.form.missing(table, first, tokens)
        pages = self._take(int(where.sum()), spare)
        if pages is None:
            return False
        table[where] = pages
        return True

    def grow(self, table: Table, begin: int, end: int) -> bool:
        """Add the pages `begin` to `end` of each group to a table that lacks them; return False,
        and take none, if there are too few. The cost does not depend on the table's width."""
        pages = self._take((end - begin) * self.form.groups, 0)
        if pages is None:
            return False
        table[:, begin:end] = np.reshape(pages, (self.form.groups, end - begin))
        return True

    def share(self, table: Table, into: Table, tokens: int) -> None:
        """Hold the full pages of a table's first `tokens` tokens for a follower's table, too."""
        full = tokens // self.form.page_tokens
        into[:, :full] = table[:, :full]
        self.pages.hold(self.form.pages_in(into[:, :full]))

    def release(self, table: Table, where: BoolArray | None = None) -> None:
        """Release the pages of a table at `where` (None: all), and remove them from the table."""
        given = table != self.form.no_page if where is None else where
        self.pages.release(table[given].tolist())
        table[given] = self.form.no_page

    @property
    def evictable_share(self) -> float:
        """Share of the pages that only the prefix store holds. Visits each stored page."""
        return sum(self.pages.holders(p) == 1 for p in self.prefixes.held) / self.pages.count

    def check_integrity(self, tables: Iterable[Table]) -> None:
        """Raise AssertionError unless each page is held once by each table that names it.

        tables: of all requests that have one.
        """
        held = [self.form.pages_in(table) for table in tables]
        self.pages.check_integrity([*held, self.prefixes.held])

    def _take(self, count: int, spare: int) -> list[int] | None:
        short = count + spare - self.pages.num_free
        if short > 0:
            short -= self.prefixes.evict(short)
        return None if short > 0 else self.pages.allocate(count)
