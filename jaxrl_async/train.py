"""python -m jaxrl_async.train CONFIG [section.key=value ...]: the main job, whose command line is
train_command.py.

From Python: jaxrl_async.train(model=..., data=..., reward=...), see docs/python.md.
"""

import importlib
import sys
import types
from typing import Any

from jaxrl_async.run.signals import end_on_ctrl_c
from jaxrl_async.train_command import main


class _CalledModule(types.ModuleType):
    """This module, which shares its name with the function: once it is imported,
    `jaxrl_async.train` is the module, and still trains when it is called."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return importlib.import_module("jaxrl_async.api.training").train(*args, **kwargs)


sys.modules[__name__].__class__ = _CalledModule

if __name__ == "__main__":
    end_on_ctrl_c()
    sys.exit(main())
