"""Which layers' keys and values lie together in a page of the KV cache. Pure: no arrays.

Layers that see everything need the KV of all tokens, those with a window that of the last ones. So
layers are divided into groups, each of one window and of about as many layers: a page holds some
tokens of one group's layers, all pages are alike and come from one pool, and a sequence has a table
of pages for each group. (vLLM's hybrid KV cache manager divides a pool in the same way.)

    Gemma 3, 26 layers, 4 of which see everything; a page has 4 layers, 7 groups:

    array                          0   1   2   3
    group 0, all tokens            5  11  17  23      layers
    group 1, a window              0   1   2   3
    ...
    group 6, a window             22  24  25   -

An array of pages has the same place of every group: what is in a page says the table that names it.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import pairwise

from jaxrl_async.model.families.parts import LayerKind

MOST_GROUPS = 16
"""Groups of a model are about so many at most: each has a table of its own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KvGroup:
    """Layers whose keys and values of a token are in the same page."""

    window: int  # of its layers; 0: every token is kept
    layers: tuple[int, ...]  # their numbers, at most one for each array

    def pages_behind(self, page_tokens: int) -> int:
        """Return how many pages before its own a page's first token sees into; of a window."""
        return -(-(self.window - 1) // page_tokens)

    def first_page(self, tokens: int, page_tokens: int) -> int:
        """Return the first page that a sequence of so many tokens keeps.

        The page of the last token, and those that its first token sees into: so the last token
        can be computed again, as well as what comes behind any full page at the end.
        """
        if not self.window:
            return 0
        return max(0, (tokens - 1) // page_tokens - self.pages_behind(page_tokens))


@dataclass(frozen=True, slots=True, kw_only=True)
class KvLayout:
    """The groups of a model's layers; the first sees furthest."""

    groups: tuple[KvGroup, ...]
    arrays: int  # of pages: layers of a whole group

    @property
    def places(self) -> dict[int, tuple[int, int]]:
        """The group and the array of each layer that has keys and values."""
        return {
            layer: (g, array)
            for g, group in enumerate(self.groups)
            for array, layer in enumerate(group.layers)
        }

    @property
    def keeping_all(self) -> "KvLayout":
        """The same groups, of which none gives pages back."""
        return replace(self, groups=tuple(replace(group, window=0) for group in self.groups))

    def pages_of(self, tokens: int, page_tokens: int, block: int) -> int:
        """Return the most pages that a sequence of so many tokens has while it decodes blocks of so
        many steps."""
        whole, ahead = -(-tokens // page_tokens), -(-block // page_tokens)
        return sum(
            min(whole, group.pages_behind(page_tokens) + 1 + ahead) if group.window else whole
            for group in self.groups
        )

    def most_pages_of(self, tokens: int, page_tokens: int, block: int) -> int:
        """Return the most pages that a sequence of so many tokens has at any time: while it is
        prefilled, those of its end, and those at both ends of a chunk."""
        whole = -(-tokens // page_tokens)
        prefilled = sum(
            min(whole, 3 * (group.pages_behind(page_tokens) + 1)) if group.window else whole
            for group in self.groups
        )
        return max(prefilled, self.pages_of(tokens, page_tokens, block))


@lru_cache(maxsize=64)
def layout_of(kinds: tuple[LayerKind, ...]) -> KvLayout:
    """Return how the keys and values of layers of these kinds lie in pages; gated delta nets have
    none.

    A page has as many layers as the rarest window, so that of this one none is missing; of another
    window, the groups lack less than one group's layers together.

    >>> near, far = LayerKind(window=8), LayerKind()
    >>> [group.layers for group in layout_of((near, near, near, far)).groups]
    [(3,), (0,), (1,), (2,)]
    >>> layout_of((near, near)).arrays, layout_of((near, far) * 4).arrays
    (2, 4)
    """
    by_window: dict[int, list[int]] = {}
    for layer, kind in enumerate(kinds):
        if not kind.is_linear:
            by_window.setdefault(kind.window, []).append(layer)
    by_window = by_window or {0: []}
    layers = sum(map(len, by_window.values()))
    arrays = max(1, min(map(len, by_window.values())), -(-layers // MOST_GROUPS))
    widest_first = sorted(by_window, key=lambda window: (window > 0, -window))
    groups = [
        KvGroup(window=window, layers=part)
        for window in widest_first
        for part in _divided(by_window[window], arrays)
    ]
    return KvLayout(groups=tuple(groups), arrays=arrays)


def _divided(layers: Sequence[int], most: int) -> list[tuple[int, ...]]:
    """Divide layers into as few parts of at most so many as there can be, of nearly equal size."""
    parts = max(1, -(-len(layers) // most))
    ends = [len(layers) * i // parts for i in range(parts + 1)]
    return [tuple(layers[a:b]) for a, b in pairwise(ends)]
