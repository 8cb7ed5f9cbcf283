import sys

from jaxrl_async import CalledModule

sys.modules[__name__].__class__ = CalledModule
