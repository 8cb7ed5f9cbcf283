"""The sampler processes that a run starts on its own machine and restarts when they end.

    LocalSamplers.run (a thread) ──starts──> python -m jaxrl_async.sample --join ADDRESS
                 ^                                      │ ended: killed, out of memory, an error
                 └──────────── backoff ─────────────────┘ too often: given up

Each process joins the run like a sampler on another machine; its output goes to a file in the run's
folder.
"""

import logging
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from jaxrl_async.config.schema import FaultsSection
from jaxrl_async.errors import RolloutError
from jaxrl_async.metrics.health import HEALTH_VARIABLE
from jaxrl_async.metrics.spans import TRACE_VARIABLE
from jaxrl_async.remote.wire.secret import SECRET_VARIABLE
from jaxrl_async.run.pinning import ProcessPlacement
from jaxrl_async.sampler.router.supervise import FORGIVEN_S, Act, Health, RestartLimits, decide

POLL_S = 0.2
"""Interval between two checks of the processes, seconds."""
EXIT_S = 2.0
"""Maximum wait for a process to exit on its own, seconds; then it gets SIGTERM. It may not have
joined yet and thus not know that the run has ended."""
CLOSE_S = 5.0
"""Maximum wait for all processes to end, seconds; then they are killed. Together with a save, it
must fit into checkpoint.grace_s."""
JOIN_S = 60.0
"""Maximum time in which a process must find the trainer, seconds: the trainer already listens, or
has died."""
LOG_TAIL = 2000
"""Number of characters of a process's output that the final error quotes."""

log = logging.getLogger(__name__)


@dataclass(slots=True, kw_only=True)
class Child:
    """One sampler process, and the state kept across its restarts."""

    name: str
    placement: ProcessPlacement
    process: subprocess.Popen[bytes] | None = None
    started_at: float = 0.0
    ended_at: float | None = None
    restarts: int = 0  # in a row
    lost: bool = False  # given up


@dataclass(slots=True, kw_only=True)
class LocalSamplers:
    """Sampler processes of this machine. One thread at a time supervises them; any thread may call
    close."""

    address: str  # HOST:PORT of the trainer
    placements: Sequence[ProcessPlacement]  # of each sampler
    faults: FaultsSection
    secret: str = field(repr=False)
    logs: Path  # folder of their output
    environment: Mapping[str, str]  # common; each placement adds its own
    count: Callable[[str], None]  # faults, by name (metrics.fault_counts)
    traced: bool = False  # each writes its spans next to its output
    children: list[Child] = field(default_factory=list)
    _closed: threading.Event = field(default_factory=threading.Event)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def start(self) -> None:
        """Start all processes."""
        self.logs.mkdir(parents=True, exist_ok=True)
        self.children = [
            Child(name=f"sampler-{i}", placement=placement)
            for i, placement in enumerate(self.placements)
        ]
        for child in self.children:
            self._start(child)

    def run(self) -> None:
        """Supervise the processes until close. Raises RolloutError if none is left."""
        while not self._closed.wait(POLL_S):
            self.look()

    def look(self) -> int:
        """Restart processes that have ended; return the number of processes not given up. Raises
        RolloutError if none is left."""
        for child in self.children:
            self._look(child)
        if running := sum(not child.lost for child in self.children):
            return running
        last = self.children[-1]
        raise RolloutError(
            f"no sampler process is left: the last one ended {last.restarts + 1} times in "
            f"a row. Its output is {self.logs / last.name}.log, which ends:\n"
            f"{self._tail(last)}\nCorrect the cause, or raise faults.sampler_restarts."
        )

    def stop(self) -> None:
        """Start no more processes, and end `run`. Idempotent."""
        with self._lock:
            self._closed.set()

    def close(self) -> None:
        """End all processes. Those that the trainer has asked to leave exit on their own.
        Idempotent."""
        self.stop()
        began = time.monotonic()
        for process in self._running(began + EXIT_S).values():
            process.terminate()
        for name, process in self._running(began + CLOSE_S).items():
            log.warning("%s did not exit in time; killing it", name)
            process.kill()
            process.wait()

    def _running(self, until: float) -> dict[str, subprocess.Popen[bytes]]:
        """Wait for the processes to end; return those still running at the deadline, by name."""
        running = {}
        for child in self.children:
            if child.process is None:
                continue
            try:
                child.process.wait(max(0.0, until - time.monotonic()))
            except subprocess.TimeoutExpired:
                running[child.name] = child.process
        return running

    def _start(self, child: Child) -> None:
        cores = ",".join(map(str, child.placement.cores))
        command = [sys.executable, "-m", "jaxrl_async.sample", "--join", self.address, "--once"]
        command += ["--wait", f"{JOIN_S:g}"]
        command += ["--name", child.name, *(["--cores", cores] if cores else [])]
        environment = {**os.environ, **self.environment, **child.placement.environment}
        environment.pop(HEALTH_VARIABLE, None)  # the trainer answers at that address
        if self.traced:
            environment[TRACE_VARIABLE] = str((self.logs / f"{child.name}.trace.json").absolute())
        with self._lock, open(self.logs / f"{child.name}.log", "ab") as output:
            if self._closed.is_set():
                return
            child.process = subprocess.Popen(
                command,
                env={**environment, SECRET_VARIABLE: self.secret},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # only the trainer handles Ctrl-C
            )
        child.started_at, child.ended_at = time.monotonic(), None

    def _look(self, child: Child) -> None:
        if child.lost or child.process is None or child.process.poll() is None:
            return
        now = time.monotonic()
        if child.ended_at is None:
            child.ended_at = now
            if now - child.started_at > FORGIVEN_S:
                child.restarts = 0
            log.error("%s ended with code %d", child.name, child.process.returncode)
            self.count("sampler_process_ends")
        health = Health(restarts=child.restarts, out_s=now - child.ended_at)
        act = decide(health, RestartLimits.of(self.faults))
        if act is Act.GIVE_UP:
            child.lost = True
            self.count("samplers_lost")
            log.error("%s is given up after %d restarts", child.name, child.restarts)
        elif act is Act.START:
            child.restarts += 1
            self._start(child)

    def _tail(self, child: Child) -> str:
        try:
            text = (self.logs / f"{child.name}.log").read_text(errors="replace")
        except OSError as error:
            return str(error)
        return text[-LOG_TAIL:].strip()
