"""Pack preference pairs into fixed rows; every micro-batch holds whole pairs: NumPy, pure.

pairs a: AAAA aa, b: BBB bbb     rows of 8, 1 a micro-batch   AAAAaa..  BBBbbb..
                                 rows of 4, 2 a micro-batch   AAAA      BBB.
                                                              aa..      bbb.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields

import numpy as np
from numpy.typing import NDArray

from jaxrl_async.data.preferences import PreferencePair
from jaxrl_async.errors import DataError
from jaxrl_async.types import BoolArray, IntArray


@dataclass(frozen=True, slots=True, kw_only=True)
class PreferenceBatch:
    """Packed prompts with their answers; the prompt is repeated for each of its answers.

    `mask[t]` is True for tokens of answers. A pair's slot is its index in its micro-batch, which
    gives sums over answers the same shape in all micro-batches.
    """

    token_ids: IntArray  # [rows, length] int32
    positions: IntArray  # [rows, length] int32, from 0 in each segment
    segment_ids: IntArray  # [rows, length] int32, from 1 in each row; 0 is padding
    mask: BoolArray  # [rows, length]
    pair_ids: IntArray  # [rows, length] int32, index of the pair in the step; -1 is padding
    slots: IntArray  # [rows, length] int32, from 0 in each micro-batch; -1 is padding
    is_chosen: BoolArray  # [rows, length] True where the segment's answer is the chosen one
    num_pairs: int
    num_answers: int  # two for each pair, less the missing ones

    @property
    def num_tokens(self) -> int:
        """The trained tokens."""
        return int(self.mask.sum())


COLUMNS = tuple(f.name for f in fields(PreferenceBatch) if not f.name.startswith("num_"))


@dataclass(slots=True)
class _MicroBatch:
    """Rows that are being filled with pairs."""

    room: list[int]  # tokens free in each row
    pairs: list[tuple[int, list[int]]]  # index of the pair, rows of its answers


def pack_preference(pairs: Sequence[PreferencePair], row_length: int, rows: int) -> PreferenceBatch:
    """Pack whole pairs into micro-batches of `rows` rows each; deterministic.

    Longest pair first, into the first micro-batch with room for both of its segments. Raises
    DataError if a pair fits no micro-batch.
    """
    micros: list[_MicroBatch] = []
    for index in sorted(range(len(pairs)), key=lambda i: (-sum(_lengths(pairs[i])), i)):
        _add_pair(micros, index, _lengths(pairs[index]), row_length, rows)
    micros = micros or [_MicroBatch([row_length] * rows, [])]
    columns = _empty(len(micros) * rows, row_length)
    for number, micro in enumerate(micros):
        _fill({k: v[number * rows : (number + 1) * rows] for k, v in columns.items()}, micro, pairs)
    num_answers = sum(len(p.answers) for p in pairs)
    return PreferenceBatch(**columns, num_pairs=len(pairs), num_answers=num_answers)


def max_pairs(row_length: int, rows: int) -> int:
    """Return a bound on the pairs of a micro-batch: an answer and its prompt take two tokens."""
    return rows * row_length // 2


def micro_batches_of(batch: PreferenceBatch, rows: int) -> list[dict[str, NDArray]]:
    """Return the columns `rows` rows at a time; the batch must be packed for that number."""
    assert len(batch.token_ids) % rows == 0, "packed for another number of rows"
    return [
        {name: getattr(batch, name)[at : at + rows] for name in COLUMNS}
        for at in range(0, len(batch.token_ids), rows)
    ]


def _lengths(pair: PreferencePair) -> list[int]:
    """Count the tokens of each segment: the prompt with each answer that exists."""
    return [len(pair.prompt_ids) + len(answer) for answer in pair.answers]


def _add_pair(
    micros: list[_MicroBatch], index: int, lengths: list[int], row_length: int, rows: int
) -> None:
    """Add a pair to the first micro-batch with room, or in a new one. Raises DataError."""
    for micro in micros:
        if (chosen := _rows_for(lengths, micro.room)) is not None:
            break
    else:
        micro = _MicroBatch([row_length] * rows, [])
        chosen = _rows_for(lengths, micro.room)
        if chosen is None:
            raise DataError(
                f"preference pair {index} has segments of {' and '.join(map(str, lengths))} "
                f"tokens, which do not fit {rows} rows of {row_length}. Raise trainer.row_length "
                "or trainer.micro_batch_tokens, or leave such pairs out."
            )
        micros.append(micro)
    micro.pairs.append((index, chosen))
    for length, row in zip(lengths, chosen, strict=True):
        micro.room[row] -= length


def _rows_for(lengths: list[int], room: list[int]) -> list[int] | None:
    """Choose the first row with room for each segment, longest first; None if one does not fit."""
    free, chosen = list(room), [0] * len(lengths)
    for member in sorted(range(len(lengths)), key=lambda m: -lengths[m]):
        row = next((r for r, f in enumerate(free) if f >= lengths[member]), None)
        if row is None:
            return None
        chosen[member] = row
        free[row] -= lengths[member]
    return chosen


def _empty(rows: int, length: int) -> dict[str, NDArray]:
    fills: dict[str, int | bool] = {"pair_ids": -1, "slots": -1, "mask": False, "is_chosen": False}
    return {
        name: np.full(
            (rows, length), fills.get(name, 0), bool if fills.get(name) is False else np.int32
        )
        for name in COLUMNS
    }


def _fill(columns: dict[str, NDArray], micro: _MicroBatch, pairs: Sequence[PreferencePair]) -> None:
    """Write a micro-batch's segments into its rows."""
    starts, segments = [0] * len(micro.room), [0] * len(micro.room)
    for slot, (index, rows) in enumerate(micro.pairs):
        pair = pairs[index]
        flags = [True] * bool(len(pair.chosen_ids)) + [False] * bool(len(pair.rejected_ids))
        for answer, is_chosen, row in zip(pair.answers, flags, rows, strict=True):
            segments[row] += 1
            token_ids = np.concatenate([pair.prompt_ids, answer])
            end = starts[row] + len(token_ids)
            values = {
                "token_ids": token_ids,
                "positions": np.arange(len(token_ids)),
                "segment_ids": segments[row],
                "mask": np.arange(len(token_ids)) >= len(pair.prompt_ids),
                "pair_ids": index,
                "slots": slot,
                "is_chosen": is_chosen,
            }
            for name, value in values.items():
                columns[name][row, starts[row] : end] = value
            starts[row] = end
