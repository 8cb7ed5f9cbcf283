"""The run folder: its paths, its checks, and its lock."""

import fcntl
import json
import logging
import os
import shutil
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from jaxrl_async.config.load import dump
from jaxrl_async.config.schema import Config, RunSection
from jaxrl_async.data.hub import hub_name_of
from jaxrl_async.errors import ConfigError, FolderLost
from jaxrl_async.metrics.recorder import (
    LOG_FILE,
    METRICS_FILE,
    STARTS_FILE,
    SUPERSEDED,
    WARM_START,
)
from jaxrl_async.metrics.trackers import TRACKERS_FILE
from jaxrl_async.model.policy import Policy
from jaxrl_async.model.quantize import is_quantized

log = logging.getLogger(__name__)

# Each process that begins to write a run's copy, or its checkpoints on a bucket, makes a sign, adds
# it to the folder's and only then puts it there. So a folder that does not know the sign that is
# there was continued on another machine.
SIGNS = "copied.json"
"""File in the run's folder: processes that have written the folder's copy (mirror)."""
WRITERS = "bucket_writers.json"
"""The same of the checkpoints on a bucket (run/checkpoint/bucket.py)."""

GIVEN = ".given"
"""Folder in run.dir, see given_folder."""


@dataclass(frozen=True, slots=True)
class Paths:
    """Files and folders of one run, all below root."""

    root: Path  # run.dir / run.name

    @property
    def config(self) -> Path:
        """The resolved configuration, YAML."""
        return self.root / "config.yaml"

    @property
    def metrics(self) -> Path:
        """One JSON object per step; keys in docs/metrics.md."""
        return self.root / "metrics.jsonl"

    @property
    def samples(self) -> Path:
        """Sample episodes with their rewards, one JSON object each."""
        return self.root / "samples.jsonl"

    @property
    def answers(self) -> Path:
        """Answers to the first held-out prompts at each evaluation, one JSON object each."""
        return self.root / "answers.jsonl"

    @property
    def ledger(self) -> Path:
        """The outcome of each group, one JSON object each."""
        return self.root / "ledger.jsonl"

    @property
    def schedule(self) -> Path:
        """The order of events in the run's threads, one JSON object a line (run/replay)."""
        return self.root / "schedule.jsonl"

    @property
    def records(self) -> tuple[Path, ...]:
        """The files of the run's own records, whether they exist or not."""
        appended = (self.metrics, self.samples, self.answers, self.ledger, self.schedule)
        superseded = (p.with_name(p.stem + SUPERSEDED) for p in appended)
        return (self.config, *appended, *superseded)

    @property
    def stacks(self) -> Path:
        """Stacks of all threads, written if the watchdog stops the run."""
        return self.root / "stacks.txt"

    @property
    def tensorboard(self) -> Path:
        """TensorBoard events."""
        return self.root / "tensorboard"

    @property
    def checkpoints(self) -> Path:
        """Orbax checkpoints, one folder per version."""
        return self.root / "checkpoints"

    @property
    def hugging_face(self) -> Path:
        """Hugging Face directories of the checkpoints' policies (checkpoint.hugging_face)."""
        return self.root / "hugging_face"

    @property
    def warm_start(self) -> "Paths":
        """The supervised warm start's own metrics, TensorBoard events and checkpoints."""
        return Paths(self.root / WARM_START)

    @property
    def policy(self) -> Path:
        """The final policy: a Hugging Face directory."""
        return self.root / "policy"

    @property
    def adapter(self) -> Path:
        """The final adapter alone, as PEFT reads it."""
        return self.root / "adapter"

    @property
    def base(self) -> Path:
        """The frozen weights that an adapter changes, if they are in no directory of the user's: a
        Hugging Face directory."""
        return self.root / "base"

    @property
    def reward_model(self) -> Path:
        """The reward model that run.job=reward_model trained: a Hugging Face directory."""
        return self.root / "reward_model"

    @property
    def report(self) -> Path:
        """The run on one HTML page."""
        return self.root / "report.html"


def given_folder(run: RunSection) -> Path:
    """Return the folder of a Python program's objects for this run that are kept as files."""
    return Path(run.dir) / GIVEN / run.name


def write_policy(policy: Policy, paths: Paths, base: str | None) -> Path:
    """Write a policy's weights as a Hugging Face directory, an adapter's changes added; return its
    path. The adapter alone is written next to it, as PEFT reads it.

    base: the directory of the weights that the adapter changes; None: those in the run's folder.
    """
    policy.save_pretrained(paths.policy)
    if policy.lora is not None:
        whole = base or str(paths.base)
        policy.save_adapter(paths.adapter, hub_name_of(whole))
        log_merged(paths.policy, whole, policy)
        log.info("%s is the adapter alone, as PEFT reads it", paths.adapter)
    return paths.policy


def log_merged(folder: Path, base: str, policy: Policy) -> None:
    """Log the origin of an adapter's policy in `folder`; base: the directory that it changes."""
    if is_quantized(policy.params):
        log.info(
            "%s is the dequantised base with the adapter's change added, as trained; it differs "
            "from the weights in %s by their rounding",
            folder,
            base,
        )
    else:
        log.info("%s is %s with the adapter's change added", folder, base)


def write_config(config: Config, paths: Paths) -> None:
    """Write the run's configuration into its folder, without settings that differ by process."""
    own = dict.fromkeys(("coordinator", "num_processes", "process_id"))
    section = config.distributed.model_copy(update=own)
    of_all = config.model_copy(update={"distributed": section})
    paths.config.write_text(dump(of_all), encoding="utf-8")


def settled(run: RunSection) -> RunSection:
    """Return the section with run.resume decided if run.resume_or_start leaves it open. Raises
    ConfigError."""
    if not run.resume_or_start:
        return run
    return run.model_copy(update={"resume": holds_something(Path(run.dir) / run.name)})


def look(run: RunSection) -> Paths:
    """Return the run's paths if a run may be started or resumed there; nothing is changed.

    Raises ConfigError if the folder holds a run and neither run.resume nor run.overwrite is set, if
    there is no run to resume, or if a link leads out of the folder.
    """
    paths = Paths(Path(run.dir) / run.name)
    if run.resume:
        if not paths.root.is_dir():
            raise ConfigError(
                f"{paths.root}: no run to resume (run.dir={run.dir}, run.name={run.name}). Leave "
                "out --resume to start one, or correct run.name."
            )
        check_links(paths.root)
    elif holds_something(paths.root) and not run.overwrite:
        raise ConfigError(
            f"{paths.root} holds a run already. Continue it with --resume, replace it with "
            "run.overwrite=true (the old one is moved aside), or choose another run.name."
        )
    return paths


@contextmanager
def claimed(run: RunSection) -> Iterator[Paths]:
    """Create the run's folder, or find it with run.resume, and lock it against a second process.

    With run.overwrite an old run is moved aside, unless another process has locked it. If an error
    occurs before anything was written, the folders are restored. The lock ends with the process.
    Raises ConfigError as `look` does, and if another process has locked the folder.
    """
    with ExitStack() as held:
        undo = held.enter_context(ExitStack())
        with _exclusive(_make_folder(Path(run.dir), undo)):
            paths = look(run)
            if paths.root.is_dir():
                undo.callback(_clear, paths.root, set(paths.root.iterdir()))
                held.enter_context(_lock_file(paths.root))
            if not run.resume and holds_something(paths.root):
                moved = paths.root.rename(free_name(paths.root))
                undo.callback(moved.rename, paths.root)
            if not paths.root.is_dir():
                _make_folder(paths.root, undo)
                undo.callback(_clear, paths.root, set[Path]())
                held.enter_context(_lock_file(paths.root))
        try:
            yield paths
        except BaseException:
            if run.resume or holds_something(paths.root):
                undo.pop_all()
            raise
        undo.pop_all()


def _make_folder(folder: Path, undo: ExitStack) -> Path:
    """Create a folder with its parents and return it; `undo` removes the created ones."""
    for missing in reversed([f for f in (folder, *folder.parents) if not f.exists()]):
        missing.mkdir(exist_ok=True)
        undo.callback(_remove_if_empty, missing)
    return folder


def _remove_if_empty(folder: Path) -> None:
    with suppress(OSError):
        folder.rmdir()


def _clear(folder: Path, before: set[Path]) -> None:
    """Remove the entries of a folder that it did not have before."""
    for entry in set(folder.iterdir()) - before:
        shutil.rmtree(entry) if entry.is_dir() and not entry.is_symlink() else entry.unlink()


LOCK = "lock"
"""Name of the file that the training process of a run holds open and locked."""


class FolderWatch:
    """Checks that the files that a run holds open are still in its folder; used in the process that
    holds the lock, by one thread at a time."""

    def __init__(
        self, root: Path, appended: Sequence[str] = (METRICS_FILE, "ledger.jsonl")
    ) -> None:
        """Remember the lock of the run in this folder. appended: names of files to which the run
        appends, all opened before the first `check`."""
        self._root, self._known = root, dict[Path, tuple[int, int]]()
        self._appended = appended
        self._look_at((LOCK,))

    def check(self) -> None:
        """Raise FolderLost if the folder, or a file to which the run appends, is gone or replaced.
        Raises another OSError if the file system does not say so."""
        for path, known in self._known.items():
            if _identity(path) != known:
                raise self.lost(path)
        self._look_at(self._appended)

    def lost(self, path: Path) -> FolderLost:
        """Return the error of a file that is no longer the run's."""
        return FolderLost(
            f"{path} is no longer the file that this run writes: {self._root} was "
            "removed, moved or replaced while the run was training. Nothing more is "
            "written there. Put the folder back, if it was moved, and continue with "
            "--resume; or start again with a run.dir that is not cleaned up."
        )

    def _look_at(self, names: Iterable[str]) -> None:
        """Remember these files, if they exist: the run holds them open until it ends, so their
        inodes are not reused."""
        for path in (self._root / name for name in names):
            if path not in self._known and (known := _identity(path)) is not None:
                self._known[path] = known


def _identity(path: Path) -> tuple[int, int] | None:
    """Return the device and the inode of a file; None if it does not exist."""
    try:
        facts = path.stat()
    except (FileNotFoundError, NotADirectoryError):
        return None
    return facts.st_dev, facts.st_ino


@contextmanager
def _exclusive(folder: Path) -> Iterator[None]:
    """Lock this folder while a run begins in it, if its file system can lock a folder."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        with suppress(OSError):
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


@contextmanager
def _lock_file(folder: Path) -> Iterator[None]:
    """Lock a folder, also if it is moved. Raises ConfigError if another process has locked it."""
    with (folder / LOCK).open("a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError(
                f"{folder}: another process is training this run. Wait for it, stop it, or "
                "choose another run.name."
            ) from None
        except OSError as error:
            log.warning(
                "%s cannot be locked (%s): make sure that no other run uses it", file.name, error
            )
        yield


WANDB = "wandb"
"""Folder of Weights & Biases in the run's folder."""


def check_links(root: Path) -> None:
    """Raise ConfigError if an entry anywhere below `root` is a link that leads out of it. Links of
    Weights & Biases to its own logs are ignored: the run uses nothing in its folder."""
    for folder, folders, files in os.walk(root):
        for name in (*folders, *files):
            path = Path(folder) / name
            if path.is_symlink() and not is_inside(root, path):
                raise ConfigError(
                    f"{path} is a link that leads out of the run's folder: the run would read or "
                    f"write {os.path.realpath(path)}. Replace it with its target, or choose "
                    "another run.name."
                )
        folders[:] = [name for name in folders if name != WANDB]


def move_aside(root: Path) -> Path:
    """Move a run's folder to the first free name with a number appended; return its new path.
    Raises ConfigError if another process trains in it."""
    with _lock_file(root):
        return root.rename(free_name(root))


def holds_something(path: Path) -> bool:
    """Return whether a run began here; a refused one leaves only BEGINNINGS."""
    if path.is_file():
        raise ConfigError(
            f"{path} is a file; a run needs a folder there. Move it or change run.name."
        )
    return path.is_dir() and any(not _is_left_over(entry) for entry in path.iterdir())


BEGINNINGS = (
    *("config.yaml", "schedule.jsonl", "tensorboard", WANDB, TRACKERS_FILE, SIGNS, WRITERS),
    *(LOG_FILE, STARTS_FILE),
)
"""Names of files and folders that are written before a run makes anything."""


def _is_left_over(path: Path) -> bool:
    if path.is_symlink():
        return False
    if path.name in BEGINNINGS:
        return True
    if path.is_dir():
        return all(_is_left_over(entry) for entry in path.iterdir())
    return not path.stat().st_size


# ---- names inside a folder, or free


def is_inside(root: Path, path: Path) -> bool:
    """Return whether a path is in `root` once all links are followed; `root` may be a link."""
    return Path(os.path.realpath(path)).is_relative_to(os.path.realpath(root))


def free_name(path: Path) -> Path:
    """Return the first of path.1, path.2, ... that does not exist."""
    number = 1
    while os.path.lexists(path.with_name(f"{path.name}.{number}")):
        number += 1
    return path.with_name(f"{path.name}.{number}")


# ---- signs


def read_signs(path: Path) -> tuple[str, ...]:
    """Return the signs in a file, oldest first: of this folder, or of what it was fetched from."""
    try:
        return tuple(json.loads(path.read_text("utf-8")))
    except (OSError, ValueError):
        return ()


def add_signs(path: Path, signs: Iterable[str]) -> None:
    """Add to the signs in a file."""
    text = json.dumps([*read_signs(path), *signs])
    fresh = path.with_name(path.name + ".tmp")
    fresh.write_text(text, "utf-8")
    fresh.replace(path)
