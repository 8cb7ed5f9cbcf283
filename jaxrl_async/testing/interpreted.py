"""Run Pallas TPU kernels without a TPU, to check their results, not their speed."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from jax._src.literals import TypedInt
from jax.experimental.pallas import tpu as pltpu


@contextmanager
def interpreted_kernels() -> Iterator[None]:
    """Run kernels traced inside, on any thread, in Pallas' interpreter.

    This is the interpreter that turns a kernel into plain XLA. (The other one, which simulates a
    TPU's memory, cannot reshape a reference in jax 0.10.2, as ragged paged attention does.) It asks
    each index of a store for its shape, which Python integers lack, so they get one here. It also
    forgets what a grid step wrote to scalars, so ragged paged attention is right only if one grid
    step does all: at most 32 query tokens, and 4 (float32) or 8 (bfloat16) kv heads per device.
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
