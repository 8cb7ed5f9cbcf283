"""XLA's flags for tests."""

from importlib.metadata import version

_NEWER = tuple(int(n) for n in version("jaxlib").split(".")[:2]) > (0, 10)
QUICK_COMPILE = "--xla_backend_optimization_level=0" + (
    "" if _NEWER else " --xla_cpu_use_fusion_emitters=false"  # an unknown flag ends the process
)
"""Compiling takes most of the tests' time: quick code generation, and half as much of it."""
