"""Attention: the reference in plain jax.numpy, for whole sequences and for one token against a
cache."""

import jax
import jax.numpy as jnp
from jax import Array

MASKED = -1e30
"""Score of a position that must not be seen: finite, so that a fully masked row gives no NaN."""


def attend(q_BTHK: Array, k_BTNK: Array, v_BTNK: Array, visible_BTT: Array) -> Array:
    """Softmax attention with grouped queries; scores in float32. Returns [B, T, H, K].

    visible_BTT[b, t, s]: query t may see key s. A query that sees nothing averages all values;
    callers ignore such rows (padding).
    """
    B, T, H, K = q_BTHK.shape
    N = k_BTNK.shape[2]
    q = q_BTHK.reshape(B, T, N, H // N, K)
    scores = jnp.einsum("btngk,bsnk->bngts", q, k_BTNK, preferred_element_type=jnp.float32)
    scores = jnp.where(visible_BTT[:, None, None], scores * K**-0.5, MASKED)
    weights = jax.nn.softmax(scores, axis=-1).astype(v_BTNK.dtype)
    return jnp.einsum("bngts,bsnk->btngk", weights, v_BTNK).reshape(B, T, H, K)


def attend_cache(q_BHK: Array, k_BNSK: Array, v_BNSK: Array, lengths_B: Array) -> Array:
    """One query per sequence against its cache positions 0..lengths (inclusive). Returns [B, H,
    K]."""
    B, H, K = q_BHK.shape
    N, S = k_BNSK.shape[1:3]
    q = q_BHK.reshape(B, N, H // N, K)
    scores = jnp.einsum("bngk,bnsk->bngs", q, k_BNSK, preferred_element_type=jnp.float32)
    visible = jnp.arange(S) <= lengths_B[:, None]
    scores = jnp.where(visible[:, None, None], scores * K**-0.5, MASKED)
    weights = jax.nn.softmax(scores, axis=-1).astype(v_BNSK.dtype)
    return jnp.einsum("bngs,bnsk->bngk", weights, v_BNSK).reshape(B, H, K)


def causal_within_segments(segment_ids_BT: Array) -> Array:
    """[B, T, T] bool: key s is not later than query t, in the same segment, and not padding (0)."""
    T = segment_ids_BT.shape[1]
    same = segment_ids_BT[:, :, None] == segment_ids_BT[:, None, :]
    real = (segment_ids_BT > 0)[:, None, :]
    return same & real & jnp.tril(jnp.ones((T, T), bool))
