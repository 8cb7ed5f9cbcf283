"""Folders that belong to this user alone, for what a process later trusts or executes: secrets of
runs, compiled kernels."""

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
"""Bits of a mode with which others can change something."""
EFFECTIVE = os.access in os.supports_effective_ids


class NotPrivateError(OSError):
    """A folder or a file belongs to another user, or others can change it."""


def private_folder(name: str) -> Path:
    """Return $XDG_CACHE_HOME/jaxrl_async/NAME (~/.cache by default), with mode 0700.

    If that cannot be made or written to, or is another user's or a link, one of this user in the
    system's folder for temporary files is used, which the log says. Raises OSError if that
    cannot be made either.
    """
    try:
        return made_private(_of_caches() / name)
    except (OSError, RuntimeError) as error:  # the last: there is no home
        spare = _spare(name)
        _say(
            f"{in_a_line(error)}. {spare} is used instead; set XDG_CACHE_HOME to a folder of your "
            "own that can be written to."
        )
        return spare


def readable_folders(name: str) -> list[Path]:
    """Return the folders, in the order of private_folder, in which this user's processes may have
    kept something, or root for all users; nothing is made. Others cannot change them, but each file
    still has to be checked (check_own_file)."""
    found = []
    for parent in (_of_caches, _of_temporary_files):
        with contextlib.suppress(OSError, RuntimeError):
            folder = parent() / name
            seen = folder.lstat()
            owned = stat.S_ISDIR(seen.st_mode) and seen.st_uid in (os.geteuid(), 0)
            if owned and not seen.st_mode & OTHERS_WRITE:
                found.append(folder)
    return found


def made_private(folder: Path) -> Path:
    """Return the folder, made if it is not there, which only this user can read and change. Raises
    NotPrivateError if it is another user's or a link, OSError if it cannot be made or written
    to."""
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid():
        raise NotPrivateError(f"{folder} is not a folder of this user")
    if stat.S_IMODE(found.st_mode) != 0o700:
        folder.chmod(0o700)
    if stat.S_IMODE(folder.lstat().st_mode) & OTHERS_WRITE:
        raise NotPrivateError(f"{folder} stays open to others: its file system keeps no modes")
    if not os.access(folder, os.W_OK | os.X_OK, effective_ids=EFFECTIVE):
        raise NotPrivateError(f"{folder} cannot be written to")
    return folder


def check_own_file(found: os.stat_result, path: Path | str) -> None:
    """Raise NotPrivateError unless a file is a plain one, of this user or of root, that others
    cannot change.

    Args:
        found: of the open file (os.fstat), which no other file can replace meanwhile.
        path: named in the error.
    """
    if not stat.S_ISREG(found.st_mode) or found.st_uid not in (os.geteuid(), 0):
        raise NotPrivateError(f"{path} is not a file of this user")
    if found.st_mode & OTHERS_WRITE:
        raise NotPrivateError(
            f"{path} can be changed by other users (mode {found.st_mode & 0o777:o})"
        )


def write_whole(path: Path, content: bytes) -> None:
    """Replace a file, which this user alone can read and change, whole or not at all, even if the
    process or the machine ends meanwhile. Raises OSError."""
    with tempfile.NamedTemporaryFile(dir=path.parent, prefix=f".{path.name}.", delete=False) as f:
        draft = Path(f.name)
        try:
            f.write(content)
            f.flush()
            os.fsync(f.fileno())
            draft.replace(path)
        except BaseException:
            draft.unlink(missing_ok=True)
            raise
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def _of_caches() -> Path:
    """Raises RuntimeError if there is no home."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "jaxrl_async"


def _of_temporary_files() -> Path:
    return Path(tempfile.gettempdir()) / f"jaxrl_async-{os.geteuid()}"


@functools.cache
def _spare(name: str) -> Path:
    try:
        return made_private(made_private(_of_temporary_files()) / name)
    except OSError:  # another user made it first, or a file or a link is in its place
        return Path(tempfile.mkdtemp(prefix="jaxrl_async-"))


@functools.cache
def _say(text: str) -> None:
    log.warning("%s", text)
