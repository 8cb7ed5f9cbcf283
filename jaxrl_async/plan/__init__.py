"""Wing: what a run needs and how fast it would be on given hardware, without the hardware."""

import sys

from jaxrl_async import CalledModule

sys.modules[__name__].__class__ = CalledModule
