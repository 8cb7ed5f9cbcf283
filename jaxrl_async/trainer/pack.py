"""Token sequences into fixed rows and back out in micro-batches: NumPy, pure, deterministic.

sequences  AAAAA BBB CCCC DD        rows of 8   AAAAABBB
                                                CCCCDD..      '.' is padding, segment 0
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from jaxrl_async.algorithms.columns import COLUMNS, Source
from jaxrl_async.errors import DataError
from jaxrl_async.trainer.token_columns import Routing, sequence_bits, sequence_experts
from jaxrl_async.types import (
    NOT_DRAWN,
    BoolArray,
    EpisodeGroup,
    FloatArray,
    IntArray,
    KeptTokens,
    PackedBatch,
)

Pair = tuple[IntArray, BoolArray]  # token_ids [length], mask [length] of what is learnt

PACKED = [c for c in COLUMNS.values() if c.source is Source.PACK]
"""The columns of PackedBatch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainSequence:
    """One sequence to learn from; the first token is never masked, since nothing predicts it."""

    token_ids: IntArray  # [length] int32
    mask: BoolArray  # [length] True where the token is to be learnt
    behavior_logprobs: FloatArray  # [length] float32
    versions: IntArray  # [length] int32
    advantages: FloatArray  # [length] float32
    group: int | None = None  # place of its group in the step; None: a group of its own
    supervised: bool = False  # a worked answer beside the policy's own: mask says which tokens
    drawn: BoolArray | None = None  # [length] what `kept` speaks of; None: the mask
    kept: KeptTokens | None = None  # of the drawn tokens
    expert_ids: IntArray | None = None  # [length, layers, k] as in Episode


def pack(
    sequences: Sequence[TrainSequence],
    row_length: int,
    mask_vocab: int | None = None,
    routing: Routing | None = None,
) -> PackedBatch:
    """Place whole sequences in as few rows as first-fit-decreasing finds; deterministic.

    sequence_ids are places in `sequences`; so are group_ids where a sequence names no group.
    mask_vocab: size of the vocabulary where sampling masks are to be packed; None: they are not.
    routing: what expert ids look like where they are to be packed; None: they are not. Raises
    DataError where a sequence is longer than a row or learns its first token, and where its masks
    or expert ids do not fit.
    """
    for index, sequence in enumerate(sequences):
        _check(index, sequence, row_length)
    rows = _first_fit_decreasing([len(s.token_ids) for s in sequences], row_length)
    layout = _layout(mask_vocab, routing)
    batch = _empty(len(rows), row_length, layout)
    for row, members in enumerate(rows):
        start = 0
        for segment, index in enumerate(members, 1):
            sequence = sequences[index]
            end = start + len(sequence.token_ids)
            columns = _columns(sequence, index, segment)
            columns |= _optional_columns(sequence, mask_vocab, routing)
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
    mask_vocab: int | None = None,
    routing: Routing | None = None,
) -> PackedBatch:
    """Pack every episode of every group, in order; advantages: per group and episode `[length]`.

    advantages: None leaves them 0, for `with_advantages`. masks: per group and episode `[length]`,
    what is to be learnt; None: all that was drawn. pairs: worked answers after the episodes.
    mask_vocab, routing: as in `pack`.
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
    return pack(sequences, row_length, mask_vocab, routing)


def pack_pairs(pairs: Sequence[Pair], row_length: int) -> PackedBatch:
    """Pack (token_ids, mask) pairs for supervised training alone: no policy drew them."""
    return pack([_of_pair(pair) for pair in pairs], row_length)


def _of_pair(pair: Pair) -> TrainSequence:
    token_ids, mask = pair
    return TrainSequence(
        token_ids=token_ids,
        mask=mask,
        behavior_logprobs=np.zeros(len(token_ids), np.float32),
        versions=np.full(len(token_ids), NOT_DRAWN, np.int32),
        advantages=np.zeros(len(token_ids), np.float32),
        drawn=np.zeros(len(token_ids), np.bool_),
    )


def unpacked(batch: PackedBatch, values: NDArray[Any]) -> list[NDArray[Any]]:
    """[rows, length] of a batch back to its sequences, in their order: [length] each."""
    at = _places(batch)
    counts = np.bincount(batch.sequence_ids.ravel()[at])
    return np.split(values.ravel()[at], np.cumsum(counts)[:-1])


def with_advantages(batch: PackedBatch, advantages: Sequence[Sequence[FloatArray]]) -> PackedBatch:
    """The same batch with other advantages: per group and episode `[length]`, in pack's order."""
    flat = np.concatenate([a for of_group in advantages for a in of_group])
    values = np.zeros(batch.mask.shape, np.float32)
    values.ravel()[_places(batch)[: len(flat)]] = flat
    return replace(batch, advantages=np.where(batch.mask, values, np.float32(0)))


def _places(batch: PackedBatch) -> NDArray[np.int64]:
    """Flat indices of real tokens, sequence by sequence."""
    ids = batch.sequence_ids.ravel()
    return np.argsort(ids, kind="stable")[np.count_nonzero(ids < 0) :]


def deal(batch: PackedBatch, parts: int, seed: Sequence[int]) -> list[NDArray[np.int64]]:
    """The sequences to learn from in `parts` random parts, as many in each, or one more.

    A part takes one of the `parts` longest answers, one of the next, and so on: tokens balance, and
    a sequence is as likely in one part as in another, whatever its length. (verl deals equal
    numbers in the step's order, TRL after a shuffle.) Worked answers are dealt alike, apart. Fewer
    parts where there are fewer sequences; one that learns nothing is in none, unless all do.

    seed: numbers that key the shuffle. Gives sequence_ids, sorted.
    """
    num_sequences = int(batch.sequence_ids.max(initial=-1)) + 1
    own, worked = (
        np.bincount(batch.sequence_ids[mask], minlength=num_sequences)
        for mask in (batch.mask, batch.supervised)
    )
    kinds = [lengths for lengths in (own, worked) if lengths.any()]
    if not kinds:
        return [np.arange(num_sequences)]
    parts = min(parts, int(np.count_nonzero(kinds[0])))
    rng = np.random.default_rng(list(seed))
    dealt = [_dealt(lengths, parts, rng) for lengths in kinds]
    return [np.sort(np.concatenate(of_part)) for of_part in zip(*dealt, strict=True)]


def _dealt(
    lengths: NDArray[np.int64], parts: int, rng: np.random.Generator
) -> list[NDArray[np.int64]]:
    """Places of lengths above 0. What cannot be dealt evenly is drawn by lot, so that no length is
    in the larger parts more often."""
    there = rng.permutation(np.flatnonzero(lengths))
    left, even = np.split(there, [len(there) % parts])
    even = even[np.argsort(-lengths[even], kind="stable")]
    dealt = list(rng.permuted(even.reshape(-1, parts), axis=1).T)
    for part, place in zip(rng.permutation(parts), left, strict=False):
        dealt[part] = np.append(dealt[part], place)
    return dealt


def places_of(batch: PackedBatch, sequences: NDArray[np.int64]) -> NDArray[np.int64]:
    """Where the tokens of some sequences of a batch lie in it, packed into rows of their own.

    Flat places [rows, length]; -1 for padding. `repacked` and `moved` follow them.
    """
    at = _places(batch)
    counts = np.bincount(batch.sequence_ids.ravel()[at])
    own = np.split(at, np.cumsum(counts)[:-1])
    length = batch.token_ids.shape[1]
    rows = _first_fit_decreasing([int(counts[s]) for s in sequences], length)
    places = np.full((len(rows), length), -1, np.int64)
    for row, members in zip(places, rows, strict=True):
        tokens = np.concatenate([own[sequences[m]] for m in members])
        row[: len(tokens)] = tokens
    return places


def moved(values: NDArray[Any], places: NDArray[np.int64], fill: Any = 0) -> NDArray[Any]:
    """[rows, length, ...] of a batch at the places that `places_of` gives; `fill` in padding."""
    found = values.reshape(-1, *values.shape[2:])[places]
    found[places < 0] = fill
    return found


def repacked(batch: PackedBatch, places: NDArray[np.int64]) -> PackedBatch:
    """The batch of some of its sequences alone, which keep their sequence_ids and group_ids."""
    columns: dict[str, Any] = {
        c.name: moved(getattr(batch, c.name), places, c.fill)
        for c in PACKED
        if getattr(batch, c.name) is not None
    }
    starts = (columns["positions"] == 0) & (places >= 0)
    columns["segment_ids"] = np.where(places >= 0, np.cumsum(starts, axis=1, dtype=np.int32), 0)
    return PackedBatch(**columns)


def fits(group: EpisodeGroup, row_length: int) -> bool:
    """Whether every episode of the group fits a row."""
    return all(len(e.token_ids) <= row_length for e in group.episodes)


def micro_batches(batch: PackedBatch, rows: int) -> list[PackedBatch]:
    """Split into batches of exactly `rows` rows, the last filled with empty ones; at least one."""
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
    """Parts of exactly `rows` rows, the last one filled up; at least one."""
    parts = [array[at : at + rows] for at in range(0, max(len(array), 1), rows)]
    missing = rows - len(parts[-1])
    parts[-1] = np.concatenate([parts[-1], np.full((missing, *array.shape[1:]), fill, array.dtype)])
    return parts


def _check(index: int, sequence: TrainSequence, row_length: int) -> None:
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


def _first_fit_decreasing(lengths: Sequence[int], row_length: int) -> list[list[int]]:
    """Indices in each row: longest first, ties by index, each into the first row with room."""
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


def _columns(sequence: TrainSequence, index: int, segment: int) -> dict[str, Any]:
    """One sequence as values of PackedBatch's fields; what is not learnt is cleared."""
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


def _layout(mask_vocab: int | None, routing: Routing | None) -> dict[str, Any]:
    """The optional fields that a batch has: the shape of each token's part, and its number type."""
    layout: dict[str, Any] = {}
    if mask_vocab is not None:
        layout["kept"] = (-(-mask_vocab // 8),), np.uint8
    if routing is not None:
        layout["expert_ids"] = (routing.layers, routing.chosen), routing.dtype
    return layout


def _optional_columns(
    sequence: TrainSequence, mask_vocab: int | None, routing: Routing | None
) -> dict[str, Any]:
    columns: dict[str, Any] = {}
    drawn = sequence.mask if sequence.drawn is None else sequence.drawn
    if mask_vocab is not None:
        columns["kept"] = sequence_bits(sequence.kept, sequence.token_ids, drawn, mask_vocab)
    if routing is not None:
        length = len(sequence.token_ids)
        columns["expert_ids"] = sequence_experts(sequence.expert_ids, length, routing)
    return columns


def _empty(rows: int, length: int, layout: dict[str, Any]) -> PackedBatch:
    shapes = {c.name: ((), c.dtype) for c in PACKED if not c.optional} | layout
    return PackedBatch(
        **{
            name: np.full((rows, length, *per_token), COLUMNS[name].fill, dtype)
            for name, (per_token, dtype) in shapes.items()
        }
    )
