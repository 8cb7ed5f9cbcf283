"""One process on one host of a cluster, controlled remotely: the body of a Ray actor."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from jaxrl_async.config.schema import DistributedSection
from jaxrl_async.host import has_tpu
from jaxrl_async.launch.supervisor import HostTask
from jaxrl_async.run.distributed import ask_metadata, find

TAIL_BYTES = 1 << 20
"""Maximum bytes that one call reads from a file's end: metrics of a few hundred steps."""


class HostProcess:
    """Starts a command as a separate process, and reports its state.

    In a separate process JAX starts fresh each time, and an abort ends only that process. The
    process ends with this one (launch/die_with_parent.py), and shares its output.
    """

    def __init__(self, folder: str) -> None:
        """Start nothing yet. folder: the commands' working directory, if this host has it."""
        self._folder = folder if os.path.isdir(folder) else str(Path.home())
        self._child: subprocess.Popen[bytes] | None = None
        self._config: Path | None = None  # the running command's file

    def slice_index(self) -> int:
        """Return this host's index in its TPU slice; 0 without one."""
        if not has_tpu():
            return 0
        world = find(DistributedSection(), os.environ, ask_metadata)
        return 0 if world is None else world.process_id

    def free_port(self) -> int:
        """Return a port that is currently free."""
        with socket.socket() as sock:
            sock.bind(("", 0))
            port: int = sock.getsockname()[1]
            return port

    def start(self, task: HostTask) -> int:
        """Start a command, replacing one that still runs; return its process id."""
        self.end(0.0)
        words: Sequence[str] = task.words
        if task.config:
            number, name = tempfile.mkstemp(prefix="jaxrl_async-", suffix=".yaml")
            with open(number, "w", encoding="utf-8") as file:
                file.write(task.config)
            self._config = Path(name)
            words = [word.replace("{config}", name) for word in words]
        launcher = (sys.executable, "-m", "jaxrl_async.launch.die_with_parent", str(os.getpid()))
        self._child = subprocess.Popen(
            [*launcher, sys.executable, *words],
            cwd=self._folder,
            env={**os.environ, **task.env},
            stdin=subprocess.DEVNULL,
        )
        return self._child.pid

    def code(self) -> int | None:
        """Return the process's exit code; None while it runs. -9 is reported as 137."""
        if self._child is None:
            return None
        code = self._child.poll()
        return code if code is None or code >= 0 else 128 - code

    def send(self, number: int) -> None:
        """Send a signal to the process, if it runs."""
        if self._child is not None and self._child.poll() is None:
            self._child.send_signal(number)

    def end(self, within_s: float) -> None:
        """End the process with SIGTERM, then SIGKILL after within_s seconds."""
        child = self._child
        if child is not None and child.poll() is None:
            if within_s > 0:
                child.send_signal(signal.SIGTERM)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    child.wait(within_s)
            child.kill()
            child.wait()
        if self._config is not None:
            self._config.unlink(missing_ok=True)
            self._config = None

    def tail(self, path: str) -> bytes:
        """Return the end of a file, at most 1 MiB; b"" if it does not exist."""
        try:
            with open(Path(self._folder) / path, "rb") as file:
                size = file.seek(0, os.SEEK_END)
                file.seek(max(size - TAIL_BYTES, 0))
                return file.read(TAIL_BYTES)
        except OSError:
            return b""
