"""The interpreter of TPU kernels that knows what a TPU leaves open."""

from contextlib import contextmanager

from jax._src.pallas.mosaic.interpret import interpret_pallas_call as calls
from jax.experimental.pallas import tpu as pltpu

LATE = pltpu.InterpretParams(
    dma_execution_mode="on_wait", detect_races=True, uninitialized_memory="nan"
)
"""Copies are made when they are awaited, as late as a TPU may make them, and what was not written
is NaN."""


@contextmanager
def no_races():
    """Raise AssertionError if a kernel that LATE interprets in here reads or writes what a copy of
    its own may be writing or reading."""
    pltpu.reset_tpu_interpret_mode_state()
    yield
    assert calls.races is not None, "no kernel was interpreted by LATE"
    assert not calls.races.races_found
