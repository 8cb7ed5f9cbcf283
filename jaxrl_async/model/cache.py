"""The key-value cache: one array per layer and side, [slots, kv_heads, positions, head_dim]."""

from typing import NamedTuple

import jax.numpy as jnp
from jax import Array

from jaxrl_async.model.spec import ModelSpec


class KVCache(NamedTuple):
    """Keys and values of every layer; also what a prefill gives, over its rows."""

    k: tuple[Array, ...]  # layers of [B, N, S, K]
    v: tuple[Array, ...]  # layers of [B, N, S, K]


KV = KVCache


def init_cache(spec: ModelSpec, slots: int, length: int, dtype: jnp.dtype) -> KVCache:
    """An empty cache for `slots` sequences of at most `length` tokens."""
    shape = (slots, spec.kv_heads, length, spec.head_dim)
    return KVCache(*(tuple(jnp.zeros(shape, dtype) for _ in range(spec.layers)) for _ in range(2)))


def insert(cache: KVCache, kv: KVCache, rows: Array, slots: Array) -> KVCache:
    """Copy rows [n] of kv (length T <= S) into slots [n]; a slot out of range is dropped
    (padding)."""

    def put(into: Array, new: Array) -> Array:
        length = new.shape[2]
        return into.at[slots, :, :length].set(new[rows].astype(into.dtype), mode="drop")

    return KVCache(
        tuple(put(c, x) for c, x in zip(cache.k, kv.k, strict=True)),
        tuple(put(c, x) for c, x in zip(cache.v, kv.v, strict=True)),
    )
