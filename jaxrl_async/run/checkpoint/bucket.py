"""Checkpoints on a bucket, which orbax and TensorStore write from every host (checkpoint.dir).

    DIR/NAME/STEP/
        state/ loop/ rollouts/ ...   written by orbax, each process its own shards
        records/                     the run's metrics, ledger, ...: see bucket_start.py
        checksums.json               the bucket's report on each object: written last, goes first
    DIR/NAME/writer.json             the trainer that writes here: the last one that began

A bucket renames nothing, but an object appears whole or not at all: what has no checksums.json is
no checkpoint, and is removed at the next use. The digests are those that the bucket computes of
what it has received: a check lists the objects and reads none of them. A trainer that finds another
one's writer.json ends: it never refuses a start, since nothing shows whether the other one lives.
"""

import errno
import importlib
import json
import logging
import os
import shutil
import socket
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from jaxrl_async.errors import ConfigError, FolderLost, in_a_line
from jaxrl_async.metrics.trackers import TRACKERS_FILE
from jaxrl_async.run.checkpoint.seal import CHECKSUMS, UNREADABLE, HashingAbandoned
from jaxrl_async.run.folder import Paths

ASIDE = CHECKSUMS + UNREADABLE
"""Name of the checksums of a checkpoint that a resumed run has passed over."""
RECORDS, WRITER = "records", "writer.json"
BLOCK = 8 << 20
"""Bytes of a record that are in memory at a time."""
REMOVED_AT_ONCE = 16
FACTS = ("size", "crc32c", "md5Hash")
"""What the bucket reports of an object; one that was composed of others has no md5Hash."""

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Writer:
    """A trainer that writes a run's checkpoints."""

    sign: str
    host: str
    process: int
    began: str  # in UTC

    def __str__(self) -> str:
        """Return it for a sentence."""
        return f"process {self.process} on {self.host}, which began at {self.began}"


@dataclass(frozen=True, slots=True)
class BucketStorage:
    """The checkpoints of one run on a bucket. What writes them raises FolderLost, too, if another
    trainer has begun since."""

    directory: Any  # DIR/NAME, of etils.epath
    system: Any  # of fsspec
    root: str  # DIR/NAME as the file system knows it
    sign: str | None = None  # of the trainer that this process is; None: it only reads

    def written(self, step: int) -> Any:
        """Return the step's own folder: nothing is renamed."""
        return self.directory / str(step)

    def make_room(self, step: int) -> None:
        """Remove the step, its marks first, and all other unfinished saves. A run saves no step
        again that it has read: one that is there was found damaged, or was just saved and did not
        pass the check."""
        self._check_writer()
        with _as_os_errors(self.directory):
            self._remove(str(step))
        self.sweep()

    def complete(self, step: int, run: Paths | None) -> None:
        """Add the run's records, and write what the bucket says of each object, last."""
        self._check_writer()
        mark = f"{self.root}/{step}/{CHECKSUMS}"
        with _as_os_errors(self.directory):
            for path in () if run is None else _record_files(run):
                if path.is_file():  # it grows meanwhile: read once, up to its end
                    target = f"{self.root}/{step}/{RECORDS}/{path.name}"
                    with path.open("rb") as source, self.system.open(target, "wb") as file:
                        shutil.copyfileobj(source, file, BLOCK)
            self.system.pipe_file(mark, json.dumps(self._objects(step), indent=0).encode())
        try:
            self._check_writer()
        except FolderLost:  # it began meanwhile, and has not seen this one
            with _as_os_errors(self.directory):
                self._remove_object(mark)
            raise

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
        HashingAbandoned if `give_up` returns True."""
        folder = self.directory / str(step)
        if give_up():
            raise HashingAbandoned(folder)
        with _as_os_errors(folder):
            try:
                content = self.system.cat_file(f"{self.root}/{step}/{CHECKSUMS}")
            except FileNotFoundError:
                content = None
            present = self._objects(step)
        if content is None:
            raise OSError(f"{folder} has no {CHECKSUMS}: nothing says what was written")
        try:
            expected = json.loads(content)
        except ValueError:
            expected = None
        if not isinstance(expected, dict):
            raise OSError(f"{folder / CHECKSUMS} is not what was written")
        for name in sorted(expected.keys() | present.keys()):
            if name not in present:
                raise OSError(f"{folder / name} is missing")
            if name not in expected or not _agree(expected[name], present[name]):
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
            removed = [s for s, n in marks if ASIDE in n and CHECKSUMS not in n]
            removed = sorted(step for step in removed if step != kept.partition("/")[0])
            for step in removed:
                self._remove(step)
        return removed

    def forget_old(self, newest: int, keep: int) -> None:
        """Remove all but the last `keep` up to `newest`."""
        for step in [s for s in self.steps() if s <= newest][:-keep]:
            with _as_os_errors(self.directory):
                self._remove(str(step))

    def fetch_records(self, step: int, run: Paths) -> None:
        """Write the run's records as they were at this step into its folder, the metrics last."""
        with _as_os_errors(self.directory):
            there = self._objects(step)
            for path in sorted(_record_files(run), key=lambda p: p == run.metrics):
                if (name := f"{RECORDS}/{path.name}") in there:
                    fresh = path.with_name(path.name + ".tmp")
                    self.system.get_file(f"{self.root}/{step}/{name}", str(fresh))
                    fresh.replace(path)

    def record_size(self, step: int, path: Path) -> int:
        """Return the bytes that a file of the run's had at this step; 0: there was none."""
        with _as_os_errors(self.directory):
            facts = self._objects(step).get(f"{RECORDS}/{path.name}")
        return 0 if facts is None else int(facts["size"])

    def writer(self) -> Writer | None:
        """Return the trainer that writes here; None: none has begun."""
        with _as_os_errors(self.directory / WRITER):
            try:
                content = self.system.cat_file(f"{self.root}/{WRITER}")
            except FileNotFoundError:
                return None
            return Writer(**json.loads(content))

    def begin(self, sign: str) -> None:
        """Make this process the trainer that writes here."""
        began = datetime.now(UTC).isoformat(" ", "seconds")
        writer = Writer(sign, socket.gethostname(), os.getpid(), began)
        with _as_os_errors(self.directory):
            self.system.pipe_file(f"{self.root}/{WRITER}", json.dumps(asdict(writer)).encode())

    def _check_writer(self) -> None:
        """Raise FolderLost if another trainer has begun to write here since."""
        writer = None if self.sign is None else self.writer()
        if writer is not None and writer.sign != self.sign:
            raise FolderLost(
                f"{self.directory} is written by another trainer now: {writer}. This one saves "
                "nothing there any more. Let one of the two continue alone, or give one "
                "another run.name."
            )

    def _objects(self, step: int) -> dict[str, dict[str, Any]]:
        """Return what the bucket says of the objects of a step, but for its marks, by name."""
        objects = self._find(f"{self.root}/{step}")
        return {
            name: {fact: facts.get(fact) for fact in FACTS}
            for name, facts in objects.items()
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
        """Return the objects below a path, by their names relative to it."""
        self.system.invalidate_cache()
        try:
            objects = self.system.find(where, detail=True)
        except FileNotFoundError:
            return {}
        named = {path[len(where) :].lstrip("/"): facts for path, facts in objects.items()}
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


def open_bucket(address: str, name: str, sign: str | None = None) -> BucketStorage:
    """Return where the checkpoints of the run of this name lie below an address; nothing is made.
    sign: of this process, if it writes them. Raises ConfigError."""
    full = f"{address.rstrip('/')}/{name}"
    try:
        fsspec = importlib.import_module("fsspec")
        epath = importlib.import_module("etils.epath")
        system, root = fsspec.core.url_to_fs(full)
        directory = epath.Path(full)
    except Exception as error:  # each file system has its own kinds
        raise unusable_error(full, error) from error
    return BucketStorage(directory, system, root.rstrip("/"), sign)


def _record_files(run: Paths) -> tuple[Path, ...]:
    """Return the files that a run needs to continue elsewhere, whether they exist or not."""
    return (*run.records, run.root / TRACKERS_FILE)


def _agree(first: Mapping[str, object], other: Mapping[str, object]) -> bool:
    """Return whether size and sums are equal, where both are known."""
    pairs = [(first.get(fact), other.get(fact)) for fact in FACTS]
    known = [(a, b) for a, b in pairs if a is not None and b is not None]
    return bool(known) and all(a == b for a, b in known)


@contextmanager
def _as_os_errors(address: object) -> Iterator[None]:
    """Turn what a bucket's client raises into OSError that says it may pass (see is_transient)."""
    try:
        yield
    except OSError as error:
        if error.errno is not None:
            raise
        raise _remote_error(address, error) from error
    except Exception as error:  # of aiohttp, google.auth and others
        raise _remote_error(address, error) from error


def _remote_error(address: object, error: Exception) -> OSError:
    what = f"{address}: {type(error).__name__}: {in_a_line(error, 200)}"
    return OSError(errno.EREMOTEIO, what)


def unusable_error(address: str, error: Exception) -> ConfigError:
    """Return an error that says what to do."""
    remedy = (
        "Install what reads gs://: pip install gcsfs"
        if isinstance(error, ImportError)
        else "See that the bucket is there and that this machine may read and write it"
    )
    return ConfigError(
        f"checkpoint.dir: {address} cannot be used ({type(error).__name__}: "
        f"{in_a_line(error, 200)}). {remedy}, or leave checkpoint.dir out."
    )
