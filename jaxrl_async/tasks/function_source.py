"""Find a user's function from another process: by its module, or by its file. Needs no JAX."""

import functools
import importlib
import importlib.util
import os
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from jaxrl_async.config.userfile import LoadedSoFar, is_own
from jaxrl_async.errors import ConfigError, RolloutError


@dataclass(frozen=True, slots=True, kw_only=True)
class FunctionSource:
    """The location at which another process finds a function."""

    module: str
    file: str
    name: str  # within the module, with dots


def source_of(function: Callable[..., object], name: str, where: str) -> FunctionSource:
    """Return where a function can be loaded from.

    Args:
        function: the function.
        name: as in reward.function; FILE.py:FUNCTION is loaded from there.
        where: for messages.

    Raises ConfigError if another process cannot find it.
    """
    if is_own(name):
        path, _, attribute = name.rpartition(":")
        stem = os.path.splitext(os.path.basename(path))[0]
        return FunctionSource(module=f"user_{stem}", file=os.path.abspath(path), name=attribute)
    module = str(getattr(function, "__module__", None) or "")
    attribute = str(getattr(function, "__qualname__", None) or "")
    made_in = sys.modules.get(module)
    file = str(getattr(made_in, "__file__", None) or "")
    if not os.path.isfile(file) or _attribute(made_in, attribute) is not function:
        raise ConfigError(
            f"{where} cannot run in a process (reward.processes): it is not defined at a module's "
            "top level, from which another process could load it. Put it into a file, and set "
            "reward.function=FILE.py:FUNCTION, or set reward.processes=0."
        )
    return FunctionSource(module=module, file=os.path.abspath(file), name=attribute)


def _attribute(module: object, name: str) -> Any:
    """Return a module's attribute by its dotted name; None if it does not exist."""
    for part in name.split("."):
        module = getattr(module, part, None)
    return module


@functools.cache
def load_function(source: FunctionSource) -> Callable[..., Any]:
    """Load a function: by its module's name if that can be imported, otherwise from the file. A
    script is run up to the point where it trains."""
    function = _attribute(_module_of(source), source.name)
    if not callable(function):
        raise RolloutError(
            f"is not defined by {source.file} before it trains, so no process can load it "
            "(reward.processes). Define it at the top, or put it into a separate file."
        )
    return function


def _module_of(source: FunctionSource) -> Any:
    with suppress(ImportError, ValueError, AttributeError):
        found = None if source.module == "__main__" else importlib.util.find_spec(source.module)
        if found is not None and found.origin and os.path.samefile(found.origin, source.file):
            return importlib.import_module(source.module)
    name = "__mp_main__" if source.module == "__main__" else source.module
    spec = importlib.util.spec_from_file_location(name, source.file)
    if spec is None or spec.loader is None:
        raise RolloutError(f"cannot be loaded from {source.file}, which is not a Python file.")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    with suppress(LoadedSoFar):
        spec.loader.exec_module(module)
    return module


def import_path() -> str:
    """Return the PYTHONPATH with which another process finds this one's imports."""
    return os.pathsep.join(p or os.getcwd() for p in sys.path)
