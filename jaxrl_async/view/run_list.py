"""Find the runs of some folders, again and again: a run that begins later appears on the page."""

import os
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from itertools import count
from pathlib import Path

from jaxrl_async.errors import ConfigError
from jaxrl_async.metrics.recorder import METRICS_FILE, WARM_START
from jaxrl_async.view.watched import RunsByName, WatchedRun

MAX_RUNS = 500
"""Maximum number of runs on one page; the oldest further ones are left out, which the page says."""
SEARCH_S = 2.0
"""Minimum interval between two searches of the folders, seconds."""
DEPTH = 3
"""Levels of folders that are searched: of runs, of their adapters."""


class RunList:
    """The runs of some folders: those that exist, and those that begin later. Any thread."""

    def __init__(
        self, folders: Sequence[Path], clock: Callable[[], float] = time.monotonic
    ) -> None:
        """Search a first time. Raises ConfigError if a path is not a folder.

        folders: of runs, or of folders of runs.
        """
        for folder in folders:
            if not folder.is_dir():
                what = "this is a file" if folder.exists() else "there is no such folder"
                raise ConfigError(f"{folder}: {what}. Give the folder of a run, or of runs.")
        self._folders, self._clock = tuple(folders), clock
        self._lock = threading.Lock()
        self._known: dict[Path, WatchedRun] = {}
        self._searched_at = -SEARCH_S
        self._runs = RunsByName()
        self.now()

    def now(self) -> RunsByName:
        """Return the runs as of now, or of up to SEARCH_S ago."""
        with self._lock:
            if self._clock() - self._searched_at >= SEARCH_S:
                self._search()
                self._searched_at = self._clock()
            return self._runs

    def _search(self) -> None:
        found = {path.resolve() for folder in self._folders for path in runs_in(folder, DEPTH)}
        newest = sorted(found, key=lambda path: (-_changed_at(path), path))[:MAX_RUNS]
        self._known = {path: self._known[path] for path in newest if path in self._known}
        new = sorted(path for path in newest if path not in self._known)
        names = [run.name for run in self._known.values()]
        for path, name in zip(new, unique_names(new, names), strict=True):
            self._known[path] = WatchedRun(path, name)
        runs = RunsByName({run.name: run for run in self._known.values()})
        runs.left_out = len(found) - len(newest)
        runs.folders = tuple(str(folder) for folder in self._folders)
        self._runs = runs


def runs_in(folder: Path, depth: int) -> list[Path]:
    """Return the folder itself if it is a run's, or else the runs in it. A run that has no step yet
    has a configuration or a warm start; adapters of one run are runs, too."""
    if _is_file(folder / METRICS_FILE):
        return [folder]
    inner = []
    if depth:
        for child in _folders_in(folder):
            inner += runs_in(child, depth - 1)
    begins = ("config.yaml", f"{WARM_START}/{METRICS_FILE}")
    return inner or ([folder] if any(_is_file(folder / name) for name in begins) else [])


def _folders_in(folder: Path) -> list[Path]:
    try:
        return sorted(
            path
            for path in folder.iterdir()
            if path.name != WARM_START and not path.name.startswith(".") and path.is_dir()
        )
    except OSError:  # not permitted, or just removed
        return []


def _is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except OSError:
        return False


def _changed_at(folder: Path) -> float:
    for name in (METRICS_FILE, "config.yaml"):
        try:
            return (folder / name).stat().st_mtime
        except OSError:
            continue
    return 0.0


def unique_names(paths: Sequence[Path], taken: Iterable[str]) -> list[str]:
    """Return a name for each path: its last part, or as many as make it unique. Bytes of a path
    that are not UTF-8 are replaced, since a browser could not send them back."""
    used, names = set(taken), list[str]()
    paths = [Path(os.fsencode(path).decode("utf-8", "replace")) for path in paths]
    for path in paths:
        ends = [Path(*path.parts[-count:]) for count in range(1, len(path.parts) + 1)]
        ambiguous = {Path(*p.parts[-len(e.parts) :]) for e in ends for p in paths if p != path}
        name = next(
            (str(end) for end in ends if end not in ambiguous and str(end) not in used), str(path)
        )
        if name in used:  # two paths that differ only in bytes that were replaced
            name = next(n for i in count(2) if (n := f"{name} ({i})") not in used)
        used.add(name)
        names.append(name)
    return names
