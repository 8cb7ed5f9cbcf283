"""Write a line of JSON for every update of a process that updates_in_turns.py started.

The process may have the Python of a peer's own environment: this file imports nothing of ours.
"""

import ctypes
import json
import os
import resource
import signal
import sys
import time
from pathlib import Path

PR_SET_PDEATHSIG = 1
"""Of Linux's prctl.h: the signal that a process gets when its parent dies."""


class UpdateLines:
    """Takes over stdout, for nothing but these lines; the output of libraries goes to stderr."""

    def __init__(self) -> None:
        """End this process with its parent, even while it is stopped (Linux)."""
        if sys.platform == "linux":
            ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        self._lines = os.fdopen(os.dup(1), "w", buffering=1)
        os.dup2(2, 1)
        self._began: tuple[float, float] | None = None

    def ended(self, **more: float) -> None:
        """Write when the update that ends now began, its CPU seconds, the peak memory of the
        process and what else is known of it. The first call only begins the first one."""
        now, used = time.perf_counter(), cpu_s()
        if self._began is not None:
            began, used_before = self._began
            line = {"began": began, "ended": now, "cpu_s": used - used_before}
            self._lines.write(json.dumps(line | {"peak_mib": peak_mib(), **more}) + "\n")
        self._began = now, used


def peak_mib() -> float:
    """Return the peak memory of this process, MiB.

    That of getrusage begins with what the parent had when it started this process.
    """
    status = Path("/proc/self/status")
    if status.exists():
        for line in status.read_text(encoding="utf-8").splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) / 1024
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return most / 1024**2 if sys.platform == "darwin" else most / 1024


def cpu_s() -> float:
    """Return the CPU seconds of this process."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime
