"""Storage of a run's checkpoints: a folder, which can rename, or a bucket, which cannot.

Checkpoints ──writes, seals, reads, removes──> FolderStorage | BucketStorage (bucket.py)
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import yaml

from jaxrl_async.config.run_section import CheckpointSection, RunSection
from jaxrl_async.errors import ConfigError
from jaxrl_async.later import Later
from jaxrl_async.run.checkpoint.seal import (
    UNNAMED,
    check_files,
    check_links,
    forget_old,
    forget_unreadable,
    give_name,
    is_sealed,
    saved_steps,
    seal,
    set_unreadable_aside,
    sweep,
    sweep_until_gone,
)
from jaxrl_async.run.folder import WRITERS, Paths, holds_something, read_signs

if TYPE_CHECKING:
    from jaxrl_async.run.checkpoint import bucket, bucket_start
    from jaxrl_async.run.checkpoint.bucket import BucketStorage
else:
    bucket_start = Later("jaxrl_async.run.checkpoint.bucket_start")
    bucket = Later("jaxrl_async.run.checkpoint.bucket")


class CheckpointStorage(Protocol):
    """Where checkpoints lie; every method but the first two raises OSError if it fails."""

    @property
    def directory(self) -> Any:
        """The folder: a path whose `/` leads to a step, and which orbax takes."""

    def written(self, step: int) -> Any:
        """Return the folder to which orbax writes a checkpoint."""

    def make_room(self, step: int) -> None:
        """Prepare for a step to be written again."""

    def complete(self, step: int, run: Paths | None) -> None:
        """Make what orbax has written a checkpoint. run: whose records may go with it."""

    def sweep(self) -> None:
        """Remove what unfinished saves have left."""

    def sweep_failed(self, step: int) -> None:
        """Remove what a failed save of this process has left."""

    def steps(self) -> list[int]:
        """Return the steps that have a checkpoint, oldest first."""

    def is_sealed(self, step: int) -> bool:
        """Return whether a checkpoint has checksums."""

    def check(self, step: int, give_up: Callable[[], bool] = ...) -> None:
        """Raise OSError if a checkpoint's files are not those that were written."""

    def check_links(self, step: int) -> None:
        """Raise OSError if a checkpoint has a link that leads out of it."""

    def set_aside(self, step: int) -> str:
        """Keep a damaged checkpoint from being read; return its new name."""

    def forget_aside(self, kept: str) -> list[str]:
        """Remove what was set aside, but for `kept`; return the names."""

    def forget_old(self, newest: int, keep: int) -> None:
        """Remove older checkpoints than the last `keep`."""


@dataclass(frozen=True, slots=True)
class FolderStorage:
    """A folder of a file system."""

    directory: Path

    def written(self, step: int) -> Path:
        """Return a folder that is not named by the step alone."""
        return self.directory / f"{step}{UNNAMED}"

    def make_room(self, step: int) -> None:
        """Do nothing: the old checkpoint is replaced by name."""

    def complete(self, step: int, run: Paths | None) -> None:
        """Seal it and give it its name."""
        seal(self.written(step))
        give_name(self.written(step), self.directory / str(step))

    def sweep(self) -> None:
        """Remove what a killed run half wrote."""
        sweep(self.directory)

    def sweep_failed(self, step: int) -> None:
        """Sweep while threads of the save still write."""
        sweep_until_gone(self.directory, str(step))

    def steps(self) -> list[int]:
        """Return the steps that have a name."""
        return saved_steps(self.directory)

    def is_sealed(self, step: int) -> bool:
        """Return whether it has checksums."""
        return is_sealed(self.directory / str(step))

    def check(self, step: int, give_up: Callable[[], bool] = lambda: False) -> None:
        """Hash its files and compare. Raises HashingAbandoned, too."""
        check_files(self.directory / str(step), give_up)

    def check_links(self, step: int) -> None:
        """Raise OSError if it has a link that leads out of it."""
        check_links(self.directory / str(step))

    def set_aside(self, step: int) -> str:
        """Rename it."""
        return set_unreadable_aside(self.directory / str(step)).name

    def forget_aside(self, kept: str) -> list[str]:
        """Remove the other renamed ones."""
        return forget_unreadable(self.directory / kept)

    def forget_old(self, newest: int, keep: int) -> None:
        """Remove older ones than the last `keep` with checksums."""
        forget_old(self.directory, newest, keep)


def storage_of(
    section: CheckpointSection, run_name: str, paths: Paths
) -> "FolderStorage | BucketStorage":
    """Return where a run's checkpoints lie; nothing is made. Raises ConfigError for a bucket that
    cannot be used."""
    if section.dir is None:
        return FolderStorage(paths.checkpoints.absolute())
    signs = read_signs(paths.root / WRITERS)  # the last one's is this process's, if it trains
    return bucket.open_bucket(section.dir, run_name, signs[-1] if signs else None)


def check_same_dir(section: CheckpointSection, run: RunSection) -> None:
    """Raise ConfigError if a run is resumed that saved to another checkpoint.dir before: there is
    no checkpoint at this one, and it would start from its beginning."""
    paths = Paths(Path(run.dir) / run.name)
    if not (run.resume or run.resume_or_start) or not paths.config.is_file():
        return
    settings = yaml.safe_load(paths.config.read_text(encoding="utf-8")) or {}
    before = settings.get("checkpoint", {}).get("dir")
    has_some = before is not None or saved_steps(paths.checkpoints)
    if before != section.dir and has_some and holds_something(paths.root):
        raise ConfigError(
            f"{paths.root} was made with checkpoint.dir={before or 'null'}, and is to be resumed "
            f"with checkpoint.dir={section.dir or 'null'}, where it has no checkpoint. Set it as "
            "before, or copy the checkpoints."
        )


def bring_back(section: CheckpointSection, run: RunSection) -> bool:
    """Make the run's folder from its newest checkpoint on a bucket where that is needed; return
    whether there is such a checkpoint. Raises ConfigError, see bucket_start.bring_back_records, and
    if a run without a bucket saved to one before."""
    if section.dir is not None:
        return bucket_start.bring_back_records(section, run)
    if not saved_steps(Paths(Path(run.dir) / run.name).checkpoints):
        check_same_dir(section, run)
    return False
