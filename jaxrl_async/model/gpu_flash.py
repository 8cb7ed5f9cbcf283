"""The trainer's attention on GPUs with custom kernels, in Pallas' Triton, for segments, shared
prefixes, windows, caps, sinks, float32 and parts of rows. One block of scores is in memory at a
time.

    seen        query t sees key s if s <= t < until[s] and, in a window, own[t] - window < at[s]
    forward     a program has a block of queries of one head, and loops over the blocks of keys
    backward    one kernel for dq, over the same blocks; one for dk and dv, over blocks of queries

Blocks without visible keys are skipped: rows of 8 segments cost an eighth. The backward pass
computes scores again, from the log of each query's sum (Dao et al. 2022, arXiv:2205.14135, app. B).

Shapes: B rows, t queries and T keys of each, H heads, N kv heads, G = H / N, K head width.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, Ref
from jax.ad_checkpoint import checkpoint_name
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
from jax.typing import DTypeLike

from jaxrl_async.model.kernels import ATTENDED, PLAIN, Scoring, of_extent

UNSEEN = -1e30
"""Score of a key that is not visible: finite, to avoid NaN for queries without visible keys."""
TILE = {2: 8192, 4: 2048}
"""Maximum elements of a block of queries or keys, by item size. Up to six blocks are in shared
memory together, and the smallest card (L4) has 99 KiB per program. With longer float32 blocks the
compiler spills registers."""
SHORTEST, LONGEST = 16, 64
"""Minimum and maximum block, limited by tensor cores and by registers."""
MANY_WARPS = 8192
"""Minimum elements of a block for eight warps per program instead of four."""


class Mask(NamedTuple):
    """The attention mask as vectors, without an array [t, T]."""

    indices: Array  # [t] int32, indices of the queries in their rows, ascending
    until: Array  # [B, T] int32: first index in the row that no longer sees the key
    own: Array | None  # [B, t] int32, positions of the queries; None: no window
    at: Array | None  # [B, T] int32, positions of the keys


@dataclass(frozen=True, slots=True)
class How:
    """The settings of an attention that are not arrays."""

    scale: float
    scoring: Scoring
    contiguous: bool  # whether windows of positions and of indices are the same
    block: int


def segment_ends(segment_ids_BT: Array) -> Array:
    """Return [B, T] int32: the end of a token's segment, up to which later tokens see it. Segments
    are contiguous. A padding token (0) is visible only to itself."""
    T = segment_ids_BT.shape[1]
    indices = jnp.arange(T, dtype=jnp.int32)
    changes = segment_ids_BT[:, 1:] != segment_ids_BT[:, :-1]
    begins = jnp.where(jnp.pad(changes, ((0, 0), (0, 1)), constant_values=True), indices + 1, T)
    ends = jax.lax.cummin(begins, axis=1, reverse=True)
    return jnp.where(segment_ids_BT > 0, ends, indices + 1)


def flash(
    q_BTHK: Array,
    k_BTNK: Array,
    v_BTNK: Array,
    segment_ids_BT: Array,
    scoring: Scoring = PLAIN,
    sinks_H: Array | None = None,
) -> Array:
    """Attend causally within contiguous segments, like attention.reference: [B, T, H, K] of q's
    type. Any type, head width and length; scores and sums are in float32."""
    indices = jnp.arange(q_BTHK.shape[1], dtype=jnp.int32)
    return flash_part(q_BTHK, k_BTNK, v_BTNK, segment_ids_BT, indices, scoring, sinks_H)


def flash_part(
    q_BtHK: Array,
    k_BTNK: Array,
    v_BTNK: Array,
    kv_segments: Array,
    indices_t: Array,
    scoring: Scoring = PLAIN,
    sinks_H: Array | None = None,
) -> Array:
    """Attend like `flash`, for the queries at these indices of their rows."""
    return _attended(
        q_BtHK, k_BTNK, v_BTNK, segment_ends(kv_segments), None, indices_t, scoring, sinks_H
    )


def tree_flash(
    q_BTHK: Array,
    k_BTNK: Array,
    v_BTNK: Array,
    extent: Array,
    scoring: Scoring = PLAIN,
    sinks_H: Array | None = None,
) -> Array:
    """Attend like attention.tree_reference, for contexts that share prefixes.

    extent: attention.visible_until of the keys [B, T]; for a window, visible_until and the
        positions, [B, T, 2].
    """
    indices = jnp.arange(q_BTHK.shape[1], dtype=jnp.int32)
    return tree_flash_part(q_BTHK, k_BTNK, v_BTNK, extent, indices, scoring, sinks_H)


def tree_flash_part(
    q_BtHK: Array,
    k_BTNK: Array,
    v_BTNK: Array,
    extent: Array,
    indices_t: Array,
    scoring: Scoring = PLAIN,
    sinks_H: Array | None = None,
) -> Array:
    """Attend like `tree_flash`, for the queries at these indices of their rows."""
    return _attended(q_BtHK, k_BTNK, v_BTNK, *of_extent(extent), indices_t, scoring, sinks_H)


def flash_with_sums(
    q_BTHK: Array, k_BTNK: Array, v_BTNK: Array, segment_ids_BT: Array, scoring: Scoring = PLAIN
) -> tuple[Array, Array]:
    """Attend like `flash`, without a gradient; also return the log of each query's sum, [B, H, T]
    float32."""
    T, K = q_BTHK.shape[1], q_BTHK.shape[3]
    arrays, mask, how = _of_segments(q_BTHK, k_BTNK, v_BTNK, segment_ids_BT, scoring)
    out, sums = _forward(*arrays, None, mask, how)
    return out[:, :T, :, :K], sums[:, :, :T]


def flash_backward(
    q_BTHK: Array,
    k_BTNK: Array,
    v_BTNK: Array,
    segment_ids_BT: Array,
    scoring: Scoring,
    out: Array,
    sums: Array,
    grad: Array,
) -> tuple[Array, Array, Array]:
    """Return the gradients of q, k and v, given the results of `flash_with_sums` and the gradient
    of its output."""
    T, K = q_BTHK.shape[1], q_BTHK.shape[3]
    arrays, mask, how = _of_segments(q_BTHK, k_BTNK, v_BTNK, segment_ids_BT, scoring)
    more = arrays[0].shape[1] - T
    wide = ((0, 0), (0, more), (0, 0), (0, arrays[0].shape[3] - K))
    kept = *arrays, None, mask, jnp.pad(out, wide), jnp.pad(sums, ((0, 0), (0, 0), (0, more)))
    dq, dk, dv, *_ = _flash_backward(how, kept, jnp.pad(grad, wide))
    return dq[:, :T, :, :K], dk[:, :T, :, :K], dv[:, :T, :, :K]


def _of_segments(
    q: Array, k: Array, v: Array, segment_ids: Array, scoring: Scoring
) -> tuple[tuple[Array, Array, Array], Mask, How]:
    indices = jnp.arange(q.shape[1], dtype=jnp.int32)
    return _whole(q, k, v, segment_ends(segment_ids), None, indices, scoring)


def _attended(
    q: Array,
    k: Array,
    v: Array,
    until: Array,
    positions: Array | None,
    indices: Array,
    scoring: Scoring,
    sinks: Array | None,
) -> Array:
    arrays, mask, how = _whole(q, k, v, until, positions, indices, scoring)
    out: Array = _flash(*arrays, None if sinks is None else sinks.astype(jnp.float32), mask, how)
    return out[:, : q.shape[1], :, : q.shape[3]]


def _whole(
    q: Array,
    k: Array,
    v: Array,
    until: Array,
    positions: Array | None,
    indices: Array,
    scoring: Scoring,
) -> tuple[tuple[Array, Array, Array], Mask, How]:
    """Pad lengths and widths of q, k and v to whole blocks."""
    t, K = q.shape[1], q.shape[3]
    width = max(SHORTEST, 2 ** (K - 1).bit_length())
    block = block_of(max(t, k.shape[1]), width, q.dtype)
    how = How(K**-0.5, scoring, positions is None, block)
    own = at = None
    if scoring.window:
        at = positions
        if at is None:
            at = jnp.broadcast_to(jnp.arange(k.shape[1], dtype=jnp.int32), until.shape)
        own = jnp.take(at, jnp.minimum(indices, k.shape[1] - 1), axis=1)
    keys = (0, -k.shape[1] % block)
    queries = (0, -t % block)
    mask = Mask(
        jnp.pad(indices.astype(jnp.int32), queries, mode="edge"),
        jnp.pad(until.astype(jnp.int32), ((0, 0), keys)),
        own if own is None else jnp.pad(own.astype(jnp.int32), ((0, 0), queries)),
        at if at is None else jnp.pad(at.astype(jnp.int32), ((0, 0), keys)),
    )
    q, k, v = (
        jnp.pad(x, ((0, 0), more, (0, 0), (0, width - K)))
        for x, more in ((q, queries), (k, keys), (v, keys))
    )
    return (q, k, v), mask, how


def block_of(length: int, width: int, dtype: DTypeLike) -> int:
    """Return the number of queries, and of keys, in a block: a power of 2.

    >>> [block_of(4096, width, jnp.bfloat16) for width in (64, 128, 256)]
    [64, 64, 32]
    >>> block_of(4096, 128, jnp.float32), block_of(20, 128, jnp.bfloat16)
    (16, 32)
    """
    fits = TILE[jnp.dtype(dtype).itemsize] // width
    return max(SHORTEST, min(LONGEST, fits, 2 ** (length - 1).bit_length()))


def _ranges(mask: Mask, how: How) -> tuple[Array, Array]:
    """Return for each block of queries the range of visible blocks of keys, [B, t / block, 2]
    int32, and for each block of keys the range of blocks of queries, [B, T / block, 2]."""
    block = how.block
    queries = mask.indices.reshape(-1, block)
    keys = jnp.arange(mask.until.shape[1] // block) * block
    until = mask.until.reshape(len(mask.until), -1, block).max(axis=2)
    earliest, latest = queries[:, 0, None], queries[:, -1, None]
    needed = (keys <= latest) & (earliest < until[:, None, :])
    if how.scoring.window and how.contiguous:
        needed &= keys + block > earliest - how.scoring.window + 1
    return _from_to(needed), _from_to(jnp.swapaxes(needed, 1, 2))


def _from_to(needed: Array) -> Array:
    """Return the first true index in the last axis, and the last one + 1, [..., 2] int32."""
    first = jnp.argmax(needed, axis=-1)
    end = needed.shape[-1] - jnp.argmax(needed[..., ::-1], axis=-1)
    end = jnp.where(needed.any(axis=-1), end, first)
    return jnp.stack([first, end], axis=-1).astype(jnp.int32)


# ---- the kernels


def _scores(q: Array, k: Array, how: How) -> tuple[Array, Array | float]:
    """Return scores [queries, keys] float32, and their derivative by the uncapped scores."""
    scores = _product(q, k.T) * how.scale
    if not (cap := how.scoring.cap):
        return scores, 1.0
    bent = jnp.tanh(scores / cap)
    return bent * cap, 1.0 - bent * bent


def _product(a: Array, b: Array) -> Array:
    """Multiply in a kernel, with sums in float32."""
    return jnp.dot(a, b, preferred_element_type=jnp.float32)


def _is_seen(
    mask: Mask, queries: slice | pl.Slice, keys: slice | pl.Slice, key: Array, how: How
) -> Array:
    """Return [queries, keys] bool for slices of the row; key [keys]: indices of the keys."""
    index = mask.indices[queries][:, None]
    seen = (key[None, :] <= index) & (index < mask.until[keys][None, :])
    if mask.own is None or mask.at is None:
        return seen
    return seen & (mask.at[keys][None, :] > mask.own[queries][:, None] - how.scoring.window)


def _forward_kernel(
    range_ref: Ref, mask: Mask, sinks: Ref | None, q_ref: Ref, k_ref: Ref, v_ref: Ref, out: Ref,
    sums: Ref, *, how: How,
) -> None:  # fmt: skip
    block = how.block
    queries = pl.ds(pl.program_id(0) * block, block)
    q = q_ref[...]

    def one(index: Array, carry: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        total, largest, odds = carry
        keys = pl.ds(index * block, block)
        scores, _ = _scores(q, k_ref[keys, :], how)
        key = index * block + jnp.arange(block)
        scores = jnp.where(_is_seen(mask, queries, keys, key, how), scores, UNSEEN)
        new = jnp.maximum(largest, jnp.max(scores, axis=1))
        shares = jnp.exp(scores - new[:, None])
        fade = jnp.exp(largest - new)
        v = v_ref[keys, :]
        total = total * fade[:, None] + _product(shares.astype(v.dtype), v)
        return total, new, odds * fade + jnp.sum(shares, axis=1)

    none = jnp.full((block,), UNSEEN, jnp.float32)
    empty = jnp.zeros((block, q.shape[1]), jnp.float32), none, jnp.zeros((block,), jnp.float32)
    total, largest, odds = jax.lax.fori_loop(range_ref[0], range_ref[1], one, empty)
    if sinks is not None:
        sink = sinks[0]
        new = jnp.maximum(largest, sink)
        fade = jnp.exp(largest - new)
        total, odds, largest = total * fade[:, None], odds * fade + jnp.exp(sink - new), new
    odds = jnp.maximum(odds, 1e-30)
    out[...] = (total / odds[:, None]).astype(out.dtype)
    sums[...] = largest + jnp.log(odds)


def _shares_and_slope(
    q: Array, k: Array, v: Array, do: Array, log_sum: Array, expected: Array, seen: Array, how: How
) -> tuple[Array, Array]:
    """Return the softmax shares [queries, keys], and the gradient of the products of q and k."""
    scores, bend = _scores(q, k, how)
    shares = jnp.where(seen, jnp.exp(scores - log_sum[:, None]), 0.0)
    slope = shares * (_product(do, v.T) - expected[:, None]) * bend
    return shares, slope * how.scale


def _queries_kernel(
    range_ref: Ref, mask: Mask, q_ref: Ref, k_ref: Ref, v_ref: Ref, do_ref: Ref, sums_ref: Ref,
    expected_ref: Ref, dq_ref: Ref, *, how: How,
) -> None:  # fmt: skip
    block = how.block
    queries = pl.ds(pl.program_id(0) * block, block)
    q, do, log_sum, expected = q_ref[...], do_ref[...], sums_ref[...], expected_ref[...]

    def one(index: Array, dq: Array) -> Array:
        keys = pl.ds(index * block, block)
        k, v = k_ref[keys, :], v_ref[keys, :]
        seen = _is_seen(mask, queries, keys, index * block + jnp.arange(block), how)
        _, slope = _shares_and_slope(q, k, v, do, log_sum, expected, seen, how)
        return dq + _product(slope.astype(k.dtype), k)

    empty = jnp.zeros((block, q.shape[1]), jnp.float32)
    dq_ref[...] = jax.lax.fori_loop(range_ref[0], range_ref[1], one, empty).astype(dq_ref.dtype)


def _keys_kernel(
    range_ref: Ref, mask: Mask, q_ref: Ref, k_ref: Ref, v_ref: Ref, do_ref: Ref, sums_ref: Ref,
    expected_ref: Ref, dk_ref: Ref, dv_ref: Ref, *, how: How, group: int,
) -> None:  # fmt: skip
    block = how.block
    start = pl.program_id(0) * block
    keys, key = pl.ds(start, block), start + jnp.arange(block)
    k, v = k_ref[...], v_ref[...]
    first, end = range_ref[0], range_ref[1]

    def one(step: Array, carry: tuple[Array, Array]) -> tuple[Array, Array]:
        dk, dv = carry
        head, index = step // (end - first), first + step % (end - first)
        queries = pl.ds(index * block, block)
        q, do = q_ref[queries, head, :], do_ref[queries, head, :]
        log_sum, expected = sums_ref[head, queries], expected_ref[head, queries]
        seen = _is_seen(mask, queries, keys, key, how)
        shares, slope = _shares_and_slope(q, k, v, do, log_sum, expected, seen, how)
        dv = dv + _product(shares.astype(do.dtype).T, do)
        return dk + _product(slope.astype(q.dtype).T, q), dv

    empty = jnp.zeros(k.shape, jnp.float32)
    dk, dv = jax.lax.fori_loop(0, group * (end - first), one, (empty, empty))
    dk_ref[...], dv_ref[...] = dk.astype(dk_ref.dtype), dv.astype(dv_ref.dtype)


# ---- the calls


def _of_row(x: Array | None) -> Any:
    """Return the BlockSpec of a program's whole row in [B, ...], or of [t]."""
    if x is None:
        return None
    whole = x.shape[1:] if x.ndim > 1 else x.shape
    if x.ndim == 1:
        return pl.BlockSpec(whole, lambda *_: (0,))
    return pl.BlockSpec((None, *whole), lambda _, b, *__: (b,) + (0,) * len(whole))


def _of_mask(mask: Mask) -> Any:
    return Mask(*map(_of_row, mask))


def _call(kernel: Callable[..., None], how: How, width: int, name: str, **more: Any) -> Any:
    """Return the pallas_call with the number of warps for these blocks."""
    warps = 8 if how.block * width >= MANY_WARPS else 4
    params = plgpu.CompilerParams(num_warps=warps, num_stages=2)
    return pl.pallas_call(partial(kernel, how=how), compiler_params=params, name=name, **more)


@partial(jax.custom_vjp, nondiff_argnums=(5,))
def _flash(q: Array, k: Array, v: Array, sinks: Array | None, mask: Mask, how: How) -> Array:
    return _forward(q, k, v, sinks, mask, how)[0]


def _forward(
    q: Array, k: Array, v: Array, sinks: Array | None, mask: Mask, how: How
) -> tuple[Array, Array]:
    """Return the output, and the log of each query's sum [B, H, t] float32."""
    (B, t, H, K), (T, N), block = q.shape, k.shape[1:3], how.block
    group = H // N
    ranges, _ = _ranges(mask, how)
    of_queries = pl.BlockSpec((None, block, None, K), lambda i, b, h: (b, i, h, 0))
    of_keys = pl.BlockSpec((None, T, None, K), lambda i, b, h: (b, 0, h // group, 0))
    call = _call(
        _forward_kernel,
        how,
        K,
        "flash_forward",
        grid=(t // block, B, H),
        in_specs=[
            pl.BlockSpec((None, None, 2), lambda i, b, h: (b, i, 0)),
            _of_mask(mask),
            None if sinks is None else pl.BlockSpec((1,), lambda i, b, h: (h,)),
            of_queries,
            of_keys,
            of_keys,
        ],
        out_specs=[of_queries, pl.BlockSpec((None, None, block), lambda i, b, h: (b, h, i))],
        out_shape=[
            jax.ShapeDtypeStruct(q.shape, q.dtype),
            jax.ShapeDtypeStruct((B, H, t), jnp.float32),
        ],
    )
    out, sums = call(ranges, mask, sinks, q, k, v)
    return out, sums


def _flash_forward(
    q: Array, k: Array, v: Array, sinks: Array | None, mask: Mask, how: How
) -> tuple[Array, tuple[Any, ...]]:
    out, sums = _forward(q, k, v, sinks, mask, how)
    out, sums = checkpoint_name(out, ATTENDED), checkpoint_name(sums, ATTENDED)
    return out, (q, k, v, sinks, mask, out, sums)


def _flash_backward(
    how: How, kept: tuple[Any, ...], do: Array
) -> tuple[Array, Array, Array, Array | None, None]:
    q, k, v, sinks, mask, out, sums = kept
    expected = jnp.einsum("bthk,bthk->bht", do, out, preferred_element_type=jnp.float32)
    dq, dk, dv = backward(q, k, v, mask, do, sums, expected, how)
    of_sinks = None
    if sinks is not None:  # a sink's share times its query's expected gradient; it has no value
        of_sinks = -jnp.einsum("bht,bht->h", jnp.exp(sinks[:, None] - sums), expected)
    return dq, dk, dv, of_sinks, None


def backward(
    q: Array, k: Array, v: Array, mask: Mask, do: Array, sums: Array, expected: Array, how: How
) -> tuple[Array, Array, Array]:
    """Return the gradients of q, k and v, given the gradient of the output and, for each query
    [B, H, t], the log of its sum and the dot product of its output and that gradient."""
    (B, t, H, K), (T, N), block = q.shape, k.shape[1:3], how.block
    group = H // N
    of_queries, of_keys = _ranges(mask, how)
    of_range = pl.BlockSpec((None, None, 2), lambda i, b, h: (b, i, 0))
    queries = pl.BlockSpec((None, block, None, K), lambda i, b, h: (b, i, h, 0))
    sums_of_queries = pl.BlockSpec((None, None, block), lambda i, b, h: (b, h, i))
    whole_keys = pl.BlockSpec((None, T, None, K), lambda i, b, h: (b, 0, h // group, 0))
    call = _call(
        _queries_kernel,
        how,
        K,
        "flash_queries",
        grid=(t // block, B, H),
        in_specs=[
            of_range,
            _of_mask(mask),
            queries,
            whole_keys,
            whole_keys,
            queries,
            sums_of_queries,
            sums_of_queries,
        ],
        out_specs=queries,
        out_shape=jax.ShapeDtypeStruct(q.shape, q.dtype),
    )
    dq = call(of_queries, mask, q, k, v, do, sums, expected)
    keys = pl.BlockSpec((None, block, None, K), lambda j, b, n: (b, j, n, 0))
    group_queries = pl.BlockSpec((None, t, group, K), lambda j, b, n: (b, 0, n, 0))
    group_sums = pl.BlockSpec((None, group, t), lambda j, b, n: (b, n, 0))
    call = _call(
        partial(_keys_kernel, group=group),
        how,
        K,
        "flash_keys",
        grid=(T // block, B, N),
        in_specs=[
            of_range,
            _of_mask(mask),
            group_queries,
            keys,
            keys,
            group_queries,
            group_sums,
            group_sums,
        ],
        out_specs=[keys, keys],
        out_shape=[jax.ShapeDtypeStruct(x.shape, x.dtype) for x in (k, v)],
    )
    dk, dv = call(of_keys, mask, q, k, v, do, sums, expected)
    return dq, dk, dv


_flash.defvjp(_flash_forward, _flash_backward)
