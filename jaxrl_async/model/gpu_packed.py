"""cuDNN's flash attention of packed rows, given by the offsets of their segments: without a mask
[T, T] or its gradient. For NVIDIA Hopper and later.

    segments    1 1 1 2 2 0 0 0      lengths [3, 2, 3, -1]     starts [0, 3, 5, -1, -1]

JAX offers it only in a private function (`dot_product_attention` with q_offsets and kv_offsets). It
multiplies the offsets of the keys by the number of query heads, so keys and values are repeated
here to that number. While a layer runs, cuDNN reserves memory for a whole row per possible segment:
4 bytes x heads x length. The number of segments is therefore bounded (MOST_SEGMENTS); rows with
more use the kernels of gpu_flash.py, in another branch of the program.

    forward     keeps the output and the log of each query's sum, for the backward pass
    backward    uses them, so attention runs forward once, and a second time only if the whole layer
                is recomputed (model.remat=layer)
"""

import inspect
from collections.abc import Callable
from functools import cache, partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.ad_checkpoint import checkpoint_name

from jaxrl_async.errors import ConfigError
from jaxrl_async.model.gpu_flash import flash, flash_backward, flash_with_sums
from jaxrl_async.model.kernels import ATTENDED, PLAIN, Scoring

MOST_SEGMENTS = 16
"""Maximum number of segments of a row for cuDNN. With heads of 128 in bfloat16 the sums that it
keeps then take a quarter of the queries' memory."""
MULTIPLE = 8
"""Rows are padded to a multiple of this many tokens."""
MOST_ELEMENTS = 2**31
"""Limit of array sizes: offsets are int32, and count the elements of all rows."""

RULE = {
    "scale", "seed", "dropout_rate", "variadic_args", "mask_type", "layout", "cudnn_version",
    "sliding_window_length", "score_mod", "is_training", "return_residual", "res", "grad_output",
}  # fmt: skip
"""Known arguments of JAX's rule for the backward pass, in jax 0.10 to 0.12."""

Plain = Callable[[Array, Array, Array, Array], Array]
"""(q, k, v, segment ids) -> [B, T, H, K]."""
Grads = tuple[Array, Array, Array]
"""Gradients of q, k and v."""


class Offsets(NamedTuple):
    """The starts and lengths of the segments of each row; padding is a segment, too."""

    lengths: Array  # [B, most] int32; -1: no such segment
    starts: Array  # [B, most + 1] int32; -1: no such segment


def offsets_of(segment_ids_BT: Array, most: int = MOST_SEGMENTS) -> Offsets:
    """Return the offsets of rows of at most `most` runs of equal ids."""
    B, T = segment_ids_BT.shape
    begins = _begins(segment_ids_BT)
    number = jnp.cumsum(begins, axis=1) - 1  # of each token's segment
    there = jnp.where(begins & (number < most), number, most + 1)  # beyond: dropped
    rows = jnp.arange(B)[:, None]
    indices = jnp.broadcast_to(jnp.arange(T, dtype=jnp.int32), (B, T))
    none = jnp.full((B, most + 1), -1, jnp.int32)
    starts = none.at[rows, there].set(indices, mode="drop")
    ends = jnp.where(starts[:, 1:] >= 0, starts[:, 1:], T)
    lengths = jnp.where(starts[:, :-1] >= 0, ends - starts[:, :-1], -1)
    return Offsets(lengths, starts)


def num_runs(segment_ids_BT: Array) -> Array:
    """Return the maximum number of runs of equal ids in a row, [] int32."""
    return jnp.max(jnp.sum(_begins(segment_ids_BT), axis=1, dtype=jnp.int32))


def _begins(segment_ids_BT: Array) -> Array:
    changes = segment_ids_BT[:, 1:] != segment_ids_BT[:, :-1]
    return jnp.pad(changes, ((0, 0), (1, 0)), constant_values=True)


class PackedKernels(NamedTuple):
    """cuDNN's attention of q, k, v [B, T, H, K], causal within segments; window 0: no window."""

    attend: Callable[[Array, Array, Array, Offsets, float, int], Array]
    """(q, k, v, offsets, scale, window) -> out [B, T, H, K]."""
    forward: Callable[[Array, Array, Array, Offsets, float, int], tuple[Array, Array]]
    """Like `attend`, and returns sums [B x MOST_SEGMENTS, H, T] float32 for the backward pass."""
    backward: Callable[[Array, Array, Array, Offsets, float, int, Array, Array, Array], Grads]
    """(..., out, sums, gradient of out) -> gradients."""


class KernelPasses(NamedTuple):
    """One branch: an attention of q [B, T, H, K], k and v [B, T, N, K] and segment ids [B, T].
    All branches return sums of the same shape."""

    attend: Plain
    forward: Callable[[Array, Array, Array, Array], tuple[Array, Array]]
    backward: Callable[[Array, Array, Array, Array, Array, Array, Array], Grads]
    """(q, k, v, segment ids, out, sums, gradient of out) -> gradients."""


# ---- JAX's private function


@cache
def cudnn_attention() -> Any | None:
    """Return JAX's private module of cuDNN's attention; None if it does not support offsets, or its
    backward pass has unknown arguments."""
    try:
        from jax._src.cudnn import fused_attention_stablehlo as private

        given = inspect.signature(private.dot_product_attention).parameters
        backward = inspect.signature(private._dot_product_attention_bwd_rule).parameters
        layout, causal = private.AttentionLayout.BTNH, private.MaskType.PADDING_CAUSAL
    except (ImportError, AttributeError):
        return None
    wanted = {
        "q_seqlen", "kv_seqlen", "q_offsets", "kv_offsets", "sliding_window_length",
        "return_residual",
    }  # fmt: skip
    known = wanted <= given.keys() and backward.keys() <= RULE
    return private if known and None not in (layout, causal) else None


def cudnn_version() -> tuple[int, int, int] | None:
    """Return the installed version of cuDNN, such as (9, 12, 0); None without cuDNN, as on a
    machine that only makes a plan."""
    try:
        found = _private().check_cudnn_version()
    except RuntimeError:
        return None
    return found // 10_000, found // 100 % 100, found % 100


def by_cudnn(
    q: Array, k: Array, v: Array, offsets: Offsets, scale: float, window: int, *, sums: bool = False
) -> Any:
    """Call cuDNN, with as many kv heads as query heads; sums: return the sums, too."""
    private = _private()
    return private.dot_product_attention(
        q,
        k,
        v,
        q_seqlen=offsets.lengths,
        kv_seqlen=offsets.lengths,
        q_offsets=offsets.starts,
        kv_offsets=offsets.starts,
        scale=scale,
        mask_type=private.MaskType.PADDING_CAUSAL,
        sliding_window_length=window or None,
        return_residual=sums,
    )


def backward_by_cudnn(
    q: Array,
    k: Array,
    v: Array,
    offsets: Offsets,
    scale: float,
    window: int,
    out: Array,
    sums: Array,
    grad: Array,
) -> Grads:
    """Call cuDNN's backward pass through JAX's rule, given the output of the forward pass."""
    private = _private()
    rule = private._dot_product_attention_bwd_rule
    names = inspect.signature(rule).parameters
    none, no_arrays = jnp.zeros(0, q.dtype), ((),) if "score_mod" in names else ()
    by_name = {
        "scale": scale,
        "seed": 42,
        "dropout_rate": 0.0,
        "variadic_args": (False, False),  # no bias, and no gradient of one
        "mask_type": private.MaskType.PADDING_CAUSAL,
        "layout": private.AttentionLayout.BTNH.value,
        "sliding_window_length": window or None,
        "score_mod": None,
        "is_training": True,
        "cudnn_version": 0,  # not used in the backward pass
        "return_residual": False,
        "res": (q, k, v, none, *(offsets.lengths,) * 2, *(offsets.starts,) * 2, none, none,
                *no_arrays, sums, out),
        "grad_output": grad,
    }  # fmt: skip
    dq, dk, dv = rule(*(by_name[name] for name in names))[:3]
    return dq, dk, dv


def _private() -> Any:
    private = cudnn_attention()
    assert private is not None, "attention.obstacle should have refused it"
    return private


CUDNN = PackedKernels(by_cudnn, partial(by_cudnn, sums=True), backward_by_cudnn)


# ---- the attention


def cudnn(
    q_BTHK: Array,
    k_BTNK: Array,
    v_BTNK: Array,
    segment_ids_BT: Array,
    scoring: Scoring = PLAIN,
    sinks_H: Array | None = None,
    *,
    kernels: PackedKernels = CUDNN,
) -> Array:
    """Attend causally within contiguous segments with cuDNN, or with gpu_flash.flash if a row has
    more than MOST_SEGMENTS segments.

    Differentiable: in addition to q, k and v it keeps the output, and sums of 4 bytes x rows x
    MOST_SEGMENTS x heads x length. Under model.remat=attention only these are kept, and attention
    is not recomputed.

    Args:
        q_BTHK: float16 or bfloat16; K a multiple of 8, within the limit of `attention.obstacle`.
        k_BTNK: of the same type.
        v_BTNK: of the same type.
        segment_ids_BT: 0 is padding, whose outputs are finite.
        scoring: may have a window; ConfigError for a cap.
        sinks_H: must be None; else ConfigError.
        kernels: replacement of cuDNN, for tests.
    """
    refuse_cap(scoring, sinks_H)
    if q_BTHK.size >= MOST_ELEMENTS:
        return flash(q_BTHK, k_BTNK, v_BTNK, segment_ids_BT, scoring)
    given = q_BTHK, k_BTNK, v_BTNK, segment_ids_BT
    out: Array = _either(*given, _by_offsets(kernels, scoring.window), _by_flash(scoring))
    return out


def refuse_cap(scoring: Scoring, sinks_H: Array | None = None) -> None:
    """Raise ConfigError for a cap of scores or for sinks: cuDNN's attention supports neither."""
    if scoring.cap or sinks_H is not None:
        lacks = "cap of attention scores" if scoring.cap else "attention sinks"
        raise ConfigError(
            f"model.attention=cudnn has no {lacks}, and a model of this run (the policy, a teacher "
            "or a reward model) needs them. Set model.attention=flash."
        )


def _by_offsets(kernels: PackedKernels, window: int) -> KernelPasses:
    """Return cuDNN's passes, for any number of kv heads and any length."""

    def attend(q: Array, k: Array, v: Array, segment_ids: Array) -> Array:
        whole, offsets = _whole(q, k, v), _padded_offsets(segment_ids)
        return kernels.attend(*whole, offsets, q.shape[3] ** -0.5, window)[:, : q.shape[1]]

    def forward(q: Array, k: Array, v: Array, segment_ids: Array) -> tuple[Array, Array]:
        whole, offsets = _whole(q, k, v), _padded_offsets(segment_ids)
        out, sums = kernels.forward(*whole, offsets, q.shape[3] ** -0.5, window)
        return out[:, : q.shape[1]], sums

    def backward(
        q: Array, k: Array, v: Array, segment_ids: Array, out: Array, sums: Array, grad: Array
    ) -> Grads:
        whole, pull = jax.vjp(_whole, q, k, v)
        offsets, scale = _padded_offsets(segment_ids), q.shape[3] ** -0.5
        back = kernels.backward(*whole, offsets, scale, window, _padded(out), sums, _padded(grad))
        dq, dk, dv = pull(back)
        return dq, dk, dv

    return KernelPasses(attend, forward, backward)


def _by_flash(scoring: Scoring) -> KernelPasses:
    """Return gpu_flash's passes, with sums in cuDNN's shape; only their first rows are used."""

    def attend(q: Array, k: Array, v: Array, segment_ids: Array) -> Array:
        return flash(q, k, v, segment_ids, scoring)

    def forward(q: Array, k: Array, v: Array, segment_ids: Array) -> tuple[Array, Array]:
        out, sums = flash_with_sums(q, k, v, segment_ids, scoring)
        B, T = segment_ids.shape
        return out, jnp.pad(sums, ((0, B * (MOST_SEGMENTS - 1)), (0, 0), (0, -T % MULTIPLE)))

    def backward(
        q: Array, k: Array, v: Array, segment_ids: Array, out: Array, sums: Array, grad: Array
    ) -> Grads:
        B, T = segment_ids.shape
        return flash_backward(q, k, v, segment_ids, scoring, out, sums[:B, :, :T], grad)

    return KernelPasses(attend, forward, backward)


def _whole(q: Array, k: Array, v: Array) -> tuple[Array, Array, Array]:
    """Repeat the kv heads to the number of query heads, and pad the rows."""
    copies = q.shape[2] // k.shape[2]
    if copies > 1:
        k, v = (jnp.repeat(x, copies, axis=2) for x in (k, v))
    return _padded(q), _padded(k), _padded(v)


def _padded(x_BT: Array) -> Array:
    more = (0, -x_BT.shape[1] % MULTIPLE)
    return jnp.pad(x_BT, ((0, 0), more, *((0, 0),) * (x_BT.ndim - 2)))


def _padded_offsets(segment_ids_BT: Array) -> Offsets:
    return offsets_of(_padded(segment_ids_BT))


@partial(jax.custom_vjp, nondiff_argnums=(4, 5))
def _either(
    q: Array, k: Array, v: Array, segments: Array, one: KernelPasses, other: KernelPasses
) -> Array:
    """Attend with `one` if the segments are few enough for cuDNN, else with `other`."""
    few = _is_few(segments)
    out: Array = jax.lax.cond(few, one.attend, other.attend, q, k, v, segments)
    return out


def _is_few(segments: Array) -> Array:
    """Return whether the rows, including their padding, have few enough segments."""
    return num_runs(segments) < MOST_SEGMENTS


def _either_forward(
    q: Array, k: Array, v: Array, segments: Array, one: KernelPasses, other: KernelPasses
) -> tuple[Array, tuple[Array, ...]]:
    few = _is_few(segments)
    out, sums = jax.lax.cond(few, one.forward, other.forward, q, k, v, segments)
    out, sums = checkpoint_name(out, ATTENDED), checkpoint_name(sums, ATTENDED)
    return out, (q, k, v, segments, out, sums)


def _either_backward(
    one: KernelPasses, other: KernelPasses, kept: tuple[Array, ...], grad: Array
) -> tuple[Array, Array, Array, None]:
    few = _is_few(kept[3])
    dq, dk, dv = jax.lax.cond(few, one.backward, other.backward, *kept, grad)
    return dq, dk, dv, None


_either.defvjp(_either_forward, _either_backward)
