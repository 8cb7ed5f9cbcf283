"""Before a run begins: bring it back from its copy, or see that the copy is free for it."""

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
from jaxrl_async.run.folder import holds_something, move_aside
from jaxrl_async.run.signs import SIGNS, add_signs, read_signs

log = logging.getLogger(__name__)


def bring_back(run: RunSection) -> None:
    """Fetch the run's folder from its copy if it is to be resumed and is not here.

    A folder that is here is used as it is, unless another machine has continued the copy since:
    then it is moved aside, and the copy is fetched. Raises ConfigError if the copy cannot be
    reached, or if it holds a run that is not this one.
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
                f"{root} and its copy {place.address} hold runs that know nothing of each other. "
                "Move the one aside that is not to be continued, or choose another run.name."
            )
        log.warning("%s was continued elsewhere since; it is fetched anew", place.address)
    if root.is_dir():
        log.warning("%s is moved aside, to %s", root, move_aside(root))
    try:
        fetch(place, names, root, owner)
    except OSError as error:
        raise unreachable(place.address, error) from error


def begin_copy(run: RunSection, place: CopyPlace, sign: str) -> None:
    """Make this process the one that writes the copy; with run.overwrite an old one is moved aside.
    Raises ConfigError."""
    try:
        if not run.resume and holds_run(place.names()):
            if not run.overwrite:
                raise _taken(place)
            log.warning("%s is moved aside, to %s", place.address, place.move_aside())
        add_signs(Path(run.dir) / run.name / SIGNS, (sign,))  # first: it may be killed in between
        place.take(sign)
    except ConfigError:
        raise
    except Exception as error:
        raise unreachable(place.address, error) from error


def fetch(place: CopyPlace, names: Iterable[str], root: Path, owner: str | None) -> None:
    """Copy a run here, with the newest whole checkpoint of each kind; the folder appears whole or
    not at all. A checkpoint that is not what was written is left out for the one before it."""
    log.warning("fetching %s to %s", place.address, root)
    root.parent.mkdir(parents=True, exist_ok=True)
    made = Path(tempfile.mkdtemp(dir=root.parent, prefix=".fetching-"))
    try:
        for name in names:
            if ".." in name.split("/"):
                raise OSError(f"the name {name!r} leads out of the folder")
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
    """Fetch the first of these steps whose files are those that were written."""
    for step in steps:
        for name in names:
            if name.startswith(f"{folder}/{step}/"):
                place.get(name, made / name)
        try:
            check_files(made / folder / str(step))
        except (OSError, ValueError) as error:
            log.warning("%s: checkpoint %s/%d is left out: %s", place.address, folder, step, error)
            shutil.rmtree(made / folder / str(step))
        else:
            return


def _taken(place: CopyPlace) -> ConfigError:
    return ConfigError(
        f"{place.address} (run.copy_to) holds a copy of a run already. Continue it with --resume, "
        "replace it with run.overwrite=true (the old one is moved aside), or choose another "
        "run.name."
    )
