"""Checksums of a checkpoint's files, and the rules for trusting a checkpoint.

    written below NAME.unnamed-tmp ──seal──> checksums in it, all synced to disk ──name──> NAME
        ──check_files──> read back ──> older ones may be removed

A checkpoint gets its name in one step (rename), after its checksums are synced to disk. One without
checksums is therefore a damaged copy, or was made by version 0.3.0 or earlier, which added them
after the name.
"""

import errno
import functools
import hashlib
import json
import logging
import os
import re
import shutil
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

from jaxrl_async.run.folder import free_name, is_inside

CHECKSUMS = "checksums.json"
"""Digests of a checkpoint's files, by path."""
UNNAMED, REPLACED = ".unnamed-tmp", ".replaced-tmp"
"""Suffixes of a checkpoint that is being written, and of one that is being replaced."""
UNREADABLE = ".unreadable"
"""Suffix of checkpoints that a resumed run has skipped."""
SWEEPS, CLEAN_LOOKS, SWEEP_S = 50, 4, 0.05
"""Maximum number of sweeps of a failed save, clean checks in a row to stop, seconds between two."""
NO_SYNC = (errno.EINVAL, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EBADF, errno.EROFS)
"""Errors of file systems that cannot sync a folder or a file."""
HASHED_AT_ONCE, BLOCK = 8, 4 << 20
"""Maximum number of files hashed at the same time, and bytes per read of each."""
DAMAGE = (errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.ELOOP, errno.ENAMETOOLONG)
"""Errors of files that are missing or of another kind; after any other error, which may be
temporary or can be repaired, the files may be intact."""
TRANSIENT = (
    *("RESOURCE_EXHAUSTED", "UNAVAILABLE", "DEADLINE_EXCEEDED", "ABORTED"),
    *("PERMISSION_DENIED", "UNAUTHENTICATED"),
    *map(os.strerror, (errno.EIO, errno.ESTALE, errno.ENOMEM, errno.ETIMEDOUT, errno.EACCES)),
    *map(os.strerror, (errno.EMFILE, errno.ENFILE, errno.ENOTCONN, errno.EREMOTEIO)),
)
"""Texts of such errors in orbax and its libraries."""

log = logging.getLogger(__name__)


class HashingAbandoned(Exception):
    """Hashing was abandoned because its result is no longer needed."""


def saved_steps(directory: Path) -> list[int]:
    """Return the steps that have a checkpoint, oldest first; the folder is not changed: a run may
    be training in it."""
    if not directory.is_dir():
        return []
    named = [p for p in directory.iterdir() if p.name.isascii() and p.name.isdigit() and p.is_dir()]
    return sorted(int(p.name) for p in named if p.name == str(int(p.name)))


def is_sealed(folder: Path) -> bool:
    """Return whether a checkpoint has checksums; `check_files` verifies them."""
    return (folder / CHECKSUMS).is_file()


def checksums(folder: Path, give_up: Callable[[], bool] = lambda: False) -> dict[str, str]:
    """Return the SHA-256 of every file in a folder, by relative path. Several files are hashed at
    the same time. Raises OSError, and HashingAbandoned soon after `give_up` has returned True."""
    files = _files(folder)
    workers = max(1, min(HASHED_AT_ONCE, os.cpu_count() or 1, len(files)))
    with ThreadPoolExecutor(workers, thread_name_prefix="checksums") as pool:
        digests = pool.map(functools.partial(_digest, give_up=give_up), files)
        names = [p.relative_to(folder).as_posix() for p in files]
        return dict(zip(names, digests, strict=True))


def seal(folder: Path) -> None:
    """Write the checksums of a folder's files into it, and return once all files are synced to
    disk. Raises OSError."""
    text = json.dumps(checksums(folder), indent=0)
    (folder / CHECKSUMS).write_text(text, encoding="utf-8")
    sync([*folder.rglob("*"), folder])


def give_name(unnamed: Path, folder: Path) -> None:
    """Give a sealed checkpoint its name; an existing one of that name is removed afterwards. The
    name is synced to disk when this returns. Raises OSError."""
    replaced = folder.with_name(folder.name + REPLACED)
    if os.path.lexists(folder):
        folder.rename(replaced)
    unnamed.rename(folder)
    sync([folder.parent])
    _remove(replaced)


def sweep(directory: Path, step: str = "*") -> None:
    """Remove the files of unfinished saves in a folder of checkpoints; a checkpoint that was about
    to be replaced gets its name back."""
    for replaced in directory.glob(step + REPLACED):
        folder = replaced.with_name(replaced.name.removesuffix(REPLACED))
        if not os.path.lexists(folder):
            replaced.rename(folder)
    for left in directory.glob(f"{step}.*tmp*"):
        _remove(left)


def sweep_until_gone(directory: Path, step: str) -> None:
    """Sweep the files of a failed save repeatedly while its threads still write there."""
    clean = 0
    for _ in range(SWEEPS):
        clean = 0 if any(directory.glob(f"{step}.*tmp*")) else clean + 1
        if clean == CLEAN_LOOKS:
            return
        sweep(directory, step)
        time.sleep(SWEEP_S)


def set_unreadable_aside(folder: Path) -> Path:
    """Rename a damaged checkpoint that a resumed run has skipped: no later start reads it, and the
    run may save that step again. Return its new path. Raises OSError."""
    return folder.rename(free_name(folder.with_name(folder.name + UNREADABLE)))


def forget_unreadable(kept: Path) -> list[str]:
    """Remove all damaged checkpoints that were set aside in a folder, except `kept`; return their
    names. Each is as large as a checkpoint."""
    pattern = re.compile(rf"\d+{re.escape(UNREADABLE)}\.\d+")
    others = [p for p in kept.parent.iterdir() if p != kept and pattern.fullmatch(p.name)]
    for folder in others:
        _remove(folder)
    return sorted(p.name for p in others)


def is_transient(error: BaseException) -> bool:
    """Return whether an error of reading a checkpoint does not mean that it is damaged: the file
    system, the memory or a permission failed, and a retry may succeed."""
    chain: list[BaseException] = []
    while error not in chain:
        chain.append(error)
        error = error.__cause__ or error.__context__ or error
    return any(
        isinstance(e, MemoryError)
        or (isinstance(e, OSError) and e.errno is not None and e.errno not in DAMAGE)
        or any(text in str(e) for text in TRANSIENT)
        for e in chain
    )


def sync(paths: Iterable[Path]) -> None:
    """Sync files and folders to disk. Raises OSError if that fails; a file system without such a
    call is logged once."""
    for path in paths:
        if path.is_symlink() or not (path.is_dir() or path.is_file()):
            continue
        handle = os.open(path, os.O_RDONLY)
        try:
            os.fsync(handle)
        except OSError as error:
            if error.errno not in NO_SYNC:
                raise
            if not path.is_dir():
                _warn_of_no_sync(error.errno)
                log.debug("%s is not synced: %s", path, error)
        finally:
            os.close(handle)


def sync_records(paths: Iterable[Path]) -> OSError | None:
    """Sync files and folders whose loss does not lose a checkpoint, as far as possible; missing
    ones are skipped. Return the first error."""
    first: OSError | None = None
    for path in paths:
        try:
            sync([path])
        except FileNotFoundError:
            continue
        except OSError as error:
            first = first or error
    return first


def check_files(folder: Path, give_up: Callable[[], bool] = lambda: False) -> None:
    """Raise OSError if the files of a checkpoint are not the written ones: one has changed, is
    missing, was added or is a link out of it, or the checksums are missing. Raise HashingAbandoned
    soon after `give_up` has returned True."""
    try:
        expected = json.loads((folder / CHECKSUMS).read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise OSError(f"{folder} has no {CHECKSUMS}: its files cannot be verified") from None
    except (ValueError, RecursionError):
        expected = None
    if not isinstance(expected, dict):
        raise OSError(f"{folder / CHECKSUMS} is not what was written")
    check_links(folder)
    present = checksums(folder, give_up)
    for name in sorted(expected.keys() | present.keys()):
        if name not in present:
            raise OSError(f"{folder / name} is missing")
        if expected.get(name) != present[name]:
            raise OSError(f"{folder / name} is not what was written: its checksum differs")


def check_links(folder: Path) -> None:
    """Raise OSError if a checkpoint has a link that leads out of it."""
    for path in folder.rglob("*"):
        if not is_inside(folder, path):
            raise OSError(f"{path} is a link out of the checkpoint")


def forget_old(directory: Path, newest: int, keep: int) -> None:
    """Remove all sealed checkpoints up to `newest`, which was read back, except the last `keep`;
    and folders without checksums that are older than these."""
    steps = [s for s in saved_steps(directory) if s <= newest]
    kept = [s for s in steps if is_sealed(directory / str(s))][-keep:]
    for step in steps:
        if step < min(kept, default=0):
            _remove(directory / str(step))


def _remove(path: Path) -> None:
    """Remove a folder, a file or a link, as far as that is possible."""
    if path.is_symlink() or path.is_file():
        with suppress(OSError):
            path.unlink()
    else:
        shutil.rmtree(path, ignore_errors=True)


def _files(folder: Path) -> list[Path]:
    """Return the files of a checkpoint, except its checksums. Raises OSError if a folder in it
    cannot be listed: its files are not missing."""

    def fail(error: OSError) -> None:
        raise error

    listed = os.walk(folder, onerror=fail)
    files = (Path(parent) / name for parent, _, names in listed for name in names)
    return sorted(p for p in files if p.is_file() and p.name != CHECKSUMS)


def _digest(path: Path, give_up: Callable[[], bool]) -> str:
    digest, block = hashlib.sha256(), bytearray(BLOCK)
    with path.open("rb", buffering=0) as file, memoryview(block) as view:
        while size := file.readinto(view):
            if give_up():
                raise HashingAbandoned(path)
            digest.update(view[:size])
    return digest.hexdigest()


@functools.cache
def _warn_of_no_sync(number: int) -> None:
    """Log, once a process for each kind of error, that a file system cannot sync files."""
    log.warning(
        "the file system of the run's folder cannot be asked to write its files to the disk "
        "(fsync: %s): a power cut may lose the newest checkpoint, and the one before is used",
        os.strerror(number),
    )
