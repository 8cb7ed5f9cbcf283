"""The choice of the compiler for the CPU kernels. Does not import JAX."""

import os
import platform
import shutil

COMPILERS = ("g++", "clang++", "c++")
"""Compilers to try, in this order, unless the environment variable CXX is set."""


class NotBuiltError(Exception):
    """The library of kernels does not exist and cannot be built."""


def is_supported() -> bool:
    """Return whether the kernels support this kind of processor."""
    return platform.machine().lower() in ("x86_64", "amd64")


def compiler_here() -> str:
    """Return the compiler that builds the kernels. Raises NotBuiltError."""
    if not is_supported():
        raise NotBuiltError(f"they need x86-64, but this machine is {platform.machine()}")
    chosen = os.environ.get("CXX", "")
    names = (chosen,) if chosen else COMPILERS
    compiler = next(filter(None, map(shutil.which, names)), None)
    if compiler is None:
        raise NotBuiltError(f"none of {', '.join(names)} is installed")
    return compiler
