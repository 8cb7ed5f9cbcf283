"""The one decoder, used by trainer and sampler alike: embedding, layers, head. Pure functions.

Parameters are a pure dict of arrays, layers stacked on axis 0. The trainer scans over the layers;
the decode step unrolls them over statically indexed weights, which is the fastest form for small
batches.
"""

import zlib
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array

from jaxrl_async.model.attention import attend, attend_cache, causal_within_segments
from jaxrl_async.model.cache import KVCache
from jaxrl_async.model.layers import Layer, initial, layer_graph, rms_norm, rope_angles
from jaxrl_async.model.spec import ModelSpec, Weight, weight_table

UNROLL = 4
"""Layers in one turn of the trainer's scan: more is faster where layers are small, and compiles
longer."""

Params = Any  # nested dict of arrays in the tree of weight_table


def init_params(spec: ModelSpec, key: Array, dtype: Any = jnp.float32) -> Params:
    """Random parameters; each weight's key depends on its name only."""

    def make(path: Any, weight: Weight) -> Array:
        name = jax.tree_util.keystr(path)
        return initial(weight, jax.random.fold_in(key, zlib.crc32(name.encode())), dtype)

    return jax.tree_util.tree_map_with_path(
        make, weight_table(spec), is_leaf=lambda w: isinstance(w, Weight)
    )


def output_head(spec: ModelSpec, params: Params) -> Array:
    """[D, V]: the output head, or the embedding transposed where they are tied."""
    return params["embed"].T if spec.tied else params["lm_head"]


def hidden_states(
    spec: ModelSpec,
    params: Params,
    token_ids: Array,
    positions: Array,
    segment_ids: Array,
    *,
    dtype: Any = jnp.float32,
    remat: str = "none",
) -> Array:
    """[B, T, D] after the final norm; [B, T] inputs, causal within a segment, segment 0 is
    padding."""
    B, T = token_ids.shape
    visible = causal_within_segments(segment_ids)
    cos, sin = rope_angles(spec, positions.reshape(-1))

    # Tokens in one flat axis outside attention: the gradient of [B, T, D] @ W is 3x slower on CPU.
    def one_layer(x: Array, weights: Params) -> tuple[Array, None]:
        layer = nnx.merge(layer_graph(spec), weights)
        q, k, v = (a.reshape(B, T, *a.shape[1:]) for a in layer.qkv(x, cos, sin))
        attended = attend(q, k, v, visible)
        return layer.finish(x, attended.reshape(B * T, *attended.shape[2:])), None

    x = _embed(params, token_ids.reshape(-1), dtype)
    x, _ = jax.lax.scan(
        _remat(one_layer, remat), x, params["layers"], unroll=min(spec.layers, UNROLL)
    )
    return _final_norm(spec, params, x).reshape(B, T, -1)


def prefill(
    spec: ModelSpec, params: Params, token_ids: Array, lengths: Array, *, dtype: Any = jnp.float32
) -> tuple[Array, KVCache]:
    """Prompts [B, T] of lengths [B] (>= 1): logits [B, V] float32 after the last token, and their
    KV.

    What lies beyond a row's length in the KV is never seen: decode_step overwrites it first.
    """
    B, T = token_ids.shape
    positions = jnp.broadcast_to(jnp.arange(T), (B, T))
    visible = causal_within_segments((positions < lengths[:, None]).astype(jnp.int32))
    cos, sin = rope_angles(spec, positions)

    def one_layer(x: Array, weights: Params) -> tuple[Array, tuple[Array, Array]]:
        layer = nnx.merge(layer_graph(spec), weights)
        q, k, v = layer.qkv(x, cos, sin)
        kv = (jnp.swapaxes(k, 1, 2), jnp.swapaxes(v, 1, 2))
        return layer.finish(x, attend(q, k, v, visible)), kv

    x, (k, v) = jax.lax.scan(one_layer, _embed(params, token_ids, dtype), params["layers"])
    last = jnp.take_along_axis(x, (lengths - 1)[:, None, None], axis=1)[:, 0]
    return _logits(spec, params, last), KVCache(
        tuple(k[i] for i in range(spec.layers)), tuple(v[i] for i in range(spec.layers))
    )


def decode_step(
    spec: ModelSpec,
    params: Params,
    cache: KVCache,
    token_ids: Array,
    lengths: Array,
    *,
    dtype: Any = jnp.float32,
    live: int | None = None,
) -> tuple[Array, KVCache]:
    """One token [B] a sequence, written at cache position lengths [B]: logits [B, V] float32,
    cache.

    live (static): only the first `live` positions are read; the caller knows that lengths < live.
    """
    cos, sin = rope_angles(spec, lengths)
    rows = jnp.arange(token_ids.shape[0])
    x = _embed(params, token_ids, dtype)
    keys, values = [], []
    for i in range(spec.layers):
        layer: Layer = nnx.merge(
            layer_graph(spec), jax.tree.map(lambda w, i=i: w[i], params["layers"])
        )
        q, k, v = layer.qkv(x, cos, sin)
        keys.append(_write(cache.k[i], rows, lengths, k))
        values.append(_write(cache.v[i], rows, lengths, v))
        attended = attend_cache(q, keys[i][:, :, :live], values[i][:, :, :live], lengths)
        x = layer.finish(x, attended.astype(x.dtype))
    return _logits(spec, params, x), KVCache(tuple(keys), tuple(values))


def _write(cache_BNSK: Array, rows: Array, lengths: Array, new_BNK: Array) -> Array:
    """The new token's key or value at each row's own position; lengths must be below S."""
    return cache_BNSK.at[rows, :, lengths].set(
        new_BNK.astype(cache_BNSK.dtype), mode="promise_in_bounds", unique_indices=True
    )


def _embed(params: Params, token_ids: Array, dtype: Any) -> Array:
    return params["embed"][token_ids].astype(dtype)


def _final_norm(spec: ModelSpec, params: Params, x: Array) -> Array:
    return rms_norm(x, params["final_norm"].astype(x.dtype), spec.norm_eps)


def _logits(spec: ModelSpec, params: Params, x: Array) -> Array:
    """[B, D] -> [B, V] float32."""
    head = output_head(spec, params).astype(x.dtype)
    return jnp.matmul(_final_norm(spec, params, x), head, preferred_element_type=jnp.float32)


def _remat(function: Any, policy: str) -> Any:
    """`none`: keep all; `layer`: compute the layer again; `dots`: keep matrix products only."""
    if policy == "none":
        return function
    saved = jax.checkpoint_policies.dots_with_no_batch_dims_saveable if policy == "dots" else None
    return jax.checkpoint(function, policy=saved, prevent_cse=False)
