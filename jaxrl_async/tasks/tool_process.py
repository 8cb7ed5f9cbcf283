"""Tools that set signals, in separate processes: signals work only in a main thread.

    a thread of tools ──{source, arguments}──> process ──{"text"} or {"error"}──> the thread

Arguments are checked again in the process, so only JSON is sent. Needs no JAX.
"""

import functools
import json
import weakref
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from threading import Lock

from jaxrl_async.config.userfile import end_loading
from jaxrl_async.tasks.function_source import FunctionSource
from jaxrl_async.tasks.user_process import UserProcess

LOAD_S = 60.0
"""Further time of a process's first call: it imports the tool's file, seconds."""
MODULE = "jaxrl_async.tasks.tool_server"


class ToolFailed(Exception):
    """An exception of a tool in its process."""

    def __init__(self, kind: str, text: str) -> None:
        """kind: the name of its class."""
        super().__init__(text)
        self.kind = kind


class ToolProcesses:
    """Processes of tools, each used by one call at a time; as many as calls run side by side. For
    any thread."""

    def __init__(self) -> None:
        """Start none yet."""
        self._free: dict[FunctionSource, list[UserProcess]] = {}
        self._lock = Lock()
        weakref.finalize(self, _close_all, self._free)

    def call(self, source: FunctionSource, arguments: object, timeout_s: float) -> str:
        """Return a tool's result as text. arguments: as the policy wrote them, JSON or its value.

        Raises ToolFailed if it raises, TooLate after timeout_s seconds, RolloutError if it ended
        its process.
        """
        with self._one(source) as (process, is_new):
            request = {"source": asdict(source), "arguments": arguments}
            if is_new:
                process.exchange(json.dumps({**request, "arguments": None}).encode(), LOAD_S)
            reply = json.loads(process.exchange(json.dumps(request).encode(), timeout_s))
        if "error" in reply:
            raise ToolFailed(*reply["error"])
        return str(reply["text"])

    @contextmanager
    def _one(self, source: FunctionSource) -> Iterator[tuple[UserProcess, bool]]:
        with self._lock:
            free = self._free.setdefault(source, [])
            process = free.pop() if free else None
        is_new = process is None
        process = process or UserProcess(MODULE)
        try:
            yield process, is_new
        except BaseException:
            process.close()
            raise
        with self._lock:
            self._free[source].append(process)


def _close_all(free: Mapping[FunctionSource, list[UserProcess]]) -> None:
    for processes in free.values():
        for process in processes:
            process.close()


@functools.cache
def tool_processes() -> ToolProcesses:
    """Return this process's own; a script that is loaded for a tool ends here."""
    end_loading()
    return ToolProcesses()
