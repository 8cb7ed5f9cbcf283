"""One process on one host of a cluster, driven from afar: the body of a Ray actor."""

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
from jaxrl_async.launch.distributed import ask_metadata, find
from jaxrl_async.launch.fleet import HostTask
from jaxrl_async.run.host import has_tpu

READ_BYTES = 1 << 20
"""Most bytes of a file that one call reads."""


class HostProcess:
    """Starts a command as a process of its own, and says how it does.

    A process, so that JAX starts fresh each time and takes only itself along when it aborts. It
    ends with this one (launch/tethered.py), and shares its output.
    """

    def __init__(self, folder: str) -> None:
        """Start nothing yet. folder: where commands run, if this host has it."""
        self._folder = folder if os.path.isdir(folder) else str(Path.home())
        self._child: subprocess.Popen[bytes] | None = None
        self._files = tempfile.TemporaryDirectory(prefix="jaxrl_async-")

    def place(self) -> int:
        """Return this host's number in its TPU slice; 0 without one."""
        if not has_tpu():
            return 0
        found = find(DistributedSection(), os.environ, ask_metadata)
        return 0 if found is None else found.process_id

    def free_port(self) -> int:
        """Return a port that nobody listens at now."""
        with socket.socket() as one:
            one.bind(("", 0))
            port: int = one.getsockname()[1]
            return port

    def start(self, task: HostTask) -> int:
        """Start a command, in place of one that still runs; return its process id."""
        self.end(0.0)
        words: Sequence[str] = task.words
        if task.config:
            file = Path(self._files.name) / "config.yaml"
            file.write_text(task.config, encoding="utf-8")
            words = [word.replace("{config}", str(file)) for word in words]
        tether = (sys.executable, "-m", "jaxrl_async.launch.tethered", str(os.getpid()))
        self._child = subprocess.Popen(
            [*tether, sys.executable, *words],
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
        """End the process: by SIGTERM, and by SIGKILL if it takes longer."""
        if self._child is None or self._child.poll() is not None:
            return
        if within_s > 0:
            self._child.send_signal(signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._child.wait(within_s)
        self._child.kill()
        self._child.wait()

    def read(self, path: str, offset: int) -> bytes:
        """Return what a file has from an offset on, 1 MiB at most; b"" if it is not there."""
        try:
            with open(Path(self._folder) / path, "rb") as file:
                file.seek(offset)
                return file.read(READ_BYTES)
        except OSError:
            return b""
