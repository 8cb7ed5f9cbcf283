"""The grouping of layers whose keys and values share a page of the KV cache. Pure: no arrays.

Layers with full attention need the KV of all tokens, layers with a window only of the last tokens.
Layers are therefore divided into groups with one window each and about equally many layers. A page
holds some tokens of one group's layers. All pages have the same size and are from one pool, and a
sequence has a page table for each group. (vLLM's hybrid KV cache manager divides a pool in the same
way.)

    Gemma 3, 26 layers, 4 with full attention; a page has 4 layers, 7 groups:

    array                          0   1   2   3
    group 0, all tokens            5  11  17  23      layers
    group 1, a window              0   1   2   3
    ...
    group 6, a window             22  24  25   -

An array of pages is shared by all groups: the table that refers to a page determines its group.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import pairwise

from jaxrl_async.model.families.parts import LayerKind

MOST_GROUPS = 16
"""Approximate maximum number of groups of a model; each has its own table."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KvGroup:
    """Layers that keep a token's keys and values in the same page."""

    window: int  # of its layers; 0: every token is kept
    layers: tuple[int, ...]  # their numbers, at most one per array

    def pages_behind(self, page_tokens: int) -> int:
        """Return the number of previous pages that a page's first token sees; requires a window."""
        return -(-(self.window - 1) // page_tokens)

    def first_page(self, tokens: int, page_tokens: int) -> int:
        """Return the first page that a sequence of this many tokens keeps.

        It keeps the page of the last token and the pages that this page's first token sees. The
        last token can therefore be computed again, and so can tokens after a full last page.
        """
        if not self.window:
            return 0
        return max(0, (tokens - 1) // page_tokens - self.pages_behind(page_tokens))


@dataclass(frozen=True, slots=True, kw_only=True)
class KvLayout:
    """The groups of a model's layers; the first has the longest window."""

    groups: tuple[KvGroup, ...]
    arrays: int  # number of page arrays: the layers of a full group

    @property
    def by_layer(self) -> dict[int, tuple[int, int]]:
        """The group and the array of each layer that has keys and values."""
        return {
            layer: (g, array)
            for g, group in enumerate(self.groups)
            for array, layer in enumerate(group.layers)
        }

    @property
    def keeping_all(self) -> "KvLayout":
        """The same groups, without freeing pages outside windows."""
        return replace(self, groups=tuple(replace(group, window=0) for group in self.groups))

    def pages_of(self, tokens: int, page_tokens: int, block: int) -> int:
        """Return the maximum number of pages of a sequence of this many tokens while it decodes
        blocks of this many steps."""
        whole, ahead = -(-tokens // page_tokens), -(-block // page_tokens)
        return sum(
            min(whole, group.pages_behind(page_tokens) + 1 + ahead) if group.window else whole
            for group in self.groups
        )

    def most_pages_of(self, tokens: int, page_tokens: int, block: int) -> int:
        """Return the maximum number of pages of a sequence of this many tokens at any time. During
        prefill it has the pages at its end, and the pages at both ends of a chunk."""
        whole = -(-tokens // page_tokens)
        prefilled = sum(
            min(whole, 3 * (group.pages_behind(page_tokens) + 1)) if group.window else whole
            for group in self.groups
        )
        return max(prefilled, self.pages_of(tokens, page_tokens, block))


@lru_cache(maxsize=64)
def layout_of(kinds: tuple[LayerKind, ...]) -> KvLayout:
    """Return the layout in pages of the keys and values of layers of these kinds; gated delta nets
    have none.

    A page has as many layers as the rarest window, so this window's group is full. The groups of
    another window together lack fewer layers than one group has.

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
    """Divide layers into the minimum number of parts of at most `most`, of nearly equal size."""
    parts = max(1, -(-len(layers) // most))
    ends = [len(layers) * i // parts for i in range(parts + 1)]
    return [tuple(layers[a:b]) for a, b in pairwise(ends)]
