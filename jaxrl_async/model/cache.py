"""The paged key-value cache, and its two forms for the decode loop.

Shapes: P pages, G tokens per page, N kv heads, K head width, R rows (running sequences), C context
columns (whole pages; for layers with a window at most the window's), X extra columns for the
tokens of one block, n tokens.

A page holds the layers of one group (kv_layout.py), each in a separate array. A layer's tokens are
found through its group's page table.

    gathered    pages are copied once per block into a working copy [R, N, K, C + X] (keys with the
                positions last: the fastest form for XLA on CPU, and dense for a GPU). Every row
                appends at the same column, and the new columns are written to the pages at the end
    ragged      a kernel for TPU or GPU reads the pages directly, and the step writes into them

The form is chosen once per engine; both hold the same values. With latent attention (latent.py)
values have width 0: the keys, of one head, are also the values.
"""

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import DTypeLike

from jaxrl_async.model.attention import capped, softmax_with_sinks
from jaxrl_async.model.kernels import page_head_dim, sinks_page
from jaxrl_async.model.kv_layout import KvLayout
from jaxrl_async.model.spec import ModelSpec

MASKED = -1e30
"""Score of a masked position: finite, to avoid NaN in fully masked rows."""


class PagedKV(NamedTuple):
    """Keys and values in pages: one array per layer of a group, see kv_layout.py.

    gathered: k arrays of [P, N, K, G], v arrays of [P, N, G, K].
    ragged: k arrays of [P, G, 2 N, W], keys and values alternating on the third axis; for latent
    attention [P, G, 1, W]. On TPUs heads are padded with zeros to the kernel's width, and pages of
    latent attention are [P, G, W], which lets tokens fill tiles. v is empty.
    """

    k: tuple[Array, ...]
    v: tuple[Array, ...]


class NewKV(NamedTuple):
    """Keys and values of tokens that are not yet in pages."""

    k: tuple[Array, ...]  # layers of [n, N, K]
    v: tuple[Array, ...]  # layers of [n, N, K]


class CachedContext(NamedTuple):
    """The concatenated pages of some rows; layers of a gated delta net have no heads."""

    k: tuple[Array, ...]  # layers of [R, N, K, C]
    v: tuple[Array, ...]  # layers of [R, N, C, K]


def init_pages(
    spec: ModelSpec,
    layout: KvLayout,
    pages: int,
    page_tokens: int,
    dtype: DTypeLike,
    *,
    ragged: bool = False,
    padded: bool = True,
) -> PagedKV:
    """Return empty pages; in the form `ragged`, optionally padded for the TPU kernel. Padded pages
    of a model with sinks end with a sinks_page."""
    (sides, N, K), G = spec.cached_shape, page_tokens

    def layers(*shape: int) -> tuple[Array, ...]:
        return tuple(jnp.zeros(shape, dtype) for _ in range(layout.arrays))

    if ragged and not padded:
        return PagedKV(layers(pages, G, sides * N, K), ())
    if ragged and sides == 1:
        return PagedKV(layers(pages, G, page_head_dim(K)), ())
    if ragged and spec.sinks:
        shape = (pages + 1, G, 2 * N, page_head_dim(K))  # one more, for writes without a page
        sinks = sinks_page(G, 2 * N, K, dtype)
        return PagedKV(tuple(jnp.concatenate([p, sinks]) for p in layers(*shape)), ())
    if ragged:
        return PagedKV(layers(pages, G, 2 * N, page_head_dim(K)), ())
    return PagedKV(layers(pages, N, K, G), layers(pages, N, G, K if sides == 2 else 0))


def is_ragged(kv: PagedKV) -> bool:
    """Return whether the pages have the ragged kernel's form."""
    return not kv.v


def page_axes(*, ragged: bool) -> tuple[str | None, ...]:
    """Return the logical axes of a page array, for its sharding."""
    return (None, None, "kv_heads", None) if ragged else (None, "kv_heads", None, None)


def write_tokens(
    kv: PagedKV, layout: KvLayout, new: NewKV, pages: Array, offsets: Array
) -> PagedKV:
    """Write tokens at offsets [n] of pages [groups, n]; the number P means no page (for padding,
    and for tokens outside a window)."""
    keys, values = list(kv.k), list(kv.v)
    for layer, (g, a) in layout.by_layer.items():
        k, v = new.k[layer], new.v[layer]
        if is_ragged(kv):
            keys[a] = written(keys[a], k, v, pages[g], offsets)
            continue
        k, v = k.astype(keys[a].dtype), v.astype(keys[a].dtype)
        keys[a] = keys[a].at[pages[g], :, :, offsets].set(k, mode="drop")
        values[a] = values[a].at[pages[g], :, offsets].set(v, mode="drop")
    return PagedKV(tuple(keys), tuple(values))


def written(pages: Array, k: Array, v: Array, numbers: Array, offsets: Array) -> Array:
    """Write tokens [n, N, K] at offsets [n] of the pages [P, G, 2 N, W] or [P, G, W] with these
    numbers [n]: first head's key, its value, second head's key, ... Writes with a larger number
    than the last page's are dropped."""
    cells = cells_of(pages, k, v).reshape(-1, *pages.shape[2:])
    return pages.at[numbers, offsets].set(cells, mode="drop")


def cells_of(pages: Array, k: Array, v: Array) -> Array:
    """Return tokens [n, N, K] in the form of these pages, [n, 2 N, W]; [n, 1, W] if values have
    width 0."""
    n, N, K = k.shape
    sides = [k, v] if v.shape[-1] else [k]
    cells = jnp.stack(sides, axis=2).reshape(n, len(sides) * N, K).astype(pages.dtype)
    return jnp.pad(cells, ((0, 0), (0, 0), (0, pages.shape[-1] - K)))


def copy_pages(kv: PagedKV, sources: Array, targets: Array) -> PagedKV:
    """Copy whole pages; a target P means no page (padding)."""
    return jax.tree.map(lambda p: p.at[targets].set(take(p, sources), mode="drop"), kv)


def take(pages: Array, ids: Array) -> Array:
    """Return pages by number; a too large number gives the last page (callers mask it)."""
    return pages.at[jnp.minimum(ids, pages.shape[0] - 1)].get(mode="promise_in_bounds")


def gather(
    kv: PagedKV, layout: KvLayout, tables: Sequence[Array], head_dim: int, extra: int = 0
) -> CachedContext:
    """Concatenate the pages in each group's table [R, C / G], followed by `extra` empty columns.

    The groups' tables may differ in length: for layers with a window, only its pages are needed.
    """
    R = tables[0].shape[0]
    by_layer = layout.by_layer

    def sides(layer: int) -> tuple[Array, Array]:
        if layer not in by_layer:
            none = jnp.zeros((R, 0, head_dim, extra), kv.k[0].dtype)
            return none, jnp.swapaxes(none, 2, 3)
        g, a = by_layer[layer]
        if is_ragged(kv):
            return pairs_of(kv.k[a], tables[g], head_dim, extra)
        return _keys_of(kv.k[a], tables[g], extra), _values_of(kv.v[a], tables[g], extra)

    both = [sides(layer) for layer in range(max(by_layer, default=-1) + 1)]
    return CachedContext(tuple(k for k, _ in both), tuple(v for _, v in both))


def _keys_of(pages: Array, table: Array, extra: int) -> Array:
    """Return keys [R, N, K, C + X] of pages [P, N, K, G]."""
    N, K, G = pages.shape[1:]
    R, count = table.shape
    rows = jax.lax.optimization_barrier(take(pages, table))  # [R, count, N, K, G]
    rows = jnp.moveaxis(rows, 1, 3).reshape(R, N, K, count * G)
    return jnp.pad(rows, ((0, 0), (0, 0), (0, 0), (0, extra)))


def _values_of(pages: Array, table: Array, extra: int) -> Array:
    """Return values [R, N, C + X, K] of pages [P, N, G, K]."""
    N, G, K = pages.shape[1:]
    R, count = table.shape
    rows = jnp.swapaxes(take(pages, table), 1, 2).reshape(R, N, count * G, K)
    return jnp.pad(rows, ((0, 0), (0, 0), (0, extra), (0, 0)))


def pairs_of(pages: Array, table: Array, head_dim: int, extra: int = 0) -> tuple[Array, Array]:
    """Return keys [R, N, K, C + X] and values [R, N, C + X, K] of pages [P, G, 2 N, W]; for pages
    [P, G, 1, W] or [P, G, W] the values have width 0."""
    R, count = table.shape
    rows = take(pages, table)
    rows = rows.reshape(R, count * pages.shape[1], -1, pages.shape[-1])[..., :head_dim]
    latent = rows.shape[2] == 1
    rows = jnp.pad(rows, ((0, 0), (0, extra), (0, 0), (0, 0)))
    keys, values = jnp.moveaxis(rows[:, :, 0::2], 1, 3), jnp.swapaxes(rows[:, :, 1::2], 1, 2)
    return keys, jnp.swapaxes(keys, 2, 3)[..., :0] if latent else values


def recent_pages(
    table: Array, positions: Array, window: int, page_tokens: int
) -> tuple[Array, Array]:
    """Return the pages that hold the window before each position, [R, w] of a table [R, W], and
    the position of their first token [R]. Without a window (0), or with one that covers the table:
    all pages, from position 0."""
    width = table.shape[1]
    count = -(-(window - 1) // page_tokens) + 1
    if not window or count >= width:
        return table, jnp.zeros_like(positions)
    first = jnp.maximum(positions + 1 - window, 0) // page_tokens
    numbers = jnp.minimum(first[:, None] + jnp.arange(count), width - 1)
    return jnp.take_along_axis(table, numbers, axis=1), first * page_tokens


def columns(context: CachedContext, count: int) -> NewKV:
    """Return the last `count` columns as tokens: row by row, [R * count]."""

    def keys(w: Array) -> Array:
        new = jnp.moveaxis(w[..., w.shape[3] - count :], 3, 1)
        return new.reshape(new.shape[0] * new.shape[1], *new.shape[2:])

    def values(w: Array) -> Array:
        new = jnp.swapaxes(w[:, :, w.shape[2] - count :], 1, 2)
        return new.reshape(new.shape[0] * new.shape[1], *new.shape[2:])

    return NewKV(tuple(keys(w) for w in context.k), tuple(values(w) for w in context.v))


def append(w: Array, new: Array, column: Array, *, keys: bool) -> Array:
    """Write one token per row [R, N, K] at the same column of a working copy."""
    zero = jnp.int32(0)
    if keys:
        return jax.lax.dynamic_update_slice(w, new[..., None].astype(w.dtype), (0, 0, 0, column))
    return jax.lax.dynamic_update_slice(
        w, new[:, :, None].astype(w.dtype), (zero, zero, column, zero)
    )


def attend_columns(
    q: Array,
    k: Array,
    v: Array,
    visible: Array,
    cap: float = 0.0,
    sinks: Array | None = None,
) -> Array:
    """Attend with one query per row [R, H, K] to its visible columns [R, C]: [R, H, K].

    Args:
        q: queries.
        k: keys [R, N, K, C].
        v: values [R, N, C, K]; width 0: the keys are the values.
        visible: [R, C] bool.
        cap: see kernels.Scoring.
        sinks: [H], see attention.softmax_with_sinks.
    """
    R, H, K = q.shape
    N = k.shape[1]
    v = v if v.shape[-1] else jnp.swapaxes(k, 2, 3)
    grouped = q.reshape(R, N, H // N, K)
    scores = jnp.einsum("rngk,rnkc->rngc", grouped, k, preferred_element_type=jnp.float32)
    scores = jnp.where(visible[:, None, None], capped(scores * K**-0.5, cap), MASKED)
    weights = softmax_with_sinks(scores, sinks).astype(v.dtype)
    return jnp.einsum("rngc,rnck->rngk", weights, v).reshape(R, H, K)


def attend_chunk(
    q: Array,
    k: Array,
    v: Array,
    visible: Array,
    context: tuple[Array, Array] | None = None,
    seen: Array | None = None,
    cap: float = 0.0,
    sinks: Array | None = None,
) -> Array:
    """Attend with queries [B, T, H, K] to new tokens [B, T, N, K] and the context before them.

    Args:
        q: queries.
        k: keys of the new tokens.
        v: values of the new tokens; width 0: keys are values, also in the context.
        visible: [B, T, T] bool, the new tokens visible to each query.
        context: keys [B, N, K, C] and values [B, N, C, K] of the previous tokens.
        seen: [B, T or 1, C] bool, the context columns visible to each query.
        cap: see kernels.Scoring.
        sinks: [H], see attention.softmax_with_sinks.

    Returns [B, T, H, K].
    """
    B, T, H, K = q.shape
    N = k.shape[2]
    if not v.shape[-1]:
        v = k
        context = None if context is None else (context[0], jnp.swapaxes(context[0], 2, 3))
    grouped = q.reshape(B, T, N, H // N, K)
    scores = jnp.einsum("btngk,bsnk->bngts", grouped, k, preferred_element_type=jnp.float32)
    scores = jnp.where(visible[:, None, None], capped(scores * K**-0.5, cap), MASKED)
    if context is None or seen is None:
        weights = softmax_with_sinks(scores, sinks).astype(v.dtype)
        return jnp.einsum("bngts,bsnk->btngk", weights, v).reshape(B, T, H, K)
    # Queries with leading heads, like the context: otherwise XLA on CPU cannot multiply several
    # rows in bfloat16
    heads = jnp.transpose(grouped, (0, 2, 3, 1, 4))
    before = jnp.einsum("bngtk,bnkc->bngtc", heads, context[0], preferred_element_type=jnp.float32)
    before = jnp.where(seen[:, None, None], capped(before * K**-0.5, cap), MASKED)
    both = jnp.concatenate([before, scores], axis=-1)
    weights = softmax_with_sinks(both, sinks).astype(v.dtype)
    C = before.shape[-1]
    out = jnp.einsum("bngtc,bnck->btngk", weights[..., :C], context[1])
    out = out + jnp.einsum("bngts,bsnk->btngk", weights[..., C:], v)
    return out.reshape(B, T, H, K)
