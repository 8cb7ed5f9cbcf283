"""python -m jaxrl_async.train CONFIG [section.key=value ...]: the main job.

    --help           list every field with its unit, range and default
    --print-config   print the resolved configuration, as YAML
    --resume         continue from the newest good checkpoint of the run (run.resume=true)
    --replay-schedule FILE   follow another run's schedule.jsonl bit for bit (run.replay_schedule)

Exit codes: 0 finished, or stopped by one Ctrl-C with everything saved; 1 a failure, explained on
stderr; 2 a bad command line or configuration; 75 ended by SIGTERM, with everything saved within
checkpoint.grace_s: continue with --resume; 130 a second Ctrl-C, or one before anything was begun.

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
