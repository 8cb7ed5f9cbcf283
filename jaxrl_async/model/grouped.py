"""Grouped products of rows, sorted by group, and their groups' matrices: the experts' products.

    forward          [n, D] x [E, D, F] -> [n, F]          lax.ragged_dot
    to the rows      [n, F] x [E, D, F] -> [n, D]          on TPU, a kernel that ships with JAX
    to the matrices  [n, D] x [n, F]    -> [E, D, F]       on TPU, another of JAX's kernels

XLA's TPU compiler computes the last product densely, each expert with all rows, which is E times
the work, and copies all matrices for the second. The gradient is therefore defined here. XLA's GPU
compiler computes all three densely, so custom kernels are used on GPUs (gpu_grouped.py).
"""

from functools import partial

import jax
import jax.numpy as jnp
from jax import Array
from jax.experimental.pallas.ops.tpu.megablox.gmm import gmm, tgmm
from jax.lax import DotDimensionNumbers, RaggedDotDimensionNumbers
from jax.typing import DTypeLike

from jaxrl_async.model.gpu_grouped import grouped_product_on_gpu, matrices_gradient_on_gpu

TILE_ROWS = 256
"""Rows in a tile of the kernel; a tile that two groups share is computed twice."""
TILE_INPUTS, TILE_OUTPUTS = 512, 1024
"""Maximum tile of a matrix in the kernel: 2 MiB in float32, three times in VMEM."""
FORWARD: DotDimensionNumbers = (((1,), (1,)), ((), ()))
LEAST_SIDE = 128
"""Narrower matrices (of adapters) are transposed, which is cheap: they are small."""
TO_ROWS: DotDimensionNumbers = (((1,), (2,)), ((), ()))
TO_MATRICES: DotDimensionNumbers = (((0,), (0,)), ((), ()))


@partial(jax.custom_vjp, nondiff_argnums=(3,))
def grouped_product(rows: Array, matrices: Array, sizes: Array, dtype: DTypeLike) -> Array:
    """Multiply each row by its group's matrix: [n, D] and [E, D, F] to [n, F] of `dtype`.

    Sums are in float32; gradients are computed from cotangents in the type of the rows.

    Args:
        rows: [n, D], sorted by group.
        matrices: [E, D, F], of the same type.
        sizes: [E] int32, rows of each group; rows after all groups give 0.
        dtype: type of the result.
    """
    out: Array = jax.lax.platform_dependent(
        rows,
        matrices,
        sizes,
        cuda=partial(grouped_product_on_gpu, dtype=dtype),
        default=partial(_by_xla, dtype=dtype, transposed=False),
    )
    return out


def _by_xla(
    rows: Array, matrices: Array, sizes: Array, *, dtype: DTypeLike, transposed: bool
) -> Array:
    """Multiply each row by its group's matrix; transposed: matrices are [E, F, D]."""
    numbers = RaggedDotDimensionNumbers(
        dot_dimension_numbers=TO_ROWS if transposed else FORWARD,
        lhs_ragged_dimensions=[0],
        rhs_group_dimensions=[0],
    )
    return jax.lax.ragged_dot_general(
        rows, matrices, sizes, numbers, preferred_element_type=jnp.float32
    ).astype(dtype)


def _forward(
    rows: Array, matrices: Array, sizes: Array, dtype: DTypeLike
) -> tuple[Array, tuple[Array, Array, Array]]:
    return grouped_product(rows, matrices, sizes, dtype), (rows, matrices, sizes)


def _backward(
    dtype: DTypeLike, kept: tuple[Array, Array, Array], cotangent: Array
) -> tuple[Array, Array, None]:
    rows, matrices, sizes = kept
    cotangent = cotangent.astype(rows.dtype)
    to_rows = jax.lax.platform_dependent(
        cotangent,
        matrices,
        sizes,
        tpu=rows_gradient_on_tpu,
        cuda=partial(grouped_product_on_gpu, dtype=rows.dtype, transposed=True),
        default=_rows_gradient,
    )
    to_matrices = jax.lax.platform_dependent(
        rows,
        cotangent,
        sizes,
        tpu=matrices_gradient_on_tpu,
        cuda=matrices_gradient_on_gpu,
        default=_matrices_gradient,
    )
    return to_rows, to_matrices.astype(matrices.dtype), None


grouped_product.defvjp(_forward, _backward)


def _rows_gradient(cotangent: Array, matrices: Array, sizes: Array) -> Array:
    return _by_xla(cotangent, matrices, sizes, dtype=cotangent.dtype, transposed=True)


def rows_gradient_on_tpu(
    cotangent: Array, matrices: Array, sizes: Array, *, interpret: bool = False
) -> Array:
    """Multiply each row [n, F] by its group's transposed matrix [E, D, F]: [n, D], of its type.

    XLA's program would first transpose all matrices.

    Args:
        cotangent: [n, F], sorted by group.
        matrices: [E, D, F] of the same type.
        sizes: [E] int32, rows of each group; rows after all groups give 0.
        interpret: run the kernel in Pallas' interpreter, on any platform.
    """
    n = cotangent.shape[0]
    if min(matrices.shape[1:]) < LEAST_SIDE:
        return _rows_gradient(cotangent, matrices, sizes)
    padded = jnp.pad(cotangent, ((0, -n % TILE_ROWS), (0, 0)))
    tiles = (
        TILE_ROWS,
        min(matrices.shape[2], TILE_OUTPUTS),
        min(matrices.shape[1], TILE_INPUTS),
    )
    out = gmm(
        padded, matrices, sizes, cotangent.dtype, tiles, transpose_rhs=True, interpret=interpret
    )[:n]
    return jnp.where(jnp.arange(n)[:, None] < jnp.sum(sizes), out, 0)


def _matrices_gradient(rows: Array, cotangent: Array, sizes: Array) -> Array:
    return jax.lax.ragged_dot_general(
        rows,
        cotangent,
        sizes,
        RaggedDotDimensionNumbers(
            dot_dimension_numbers=TO_MATRICES, lhs_ragged_dimensions=[0], rhs_group_dimensions=[]
        ),
        preferred_element_type=jnp.float32,
    ).astype(rows.dtype)


def matrices_gradient_on_tpu(
    rows: Array, cotangent: Array, sizes: Array, *, interpret: bool = False
) -> Array:
    """Sum rows^T [D, n] x cotangent [n, F] over each group: [E, D, F] of the rows' type.

    Args:
        rows: [n, D], sorted by group.
        cotangent: [n, F] of the same type.
        sizes: [E] int32, rows of each group.
        interpret: run the kernel in Pallas' interpreter, on any platform.
    """
    short = -rows.shape[0] % TILE_ROWS
    rows, cotangent = (jnp.pad(x, ((0, short), (0, 0))) for x in (rows, cotangent))
    tiles = (
        TILE_ROWS,
        min(rows.shape[1], TILE_INPUTS),
        min(cotangent.shape[1], TILE_OUTPUTS),
    )
    transposed = jnp.swapaxes(rows, 0, 1)
    out: Array = tgmm(transposed, cotangent, sizes, rows.dtype, tiles, interpret=interpret)
    return out
