"""Transfer weights as files in a folder or mounted bucket that all machines share.

    FOLDER/RUN/p0/NONCE-v7        the shards of the trainer's process 0, as in shared memory
    FOLDER/RUN/p0/NONCE-v7.json   its size, written when the file is complete

For clouds without a network route between the machines, and for samplers that join late. Files are
never renamed, appended to or rewritten, as object stores require. An incomplete or missing file is
detected by its index, its size and the arrays' checksums.
"""

import contextlib
import json
import logging
import os
import re
import secrets
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from jaxrl_async.errors import WeightsError
from jaxrl_async.remote.weights.assembly import Assembly, Part
from jaxrl_async.remote.weights.locations import Holder
from jaxrl_async.remote.weights.pieces import WeightPiece
from jaxrl_async.remote.weights.shared_memory import shard_offsets, shards_in_file
from jaxrl_async.weights.host_reshard import Box, contains, inside, raw_dtype
from jaxrl_async.weights.manifest import Manifest

log = logging.getLogger(__name__)

KEEP_S = 60.0
"""Time for which files of a withdrawn version are kept for samplers that still read them,
seconds."""
APPEAR_S = 10.0
"""Maximum wait for an offered file, seconds: it may appear late on a mount."""
POLL_S = 0.2


class FolderFiles:
    """The trainer's side: one process's files."""

    def __init__(self, folder: str, run: str, process: int) -> None:
        """Delete files of earlier processes of the run. Raises WeightsError if the folder is not
        writable."""
        self._root = Path(folder)
        name = re.sub(r"[^A-Za-z0-9._-]+", "-", run).lstrip(".") or "run"
        self._relative = Path(name) / f"p{process}"
        self._nonce = secrets.token_hex(4)
        self._paths: dict[int, Path] = {}
        self._withdrawn: list[tuple[float, Path]] = []
        try:
            own_folder = self._root / self._relative
            own_folder.mkdir(parents=True, exist_ok=True)
            left = [path for path in own_folder.iterdir() if path.is_file()]
            for path in left:
                path.unlink(missing_ok=True)
        except OSError as error:
            raise WeightsError(
                f"remote.folder={folder}: {error}. Set it to a folder that this machine can write "
                "to and every sampler can read."
            ) from None
        if left:
            log.warning("deleted %d files of earlier starts in %s", len(left), own_folder)

    def write(self, version: int, parts: Sequence[Part]) -> str:
        """Write a version's shards, then its index; return the path relative to the folder. Raises
        WeightsError."""
        self._delete_withdrawn()
        offsets, size = shard_offsets([part.data.nbytes for part in parts])
        name = self._relative / f"{self._nonce}-{secrets.token_hex(4)}-v{version}"
        path = self._root / name
        try:
            with open(path, "xb") as file:
                for part, offset in zip(parts, offsets, strict=True):
                    file.write(bytes(offset - file.tell()))
                    file.write(np.ascontiguousarray(part.data).reshape(-1).view(np.uint8).data)
                file.write(bytes(size - file.tell()))
                file.flush()
                os.fsync(file.fileno())
            index = {"version": version, "size": size}
            _index_of(path).write_text(json.dumps(index) + "\n", encoding="utf-8")
        except OSError as error:
            raise WeightsError(
                f"version {version}: {size / 2**20:.0f} MiB could not be written to "
                f"remote.folder ({path}): {error}"
            ) from None
        self.withdraw(version)
        self._paths[version] = path
        return str(name)

    def withdraw(self, version: int) -> None:
        """Delete a version's files after KEEP_S. Idempotent."""
        path = self._paths.pop(version, None)
        if path is not None:
            self._withdrawn.append((time.monotonic(), path))
        self._delete_withdrawn()

    def close(self) -> None:
        """Delete all files. Idempotent."""
        for path in [*self._paths.values(), *(path for _, path in self._withdrawn)]:
            _delete(path)
        self._paths, self._withdrawn = {}, []

    def _delete_withdrawn(self) -> None:
        now = time.monotonic()
        for since, path in self._withdrawn:
            if now - since >= KEEP_S:
                _delete(path)
        self._withdrawn = [(t, path) for t, path in self._withdrawn if now - t < KEEP_S]


class FolderReader:
    """The sampler's side: reads pieces from the trainer's files."""

    def __init__(self, folder: str) -> None:
        self._root = Path(folder)

    def copy(
        self,
        assembly: Assembly,
        manifest: Manifest,
        holder: Holder,
        pieces: Sequence[WeightPiece],
        stopped: Callable[[], str],
    ) -> int:
        """Read pieces into the assembly; return their bytes.

        Args:
            assembly: Destination of the pieces.
            manifest: Of all arrays.
            holder: The trainer process that has them, and its file.
            pieces: All from shards of this holder.
            stopped: Returns the reason to stop; "": continue.

        Raises WeightsError if the file is missing or incomplete.
        """
        shards, size = shards_in_file(holder, manifest)
        path = self._whole_file(holder.folder, size, stopped)
        num_bytes = 0
        try:
            with open(path, "rb", buffering=0) as file:
                for piece in pieces:
                    if stopped():
                        break
                    box, offset = next(p for p in shards[piece.array] if contains(p[0], piece.box))
                    dtype = raw_dtype(manifest.entries[piece.array][2])
                    data = _read(file.fileno(), offset, box, piece.box, dtype)
                    np.copyto(assembly.view(piece), data)
                    assembly.arrived(piece, assembly.checksum(piece, data))
                    num_bytes += piece.num_bytes
        except OSError as error:
            raise WeightsError(f"{path} cannot be read: {error}") from None
        return num_bytes

    def _whole_file(self, name: str, size: int, stopped: Callable[[], str]) -> Path:
        """Wait until a file is complete; return its path. Raises WeightsError."""
        path = self._root / name
        if Path(name).is_absolute() or ".." in Path(name).parts:
            raise WeightsError(f"{name!r} is not a path below remote.folder")
        deadline = time.monotonic() + APPEAR_S
        while True:
            problem = _problem(path, size)
            if not problem:
                return path
            if stopped() or time.monotonic() > deadline:
                raise WeightsError(
                    f"{path}: {problem}. remote.folder must be the same folder or bucket on the "
                    "trainer's machines and here."
                )
            time.sleep(POLL_S)


def _problem(path: Path, size: int) -> str:
    """Return the problem with a file and its index; "": none."""
    try:
        index = json.loads(_index_of(path).read_text(encoding="utf-8"))
        actual = path.stat().st_size
    except (OSError, ValueError) as error:
        return f"incomplete or missing ({error})"
    if not isinstance(index, dict) or index.get("size") != size or actual != size:
        return f"{actual} bytes instead of {size}"
    return ""


def _read(
    descriptor: int, offset: int, shard: Box, piece: Box, dtype: "np.dtype[np.unsignedinteger]"
) -> np.ndarray:
    """Read a piece of a shard: in one request from its first to its last element."""
    shape = [stop - start for start, stop in shard]
    index = inside(piece, shard)
    bounds = [(s.start, s.stop - 1) for s in index[:-1]]
    first = int(np.ravel_multi_index([n for n, _ in bounds], shape)) if bounds else 0
    last = int(np.ravel_multi_index([n for _, n in bounds], shape)) if bounds else 0
    span = np.empty(last - first + 1, dtype)
    _read_into(descriptor, span, offset + first * dtype.itemsize)
    strides = [dtype.itemsize * int(np.prod(shape[axis + 1 :])) for axis in range(len(shape))]
    lengths = [stop - start for start, stop in piece]
    return np.lib.stride_tricks.as_strided(span, lengths, strides, writeable=False)


def _read_into(descriptor: int, data: np.ndarray, offset: int) -> None:
    left = data.view(np.uint8).data
    while left:
        count = os.preadv(descriptor, [left], offset)
        if not count:
            raise OSError("the file ends too early")
        left, offset = left[count:], offset + count


def _index_of(path: Path) -> Path:
    return path.with_name(path.name + ".json")


def _delete(path: Path) -> None:
    for file in (_index_of(path), path):
        with contextlib.suppress(OSError):
            file.unlink(missing_ok=True)
