"""Which compiler builds the CPU kernels. Needs no JAX."""

import os
import platform
import shutil

COMPILERS = ("g++", "clang++", "c++")
"""Asked for in this order, unless the environment's CXX names one."""


class NotBuiltError(Exception):
    """There is no library of kernels, and none can be made."""


def is_written_for_this() -> bool:
    """Return whether the kernels are written for this kind of processor."""
    return platform.machine().lower() in ("x86_64", "amd64")


def compiler_here() -> str:
    """Return the compiler that builds the kernels. Raises NotBuiltError."""
    if not is_written_for_this():
        raise NotBuiltError(f"they are written for x86-64, and this is {platform.machine()}")
    named = os.environ.get("CXX", "")
    wanted = (named,) if named else COMPILERS
    compiler = next(filter(None, map(shutil.which, wanted)), None)
    if compiler is None:
        raise NotBuiltError(f"none of {', '.join(wanted)} is installed")
    return compiler
