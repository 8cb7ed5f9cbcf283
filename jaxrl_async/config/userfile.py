"""Loads a function from the user's own file, named FILE.py:FUNCTION in the configuration."""

import importlib.util
import inspect
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from jaxrl_async.errors import ConfigError


def is_own(name: str) -> bool:
    """Return whether a name in the configuration is that of a function in a file."""
    file, colon, _ = name.rpartition(":")
    return bool(colon and file)


def load_function(name: str, where: str) -> Callable[..., Any]:
    """Load the function FILE.py:FUNCTION. Raises ConfigError; its text begins with `where`."""
    file, _, function = name.rpartition(":")
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
    loaded = getattr(module, function, None)
    if not callable(loaded):
        known = [k for k, v in vars(module).items() if inspect.isfunction(v)]
        raise ConfigError(
            f"{where}: {path} has no function {function} (it has: {', '.join(known) or 'none'})."
        )
    return loaded
