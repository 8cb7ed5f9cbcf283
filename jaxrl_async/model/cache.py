"""The key-value cache in pages, and the two forms in which the decode loop works on it.

Shapes: P pages, G tokens a page, N kv heads, K head width, R rows (running sequences), C context
columns (whole pages), X extra columns for the tokens of one block, n tokens.

    gathered    pages are copied once per block into a working copy [R, N, K, C + X] (keys with the
                positions last: the fastest form for XLA's CPU and a dense one for a GPU), every row
                appends at the same column, and the new columns go back to the pages at the end
    ragged      a TPU kernel reads the pages themselves, and the step writes into them

The form is chosen once per engine; both hold the same numbers. Of a model with latent attention
(latent.py) pages are gathered, and values have width 0: the keys, of one head, are the values, too.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from jaxrl_async.model.attention import capped, softmax_with_sinks
from jaxrl_async.model.sink_pages import page_head_dim, sinks_page
from jaxrl_async.model.spec import ModelSpec

MASKED = -1e30
"""Score of a position that must not be seen: finite, so that a fully masked row gives no NaN."""


class PagedKV(NamedTuple):
    """Keys and values of every layer, in pages.

    gathered: k layers of [P, N, K, G], v layers of [P, N, G, K].
    ragged: k layers of [P, G, 2 N, W], keys and values alternating on the third axis, heads padded
    with zeros to the width that the kernel reads; v is empty.
    """

    k: tuple[Array, ...]
    v: tuple[Array, ...]


class NewKV(NamedTuple):
    """Keys and values of some tokens that are not in pages yet."""

    k: tuple[Array, ...]  # layers of [n, N, K]
    v: tuple[Array, ...]  # layers of [n, N, K]


class CachedContext(NamedTuple):
    """Pages of some rows put side by side."""

    k: tuple[Array, ...]  # layers of [R, N, K, C]
    v: tuple[Array, ...]  # layers of [R, N, C, K]


def init_pages(
    spec: ModelSpec, pages: int, page_tokens: int, dtype: Any, *, ragged: bool = False
) -> PagedKV:
    """Return empty pages; for the ragged kernel and a model with sinks with a sinks_page behind
    them."""
    (sides, N, K), G = spec.cached_shape, page_tokens

    def layers(*shape: int) -> tuple[Array, ...]:
        """Pages of all layers; those of a gated delta net have no heads."""
        heads = 2 if ragged else 1
        none = tuple(0 if i == heads else size for i, size in enumerate(shape))
        return tuple(jnp.zeros(none if kind.is_linear else shape, dtype) for kind in spec.kinds)

    if ragged and spec.sinks:
        shape = (pages + 1, G, 2 * N, page_head_dim(K))  # one more: what has no page is written to
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


def write_tokens(kv: PagedKV, new: NewKV, pages: Array, offsets: Array) -> PagedKV:
    """Write tokens [n] at offsets [n] of pages [n]; P is the number of no page (padding)."""
    if is_ragged(kv):
        return PagedKV(
            tuple(
                p.at[pages, offsets].set(interleaved(k, v, p), mode="drop")
                for p, k, v in zip(kv.k, new.k, new.v, strict=True)
            ),
            (),
        )

    def put(into: Any, values: Array) -> Array:
        return into.set(values.astype(kv.k[0].dtype), mode="drop")

    return PagedKV(
        tuple(put(p.at[pages, :, :, offsets], x) for p, x in zip(kv.k, new.k, strict=True)),
        tuple(put(p.at[pages, :, offsets], x) for p, x in zip(kv.v, new.v, strict=True)),
    )


def interleaved(k: Array, v: Array, like: Array) -> Array:
    """Interleave keys and values [n, N, K] as [n, 2 N, W]: first head's key, its value, second
    head's key, ...

    W and the number type are those of the pages `like`.
    """
    n, N, K = k.shape
    pairs = jnp.stack([k, v], axis=2).reshape(n, 2 * N, K).astype(like.dtype)
    return jnp.pad(pairs, ((0, 0), (0, 0), (0, like.shape[-1] - K)))


def copy_pages(kv: PagedKV, sources: Array, targets: Array) -> PagedKV:
    """Copy whole pages; a target P is no page (padding)."""
    return jax.tree.map(lambda p: p.at[targets].set(take(p, sources), mode="drop"), kv)


def take(pages: Array, ids: Array) -> Array:
    """Return pages by number; a number beyond the last gives the last page (callers mask it)."""
    return pages.at[jnp.minimum(ids, pages.shape[0] - 1)].get(mode="promise_in_bounds")


def gather(kv: PagedKV, tables: Array, head_dim: int, extra: int = 0) -> CachedContext:
    """Put the pages that tables [R, C / G] name side by side, with `extra` empty columns behind."""
    R, count = tables.shape

    def keys(p: Array) -> Array:
        N, K, G = p.shape[1:]
        rows = jax.lax.optimization_barrier(take(p, tables))  # [R, count, N, K, G]
        rows = jnp.moveaxis(rows, 1, 3).reshape(R, N, K, count * G)
        return jnp.pad(rows, ((0, 0), (0, 0), (0, 0), (0, extra)))

    def values(p: Array) -> Array:
        N, G, K = p.shape[1:]
        rows = jnp.swapaxes(take(p, tables), 1, 2).reshape(R, N, count * G, K)
        return jnp.pad(rows, ((0, 0), (0, 0), (0, extra), (0, 0)))

    if not is_ragged(kv):
        return CachedContext(tuple(keys(p) for p in kv.k), tuple(values(p) for p in kv.v))
    pairs = [
        take(p, tables).reshape(R, count * p.shape[1], *p.shape[2:])[..., :head_dim] for p in kv.k
    ]
    pairs = [jnp.pad(p, ((0, 0), (0, extra), (0, 0), (0, 0))) for p in pairs]
    return CachedContext(
        tuple(jnp.moveaxis(p[:, :, 0::2], 1, 3) for p in pairs),
        tuple(jnp.swapaxes(p[:, :, 1::2], 1, 2) for p in pairs),
    )


def columns(context: CachedContext, start: int) -> NewKV:
    """Return the columns from `start` on as tokens: row by row, [R * X] of them."""

    def keys(w: Array) -> Array:
        new = jnp.moveaxis(w[..., start:], 3, 1)
        return new.reshape(new.shape[0] * new.shape[1], *new.shape[2:])

    def values(w: Array) -> Array:
        new = jnp.swapaxes(w[:, :, start:], 1, 2)
        return new.reshape(new.shape[0] * new.shape[1], *new.shape[2:])

    return NewKV(tuple(keys(w) for w in context.k), tuple(values(w) for w in context.v))


def append(w: Array, new: Array, column: Array, *, keys: bool) -> Array:
    """Write one token a row [R, N, K] at the same column of a working copy."""
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
    """Attend with one query a row [R, H, K] to the columns visible to it [R, C]: [R, H, K].

    Args:
        q: queries.
        k: keys [R, N, K, C].
        v: values [R, N, C, K], or of width 0: the keys.
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
    """Attend with queries [B, T, H, K] to new tokens [B, T, N, K] and to the context before them.

    Args:
        q: queries.
        k: keys of the new tokens.
        v: values of the new tokens; of width 0: the keys, of the context, too.
        visible: [B, T, T] bool, which new tokens each query may see.
        context: keys [B, N, K, C] and values [B, N, C, K] of the tokens before.
        seen: [B, T or 1, C] bool, which context columns each query may see.
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
    before = jnp.einsum(
        "btngk,bnkc->bngtc", grouped, context[0], preferred_element_type=jnp.float32
    )
    before = jnp.where(seen[:, None, None], capped(before * K**-0.5, cap), MASKED)
    both = jnp.concatenate([before, scores], axis=-1)
    weights = softmax_with_sinks(both, sinks).astype(v.dtype)
    C = before.shape[-1]
    out = jnp.einsum("bngtc,bnck->btngk", weights[..., :C], context[1])
    out = out + jnp.einsum("bngts,bsnk->btngk", weights[..., C:], v)
    return out.reshape(B, T, H, K)
