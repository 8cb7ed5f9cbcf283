"""Checkpoints on a bucket, which orbax and TensorStore write from every host (checkpoint.dir).

    DIR/NAME/STEP/
        state/ loop/ rollouts/ ...   written by orbax, each process its own shards
        records/                     the run's metrics, ledger, ...: see bring_back_records
        checksums.json               what the bucket said of each object: written last, goes first

A bucket renames nothing, but an object appears whole or not at all: what has no checksums.json is
no checkpoint, and is removed at the next use. The digests are those that the bucket computes of
what it has received: a check lists the objects and reads none of them.
"""

import errno
import importlib
import json
import logging
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from jaxrl_async.config.run_section import CheckpointSection, RunSection
from jaxrl_async.errors import ConfigError, in_a_line
from jaxrl_async.run.checkpoint.seal import CHECKSUMS, UNREADABLE, GivenUpReading, saved_steps
from jaxrl_async.run.folder import Paths, holds_something, move_aside

ASIDE = CHECKSUMS + UNREADABLE
"""Name of the checksums of a checkpoint that a resumed run has passed over."""
RECORDS = "records"
REMOVED_AT_ONCE = 16
FACTS = ("size", "crc32c", "md5Hash")
"""What the bucket tells of an object; one that was composed of others has no md5Hash."""

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class BucketPlace:
    """The checkpoints of one run on a bucket."""

    directory: Any  # DIR/NAME, of etils.epath
    system: Any  # of fsspec
    root: str  # DIR/NAME as the file system knows it

    def written(self, step: int) -> Any:
        """Return the step's own folder: nothing is renamed."""
        return self.directory / str(step)

    def make_room(self, step: int) -> None:
        """Remove the step, its marks first, and all other unfinished saves."""
        with _as_os_errors(self.directory):
            self._remove(str(step))
        self.sweep()

    def complete(self, step: int, run: Paths | None) -> None:
        """Add the run's records, and write what the bucket says of each object, last."""
        with _as_os_errors(self.directory):
            for path in () if run is None else run.records:
                if path.is_file():  # it grows meanwhile: what is read once is what is written
                    content = path.read_bytes()
                    self.system.pipe_file(f"{self.root}/{step}/{RECORDS}/{path.name}", content)
            text = json.dumps(self._objects(step), indent=0)
            self.system.pipe_file(f"{self.root}/{step}/{CHECKSUMS}", text.encode())

    def sweep(self) -> None:
        """Remove all that has a step's name and neither checksums nor ones that were set aside."""
        with _as_os_errors(self.directory):
            marks = self._marks()
            for step, names in marks.items():
                if not names & {CHECKSUMS, ASIDE}:
                    log.warning("%s is an unfinished save: it is removed", self.directory / step)
                    self._remove(step)

    def sweep_failed(self, step: int) -> None:
        """Leave it: threads may still write there, and the next save or start removes it."""

    def steps(self) -> list[int]:
        """Return the steps with checksums, oldest first."""
        with _as_os_errors(self.directory):
            return sorted(int(s) for s, names in self._marks().items() if CHECKSUMS in names)

    def is_sealed(self, step: int) -> bool:
        """Return True: nothing else counts as a checkpoint here."""
        return True

    def check(self, step: int, give_up: Callable[[], bool] = lambda: False) -> None:
        """Raise OSError if the bucket's properties of an object differ from those at the write;
        GivenUpReading if `give_up` returns True."""
        folder = self.directory / str(step)
        if give_up():
            raise GivenUpReading(folder)
        with _as_os_errors(folder):
            try:
                content = self.system.cat_file(f"{self.root}/{step}/{CHECKSUMS}")
            except FileNotFoundError:
                content = None
            present = self._objects(step)
        if content is None:
            raise OSError(f"{folder} has no {CHECKSUMS}: nothing says what was written")
        try:
            wanted = json.loads(content)
        except ValueError:
            wanted = None
        if not isinstance(wanted, dict):
            raise OSError(f"{folder / CHECKSUMS} is not what was written")
        for name in sorted(wanted.keys() | present.keys()):
            if name not in present:
                raise OSError(f"{folder / name} is missing")
            if name not in wanted or not _are_alike(wanted[name], present[name]):
                raise OSError(f"{folder / name} is not what was written: the bucket's sums differ")

    def check_links(self, step: int) -> None:
        """Do nothing: a bucket has no links."""

    def set_aside(self, step: int) -> str:
        """Rename its checksums, which are one object."""
        with _as_os_errors(self.directory):
            where = f"{self.root}/{step}"
            self.system.pipe_file(f"{where}/{ASIDE}", self.system.cat_file(f"{where}/{CHECKSUMS}"))
            self._remove_object(f"{where}/{CHECKSUMS}")
        return f"{step}/{ASIDE}"

    def forget_aside(self, kept: str) -> list[str]:
        """Remove what was set aside, but for `kept`."""
        with _as_os_errors(self.directory):
            marks = self._marks().items()
            gone = [s for s, n in marks if ASIDE in n and CHECKSUMS not in n]
            gone = sorted(step for step in gone if step != kept.partition("/")[0])
            for step in gone:
                self._remove(step)
        return gone

    def forget_old(self, newest: int, keep: int) -> None:
        """Remove all but the last `keep` up to `newest`."""
        for step in [s for s in self.steps() if s <= newest][:-keep]:
            with _as_os_errors(self.directory):
                self._remove(str(step))

    def records(self, step: int) -> dict[str, bytes]:
        """Return the run's records as they were at this step, by name."""
        with _as_os_errors(self.directory):
            names = [n for n in self._objects(step) if n.startswith(RECORDS + "/")]
            return {
                name.removeprefix(RECORDS + "/"): bytes(
                    self.system.cat_file(f"{self.root}/{step}/{name}")
                )
                for name in names
            }

    def _objects(self, step: int) -> dict[str, dict[str, Any]]:
        """Return what the bucket says of the objects of a step, but for its marks, by name."""
        found = self._find(f"{self.root}/{step}")
        return {
            name: {fact: facts.get(fact) for fact in FACTS}
            for name, facts in found.items()
            if name not in (CHECKSUMS, ASIDE)
        }

    def _marks(self) -> dict[str, set[str]]:
        """Return the steps that have objects, with the names of those directly below each."""
        marks: dict[str, set[str]] = {}
        for name in self._find(self.root):
            step, _, rest = name.partition("/")
            if step.isascii() and step.isdigit() and step == str(int(step)) and rest:
                marks.setdefault(step, set()).add(rest)
        return marks

    def _find(self, where: str) -> dict[str, Any]:
        """Return the objects below a place, by their names from there on."""
        self.system.invalidate_cache()
        try:
            found = self.system.find(where, detail=True)
        except FileNotFoundError:
            return {}
        named = {path[len(where) :].lstrip("/"): facts for path, facts in found.items()}
        return {name: facts for name, facts in named.items() if name and not name.endswith("/")}

    def _remove(self, step: str) -> None:
        """Remove the objects of a step; what makes it a checkpoint goes first."""
        where = f"{self.root}/{step}"
        names = self._find(where)
        for mark in (CHECKSUMS, ASIDE):
            if mark in names:
                self._remove_object(f"{where}/{mark}")
        with ThreadPoolExecutor(REMOVED_AT_ONCE, thread_name_prefix="bucket") as pool:
            others = (f"{where}/{name}" for name in names if name not in (CHECKSUMS, ASIDE))
            list(pool.map(self._remove_object, others))

    def _remove_object(self, path: str) -> None:
        try:
            self.system.rm_file(path)
        except FileNotFoundError:
            return


def open_bucket(address: str, name: str) -> BucketPlace:
    """Return where the checkpoints of the run of this name lie below an address; nothing is made.
    Raises ConfigError."""
    whole = f"{address.rstrip('/')}/{name}"
    try:
        fsspec = importlib.import_module("fsspec")
        epath = importlib.import_module("etils.epath")
        system, root = fsspec.core.url_to_fs(whole)
        directory = epath.Path(whole)
    except Exception as error:  # each file system has its own kinds
        raise _unusable(whole, error) from error
    return BucketPlace(directory, system, root.rstrip("/"))


def bring_back_records(section: CheckpointSection, run: RunSection) -> bool:
    """Make the run's folder from its newest checkpoint on a bucket if it is to be resumed and is
    not here, or was continued elsewhere since (then it is moved aside). Return whether there is
    such a checkpoint.

    Raises ConfigError if the bucket cannot be read, if it holds checkpoints of the run and this is
    a new one, or if the run saved elsewhere before.
    """
    root = Path(run.dir) / run.name
    if section.dir is None:
        if not saved_steps(Paths(root).checkpoints):
            _check_same_place(section, run)
        return False
    place = open_bucket(section.dir, run.name)
    try:
        steps = place.steps()
        if not steps:
            _check_same_place(section, run)
            return False
        if not (run.resume or run.resume_or_start):
            raise ConfigError(
                f"{place.directory} (checkpoint.dir) holds checkpoints of a run already. Continue "
                "it with --resume, choose another run.name, or remove them from the bucket "
                "(run.overwrite does not: nothing is moved there)."
            )
        records = _newest_records(place, steps)
    except OSError as error:
        raise _unusable(str(place.directory), error) from error
    if holds_something(root):
        known = Paths(root).metrics
        before = records.get(known.name, b"")
        if known.is_file() and known.read_bytes().startswith(before):
            return True
        log.warning("%s was continued elsewhere since, as %s shows", root, place.directory)
        log.warning("%s is moved aside, to %s", root, move_aside(root))
    log.warning("the records of the run are fetched from %s to %s", place.directory, root)
    root.mkdir(parents=True, exist_ok=True)
    for name, content in records.items():
        if "/" not in name:
            (root / name).write_bytes(content)
    return True


def _check_same_place(section: CheckpointSection, run: RunSection) -> None:
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


def _newest_records(place: BucketPlace, steps: list[int]) -> Mapping[str, bytes]:
    """Return the records of the newest checkpoint whose objects are those that were written."""
    for step in reversed(steps):
        try:
            place.check(step)
        except OSError as error:
            if error.errno is not None:
                raise
            log.warning("%s", error)
            continue
        return place.records(step)
    raise OSError(f"none of the checkpoints {steps} is what was written")


def _are_alike(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Return whether size and sums are equal, where both are known."""
    pairs = [(one.get(fact), other.get(fact)) for fact in FACTS]
    told = [(a, b) for a, b in pairs if a is not None and b is not None]
    return bool(told) and all(a == b for a, b in told)


@contextmanager
def _as_os_errors(address: Any) -> Iterator[None]:
    """Turn what a bucket's client raises into OSError that says it may pass (see is_passing)."""
    try:
        yield
    except OSError as error:
        if error.errno is not None:
            raise
        raise _remote(address, error) from error
    except Exception as error:  # of aiohttp, google.auth and others
        raise _remote(address, error) from error


def _remote(address: Any, error: Exception) -> OSError:
    what = f"{address}: {type(error).__name__}: {in_a_line(error, 200)}"
    return OSError(errno.EREMOTEIO, what)


def _unusable(address: str, error: Exception) -> ConfigError:
    remedy = (
        "Install what reads gs://: pip install gcsfs"
        if isinstance(error, ImportError)
        else "See that the bucket is there and that this machine may read and write it"
    )
    return ConfigError(
        f"checkpoint.dir: {address} cannot be used ({type(error).__name__}: "
        f"{in_a_line(error, 200)}). {remedy}, or leave checkpoint.dir out."
    )
