"""The experts that each token in the pages was routed to: a mirror of the KV cache. Pure host code.

Expert ids are stored by page, like the KV that the experts computed. A request that shares, copies
or reuses pages (groups, forks, later turns, the prefix store) therefore has their experts, too. Ids
are in the pages of the first group of layers, which covers all tokens.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import DTypeLike

from jaxrl_async.sampler.batch.slots import Slots, Span
from jaxrl_async.types import ExpertIds, IntArray, Partial


class _Pending(NamedTuple):
    """Expert ids that a running program will return, and their cells."""

    routes: Any  # [n, layers, k] on the device
    pages: IntArray  # [n]; a page beyond the last is padding
    offsets: IntArray  # [n]
    sources: IntArray  # [m] pages copied after that
    targets: IntArray  # [m]; a page beyond the last is padding


class Routes:
    """Expert ids of every token in the pages: layers * k ids a token, a few thousandths of its KV.
    Changed only by the sampler's thread."""

    def __init__(
        self, pages: int, page_tokens: int, *, layers: int, chosen: int, dtype: DTypeLike
    ) -> None:
        self._by_page = np.zeros((pages, page_tokens, layers, chosen), dtype)
        self._pending: list[_Pending] = []

    def expect(
        self,
        routes: object,
        pages: IntArray,
        offsets: IntArray,
        sources: IntArray,
        targets: IntArray,
    ) -> None:
        """Register a prefill's expert ids, which are on the device: they are fetched when first
        needed. Pages are copied as the device copies them."""
        self._pending.append(_Pending(routes, pages, offsets, sources, targets))

    def put(self, routes: ExpertIds, pages: IntArray, offsets: IntArray) -> None:
        """Write expert ids [n, layers, k] of tokens at offsets [n] of pages [n]."""
        self._fetch()
        self._by_page[pages, offsets] = routes

    def take(self, routes: Any, owners: IntArray, spans: Sequence[Span], into: Slots) -> None:
        """Write the expert ids [R, block, layers, k] of a block to the cells of its tokens' KV.

        Args:
            routes: the block's.
            owners: [R, block] slot of each token.
            spans: the tokens of each slot.
            into: the slots, which have taken the block already.
        """
        owners, routes = owners.reshape(-1), routes.reshape(-1, *routes.shape[2:])
        for span in spans:
            length = int(into.lengths[span.slot])
            positions = np.arange(length - (span.end - span.start), length, dtype=np.int32)
            G = into.cache.form.page_tokens
            cells = into.tables[span.slot, 0, positions // G], positions % G
            self.put(routes[owners == span.slot], *cells)

    def cover(self, saved: Partial) -> bool:
        """Return whether a saved request has the experts of all tokens with KV."""
        tokens = len(saved.request.token_ids) + len(saved.token_ids) - 1
        return saved.expert_ids is not None and len(saved.expert_ids) == tokens

    def restore(self, saved: Partial, n: int, pages: IntArray, offsets: IntArray) -> None:
        """Write the expert ids of the first `n` tokens of a saved request."""
        assert saved.expert_ids is not None
        self.put(saved.expert_ids[:n], pages[:n], offsets[:n])

    def of_request(self, pages: IntArray, tokens: int, saved: Partial | None) -> ExpertIds | None:
        """Return [tokens, layers, k] of the first tokens in these pages; a copy.

        saved: the request before it left the device. Its ids stay: they are of the passes that
        sampled its tokens, not of the passes that recomputed its KV.
        """
        self._fetch()
        flat = self._by_page[pages].reshape(-1, *self._by_page.shape[2:])
        experts = flat[:tokens].copy()
        if saved is not None and saved.expert_ids is not None:
            experts[: len(saved.expert_ids)] = saved.expert_ids
        return experts

    def _fetch(self) -> None:
        """Wait for the pending prefills, in order: a page may have a new owner since."""
        pending, self._pending = self._pending, []
        count = len(self._by_page)
        for one in pending:
            real, copied = one.pages < count, one.targets < count
            self._by_page[one.pages[real], one.offsets[real]] = np.asarray(one.routes)[real]
            self._by_page[one.targets[copied]] = self._by_page[one.sources[copied]]


class NoRoutes:
    """Expert ids of an engine that does not return them: stores nothing."""

    def expect(self, *_: object) -> None:
        """Do nothing."""

    def take(self, *_: object) -> None:
        """Do nothing."""

    def cover(self, _: Partial) -> bool:
        """Return True: no expert ids are needed."""
        return True

    def restore(self, *_: object) -> None:
        """Do nothing."""

    def of_request(self, *_: object) -> None:
        """Return None: expert ids are unknown."""
