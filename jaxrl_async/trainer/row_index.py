"""Index of each sequence's tokens in a packed batch, and batches of some of its sequences.

A sequence is an episode, with its tokens in the episode's order even if its contexts are packed
separately. A token that several contexts share is packed in one of them, which owns it.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import DTypeLike, NDArray

from jaxrl_async.algorithms.columns import COLUMNS, Source
from jaxrl_async.trainer.prefix_plan import PrefixKey, plan_rows, prefix_key
from jaxrl_async.trainer.token_columns import NO_MASK, SparseBits
from jaxrl_async.types import BoolArray, FloatArray, IntArray, PackedBatch


class RowContext(NamedTuple):
    """A context of a packed batch."""

    sequence: int
    offset: int  # of its first token in its sequence
    indices: NDArray[np.int64]  # flat index in the rows of each of its tokens
    shared: int  # number of its first tokens that other contexts own
    key: PrefixKey | None  # if prefixes are shared

    @property
    def owned(self) -> BoolArray:
        """True for the tokens that it owns."""
        return np.arange(len(self.indices)) >= self.shared


class RowSelection(NamedTuple):
    """Rows composed of tokens of other rows; [rows, length] each."""

    indices: NDArray[np.int64]  # flat indices in the other rows; -1 is padding
    owned: BoolArray  # True where the context owns the token; False: it is not trained there
    sequence_ids: IntArray  # -1 is padding
    segment_ids: IntArray  # 0 is padding
    offsets: IntArray  # 0 is padding

    @classmethod
    def padding(cls, rows: int, length: int) -> "RowSelection":
        """Return rows of padding."""
        shape = rows, length
        return cls(
            indices=np.full(shape, -1, np.int64),
            owned=np.zeros(shape, np.bool_),
            sequence_ids=np.full(shape, -1, np.int32),
            segment_ids=np.zeros(shape, np.int32),
            offsets=np.zeros(shape, np.int32),
        )


@dataclass(frozen=True, slots=True)
class RowIndex:
    """The indices of each sequence's tokens in the rows of a batch, over all its contexts."""

    sequences: tuple[NDArray[np.int64], ...]  # per sequence: its tokens' flat indices, in order
    owned: tuple[BoolArray, ...]  # per sequence: True for tokens that no other context owns
    contexts: tuple[tuple[RowContext, ...], ...]  # per sequence
    shape: tuple[int, ...]  # rows, length

    @classmethod
    def of(cls, batch: PackedBatch, share_prefixes: bool = False) -> "RowIndex":
        """Return the index of a batch.

        share_prefixes: the rows of `select` may share prefixes, too.
        """
        found = sorted(_contexts(batch, share_prefixes), key=lambda c: (c.sequence, c.offset))
        contexts: list[list[RowContext]] = [
            [] for _ in range(batch.sequence_ids.max(initial=-1) + 1)
        ]
        for context in found:
            contexts[context.sequence].append(context)
        return cls(
            sequences=tuple(_joined([c.indices for c in cs], np.int64) for cs in contexts),
            owned=tuple(_joined([c.owned for c in cs], np.bool_) for cs in contexts),
            contexts=tuple(tuple(cs) for cs in contexts),
            shape=batch.sequence_ids.shape,
        )

    def to_sequences(self, values: NDArray[np.generic]) -> list[NDArray[Any]]:
        """Return [rows, length] values as an array [length] for each sequence."""
        flat = values.ravel()
        return [flat[indices] for indices in self.sequences]

    def to_rows(self, values: Sequence[FloatArray]) -> FloatArray:
        """Return arrays [length] of the first sequences as [rows, length] float32; 0 elsewhere.

        A shared token has the value of the sequence that owns it.
        """
        rows = np.zeros(self.shape, np.float32)
        if len(values):
            owned = np.concatenate(self.owned[: len(values)])
            indices = np.concatenate(self.sequences[: len(values)])
            rows.ravel()[indices[owned]] = np.concatenate(values)[owned]
        return rows

    def select(self, sequences: NDArray[np.int64]) -> RowSelection:
        """Return some sequences packed into separate rows."""
        contexts = list(chain.from_iterable(self.contexts[s] for s in sequences))
        keys = [c.key for c in contexts if c.key is not None]  # of all or of none
        lengths = [len(c.indices) for c in contexts]
        rows = plan_rows(lengths, self.shape[1], keys or None)
        made = RowSelection.padding(len(rows), self.shape[1])
        for row, members in enumerate(rows):
            start = 0
            for segment, (index, skipped) in enumerate(members, 1):
                context = contexts[index]
                end = start + len(context.indices) - skipped
                cells = row, slice(start, end)
                made.indices[cells] = context.indices[skipped:]
                made.owned[cells] = context.owned[skipped:]
                made.sequence_ids[cells] = context.sequence
                made.segment_ids[cells] = segment
                made.offsets[cells] = context.offset + np.arange(skipped, len(context.indices))
                start = end
        return made


def _joined(parts: Sequence[NDArray[np.generic]], dtype: DTypeLike) -> NDArray[Any]:
    """Return the concatenated parts."""
    return parts[0] if len(parts) == 1 else np.concatenate([np.zeros(0, dtype), *parts])


def _contexts(batch: PackedBatch, share_prefixes: bool) -> Iterator[RowContext]:
    """Yield the contexts of a batch in the order of its rows.

    A context that begins at position s > 0 has the first s tokens of the context before it. Its
    first packed token is the last shared one.
    """
    segments, positions = batch.segment_ids, batch.positions.ravel()
    changes = np.diff(segments, axis=1, prepend=0, append=0) != 0
    firsts = np.flatnonzero((changes[:, :-1] & (segments > 0)).ravel())
    ends = np.flatnonzero((changes[:, 1:] & (segments > 0)).ravel()) + 1
    offsets = positions if batch.offsets is None else batch.offsets.ravel()
    before = np.zeros(0, np.int64)
    for first, end in zip(firsts.tolist(), ends.tolist(), strict=True):
        skipped = int(positions[first])
        shared = skipped + 1 if skipped else 0
        owned = np.arange(first + (skipped > 0), end)
        indices = np.concatenate([before[:shared], owned]) if shared else owned
        key = _key(batch, indices, shared) if share_prefixes else None
        sequence, offset = int(batch.sequence_ids.flat[first]), int(offsets[first]) - skipped
        yield RowContext(sequence, offset, indices, shared, key)
        before = indices


def _key(batch: PackedBatch, indices: NDArray[np.int64], shared: int) -> PrefixKey:
    """Return the key that decides which prefix a context of the batch can share."""
    experts = batch.expert_ids
    trained = (batch.mask | batch.supervised).ravel()[indices]
    trained[:shared] = False
    return prefix_key(
        batch.token_ids.ravel()[indices],
        trained,
        int(batch.group_ids.flat[indices[-1]]),
        None if experts is None else experts.reshape(-1, *experts.shape[2:])[indices],
    )


def moved(values: Any, to: RowSelection, fill: object = 0, *, of_context: bool = False) -> Any:
    """Return the values [rows, length, ...] in other rows.

    `fill` in padding and, unless of_context, for tokens that another context owns.
    """
    if isinstance(values, SparseBits):
        return replace(values, index=moved(values.index, to, NO_MASK, of_context=of_context))
    taken = values.reshape(-1, *values.shape[2:])[to.indices]
    taken[to.indices < 0 if of_context else ~to.owned] = fill
    return taken


def repacked(batch: PackedBatch, to: RowSelection) -> PackedBatch:
    """Return the batch of some of its sequences, which keep sequence_ids and group_ids."""
    columns: dict[str, Any] = {
        c.name: moved(getattr(batch, c.name), to, c.fill, of_context=c.of_context)
        for c in COLUMNS.values()
        if c.source is Source.PACK and getattr(batch, c.name) is not None
    }
    columns |= {"sequence_ids": to.sequence_ids, "segment_ids": to.segment_ids}
    if batch.offsets is not None:
        columns["offsets"] = to.offsets
    return PackedBatch(**columns)
