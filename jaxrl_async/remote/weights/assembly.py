"""Arrays that are assembled from pieces in host memory, and can be read while pieces arrive.

Writers fill pieces and report them; the piece server reads arrived pieces and relays them. The
trainer's own shards are an assembly in which all pieces have arrived.
"""

import logging
import math
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from jaxrl_async.remote.weights.box_grid import BoxGrid
from jaxrl_async.remote.weights.host_sums import MODULUS, host_sum
from jaxrl_async.remote.weights.pieces import WeightPiece
from jaxrl_async.remote.weights.progress_thread import POLL_S, result_of, run_in_thread
from jaxrl_async.remote.weights.protocols import BASE
from jaxrl_async.weights.host_reshard import (
    Box,
    common,
    contains,
    inside,
    intersection,
    raw_dtype,
    volume,
)
from jaxrl_async.weights.manifest import Manifest

log = logging.getLogger(__name__)

RETRY_S = 1.0
"""Time until a failed host copy is retried, seconds. The peer requests every piece in order, and a
sampler does not fetch again sooner than this (transfers.RETRY_S)."""
MOST_SUMS = 1 << 16
"""Maximum number of cached piece checksums, so peers cannot fill the memory by requesting arbitrary
boxes."""


def on_host(data: object, dtype: str) -> NDArray[Any]:
    """Return a device's array in host memory, as raw_dtype; on a CPU device without a copy."""
    return np.asarray(data).view(raw_dtype(dtype))


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """A shard in host memory."""

    array: int
    box: Box
    data: NDArray[Any]  # of the box's shape; unsigned integers of the weights' size (raw_dtype)


class Assembly:
    """One version's shards in this process. Thread-safe: every element has a single writer until it
    is reported as arrived, and only readers after that."""

    def __init__(self, manifest: Manifest, parts: Sequence[Part]) -> None:
        self._manifest = manifest
        self._parts: list[list[Part]] = [[] for _ in manifest.entries]
        for part in parts:
            self._parts[part.array].append(part)
        self._arrived: list[dict[Box, int]] = [{} for _ in manifest.entries]  # box -> checksum
        self._grids = [BoxGrid(shape, dtype) for _, shape, dtype in manifest.entries]  # arrived
        self._left = [sum(volume(p.box) for p in held) for held in self._parts]  # elements
        self._sums: dict[tuple[int, Box], int] = {}  # of pieces, if complete from the start
        self._complete = False
        self._changed = threading.Condition()
        self._progress_at = time.monotonic()
        self._given_up = False

    @classmethod
    def complete(cls, manifest: Manifest, parts: Sequence[Part]) -> "Assembly":
        """Return an assembly whose shards are all complete."""
        made = cls(manifest, parts)
        made._left = [0] * len(manifest.entries)
        made._complete = True
        return made

    @property
    def targets(self) -> list[tuple[int, Box]]:
        """(array, box) of every shard here."""
        return [(part.array, part.box) for parts in self._parts for part in parts]

    def shape_of(self, array: int) -> tuple[int, ...]:
        """Return a whole array's shape."""
        return self._manifest.entries[array][1]

    def part(self, array: int, box: Box) -> Part:
        """Return the shard that contains a box. Raises KeyError if no shard does."""
        for part in self._parts[array]:
            if contains(part.box, box):
                return part
        raise KeyError((array, box))

    def view(self, piece: WeightPiece) -> NDArray[Any]:
        """Return the memory of a piece."""
        part = self.part(piece.array, piece.box)
        view: NDArray[Any] = part.data[inside(piece.box, part.box)]
        return view

    def checksum(self, piece: WeightPiece, data: NDArray[np.generic]) -> int:
        """Return the checksum of a piece's contents."""
        return host_sum(data, piece.box, self._manifest.entries[piece.array][1])

    def sum_of(self, array: int, box: Box, data: NDArray[np.generic]) -> int:
        """Return the checksum of a piece that was read: as it arrived or, for an assembly that was
        complete from the start, computed on the first request for this box."""
        known = self._sums.get((array, box)) if self._complete else self._arrived[array].get(box)
        if known is not None:
            return known
        checksum = host_sum(data, box, self.shape_of(array))
        if self._complete and len(self._sums) < MOST_SUMS:
            self._sums[array, box] = checksum
        return checksum

    def arrived(self, piece: WeightPiece, checksum: int) -> None:
        """Report that a piece, with this checksum, has arrived."""
        with self._changed:
            if piece.box not in self._arrived[piece.array]:
                self._grids[piece.array].add(piece.box)
                self._left[piece.array] -= volume(piece.box)
            self._arrived[piece.array][piece.box] = checksum
            self._progress_at = time.monotonic()
            self._changed.notify_all()

    def missing(self, pieces: Sequence[WeightPiece]) -> list[WeightPiece]:
        """Return the pieces that have not arrived."""
        with self._changed:
            return [p for p in pieces if p.box not in self._arrived[p.array]]

    def wrong_arrays(self, sums: Sequence[int]) -> list[int]:
        """Return the arrays that are complete here and whose checksums differ from these."""
        wrong = []
        with self._changed:
            for array, (_, shape, _) in enumerate(self._manifest.entries):
                whole = volume(tuple((0, n) for n in shape))
                held = sum(volume(part.box) for part in self._parts[array])
                total = sum(self._arrived[array].values()) % MODULUS
                if held == whole and total != sums[array]:
                    wrong.append(array)
        return wrong

    def forget(self, arrays: Sequence[int]) -> None:
        """Mark corrupted arrays as not arrived."""
        with self._changed:
            for array in arrays:
                self._left[array] += sum(map(volume, self._arrived[array]))
                self._arrived[array].clear()
                self._grids[array].clear()

    def give_up(self) -> None:
        """Tell readers that no more pieces will arrive."""
        with self._changed:
            self._given_up = True
            self._changed.notify_all()

    def resume(self) -> None:
        """Tell readers that pieces will arrive again."""
        with self._changed:
            self._given_up = False
            self._progress_at = time.monotonic()

    def read(
        self, array: int, box: Box, patience_s: float, waiting: Callable[[], None]
    ) -> NDArray[Any] | None:
        """Return a C-contiguous piece once it has arrived; None if it does not arrive.

        Args:
            array: Number in the manifest.
            box: Within the array.
            patience_s: Maximum time without a new piece, seconds.
            waiting: Called every 0.1 s of waiting; its exceptions end the wait.

        Raises ValueError if there is no such box.
        """
        shape = self._manifest.entries[array][1] if array < len(self._manifest.entries) else None
        if shape is None or len(box) != len(shape) or not _is_within(box, shape):
            raise ValueError(f"no such piece: array {array}, {list(box)}")
        if sum(common(part.box, box) for part in self._parts[array]) != volume(box):
            return None
        while True:
            with self._changed:
                if self._is_here(array, box):
                    break
                if self._given_up or time.monotonic() - self._progress_at > patience_s:
                    return None
                self._changed.wait(POLL_S)
            waiting()
        return self._gather(array, box)

    def _is_here(self, array: int, box: Box) -> bool:
        """Return True if all of a box within the local shards has arrived. Needs the lock. Called
        for each relayed piece, so it must not scan all arrived pieces."""
        if box in self._arrived[array] or not self._left[array]:
            return True
        return self._grids[array].covered(box) == volume(box)

    def _gather(self, array: int, box: Box) -> NDArray[Any]:
        parts = [part for part in self._parts[array] if common(part.box, box)]
        if len(parts) == 1:
            return np.ascontiguousarray(parts[0].data[inside(box, parts[0].box)])
        whole = np.empty([b - a for a, b in box], raw_dtype(self._manifest.entries[array][2]))
        for part in parts:
            both = intersection(part.box, box)
            assert both is not None, "parts with nothing in common were left out"
            whole[inside(both, box)] = part.data[inside(both, part.box)]
        return whole


class OnDemand:
    """A version whose host copy is created when a sampler requests a piece of it. The version
    itself is transferred from device to device. Thread-safe."""

    def __init__(self, make: Callable[[], Assembly | None]) -> None:
        """make: copies it to the host; returns None if its arrays have been deleted."""
        self._make, self._lock = make, threading.Lock()
        self._made: Future[Assembly | None] | None = None
        self._retry_s = -math.inf  # no retry of a failed copy before then

    def get(self, waiting: Callable[[], None]) -> Assembly | None:
        """Return the host copy; None: it cannot be created. waiting: see Assembly.read."""
        with self._lock:
            if self._made is None:
                if time.monotonic() < self._retry_s:
                    return None
                self._made = run_in_thread(self._copy, "host copy")
            made = self._made
        return result_of(made, waiting)

    def _copy(self) -> Assembly | None:
        try:
            return self._make()
        except Exception as error:  # arrays deleted in the meantime, or out of memory
            log.warning("weights on devices cannot be copied to the host: %s", error)
            with self._lock:
                self._made, self._retry_s = None, time.monotonic() + RETRY_S
            return None


class Holdings:
    """The versions that this process can serve: complete, arriving or on demand. Thread-safe."""

    def __init__(self) -> None:
        self._assemblies: dict[int, Assembly | OnDemand] = {}
        self._changed = threading.Condition()

    def add(self, version: int, assembly: Assembly | OnDemand) -> None:
        """Start serving a version."""
        with self._changed:
            self._assemblies[version] = assembly
            self._changed.notify_all()

    def remove(self, version: int) -> None:
        """Stop serving a version. Idempotent."""
        with self._changed:
            assembly = self._assemblies.pop(version, None)
        if isinstance(assembly, Assembly):
            assembly.give_up()

    def keep(self, version: int) -> None:
        """Stop serving all versions except this one and the frozen base."""
        for other in [v for v in self.versions if v not in (version, BASE)]:
            self.remove(other)

    @property
    def versions(self) -> tuple[int, ...]:
        """All versions that are served."""
        with self._changed:
            return tuple(self._assemblies)

    def find(self, version: int, patience_s: float, waiting: Callable[[], None]) -> Assembly | None:
        """Return a version; wait for it if it is newer than all versions here. None: not here.

        Args:
            version: Of the weights.
            patience_s: Maximum wait, seconds: the peer may have got the offer slightly earlier.
            waiting: Called every 0.1 s of waiting; its exceptions end the wait.
        """
        deadline = time.monotonic() + patience_s
        while True:
            with self._changed:
                found = self._assemblies.get(version)
                if found is None:
                    newer = any(v > version for v in self._assemblies)
                    if newer or time.monotonic() > deadline:
                        return None
                    self._changed.wait(POLL_S)
            if found is not None:
                return found.get(waiting) if isinstance(found, OnDemand) else found
            waiting()


def _is_within(box: Box, shape: tuple[int, ...]) -> bool:
    return all(0 <= a < b <= n for (a, b), n in zip(box, shape, strict=True))
