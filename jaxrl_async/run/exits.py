"""A function of the user's cannot end the process of a run unnoticed.

`os._exit(0)` in a reward would end a run with the exit code of one that has ended as it should: a
launcher would take the job for done. While a run is training, the calls that end a process
immediately, or put another program in its place, raise ProcessEndRefused instead: the function has
failed, as one that raises. Calls of jaxrl_async itself, and those in child processes, do what they
always do. What native code ends (a library that calls `exit` of C) cannot be kept from it.
"""

import os
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from jaxrl_async.errors import ProcessEndRefused

ENDING = ("_exit", "execv", "execve")
"""Functions of os that end the program of a process; os.execl, execvp and the like call these."""
OWN = "jaxrl_async"
"""The package that may call them."""

_lock = threading.Lock()
_runs = 0  # in this process
_real: dict[str, Callable[..., Any]] = {}


@contextmanager
def no_end_by_others() -> Iterator[None]:
    """Have the functions of ENDING raise ProcessEndRefused until the last `with` in this process
    has ended, unless this package calls them."""
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


def _set(name: str, function: Callable[..., Any]) -> None:
    for module in (os, sys.modules[os.name]):  # posix or nt, which os has its functions from
        setattr(module, name, function)


def _refusing(name: str, real: Callable[..., Any], process: int) -> Callable[..., Any]:
    def refuse(*words: Any, **named: Any) -> Any:
        caller = sys._getframe(1)
        module = str(caller.f_globals.get("__name__"))
        if os.getpid() != process or module.partition(".")[0] == OWN:
            return real(*words, **named)
        code = caller.f_code
        raise ProcessEndRefused(
            f"{code.co_filename}, line {caller.f_lineno}, {code.co_name}: os.{name} would end the "
            "process of the run. Return, or raise an exception; StopTraining in on_step ends a run."
        )

    return refuse
