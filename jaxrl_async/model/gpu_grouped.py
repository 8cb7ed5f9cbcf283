"""Grouped products on GPUs with custom kernels, in Pallas' Triton. On GPUs, XLA multiplies each row
by the matrices of all groups.

    tiles       group 0 000|000|0..   group 1 11.   group 2 222|22.      three rows each, some short
    forward     a program has a tile of rows and a block of outputs, and loops over the inputs
    gradient    of the matrices: a program has a block of a matrix, and loops over its group's rows

Rows of a tile are read in place: tiles start at their group's first row, so no row is copied or
padded, and a program masks rows of the next group. Each group has at most one short tile.

Shapes: n rows, E groups, D inputs, F outputs.
"""

from functools import partial
from math import gcd
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, Ref
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
from jax.typing import DTypeLike

BLOCK_ROWS, BLOCK_OUTPUTS = 128, 128
"""Rows and outputs of a program: its sums take 64 KiB of registers."""
BLOCK_BYTES = 128
"""Bytes of inputs per row that a program multiplies in one step: 64 bfloat16 numbers."""
LEAST = 16
"""Minimum side of a product on tensor cores."""


class GroupTiles(NamedTuple):
    """The rows of each tile, [tiles] int32; tiles after the last are empty."""

    group: Array
    first: Array
    end: Array


def tiles_of(sizes: Array, rows: int, block: int) -> GroupTiles:
    """Divide groups with at most `rows` rows in total into tiles of `block` rows."""
    ends = jnp.cumsum(sizes)
    counts = (sizes + block - 1) // block
    last = jnp.cumsum(counts)
    tile = jnp.arange(-(-rows // block) + len(sizes) - 1, dtype=jnp.int32)
    group = jnp.searchsorted(last, tile, side="right").astype(jnp.int32)
    there = group < len(sizes)
    group = jnp.minimum(group, len(sizes) - 1)
    first = (ends - sizes)[group] + (tile - (last - counts)[group]) * block
    end = jnp.where(there, jnp.minimum(first + block, ends[group]), 0)
    return GroupTiles(group, jnp.where(there, first, 0).astype(jnp.int32), end.astype(jnp.int32))


def grouped_product_on_gpu(
    rows: Array, matrices: Array, sizes: Array, dtype: DTypeLike, *, transposed: bool = False
) -> Array:
    """Multiply each row by its group's matrix: [n, D] and [E, D, F] to [n, F] of `dtype`; sums are
    in float32. Rows after all groups give 0.

    transposed: matrices are [E, F, D].
    """
    n, F = len(rows), matrices.shape[1 if transposed else 2]
    rows, matrices = _padded(rows, 1), _padded(_padded(matrices, 1), 2)
    D, wide = rows.shape[1], matrices.shape[1 if transposed else 2]
    block_rows = min(BLOCK_ROWS, max(LEAST, 2 ** (n - 1).bit_length()))
    rows = jnp.pad(rows, ((0, max(0, block_rows - n)), (0, 0)))
    inputs = gcd(D, BLOCK_BYTES // rows.dtype.itemsize)
    outputs = gcd(wide, BLOCK_OUTPUTS)
    tiles = tiles_of(sizes, n, block_rows)
    kernel = partial(_product_kernel, block=(block_rows, inputs, outputs), transposed=transposed)
    out = pl.pallas_call(
        kernel,
        grid=(wide // outputs, len(tiles.group)),
        in_specs=[
            jax.tree.map(lambda _: pl.BlockSpec((None,), lambda j, i: (i,)), tiles),
            pl.BlockSpec(rows.shape, lambda *_: (0, 0)),
            pl.BlockSpec(matrices.shape, lambda *_: (0, 0, 0)),
        ],
        out_specs=pl.BlockSpec((len(rows), wide), lambda *_: (0, 0)),
        out_shape=jax.ShapeDtypeStruct((len(rows), wide), dtype),
        compiler_params=plgpu.CompilerParams(num_warps=8, num_stages=3),
        name="grouped_product",
    )(tiles, rows, matrices)
    written = jnp.arange(n) < jnp.sum(sizes)
    return jnp.where(written[:, None], out[:n, :F], 0)


def _product_kernel(
    tiles: GroupTiles,
    rows_ref: Ref,
    matrices_ref: Ref,
    out_ref: Ref,
    *,
    block: tuple[int, int, int],
    transposed: bool,
) -> None:
    size, inputs, outputs = block
    group, first, end = tiles.group[...], tiles.first[...], tiles.end[...]
    begin, own = _own_rows(first, end, size, rows_ref.shape[0])
    columns = pl.ds(pl.program_id(0) * outputs, outputs)

    @pl.when(end > first)
    def _() -> None:
        def one(index: Array, total: Array) -> Array:
            part = pl.ds(index * inputs, inputs)
            x = plgpu.load(rows_ref.at[pl.ds(begin, size), part])
            there = (columns, part) if transposed else (part, columns)
            matrix = matrices_ref[group, *there]
            return total + jnp.dot(
                x, matrix.T if transposed else matrix, preferred_element_type=jnp.float32
            )

        empty = jnp.zeros((size, outputs), jnp.float32)
        total = jax.lax.fori_loop(0, rows_ref.shape[1] // inputs, one, empty)
        there = out_ref.at[pl.ds(begin, size), columns]
        plgpu.store(there, total.astype(out_ref.dtype), mask=own[:, None])


def _own_rows(first: Array, end: Array, size: int, rows: int) -> tuple[Array, Array]:
    """Return the first of `size` rows that a program reads, within the array, and a mask of its
    own rows among them."""
    begin = jnp.minimum(first, rows - size)
    row = begin + jnp.arange(size)
    return begin, (row >= first) & (row < end)


def matrices_gradient_on_gpu(rows: Array, cotangent: Array, sizes: Array) -> Array:
    """Sum rows^T [D, n] x cotangent [n, F] over each group: [E, D, F] of the rows' type. An empty
    group gives zeros.

    Args:
        rows: [n, D], sorted by group.
        cotangent: [n, F] of the same type.
        sizes: [E] int32, rows of each group.
    """
    (n, D), F = rows.shape, cotangent.shape[1]
    rows, cotangent = _padded(rows, 1), _padded(cotangent, 1)
    block = min(BLOCK_BYTES // rows.dtype.itemsize, max(LEAST, 2 ** (n - 1).bit_length()))
    rows, cotangent = (jnp.pad(x, ((0, max(0, block - n)), (0, 0))) for x in (rows, cotangent))
    tall, wide = (gcd(x.shape[1], BLOCK_OUTPUTS) for x in (rows, cotangent))
    ends = jnp.cumsum(sizes).astype(jnp.int32)
    shape = len(sizes), rows.shape[1], cotangent.shape[1]
    out = pl.pallas_call(
        partial(_gradient_kernel, block=(block, tall, wide)),
        grid=(shape[2] // wide, shape[1] // tall, shape[0]),
        in_specs=[
            pl.BlockSpec((None,), lambda j, i, e: (e,)),
            pl.BlockSpec((None,), lambda j, i, e: (e,)),
            pl.BlockSpec(rows.shape, lambda *_: (0, 0)),
            pl.BlockSpec(cotangent.shape, lambda *_: (0, 0)),
        ],
        out_specs=pl.BlockSpec((None, tall, wide), lambda j, i, e: (e, i, j)),
        out_shape=jax.ShapeDtypeStruct(shape, rows.dtype),
        compiler_params=plgpu.CompilerParams(num_warps=8, num_stages=3),
        name="grouped_gradient",
    )(ends - sizes, ends, rows, cotangent)
    return out[:, :D, :F]


def _gradient_kernel(
    first_ref: Ref,
    end_ref: Ref,
    rows_ref: Ref,
    cotangent_ref: Ref,
    out_ref: Ref,
    *,
    block: tuple[int, int, int],
) -> None:
    size, tall, wide = block
    first, end = first_ref[...], end_ref[...]
    inputs = pl.ds(pl.program_id(1) * tall, tall)
    outputs = pl.ds(pl.program_id(0) * wide, wide)

    def one(index: Array, total: Array) -> Array:
        here = first + index * size
        begin, own = _own_rows(here, jnp.minimum(here + size, end), size, rows_ref.shape[0])
        there, mask = pl.ds(begin, size), own[:, None]
        x = plgpu.load(rows_ref.at[there, inputs], mask=mask, other=0.0)
        y = plgpu.load(cotangent_ref.at[there, outputs], mask=mask, other=0.0)
        return total + jnp.dot(x.T, y, preferred_element_type=jnp.float32)

    steps = (end - first + size - 1) // size
    empty = jnp.zeros((tall, wide), jnp.float32)
    out_ref[...] = jax.lax.fori_loop(0, steps, one, empty).astype(out_ref.dtype)


def _padded(x: Array, axis: int) -> Array:
    """Pad an axis with zeros to a multiple of LEAST."""
    missing = -x.shape[axis] % LEAST
    return jnp.pad(x, [(0, missing if a == axis else 0) for a in range(x.ndim)]) if missing else x
