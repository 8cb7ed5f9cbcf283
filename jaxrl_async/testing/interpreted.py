"""Pallas TPU kernels on a machine without a TPU: their numbers, not their speed."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from jax._src.literals import TypedInt
from jax.experimental.pallas import tpu as pltpu


@contextmanager
def interpreted_kernels() -> Iterator[None]:
    """Kernels that are traced inside, in any thread, run in Pallas' interpreter.

    That is the one that turns a kernel into plain XLA: the other, which simulates a TPU's memory,
    cannot reshape a reference (jax 0.10.2), as ragged paged attention does. It asks each index of a
    store for its shape, which Python integers lack there; they are scalars. It also forgets what a
    grid step wrote to scalars, so ragged paged attention is right only where one step does all: at
    most 32 query tokens, and on a device up to 4 (float32) or 8 (bfloat16) kv heads.
    """
    integer: Any = TypedInt
    integer.shape = ()
    mode: Any = True
    pltpu.set_tpu_interpret_mode(mode)
    try:
        yield
    finally:
        off: Any = None
        pltpu.set_tpu_interpret_mode(off)
        del integer.shape
