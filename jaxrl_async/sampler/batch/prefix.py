"""KV that outlives its request: full pages, found again by their tokens. Pure host code.

A page's name is a hash chained over all tokens up to its end, so that equal names mean equal
prefixes by equal weights: the chain of an adapter's pages begins with its name and version. What
other weights made is forgotten when they change, so that stale KV is never used. Pages that only
the store holds are evicted, least recently used first, when memory runs short.
"""

import hashlib
from collections import OrderedDict
from dataclasses import dataclass

from jaxrl_async.sampler.batch.pages import Pages
from jaxrl_async.types import IntArray


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefixStats:
    """Totals since the start."""

    hit_tokens: int = 0  # prompt tokens found in the store
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

    def __init__(self, pages: Pages, page_tokens: int, *, enabled: bool = True) -> None:
        self._pages, self._page_tokens, self._enabled = pages, page_tokens, enabled
        self._by_name: OrderedDict[bytes, int] = OrderedDict()  # least recently used first
        self._salts: dict[bytes, bytes] = {}  # of those pages that an adapter made
        self._hit = self._asked = self._evicted = 0

    def stats(self) -> PrefixStats:
        """Return the totals so far."""
        return PrefixStats(
            hit_tokens=self._hit, asked_tokens=self._asked, evicted_pages=self._evicted
        )

    @property
    def held(self) -> tuple[int, ...]:
        """Pages in the store."""
        return tuple(self._by_name.values())

    def match(self, token_ids: IntArray, salt: bytes = b"") -> list[int]:
        """Return the pages of the longest stored prefix, which the caller holds from now on too.

        At least one token stays unmatched: its logits must be computed. salt: of the adapter that
        computes them.
        """
        pages: list[int] = []
        if self._enabled:
            names = page_names(token_ids[:-1], self._page_tokens, salt)
            for name in names:
                if name not in self._by_name:
                    break
                pages.append(self._by_name[name])
            for name in reversed(names[: len(pages)]):  # ends first: they are evicted first
                self._by_name.move_to_end(name)
        self._pages.hold(pages)
        return pages

    def count(self, *, matched_pages: int, asked_tokens: int) -> None:
        """Count a match that was used."""
        self._hit += matched_pages * self._page_tokens
        self._asked += asked_tokens

    def put(self, token_ids: IntArray, pages: list[int], salt: bytes = b"") -> None:
        """Keep the full pages of a sequence; `pages` are its pages in order. salt: of the adapter
        that made them."""
        if not self._enabled:
            return
        names = page_names(token_ids, self._page_tokens, salt)
        for name, page in reversed(list(zip(names, pages, strict=False))):
            if name not in self._by_name:
                self._pages.hold([page])
                self._by_name[name] = page
                if salt:
                    self._salts[name] = salt
            self._by_name.move_to_end(name)

    def evict(self, count: int) -> int:
        """Free up to `count` pages that only the store holds; return how many."""
        evicted: list[bytes] = []
        for name, page in self._by_name.items():
            if len(evicted) == count:
                break
            if self._pages.holders(page) == 1:
                evicted.append(name)
        self._drop(evicted)
        self._evicted += len(evicted)
        return len(evicted)

    def clear(self) -> None:
        """Forget everything: the weights have changed."""
        self._drop(list(self._by_name))

    def forget(self, salt: bytes) -> None:
        """Forget what an adapter's weights have made: they have changed, or are gone."""
        self._drop([name for name, of in self._salts.items() if of == salt])

    def _drop(self, names: list[bytes]) -> None:
        for name in names:
            self._pages.release([self._by_name.pop(name)])
            self._salts.pop(name, None)
