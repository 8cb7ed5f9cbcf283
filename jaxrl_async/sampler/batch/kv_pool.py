"""Pages for requests: free ones, else ones that only the prefix store holds. Pure host code."""

import numpy as np

from jaxrl_async.sampler.batch.concurrency import LOW
from jaxrl_async.sampler.batch.page_tables import Table, TableForm
from jaxrl_async.sampler.batch.pages import Pages
from jaxrl_async.sampler.batch.prefix import PrefixStore
from jaxrl_async.types import BoolArray, IntArray


class KvPool:
    """The pages of the KV cache with the prefixes that they keep. Owned by the sampler's thread."""

    def __init__(self, pages: Pages, store: PrefixStore, form: TableForm) -> None:
        self.pages, self.store, self._form = pages, store, form

    def take(self, count: int, *, spare: int = 0) -> list[int] | None:
        """Return `count` pages, evicting stored prefixes if too few are free; None if fewer than
        `spare` pages would be left."""
        short = count + spare - self.pages.num_free
        if short > 0:
            short -= self.store.evict(short)
        return None if short > 0 else self.pages.allocate(count)

    def fill(self, table: Table, where: BoolArray, *, spare: int = 0) -> bool:
        """Put pages into a table there; return False, taking none, as for `take`."""
        pages = self.take(int(where.sum()), spare=spare)
        if pages is None:
            return False
        table[where] = pages
        return True

    def take_for_prompt(
        self, token_ids: IntArray, *, spare: int, salt: bytes = b""
    ) -> tuple[Table | None, int]:
        """Return the table of a prompt, with pages found in the prefix store first, and how many of
        its tokens they hold already. None as for `take`. salt: of the request's adapter.

        It has the pages that the prompt keeps at its end; those that a window hides before it ends
        are taken when it comes to them (Batch.prefill).
        """
        form, tokens = self._form, len(token_ids)
        matched, hidden = self.store.match(token_ids, salt)
        table, found = form.empty(), matched.shape[1]
        table[:, :found] = matched
        lacks = form.missing(table, np.maximum(form.first_pages(tokens), found), tokens)
        if not self.fill(table, lacks, spare=spare):
            self.pages.release(form.pages_in(matched))
            return None, 0
        self.store.count(matched_pages=found, hidden_pages=hidden, asked_tokens=tokens)
        return table, found * form.page_tokens

    def take_for_follower(self, tokens: int, *, spare: int) -> Table | None:
        """Return the table of a request with as many tokens as one that is being prefilled, and the
        same: its last page is its own, all full pages come later (`share`). None as for `take`."""
        table = self._form.empty()
        full, rest = divmod(tokens, self._form.page_tokens)
        own = np.zeros(table.shape, bool)
        own[:, full] = rest > 0
        return table if self.fill(table, own, spare=spare) else None

    def share(self, table: Table, into: Table, tokens: int) -> None:
        """Hold the full pages of so many tokens of a table for a follower's, too."""
        full = tokens // self._form.page_tokens
        into[:, :full] = table[:, :full]
        self.pages.hold(self._form.pages_in(into[:, :full]))

    @property
    def used_share(self) -> float:
        """Share of the pages in use; above LOW, pages that could be evicted are not counted."""
        share = self.pages.used_share
        if share > LOW:
            idle = sum(self.pages.holders(p) == 1 for p in self.store.held)
            share -= idle / self.pages.count
        return share
