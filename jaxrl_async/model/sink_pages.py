"""Attention sinks for a kernel without support for them: a page of keys before every sequence.

Heads are padded to the width of a register, and two of the spare columns carry the sinks. The
page's first key has a 1 in the first column, its other keys in the second; all its values are 0.
Queries have their head's sink in the first column, which makes it their score with the first key,
and a score in the second column that gives the other keys no share. The tokens' keys have zeros in
both columns.
"""

import jax.numpy as jnp
from jax import Array
from jax.typing import DTypeLike

from jaxrl_async.errors import ConfigError

LANES = 128
"""Width of a TPU vector register: the unit of head widths and block lengths."""
SPARE = 2
"""Number of a head's columns for sinks."""
UNSEEN = -1e30
"""A score without a share, finite in bfloat16."""


def page_head_dim(head_dim: int) -> int:
    """Return the head width of pages that `kernels.ragged_paged` reads without a copy."""
    return -(-head_dim // LANES) * LANES


def has_spare(head_dim: int) -> bool:
    """Return whether pages have spare columns for sinks after heads of this width."""
    return head_dim + SPARE <= page_head_dim(head_dim)


def refuse_sinks(head_dim: int, window: int) -> None:
    """Raise ConfigError if heads leave no columns for sinks, or if the layer has a window."""
    if not has_spare(head_dim) or window:
        why = "with a window" if window else f"for heads of width {head_dim}"
        raise ConfigError(
            f"sampler.attention=ragged does not support attention sinks {why}. Set "
            "sampler.attention=gathered."
        )


def sinks_page(page_tokens: int, kv_rows: int, head_dim: int, dtype: DTypeLike) -> Array:
    """Return the page [1, page_tokens, kv_rows, W], keys and values alternating on the third
    axis."""
    columns = jnp.arange(page_head_dim(head_dim))
    column = jnp.where(jnp.arange(page_tokens) == 0, head_dim, head_dim + 1)
    keys = columns == column[:, None]
    is_key = (jnp.arange(kv_rows) % 2 == 0)[:, None]
    return (keys[:, None] & is_key).astype(dtype)[None]


def with_sinks(q_tHK: Array, sinks_H: Array, width: int) -> Array:
    """Return queries [t, H, width] whose scores with the keys of a sinks_page, times K ** -0.5, are
    their heads' sinks and UNSEEN."""
    t, H, K = q_tHK.shape
    sinks = (sinks_H.astype(q_tHK.dtype).astype(jnp.float32) * K**0.5).astype(q_tHK.dtype)
    unseen = jnp.full(H, UNSEEN, q_tHK.dtype)
    beside = jnp.broadcast_to(jnp.stack([sinks, unseen], axis=1), (t, H, SPARE))
    whole = jnp.concatenate([q_tHK, beside], axis=2)
    return jnp.pad(whole, ((0, 0), (0, 0), (0, width - K - SPARE)))
