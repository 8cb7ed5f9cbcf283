"""Modules that are imported when they are first used: what few runs need is not loaded by all.

    if TYPE_CHECKING:
        from jaxrl_async.model import gpu_flash
    else:
        gpu_flash = Later("jaxrl_async.model.gpu_flash")

Type checkers and the contracts of imports see an ordinary import.
"""

import importlib
from typing import Any


class Later:
    """A module that is imported when one of its attributes is first read."""

    def __init__(self, module: str) -> None:
        self._module = module

    def __getattr__(self, name: str) -> Any:
        return getattr(importlib.import_module(self._module), name)
