"""Folders that belong only to this user, for files that a process later trusts or executes: secrets
of runs, compiled kernels."""

import contextlib
import functools
import logging
import os
import stat
import tempfile
from pathlib import Path

from jaxrl_async.errors import in_a_line

log = logging.getLogger(__name__)

OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH
"""Mode bits that allow other users to change a file or folder."""
EFFECTIVE = os.access in os.supports_effective_ids


class NotPrivateError(OSError):
    """A folder or a file belongs to another user, or others can change it."""


def private_folder(name: str) -> Path:
    """Return $XDG_CACHE_HOME/jaxrl_async/NAME (~/.cache by default), with mode 0700.

    If that folder cannot be created or written to, belongs to another user, or is a link, a
    folder of this user in the system's temporary folder is used, with a warning. Raises OSError
    if that cannot be created either.
    """
    try:
        return made_private(_cache_folder() / name)
    except (OSError, RuntimeError) as error:  # RuntimeError: no home
        fallback = _fallback(name)
        _warn_once(
            f"{in_a_line(error)}. {fallback} is used instead; set XDG_CACHE_HOME to a folder of "
            "your own that can be written to."
        )
        return fallback


def readable_folders(name: str) -> list[Path]:
    """Return the folders in which this user's processes, or root for all users, may have stored
    files, in the order of private_folder. Creates nothing. Other users cannot change these folders,
    but each file still has to be checked (check_own_file)."""
    folders = []
    for parent in (_cache_folder, _temporary_folder):
        with contextlib.suppress(OSError, RuntimeError):
            folder = parent() / name
            status = folder.lstat()
            owned = stat.S_ISDIR(status.st_mode) and status.st_uid in (os.geteuid(), 0)
            if owned and not status.st_mode & OTHERS_WRITE:
                folders.append(folder)
    return folders


def made_private(folder: Path) -> Path:
    """Return the folder, created if missing, with access for this user only. Raises NotPrivateError
    if it belongs to another user or is a link, OSError if it cannot be created or written
    to."""
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    status = folder.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid():
        raise NotPrivateError(f"{folder} is not a folder of this user")
    if stat.S_IMODE(status.st_mode) != 0o700:
        folder.chmod(0o700)
    if stat.S_IMODE(folder.lstat().st_mode) & OTHERS_WRITE:
        raise NotPrivateError(f"{folder} stays open to others: its file system keeps no modes")
    if not os.access(folder, os.W_OK | os.X_OK, effective_ids=EFFECTIVE):
        raise NotPrivateError(f"{folder} cannot be written to")
    return folder


def check_own_file(status: os.stat_result, path: Path | str) -> None:
    """Raise NotPrivateError unless a file is a regular file of this user or root that other users
    cannot change.

    Args:
        status: of the open file (os.fstat), which no other file can replace meanwhile.
        path: named in the error.
    """
    if not stat.S_ISREG(status.st_mode) or status.st_uid not in (os.geteuid(), 0):
        raise NotPrivateError(f"{path} is not a file of this user")
    if status.st_mode & OTHERS_WRITE:
        raise NotPrivateError(
            f"{path} can be changed by other users (mode {status.st_mode & 0o777:o})"
        )


def write_whole(path: Path, content: bytes) -> None:
    """Replace a file, accessible to this user only, atomically, even if the process or the machine
    stops meanwhile. Raises OSError."""
    with tempfile.NamedTemporaryFile(dir=path.parent, prefix=f".{path.name}.", delete=False) as f:
        temporary = Path(f.name)
        try:
            f.write(content)
            f.flush()
            os.fsync(f.fileno())
            temporary.replace(path)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def _cache_folder() -> Path:
    """Return the folder of caches. Raises RuntimeError if there is no home directory."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "jaxrl_async"


def _temporary_folder() -> Path:
    return Path(tempfile.gettempdir()) / f"jaxrl_async-{os.geteuid()}"


@functools.cache
def _fallback(name: str) -> Path:
    try:
        return made_private(made_private(_temporary_folder()) / name)
    except OSError:  # another user made it first, or a file or a link is in its place
        return Path(tempfile.mkdtemp(prefix="jaxrl_async-"))


@functools.cache
def _warn_once(text: str) -> None:
    log.warning("%s", text)
