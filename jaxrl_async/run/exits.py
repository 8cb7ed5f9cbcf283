"""Prevent user functions from ending the process of a run unnoticed.

`os._exit(0)` in a reward would end a run with the exit code of success: a launcher would take the
job for done. During training, the calls that end a process immediately, or replace its program,
raise ProcessEndRefused instead: the function has failed like one that raises. `sys.exit()` anywhere
in a user's code (a loss, records, on_step) becomes the same error where it leaves the run. Calls of
jaxrl_async itself, and calls in child processes, are unchanged. Native code that ends the process
(a library that calls C's `exit`) cannot be prevented.
"""

import os
import sys
import sysconfig
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

from jaxrl_async.errors import ProcessEndRefused

ENDING = ("_exit", "execv", "execve")
"""Functions of os that end a process's program; os.execl, execvp and the like call these."""
OWN = "jaxrl_async"
"""The package that may call them."""
INSTEAD = "Return, or raise an exception; StopTraining in on_step ends a run."

_lock = threading.Lock()
_runs = 0  # in this process
_real: dict[str, Callable[..., Any]] = {}


@contextmanager
def no_user_exits() -> Iterator[None]:
    """Have the functions of ENDING raise ProcessEndRefused, unless this package calls them, until
    the last `with` in this process has ended."""
    global _runs
    with _lock:
        _runs += 1
        if _runs == 1:
            for name in ENDING:
                _real[name] = getattr(os, name)
                _set(name, _refusing(name, _real[name], os.getpid()))
    try:
        yield
    finally:
        with _lock:
            _runs -= 1
            if not _runs:
                for name, real in _real.items():
                    _set(name, real)


def _set(name: str, function: Callable[..., object]) -> None:
    for module in (os, sys.modules[os.name]):  # posix or nt, from which os imports its functions
        setattr(module, name, function)


def _refusing(name: str, real: Callable[..., object], process: int) -> Callable[..., Any]:
    def refuse(*words: object, **named: object) -> Any:
        caller = sys._getframe(1)
        if os.getpid() != process or _is_own(caller):
            return real(*words, **named)
        raise _refusal(caller, caller.f_lineno, f"os.{name}")

    return refuse


@contextmanager
def exits_refused() -> Iterator[None]:
    """Turn a SystemExit that a user's code raised inside the `with` into ProcessEndRefused, which
    names its file and line. Also a decorator."""
    try:
        yield
    except SystemExit as error:
        calls = list(traceback.walk_tb(error.__traceback__))
        own = [i for i, (frame, _) in enumerate(calls) if _is_own(frame)]
        users = calls[own[-1] + 1 if own else 0 :]
        if not users:
            raise
        frame, line = next((c for c in reversed(users) if not _is_installed(c[0])), users[-1])
        raise _refusal(frame, line, f"sys.exit({error.code!r})") from error


def _is_own(frame: FrameType) -> bool:
    return str(frame.f_globals.get("__name__")).partition(".")[0] == OWN


def _is_installed(frame: FrameType) -> bool:
    """Return whether a frame is in the standard library or in an installed package."""
    folders = {sysconfig.get_path(kind) for kind in ("stdlib", "platstdlib", "purelib", "platlib")}
    return frame.f_code.co_filename.startswith(("<frozen", *(f"{p}{os.sep}" for p in folders if p)))


def _refusal(frame: FrameType, line: int, call: str) -> ProcessEndRefused:
    code = frame.f_code
    return ProcessEndRefused(
        f"{code.co_filename}, line {line}, {code.co_name}: {call} would end the process of the "
        f"run. {INSTEAD}"
    )
