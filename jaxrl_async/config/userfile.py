"""Load objects that the configuration names as FILE.py:NAME from the user's file."""

import importlib.util
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from jaxrl_async.errors import ConfigError

LOADING = "JAXRL_ASYNC_LOADS_REWARDS"
"""Environment variable of a process that loads files only for the reward functions in them."""


class LoadingEnded(BaseException):
    """Ends the loading of a script at the point where it trains."""


def end_loading() -> None:
    """Raise LoadingEnded in a process that loads a script only for its reward functions, which are
    defined by then. Called by functions that a script must not run again there."""
    if os.environ.get(LOADING):
        raise LoadingEnded


def is_own(name: str) -> bool:
    """Return whether a name in the configuration is a function in a file: FILE.py:NAME."""
    file, colon, _ = name.rpartition(":")
    return bool(colon and file)


def load_function(name: str, where: str) -> Callable[..., Any]:
    """Load the function FILE.py:FUNCTION. Raises ConfigError; its text begins with `where`."""
    function: Callable[..., Any] = load_attribute(name, where, "function", callable)
    return function


def load_attribute(name: str, where: str, kind: str, accepts: Callable[[Any], bool]) -> Any:
    """Load FILE.py:NAME.

    Args:
        name: FILE.py:NAME.
        where: the setting, for messages.
        kind: expected kind, in words.
        accepts: returns whether an object is of that kind.

    Raises ConfigError; its text begins with `where`.
    """
    file, _, attribute = name.rpartition(":")
    path, where = Path(file), f"{where} = {name!r}"
    if not os.path.isfile(path):
        raise ConfigError(f"{where}: there is no file {path}. Give the path of a Python file.")
    module_name = f"user_{path.stem}"
    spec = importlib.util.spec_from_file_location(module_name, path)
    if spec is None or spec.loader is None:
        raise ConfigError(f"{where}: {path} is not a Python file. Its name must end in .py.")
    module = importlib.util.module_from_spec(spec)
    sys.modules[module_name] = module  # dataclasses and pickling look there
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        raise ConfigError(
            f"{where}: {path} fails to load: {type(error).__name__}: {error}. Correct the file; "
            "it is run once, like an import."
        ) from error
    loaded = getattr(module, attribute, None)
    if not accepts(loaded):
        own = ((k, v) for k, v in vars(module).items() if _is_defined_in(module_name, v))
        known = [name for name, value in own if accepts(value)]
        raise ConfigError(
            f"{where}: {path} has no {kind} {attribute} (it has: {', '.join(known) or 'none'})."
        )
    return loaded


def _is_defined_in(module: str, value: object) -> bool:
    """Return whether a module's attribute is defined in it, not imported."""
    return not callable(value) or getattr(value, "__module__", module) == module
