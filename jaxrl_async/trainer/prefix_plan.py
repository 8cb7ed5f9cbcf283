"""Assign contexts to rows, with common prefixes stored once for several contexts: NumPy, pure.

Contexts of one group that begin with the same tokens (answers to one prompt, branches of an
episode, rewritten history) can be packed as a tree. The first one is packed whole. Each later one
is a separate segment that keeps only the last of its shared tokens. So the predecessor of every
trained token is to its left, and only attention and positions depend on the tree.

    contexts    PPPPaaa  PPPPbb  PPPPccc        row         PPPPaaa Pbb Pccc
    skipped     0        3       3              positions   0123456 345 3456

In a row, a segment that begins at position s > 0 continues the first s tokens of the context before
it. Contexts share only tokens that they do not train; the context that trains a token packs it.
"""

import heapq
from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray


class PrefixKey(NamedTuple):
    """The key that decides which prefix a context can share."""

    tokens: NDArray[np.int32]  # [length, width]: the values of each token that must be equal
    group: int  # contexts of different groups share nothing
    first_trained: int  # index of its first trained token; its length if it trains none


class PackedContext(NamedTuple):
    """A context in a row."""

    context: int
    skipped: int  # number of its first tokens that contexts before it in the row hold


def prefix_key(
    token_ids: NDArray[np.int32],
    trained: NDArray[np.bool_],
    group: int,
    expert_ids: NDArray[np.signedinteger] | None = None,
) -> PrefixKey:
    """Return the key of a context; tokens routed to different experts differ.

    Args:
        token_ids: [length].
        trained: [length] True where this context trains the token.
        group: contexts of different groups share nothing.
        expert_ids: [length, layers, k] if the routing is given.
    """
    columns = token_ids[:, None].astype(np.int32)
    if expert_ids is not None:
        of_token = expert_ids.reshape(len(token_ids), -1).astype(np.int32)
        columns = np.concatenate([columns, of_token], axis=1)
    first = int(np.argmax(trained)) if trained.any() else len(token_ids)
    return PrefixKey(np.ascontiguousarray(columns), group, first)


def plan_rows(
    lengths: Sequence[int], row_length: int, keys: Sequence[PrefixKey] | None = None
) -> list[list[PackedContext]]:
    """Return the ordered contexts of each row; deterministic.

    Prefixes are shared only if that takes fewer rows: in whole trees, or in trees that are divided
    at the end of a row, whichever takes fewer.

    Args:
        lengths: of the contexts, each at most row_length.
        row_length: tokens in a row.
        keys: of the contexts; None: nothing is shared.
    """
    rows = first_fit_decreasing(lengths, row_length)
    separate = [[PackedContext(context, 0) for context in row] for row in rows]
    if keys is None or len(separate) < 2:
        return separate
    of_group: dict[int, list[int]] = {}
    for index, key in enumerate(keys):
        of_group.setdefault(key.group, []).append(index)
    groups = [_compared(members, keys) for members in of_group.values()]
    trees = [tree for group in groups for tree in prefix_trees(group, row_length)]
    together = _in_rows(trees, lengths, row_length)
    divided = _filled_rows(groups, lengths, row_length)
    return min((separate, together, divided), key=len)


def _filled_rows(
    groups: Sequence["_Compared"], lengths: Sequence[int], row_length: int
) -> list[list[PackedContext]]:
    """Place group after group: a group's first tree fills the row with most room, and its other
    trees begin new rows."""
    rows: list[list[PackedContext]] = []
    filled: list[tuple[int, int]] = []  # a heap of (tokens in the row, row)
    for group in groups:
        used, row = filled[0] if filled else (row_length, -1)
        first, *others = prefix_trees(group, row_length, first_room=row_length - used)
        size = _packed_tokens(first, lengths)
        if row >= 0 and used + size <= row_length:
            rows[row] += first
            heapq.heapreplace(filled, (used + size, row))
        else:
            others = [first, *others]
        for tree in others:
            heapq.heappush(filled, (_packed_tokens(tree, lengths), len(rows)))
            rows.append(list(tree))
    return rows


def _packed_tokens(tree: Sequence[PackedContext], lengths: Sequence[int]) -> int:
    """Return the number of tokens of a tree in its row."""
    return sum(lengths[member.context] - member.skipped for member in tree)


def _in_rows(
    trees: Sequence[Sequence[PackedContext]], lengths: Sequence[int], row_length: int
) -> list[list[PackedContext]]:
    """Place whole trees in rows, the largest first."""
    rows = first_fit_decreasing([_packed_tokens(tree, lengths) for tree in trees], row_length)
    return [[member for tree in row for member in trees[tree]] for row in rows]


def first_fit_decreasing(lengths: Sequence[int], row_length: int) -> list[list[int]]:
    """Return the indices in each row: longest first, each into the first row with room.

    Equal lengths keep their order.
    """
    rows: list[list[int]] = []
    room = _Room(len(lengths), row_length)
    for index in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        row = room.take(lengths[index])
        if row == len(rows):
            rows.append([])
        rows[row].append(index)
    return rows


class _Room:
    """The free tokens of each row, in a tree: a node holds the maximum of its subtree.

    The first row with room is found in as many steps as the tree is deep.
    """

    def __init__(self, rows: int, row_length: int) -> None:
        self._width = 1 << max(rows - 1, 0).bit_length()
        self._most = [row_length] * (2 * self._width)  # node i has 2 i and 2 i + 1; rows are last

    def take(self, length: int) -> int:
        """Take this many tokens, at most a row, in the first row with room; return its index."""
        most, node = self._most, 1
        while node < self._width:
            node *= 2
            if most[node] < length:
                node += 1
        row = node - self._width
        most[node] -= length
        while node > 1:
            node //= 2
            most[node] = max(most[2 * node], most[2 * node + 1])
        return row


class _Compared(NamedTuple):
    """The contexts of one group, sorted by their first trained token.

    Later contexts may share the tokens that earlier ones train.
    """

    order: list[int]  # their indices
    keys: list[PrefixKey]  # in this order
    common: NDArray[np.int64]  # [n, n] of common_lengths, in this order


def _compared(members: Iterable[int], keys: Sequence[PrefixKey]) -> _Compared:
    order = sorted(members, key=lambda m: (keys[m].first_trained, m))
    own = [keys[m] for m in order]
    return _Compared(order, own, common_lengths([key.tokens for key in own]))


def prefix_trees(
    group: _Compared, row_length: int, *, first_room: int = 0
) -> list[list[PackedContext]]:
    """Return the contexts of one group as trees of at most a row, each in the order of its row.

    Each context joins the tree with room in which it shares most tokens, or begins a tree.

    first_room: maximum tokens of the first tree, if the first context fits; otherwise a row.
    """
    fits = len(group.keys[0].tokens) <= first_room
    forest = _Forest(row_length, first_room if fits else row_length)
    for position, key in enumerate(group.keys):
        length = len(key.tokens)
        most = min(length - 1, key.first_trained)
        forest.add(length, np.minimum(group.common[position, :position], most) - 1)
    return [[PackedContext(group.order[i], skipped) for i, skipped in t] for t in forest.trees()]


class _Forest:
    """Trees of contexts, built in the order in which contexts are added."""

    def __init__(self, row_length: int, first_room: int) -> None:
        """first_room: maximum tokens of the first tree; the others have a row."""
        self._row_length = row_length
        self._tree_of: list[int] = []  # by context
        self._skipped: list[int] = []
        self._branches: list[list[int]] = []
        self._room: list[int] = []  # by tree, tokens
        self._next_room = first_room
        self._roots: list[int] = []

    def add(self, length: int, shared: NDArray[np.int64]) -> None:
        """Add a context of this length, below the context with which it shares most tokens.

        Of several such contexts the first is the parent: it holds the tokens.

        shared: [contexts so far] number of tokens that are shared with each of them.
        """
        index, parent, skipped = len(self._tree_of), -1, 0
        if index:
            room = np.array(self._room)[self._tree_of]
            shared = np.where(length - shared <= room, shared, 0)
            parent, skipped = int(np.argmax(shared)), int(shared.max())
        if skipped > 0:
            tree = self._tree_of[parent]
            self._branches[parent].append(index)
            self._room[tree] -= length - skipped
        else:
            tree, skipped = len(self._roots), 0
            self._roots.append(index)
            self._room.append(self._next_room - length)
            self._next_room = self._row_length
        self._tree_of.append(tree)
        self._skipped.append(skipped)
        self._branches.append([])

    def trees(self) -> list[list[tuple[int, int]]]:
        """Return (context, skipped) of each tree, depth first; of a context's children those that
        share most come first."""
        return [self._walked(root) for root in self._roots]

    def _walked(self, root: int) -> list[tuple[int, int]]:
        walked, waiting = [], [root]
        while waiting:
            context = waiting.pop()
            walked.append((context, self._skipped[context]))
            waiting += sorted(self._branches[context], key=lambda b: (self._skipped[b], -b))
        return walked


def common_lengths(tokens: Sequence[NDArray[np.int32]]) -> NDArray[np.int64]:
    """Return [n, n]: the number of equal first rows of each two arrays [length, width]; 0 on the
    diagonal.

    In the order of their bytes, the common length of two arrays is the minimum over the neighbours
    between them.
    """
    order = sorted(range(len(tokens)), key=lambda i: tokens[i].tobytes())
    neighbours = np.array([_common(tokens[a], tokens[b]) for a, b in pairwise(order)], np.int64)
    table = np.zeros((len(tokens), len(tokens)), np.int64)
    for position, index in enumerate(order[:-1]):
        least = np.minimum.accumulate(neighbours[position:])
        table[index, order[position + 1 :]] = table[order[position + 1 :], index] = least
    return table


def _common(a: NDArray[np.int32], b: NDArray[np.int32]) -> int:
    length = min(len(a), len(b))
    same = (a[:length] == b[:length]).all(axis=1)
    return length if same.all() else int(np.argmin(same))
