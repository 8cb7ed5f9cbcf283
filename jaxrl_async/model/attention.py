"""Attention: the reference implementation in jax.numpy, and the choice of a kernel.

sequence_attention      whole sequences in the trainer, by name: reference, splash (TPU), cudnn and
                        flash (NVIDIA); also for contexts that share prefixes; custom kernels on
                        CPUs
ragged_paged_reference  queries against a paged cache, in the form of kernels.ragged_paged
"""

import logging
from functools import cache, partial
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import Mesh, PartitionSpec
from jax.typing import DTypeLike
from numpy.typing import NDArray

from jaxrl_async.config.model_section import AMPERE
from jaxrl_async.cpu.gradients import flash, tree_flash
from jaxrl_async.cpu.kernel_library import TRAINING, kernels_are_there
from jaxrl_async.errors import ConfigError
from jaxrl_async.later import Later
from jaxrl_async.model import kernels
from jaxrl_async.model.kernels import (
    PLAIN,
    PartAttention,
    Scoring,
    SequenceAttention,
    of_extent,
    seen_in_tree,
)

if TYPE_CHECKING:
    from jaxrl_async.model import gpu_flash, gpu_packed
else:
    gpu_flash = Later("jaxrl_async.model.gpu_flash")
    gpu_packed = Later("jaxrl_async.model.gpu_packed")

log = logging.getLogger(__name__)

MASKED = -1e30
"""Score of a masked position: finite, to avoid NaN in fully masked rows."""
UNTIL_AT_ONCE = 128
"""Tokens of each row that `visible_until` compares with the whole row at a time."""


def attend(
    q_BTHK: Array,
    k_BTNK: Array,
    v_BTNK: Array,
    visible_BTT: Array,
    scoring: Scoring = PLAIN,
    sinks_H: Array | None = None,
) -> Array:
    """Compute softmax attention with grouped queries, scores in float32: [B, T, H, K]. Only the cap
    of `scoring` is used; the window is in visible_BTT.

    visible_BTT[b, t, s]: query t may see key s. A query without visible keys averages all values;
    callers ignore such rows (padding). sinks_H: see softmax_with_sinks. If values have width 0, the
    keys are used as values.
    """
    v_BTNK = v_BTNK if v_BTNK.shape[-1] else k_BTNK
    B, T, H, K = q_BTHK.shape
    N = k_BTNK.shape[2]
    q = q_BTHK.reshape(B, T, N, H // N, K)
    scores = jnp.einsum("btngk,bsnk->bngts", q, k_BTNK, preferred_element_type=jnp.float32)
    scores = capped(scores * K**-0.5, scoring.cap)
    scores = jnp.where(visible_BTT[:, None, None], scores, MASKED)
    weights = softmax_with_sinks(scores, sinks_H).astype(v_BTNK.dtype)
    return jnp.einsum("bngts,bsnk->btngk", weights, v_BTNK).reshape(B, T, H, K)


def softmax_with_sinks(scores: Array, sinks_H: Array | None) -> Array:
    """Return the softmax of scores [B, N, G, ..., S] over the last axis, [B, N, G, ..., S].

    sinks_H [N * G]: an additional logit of each head, whose share goes to no value (gpt-oss; Xiao
    et al. 2023, arXiv:2309.17453, sec. 3.3). None: no sinks.
    """
    if sinks_H is None:
        return jax.nn.softmax(scores, axis=-1)
    ones = (1,) * (scores.ndim - 3)
    sinks = sinks_H.astype(scores.dtype).reshape(1, *scores.shape[1:3], *ones)
    largest = jnp.maximum(jnp.max(scores, axis=-1, keepdims=True), sinks)
    largest = jax.lax.stop_gradient(largest)
    odds = jnp.exp(scores - largest)
    return odds / (jnp.sum(odds, axis=-1, keepdims=True) + jnp.exp(sinks - largest))


def capped(scores: Array, cap: float) -> Array:
    """Return scores bounded to cap tanh(scores / cap); cap 0: unchanged."""
    return cap * jnp.tanh(scores / cap) if cap else scores


def causal_within_segments(segment_ids_BT: Array, window: int = 0) -> Array:
    """Return [B, T, T] bool: whether key s is not later than query t, in the same segment, not
    padding (0), and not before the window."""
    T = segment_ids_BT.shape[1]
    same = segment_ids_BT[:, :, None] == segment_ids_BT[:, None, :]
    real = (segment_ids_BT > 0)[:, None, :]
    band = jnp.tril(jnp.ones((T, T), bool))
    return same & real & (jnp.triu(band, 1 - window) if window else band)


def seen_from(q_segments: Array, kv_segments: Array, positions: Array, window: int = 0) -> Array:
    """Return [B, t, T] bool like causal_within_segments, for queries at positions [t] of their
    rows."""
    same = q_segments[:, :, None] == kv_segments[:, None, :]
    real = (kv_segments > 0)[:, None, :]
    keys = jnp.arange(kv_segments.shape[1])
    seen = same & real & (positions[:, None] >= keys)
    return seen & (keys > positions[:, None] - window) if window else seen


def reference(
    q_BTHK: Array,
    k_BTNK: Array,
    v_BTNK: Array,
    segment_ids_BT: Array,
    scoring: Scoring = PLAIN,
    sinks_H: Array | None = None,
) -> Array:
    """Attend causally within segments on any platform; all scores [B, H, T, T] are in memory."""
    visible = causal_within_segments(segment_ids_BT, scoring.window)
    return attend(q_BTHK, k_BTNK, v_BTNK, visible, scoring, sinks_H)


# ---- images


def image_reference(
    q_BTHK: Array,
    k_BTNK: Array,
    v_BTNK: Array,
    extent_BT2: Array,
    scoring: Scoring = PLAIN,
    sinks_H: Array | None = None,
) -> Array:
    """Attend like `reference`, and also from each token of an image to later tokens of the image
    (Gemma 3); a window limits only earlier keys.

    extent_BT2: the segment ids, and the position where a token's image begins; -1: no image.
    """
    segments, begins = extent_BT2[..., 0], extent_BT2[..., 1]
    same = segments[:, :, None] == segments[:, None, :]
    image = same_image(begins, begins) & same & (segments > 0)[:, None, :]
    visible = causal_within_segments(segments) | image
    if scoring.window:
        indices = jnp.arange(segments.shape[1])
        visible &= indices > indices[:, None] - scoring.window
    return attend(q_BTHK, k_BTNK, v_BTNK, visible, scoring, sinks_H)


def same_image(q_begins: Array, kv_begins: Array) -> Array:
    """Return [B, t, T] bool: whether query and key of one sequence are in the same image, given the
    begins of their images [B, t], [B, T]; -1: no image."""
    return (q_begins[:, :, None] == kv_begins[:, None, :]) & (q_begins >= 0)[:, :, None]


def image_attention(mesh: Mesh | None) -> SequenceAttention:
    """Return the attention for rows with images on a mesh, whose context axis must be 1."""
    return kernels.per_shard(image_reference, mesh, PART_ATTENTION["reference"])


# ---- contexts that share prefixes


def visible_until(positions_BT: Array, segment_ids_BT: Array) -> Array:
    """Return [B, T] int32: the index in its row up to which (exclusive) a token is visible.

    A segment whose positions begin at s > 0 continues the first s tokens of the previous context in
    the row (trainer.prefix_plan). A token at position p is therefore visible until a later segment
    begins at a position of at most p. A padding token is visible only to itself.

        segments    1 1 1 1 2 2 3 3
        positions   0 1 2 3 2 3 1 2
        until       8 6 4 4 6 6 8 8
    """
    T = segment_ids_BT.shape[1]
    indices = jnp.arange(T, dtype=jnp.int32)
    changes = segment_ids_BT[:, 1:] != segment_ids_BT[:, :-1]
    begins = jnp.pad(changes, ((0, 0), (1, 0)), constant_values=True)

    def until_of(token: tuple[Array, Array]) -> Array:
        index, position_B = token
        ends = begins & (positions_BT <= position_B[:, None]) & (indices > index)
        return jnp.min(jnp.where(ends, indices, T), axis=1)

    until = jax.lax.map(until_of, (indices, positions_BT.T), batch_size=min(T, UNTIL_AT_ONCE)).T
    return jnp.where(segment_ids_BT > 0, until, indices + 1)


def tree_reference(
    q_BTHK: Array,
    k_BTNK: Array,
    v_BTNK: Array,
    extent_BT: Array,
    scoring: Scoring = PLAIN,
    sinks_H: Array | None = None,
) -> Array:
    """Attend like `reference`, for contexts that share prefixes."""
    visible = _seen(extent_BT, jnp.arange(extent_BT.shape[1]), scoring)
    return attend(q_BTHK, k_BTNK, v_BTNK, visible, scoring, sinks_H)


def _seen(extent_BT: Array, indices: Array, scoring: Scoring) -> Array:
    until, positions = of_extent(extent_BT)
    return seen_in_tree(until, indices, positions, scoring.window)


def tree_splash(
    q_BTHK: Array,
    k_BTNK: Array,
    v_BTNK: Array,
    extent_BT: Array,
    scoring: Scoring = PLAIN,
    sinks_H: Array | None = None,
    *,
    most: int = kernels.MAX_SPLASH_BLOCK,
) -> Array:
    """Attend like kernels.splash_in_tree, with all queries of the rows."""
    indices = jnp.arange(extent_BT.shape[1])
    return kernels.splash_in_tree(
        q_BTHK, k_BTNK, v_BTNK, extent_BT, indices, scoring, sinks_H, most=most
    )


REFERENCE_TOKENS = 64
"""Query tokens whose pages ragged_paged_reference copies at a time."""


def ragged_paged_reference(
    q_tHK: Array,
    kv_pages: Array,
    kv_lens: Array,
    page_indices: Array,
    cu_q_lens: Array,
    num_seqs: Array,
    scoring: Scoring = PLAIN,
    sinks_H: Array | None = None,
) -> Array:
    """Compute kernels.ragged_paged by gathering all pages of each token, a few tokens at a time;
    same arguments. With latent attention pages are [P, G, W], and keys are values.

    For example, three queries of a sequence of 5 tokens are at its positions 2, 3, 4.
    """
    t, _, K = q_tHK.shape
    token = jnp.arange(t)
    seq = jnp.searchsorted(cu_q_lens[1:], token, side="right").clip(0, kv_lens.shape[0] - 1)
    position = kv_lens[seq] - cu_q_lens[seq + 1] + token
    kv_rows = kv_pages.shape[2] if kv_pages.ndim == 4 else 1  # 1: keys are values

    def one(query: tuple[Array, Array, Array]) -> Array:
        q_HK, seq, position = query
        kv_SCK = kv_pages[page_indices[seq], ..., :K].reshape(-1, kv_rows, K)
        columns = jnp.arange(kv_SCK.shape[0])
        visible_S = columns <= position
        if scoring.window:
            visible_S &= columns > position - scoring.window
        keys = kv_SCK[None, :, 0::2]
        values = kv_SCK[None, :, 1::2] if kv_rows > 1 else keys
        return attend(q_HK[None, None], keys, values, visible_S[None, None], scoring, sinks_H)[0, 0]

    out = jax.lax.map(one, (q_tHK, seq, position), batch_size=REFERENCE_TOKENS)
    real = token < cu_q_lens[num_seqs[0]]
    return jnp.where(real[:, None, None], out, 0).astype(q_tHK.dtype)


# ---- the choice


def _positions(
    _: int, positions: NDArray[np.int32], mesh: Mesh, scoring: Scoring = PLAIN
) -> tuple[Array, PartitionSpec]:
    """Return the positions [devices, t] of each device's queries, and their sharding."""
    return jnp.asarray(positions), PartitionSpec("context", None)


def _reference_part(
    q: Array,
    k: Array,
    v: Array,
    q_segments: Array,
    kv_segments: Array,
    positions: Array,
    scoring: Scoring = PLAIN,
    sinks: Array | None = None,
) -> Array:
    seen = seen_from(q_segments, kv_segments, positions[0], scoring.window)
    return attend(q, k, v, seen, scoring, sinks)


def _flash_part(
    q: Array,
    k: Array,
    v: Array,
    _: Array,
    kv_segments: Array,
    positions: Array,
    scoring: Scoring = PLAIN,
    sinks: Array | None = None,
) -> Array:
    return gpu_flash.flash_part(q, k, v, kv_segments, positions[0], scoring, sinks)


PART_ATTENTION = {
    "reference": kernels.PartAttention(_positions, _reference_part),
    "splash": kernels.SPLASH_PART,
    "cudnn": kernels.PartAttention(_positions, _flash_part),
    "flash": kernels.PartAttention(_positions, _flash_part),
}
"""Attention by name for rows whose length is divided over devices; cuDNN does not support it."""


def _cudnn(*given: Any, **more: Any) -> Array:
    return gpu_packed.cudnn(*given, **more)


def _flash(*given: Any, **more: Any) -> Array:
    return gpu_flash.flash(*given, **more)


def _tree_flash(*given: Any, **more: Any) -> Array:
    return gpu_flash.tree_flash(*given, **more)


SEQUENCE_ATTENTION: dict[str, SequenceAttention] = {
    "reference": reference,
    "splash": kernels.splash,
    "cudnn": _cudnn,
    "flash": _flash,
}
"""Attention by the names of model.attention; auto chooses one of them."""

TREE_ATTENTION: dict[str, SequenceAttention] = {
    "reference": tree_reference,
    "splash": tree_splash,
    "cudnn": _tree_flash,
    "flash": _tree_flash,
}
"""Attention by name for contexts that share prefixes, which cuDNN does not support; the last
argument is `visible_until`."""


def _tree_reference_part(
    q: Array,
    k: Array,
    v: Array,
    _: Array,
    extent: Array,
    indices: Array,
    scoring: Scoring = PLAIN,
    sinks: Array | None = None,
) -> Array:
    return attend(q, k, v, _seen(extent, indices[0], scoring), scoring, sinks)


def _tree_splash_part(
    q: Array,
    k: Array,
    v: Array,
    _: Array,
    extent: Array,
    indices: Array,
    scoring: Scoring,
    sinks: Array | None = None,
    *,
    most: int = kernels.MAX_SPLASH_BLOCK,
) -> Array:
    return kernels.splash_in_tree(q, k, v, extent, indices[0], scoring, sinks, most=most)


def _tree_flash_part(
    q: Array,
    k: Array,
    v: Array,
    _: Array,
    extent: Array,
    indices: Array,
    scoring: Scoring = PLAIN,
    sinks: Array | None = None,
) -> Array:
    return gpu_flash.tree_flash_part(q, k, v, extent, indices[0], scoring, sinks)


TREE_PARTS = {
    "reference": PartAttention(_positions, _tree_reference_part),
    "splash": PartAttention(_positions, _tree_splash_part),
    "cudnn": PartAttention(_positions, _tree_flash_part),
    "flash": PartAttention(_positions, _tree_flash_part),
}
"""Attention by name for rows that share prefixes and whose length is divided over devices."""


def sequence_attention(
    name: str = "auto",
    *,
    mesh: Mesh | None = None,
    dtype: DTypeLike = jnp.float32,
    head_dim: int = 128,
    cap: float = 0.0,
    sinks: bool = False,
    shares_prefixes: bool = False,
    cpu_kernels: bool = False,
) -> SequenceAttention:
    """Return an attention by name. auto chooses splash on TPUs; on NVIDIA GPUs, cudnn if card, type
    and heads allow it, else flash; this package's kernels on CPUs; else the reference.

    With cudnn, rows that share prefixes or are divided over the axis context use flash's kernels.

    Args:
        name: a name of SEQUENCE_ATTENTION, or auto.
        mesh: mesh on which it runs; None: the first device.
        dtype: type of q, k and v.
        head_dim: width of a head.
        cap: bound of the scores, not supported by cuDNN; 0: no bound.
        sinks: whether heads have attention sinks, not supported by cuDNN.
        shares_prefixes: its last argument is `visible_until` in place of the segment ids.
        cpu_kernels: whether auto may choose this package's CPU kernels.

    Raises ConfigError if the attention cannot run there.
    """
    device = jax.devices()[0] if mesh is None else mesh.devices.flat[0]
    if name == "auto" and cpu_kernels and has_cpu_kernels(device, dtype):
        if shares_prefixes:
            return kernels.per_shard(tree_flash, mesh, TREE_PARTS["reference"])
        return kernels.per_shard(flash, mesh, PART_ATTENTION["reference"])
    if name == "auto":
        name = next(
            (
                n
                for n in ("splash", "cudnn", "flash")
                if not obstacle(n, device, dtype, head_dim, cap, sinks=sinks)
            ),
            "reference",
        )
        if name == "reference" and device.platform != "cpu":
            _log_quadratic(device.platform)
    if problem := obstacle(name, device, dtype, head_dim, cap, sinks=sinks):
        raise ConfigError(f"model.attention={name} {problem}")
    divided = mesh is not None and mesh.size > 1 and mesh.shape["context"] > 1
    if name == "cudnn" and (shares_prefixes or divided):
        log.info("model.attention=cudnn: rows that share prefixes or are divided use flash")
    if shares_prefixes:
        return _tree_attention(name, mesh, kernels.most_splash_block(device, dtype))
    if name == "splash":
        part = kernels.splash_part_on(device, dtype)
        return kernels.per_shard(kernels.splash_on(device, dtype), mesh, part)
    return kernels.per_shard(SEQUENCE_ATTENTION[name], mesh, PART_ATTENTION[name])


def _tree_attention(name: str, mesh: Mesh | None, most: int) -> SequenceAttention:
    """Return the attention for contexts that share prefixes; most: maximum block of splash."""
    if name != "splash" or most == kernels.MAX_SPLASH_BLOCK:
        return kernels.per_shard(TREE_ATTENTION[name], mesh, TREE_PARTS[name])
    part = PartAttention(_positions, partial(_tree_splash_part, most=most))
    return kernels.per_shard(partial(tree_splash, most=most), mesh, part)


HOPPER = 9
"""Minimum major compute capability of NVIDIA GPUs for which cuDNN supports packed rows."""
WIDEST_CUDNN = {HOPPER: 256}
"""Maximum head width for training with cuDNN, by major compute capability."""
WIDEST_CUDNN_LATER = 128
"""Maximum head width after Hopper. JAX's check allows 256, but NVIDIA's frontend in jaxlib refuses
more than 128 in the backward pass except on Hopper (scaled_dot_product_flash_attention.h, version
1.23). 256 on 10.x, packed, needs version 1.26 and cuDNN 9.30
(github.com/NVIDIA/TransformerEngine/pull/3056).
"""
LEAST_CUDNN = {(10, 3): (9, 11, 0), (12, 0): (9, 18, 1), (12, 1): (9, 18, 1)}
"""Minimum version of cuDNN for packed rows on cards that need a newer one. On 10.3 JAX refuses an
older version; 12.x supports packed rows from this version on
(github.com/NVIDIA/TransformerEngine/pull/2693)."""


def has_cpu_kernels(device: Any, dtype: DTypeLike) -> bool:
    """Return whether updates on a device can use this package's CPU kernels; builds them."""
    return (
        device.platform == "cpu" and jnp.dtype(dtype) == jnp.float32 and kernels_are_there(TRAINING)
    )


def obstacle(
    name: str,
    device: Any,
    dtype: DTypeLike,
    head_dim: int,
    cap: float = 0.0,
    *,
    sinks: bool = False,
) -> str | None:
    """Return the reason why an attention cannot run on a device, and the remedy; None if it can."""
    if name == "splash" and device.platform != "tpu":
        return f"needs a TPU, but the trainer runs on {device.platform}. Set it to auto."
    if name not in ("cudnn", "flash"):
        return None
    capability = capability_of(device)
    if capability is None:
        return f"needs an NVIDIA GPU, but the trainer runs on {device.platform}. Set it to auto."
    its = "{}.{}".format(*capability)
    least = HOPPER if name == "cudnn" else AMPERE
    if capability[0] < least:
        return (
            f"needs an NVIDIA GPU of compute capability {least}.0, but the trainer's has {its}. "
            "Set it to auto."
        )
    if name == "flash":
        return None
    if gpu_packed.cudnn_attention() is None:
        return (
            f"needs cuDNN's attention by offsets, which this package does not find in jax "
            f"{jax.__version__}. Set model.attention=flash."
        )
    if jnp.dtype(dtype) not in (jnp.float16, jnp.bfloat16):
        return (
            f"computes in float16 or bfloat16, but model.dtype is {jnp.dtype(dtype)}. Set "
            "model.dtype=bfloat16 or model.attention=flash."
        )
    if cap:
        return "does not support the score cap of this model. Set model.attention=flash."
    if sinks:
        return "does not support the attention sinks of this model. Set model.attention=flash."
    widest = WIDEST_CUDNN.get(capability[0], WIDEST_CUDNN_LATER)
    if head_dim > widest or head_dim % 8:
        return (
            f"needs a head width that is a multiple of 8, at most {widest} on compute capability "
            f"{its}, but the model's is {head_dim}. Set model.attention=flash."
        )
    needed, found = LEAST_CUDNN.get(capability), gpu_packed.cudnn_version()
    if needed and found and found < needed:
        wanted, older = (".".join(map(str, version)) for version in (needed, found))
        return (
            f"needs cuDNN {wanted} on compute capability {its}, but {older} is installed. Install "
            "a newer nvidia-cudnn, or set model.attention=flash."
        )
    return None


@cache
def _log_quadratic(platform: str) -> None:
    log.warning(
        "no attention kernel supports this %s: the reference keeps all scores of a row in memory, "
        "several times 4 bytes x heads x length squared. Lower trainer.row_length if memory runs "
        "out.",
        platform,
    )


# ---- compute capability of NVIDIA GPUs


Capability = tuple[int, int]
"""Major and minor version: (9, 0) for an H100."""


def capability_of(device: jax.Device) -> Capability | None:
    """Return a device's compute capability; None if it is not an NVIDIA GPU."""
    major, _, minor = str(getattr(device, "compute_capability", "")).partition(".")
    return (int(major), int(minor or 0)) if major.isdigit() else None


def has_triton(device: jax.Device) -> bool:
    """Return whether a device supports the Triton kernels: NVIDIA GPUs since Ampere."""
    return (capability_of(device) or (0, 0)) >= (AMPERE, 0)
