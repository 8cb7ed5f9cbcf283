"""Call the CPU kernels from programs of JAX. `library.kernels_are_there` must have returned true.

Shapes: n tokens, D inputs, E outputs, R rows, H heads, N KV heads, K head width, P pages, G tokens
a page, W pages of the longest table, B sequences.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from jaxrl_async.cpu.kernel_library import target_of
from jaxrl_async.model.kernels import PLAIN, Scoring

PANEL = 32
"""Outputs whose weights lie together."""


def packed(weight: Array) -> Array:
    """Return a weight [E, D], outputs first, as `packed_product` reads it: [ceil(E / 32),
    ceil(D / m), 32 m], with zeros where there is no output or input.

    float32 stays (m is 1), of bfloat16 two inputs of an output lie together, of int8 four: those
    are uint8 then, 128 more than they were.
    """
    together = {2: 2, 1: 4}.get(weight.dtype.itemsize, 1)
    outputs, inputs = weight.shape
    whole = jnp.pad(weight, ((0, -outputs % PANEL), (0, -inputs % together)))
    if weight.dtype == jnp.int8:
        whole = (whole.astype(jnp.int32) + 128).astype(jnp.uint8)
    parts = whole.reshape(-1, PANEL, whole.shape[1] // together, together)
    return jnp.swapaxes(parts, 1, 2).reshape(parts.shape[0], parts.shape[2], PANEL * together)


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
        outputs: E; 0: those of whole panels.
        used: [...] bool, the tokens that are computed; the others cost nothing, and get zeros.
            None: all.
        scales: [E] float32 of the outputs, which weights in 8 bits need.
        rounds: round x to the weight's type, too (each token to 8 bits by its own largest number),
            for products in that type; the weight is bfloat16 or has 8 bits.
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
    [n, T], as layers.rotate does."""
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
    """Write one token a row into its page, and attend to what the row's pages hold up to it.

    The cost of a row is that of its own tokens, or of its window.

    Args:
        q: queries [R, H, K] float32.
        new: keys and values [R, N, K] of the tokens.
        pages: keys [P, N, K, G] and values [P, N, G, K]; where the caller needs them no more,
            their memory is written in place.
        tables: [R, W] int32, pages of each row; those up to its position must be there.
        positions: [R] int32 of the tokens; -1: nothing is written, and zeros are returned.
        scoring: window and cap, see kernels.Scoring.
        sinks: [H], see attention.softmax_with_sinks.

    Returns what was attended [R, H, K], and the pages.
    """
    keys, values = pages
    results = tuple(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in (q, keys, values))
    call = jax.ffi.ffi_call(target_of("attend"), results, input_output_aliases={3: 1, 4: 2})
    out, keys, values = call(
        q, *new, keys, values, tables, positions, or_none(sinks), **attributes(q, scoring)
    )
    return out, keys, values


class NewTokens(NamedTuple):
    """Which of n packed tokens are of which sequence; a sequence's tokens lie together."""

    begins: Array  # [B] int32, index into n of its first one
    starts: Array  # [B] int32, tokens of it that its pages hold already
    lengths: Array  # [B] int32, tokens of it among the n; 0: padding
    tables: Array  # [B, W] int32, its pages; those before `starts` must be there


def attend_new_tokens(
    q: Array,
    new: tuple[Array, Array],
    pages: tuple[Array, Array],
    tokens: NewTokens,
    scoring: Scoring = PLAIN,
    sinks: Array | None = None,
) -> Array:
    """Attend causally within sequences: to what their pages hold, and among their new tokens.

    Args:
        q: queries [n, H, K] float32.
        new: keys and values [n, N, K] of the new tokens.
        pages: keys [P, N, K, G] and values [P, N, G, K].
        tokens: whose they are; what is of no sequence gets zeros.
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
    """Return a kernel's argument for numbers that may be none: an empty array if there are none."""
    return jnp.zeros(0, jnp.float32) if numbers is None else numbers


def attributes(q: Array, scoring: Scoring) -> dict[str, Any]:
    """Return what a kernel must know of attention's scores, given queries [..., K]."""
    return {
        "window": np.int64(scoring.window),
        "scale": np.float32(q.shape[-1] ** -0.5),
        "cap": np.float32(scoring.cap),
    }
