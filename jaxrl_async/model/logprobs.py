"""Log-probs and entropies over a large vocabulary, in chunks: [tokens, vocab] never exists in
full.

With top-k, top-p or min-p a token is drawn from a few of the vocabulary. `kept` says from which, so
that both log-probs of a ratio are of one set of outcomes (Keep Sampling Mask: DeepSeek-AI 2025,
DeepSeek-V3.2, arXiv:2512.02556).
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from jaxrl_async.model.attention import reference
from jaxrl_async.model.decoder import Params, hidden_states, output_head
from jaxrl_async.model.kernels import SequenceAttention
from jaxrl_async.model.spec import ModelSpec

REFUSED = -1e30
"""Logit of what could not be drawn: probability 0, and gradients stay finite (those of -inf do
not)."""


def chunked_logprobs(
    hidden: Array,
    head: Array,
    targets: Array,
    *,
    chunk: int,
    temperature: float = 1.0,
    kept: Array | None = None,
) -> tuple[Array, Array]:
    """Log-prob of each target and entropy of its distribution, nats.

    hidden [tokens, D], head [D, V], targets [tokens] int32 -> [tokens] float32 twice. The
    distribution is softmax(logits / temperature), over the tokens whose bits are set in kept
    [tokens, ceil(V / 8)] uint8, little-endian; None: over all.
    Differentiable; the backward pass computes a chunk's logits again, so at most [chunk, V] exists
    at once in either pass.
    """

    def one_chunk(x: Array, target: Array, bits: Array | None) -> tuple[Array, Array]:
        logits = logits_of(x, head) / temperature
        if bits is not None:
            logits = jnp.where(unpacked(bits, logits.shape[-1]), logits, REFUSED)
        logprobs = jax.nn.log_softmax(logits, axis=-1)
        entropy = -jnp.sum(jnp.exp(logprobs) * logprobs, axis=-1)
        return jnp.take_along_axis(logprobs, target[:, None], axis=-1)[:, 0], entropy

    logprobs, entropy = over_chunks(one_chunk, (hidden, targets, kept), chunk=chunk)
    return logprobs, entropy


def logits_of(hidden: Array, head: Array) -> Array:
    """hidden [..., D], head [D, V] -> [..., V] float32."""
    return jnp.matmul(hidden, head.astype(hidden.dtype), preferred_element_type=jnp.float32)


def over_chunks(function: Callable[..., Any], inputs: tuple[Any, ...], *, chunk: int) -> Any:
    """function(*inputs) over at most `chunk` tokens at once; every array has tokens on axis 0.

    The backward pass computes a chunk again, so what exists inside `function` never exists for more
    than one chunk in either pass.
    """
    tokens = jax.tree.leaves(inputs)[0].shape[0]
    chunk = min(chunk, tokens)
    padding = -tokens % chunk

    def split(x: Array) -> Array:
        padded = jnp.pad(x, ((0, padding), *((0, 0) for _ in x.shape[1:])))
        return padded.reshape(-1, chunk, *x.shape[1:])

    one_chunk = jax.checkpoint(lambda parts: function(*parts))
    parts = jax.tree.map(split, inputs)
    if tokens <= chunk:
        return one_chunk(jax.tree.map(lambda x: x[0], parts))
    out = jax.lax.map(one_chunk, parts)
    return jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:])[:tokens], out)


def unpacked(bits: Array, vocab: int) -> Array:
    """[tokens, ceil(vocab / 8)] uint8 -> [tokens, vocab] bool, as np.unpackbits little-endian."""
    each = (bits[..., None] >> jnp.arange(8, dtype=jnp.uint8)) & 1
    return each.reshape(bits.shape[0], -1)[:, :vocab].astype(bool)


def token_logprobs(
    spec: ModelSpec,
    params: Params,
    token_ids: Array,
    positions: Array,
    segment_ids: Array,
    *,
    dtype: Any = jnp.float32,
    remat: str = "none",
    attention: SequenceAttention = reference,
    chunk: int = 1024,
    temperature: float = 1.0,
    kept: Array | None = None,
) -> tuple[Array, Array]:
    """At t: log-prob of token t from the logits at t - 1, and that distribution's entropy.

    [B, T] inputs -> [B, T] float32 twice; 0 where a segment starts and in padding. kept [B, T,
    ceil(vocab / 8)] uint8: at t, what token t could be drawn from; None: the whole vocabulary.
    """
    hidden = hidden_states(
        spec,
        params,
        token_ids,
        positions,
        segment_ids,
        dtype=dtype,
        remat=remat,
        attention=attention,
    )
    logprobs, entropy = chunked_logprobs(
        before(hidden),
        output_head(spec, params),
        after(token_ids),
        chunk=chunk,
        temperature=temperature,
        kept=None if kept is None else after(kept),
    )
    return placed(logprobs, segment_ids), placed(entropy, segment_ids)


def greedy_matches(
    spec: ModelSpec,
    params: Params,
    token_ids: Array,
    positions: Array,
    segment_ids: Array,
    *,
    dtype: Any = jnp.float32,
    attention: SequenceAttention = reference,
    chunk: int = 1024,
) -> Array:
    """At t: whether token t is the likeliest one after those before it.

    [B, T] inputs -> [B, T] bool; False where a segment starts and in padding. Where all tokens of
    an answer match, greedy decoding gives exactly this answer.
    """
    hidden = hidden_states(
        spec, params, token_ids, positions, segment_ids, dtype=dtype, attention=attention
    )
    head = output_head(spec, params)

    def one_chunk(x: Array, target: Array) -> Array:
        logits = logits_of(x, head)
        return jnp.take_along_axis(logits, target[:, None], -1)[:, 0] >= jnp.max(logits, axis=-1)

    inputs = (before(hidden), after(token_ids))
    return placed(over_chunks(one_chunk, inputs, chunk=chunk), segment_ids)


# ---- a packed batch's tokens in one list, and back


def before(values: Array) -> Array:
    """[B, T, ...] -> [B * (T - 1), ...]: what each token but a row's first was drawn from."""
    return values[:, :-1].reshape(-1, *values.shape[2:])


def after(values: Array) -> Array:
    """[B, T, ...] -> [B * (T - 1), ...]: what is said of each token but a row's first."""
    return values[:, 1:].reshape(-1, *values.shape[2:])


def placed(values: Array, segment_ids: Array) -> Array:
    """[B * (T - 1), ...] of `before` -> [B, T, ...]: 0 where a segment starts and in padding."""
    B, T = segment_ids.shape
    follows = (segment_ids[:, 1:] == segment_ids[:, :-1]) & (segment_ids[:, 1:] > 0)
    values = values.reshape(B, T - 1, *values.shape[1:])
    follows = follows.reshape(B, T - 1, *(1 for _ in values.shape[2:]))
    kept = jnp.where(follows, values, jnp.zeros((), values.dtype))
    return jnp.pad(kept, ((0, 0), (1, 0), *((0, 0) for _ in values.shape[2:])))
