"""Products by group, and their gradients, against one product after the other."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_async.model.grouped import (
    grouped_product,
    matrices_gradient_on_tpu,
    rows_gradient_on_tpu,
)

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
