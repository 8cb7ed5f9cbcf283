"""The thread that copies a run to its remote address during training.

    run's folder ──check every second──> FolderMirror.update() ──failed──> back off ──> retry

The trainer never waits for it. At the end, the run waits until the copy is complete or END_TRIES
attempts have failed.
"""

import logging
import threading
import time
import uuid
from collections.abc import Mapping
from pathlib import Path

from jaxrl_async.config.schema import RunSection
from jaxrl_async.errors import FolderLost, in_a_line
from jaxrl_async.metrics.fault_counts import backoff_s
from jaxrl_async.metrics.recorder import MetricsWriter
from jaxrl_async.mirror.bring_back import begin_copy
from jaxrl_async.mirror.copy_pass import FolderMirror, TakenOver
from jaxrl_async.mirror.remote_copy import open_target

PERIOD_S = 30.0
"""Interval between copies without a new checkpoint, seconds; at least REST_FACTOR times the last
copy's duration."""
REST_FACTOR = 10.0
CHECK_S = 1.0
"""Interval between checks for a finished checkpoint, seconds."""
END_TRIES = 6
"""Attempts at the end, with waits of 1, 2, 4, ... s between them."""

log = logging.getLogger(__name__)


class RunCopy:
    """Copies one run from `begin` until the `with` block ends. A no-op without run.copy_to."""

    def __init__(self) -> None:
        """Start nothing yet."""
        self._address, self._root = "", Path()
        self._mirror: FolderMirror | None = None
        self._stopped = False  # another process now writes the copy, or the folder is gone
        self._thread: threading.Thread | None = None
        self._ending, self._lock = threading.Event(), threading.Lock()
        self._failures, self._reported, self._problem = 0, 0, ""

    def begin(self, run: RunSection, keep: int) -> None:
        """Start copying a run whose folder exists. Raises ConfigError.

        keep: number of newest checkpoints to keep.
        """
        if run.copy_to is None:
            return
        target, sign = open_target(run.copy_to, run.name), uuid.uuid4().hex
        begin_copy(run, target, sign)
        self._address, self._root = target.address, Path(run.dir) / run.name
        self._mirror = FolderMirror(self._root, target, keep, sign)
        self._problem = "nothing has been copied yet"
        self._thread = threading.Thread(target=self._run, name="copy of the run", daemon=True)
        _COPIES.append(self)
        self._thread.start()

    def contains(self, folder: Path) -> bool:
        """Return whether this folder is the run's folder or below it."""
        return folder.absolute().is_relative_to(self._root.absolute())

    def new_failures(self) -> int:
        """Return the number of failed attempts since the last call. Thread safe."""
        with self._lock:
            new, self._reported = self._failures - self._reported, self._failures
            return new

    def __enter__(self) -> "RunCopy":
        return self

    def __exit__(self, *_: object) -> None:
        if self._thread is None:
            return
        self._ending.set()
        self._thread.join()
        _COPIES.remove(self)
        if self._problem:
            log.error("%s", self.verdict()[0])

    def verdict(self) -> list[str]:
        """Return one line with the copy's address and whether it is complete; empty: no copy."""
        if self._thread is None:
            return []
        if not self._problem:
            return [f"copy of the run  {self._address} (complete)"]
        return [
            f"copy of the run  {self._address} is NOT complete: {self._problem}. The local folder "
            "is complete: fix the problem and use --resume to copy it again"
        ]

    def _run(self) -> None:
        """Copy until the end, on this object's thread."""
        assert self._mirror is not None
        due_s, failures = 0.0, 0
        while not self._ending.wait(CHECK_S):
            now_s = time.monotonic()
            if now_s < due_s and (failures or not self._mirror.has_finished()):
                continue
            failures = 0 if self._try_to_copy() else failures + 1
            if self._stopped:
                return
            took_s = time.monotonic() - now_s
            wait_s = backoff_s(1.0, failures) if failures else max(PERIOD_S, REST_FACTOR * took_s)
            due_s = time.monotonic() + wait_s
        for attempt in range(END_TRIES):
            if self._try_to_copy() or self._stopped:
                return
            if attempt + 1 < END_TRIES:
                time.sleep(backoff_s(1.0, attempt))

    def _try_to_copy(self) -> bool:
        """Make one attempt; return whether everything is in the copy."""
        assert self._mirror is not None
        try:
            self._mirror.update()
        except Exception as error:  # error types depend on the file system
            with self._lock:
                self._failures += 1
            self._problem = f"{type(error).__name__}: {in_a_line(error, 200)}"
            self._stopped = isinstance(error, TakenOver | FolderLost)
            log.warning("copying the run to %s failed: %s", self._address, self._problem)
            return False
        self._problem = ""
        return True


_COPIES: list[RunCopy] = []
"""Active copies of this process's runs."""


class CopyCountingWriter:
    """A metrics writer that adds the number of failed copy attempts since the last line."""

    writes = True

    def __init__(self, writer: MetricsWriter, copy: RunCopy) -> None:
        """Wrap `writer` and forward everything to it."""
        self._writer, self._copy = writer, copy
        self.samples, self.close = writer.samples, writer.close

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Write a step's metrics."""
        failed = float(self._copy.new_failures())
        self._writer.log(step, {**values, "faults/copy_failures": failed})


def count_copy_failures(writer: MetricsWriter, folder: Path) -> MetricsWriter:
    """Return the metrics writer of a run, wrapped to count failures of its copy if it has one.

    folder: the run's folder, or one below it.
    """
    copy = next((c for c in _COPIES if c.contains(folder)), None)
    return writer if copy is None else CopyCountingWriter(writer, copy)
