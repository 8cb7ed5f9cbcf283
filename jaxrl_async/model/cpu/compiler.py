"""Which compiler builds the CPU kernels. Needs no JAX."""

import os
import platform
import shutil

COMPILERS = ("g++", "clang++", "c++")
"""Asked for in this order, unless the environment's CXX names one."""


class NotBuiltError(Exception):
    """There is no library of kernels, and none can be made."""


def compiler_here() -> str:
    """Return the compiler that builds the kernels. Raises NotBuiltError."""
    if platform.machine().lower() not in ("x86_64", "amd64"):
        raise NotBuiltError(f"they are written for x86-64, and this is {platform.machine()}")
    named = os.environ.get("CXX", "")
    wanted = (named,) if named else COMPILERS
    compiler = next(filter(None, map(shutil.which, wanted)), None)
    if compiler is None:
        raise NotBuiltError(f"none of {', '.join(wanted)} is installed")
    return compiler
