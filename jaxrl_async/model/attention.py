"""Attention: the reference in plain jax.numpy, which is the truth, and the choice of what computes
it.

    sequence_attention      whole sequences in the trainer, by name: reference, splash (TPU), cudnn
    ragged_paged_reference  queries against a cache in pages, as kernels.ragged_paged reads it
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import Mesh, PartitionSpec
from numpy.typing import NDArray

from jaxrl_async.errors import ConfigError
from jaxrl_async.model import kernels
from jaxrl_async.model.kernels import SequenceAttention

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


def causal_within_segments(segment_ids_BT: Array) -> Array:
    """[B, T, T] bool: key s is not later than query t, in the same segment, and not padding (0)."""
    T = segment_ids_BT.shape[1]
    same = segment_ids_BT[:, :, None] == segment_ids_BT[:, None, :]
    real = (segment_ids_BT > 0)[:, None, :]
    return same & real & jnp.tril(jnp.ones((T, T), bool))


def seen_from(q_segments: Array, kv_segments: Array, places: Array) -> Array:
    """[B, t, T] bool: the same for queries at those places [t] of their rows."""
    same = q_segments[:, :, None] == kv_segments[:, None, :]
    real = (kv_segments > 0)[:, None, :]
    return same & real & (places[:, None] >= jnp.arange(kv_segments.shape[1]))


def reference(q_BTHK: Array, k_BTNK: Array, v_BTNK: Array, segment_ids_BT: Array) -> Array:
    """Grouped queries, causal within a segment, any platform: [B, H, T, T] scores exist in full."""
    return attend(q_BTHK, k_BTNK, v_BTNK, causal_within_segments(segment_ids_BT))


def ragged_paged_reference(
    q_tHK: Array,
    kv_pages: Array,
    kv_lens: Array,
    page_indices: Array,
    cu_q_lens: Array,
    num_seqs: Array,
) -> Array:
    """What kernels.ragged_paged computes, of the same arguments: each token gathers all its pages.

    Three queries of one sequence that has 5 tokens are at its positions 2, 3, 4.
    """
    t, _, K = q_tHK.shape
    token = jnp.arange(t)
    seq = jnp.searchsorted(cu_q_lens[1:], token, side="right").clip(0, kv_lens.shape[0] - 1)
    position = kv_lens[seq] - cu_q_lens[seq + 1] + token
    kv_tSCK = kv_pages[page_indices[seq], ..., :K].reshape(t, -1, kv_pages.shape[2], K)
    visible_tTS = jnp.arange(kv_tSCK.shape[1]) <= position[:, None, None]
    out = attend(q_tHK[:, None], kv_tSCK[:, :, 0::2], kv_tSCK[:, :, 1::2], visible_tTS)[:, 0]
    real = token < cu_q_lens[num_seqs[0]]
    return jnp.where(real[:, None, None], out, 0).astype(q_tHK.dtype)


# ---- the choice


def _places(_: int, places: NDArray[np.int32], mesh: Mesh) -> tuple[Array, PartitionSpec]:
    """Where a device's queries are in their rows: [devices, t]."""
    return jnp.asarray(places), PartitionSpec("context", None)


def _reference_part(
    q: Array, k: Array, v: Array, q_segments: Array, kv_segments: Array, places: Array
) -> Array:
    return attend(q, k, v, seen_from(q_segments, kv_segments, places[0]))


def _cudnn_part(
    q: Array, k: Array, v: Array, q_segments: Array, kv_segments: Array, places: Array
) -> Array:
    visible = seen_from(q_segments, kv_segments, places[0])
    return kernels.cudnn_masked(q, k, v, visible)


PART_ATTENTION = {
    "reference": kernels.PartAttention(_places, _reference_part),
    "splash": kernels.SPLASH_PART,
    "cudnn": kernels.PartAttention(_places, _cudnn_part),
}
"""The same where the length of the rows is divided."""

SEQUENCE_ATTENTION: dict[str, SequenceAttention] = {
    "reference": reference,
    "splash": kernels.splash,
    "cudnn": kernels.cudnn,
}
"""What model.attention may name, besides auto."""


def sequence_attention(
    name: str = "auto", *, mesh: Mesh | None = None, dtype: Any = jnp.float32, head_dim: int = 128
) -> SequenceAttention:
    """The attention of that name for a mesh (none: the first device) and a type of q, k, v.

    auto: splash on TPU, cudnn on NVIDIA where type and head width allow it, else the reference.
    ConfigError where the one asked for cannot run there.
    """
    device = jax.devices()[0] if mesh is None else mesh.devices.flat[0]
    if name == "auto":
        name = next(
            (n for n in ("splash", "cudnn") if not obstacle(n, device, dtype, head_dim)),
            "reference",
        )
    if problem := obstacle(name, device, dtype, head_dim):
        raise ConfigError(f"model.attention={name} {problem}")
    if name == "splash":
        part = kernels.splash_part_on(device, dtype)
        return kernels.per_shard(kernels.splash_on(device, dtype), mesh, part)
    return kernels.per_shard(SEQUENCE_ATTENTION[name], mesh, PART_ATTENTION[name])


def obstacle(name: str, device: Any, dtype: Any, head_dim: int) -> str | None:
    """Why that attention cannot run on a device, and what to do; None where it can."""
    if name == "splash" and device.platform != "tpu":
        return f"needs a TPU, and the trainer runs on {device.platform}. Set it to auto."
    if name != "cudnn":
        return None
    capability = str(getattr(device, "compute_capability", ""))  # "9.0" on NVIDIA
    if not capability[:1].isdigit():
        return f"needs an NVIDIA GPU, and the trainer runs on {device.platform}. Set it to auto."
    if jnp.dtype(dtype) not in (jnp.float16, jnp.bfloat16):
        return (
            f"computes in float16 or bfloat16, and model.dtype is {jnp.dtype(dtype)}. Set "
            "model.dtype=bfloat16 or model.attention=reference."
        )
    widest = 256 if float(capability) >= 9 else 128
    if head_dim > widest or head_dim % 8:
        return (
            f"wants heads of a multiple of 8, at most {widest} on this GPU, and the model's are "
            f"{head_dim} wide. Set model.attention=reference."
        )
    return None
