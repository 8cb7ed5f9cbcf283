"""cuDNN's flash attention of packed rows, which it knows by the offsets of their segments: without
a mask [T, T], and without the gradient of one. On NVIDIA's Hopper and later.

    segments    1 1 1 2 2 0 0 0      lengths [3, 2, 3, -1]     starts [0, 3, 5, -1, -1]

JAX has it in a private function alone (`dot_product_attention` with q_offsets and kv_offsets). That
one multiplies the offsets of the keys by the number of query heads, so keys and values are repeated
here until they have as many. cuDNN reserves, while a layer runs, as many numbers for each of the
most segments of a row as for a whole row: 4 bytes x heads x length, so the number is bounded
(MOST_SEGMENTS), and rows of more take the kernels of gpu_flash.py, as a branch of the program.
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
from jaxrl_async.model.gpu_flash import flash
from jaxrl_async.model.kernels import ATTENDED, PLAIN, Scoring

MOST_SEGMENTS = 16
"""Most segments of a row that cuDNN is given. With heads of 128 in bfloat16 what it keeps of the
scores' sums is then a quarter of the queries."""
MULTIPLE = 8
"""Rows are padded to a multiple of this many tokens."""
MOST_ELEMENTS = 2**31
"""Offsets are int32, and count the numbers of all rows."""

Attend = Callable[[Array, Array, Array, "Offsets", float, int], Array]
"""(q, k, v [B, T, H, K], offsets, scale, window; 0: none) -> [B, T, H, K], causal by segment."""
Plain = Callable[[Array, Array, Array, Array], Array]
"""(q, k, v, segment ids) -> [B, T, H, K]."""


class Offsets(NamedTuple):
    """Where the segments of each row begin, and how long they are; padding is one, too."""

    lengths: Array  # [B, most] int32; -1: there is no such segment
    starts: Array  # [B, most + 1] int32; -1: there is no such segment


def offsets_of(segment_ids_BT: Array, most: int = MOST_SEGMENTS) -> Offsets:
    """Return the offsets of rows of at most `most` runs of equal ids."""
    B, T = segment_ids_BT.shape
    begins = _begins(segment_ids_BT)
    number = jnp.cumsum(begins, axis=1) - 1  # of each token's segment
    there = jnp.where(begins & (number < most), number, most + 1)  # beyond: dropped
    rows = jnp.arange(B)[:, None]
    places = jnp.broadcast_to(jnp.arange(T, dtype=jnp.int32), (B, T))
    none = jnp.full((B, most + 1), -1, jnp.int32)
    starts = none.at[rows, there].set(places, mode="drop")
    ends = jnp.where(starts[:, 1:] >= 0, starts[:, 1:], T)
    lengths = jnp.where(starts[:, :-1] >= 0, ends - starts[:, :-1], -1)
    return Offsets(lengths, starts)


def num_runs(segment_ids_BT: Array) -> Array:
    """Return the most runs of equal ids in a row, [] int32."""
    return jnp.max(jnp.sum(_begins(segment_ids_BT), axis=1, dtype=jnp.int32))


def _begins(segment_ids_BT: Array) -> Array:
    changes = segment_ids_BT[:, 1:] != segment_ids_BT[:, :-1]
    return jnp.pad(changes, ((0, 0), (1, 0)), constant_values=True)


@cache
def cudnn_attention() -> Any | None:
    """Return JAX's private module of cuDNN's attention; None if it has no offsets."""
    try:
        from jax._src.cudnn import fused_attention_stablehlo as private

        given = inspect.signature(private.dot_product_attention).parameters
        causal = private.MaskType.PADDING_CAUSAL
    except (ImportError, AttributeError):
        return None
    wanted = {"q_seqlen", "kv_seqlen", "q_offsets", "kv_offsets", "sliding_window_length"}
    return private if wanted <= given.keys() and causal is not None else None


def by_cudnn(q: Array, k: Array, v: Array, offsets: Offsets, scale: float, window: int) -> Array:
    """Call cuDNN, with as many kv heads as query heads."""
    private = cudnn_attention()
    assert private is not None, "attention.obstacle has refused it"
    out: Array = private.dot_product_attention(
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
    )
    return out


def cudnn(
    q_BTHK: Array,
    k_BTNK: Array,
    v_BTNK: Array,
    segment_ids_BT: Array,
    scoring: Scoring = PLAIN,
    sinks_H: Array | None = None,
    *,
    attend: Attend = by_cudnn,
    otherwise: Any = flash,
) -> Array:
    """Attend causally within contiguous segments by cuDNN, and by `otherwise` where a row has more
    than MOST_SEGMENTS of them. Differentiable; the backward pass runs the forward one again, so
    nothing but q, k and v is kept.

    Args:
        q_BTHK: float16 or bfloat16; K a multiple of 8, at most 256.
        k_BTNK: of the same type.
        v_BTNK: of the same type.
        segment_ids_BT: 0 is padding, whose outputs are finite.
        scoring: a window; ConfigError for a cap.
        sinks_H: ConfigError, if there are any.
        attend: what is called in place of cuDNN, in tests.
        otherwise: a SequenceAttention for rows of more segments.
    """
    refuse_cap(scoring, sinks_H)
    others: Plain = partial(_with_scoring, otherwise, scoring)
    if q_BTHK.size >= MOST_ELEMENTS:
        return others(q_BTHK, k_BTNK, v_BTNK, segment_ids_BT)
    ours: Plain = partial(_packed, attend, scoring.window)
    out: Array = _either(q_BTHK, k_BTNK, v_BTNK, segment_ids_BT, ours, others)
    return checkpoint_name(out, ATTENDED)


def refuse_cap(scoring: Scoring, sinks_H: Array | None = None) -> None:
    """Raise ConfigError if scores have a bound, or heads have sinks: cuDNN's attention has
    neither."""
    if scoring.cap or sinks_H is not None:
        lacks = "cap of attention scores" if scoring.cap else "attention sinks"
        raise ConfigError(
            f"model.attention=cudnn has no {lacks}, and a model of this run (the policy, a teacher "
            "or a reward model) needs them. Set model.attention=flash."
        )


def _with_scoring(
    attention: Any, scoring: Scoring, q: Array, k: Array, v: Array, segments: Array
) -> Array:
    out: Array = attention(q, k, v, segments, scoring)
    return out


def _packed(attend: Attend, window: int, q: Array, k: Array, v: Array, segment_ids: Array) -> Array:
    """Repeat the kv heads, pad the rows, and attend by the offsets of their segments."""
    T, H, K = q.shape[1:]
    copies = H // k.shape[2]
    if copies > 1:
        k, v = (jnp.repeat(x, copies, axis=2) for x in (k, v))
    end = (0, 0), (0, -T % MULTIPLE)
    q, k, v = (jnp.pad(x, (*end, (0, 0), (0, 0))) for x in (q, k, v))
    offsets = offsets_of(jnp.pad(segment_ids, end))
    return attend(q, k, v, offsets, K**-0.5, window)[:, :T]


@partial(jax.custom_vjp, nondiff_argnums=(4, 5))
def _either(q: Array, k: Array, v: Array, segments: Array, one: Plain, other: Plain) -> Array:
    """Run one function if cuDNN takes that many segments, else the other."""
    out: Array = jax.lax.cond(_is_few(segments), one, other, q, k, v, segments)
    return out


def _is_few(segments: Array) -> Array:
    """Return whether the rows, with what they are padded by, have few enough segments."""
    return num_runs(segments) < MOST_SEGMENTS


def _either_forward(
    q: Array, k: Array, v: Array, segments: Array, one: Plain, other: Plain
) -> tuple[Array, tuple[Array, ...]]:
    return _either(q, k, v, segments, one, other), (q, k, v, segments)


def _either_backward(
    one: Plain, other: Plain, kept: tuple[Array, ...], grad: Array
) -> tuple[Array, Array, Array, None]:
    q, k, v, segments = kept

    def pulled(function: Plain, q: Array, k: Array, v: Array, grad: Array) -> Any:
        return jax.vjp(lambda q, k, v: function(q, k, v, segments), q, k, v)[1](grad)

    few = _is_few(segments)
    dq, dk, dv = jax.lax.cond(few, partial(pulled, one), partial(pulled, other), q, k, v, grad)
    return dq, dk, dv, None


_either.defvjp(_either_forward, _either_backward)
