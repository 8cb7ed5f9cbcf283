"""Which experts the tokens in the pages went through: a mirror of the KV cache. Pure host code.

Experts lie where the keys and values that they made lie, so that whoever shares, copies or finds
pages again (groups, forks, later turns, the prefix store) finds their experts there, too.
"""

from typing import Any, NamedTuple

import numpy as np

from jaxrl_async.types import ExpertIds, IntArray


class _Coming(NamedTuple):
    """What a program under way will say, and where it belongs."""

    routes: Any  # [n, layers, k] on the device
    pages: IntArray  # [n]; a page beyond the last is padding
    places: IntArray  # [n]
    sources: IntArray  # [m] pages copied after that
    targets: IntArray  # [m]; a page beyond the last is padding


class Routes:
    """Expert ids of every token in the pages: layers * k of them a token, a few thousandths of its
    KV. Changed by whoever may change the batch."""

    def __init__(
        self, pages: int, page_tokens: int, *, layers: int, chosen: int, dtype: Any
    ) -> None:
        self._of_page = np.zeros((pages, page_tokens, layers, chosen), dtype)
        self._coming: list[_Coming] = []

    def expect(
        self, routes: Any, pages: IntArray, places: IntArray, sources: IntArray, targets: IntArray
    ) -> None:
        """Take what a prefill says once somebody asks: then it has run. Pages are those of now,
        copied one to another as the device copies them."""
        self._coming.append(_Coming(routes, pages, places, sources, targets))

    def put(self, routes: ExpertIds, pages: IntArray, places: IntArray) -> None:
        """Experts [n, layers, k] of tokens at places [n] of pages [n]."""
        self._settle()
        self._of_page[pages, places] = routes

    def of(self, pages: list[int], tokens: int) -> ExpertIds:
        """[tokens, layers, k] of the first tokens in these pages; a copy."""
        self._settle()
        flat = self._of_page[pages].reshape(-1, *self._of_page.shape[2:])
        return flat[:tokens].copy()

    def _settle(self) -> None:
        """Waits for the prefills that are under way, in their order: a page may be another's
        since."""
        coming, self._coming = self._coming, []
        count = len(self._of_page)
        for one in coming:
            real, copied = one.pages < count, one.targets < count
            self._of_page[one.pages[real], one.places[real]] = np.asarray(one.routes)[real]
            self._of_page[one.targets[copied]] = self._of_page[one.sources[copied]]
