"""Prepare a run that has a copy: restore its folder, or check that the address is free."""

import logging
import shutil
import tempfile
from collections.abc import Iterable
from pathlib import Path

from jaxrl_async.config.schema import RunSection
from jaxrl_async.errors import ConfigError
from jaxrl_async.mirror.remote_copy import (
    CHECKPOINT_FILE,
    OWNER,
    CopyTarget,
    holds_run,
    open_target,
    unreachable,
    whole_checkpoints,
)
from jaxrl_async.run.checkpoint.seal import check_files
from jaxrl_async.run.folder import SIGNS, add_signs, holds_something, move_aside, read_signs

log = logging.getLogger(__name__)


def bring_back(run: RunSection) -> None:
    """Fetch the run's folder from its copy if the run is resumed and has no local folder.

    A local folder is used as it is, unless another machine has continued the copy since. In that
    case the folder is moved aside and the copy is fetched. Raises ConfigError if the copy cannot be
    reached, or if it holds an unrelated run.
    """
    if run.copy_to is None:
        return
    target, root = open_target(run.copy_to, run.name), Path(run.dir) / run.name
    try:
        names = target.names()
        owner = target.owner()
    except Exception as error:
        raise unreachable(target.address, error) from error
    if not holds_run(names):
        return
    if not (run.resume or run.resume_or_start):
        if not run.overwrite:
            raise _already_used(target)
        return
    if holds_something(root):
        known = read_signs(root / SIGNS)
        if owner in known:
            return
        if not known:
            raise ConfigError(
                f"{root} and its copy {target.address} hold unrelated runs. "
                "Move aside the one that you do not want to continue, or choose another run.name."
            )
        log.warning("%s was continued on another machine; fetching it again", target.address)
    if root.is_dir():
        log.warning("moved %s aside, to %s", root, move_aside(root))
    try:
        fetch(target, names, root, owner)
    except OSError as error:
        raise unreachable(target.address, error) from error


def begin_copy(run: RunSection, target: CopyTarget, sign: str) -> None:
    """Make this process the writer of the copy. With run.overwrite, an old copy is moved aside.
    Raises ConfigError."""
    try:
        if not run.resume and holds_run(target.names()):
            if not run.overwrite:
                raise _already_used(target)
            log.warning("moved %s aside, to %s", target.address, target.move_aside())
        # first: the process may be killed here
        add_signs(Path(run.dir) / run.name / SIGNS, (sign,))
        target.claim(sign)
    except ConfigError:
        raise
    except Exception as error:
        raise unreachable(target.address, error) from error


def fetch(target: CopyTarget, names: Iterable[str], root: Path, owner: str | None) -> None:
    """Download a run with the newest complete checkpoint of each kind. The folder appears complete
    or not at all. If a checkpoint's checksums do not match, the previous checkpoint is used."""
    log.warning("fetching %s to %s", target.address, root)
    root.parent.mkdir(parents=True, exist_ok=True)
    staging = Path(tempfile.mkdtemp(dir=root.parent, prefix=".fetching-"))
    try:
        for name in names:
            if ".." in name.split("/"):
                raise OSError(f"the name {name!r} points outside the folder")
            if name != OWNER and CHECKPOINT_FILE.fullmatch(name) is None:
                target.get(name, staging / name)
        for folder, steps in whole_checkpoints(names).items():
            _fetch_newest(target, names, staging, folder, steps)
        add_signs(staging / SIGNS, () if owner is None else (owner,))
        staging.rename(root)
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def _fetch_newest(
    target: CopyTarget, names: Iterable[str], staging: Path, folder: str, steps: list[int]
) -> None:
    """Fetch the first of these steps whose files match their checksums."""
    for step in steps:
        for name in names:
            if name.startswith(f"{folder}/{step}/"):
                target.get(name, staging / name)
        try:
            check_files(staging / folder / str(step))
        except (OSError, ValueError) as error:
            log.warning("%s: skipping checkpoint %s/%d: %s", target.address, folder, step, error)
            shutil.rmtree(staging / folder / str(step))
        else:
            return


def _already_used(target: CopyTarget) -> ConfigError:
    return ConfigError(
        f"{target.address} (run.copy_to) already holds a copy of a run. Continue it with --resume, "
        "replace it with run.overwrite=true (the old copy is moved aside), or choose another "
        "run.name."
    )
