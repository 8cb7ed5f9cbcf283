"""A block of memory is used again only when nothing refers to it."""

import gc

import jax
import numpy as np
import pytest

from jaxrl_async.weights.host_reshard import BufferPool

SHAPE = (256, 256)


def bytes_in_use(pool):
    return sum(size * count for size, count in pool._in_use.items())


@pytest.mark.full
def test_a_block_that_a_jax_array_has_taken_over_is_free_when_the_array_dies():
    pool = BufferPool()
    block = pool.take(SHAPE, np.float32)
    block[:] = 1
    address = block.ctypes.data
    array = jax.device_put(block)
    assert array.unsafe_buffer_pointer() == address  # no copy: this is what makes it fast
    view = np.asarray(array)[3:]
    del block
    others = [pool.take(SHAPE, np.float32) for _ in range(3)]
    for other in others:
        other[:] = 2
    assert (np.asarray(array) == 1).all()
    del array
    gc.collect()
    assert (view == 1).all() and bytes_in_use(pool) == 4 * 4 * 256 * 256
    del view, other, others
    gc.collect()
    assert bytes_in_use(pool) == 0


@pytest.mark.exhaustive
def test_the_same_memory_comes_again():
    pool = BufferPool()
    addresses = set()
    for _ in range(5):
        block = pool.take(SHAPE, np.float32)
        addresses.add(block.ctypes.data)
        del block
        gc.collect()
    assert len(addresses) == 1


def test_donating_an_array_does_not_write_into_its_block():
    pool = BufferPool()
    block = pool.take(SHAPE, np.float32)
    block[:] = 3
    array = jax.device_put(block)
    jax.block_until_ready(jax.jit(lambda x: x + 1, donate_argnums=0)(array))
    assert (block == 3).all()
