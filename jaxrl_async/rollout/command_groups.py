"""Commands whose process groups do not outlive this process, however it ends.

    this process ──pipe──> keeper ──SIGKILL──> groups that are left when the pipe breaks
         │ starts            ^
         └──> /bin/sh ──"+PID"┘ ──becomes──> the command, leader of its own group

A command says who it is before it begins, and the keeper reads on until the last end of its pipe is
closed: a group is known, or has not begun. One keeper, in a session of its own, serves all commands
of a process.
"""

import contextlib
import logging
import os
import signal
import subprocess
import sys
import threading
from asyncio import create_subprocess_exec
from asyncio.subprocess import DEVNULL, PIPE, STDOUT, Process
from collections.abc import Iterable, Mapping, Sequence

log = logging.getLogger(__name__)

TELL_AND_BECOME = 'echo "+$$" >&0 && exec "$@" </dev/null'
"""What /bin/sh does, its standard input being the keeper's pipe."""


def start_keeper() -> "subprocess.Popen[bytes]":
    """Start the process that kills what is left, this file as a script."""
    return subprocess.Popen(
        [sys.executable, "-I", "-S", __file__],
        stdin=subprocess.PIPE,
        stdout=DEVNULL,
        stderr=DEVNULL,
        start_new_session=True,
    )


class CommandGroups:
    """The commands of this process, each in a process group of its own. Any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._keeper: subprocess.Popen[bytes] | None = None
        self._groups: set[int] = set()  # that run

    async def start(self, words: Sequence[str], environ: Mapping[str, str]) -> Process:
        """Start a command, its output and errors in one pipe; its process id names its group. The
        caller must `end` it."""
        process = await create_subprocess_exec(
            "/bin/sh",
            "-c",
            TELL_AND_BECOME,
            "sh",
            *words,
            stdin=self._pipe(),
            stdout=PIPE,
            stderr=STDOUT,
            env=environ,
            start_new_session=True,
        )
        with self._lock:
            self._groups.add(process.pid)
        return process

    def end(self, process: Process) -> None:
        """Kill what is left of a command's group, if anything."""
        kill_group(process.pid)
        with self._lock:
            self._groups.discard(process.pid)
            if self._keeper is not None:
                _tell(self._keeper, f"-{process.pid}\n")

    def _pipe(self) -> int:
        """Return the end of the pipe that a command begins with; start a keeper if none lives."""
        with self._lock:
            if self._keeper is None or self._keeper.poll() is not None:
                if self._keeper is not None:
                    log.warning("the keeper of commands was killed; another one is started")
                self._keeper = start_keeper()
                _tell(self._keeper, "".join(f"+{pid}\n" for pid in self._groups))
            assert self._keeper.stdin is not None, "it was asked for"
            return self._keeper.stdin.fileno()


def _tell(keeper: "subprocess.Popen[bytes]", text: str) -> None:
    """Write to the keeper; one that was killed meanwhile is replaced with the next command."""
    assert keeper.stdin is not None, "it was asked for"
    with contextlib.suppress(OSError):
        os.write(keeper.stdin.fileno(), text.encode())


def kill_group(pid: int) -> None:
    """Kill what is left of a process group, if anything."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)


def keep(lines: Iterable[str]) -> None:
    """Read which groups begin ("+PID") and end ("-PID"); kill those that are left at the end."""
    groups: set[int] = set()
    for line in lines:
        sign, pid = line[:1], line[1:].strip()
        if sign == "+" and pid.isdecimal():
            groups.add(int(pid))
        elif sign == "-" and pid.isdecimal():
            groups.discard(int(pid))
    for group in groups:
        kill_group(group)


COMMANDS = CommandGroups()
"""Those of this process."""

if __name__ == "__main__":
    keep(sys.stdin)
