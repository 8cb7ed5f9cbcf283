"""Calls of the CPU kernels from JAX programs. Requires kernel_library.kernels_are_there.

Shapes: n tokens, D inputs, E outputs, R rows, H heads, N KV heads, K head width, P pages, G tokens
per page, W pages of the longest table, B sequences.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from jaxrl_async.cpu.kernel_library import target_of
from jaxrl_async.model.kernels import PLAIN, Scoring

PANEL = 32
"""Number of outputs whose weights are stored together."""


def packed(weight: Array) -> Array:
    """Return a weight [E, D], outputs first, in the form of `packed_product`: [ceil(E / 32),
    ceil(D / m), 32 m], padded with zeros.

    m inputs of an output are adjacent: 1 in float32, 2 in bfloat16, 4 in int8. int8 values are
    stored as uint8, increased by 128.
    """
    adjacent = {2: 2, 1: 4}.get(weight.dtype.itemsize, 1)
    outputs, inputs = weight.shape
    padded = jnp.pad(weight, ((0, -outputs % PANEL), (0, -inputs % adjacent)))
    if weight.dtype == jnp.int8:
        padded = (padded.astype(jnp.int32) + 128).astype(jnp.uint8)
    parts = padded.reshape(-1, PANEL, padded.shape[1] // adjacent, adjacent)
    return jnp.swapaxes(parts, 1, 2).reshape(parts.shape[0], parts.shape[2], PANEL * adjacent)


def packed_product(
    x: Array,
    weight: Array,
    outputs: int = 0,
    used: Array | None = None,
    *,
    scales: Array | None = None,
    rounds: bool = False,
) -> Array:
    """Return x [..., D] times a `packed` weight, [..., E] float32. A token's result does not depend
    on the other tokens.

    Args:
        x: [..., D] float32.
        weight: see `packed`.
        outputs: E; 0: all outputs of the panels.
        used: [...] bool, the tokens to compute; others cost nothing and get zeros. None: all.
        scales: [E] float32, scales of the outputs, required for 8-bit weights.
        rounds: also round x to the weight's type (in 8 bits, scaled by each token's maximum), for
            products in that type; the weight is bfloat16 or has 8 bits.
    """
    outputs = outputs or weight.shape[0] * PANEL
    rows = x.reshape(-1, x.shape[-1])
    call = jax.ffi.ffi_call(
        target_of("product"), jax.ShapeDtypeStruct((rows.shape[0], outputs), jnp.float32)
    )
    mask = jnp.zeros(0, bool) if used is None else used.reshape(-1)
    result: Array = call(rows, weight, or_none(scales), mask, rounds=rounds)
    return result.reshape(*x.shape[:-1], outputs)


def rotated(x: Array, cos: Array, sin: Array) -> Array:
    """Rotate pairs (i, i + T) of the first 2 T components of x [n, heads, K] float32 by cos and sin
    [n, T], like layers.rotate."""
    return jax.ffi.ffi_call(target_of("rotate"), jax.ShapeDtypeStruct(x.shape, x.dtype))(
        x, cos, sin
    )


def attend_pages(
    q: Array,
    new: tuple[Array, Array],
    pages: tuple[Array, Array],
    tables: Array,
    positions: Array,
    scoring: Scoring = PLAIN,
    sinks: Array | None = None,
) -> tuple[Array, Array, Array]:
    """Write one token per row into its page, and attend to the row's tokens up to it.

    The cost of a row is proportional to its tokens or its window.

    Args:
        q: queries [R, H, K] float32.
        new: keys and values [R, N, K] of the tokens.
        pages: keys [P, N, K, G] and values [P, N, G, K]; updated in place if the caller does not
            use them afterwards.
        tables: [R, W] int32, pages of each row; entries up to its position must be valid.
        positions: [R] int32, positions of the tokens; -1: write nothing, return zeros.
        scoring: window and cap, see kernels.Scoring.
        sinks: [H], see attention.softmax_with_sinks.

    Returns the output [R, H, K] and the pages.
    """
    keys, values = pages
    results = tuple(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in (q, keys, values))
    call = jax.ffi.ffi_call(target_of("attend"), results, input_output_aliases={3: 1, 4: 2})
    out, keys, values = call(
        q, *new, keys, values, tables, positions, or_none(sinks), **attributes(q, scoring)
    )
    return out, keys, values


class NewTokens(NamedTuple):
    """The sequences of n packed tokens; a sequence's tokens are contiguous."""

    begins: Array  # [B] int32, index of a sequence's first token among the n
    starts: Array  # [B] int32, number of its tokens that its pages already hold
    lengths: Array  # [B] int32, number of its tokens among the n; 0: padding
    tables: Array  # [B, W] int32, its pages; entries before `starts` must be valid


def attend_new_tokens(
    q: Array,
    new: tuple[Array, Array],
    pages: tuple[Array, Array],
    tokens: NewTokens,
    scoring: Scoring = PLAIN,
    sinks: Array | None = None,
) -> Array:
    """Attend causally within sequences: to the tokens in their pages, and among new tokens.

    Args:
        q: queries [n, H, K] float32.
        new: keys and values [n, N, K] of the new tokens.
        pages: keys [P, N, K, G] and values [P, N, G, K].
        tokens: the sequences of the new tokens; tokens without a sequence get zeros.
        scoring: window and cap, see kernels.Scoring.
        sinks: [H], see attention.softmax_with_sinks.

    Returns [n, H, K].
    """
    call = jax.ffi.ffi_call(target_of("attend_new"), jax.ShapeDtypeStruct(q.shape, q.dtype))
    begins, starts, lengths, tables = (jnp.asarray(x, jnp.int32) for x in tokens)
    out: Array = call(
        q, *new, *pages, tables, begins, starts, lengths, or_none(sinks), **attributes(q, scoring)
    )
    return out


def or_none(numbers: Array | None) -> Array:
    """Return a kernel's argument for optional numbers: an empty array for None."""
    return jnp.zeros(0, jnp.float32) if numbers is None else numbers


def attributes(q: Array, scoring: Scoring) -> dict[str, Any]:
    """Return a kernel's attributes for attention's scores, given queries [..., K]."""
    return {
        "window": np.int64(scoring.window),
        "scale": np.float32(q.shape[-1] ** -0.5),
        "cap": np.float32(scoring.cap),
    }
