"""XLA's flags for tests."""

QUICK_COMPILE = "--xla_backend_optimization_level=0 --xla_cpu_use_fusion_emitters=false"
"""Compiling takes most of the tests' time: quick code generation, and half as much of it."""
