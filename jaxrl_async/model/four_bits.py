"""Matrices in 4 bits: two codes per byte, and a scale for each group of inputs.

    w [in, out], groups of g inputs  ->  packed [in / 2, out] uint8, scales [in / g, out] float32
                                         (q4_1: [2 in / g, out], each scale before its min weight)

nf4: a weight is a level of NF4 times its group's scale, the group's maximum |w|; the levels are
quantiles of a normal distribution (QLoRA, Dettmers et al. 2023, arXiv:2305.14314, app. E). int4: a
weight is an integer from -8 to 7 times the scale, the maximum |w| / 7.5. q4_1: a weight is an
integer from 0 to 15 times the scale, plus the group's minimum weight, as in GGUF's Q4_1. A byte
holds in its low bits an input of its group's first half, and in its high bits the input half a
group later. A product then reads the bytes as two matrices, without reordering weights.

    x W  =  x_first W_low + x_second W_high        W_low, W_high [in / 2, out]

The weights are widened as they are read. They have no gradient.
"""

import functools
import itertools
import operator
from collections.abc import Callable
from typing import Any, Literal

import jax.numpy as jnp
from jax import Array

FourBits = Literal["nf4", "int4", "q4_1"]

NF4 = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453,
    -0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0,
    0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
)  # fmt: skip
"""Levels of the codes 0 to 15, as published with the paper."""
INT4_LARGEST = 7.5
"""Divisor of the maximum |w| in int4: half a step above 7, the largest positive code."""
STEPS = 15
"""Steps between the minimum and the maximum weight of a group in q4_1."""
TINY = 1e-12
"""Minimum scale: groups of zeros stay zeros."""

Dot = Callable[[Array, Array], Array]
"""(rows [..., in], weights [in, out], or per expert [E, in, out]) -> their product in float32."""


def pack_codes(matrix: Array, kind: FourBits, group: int) -> tuple[Array, Array]:
    """Return a matrix [..., in, out] in 4 bits: packed [..., in / 2, out], scales [..., in /
    inputs_per_scale, out]. group: an even divisor of `in`."""
    *lead, inputs, out = matrix.shape
    groups = matrix.astype(jnp.float32).reshape(*lead, inputs // group, group, out)
    codes, scales = _from_least(groups) if kind == "q4_1" else _from_zero(groups, kind)
    first, second = jnp.split(codes.astype(jnp.uint8), 2, axis=-2)
    packed = (first | (second << 4)).reshape(*lead, inputs // 2, out)
    return packed, scales.reshape(*lead, inputs // inputs_per_scale(kind, group), out)


def inputs_per_scale(kind: FourBits, group: int) -> int:
    """Return the number of inputs per row of scales."""
    return group // 2 if kind == "q4_1" else group


def _from_zero(groups: Array, kind: FourBits) -> tuple[Array, Array]:
    """Return codes and scales of groups [..., group, out] for levels around 0."""
    largest = jnp.maximum(jnp.max(jnp.abs(groups), axis=-2, keepdims=True), TINY)
    scales = largest if kind == "nf4" else largest / INT4_LARGEST
    numbers = groups / scales
    codes = _nearest(numbers) if kind == "nf4" else jnp.clip(jnp.round(numbers), -8, 7) + 8
    return codes, scales


def _from_least(groups: Array) -> tuple[Array, Array]:
    """Return codes, and scales with the minimum weights, of groups [..., group, out]."""
    least, largest = (of(groups, axis=-2, keepdims=True) for of in (jnp.min, jnp.max))
    scales = jnp.maximum((largest - least) / STEPS, TINY)
    codes = jnp.clip(jnp.round((groups - least) / scales), 0, STEPS)
    return codes, jnp.concatenate([scales, least], axis=-2)


def unpack_codes(packed: Array, scales: Array, kind: FourBits) -> Array:
    """Return the rounded matrix [..., in, out] float32 from `pack_codes`."""
    *lead, rows, out = scales.shape
    shape = (*lead, _num_groups(rows, kind), -1, out)
    joined = jnp.concatenate([h.reshape(shape) for h in _halves(packed, scales, kind)], axis=-2)
    return joined.reshape(*packed.shape[:-2], -1, packed.shape[-1])


def packed_product(x: Array, packed: Array, scales: Array, kind: FourBits, dot: Dot) -> Array:
    """Return x [..., in] times a packed matrix, summed by `dot` in float32; `dot` gets the weights
    in x's dtype."""
    groups = _num_groups(scales.shape[-2], kind)
    rows = x.reshape(*x.shape[:-1], groups, 2, -1)
    low, high = _halves(packed, scales, kind)
    first, second = (rows[..., half, :].reshape(*x.shape[:-1], -1) for half in (0, 1))
    return dot(first, low.astype(x.dtype)) + dot(second, high.astype(x.dtype))


def _halves(packed: Array, scales: Array, kind: FourBits) -> tuple[Array, Array]:
    """Return the weights in the low and the high bits, [..., in / 2, out] float32 each."""
    *lead, rows, out = scales.shape
    groups = _num_groups(rows, kind)
    grouped = packed.reshape(*lead, groups, -1, out).astype(jnp.int32)
    each = scales.reshape(*lead, groups, -1, 1, out)  # q4_1: scale, least
    least = each[..., 1, :, :] if kind == "q4_1" else 0.0
    low, high = (
        (_level(codes, kind) * each[..., 0, :, :] + least).reshape(packed.shape)
        for codes in (grouped & 15, grouped >> 4)
    )
    return low, high


def _num_groups(rows: int, kind: FourBits) -> int:
    """Return the number of groups with this many rows of scales."""
    return rows // 2 if kind == "q4_1" else rows


def _level(codes: Array, kind: FourBits) -> Array:
    """Return the levels of codes, float32. NF4's levels are selected bit by bit, which is faster on
    vector units than a table lookup."""
    if kind != "nf4":
        return codes.astype(jnp.float32) - (8 if kind == "int4" else 0)
    levels: list[Any] = [jnp.float32(level) for level in NF4]
    for bit in range(4):
        is_set = (codes & (1 << bit)) != 0
        levels = [
            jnp.where(is_set, above, below)
            for below, above in zip(levels[::2], levels[1::2], strict=True)
        ]
    chosen: Array = levels[0]
    return chosen


def _nearest(numbers: Array) -> Array:
    """Return the codes of the levels of NF4 nearest to numbers from -1 to 1."""
    between = [(below + above) / 2 for below, above in itertools.pairwise(NF4)]
    above = (numbers > jnp.float32(bound) for bound in between)
    return functools.reduce(operator.add, (is_above.astype(jnp.uint8) for is_above in above))
