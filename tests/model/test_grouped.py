"""Products by group, and their gradients, against one product after the other."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxrl_async.model.gpu_grouped import (
    grouped_product_on_gpu,
    matrices_gradient_on_gpu,
    tiles_of,
)
from jaxrl_async.model.grouped import (
    grouped_product,
    matrices_gradient_on_tpu,
    rows_gradient_on_tpu,
)
from jaxrl_async.testing.interpreted import interpreted_kernels

pytestmark = pytest.mark.full

SIZES = np.asarray([3, 0, 7, 300], np.int32)
N, D, F = 320, 6, 5


def arrays(n: int = N) -> tuple[jax.Array, jax.Array, jax.Array]:
    rng = np.random.default_rng(1)
    shapes = ((n, D), (len(SIZES), D, F), (n, F))
    rows, matrices, cotangent = (jnp.asarray(rng.normal(size=s), jnp.float32) for s in shapes)
    return rows, matrices, cotangent


def parts() -> list[slice]:
    ends = np.cumsum(SIZES)
    return [slice(end - size, end) for end, size in zip(ends, SIZES, strict=True)]


def test_products_and_gradients_are_those_of_each_group_alone() -> None:
    rows, matrices, cotangent = arrays()
    out, pull = jax.vjp(lambda r, m: grouped_product(r, m, SIZES, jnp.float32), rows, matrices)
    to_rows, to_matrices = pull(cotangent)
    wanted, back = np.zeros((N, F)), np.zeros((N, D))
    for group, part in enumerate(parts()):
        wanted[part] = rows[part] @ matrices[group]
        back[part] = cotangent[part] @ matrices[group].T
        np.testing.assert_allclose(to_matrices[group], rows[part].T @ cotangent[part], atol=1e-4)
    np.testing.assert_allclose(out, wanted, atol=1e-5)
    np.testing.assert_allclose(to_rows, back, atol=1e-5)


@pytest.mark.exhaustive
@pytest.mark.parametrize("n", [320, 512])
def test_the_tpus_kernel_gives_the_same_gradient(n) -> None:
    """Rows behind all groups count nowhere, an empty group has zeros, short ones are padded."""
    rows, _, cotangent = arrays(n)
    got = matrices_gradient_on_tpu(rows, cotangent, jnp.asarray(SIZES), interpret=True)
    for group, part in enumerate(parts()):
        np.testing.assert_allclose(got[group], rows[part].T @ cotangent[part], atol=1e-4)


@pytest.mark.exhaustive
@pytest.mark.parametrize("n", [310, 320, 512])
@pytest.mark.parametrize("widths", [(128, 640), (200, 136), (6, 5)])
def test_the_tpus_kernel_gives_the_same_gradient_to_the_rows(n, widths) -> None:
    """Rows behind all groups give 0; widths need not fill tiles."""
    rng, (wide, narrow) = np.random.default_rng(2), widths
    matrices = jnp.asarray(rng.normal(size=(len(SIZES), wide, narrow)), jnp.float32)
    cotangent = jnp.asarray(rng.normal(size=(n, narrow)), jnp.float32)
    got = rows_gradient_on_tpu(cotangent, matrices, jnp.asarray(SIZES), interpret=True)
    wanted = np.zeros((n, wide))
    for group, part in enumerate(parts()):
        wanted[part] = np.asarray(cotangent[part], float) @ np.asarray(matrices[group], float).T
    np.testing.assert_allclose(got, wanted, atol=1e-3)


# ---- the GPU's kernels


GROUPS = {
    "an empty group, rows behind all": (320, 6, 5, [3, 0, 7, 300]),
    "widths of several blocks": (300, 96, 160, [3, 0, 7, 280]),
    "fewer rows than a tile": (10, 16, 16, [0, 4, 0, 6]),
    "groups that end with a tile": (700, 32, 48, [130, 128, 256, 1, 0, 100]),
    "no rows at all": (64, 16, 16, [0, 0]),
    "an adapter's rank": (50, 24, 4, [20, 30]),
}


@pytest.mark.parametrize(("n", "inputs", "outputs", "sizes"), GROUPS.values(), ids=GROUPS)
def test_the_gpus_kernels_give_each_groups_products(n, inputs, outputs, sizes) -> None:
    """Forward, to the rows and to the matrices, against float64 NumPy."""
    rng, ends = np.random.default_rng(n), np.cumsum(sizes)
    shapes = (n, inputs), (len(sizes), inputs, outputs), (n, outputs)
    rows, matrices, cotangent = (rng.normal(size=s).astype(np.float32) for s in shapes)
    wanted = [np.zeros(s) for s in ((n, outputs), (n, inputs), matrices.shape)]
    for group, (end, size) in enumerate(zip(ends, sizes, strict=True)):
        part, matrix = slice(end - size, end), matrices[group].astype(np.float64)
        wanted[0][part] = rows[part] @ matrix
        wanted[1][part] = cotangent[part] @ matrix.T
        wanted[2][group] = rows[part].astype(np.float64).T @ cotangent[part]
    of_sizes = jnp.asarray(sizes, jnp.int32)
    product = jax.jit(grouped_product_on_gpu, static_argnames=("dtype", "transposed"))
    with interpreted_kernels():
        got = (
            product(rows, matrices, of_sizes, dtype=jnp.float32),
            product(cotangent, matrices, of_sizes, dtype=jnp.float32, transposed=True),
            jax.jit(matrices_gradient_on_gpu)(rows, cotangent, of_sizes),
        )
    for a, b in zip(got, wanted, strict=True):
        np.testing.assert_allclose(a, b, atol=1e-4)


@given(st.lists(st.integers(0, 40), min_size=4, max_size=4))
def test_tiles_have_each_row_of_a_group_once(sizes) -> None:
    rows, block = 160, 16
    tiles = tiles_of(jnp.asarray(sizes, jnp.int32), rows, block)
    owner = np.repeat(np.arange(4), sizes)
    taken = np.full(rows, -1)
    for group, first, end in zip(*map(np.asarray, tiles), strict=True):
        assert end - first <= block and (taken[first:end] == -1).all()
        taken[first:end] = group
    np.testing.assert_array_equal(taken[: sum(sizes)], owner)
    assert (taken[sum(sizes) :] == -1).all()


def test_sums_are_in_float32_and_rounded_once() -> None:
    """2,000 inputs in bfloat16, whose sum in bfloat16 would be far off."""
    rows = jnp.full((16, 2000), 0.1, jnp.bfloat16)
    matrices = jnp.ones((1, 2000, 16), jnp.bfloat16)
    with interpreted_kernels():
        out = grouped_product_on_gpu(rows, matrices, jnp.asarray([16]), jnp.float32)
    np.testing.assert_allclose(out, 2000 * float(jnp.bfloat16(0.1)), rtol=1e-5)
