"""The gated delta rule and the short convolution before it, for packed sequences. Pure functions.

    S_t = exp(g_t) S_(t-1) + b_t k_t (v_t - exp(g_t) S_(t-1)^T k_t)^T      o_t = S_t^T q_t / sqrt(K)

Yang, Kautz and Hatamizadeh 2024 (arXiv:2412.06464), eq. 10; keys and queries have length 1. Shapes:
B rows, T tokens, H value heads, K key width, V value width, C tokens of a chunk.

A segment is a run of tokens with the same id, and begins with an empty state at any position.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

CHUNK = 64
"""Tokens whose products are computed together."""
NORM_EPS = 1e-6
"""Added to the squared length of keys and queries, as in transformers and FLA."""


class DeltaInputs(NamedTuple):
    """The projections of the tokens of a gated delta net."""

    q: Array  # [B, T, H, K], of any norm; as many heads as v or a divisor of it, like k
    k: Array  # [B, T, H, K]
    v: Array  # [B, T, H, V]
    log_decay: Array  # [B, T, H], g: at most 0
    strength: Array  # [B, T, H], b: from 0 to 1


def causal_convolution(x: Array, weights: Array, segment_ids: Array) -> Array:
    """Return silu of each channel's weighted sum over the last tokens of its segment, in x's dtype.

    Args:
        x: [B, T, ...channels].
        weights: [...channels, W]; the last one is the token's own.
        segment_ids: [B, T].
    """
    wide, kernel = x.astype(jnp.float32), weights.astype(jnp.float32)
    out = wide * kernel[..., -1]
    for back in range(1, kernel.shape[-1]):
        before = _shifted(wide, back, 0)
        same = _shifted(segment_ids, back, -1) == segment_ids
        seen = jnp.where(same.reshape(same.shape + (1,) * (x.ndim - 2)), before, 0.0)
        out = out + seen * kernel[..., -1 - back]
    return jax.nn.silu(out).astype(x.dtype)


def _shifted(x: Array, by: int, fill: int) -> Array:
    """Shift [B, T, ...]: token t moves to t + by."""
    ends = [(0, 0), (by, 0)] + [(0, 0)] * (x.ndim - 2)
    return jnp.pad(x, ends, constant_values=fill)[:, : x.shape[1]]


def gated_delta_rule(inputs: DeltaInputs, segment_ids: Array, *, chunk: int = CHUNK) -> Array:
    """Return o [B, T, H, V] in v's dtype; float32 inside.

    Within a chunk the states are eliminated by a triangular system (the WY form, eq. 11 and sec.
    3.3), so the loop over chunks carries one state, which is reset at the end of its segment.

    Args:
        inputs: inputs of the tokens.
        segment_ids: [B, T], from 0 on.
        chunk: tokens of a chunk.
    """
    T = segment_ids.shape[1]
    parts = _chunked(_prepared(inputs), segment_ids, min(chunk, T))
    _, out = jax.lax.scan(_one_chunk, _empty(parts), parts)
    return _in_rows(out)[:, :T].astype(inputs.v.dtype)


def continued_delta_rule(
    inputs: DeltaInputs, state: Array, lengths: Array, *, chunk: int = CHUNK
) -> tuple[Array, Array]:
    """Continue from states: return o [B, T, H, V] in v's dtype, and the states after each row's
    tokens [B, H, K, V] float32.

    Args:
        inputs: inputs of the tokens.
        state: [B, H, K, V] float32, state after the previous tokens; zeros without any.
        lengths: [B], number of tokens of each row; later entries have no effect.
        chunk: tokens of a chunk.
    """
    T = inputs.v.shape[1]
    size = min(chunk, T)
    is_token = (jnp.arange(T) < lengths[:, None])[..., None]
    ready = _prepared(inputs)
    ready = ready._replace(  # padding neither forgets nor writes
        log_decay=jnp.where(is_token, ready.log_decay, 0.0),
        strength=jnp.where(is_token, ready.strength, 0.0),
    )
    more = -T % size
    padded = DeltaInputs(
        *(jnp.pad(x, [(0, 0), (0, more)] + [(0, 0)] * (x.ndim - 2)) for x in ready)
    )
    ones = jnp.ones((lengths.shape[0], T + more), jnp.int32)
    parts = _chunked(padded, ones, size, goes_on=True)
    state, out = jax.lax.scan(_one_chunk, state, parts)
    return _in_rows(out)[:, :T].astype(inputs.v.dtype), state


def delta_step(inputs: DeltaInputs, state: Array) -> tuple[Array, Array]:
    """Continue by one token per row: inputs [R, 1, ...] and states [R, H, K, V] float32 to o [R, 1,
    H, V] in v's dtype and the states after it (the formula above)."""
    q, k, v, log_decay, strength = (x[:, 0] for x in _prepared(inputs))
    state = state * jnp.exp(log_decay)[..., None, None]
    known = _products("rhkv,rhk->rhv", state, k)
    new = strength[..., None] * (v - known)
    state = state + k[..., None] * new[..., None, :]
    out = _products("rhkv,rhk->rhv", state, q)
    return out[:, None].astype(inputs.v.dtype), state


def continued_convolution(
    x: Array, weights: Array, before: Array, lengths: Array
) -> tuple[Array, Array]:
    """Continue a convolution: return the output of `causal_convolution` for x, and the last W - 1
    inputs up to the end of each row's tokens.

    Args:
        x: [B, T, ...channels].
        weights: [...channels, W]; the last one is the token's own.
        before: [B, W - 1, ...channels] float32, inputs of the previous tokens; zeros without any.
        lengths: [B], number of tokens of each row.
    """
    kernel, T = weights.astype(jnp.float32), x.shape[1]
    wide = jnp.concatenate([before, x.astype(jnp.float32)], axis=1)
    taps = kernel.shape[-1]
    out = sum((wide[:, i : i + T] * kernel[..., i] for i in range(taps)), jnp.float32(0))
    positions = lengths[:, None] + jnp.arange(taps - 1)
    index = positions.reshape(positions.shape + (1,) * (x.ndim - 2))
    return jax.nn.silu(out).astype(x.dtype), jnp.take_along_axis(wide, index, axis=1)


def _in_rows(out: Array) -> Array:
    """Return the reads of n chunks [n, B, H, C, V] as rows [B, n * C, H, V]."""
    out = jnp.moveaxis(out, (0, 3), (1, 2))  # [B, n, C, H, V]
    return out.reshape(out.shape[0], -1, *out.shape[3:])


class _Chunks(NamedTuple):
    """The inputs of the loop over n chunks, float32."""

    new: Array  # [n, B, H, C, V], the tokens' writes if the state before the chunk is empty
    reads: Array  # [n, B, H, C, K], their reads of that state, subtracted from the writes
    queries: Array  # [n, B, H, C, K], 0 if the state belongs to another segment
    scores: Array  # [n, B, H, C, C], of queries with keys
    keys: Array  # [n, B, H, C, K], decayed to the end of the chunk
    keeps: Array  # [n, B, H], the share of the state that remains at the end


def _prepared(inputs: DeltaInputs) -> DeltaInputs:
    """Return the inputs in float32, queries and keys of length 1 with as many heads as values;
    queries are scaled."""
    q, k, v, log_decay, strength = (x.astype(jnp.float32) for x in inputs)
    q, k = (_unit(x) for x in (q, k))
    each = v.shape[2] // k.shape[2]
    q, k = (jnp.repeat(x, each, axis=2) for x in (q * q.shape[-1] ** -0.5, k))
    return DeltaInputs(q, k, v, log_decay, strength)


def _unit(x: Array) -> Array:
    return x * jax.lax.rsqrt(jnp.sum(x * x, axis=-1, keepdims=True) + NORM_EPS)


def _chunked(
    inputs: DeltaInputs, segment_ids: Array, size: int, *, goes_on: bool = False
) -> _Chunks:
    """Compute each chunk's inputs of the loop; goes_on: the first chunk continues a segment."""
    more = -segment_ids.shape[1] % size
    ids = jnp.pad(segment_ids, ((0, 0), (0, more)))
    ids = jnp.moveaxis(ids.reshape(ids.shape[0], -1, size), 1, 0)[:, :, None]  # [n, B, 1, C]

    def split(x: Array) -> Array:
        x = jnp.pad(x, [(0, 0), (0, more)] + [(0, 0)] * (x.ndim - 2))
        return jnp.moveaxis(x.reshape(x.shape[0], -1, size, *x.shape[2:]), (1, 3), (0, 2))

    q, k, v, log_decay, strength = (split(x) for x in inputs)  # [n, B, H, C, ...]
    until = jnp.cumsum(log_decay, axis=-1)
    seen = (ids[..., :, None] == ids[..., None, :]) & jnp.tri(size, dtype=bool)
    between = jnp.where(seen, until[..., :, None] - until[..., None, :], 0.0)
    decay = jnp.where(seen, jnp.exp(between), 0.0)
    first = ids[:1, ..., :1] if goes_on else jnp.full_like(ids[:1, ..., -1:], -1)
    last_before = jnp.concatenate([first, ids[:-1, ..., -1:]])
    from_start = jnp.where(ids == last_before, jnp.exp(until), 0.0)
    to_end = jnp.where(ids == ids[..., -1:], jnp.exp(until[..., -1:] - until), 0.0)
    weighed = k * strength[..., None]
    system = _products("...ck,...sk->...cs", weighed, k) * decay
    written = jnp.concatenate([v * strength[..., None], weighed * from_start[..., None]], axis=-1)
    solved = jax.scipy.linalg.solve_triangular(system, written, lower=True, unit_diagonal=True)
    new, reads = jnp.split(solved, [v.shape[-1]], axis=-1)
    return _Chunks(
        new=new,
        reads=reads,
        queries=q * from_start[..., None],
        scores=_products("...ck,...sk->...cs", q, k) * decay,
        keys=k * to_end[..., None],
        keeps=from_start[..., -1],
    )


def _empty(parts: _Chunks) -> Array:
    """Return the states [B, H, K, V] before the first chunk."""
    return jnp.zeros((*parts.keys.shape[1:3], parts.keys.shape[-1], parts.new.shape[-1]))


def _one_chunk(state: Array, parts: _Chunks) -> tuple[Array, Array]:
    """Return the state after a chunk, and its tokens' reads [B, H, C, V]."""
    new = parts.new - _products("bhck,bhkv->bhcv", parts.reads, state)
    out = _products("bhck,bhkv->bhcv", parts.queries, state)
    out = out + _products("bhcs,bhsv->bhcv", parts.scores, new)
    state = state * parts.keeps[..., None, None] + _products("bhck,bhcv->bhkv", parts.keys, new)
    return state, out


def _products(how: str, a: Array, b: Array) -> Array:
    """Return an einsum in full float32, also if the device's default precision is lower."""
    return jnp.einsum(how, a, b, precision=jax.lax.Precision.HIGHEST)
