"""Pages for requests: free ones, else ones that only the prefix store holds. Pure host code."""

from jaxrl_async.sampler.batch.concurrency import LOW
from jaxrl_async.sampler.batch.pages import Pages
from jaxrl_async.sampler.batch.prefix import PrefixStore
from jaxrl_async.types import IntArray


class KvPool:
    """The pages of the KV cache with the prefixes that they keep. Owned by the sampler's thread."""

    def __init__(self, pages: Pages, store: PrefixStore, page_tokens: int) -> None:
        self.pages, self.store, self._page_tokens = pages, store, page_tokens

    def take(self, count: int, *, spare: int = 0) -> list[int] | None:
        """Return `count` pages, evicting stored prefixes if too few are free; None if fewer than
        `spare` pages would be left."""
        short = count + spare - self.pages.num_free
        if short > 0:
            short -= self.store.evict(short)
        return None if short > 0 else self.pages.allocate(count)

    def take_for_prompt(
        self, token_ids: IntArray, *, spare: int, salt: bytes = b""
    ) -> tuple[list[int] | None, int]:
        """Return the pages of a prompt, those found in the prefix store first, and how many of its
        tokens they hold already. None as for `take`. salt: of the request's adapter."""
        matched = self.store.match(token_ids, salt)
        needed = -(-len(token_ids) // self._page_tokens) - len(matched)
        new = self.take(needed, spare=spare)
        if new is None:
            self.pages.release(matched)
            return None, 0
        self.store.count(matched_pages=len(matched), asked_tokens=len(token_ids))
        return matched + new, len(matched) * self._page_tokens

    def share(self, pages: list[int], tokens: int, *, spare: int) -> list[int] | None:
        """Return pages for a request with the same tokens as one that has these: all full pages
        are shared, and the last one is new. None as for `take`."""
        full, rest = divmod(tokens, self._page_tokens)
        new = self.take(1 if rest else 0, spare=spare)
        if new is None:
            return None
        shared = pages[:full]
        self.pages.hold(shared)
        return shared + new

    @property
    def used_share(self) -> float:
        """Share of the pages in use; above LOW, pages that could be evicted are not counted."""
        share = self.pages.used_share
        if share > LOW:
            idle = sum(self.pages.holders(p) == 1 for p in self.store.held)
            share -= idle / self.pages.count
        return share
