"""Pack token sequences into fixed rows, and split rows into micro-batches: NumPy, pure,
deterministic.

sequences  AAAAA BBB CCCC DD        rows of 8   AAAAABBB
                                                CCCCDD..      '.' is padding, segment 0

A sequence of several contexts (types.Episode.starts) is packed context by context: each is a
segment with positions from 0, in any row with room. Contexts of a group may share their prefix
(prefix_plan): then a segment's positions begin after the shared tokens.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from jaxrl_async.algorithms.columns import COLUMNS, Source
from jaxrl_async.data.images import ImageStore
from jaxrl_async.errors import DataError
from jaxrl_async.trainer.learning_settings import MicroSizes
from jaxrl_async.trainer.prefix_plan import PackedContext, PrefixKey, plan_rows, prefix_key
from jaxrl_async.trainer.token_columns import (
    NO_MASK,
    NO_SAMPLER_COLUMNS,
    SamplerColumns,
    SparseBits,
    sequence_experts,
    sequence_masks,
)
from jaxrl_async.types import (
    NOT_DRAWN,
    BoolArray,
    EpisodeGroup,
    FloatArray,
    IntArray,
    KeptTokens,
    PackedBatch,
)

Pair = tuple[IntArray, BoolArray]  # token_ids [length], mask [length] of trained tokens

PACKED = [c for c in COLUMNS.values() if c.source is Source.PACK]
"""The columns of PackedBatch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainSequence:
    """One sequence to train on. The first token of each of its contexts is never trained, since
    nothing predicts it."""

    token_ids: IntArray  # [length] int32
    mask: BoolArray  # [length] True where the token is trained
    behavior_logprobs: FloatArray  # [length] float32
    versions: IntArray  # [length] int32
    advantages: FloatArray  # [length] float32
    group: int | None = None  # index of its group in the step; None: a separate group
    supervised: bool = False  # a demonstration: its mask is trained by likelihood
    sampled: BoolArray | None = None  # [length] the tokens with masks in `kept`; None: the mask
    kept: KeptTokens | None = None  # sampling masks
    expert_ids: IntArray | None = None  # [length, layers, k] as in Episode
    starts: tuple[int, ...] = (0,)  # first index of each context, as in Episode

    @property
    def contexts(self) -> list[slice]:
        """The tokens of each context."""
        ends = (*self.starts[1:], len(self.token_ids))
        return [slice(start, end) for start, end in zip(self.starts, ends, strict=True)]


def pack(
    sequences: Sequence[TrainSequence],
    row_length: int,
    sampler_columns: SamplerColumns = NO_SAMPLER_COLUMNS,
    *,
    share_prefixes: bool = False,
) -> PackedBatch:
    """Place whole contexts in as few rows as first-fit-decreasing finds; deterministic.

    sequence_ids are indices into `sequences`; so are group_ids if a sequence names no group. Raise
    DataError if a context is longer than a row or trains its first token, or if a sequence's
    sampling masks or expert ids do not fit.

    Args:
        sequences: in any order.
        row_length: tokens in a row.
        sampler_columns: the sampler's choices to pack.
        share_prefixes: pack a common prefix of a group's contexts once for several of them.
    """
    lengths: list[int] = []
    for index, sequence in enumerate(sequences):
        lengths += _checked_lengths(index, sequence, row_length)
    keys = _keys(sequences, sampler_columns) if share_prefixes else None
    rows = plan_rows(lengths, row_length, keys)
    layout = _layout(sampler_columns)
    if len(lengths) > len(sequences):
        layout["offsets"] = (), np.int32
    batch = _empty(len(rows), row_length, layout)
    if lengths:
        packing = _packing(rows, lengths, row_length)
        for name, values in (_columns(sequences) | packing.columns).items():
            column = getattr(batch, name)
            if column is not None:
                column.reshape(-1)[packing.cells] = (
                    values if name in packing.columns else values[packing.tokens]
                )
    masks = _masks_of(sequences, sampler_columns)
    if lengths:
        _write_choices(batch, sequences, sampler_columns, packing, masks)
    if sampler_columns.mask_vocab is None:
        return batch
    kept = SparseBits(KeptTokens.joined(masks), batch.kept, sampler_columns.mask_vocab)
    return replace(batch, kept=kept)


def pack_groups(
    groups: Sequence[EpisodeGroup],
    advantages: Sequence[Sequence[FloatArray]] | None,
    row_length: int,
    masks: Sequence[Sequence[BoolArray]] | None = None,
    pairs: Sequence[Pair] = (),
    sampler_columns: SamplerColumns = NO_SAMPLER_COLUMNS,
    *,
    share_prefixes: bool = False,
) -> PackedBatch:
    """Pack every episode of every group, in order. Raise DataError as `pack` does.

    Args:
        groups: the episodes.
        advantages: an array [length] per group and episode. None: 0 everywhere.
        row_length: tokens in a row.
        masks: the trained tokens, an array [length] per group and episode. None: all tokens that
            the policy sampled.
        pairs: demonstrations, packed after the episodes.
        sampler_columns: as in `pack`.
        share_prefixes: as in `pack`.
    """
    masks = masks if masks is not None else [[e.drawn for e in g.episodes] for g in groups]
    if advantages is None:
        advantages = [[np.zeros(len(m), np.float32) for m in of_group] for of_group in masks]
    sequences = [
        TrainSequence(
            token_ids=episode.token_ids,
            mask=mask,
            behavior_logprobs=episode.logprobs,
            versions=episode.versions,
            advantages=values,
            group=number,
            sampled=episode.drawn,
            kept=episode.kept,
            expert_ids=episode.expert_ids,
            starts=episode.starts,
        )
        for number, (group, *of_group) in enumerate(zip(groups, advantages, masks, strict=True))
        for episode, values, mask in zip(group.episodes, *of_group, strict=True)
    ]
    alone = [replace(_of_pair(p), group=len(groups) + i) for i, p in enumerate(pairs)]
    sequences += [replace(s, supervised=True) for s in alone]
    return pack(sequences, row_length, sampler_columns, share_prefixes=share_prefixes)


def pack_pairs(
    pairs: Sequence[Pair], row_length: int, images: ImageStore | None = None
) -> PackedBatch:
    """Pack (token_ids, mask) pairs for supervised training: no policy sampled them.

    images: referenced by token ids; None: no images.
    """
    return pack([_of_pair(pair) for pair in pairs], row_length, SamplerColumns(images=images))


def _of_pair(pair: Pair) -> TrainSequence:
    """Return a demonstration as a sequence that no policy sampled."""
    token_ids, mask = pair
    return TrainSequence(
        token_ids=token_ids,
        mask=mask,
        behavior_logprobs=np.zeros(len(token_ids), np.float32),
        versions=np.full(len(token_ids), NOT_DRAWN, np.int32),
        advantages=np.zeros(len(token_ids), np.float32),
        sampled=np.zeros(len(token_ids), np.bool_),
    )


def fits(group: EpisodeGroup, row_length: int) -> bool:
    """Return whether every context of every episode of the group fits a row."""
    return all(max(np.diff([*e.starts, len(e.token_ids)])) <= row_length for e in group.episodes)


def micro_batches(batch: PackedBatch, sizes: MicroSizes) -> list[PackedBatch]:
    """Split into batches of these sizes, the last one padded; at least one."""
    columns = {
        c.name: split(getattr(batch, c.name), sizes, c.fill)
        for c in PACKED
        if getattr(batch, c.name) is not None
    }
    return [
        PackedBatch(**dict(zip(columns, parts, strict=True)))
        for parts in zip(*columns.values(), strict=True)
    ]


def split(array: Any, sizes: MicroSizes, fill: Any) -> list[Any]:
    """Return parts of these sizes along axis 0, the last one padded with `fill`; at least one."""
    cover = sizes.cover(len(array))
    missing = sum(cover) - len(array)
    if isinstance(array, SparseBits):
        return [replace(array, index=part) for part in split(array.index, sizes, NO_MASK)]
    padding = np.full((missing, *array.shape[1:]), fill, array.dtype)
    *whole, last = np.split(array, np.cumsum(cover)[:-1])
    return [*whole, np.concatenate([last, padding])]


def _checked_lengths(index: int, sequence: TrainSequence, row_length: int) -> list[int]:
    """Return the lengths of a sequence's contexts. Raise DataError if one does not fit a row or
    trains its first token."""
    bounds, length = [*sequence.starts, len(sequence.token_ids)], len(sequence.token_ids)
    lengths = [end - start for start, end in pairwise(bounds)]
    if bounds[0] != 0 or (length and min(lengths) < 1):
        raise DataError(
            f"sequence {index} of the step, of {length} tokens, has contexts that start at "
            f"{sequence.starts}. They must begin at 0 and ascend, each with at least one token."
        )
    if max(lengths) > row_length:
        raise DataError(
            f"sequence {index} of the step has {max(lengths)} tokens, more than a row of "
            f"{row_length}. Raise trainer.row_length, or leave such sequences out."
        )
    if length and any(sequence.mask[start] for start in sequence.starts):
        raise DataError(
            f"sequence {index} of the step trains the first token of a context, which nothing "
            "predicts. Start every context with at least one prompt token."
        )
    return lengths


class _Packing(NamedTuple):
    """The positions in the rows of the concatenated sequences' tokens; [packed] each, by token."""

    tokens: NDArray[np.int64]  # index among all tokens
    cells: NDArray[np.int64]  # flat index in the rows
    columns: dict[str, NDArray[np.int64]]  # positions, segment_ids


def _keys(sequences: Sequence[TrainSequence], columns: SamplerColumns) -> list[PrefixKey]:
    """Return the keys that decide which prefix each context can share."""
    keys = []
    for index, s in enumerate(sequences):
        group = -1 - index if s.group is None else s.group
        for part in s.contexts:
            experts = None
            if columns.routing is not None:
                experts = sequence_experts(s.expert_ids, len(s.token_ids), columns.routing)[part]
            keys.append(prefix_key(s.token_ids[part], s.mask[part], group, experts))
    return keys


def _packing(
    rows: Sequence[Sequence[PackedContext]], lengths: Sequence[int], row_length: int
) -> _Packing:
    """Return the positions of all contexts' tokens, given each row's contexts and their lengths."""
    starts, segments, skips = [0] * len(lengths), [0] * len(lengths), [0] * len(lengths)
    for row, members in enumerate(rows):
        start = row * row_length
        for segment, (context, skipped) in enumerate(members, 1):
            starts[context], segments[context], skips[context] = start, segment, skipped
            start += lengths[context] - skipped
    whole = np.array(lengths)
    counts = whole - np.array(skips)
    within = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
    return _Packing(
        tokens=np.repeat(np.cumsum(whole) - counts, counts) + within,
        cells=np.repeat(starts, counts) + within,
        columns={
            "positions": np.repeat(skips, counts) + within,
            "segment_ids": np.repeat(segments, counts),
        },
    )


def _columns(sequences: Sequence[TrainSequence]) -> dict[str, NDArray[Any]]:
    """Return the columns of the concatenated sequences, without positions and segments.

    Log-probs, versions and advantages of tokens outside the mask are cleared.
    """
    lengths = [len(s.token_ids) for s in sequences]
    ends = np.cumsum(lengths)
    groups = [i if s.group is None else s.group for i, s in enumerate(sequences)]
    mask = np.concatenate([s.mask for s in sequences])
    supervised = np.repeat([s.supervised for s in sequences], lengths)

    def masked(values: Sequence[NDArray[np.generic]], otherwise: float) -> NDArray[Any]:
        return np.where(mask, np.concatenate(values), otherwise)

    return {
        "token_ids": np.concatenate([s.token_ids for s in sequences]),
        "mask": mask & ~supervised,
        "behavior_logprobs": masked([s.behavior_logprobs for s in sequences], 0.0),
        "versions": masked([s.versions for s in sequences], NOT_DRAWN),
        "advantages": masked([s.advantages for s in sequences], 0.0),
        "sequence_ids": np.repeat(np.arange(len(sequences)), lengths),
        "group_ids": np.repeat(groups, lengths),
        "supervised": mask & supervised,
        "offsets": np.arange(ends[-1]) - np.repeat(ends - lengths, lengths),
    }


def _write_choices(
    batch: PackedBatch,
    sequences: Sequence[TrainSequence],
    wanted: SamplerColumns,
    packing: _Packing,
    masks: Sequence[KeptTokens],
) -> None:
    """Write the sampler's columns, sequence by sequence: a token may have thousands of values."""
    if wanted == NO_SAMPLER_COLUMNS:
        return
    ends = np.cumsum([len(s.token_ids) for s in sequences])
    begins = ends - [len(s.token_ids) for s in sequences]
    bounds = np.searchsorted(packing.tokens, [begins, ends])  # packed tokens ascend
    before = np.cumsum([0, *(m.num_tokens for m in masks)]).tolist()
    for index, (sequence, begin, first, last) in enumerate(
        zip(sequences, begins, *bounds, strict=True)
    ):
        own, cells = packing.tokens[first:last] - begin, packing.cells[first:last]
        at = before[index] if masks else 0
        for name, values in _sampler_columns(sequence, wanted, at).items():
            column = getattr(batch, name)
            column.reshape(-1, *column.shape[2:])[cells] = values[own]


def _masks_of(sequences: Sequence[TrainSequence], wanted: SamplerColumns) -> list[KeptTokens]:
    """Return each sequence's masks, if masks are packed. Raise DataError if they do not fit."""
    vocab = wanted.mask_vocab
    if vocab is None:
        return []
    return [sequence_masks(_kept(s, wanted), s.token_ids, _sampled(s), vocab) for s in sequences]


def _kept(sequence: TrainSequence, wanted: SamplerColumns) -> KeptTokens | None:
    if sequence.kept is None and not wanted.masks_all:
        return KeptTokens.whole(int(np.count_nonzero(_sampled(sequence))))
    return sequence.kept


def _sampled(sequence: TrainSequence) -> BoolArray:
    """Return the tokens that have masks."""
    return sequence.mask if sequence.sampled is None else sequence.sampled


def _layout(columns: SamplerColumns) -> dict[str, tuple[tuple[int, ...], Any]]:
    """Return the shape after [rows, length] and the dtype of each of the sampler's columns."""
    layout: dict[str, tuple[tuple[int, ...], Any]] = {}
    if columns.mask_vocab is not None:
        layout["kept"] = (), np.int64  # as SparseBits.index
    if columns.routing is not None:
        routing = columns.routing
        layout["expert_ids"] = (routing.layers, routing.chosen), routing.dtype
    if columns.images is not None:
        layout["image_begins"] = (), np.int32
        layout["embeddings"] = (columns.images.form.width,), np.float32
    return layout


def _sampler_columns(
    sequence: TrainSequence, wanted: SamplerColumns, before: int
) -> dict[str, NDArray[Any]]:
    """Return one sequence's part of the sampler's columns. Raise DataError if it does not fit.

    before: number of masks of the sequences before it.
    """
    columns: dict[str, NDArray[Any]] = {}
    sampled = _sampled(sequence)
    if wanted.mask_vocab is not None:
        columns["kept"] = np.where(sampled, np.cumsum(sampled) - 1 + before, NO_MASK)
    if wanted.routing is not None:
        length = len(sequence.token_ids)
        columns["expert_ids"] = sequence_experts(sequence.expert_ids, length, wanted.routing)
    if wanted.images is not None:
        columns["token_ids"] = wanted.images.plain(sequence.token_ids)
        columns["image_begins"] = wanted.images.begins(sequence.token_ids)
        columns["embeddings"] = wanted.images.embeddings(sequence.token_ids)
    return columns


def _empty(
    rows: int, length: int, layout: dict[str, tuple[tuple[int, ...], object]]
) -> PackedBatch:
    """Return a batch of padding."""
    shapes = {c.name: ((), c.dtype) for c in PACKED if not c.optional} | layout
    return PackedBatch(
        **{
            name: np.full(
                (rows, length, *per_token),
                NO_MASK if name == "kept" else COLUMNS[name].fill,
                dtype,
            )
            for name, (per_token, dtype) in shapes.items()
        }
    )
