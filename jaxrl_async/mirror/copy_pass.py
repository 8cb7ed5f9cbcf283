"""Copy a run's folder to its remote address, one pass after another.

finished checkpoints ──hard links──> .copying/ ──> files of the run ──> files of each checkpoint,
    its checksums last ──> files removed here are removed there

The hard links are made first because the run may remove a checkpoint during the upload. The run's
other files are sent before a checkpoint's checksums, so the copy's ledger reaches at least as far
as its newest checkpoint.
"""

import os
import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from jaxrl_async.errors import JaxrlError
from jaxrl_async.mirror.remote_copy import (
    CHECKPOINT_FILE,
    OWNER,
    CopyTarget,
    whole_checkpoints,
)
from jaxrl_async.remote.wire.address import JOIN_FILE
from jaxrl_async.run.checkpoint.seal import CHECKSUMS, saved_steps
from jaxrl_async.run.folder import SIGNS, WANDB, FolderWatch
from jaxrl_async.whole_files import UNFINISHED

STAGE = ".copying"
"""Folder inside the run's folder for files that are being uploaded."""
EXCLUDED = (STAGE, SIGNS, SIGNS + ".tmp", "lock", WANDB, JOIN_FILE)
"""Entries of a run's folder that are never copied. The last one may hold a secret."""
WEIGHTS = ".safetensors"
"""Suffix of large files that are never appended to."""


class TakenOver(JaxrlError):
    """Another process now writes this copy."""


class FolderMirror:
    """A run's folder and its remote copy. Used by one thread at a time."""

    def __init__(self, root: Path, target: CopyTarget, keep: int, sign: str) -> None:
        """Store the arguments; nothing is read.

        Args:
            root: folder of the run.
            target: location of the copy.
            keep: number of newest checkpoints that the copy keeps.
            sign: identifies this process.
        """
        self._root, self._target, self._keep, self._sign = root, target, keep, sign
        self._watch = FolderWatch(root, appended=())
        # Files in the copy, with local size and mtime as sent; None: sent by another process.
        self._sent: dict[str, tuple[int, int] | None] | None = None

    def has_finished(self) -> bool:
        """Return whether a finished checkpoint is not in the copy yet."""
        return bool(self._unsent())

    def update(self) -> None:
        """Bring the copy up to date with the folder. Raises TakenOver, FolderLost and file system
        errors; after an error, the next call continues from where this one stopped."""
        self._watch.check()
        self._check_owner()
        if self._sent is None:
            self._sent = dict.fromkeys(n for n in self._target.names() if n != OWNER)
        sent = self._sent
        with self._stage(self._unsent()) as staged:
            self._send_files(sent)
            for name, stamp in staged.items():
                self._send_checkpoint(name, stamp, sent)
        self._watch.check()  # if the whole folder was lost, remove nothing from the copy
        self._remove(name for name, stamp in sent.items() if self._is_removed(name, stamp))

    def _check_owner(self) -> None:
        owner = self._target.owner()
        if owner != self._sign:
            raise TakenOver(
                f"{self._target.address} is now written by another process, so this run is no "
                "longer copied. Give one of the two runs another run.name."
            )

    def _unsent(self) -> dict[str, tuple[int, int]]:
        """Return the finished, kept checkpoints that were not sent yet: FOLDER/STEP, with size and
        mtime of the checksum file, newest first within each folder."""
        sent, unsent = self._sent or {}, dict[str, tuple[int, int]]()
        for pattern in ("checkpoints", "*/checkpoints", "*/*/checkpoints"):
            for folder in self._root.glob(pattern):
                if STAGE in folder.parts:
                    continue
                finished = [
                    s for s in saved_steps(folder) if (folder / str(s) / CHECKSUMS).exists()
                ]
                for step in reversed(finished[-self._keep :]):
                    checksums = folder / str(step) / CHECKSUMS
                    name = checksums.relative_to(self._root).as_posix()
                    with suppress(FileNotFoundError):  # removed just now
                        if sent.get(name) != (stamp := _stamp_of(checksums)):
                            unsent[name.rpartition("/")[0]] = stamp
        return unsent

    @contextmanager
    def _stage(self, unsent: dict[str, tuple[int, int]]) -> Iterator[dict[str, tuple[int, int]]]:
        """Hold the checkpoints' files as links or copies, because the run may remove them. Yields
        the checkpoints that were complete."""
        stage, held = self._root / STAGE, dict[str, tuple[int, int]]()
        shutil.rmtree(stage, ignore_errors=True)
        try:
            for name, stamp in unsent.items():
                try:
                    shutil.copytree(self._root / name, stage / name, copy_function=_link)
                except (FileNotFoundError, shutil.Error):
                    if (self._root / name / CHECKSUMS).exists():
                        raise
                    shutil.rmtree(stage / name, ignore_errors=True)  # removed just now
                else:
                    held[name] = stamp
            yield held
        finally:
            shutil.rmtree(stage, ignore_errors=True)

    def _send_files(self, sent: dict[str, tuple[int, int] | None]) -> None:
        """Send the run's files that have changed, except checkpoints."""
        for name, path in _files(self._root):
            if CHECKPOINT_FILE.fullmatch(name) or "/checkpoints/" in f"/{name}":
                continue
            try:
                stamp = _stamp_of(path)
                if sent.get(name) != stamp:
                    self._send_file(path, name)
                    sent[name] = stamp
            except FileNotFoundError:
                if path.exists():
                    raise

    def _send_file(self, path: Path, name: str) -> None:
        """Send a snapshot of one file, because it may be appended to during the upload."""
        if path.name.endswith(WEIGHTS):
            self._target.put(path, name)
            return
        held = self._root / STAGE / "file"
        held.parent.mkdir(exist_ok=True)
        shutil.copyfile(path, held)
        self._target.put(held, name)

    def _send_checkpoint(
        self,
        name: str,
        stamp: tuple[int, int],
        sent: dict[str, tuple[int, int] | None],
    ) -> None:
        """Send a checkpoint, its checksums last, and remove old ones from the copy: all but the
        newest `keep`, and any newer than the newest local one (a resumed run has undone those)."""
        folder, _, step = name.rpartition("/")
        held, checksums = self._root / STAGE / name, f"{name}/{CHECKSUMS}"
        if self._target.read(checksums) != (held / CHECKSUMS).read_bytes():
            self._remove(n for n in list(sent) if n.startswith(f"{name}/"))
            for file, path in _files(held):
                if file != CHECKSUMS:
                    sent[f"{name}/{file}"] = None
                    self._target.put(path, f"{name}/{file}")
            self._check_owner()
            self._target.put(held / CHECKSUMS, checksums)
        sent[checksums] = stamp
        newest = max((int(step), *saved_steps(self._root / folder)))
        kept = [s for s in whole_checkpoints(sent)[folder] if s <= newest][: self._keep]
        matches = {file: CHECKPOINT_FILE.fullmatch(file) for file in sent}
        self._remove(
            file for file, m in matches.items() if m and m[1] == folder and int(m[2]) not in kept
        )

    def _remove(self, names: Iterable[str]) -> None:
        names = list(names)
        self._target.remove(names)
        for name in names:
            if self._sent is not None:
                self._sent.pop(name, None)

    def _is_removed(self, name: str, stamp: tuple[int, int] | None) -> bool:
        """Return whether a file of the copy no longer exists here. Files of other processes stay.
        Checkpoints are pruned when the next one is sent, unless the whole folder is gone."""
        match = CHECKPOINT_FILE.fullmatch(name)
        if match is not None:
            return not (self._root / match[1]).exists()
        return stamp is not None and not (self._root / name).exists()


def _files(folder: Path) -> Iterator[tuple[str, Path]]:
    """Yield the files below a run's folder with relative names; symbolic links are skipped."""
    for parent, folders, files in os.walk(folder):
        if Path(parent) == folder:
            folders[:] = [name for name in folders if name not in EXCLUDED]
            files = [name for name in files if name not in EXCLUDED]
        folders[:] = [name for name in folders if not name.endswith(UNFINISHED)]
        for name in sorted(files):
            path = Path(parent) / name
            if not path.is_symlink():
                yield path.relative_to(folder).as_posix(), path


def _stamp_of(path: Path) -> tuple[int, int]:
    """Return size and mtime of a file."""
    status = path.stat()
    return status.st_size, status.st_mtime_ns


def _link(source: str, target: str) -> None:
    """Hard-link a file, or copy it if the file system has no hard links."""
    try:
        os.link(source, target)
    except FileNotFoundError:
        raise
    except OSError:
        shutil.copyfile(source, target)
