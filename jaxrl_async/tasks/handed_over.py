"""Tasks that a Python program hands over as objects, under names that a configuration may hold.

`jaxrl_async.train(...)` cannot write a function of the caller's into a configuration: the setting
`task` then says python:NAME, and whoever loads it finds the object here, in the same process.
"""

import itertools
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from jaxrl_async.errors import ConfigError
from jaxrl_async.tasks.task import Task

PREFIX = "python"
"""Library name of tasks that were handed over, as in python:task-1."""

_lock = threading.Lock()
_numbers = itertools.count(1)
_tasks: dict[str, Task] = {}


@contextmanager
def handed_over(task: Task) -> Iterator[str]:
    """Yield what the setting `task` says for this task while the `with` lasts."""
    with _lock:
        name = f"task-{next(_numbers)}"
        _tasks[name] = task
    try:
        yield f"{PREFIX}:{name}"
    finally:
        with _lock:
            del _tasks[name]


def task_handed_over(name: str) -> Task:
    """Return the task of this name. Raises ConfigError if no caller of this process holds it."""
    with _lock:
        task = _tasks.get(name)
    if task is None:
        raise ConfigError(
            f"{PREFIX}:{name} was an object of the Python program that began this run. Call "
            "jaxrl_async.train(..., resume=True) there again, or write the task to a file and "
            "name it FILE.py:NAME."
        )
    return task
