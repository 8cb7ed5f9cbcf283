"""Token sequences into fixed rows, and rows into micro-batches: NumPy, pure, deterministic.

sequences  AAAAA BBB CCCC DD        rows of 8   AAAAABBB
                                                CCCCDD..      '.' is padding, segment 0
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from jaxrl_async.algorithms.columns import COLUMNS, ColumnSource
from jaxrl_async.errors import DataError
from jaxrl_async.trainer.token_columns import (
    NO_SAMPLER_COLUMNS,
    SamplerColumns,
    sequence_bits,
    sequence_experts,
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

Pair = tuple[IntArray, BoolArray]  # token_ids [length], mask [length] of learnt tokens

PACKED = [c for c in COLUMNS.values() if c.source is ColumnSource.PACK]
"""The columns of PackedBatch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainSequence:
    """One sequence to learn from; its first token is never learnt, since nothing predicts it."""

    token_ids: IntArray  # [length] int32
    mask: BoolArray  # [length] True where the token is learnt
    behavior_logprobs: FloatArray  # [length] float32
    versions: IntArray  # [length] int32
    advantages: FloatArray  # [length] float32
    group: int | None = None  # index of its group in the step; None: a group of its own
    supervised: bool = False  # a worked answer: its mask is learnt by likelihood
    drawn: BoolArray | None = None  # [length] tokens that `kept` describes; None: the mask
    kept: KeptTokens | None = None  # of the drawn tokens
    expert_ids: IntArray | None = None  # [length, layers, k] as in Episode


def pack(
    sequences: Sequence[TrainSequence],
    row_length: int,
    sampler_columns: SamplerColumns = NO_SAMPLER_COLUMNS,
) -> PackedBatch:
    """Place whole sequences in as few rows as first-fit-decreasing finds; deterministic.

    sequence_ids are indices into `sequences`; so are group_ids where a sequence names no group.
    Raise DataError where a sequence is longer than a row or learns its first token, and where its
    sampling masks or expert ids do not fit.

    Args:
        sequences: what is packed.
        row_length: tokens in a row.
        sampler_columns: what is packed of the sampler's choices.
    """
    for index, sequence in enumerate(sequences):
        _check(index, sequence, row_length)
    rows = first_fit_decreasing([len(s.token_ids) for s in sequences], row_length)
    batch = _empty(len(rows), row_length, _layout(sampler_columns))
    for row, members in enumerate(rows):
        start = 0
        for segment, index in enumerate(members, 1):
            sequence = sequences[index]
            end = start + len(sequence.token_ids)
            columns = _columns(sequence, index, segment)
            columns |= _sampler_columns(sequence, sampler_columns)
            for name, values in columns.items():
                getattr(batch, name)[row, start:end] = values
            start = end
    return batch


def pack_groups(
    groups: Sequence[EpisodeGroup],
    advantages: Sequence[Sequence[FloatArray]] | None,
    row_length: int,
    masks: Sequence[Sequence[BoolArray]] | None = None,
    pairs: Sequence[Pair] = (),
    sampler_columns: SamplerColumns = NO_SAMPLER_COLUMNS,
) -> PackedBatch:
    """Pack every episode of every group, in order. Raise DataError as `pack` does.

    Args:
        groups: the episodes.
        advantages: an array [length] per group and episode. None: 0 everywhere.
        row_length: tokens in a row.
        masks: the tokens that are learnt, an array [length] per group and episode. None: all that
            the policy drew.
        pairs: worked answers, packed after the episodes.
        sampler_columns: as in `pack`.
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
            group=place,
            drawn=episode.drawn,
            kept=episode.kept,
            expert_ids=episode.expert_ids,
        )
        for place, (group, *of_group) in enumerate(zip(groups, advantages, masks, strict=True))
        for episode, values, mask in zip(group.episodes, *of_group, strict=True)
    ]
    alone = [replace(_of_pair(p), group=len(groups) + i) for i, p in enumerate(pairs)]
    sequences += [replace(s, supervised=True) for s in alone]
    return pack(sequences, row_length, sampler_columns)


def pack_pairs(pairs: Sequence[Pair], row_length: int) -> PackedBatch:
    """Pack (token_ids, mask) pairs for supervised training alone: no policy drew them."""
    return pack([_of_pair(pair) for pair in pairs], row_length)


def _of_pair(pair: Pair) -> TrainSequence:
    """Return a worked answer as a sequence that no policy drew."""
    token_ids, mask = pair
    return TrainSequence(
        token_ids=token_ids,
        mask=mask,
        behavior_logprobs=np.zeros(len(token_ids), np.float32),
        versions=np.full(len(token_ids), NOT_DRAWN, np.int32),
        advantages=np.zeros(len(token_ids), np.float32),
        drawn=np.zeros(len(token_ids), np.bool_),
    )


def first_fit_decreasing(lengths: Sequence[int], row_length: int) -> list[list[int]]:
    """Return the indices in each row: longest first, each into the first row with room.

    Of two of the same length the first comes first.
    """
    rows: list[list[int]] = []
    room: list[int] = []
    for index in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        length = lengths[index]
        row = next((r for r, free in enumerate(room) if free >= length), len(rows))
        if row == len(rows):
            rows.append([])
            room.append(row_length)
        rows[row].append(index)
        room[row] -= length
    return rows


def fits(group: EpisodeGroup, row_length: int) -> bool:
    """Return whether every episode of the group fits a row."""
    return all(len(e.token_ids) <= row_length for e in group.episodes)


def micro_batches(batch: PackedBatch, rows: int) -> list[PackedBatch]:
    """Split into batches of exactly `rows` rows, the last filled with padding; at least one."""
    columns = {
        c.name: split(getattr(batch, c.name), rows, c.fill)
        for c in PACKED
        if getattr(batch, c.name) is not None
    }
    return [
        PackedBatch(**dict(zip(columns, parts, strict=True)))
        for parts in zip(*columns.values(), strict=True)
    ]


def split(array: NDArray[Any], rows: int, fill: Any) -> list[NDArray[Any]]:
    """Return parts of exactly `rows` rows, the last filled up with `fill`; at least one."""
    parts = [array[at : at + rows] for at in range(0, max(len(array), 1), rows)]
    missing = rows - len(parts[-1])
    parts[-1] = np.concatenate([parts[-1], np.full((missing, *array.shape[1:]), fill, array.dtype)])
    return parts


def _check(index: int, sequence: TrainSequence, row_length: int) -> None:
    """Raise DataError where a sequence does not fit a row or learns its first token."""
    length = len(sequence.token_ids)
    if length > row_length:
        raise DataError(
            f"sequence {index} of the step has {length} tokens, more than a row of {row_length}. "
            "Raise trainer.row_length, or leave such sequences out."
        )
    if length and sequence.mask[0]:
        raise DataError(
            f"sequence {index} of the step learns its first token, which nothing predicts. "
            "Start every sequence with at least one prompt token."
        )


def _columns(sequence: TrainSequence, index: int, segment: int) -> dict[str, Any]:
    """Return one sequence's part of the other columns; what is not learnt is cleared."""
    mask = sequence.mask
    return {
        "token_ids": sequence.token_ids,
        "positions": np.arange(len(mask)),
        "segment_ids": segment,
        "mask": mask & (not sequence.supervised),
        "behavior_logprobs": np.where(mask, sequence.behavior_logprobs, 0.0),
        "versions": np.where(mask, sequence.versions, NOT_DRAWN),
        "advantages": np.where(mask, sequence.advantages, 0.0),
        "sequence_ids": index,
        "group_ids": index if sequence.group is None else sequence.group,
        "supervised": mask & sequence.supervised,
    }


def _layout(columns: SamplerColumns) -> dict[str, tuple[tuple[int, ...], Any]]:
    """Return the shape behind [rows, length] and the dtype of each of the sampler's columns."""
    layout: dict[str, tuple[tuple[int, ...], Any]] = {}
    if columns.mask_vocab is not None:
        layout["kept"] = (-(-columns.mask_vocab // 8),), np.uint8
    if columns.routing is not None:
        routing = columns.routing
        layout["expert_ids"] = (routing.layers, routing.chosen), routing.dtype
    return layout


def _sampler_columns(sequence: TrainSequence, wanted: SamplerColumns) -> dict[str, Any]:
    """Return one sequence's part of the sampler's columns. Raise DataError if it does not fit."""
    columns: dict[str, Any] = {}
    drawn = sequence.mask if sequence.drawn is None else sequence.drawn
    if wanted.mask_vocab is not None:
        columns["kept"] = sequence_bits(sequence.kept, sequence.token_ids, drawn, wanted.mask_vocab)
    if wanted.routing is not None:
        length = len(sequence.token_ids)
        columns["expert_ids"] = sequence_experts(sequence.expert_ids, length, wanted.routing)
    return columns


def _empty(rows: int, length: int, layout: dict[str, tuple[tuple[int, ...], Any]]) -> PackedBatch:
    """Return a batch of padding."""
    shapes = {c.name: ((), c.dtype) for c in PACKED if not c.optional} | layout
    return PackedBatch(
        **{
            name: np.full((rows, length, *per_token), COLUMNS[name].fill, dtype)
            for name, (per_token, dtype) in shapes.items()
        }
    )
