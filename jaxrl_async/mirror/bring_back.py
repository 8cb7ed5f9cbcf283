"""Prepare a run that has a copy: restore its folder, or check that the address is free."""

import logging
import shutil
import tempfile
from collections.abc import Iterable
from pathlib import Path

from jaxrl_async.config.schema import RunSection
from jaxrl_async.errors import ConfigError
from jaxrl_async.mirror.remote_copy import (
    OF_CHECKPOINT,
    OWNER,
    CopyPlace,
    holds_run,
    open_place,
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
    place, root = open_place(run.copy_to, run.name), Path(run.dir) / run.name
    try:
        names = place.names()
        owner = place.owner()
    except Exception as error:
        raise unreachable(place.address, error) from error
    if not holds_run(names):
        return
    if not (run.resume or run.resume_or_start):
        if not run.overwrite:
            raise _taken(place)
        return
    if holds_something(root):
        known = read_signs(root / SIGNS)
        if owner in known:
            return
        if not known:
            raise ConfigError(
                f"{root} and its copy {place.address} hold unrelated runs. "
                "Move aside the one that you do not want to continue, or choose another run.name."
            )
        log.warning("%s was continued on another machine; fetching it again", place.address)
    if root.is_dir():
        log.warning("moved %s aside, to %s", root, move_aside(root))
    try:
        fetch(place, names, root, owner)
    except OSError as error:
        raise unreachable(place.address, error) from error


def begin_copy(run: RunSection, place: CopyPlace, sign: str) -> None:
    """Make this process the writer of the copy. With run.overwrite, an old copy is moved aside.
    Raises ConfigError."""
    try:
        if not run.resume and holds_run(place.names()):
            if not run.overwrite:
                raise _taken(place)
            log.warning("moved %s aside, to %s", place.address, place.move_aside())
        # first: the process may be killed here
        add_signs(Path(run.dir) / run.name / SIGNS, (sign,))
        place.take(sign)
    except ConfigError:
        raise
    except Exception as error:
        raise unreachable(place.address, error) from error


def fetch(place: CopyPlace, names: Iterable[str], root: Path, owner: str | None) -> None:
    """Download a run with the newest complete checkpoint of each kind. The folder appears complete
    or not at all. If a checkpoint's checksums do not match, the previous checkpoint is used."""
    log.warning("fetching %s to %s", place.address, root)
    root.parent.mkdir(parents=True, exist_ok=True)
    made = Path(tempfile.mkdtemp(dir=root.parent, prefix=".fetching-"))
    try:
        for name in names:
            if ".." in name.split("/"):
                raise OSError(f"the name {name!r} points outside the folder")
            if name != OWNER and OF_CHECKPOINT.fullmatch(name) is None:
                place.get(name, made / name)
        for folder, steps in whole_checkpoints(names).items():
            _fetch_newest(place, names, made, folder, steps)
        add_signs(made / SIGNS, () if owner is None else (owner,))
        made.rename(root)
    finally:
        shutil.rmtree(made, ignore_errors=True)


def _fetch_newest(
    place: CopyPlace, names: Iterable[str], made: Path, folder: str, steps: list[int]
) -> None:
    """Fetch the first of these steps whose files match their checksums."""
    for step in steps:
        for name in names:
            if name.startswith(f"{folder}/{step}/"):
                place.get(name, made / name)
        try:
            check_files(made / folder / str(step))
        except (OSError, ValueError) as error:
            log.warning("%s: skipping checkpoint %s/%d: %s", place.address, folder, step, error)
            shutil.rmtree(made / folder / str(step))
        else:
            return


def _taken(place: CopyPlace) -> ConfigError:
    return ConfigError(
        f"{place.address} (run.copy_to) already holds a copy of a run. Continue it with --resume, "
        "replace it with run.overwrite=true (the old copy is moved aside), or choose another "
        "run.name."
    )
