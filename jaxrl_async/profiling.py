"""Traces of chosen steps by JAX's profiler (run.profile): what the devices did, operation by
operation, and when the host waited for them.

    StepTraces.of(3) ──> ProcessTrace of this process ───> RUN/profile (metrics.trace_file)
                   └───> samplers.profile(3, on=True) ──the wire──> a ProcessTrace in each sampler

JAX's profiler traces a whole process, one trace at a time; samplers that are threads of the trainer
are in its trace. Each trace ends with its step, or after MOST_S or SAMPLER_S. Spans of
metrics.spans (`prefill`, `wait for the block`) are marked in it by their names.
"""

import logging
import shutil
import tempfile
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

import jax

from jaxrl_async.errors import JaxrlError, in_a_line
from jaxrl_async.metrics import spans
from jaxrl_async.metrics.trace_file import FOLDER, SUFFIXES, write_trace

log = logging.getLogger(__name__)

MOST_S = 60.0
"""Maximum duration of a trainer's trace, seconds. A step that waits longer for its groups gets a
second trace, of its update."""
SAMPLER_S = 5.0
"""Maximum duration of a sampler process's trace, seconds: a few hundred decode blocks, tens of
MB."""
MOST_SAMPLERS = 4
"""Maximum number of sampler processes that trace a step."""
MOST_SENT_BYTES = 64 << 20
"""Maximum size of a trace that a sampler sends to the trainer, bytes."""

_trace_lock = threading.Lock()  # held while this process is traced


class ProfileError(JaxrlError):
    """A trace could not be taken."""


class ProcessTrace:
    """A running trace of this process. Any thread.

    Attributes:
        timed_out: whether it was ended by its time limit.
    """

    def __init__(self, most_s: float) -> None:
        """Begin the trace, which ends automatically after most_s. Raises ProfileError if this
        process is already being traced, or its profiler cannot start."""
        self.timed_out = False
        if not _trace_lock.acquire(blocking=False):
            raise ProfileError("another trace of this process is under way")
        self._folder = Path(tempfile.mkdtemp(prefix="jaxrl_async-profile-"))
        self._lock, self._running = threading.Lock(), True
        self._error: Exception | None = None
        options = jax.profiler.ProfileOptions()
        options.python_tracer_level = 0  # Python function calls, larger than all the rest
        try:
            jax.profiler.start_trace(self._folder, profiler_options=options)
        except Exception as error:
            self._forget()
            _trace_lock.release()
            raise ProfileError(f"JAX's profiler does not start: {in_a_line(error)}") from error
        spans.annotate = jax.profiler.TraceAnnotation
        self._timer = threading.Timer(most_s, self._time_out)
        self._timer.daemon = True
        self._timer.start()

    def files(self) -> dict[str, bytes]:
        """End the trace, if it has not ended; return its files by trace_file.SUFFIXES. Raises
        ProfileError if JAX wrote none. To be called once."""
        self._timer.cancel()
        self._end()
        try:
            if self._error is not None:
                raise ProfileError(f"JAX's profiler has failed: {in_a_line(self._error)}")
            found = {suffix: list(self._folder.rglob(f"*{suffix}")) for suffix in SUFFIXES}
            if not all(len(paths) == 1 for paths in found.values()):
                names = sorted(p.name for p in self._folder.rglob("*") if p.is_file())
                raise ProfileError(f"JAX's profiler wrote {names}, and not one file of each kind")
            return {suffix: paths[0].read_bytes() for suffix, paths in found.items()}
        finally:
            self._forget()

    def drop(self) -> None:
        """End the trace and discard it."""
        self._timer.cancel()
        self._end()
        self._forget()

    def _time_out(self) -> None:
        self.timed_out = True
        self._end()

    def _end(self) -> None:
        with self._lock:  # the second caller waits until the files are written
            if not self._running:
                return
            self._running, spans.annotate = False, None
            try:
                jax.profiler.stop_trace()
            except Exception as error:
                self._error = error
            finally:
                _trace_lock.release()

    def _forget(self) -> None:
        shutil.rmtree(self._folder, ignore_errors=True)


class TracedSamplers(Protocol):
    """Sampler processes, which send their traces to the run's folder themselves."""

    def profile(self, step: int, *, on: bool) -> None:
        """Begin the traces of a step, or end them."""


class StepTraces:
    """Takes the traces of chosen steps for one trainer, on its thread. If a trace fails, that is
    logged, and the run continues."""

    def __init__(
        self,
        root: Path | None = None,
        steps: Sequence[int] = (),
        process: str = "trainer",
        samplers: TracedSamplers | None = None,
    ) -> None:
        """Start without a trace.

        Args:
            root: the run's folder. None: no step is traced.
            steps: the steps to trace.
            process: the name of this process in its traces.
            samplers: the samplers in separate processes; None: no separate processes.
        """
        self._root, self._process, self._samplers = root, process, samplers
        self._steps = frozenset(steps if root is not None else ())
        self._step, self._name = 0, process  # of the running trace
        self._trace: ProcessTrace | None = None

    @contextmanager
    def of(self, step: int) -> Iterator[None]:
        """Trace what happens inside the `with`, if this step is chosen."""
        if step not in self._steps:
            yield
            return
        self._step = step
        self._begin(self._process)
        if self._samplers is not None:
            self._samplers.profile(step, on=True)
        try:
            with jax.profiler.StepTraceAnnotation("step", step_num=step):
                yield
        finally:
            if self._samplers is not None:
                self._samplers.profile(step, on=False)
            self._end()
            self._step = 0

    def before_update(self) -> None:
        """Begin a second trace of this step if the first one timed out while waiting for groups,
        since it does not contain the update."""
        if self._trace is not None and self._trace.timed_out:
            self._end()
            self._begin(f"{self._process}-update")

    def _begin(self, name: str) -> None:
        self._name = name
        try:
            self._trace = ProcessTrace(MOST_S)
        except ProfileError as error:
            log.warning("profile: step %d of %s is not traced: %s", self._step, name, error)

    def _end(self) -> None:
        trace, self._trace = self._trace, None
        if trace is None or self._root is None:
            return
        try:
            files = trace.files()
        except ProfileError as error:
            log.warning("profile: step %d of %s has no trace: %s", self._step, self._name, error)
            return
        cut = f", of its first {MOST_S:g} s" if trace.timed_out else ""
        keep_trace(self._root, self._step, self._name, files, cut)


def keep_trace(
    root: Path, step: int, process: str, files: Mapping[str, bytes], note: str = ""
) -> None:
    """Write a trace into the run's folder and log how to open it; failures are logged."""
    try:
        write_trace(root, step, process, files)
    except OSError as error:
        log.warning("profile: the trace of step %d is lost: %s", step, in_a_line(error))
        return
    size = sum(map(len, files.values())) / 2**20
    log.info(
        "profile: step %d of %s is traced (%.1f MiB)%s: xprof --logdir %s, or its .json.gz in "
        "https://ui.perfetto.dev", step, process, size, note, root / FOLDER,
    )  # fmt: skip


NO_TRACES = StepTraces()
"""Traces nothing."""
