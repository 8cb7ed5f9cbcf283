"""Run one command and clean up everything that it started. Standard library only, run as a script.

    caller ──starts──> reaper ──starts──> command ──> children, also those that leave its session
                         │ the command exits, the caller sends SIGTERM, or the caller has died:
                         │ SIGKILL to everything below
                         └─ ends as the command did

On Linux the reaper is a subreaper: a process below it that loses its parent becomes the reaper's
child, so a double fork does not escape. On other systems it kills the command's process group.
The command has the caller's standard input and output. A reaper costs about 20 ms of CPU time and
5 MB.
"""

import ctypes
import errno
import os
import signal
import sys
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress

SIGNALS = {signal.SIGCHLD, signal.SIGTERM, signal.SIGINT, signal.SIGHUP}
"""Signals that a reaper waits for; all but the first end its command."""
RESTORED = (signal.SIGPIPE, signal.SIGXFSZ)
"""Signals that Python ignores; the command gets their default handlers."""
CHECK_S = 0.5
"""Interval at which a reaper checks whether its caller is alive, seconds."""
END_S = 5.0
"""Maximum wait for killed processes to exit, seconds: a process inside a driver cannot be ended."""
RESCAN_S = 0.02
"""Wait before killing processes that were started in the meantime, seconds."""
MAX_FILES = 65_536
"""A reaper closes its descriptors below this number once its command has them."""
NOT_FOUND, NOT_RUN = 127, 126
"""Exit codes for a command that does not exist, or cannot be run; the same as in shells."""

# From linux/prctl.h, linux/capability.h and linux/landlock.h.
SET_DUMPABLE, DROP_CAPABILITY, SET_SUBREAPER, SET_NO_NEW_PRIVILEGES = 4, 24, 36, 38
TRACE_OTHERS, READ_OTHERS = 19, 38  # CAP_SYS_PTRACE, CAP_PERFMON
CREATE_RULESET, RESTRICT_SELF = 444, 446
SCOPED_SINCE = 6  # version of Landlock
SCOPE_SIGNAL = 2


def under_reaper(words: Sequence[str]) -> list[str]:
    """Return the words of a command that runs another one under a reaper. This process must start
    it in a new session; SIGTERM ends it with everything that it has started."""
    return [sys.executable, "-I", "-S", __file__, str(os.getpid()), *words]


def kill_session(session: int) -> None:
    """Kill the processes of a session, if the system lists them: for a reaper that was killed."""
    for pid, _, of_session in _processes():
        if of_session == session:
            with suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)


def main(arguments: Sequence[str]) -> None:
    """Run a command to its end, then exit with the command's status.

    Args:
        arguments: the caller's process id, then the command and its arguments.
    """
    caller, words = int(arguments[0]), list(arguments[1:])
    before = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    system = _System()
    system.control(SET_SUBREAPER, 1)
    system.control(SET_DUMPABLE, 0)
    command = os.fork()
    if command == 0:
        _become(words, before, system)
    _close_files()
    status = None
    while status is None and os.getppid() == caller:
        if _wait_for_end(CHECK_S):
            break
        status = _reap()[0].get(command)
    ended = _end_all(command)
    _end_as(ended.get(command, signal.SIGKILL) if status is None else status)


class _System:
    """System calls that Python does not offer. They do nothing if they are not available."""

    def __init__(self) -> None:
        self._library = None
        if sys.platform == "linux":
            with suppress(OSError):
                self._library = ctypes.CDLL(None, use_errno=True)

    def control(self, option: int, value: int) -> bool:
        """Call prctl; return whether it succeeded."""
        if self._library is None:
            return False
        return bool(self._library.prctl(option, value, 0, 0, 0) == 0)

    def confine(self) -> None:
        """Prevent this process and its children from tracing or signalling others. Done only where
        it costs no other privilege: as root, or if the process cannot gain new privileges
        anyway."""
        for capability in (TRACE_OTHERS, READ_OTHERS):
            self.control(DROP_CAPABILITY, capability)
        if self._library is None or self._landlock() < SCOPED_SINCE:
            return
        rules = (ctypes.c_uint64 * 3)(0, 0, SCOPE_SIGNAL)  # files, network, scopes
        size = ctypes.c_size_t(ctypes.sizeof(rules))
        ruleset = self._library.syscall(CREATE_RULESET, ctypes.byref(rules), size, 0)
        if ruleset < 0:
            return
        if self._library.syscall(RESTRICT_SELF, ruleset, 0) and os.geteuid() == 0:
            self.control(SET_NO_NEW_PRIVILEGES, 1)
            self._library.syscall(RESTRICT_SELF, ruleset, 0)
        os.close(ruleset)

    def _landlock(self) -> int:
        assert self._library is not None, "there is a system"
        return int(self._library.syscall(CREATE_RULESET, None, ctypes.c_size_t(0), 1))


def _become(words: list[str], mask: Iterable[int], system: _System) -> None:
    """Become the command, leader of a process group. Never returns."""
    try:
        os.setpgid(0, 0)
        system.confine()
        for number in RESTORED:
            signal.signal(number, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        os.execvp(words[0], words)
    except OSError as error:
        os.write(2, f"{words[0]}: {error.strerror}\n".encode(errors="replace"))
        os._exit(NOT_FOUND if error.errno == errno.ENOENT else NOT_RUN)
    finally:  # always: this process is not the reaper
        os._exit(NOT_RUN)


def _close_files() -> None:
    """Close the command's descriptors, so its pipes end when it does."""
    null = os.open(os.devnull, os.O_RDWR)
    for standard in (0, 1, 2):
        os.dup2(null, standard)
    os.closerange(3, MAX_FILES)


def _wait_for_end(seconds: float) -> bool:
    """Wait for a signal; return whether one arrived that ends the command."""
    if hasattr(signal, "sigtimedwait"):
        received = signal.sigtimedwait(SIGNALS, seconds)
        return received is not None and received.si_signo != signal.SIGCHLD
    time.sleep(min(seconds, 4 * RESCAN_S))
    return bool(signal.sigpending() & (SIGNALS - {signal.SIGCHLD}))


def _reap() -> tuple[dict[int, int], bool]:
    """Return the wait status of each child that has ended, and whether other children exist."""
    ended = {}
    try:
        while (result := os.waitpid(-1, os.WNOHANG))[0]:
            ended[result[0]] = result[1]
    except ChildProcessError:
        return ended, False
    return ended, True


def _end_all(command: int) -> dict[int, int]:
    """Kill all remaining processes below this one; return the statuses of those that were
    reaped."""
    ended: dict[int, int] = {}
    until = time.monotonic() + END_S
    _kill_group(command)
    while time.monotonic() < until:
        for child in _children():
            _kill_group(child)
        more, remain = _reap()
        ended |= more
        if not remain:
            break
        time.sleep(RESCAN_S)
    return ended


def _kill_group(pid: int) -> None:
    """Kill a process below this one, and its group unless this process is in it."""
    with suppress(ProcessLookupError, PermissionError):
        if os.getpgid(pid) != os.getpgrp():
            os.killpg(os.getpgid(pid), signal.SIGKILL)
    with suppress(ProcessLookupError, PermissionError):
        os.kill(pid, signal.SIGKILL)


def _children() -> list[int]:
    """Return this process's children."""
    own = os.getpid()
    try:
        with open(f"/proc/self/task/{own}/children", "rb") as file:
            return [int(word) for word in file.read().split()]
    except OSError:
        return [pid for pid, parent, _ in _processes() if parent == own]


def _processes() -> list[tuple[int, int, int]]:
    """Return process, parent and session of all processes; [] if the system does not list them."""
    found = []
    for name in os.listdir("/proc") if os.path.isdir("/proc") else ():
        with suppress(OSError, ValueError, IndexError):
            with open(f"/proc/{int(name)}/stat", "rb") as file:
                fields = file.read().rpartition(b")")[2].split()
            found.append((int(name), int(fields[1]), int(fields[3])))
    return found


def _end_as(status: int) -> None:
    """End this process with the exit code or signal of another one. Never returns."""
    code = os.waitstatus_to_exitcode(status)
    if code < 0:
        with suppress(OSError):  # SIGKILL has no handler
            signal.signal(-code, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {-code})
        os.kill(os.getpid(), -code)
    os._exit(code if code >= 0 else 128 - code)


if __name__ == "__main__":
    main(sys.argv[1:])
