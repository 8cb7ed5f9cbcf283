"""JAX's persistent compilation cache, whose entries are machine code: an entry is used only if its
checksum is in a file, its mark, which this user or root wrote and other users cannot change.

    get(key) ──> entry ──sha256(key, entry)──> is there a mark of this sum? ──> the program
                   └── no: the entry is removed, and the program compiled again ──> put(key)
"""

import contextlib
import hashlib
import logging
import os
import stat
import tempfile
from pathlib import Path
from typing import Any

from jax._src import compilation_cache  # it has no public name for where entries come from
from jax._src.compilation_cache_interface import CacheInterface

from jaxrl_async.errors import in_a_line
from jaxrl_async.private_folder import OTHERS_WRITE, NotPrivateError, private_folder, write_whole

log = logging.getLogger(__name__)

MARK = ".sum"
"""Suffix of a mark's file name, after the checksum of an entry, which is also its content."""
ENTRY = "-cache"
"""Suffix that JAX appends to an entry's key."""
MARK_S = 5.0
"""Additional time for which a mark is kept after its entry, seconds: it is written before the
entry, and an entry without its mark looks like another user's."""
MOST_BYTES = 8 << 30
"""Maximum bytes of a folder outside of all runs' folders, which is not removed with a run."""


def usable_folder(folder: Path) -> Path:
    """Return the folder, created if needed, which others cannot change. If it is another user's or
    cannot be created, log that and return a private one. Raises OSError if neither can be used."""
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        info = folder.stat()
        if info.st_uid not in (os.geteuid(), 0) and info.st_uid != _of_new_files(folder)[0]:
            raise NotPrivateError(
                f"{folder} belongs to another user, whose compiled programs are not executed"
            )
    except OSError as error:
        spare = private_folder("programs")
        log.warning("%s: the run keeps its programs in %s", in_a_line(error), spare)
        return spare
    if info.st_uid == os.geteuid() and info.st_mode & OTHERS_WRITE:
        _close(folder, stat.S_IMODE(info.st_mode))
    return folder


def keep_used(folder: Path, most_bytes: int = MOST_BYTES) -> None:
    """Remove the least recently used programs until a folder is below its limit."""
    files = []
    for path in folder.iterdir():
        with contextlib.suppress(OSError):  # another process has removed it
            if path.name.endswith((ENTRY, MARK)):
                info = path.lstat()
                longer = MARK_S if path.name.endswith(MARK) else 0.0
                files.append((info.st_mtime + longer, info.st_size, path))
    left, removed = sum(size for _, size, _ in files), 0
    for _, size, path in sorted(files):
        if left <= most_bytes:
            break
        try:
            path.unlink()
            removed += 1
        except FileNotFoundError:
            pass  # another process has removed it at the same time
        except OSError:
            continue
        left -= size
    if removed:
        log.info("%s: removed %d files of the least recently used programs", folder, removed)


def _close(folder: Path, mode: int) -> None:
    """Remove the write permission of others. A file system without modes refuses or ignores that:
    the marks protect the programs anyway."""
    with contextlib.suppress(OSError):
        folder.chmod(mode & ~OTHERS_WRITE)
    if (now := stat.S_IMODE(folder.stat().st_mode)) != mode:
        log.warning(
            "%s holds compiled programs, which are machine code: only its owner writes there from "
            "now on (mode %o, it was %o). Users who share it each keep their own in "
            "JAX_COMPILATION_CACHE_DIR.", folder, now, mode,
        )  # fmt: skip


def verify_compiled_programs() -> None:
    """Have JAX verify the entries of its persistent compilation cache from now on."""
    make: Any = compilation_cache.get_file_cache
    if getattr(make, "verifies", False):
        return

    def verified(path: str) -> Any:
        made = make(path)
        return None if made is None else (VerifiedPrograms(made[0], made[1]), made[1])

    verified.verifies = True  # type: ignore[attr-defined]
    compilation_cache.get_file_cache = verified
    if compilation_cache._cache is not None:  # JAX has compiled something already
        compilation_cache.reset_cache()


class VerifiedPrograms(CacheInterface):
    """JAX's cache of compiled programs, with a mark for each entry that this module has written.

    Two processes that write an entry at the same time each leave a mark: the remaining entry has
    its own.
    """

    def __init__(self, cache: Any, folder: str) -> None:
        """Wrap JAX's cache in this folder, or at this address of a bucket."""
        self._cache, self._path = cache, cache._path
        self._local = None if "://" in folder else Path(folder)
        self._again = 0
        self._owners, self._writable = {os.geteuid(), 0}, OTHERS_WRITE
        if self._local is not None:
            owner, mode = _of_new_files(self._local)
            self._owners.add(owner)  # a network file system may report one owner for all
            self._writable &= ~mode  # and a file system without modes reports none

    def get(self, key: str) -> bytes | None:
        """Return an entry; None if it does not exist, or has no mark."""
        value: bytes | None = self._cache.get(key)
        if value is None:
            return None
        digest = _sum(key, value)
        try:
            if self._mark(digest) == digest.encode():
                self._note_use(f"{key}{ENTRY}", f"{digest}{MARK}")
                return value
            why = "its mark is damaged"
        except FileNotFoundError:
            why = "it is damaged, of an older version or another user's"
        except OSError as error:
            why = in_a_line(error)
        self._again += 1  # a new version affects all entries: one warning
        level = logging.WARNING if self._again == 1 else logging.INFO
        log.log(level, "a kept program is compiled again, %s: %s", key[:60], why)
        try:
            (self._path / f"{key}{ENTRY}").unlink()
        except OSError as error:
            log.warning("the program's entry cannot be replaced: %s", in_a_line(error))
        return None

    def put(self, key: str, value: bytes) -> None:
        """Keep an entry: its mark first, since an entry without one does not count."""
        digest = _sum(key, value)
        try:
            if self._local is None:
                (self._path / f"{digest}{MARK}").write_bytes(digest.encode())
            else:
                write_whole(self._local / f"{digest}{MARK}", digest.encode())
        except OSError as error:
            log.warning("a compiled program is not kept: %s", in_a_line(error))
            return
        self._cache.put(key, value)

    def _note_use(self, *names: str) -> None:
        """Mark these files as used now, for keep_used."""
        if self._local is None:
            return
        for name in names:
            with contextlib.suppress(OSError):
                os.utime(self._local / name, follow_symlinks=False)

    def _mark(self, digest: str) -> bytes:
        """Return the content of a mark. Raises OSError if it is missing, or if another user wrote
        it or can change it."""
        if self._local is None:
            content: bytes = (self._path / f"{digest}{MARK}").read_bytes()
            return content
        path = self._local / f"{digest}{MARK}"
        with open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK), "rb") as file:
            info = os.fstat(file.fileno())
            if info.st_uid not in self._owners or info.st_mode & self._writable:
                raise NotPrivateError("another user wrote its mark, or can change it")
            return file.read(len(digest) + 1)


def _sum(key: str, value: bytes) -> str:
    """Return the checksum of an entry under its key, hexadecimal."""
    digest = hashlib.sha256(key.encode() + b"\0")
    digest.update(value)
    return digest.hexdigest()


def _of_new_files(folder: Path) -> tuple[int, int]:
    """Return the owner and the mode of a file made there; this user and 0600 if none can be
    made."""
    try:
        with tempfile.NamedTemporaryFile(dir=folder, prefix=".") as file:
            info = os.fstat(file.fileno())
            return info.st_uid, stat.S_IMODE(info.st_mode)
    except OSError:
        return os.geteuid(), 0o600
