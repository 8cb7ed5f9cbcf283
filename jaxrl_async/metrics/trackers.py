"""Send a run's metrics to trackers such as Weights & Biases, each on a separate thread.

    TrackedWriter ──> Recorder                     metrics.jsonl has every step in any case
          └──> TrackerThread ──> Tracker           a failing tracker is counted and logged

The trackers are in metrics/tracker_kinds.py.
"""

import importlib.util
import json
import logging
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from jaxrl_async.config.run_section import MetricsSection
from jaxrl_async.errors import MissingExtraError
from jaxrl_async.later import Later
from jaxrl_async.metrics.fault_counts import backoff_s
from jaxrl_async.metrics.recorder import MetricsWriter

if TYPE_CHECKING:  # it imports this module
    from jaxrl_async.metrics import tracker_kinds
else:
    tracker_kinds = Later("jaxrl_async.metrics.tracker_kinds")

log = logging.getLogger(__name__)

TRACKERS_FILE = "trackers.json"
"""In the run's folder: the run's id and link in each tracker, by the tracker's name."""
MAX_WAITING = 10_000
"""Maximum number of steps that wait for a tracker; beyond it the oldest are skipped."""
TRIES = 4
"""Maximum number of calls with one step's metrics before that step is skipped."""
BACKOFF_S = 1.0
"""Wait before the first retry, seconds; doubles up to 60."""
CLOSE_S = 15.0
"""Maximum wait for all trackers at the end of a run, seconds."""

_FILE = threading.Lock()


@dataclass(frozen=True, slots=True, kw_only=True)
class TrackedRun:
    """Data about a run that a tracker gets at its start."""

    name: str
    folder: Path
    config: Mapping[str, Any]  # the whole configuration, by section
    version: str  # of jaxrl_async
    continues: str | None  # what `Tracker.open` returned for the run that this one resumes


class Tracker(Protocol):
    """A service that tracks runs. All methods are called on one thread, and may raise."""

    name: str

    def open(self, run: TrackedRun) -> str:
        """Begin or continue the run in the service; return its identifier."""

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Send the metrics of a step; a step may be sent twice after a resume."""

    def link(self) -> str:
        """Return where to find the run, as text; called after `open`."""

    def close(self, failed: bool) -> None:
        """Send the remaining data and end the run in the service; failed: with an exception."""


def make_trackers(section: MetricsSection) -> list[Tracker]:
    """Return the trackers that are switched on. Raises MissingExtraError, and ConfigError if a
    tracker cannot work."""
    check_trackers(section)
    trackers: list[Tracker] = []
    if section.wandb is not None:
        trackers.append(tracker_kinds.WandbTracker(section.wandb))
    if section.mlflow is not None:
        trackers.append(tracker_kinds.MlflowTracker(section.mlflow))
    if section.trackio is not None:
        trackers.append(tracker_kinds.TrackioTracker(section.trackio.project))
    return trackers


def check_trackers(section: MetricsSection) -> None:
    """Raise MissingExtraError if a tracker is switched on whose package is not installed."""
    for package, settings in (
        ("wandb", section.wandb),
        ("mlflow", section.mlflow),
        ("trackio", section.trackio),
    ):
        if settings is not None and not _is_installed(package):
            raise MissingExtraError(
                f"metrics.{package} needs the package {package}, which is not installed. Run "
                f"`pip install 'jaxrl_async[{package}]'` or set metrics.{package}=null."
            )


def _is_installed(package: str) -> bool:
    """Return whether a package is installed; a folder of its name, such as W&B's own, does not
    count."""
    spec = importlib.util.find_spec(package)
    return spec is not None and spec.origin is not None


class TrackerThread:
    """Feeds one tracker. `put` never waits or raises; nor do close and `failures`."""

    def __init__(self, tracker: Tracker, run: TrackedRun, backoff_first_s: float = BACKOFF_S):
        """Begin the run in the tracker, on the new thread."""
        self._tracker, self._run, self._backoff_s = tracker, run, backoff_first_s
        self._steps: deque[tuple[int, dict[str, float]]] = deque()
        self._changed = threading.Condition()
        self._closing, self._failed = threading.Event(), False
        self._failures, self._lost, self._is_failing = 0, 0, False
        self._thread = threading.Thread(target=self._work, name=f"{tracker.name}", daemon=True)
        self._thread.start()

    def put(self, step: int, values: Mapping[str, float]) -> None:
        """Queue a step's metrics for sending."""
        with self._changed:
            if len(self._steps) >= MAX_WAITING:
                self._steps.popleft()
                self._lost += 1
            self._steps.append((step, dict(values)))
            self._changed.notify()

    def counts(self) -> tuple[int, int]:
        """Return the numbers of failed calls and of skipped steps so far."""
        with self._changed:
            return self._failures, self._lost

    def begin_to_close(self, failed: bool) -> None:
        """Accept no more steps: the thread sends the waiting ones, trying each once, and ends."""
        with self._changed:
            self._failed = failed
            self._closing.set()
            self._changed.notify()

    def join(self, timeout_s: float) -> None:
        """Wait for the thread, at most timeout_s, and log the steps that did not reach the
        tracker."""
        self._thread.join(timeout_s)
        with self._changed:
            lost, late = self._lost, len(self._steps)
        if late or self._thread.is_alive():
            log.warning(
                "%s did not end within %.0f s: the last steps sent to it (%d and more) may be "
                "missing there. metrics.jsonl has all",
                self._tracker.name,
                timeout_s,
                late,
            )
        if lost:
            text = "%s lacks %d steps of this run; metrics.jsonl has all"
            log.warning(text, self._tracker.name, lost)

    def _work(self) -> None:
        if not self._open_run():
            return
        while (step := self._next()) is not None:
            if not self._try(lambda step=step: self._tracker.log(*step), TRIES):  # type: ignore[misc]
                with self._changed:
                    self._lost += 1
        self._try(lambda: self._tracker.close(self._failed), 1)

    def _open_run(self) -> bool:
        """Begin the run in the service, retrying without limit; return False if all tries
        failed."""

        def begin() -> None:
            known_by = self._tracker.open(self._run)
            link = self._tracker.link()
            _remember(self._run.folder, self._tracker.name, known_by, link)
            log.info("%s: %s", self._tracker.name, link)

        if self._try(begin, None):
            return True
        with self._changed:
            self._lost += len(self._steps)
            self._steps.clear()
        return False

    def _next(self) -> tuple[int, dict[str, float]] | None:
        """Wait for a step; return None at the end."""
        with self._changed:
            self._changed.wait_for(lambda: self._steps or self._closing.is_set())
            return self._steps.popleft() if self._steps else None

    def _try(self, call: Callable[[], None], tries: int | None) -> bool:
        """Call until it does not raise, at most `tries` times (None: no limit), or once more at the
        end; return whether it succeeded."""
        failed = 0
        while True:
            try:
                call()
            except Exception as error:
                self._count(error)
                failed += 1
                if failed == tries or self._closing.is_set():
                    return False
                self._closing.wait(backoff_s(self._backoff_s, failed - 1))
            else:
                self._is_failing = False
                return True

    def _count(self, error: Exception) -> None:
        with self._changed:
            self._failures += 1
        if not self._is_failing:  # once each time it starts to fail
            name, reason = self._tracker.name, f"{type(error).__name__}: {error}"
            log.warning("%s fails; the run continues and retries it: %s", name, reason)
        self._is_failing = True


class TrackedWriter:
    """A writer of metrics that also sends them to trackers. Usable from any thread."""

    writes = True

    def __init__(self, writer: MetricsWriter, trackers: Sequence[TrackerThread]) -> None:
        """Wrap `writer`, which gets everything first, with the trackers' failures so far."""
        self._writer, self._trackers = writer, tuple(trackers)
        self.samples = writer.samples  # which are not sent to trackers
        self._lock, self._reported = threading.Lock(), (0, 0)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Write a step's metrics, and send them."""
        values = {**values, **self._faults()}
        self._writer.log(step, values)
        for tracker in self._trackers:
            tracker.put(step, values)

    def close(self) -> None:
        """Send the remaining data, within CLOSE_S, and stop writing. Idempotent. If called while an
        exception is handled, it reports to the trackers that the run failed."""
        failed = sys.exc_info()[0] is not None
        for tracker in self._trackers:
            tracker.begin_to_close(failed)
        end_s = time.monotonic() + CLOSE_S
        for tracker in self._trackers:
            tracker.join(max(end_s - time.monotonic(), 0.0))
        self._trackers = ()
        self._writer.close()

    def _faults(self) -> dict[str, float]:
        with self._lock:
            counts = [tracker.counts() for tracker in self._trackers]
            now = sum(f for f, _ in counts), sum(lost for _, lost in counts)
            before, self._reported = self._reported, now
        return {
            "faults/tracker_failures": float(now[0] - before[0]),
            "faults/tracker_lost_steps": float(now[1] - before[1]),
        }


def remembered(folder: Path) -> dict[str, dict[str, str]]:
    """Return id and link of the run in each tracker, by the tracker's name; empty without
    trackers."""
    try:
        return dict(json.loads((folder / TRACKERS_FILE).read_text("utf-8")))
    except (OSError, ValueError):
        return {}


def _remember(folder: Path, tracker: str, known_by: str, link: str) -> None:
    with _FILE:
        known = {**remembered(folder), tracker: {"id": known_by, "link": link}}
        fresh = folder / (TRACKERS_FILE + ".tmp")
        fresh.write_text(json.dumps(known, indent=1) + "\n", "utf-8")
        fresh.replace(folder / TRACKERS_FILE)
