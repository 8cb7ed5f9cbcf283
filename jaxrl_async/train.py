"""python -m jaxrl_async.train CONFIG [section.key=value ...]: the main job. Its command line is in
train_command.py.

From Python: jaxrl_async.train(model=..., data=..., reward=...), see docs/python.md.
"""

import sys

from jaxrl_async.huge_pages import start_with_huge_pages

if __name__ == "__main__":
    start_with_huge_pages()  # before the other imports, which a restart would waste

from jaxrl_async import CalledModule
from jaxrl_async.run.signals import end_on_ctrl_c
from jaxrl_async.stuck_threads import at_exit_end_with
from jaxrl_async.train_command import main

sys.modules[__name__].__class__ = CalledModule

if __name__ == "__main__":
    end_on_ctrl_c()
    sys.exit(at_exit_end_with(main()))
