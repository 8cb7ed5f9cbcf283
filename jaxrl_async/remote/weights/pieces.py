"""Who fetches which pieces of which arrays: pure, from the source's shards and the target's.

    trainer, fsdp 2:   rows 0-3 │ rows 4-7          sampler, tensor 2:   columns 0-3, columns 4-7
    pieces of its first shard:  rows 0-3 columns 0-3,  rows 4-7 columns 0-3

Every element that a process needs is in one piece, whatever the number of its devices that hold it.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from jaxrl_async.remote.weights.locations import Holder
from jaxrl_async.weights.boxes import Box, cut, intersection, volume
from jaxrl_async.weights.manifest import Manifest

PIECE_BYTES = 4 << 20
"""Most bytes of a piece: it is checked, resumed and passed on as one; it fits a CPU's cache."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightPiece:
    """A part of one array, fetched in one request."""

    array: int  # number in the manifest
    box: Box  # within the whole array
    num_bytes: int
    holder: int  # which of the trainer's processes has it


def plan_pieces(
    manifest: Manifest,
    holders: Sequence[Holder],
    targets: Iterable[tuple[int, Box]],
    piece_bytes: int = PIECE_BYTES,
) -> tuple[WeightPiece, ...]:
    """Return the pieces of these targets, in the order of the arrays.

    Args:
        manifest: Of all arrays.
        holders: Who has which shards; of a shard that several have, the one with the least to
            send sends it.
        targets: (array, box) of what this process needs; boxes of one array do not overlap.
        piece_bytes: Most bytes of a piece (but at least one element).
    """
    owners: list[dict[Box, list[int]]] = [{} for _ in manifest.entries]
    for number, holder in enumerate(holders):
        for shard in holder.shards:
            owners[shard.array].setdefault(shard.box, []).append(number)
    sends = [0] * len(holders)
    pieces = []
    for array, box in sorted(targets):
        itemsize = np.dtype(manifest.entries[array][2]).itemsize
        for held, numbers in sorted(owners[array].items()):
            part = intersection(box, held)
            if part is None:
                continue
            owner = min(numbers, key=lambda n: sends[n])
            sends[owner] += volume(part) * itemsize
            pieces += [
                WeightPiece(
                    array=array, box=small, num_bytes=volume(small) * itemsize, holder=owner
                )
                for small in cut(part, piece_bytes // itemsize)
            ]
    return tuple(pieces)
