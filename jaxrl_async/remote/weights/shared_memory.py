"""Transfer weights through shared memory, for samplers on the trainer's machine.

    page 0: the number of the version in the file, 0 while it is written
    then every shard of this process, each on a page boundary

The files are reused from version to version, so the kernel need not allocate new pages. If a file
is rewritten while its version is being copied, the version number and the checksums reveal it. A
file belongs to the process that holds its lock; files of a killed process are deleted when the next
one starts.
"""

import contextlib
import fcntl
import logging
import mmap
import os
import re
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from jaxrl_async.errors import WeightsError
from jaxrl_async.remote.weights.assembly import Assembly
from jaxrl_async.remote.weights.locations import Holder
from jaxrl_async.remote.weights.pieces import WeightPiece
from jaxrl_async.remote.weights.protocols import BASE
from jaxrl_async.weights.host_reshard import Box, contains, inside, raw_dtype, volume
from jaxrl_async.weights.manifest import Manifest

log = logging.getLogger(__name__)

FOLDER = Path("/dev/shm")
PREFIX = "jaxrl-weights-"
PAGE = mmap.PAGESIZE
COPIERS = 2
"""Number of copying threads."""
BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


def machine_boot_id() -> str:
    """Return an id shared only by processes on this machine since its last boot; "": not available
    on this system."""
    try:
        return BOOT_ID.read_text(encoding="ascii").strip()
    except OSError:
        return ""


def stored_number(version: int) -> int:
    """Return the number of a version for a file's first page; above 0 also for the frozen base."""
    return version + 1 - BASE


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedFile:
    """One mapped file."""

    path: Path
    memory: mmap.mmap
    inode: int

    @property
    def number(self) -> int:
        """number_of the version in the file; 0: none, or it is being written."""
        return int.from_bytes(self.memory[:8], "little")

    def array(self, offset: int, box: Box, dtype: str) -> NDArray[Any]:
        """Return a shard in the file."""
        shape = [stop - start for start, stop in box]
        data = np.frombuffer(self.memory, raw_dtype(dtype), volume(box), offset)
        return data.reshape(shape)


def shard_offsets(sizes: Sequence[int]) -> tuple[list[int], int]:
    """Return the offsets of shards of these sizes in a file, and the file's size, all in bytes."""
    offsets, end = [], PAGE
    for size in sizes:
        offsets.append(end)
        end += -(-size // PAGE) * PAGE
    return offsets, end


def shards_in_file(
    holder: Holder, manifest: Manifest
) -> tuple[dict[int, list[tuple[Box, int]]], int]:
    """Return the offsets of a holder's shards in its file, by array, and the file's size, in
    bytes."""
    dtypes = [np.dtype(manifest.entries[shard.array][2]) for shard in holder.shards]
    sizes = [volume(s.box) * dtype.itemsize for s, dtype in zip(holder.shards, dtypes, strict=True)]
    offsets, size = shard_offsets(sizes)
    shards: dict[int, list[tuple[Box, int]]] = {}
    for shard, offset in zip(holder.shards, offsets, strict=True):
        shards.setdefault(shard.array, []).append((shard.box, offset))
    return shards, size


class SharedFiles:
    """The trainer's side: files are written and offered, and can be reused when withdrawn."""

    def __init__(self, run: str, folder: Path = FOLDER) -> None:
        """Delete the files of killed processes. Raises WeightsError if there is no /dev/shm."""
        if not folder.is_dir():
            raise WeightsError(f"there is no {folder} on this machine: set remote.transfer=tcp")
        self._folder = folder
        self._name = f"{PREFIX}{re.sub(r'[^A-Za-z0-9_-]+', '-', run)[:40]}-{os.getpid()}-{id(self)}"
        self._free: list[SharedFile] = []
        self._used: dict[int, SharedFile] = {}
        self._locks: dict[Path, int] = {}
        self._num_created = 0
        delete_left_over(folder)

    def write(self, version: int, sizes: Sequence[int]) -> tuple[SharedFile, list[int]]:
        """Take a file for shards of these sizes, bytes; return it and their offsets.

        Its version is 0 until `publish`. Raises WeightsError if there is not enough space.
        """
        offsets, size = shard_offsets(sizes)
        fitting = [file for file in self._free if len(file.memory) == size]
        for file in self._free:
            if file not in fitting:
                self._delete(file)
        self._free = fitting
        file = self._free.pop() if self._free else self._create(size)
        file.memory[:8] = bytes(8)
        self._used[version] = file
        return file, offsets

    def publish(self, version: int) -> None:
        """Mark the file as complete."""
        self._used[version].memory[:8] = stored_number(version).to_bytes(8, "little")

    def withdraw(self, version: int) -> None:
        """Free the file of a version for reuse. Idempotent."""
        file = self._used.pop(version, None)
        if file is not None:
            file.memory[:8] = bytes(8)
            self._free.append(file)

    def close(self) -> None:
        """Delete all files. Idempotent."""
        for file in [*self._free, *self._used.values()]:
            self._delete(file)
        self._free, self._used = [], {}

    def _create(self, size: int) -> SharedFile:
        self._num_created += 1
        path = self._folder / f"{self._name}-{self._num_created}"
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            if not path.exists():  # another process deleted it before it was locked
                os.close(descriptor)
                return self._create(size)
            os.posix_fallocate(descriptor, 0, size)
            memory = mmap.mmap(descriptor, size)
        except OSError as error:
            os.close(descriptor)
            path.unlink(missing_ok=True)
            status = os.statvfs(self._folder)
            raise WeightsError(
                f"{self._folder} has {status.f_bavail * status.f_frsize / 2**20:.0f} MiB left, but "
                f"one set of weights takes {size / 2**20:.0f} MiB ({error}). Make it larger (in a "
                "container: --shm-size, or a volume of medium Memory) or set remote.transfer=tcp."
            ) from None
        self._locks[path] = descriptor
        return SharedFile(path=path, memory=memory, inode=os.fstat(descriptor).st_ino)

    def _delete(self, file: SharedFile) -> None:
        file.path.unlink(missing_ok=True)
        os.close(self._locks.pop(file.path))  # the mapping lives as long as its views


def delete_left_over(folder: Path = FOLDER) -> list[Path]:
    """Delete the files of dead processes (their locks are free); return their paths."""
    deleted = []
    for path in sorted(folder.glob(f"{PREFIX}*")):
        with contextlib.suppress(OSError):  # another user's, or just deleted
            descriptor = os.open(path, os.O_RDWR)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                path.unlink()
                deleted.append(path)
            finally:
                os.close(descriptor)
    if deleted:
        log.warning("deleted %d files of killed processes in %s", len(deleted), folder)
    return deleted


class SharedReader:
    """The sampler's side: copies pieces from the trainer's files. Used by one thread."""

    def __init__(self) -> None:
        self._mapped: dict[str, SharedFile] = {}

    def copy(
        self,
        assembly: Assembly,
        version: int,
        manifest: Manifest,
        holder: Holder,
        pieces: Sequence[WeightPiece],
        stopped: Callable[[], str],
    ) -> int:
        """Copy pieces into the assembly; return their bytes.

        Args:
            assembly: Destination of the pieces.
            version: Of the weights.
            manifest: Of all arrays.
            holder: The trainer process that has them, and its file.
            pieces: All from shards of this holder.
            stopped: Returns the reason to stop; "": continue.

        Raises WeightsError if the file is missing, or no longer has this version.
        """
        shards, size = shards_in_file(holder, manifest)
        file = self._file(holder.shared, size)
        if file.number != stored_number(version):
            raise WeightsError(f"{holder.shared} no longer has version {version}")
        copied: list[tuple[WeightPiece, int]] = []
        lock = threading.Lock()
        left = iter(pieces)

        def work() -> None:
            while not stopped():
                with lock:
                    piece = next(left, None)
                if piece is None:
                    return
                box, offset = next(p for p in shards[piece.array] if contains(p[0], piece.box))
                data = file.array(offset, box, manifest.entries[piece.array][2])
                view = assembly.view(piece)
                np.copyto(view, data[inside(piece.box, box)])
                checksum = assembly.checksum(piece, view)
                with lock:
                    copied.append((piece, checksum))

        with ThreadPoolExecutor(COPIERS) as pool:
            for future in [pool.submit(work) for _ in range(COPIERS)]:
                future.result()
        if file.number != stored_number(version):
            raise WeightsError(f"{holder.shared}: version {version} was withdrawn in the meantime")
        for piece, checksum in copied:
            assembly.arrived(piece, checksum)
        return sum(piece.num_bytes for piece, _ in copied)

    def close(self) -> None:
        """Release all files."""
        self._mapped = {}

    def _file(self, path: str, size: int) -> SharedFile:
        """Map a file, or return its mapping. Raises WeightsError."""
        if Path(path).parent != FOLDER or not Path(path).name.startswith(PREFIX):
            raise WeightsError(f"{path} is not a weights file in {FOLDER}")
        try:
            descriptor = os.open(path, os.O_RDONLY)
        except OSError as error:
            self._mapped.pop(path, None)
            raise WeightsError(f"{path} cannot be read: {error}") from None
        try:
            status = os.fstat(descriptor)
            if status.st_size != size:
                raise WeightsError(f"{path} has {status.st_size} bytes instead of {size}")
            known = self._mapped.get(path)
            if known is None or known.inode != status.st_ino:
                self._mapped = {p: f for p, f in self._mapped.items() if Path(p).exists()}
                memory = mmap.mmap(descriptor, size, prot=mmap.PROT_READ)
                self._mapped[path] = SharedFile(path=Path(path), memory=memory, inode=status.st_ino)
            return self._mapped[path]
        finally:
            os.close(descriptor)
