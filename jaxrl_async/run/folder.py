"""The run folder: where everything of a run lies."""

import fcntl
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from jaxrl_async.config.load import dump
from jaxrl_async.config.schema import Config, Run
from jaxrl_async.errors import ConfigError

log = logging.getLogger(__name__)


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
    def ledger(self) -> Path:
        """What became of each group, one JSON object each."""
        return self.root / "ledger.jsonl"

    @property
    def schedule(self) -> Path:
        """In which order the run's threads did what, one JSON object each: run/schedule.py."""
        return self.root / "schedule.jsonl"

    @property
    def stacks(self) -> Path:
        """Stacks of all threads, where the watchdog stopped the run."""
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
    def policy(self) -> Path:
        """The final policy: a Hugging Face directory."""
        return self.root / "policy"

    @property
    def reward_model(self) -> Path:
        """The reward model that run.job=reward_model trained: a Hugging Face directory."""
        return self.root / "reward_model"

    @property
    def report(self) -> Path:
        """The run on one HTML page."""
        return self.root / "report.html"


def write_config(config: Config, paths: Paths) -> None:
    """The run's configuration beside it, without what differs between processes and starts."""
    own = dict.fromkeys(("coordinator", "num_processes", "process_id"))
    section = config.distributed.model_copy(update=own)
    of_all = config.model_copy(update={"distributed": section})
    paths.config.write_text(dump(of_all), encoding="utf-8")


def settled(run: Run) -> Run:
    """The same with run.resume decided where run.resume_or_start leaves it open. ConfigError."""
    if not run.resume_or_start:
        return run
    if run.overwrite:
        raise ConfigError(
            "run.resume_or_start and run.overwrite exclude each other: the first continues a run "
            "that is there, the second replaces it. Set one of them."
        )
    return run.model_copy(update={"resume": _holds_something(Path(run.dir) / run.name)})


def prepare(config: Config | Run) -> Paths:
    """Make the run's folder; find it with run.resume; with run.overwrite move an old one aside.

    Raises ConfigError where the folder holds a run and neither is set, where both are, where there
    is nothing to resume, or where an entry of the folder leads out of it.
    """
    run = config.run if isinstance(config, Config) else config
    paths = Paths(Path(run.dir) / run.name)
    if run.resume and run.overwrite:
        raise ConfigError(
            "run.resume and run.overwrite exclude each other: the first continues the run, the "
            "second starts anew. Set one of them."
        )
    if run.resume:
        if not paths.root.is_dir():
            raise ConfigError(
                f"{paths.root}: there is no run to resume (run.dir={run.dir}, run.name="
                f"{run.name}). Leave out --resume to start one, or correct run.name."
            )
        check_links(paths.root)
        return paths
    if _holds_something(paths.root):
        if not run.overwrite:
            raise ConfigError(
                f"{paths.root} holds a run already. Continue it with --resume, replace it with "
                "run.overwrite=true (the old one is moved aside), or choose another run.name."
            )
        paths.root.rename(free_name(paths.root))
    paths.root.mkdir(parents=True, exist_ok=True)
    return paths


@contextmanager
def claimed(paths: Paths) -> Iterator[None]:
    """Hold the run's folder: a second process that trains into it would spoil both.

    Raises ConfigError where another process holds it. The lock goes with the process.
    """
    with (paths.root / "lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError(
                f"{paths.root}: another process is training this run. Wait for it, stop it, or "
                "choose another run.name."
            ) from None
        except OSError as error:
            log.warning("%s cannot be locked (%s): see that no other run uses it", file.name, error)
        yield


def inside(root: Path, path: Path) -> bool:
    """Whether a path, all links followed, lies in `root`, which may be a link itself."""
    return Path(os.path.realpath(path)).is_relative_to(os.path.realpath(root))


def check_links(root: Path) -> None:
    """Raise ConfigError where an entry anywhere below `root` is a link that leads out of it."""
    for folder, folders, files in os.walk(root):
        for name in (*folders, *files):
            path = Path(folder) / name
            if path.is_symlink() and not inside(root, path):
                raise ConfigError(
                    f"{path} is a link that leads out of the run's folder: the run would read or "
                    f"write {os.path.realpath(path)}. Replace it by what it leads to, or choose "
                    "another run.name."
                )


def free_name(path: Path) -> Path:
    """path.1, path.2, ...: the first that does not exist."""
    number = 1
    while os.path.lexists(path.with_name(f"{path.name}.{number}")):
        number += 1
    return path.with_name(f"{path.name}.{number}")


def _holds_something(path: Path) -> bool:
    """Whether a run began here: one refused before leaves config.yaml and what is empty."""
    if path.is_file():
        raise ConfigError(
            f"{path} is a file; a run needs a folder there. Move it or change run.name."
        )
    return path.is_dir() and any(not _is_left_over(entry) for entry in path.iterdir())


def _is_left_over(path: Path) -> bool:
    if path.is_symlink():
        return False
    if path.is_dir():
        return not any(path.iterdir())
    return path.name == "config.yaml" or not path.stat().st_size
