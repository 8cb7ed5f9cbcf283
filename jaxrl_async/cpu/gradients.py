"""Calls of the CPU kernels of an update, with their gradients. Requires
kernel_library.kernels_are_there.

Shapes: B rows of T tokens, H heads, N KV heads, K head width, n tokens, V the vocabulary.
"""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.ad_checkpoint import checkpoint_name

from jaxrl_async.cpu.kernel_calls import attributes, or_none
from jaxrl_async.cpu.kernel_library import target_of
from jaxrl_async.model.kernels import ATTENDED, PLAIN, Scoring

Floats = jax.ShapeDtypeStruct
MULTIPLIED = "multiplied"
"""Name of the result of `multiplied`, for rematerialisation."""


def flash(
    q_BTHK: Array,
    k_BTNK: Array,
    v_BTNK: Array,
    segment_ids_BT: Array,
    scoring: Scoring = PLAIN,
    sinks_H: Array | None = None,
) -> Array:
    """Attend causally within segments, like attention.reference: [B, T, H, K] float32.

    Segments are contiguous. The cost of a query is proportional to its visible keys, and one block
    of scores is in memory at a time. Padding gets zeros. The backward pass computes scores again,
    from the log of each query's sum (Dao et al. 2022, arXiv:2205.14135, app. B).
    """
    kind = _Kind(scoring, in_tree=False)
    out: Array = _flash(q_BTHK, k_BTNK, v_BTNK, segment_ids_BT, or_none(sinks_H), kind)
    return out


def tree_flash(
    q_BTHK: Array,
    k_BTNK: Array,
    v_BTNK: Array,
    extent_BT: Array,
    scoring: Scoring = PLAIN,
    sinks_H: Array | None = None,
) -> Array:
    """Attend like `flash`, for contexts that share prefixes (attention.tree_reference): a block of
    queries computes its scores for panels of 32 keys with any visible key. Padding sees itself. A
    window needs positions in the extent, [B, T, 2]."""
    kind = _Kind(scoring, in_tree=True)
    out: Array = _flash(q_BTHK, k_BTNK, v_BTNK, extent_BT, or_none(sinks_H), kind)
    return out


class _Kind(NamedTuple):
    """The settings of an attention that are not arrays."""

    scoring: Scoring
    in_tree: bool  # the extent is visible_until instead of segments

    def attributes(self, q: Array) -> dict[str, Any]:
        return attributes(q, self.scoring) | {"in_tree": self.in_tree}


@partial(jax.custom_vjp, nondiff_argnums=(5,))
def _flash(q: Array, k: Array, v: Array, extent: Array, sinks: Array, kind: _Kind) -> Array:
    return _forward(q, k, v, extent, sinks, kind)[0]


def _forward(
    q: Array, k: Array, v: Array, extent: Array, sinks: Array, kind: _Kind
) -> tuple[Array, Array]:
    """Return the output, and the log of each query's sum [B, H, T]."""
    B, T, H, _ = q.shape
    results = (Floats(q.shape, jnp.float32), Floats((B, H, T), jnp.float32))
    call = jax.ffi.ffi_call(target_of("flash"), results)
    out, sums = call(q, k, v, extent, sinks, **kind.attributes(q))
    return out, sums


def _flash_forward(
    q: Array, k: Array, v: Array, extent: Array, sinks: Array, kind: _Kind
) -> tuple[Array, tuple[Array, ...]]:
    out, sums = _forward(q, k, v, extent, sinks, kind)
    out, sums = checkpoint_name(out, ATTENDED), checkpoint_name(sums, ATTENDED)
    return out, (q, k, v, extent, sinks, out, sums)


def _flash_backward(
    kind: _Kind, kept: tuple[Array, ...], grad: Array
) -> tuple[Array, Array, Array, None, Array]:
    q, k, v, extent, sinks, out, sums = kept
    results = tuple(Floats(x.shape, jnp.float32) for x in (q, k, v))
    call = jax.ffi.ffi_call(target_of("flash_back"), results)
    dq, dk, dv = call(q, k, v, extent, out, sums, grad, **kind.attributes(q))
    dsinks = jnp.zeros_like(sinks)
    if sinks.size:  # a sink's share times its query's expected gradient; it has no value
        expected = jnp.einsum("bthk,bthk->bht", grad, out)
        share = jnp.exp(sinks[:, None] - sums)
        if not kind.in_tree:  # in a tree, padding's output has no gradient, and its share adds 0
            share = jnp.where(extent[:, None] > 0, share, 0.0)
        dsinks = -jnp.einsum("bht,bht->h", share, expected)
    return dq, dk, dv, None, dsinks


_flash.defvjp(_flash_forward, _flash_backward)


@jax.custom_vjp
def multiplied(x: Array, weight: Array) -> Array:
    """Return x [n, D] times weight [D, E], both float32, with float32 precision, by the matrix unit
    (kernel_library.multiplies_in_parts)."""
    return multiply(x, weight)


def multiply(a: Array, b: Array, *, transpose_a: bool = False, transpose_b: bool = False) -> Array:
    """Return the product a b of matrices, each optionally transposed."""
    result = Floats((a.shape[int(transpose_a)], b.shape[int(not transpose_b)]), jnp.float32)
    call = jax.ffi.ffi_call(target_of("multiply"), result, vmap_method="sequential")
    out: Array = call(a, b, transpose_a=transpose_a, transpose_b=transpose_b)
    return out


def _multiply_forward(x: Array, weight: Array) -> tuple[Array, tuple[Array, Array]]:
    return checkpoint_name(multiply(x, weight), MULTIPLIED), (x, weight)


def _multiply_backward(kept: tuple[Array, Array], grad: Array) -> tuple[Array, Array]:
    x, weight = kept
    return multiply(grad, weight, transpose_b=True), multiply(x, grad, transpose_a=True)


multiplied.defvjp(_multiply_forward, _multiply_backward)


@jax.custom_vjp
def chosen(logits: Array, targets: Array) -> tuple[Array, Array]:
    """Return the log-prob of each target [n] and the entropy of its distribution [n], nats, given
    logits [n, V] float32 and targets [n] int32.

    The gradient reads the logits once, and keeps no probabilities.
    """
    logprobs, entropies, _ = _chosen(logits, targets)
    return logprobs, entropies


def _chosen(logits: Array, targets: Array) -> tuple[Array, Array, Array]:
    one, two = Floats(targets.shape, jnp.float32), Floats((*targets.shape, 2), jnp.float32)
    logprobs, entropies, sums = jax.ffi.ffi_call(target_of("choose"), (one, one, two))(
        logits, targets
    )
    return logprobs, entropies, sums


def _chosen_forward(logits: Array, targets: Array) -> tuple[tuple[Array, Array], tuple[Array, ...]]:
    logprobs, entropies, sums = _chosen(logits, targets)
    return (logprobs, entropies), (logits, targets, entropies, sums)


def _chosen_backward(kept: tuple[Array, ...], grads: tuple[Array, Array]) -> tuple[Array, None]:
    logits = kept[0]
    call = jax.ffi.ffi_call(target_of("choose_back"), Floats(logits.shape, jnp.float32))
    return call(*kept, *grads), None


chosen.defvjp(_chosen_forward, _chosen_backward)
