"""Plans the pieces to fetch, from the shards of source and target. Pure.

    trainer, fsdp 2:   rows 0-3 │ rows 4-7          sampler, tensor 2:   columns 0-3, columns 4-7
    pieces of its first shard:  rows 0-3 columns 0-3,  rows 4-7 columns 0-3

Every element that a process needs is in exactly one piece, however many of its devices hold it.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from jaxrl_async.remote.weights.locations import Holder
from jaxrl_async.weights.host_reshard import Box, cut, intersection, volume
from jaxrl_async.weights.manifest import Manifest

PIECE_BYTES = 4 << 20
"""Maximum size of a piece, bytes. A piece is checked, resumed and relayed as a unit, and fits into
a CPU's cache."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightPiece:
    """A part of one array, fetched in one request."""

    array: int  # number in the manifest
    box: Box  # within the whole array
    num_bytes: int
    holder: int  # index of the trainer process that has it


def plan_pieces(
    manifest: Manifest,
    holders: Sequence[Holder],
    targets: Iterable[tuple[int, Box]],
    piece_bytes: int = PIECE_BYTES,
) -> tuple[WeightPiece, ...]:
    """Return the pieces of these targets, in array order.

    Args:
        manifest: Of all arrays.
        holders: The shards of each trainer process. A shard on several holders is sent by the one
            with the least to send.
        targets: (array, box) of all shards that this process needs; boxes of one array do not
            overlap.
        piece_bytes: Maximum bytes of a piece (but at least one element).
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
