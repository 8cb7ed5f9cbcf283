"""Resolve the setting `task` to a Task.

FILE.py:NAME           a Task, a function that returns one, or an Environment or Game class
calculator             a built-in, by name
reasoning_gym:NAME     a generated task of the library reasoning-gym (extra [reasoning_gym])
verifiers:NAME         an environment of the library verifiers (extra [verifiers])
openenv:URL            an environment server of OpenEnv (extra [openenv])
code:FILE.jsonl        problems with tests, which answers must pass in a sandbox
harbor:DIR             tasks of Harbor, played by its own package
pivots:FILE            turns of given conversations, each a task of one turn
python                 an object that a Python program passed to jaxrl_async.train
"""

import functools
import importlib
import inspect
from collections.abc import Callable, Collection, Mapping
from difflib import get_close_matches

from pydantic import ValidationError

from jaxrl_async.config.schema import Choice, arguments_of, name_of
from jaxrl_async.config.userfile import is_own, load_attribute
from jaxrl_async.errors import ConfigError
from jaxrl_async.tasks.game import Game
from jaxrl_async.tasks.task import Environment, Task

TASKS = {
    "calculator": "tasks.calculator:calculator",
    "guess_number": "tasks.guess_number:guess_number",
    "nim": "games.nim:nim",
    "proposer_solver": "games.proposer_solver:proposer_solver",
}
"""Factories of built-in tasks by name; each is imported when it is used."""
HANDED_OVER = "python"
"""Value of the setting for a task that is passed as an object to `jaxrl_async.train`."""
LIBRARIES = {
    "reasoning_gym": "tasks.reasoning:reasoning_task",
    "verifiers": "tasks.verifiers_task:verifiers_task",
    "openenv": "tasks.openenv_task:openenv_task",
    "code": "sandbox.code_task:code_task",
    "pivots": "tasks.pivot_task:pivot_task",
    "harbor": "sandbox.harbor_task:harbor_task",
}
"""Factories of LIBRARY:NAME, called with NAME and the setting's arguments."""
OF_FILES = ("code", "pivots", "harbor")
"""Libraries whose NAME is a file or a folder, except those in GENERATED."""
GENERATED = ("small_functions",)


def factory(where: str) -> Callable[..., Task]:
    """Return a function of TASKS or LIBRARIES."""
    module, _, name = where.partition(":")
    function: Callable[..., Task] = getattr(importlib.import_module(f"jaxrl_async.{module}"), name)
    return function


def check_task_name(choice: Choice, of_run: Collection[str] = ()) -> None:
    """Raise ConfigError if the setting names no task; a library need not be installed here.

    of_run: names of the run's several tasks, if the setting may name one of them.
    """
    handed_over = name_of(choice).partition(":")[0] == HANDED_OVER
    if not (handed_over or is_of_library(choice) or choice in of_run):
        load_task(choice, of_run)


def is_of_library(choice: Choice) -> bool:
    """Return whether the setting is LIBRARY:NAME, and not a user's FILE.py:NAME."""
    library, colon, _ = name_of(choice).partition(":")
    return bool(colon) and library in LIBRARIES


def files_of(choice: Choice) -> list[str]:
    """Return the files and folders with which a library makes a task; []: it reads none."""
    library, _, source = name_of(choice).partition(":")
    if library not in OF_FILES or not source:
        return []
    arguments = arguments_of(choice)
    paths = (source, arguments.get("eval_path"), arguments.get("profile"))
    return [path for path in paths if isinstance(path, str) and path not in GENERATED]


def load_task(choice: Choice, of_run: Collection[str] = ()) -> Task:
    """Return the task that the setting names. Raises ConfigError, MissingExtraError.

    of_run: names of the run's several tasks, which an error lists.
    """
    name, arguments = name_of(choice), arguments_of(choice)
    where = f"task = {name!r}"
    library, colon, of_library = name.partition(":")
    if library == HANDED_OVER:
        raise ConfigError(
            "the task, reward or records were objects of the Python program that started this run. "
            "Call jaxrl_async.train(..., resume=True) there again, or write them to files: "
            "task=FILE.py:NAME, or task=null with reward.function=FILE.py:FUNCTION and "
            "data.jsonl.path=FILE.jsonl."
        )
    if colon and library in LIBRARIES:
        return _build(functools.partial(factory(LIBRARIES[library]), of_library), arguments, where)
    if is_own(name):
        return _own_task(name, arguments, where)
    if name in TASKS:
        return _build(factory(TASKS[name]), arguments, where)
    near = get_close_matches(name, [*of_run, *TASKS], n=1)
    hint = f"did you mean {near[0]!r}? " if near else ""
    tasks = f"the run's tasks {', '.join(of_run)}; " if of_run else ""
    raise ConfigError(
        f"{where} is unknown; {hint}Known: {tasks}{', '.join(sorted(TASKS))}, your own as "
        f"FILE.py:NAME, and {', '.join(f'{known}:NAME' for known in LIBRARIES)}."
    )


def _own_task(name: str, arguments: Mapping[str, object], where: str) -> Task:
    loaded = load_attribute(
        name, "task", "task", lambda found: isinstance(found, Task) or callable(found)
    )
    if isinstance(loaded, Task):
        if arguments:
            raise ConfigError(
                f"{where} is a Task and takes no arguments; given {', '.join(arguments)}. Leave "
                "them out, or name a function that returns a Task."
            )
        return loaded
    if inspect.isclass(loaded) and issubclass(loaded, Environment | Game):
        _check_arguments(loaded, arguments, where)
        if issubclass(loaded, Game):
            return Task(game=functools.partial(loaded, **arguments))
        return Task(environment=functools.partial(loaded, **arguments))
    return _build(loaded, arguments, where)


def _check_arguments(
    make: Callable[..., object], arguments: Mapping[str, object], where: str
) -> None:
    try:
        inspect.signature(make).bind(**arguments)
    except TypeError as error:
        raise ConfigError(f"{where}: {error}. Correct the setting's arguments.") from None


def _build(make: Callable[..., Task], arguments: Mapping[str, object], where: str) -> Task:
    """Call a function that returns a Task; any failure becomes a ConfigError."""
    _check_arguments(make, arguments, where)
    try:
        task = make(**arguments)
    except ValidationError as error:
        wrong = [f"{'.'.join(map(str, e['loc']))}: {e['msg']}" for e in error.errors()]
        raise ConfigError(f"{where}: {'; '.join(wrong)}. Correct the arguments.") from None
    except (TypeError, ValueError, AssertionError) as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(f"{where}: {type(error).__name__}: {error}. Correct it.") from error
    if not isinstance(task, Task):
        raise ConfigError(
            f"{where} returned a {type(task).__name__}. It must return a jaxrl_async.Task."
        )
    return task
