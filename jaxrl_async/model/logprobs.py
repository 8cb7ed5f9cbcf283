"""Log-probs and entropies over a large vocabulary, in chunks: [tokens, vocab] never exists in
full.

With top-k, top-p or min-p a token is drawn from a few of the vocabulary. `kept` says from which, so
that both log-probs of a ratio are of one set of outcomes (Keep Sampling Mask: DeepSeek-AI 2025,
DeepSeek-V3.2, arXiv:2512.02556).
"""

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
    tokens = hidden.shape[0]
    chunk = min(chunk, tokens)
    padding = -tokens % chunk
    hidden = jnp.pad(hidden, ((0, padding), (0, 0))).reshape(-1, chunk, hidden.shape[1])
    targets = jnp.pad(targets, (0, padding)).reshape(-1, chunk)
    if kept is not None:
        kept = jnp.pad(kept, ((0, padding), (0, 0))).reshape(-1, chunk, kept.shape[1])

    @jax.checkpoint
    def one_chunk(inputs: tuple[Array, Array, Array | None]) -> tuple[Array, Array]:
        x, target, bits = inputs
        logits = jnp.matmul(x, head.astype(x.dtype), preferred_element_type=jnp.float32)
        logits = logits / temperature
        if bits is not None:
            logits = jnp.where(unpacked(bits, logits.shape[-1]), logits, REFUSED)
        logprobs = jax.nn.log_softmax(logits, axis=-1)
        entropy = -jnp.sum(jnp.exp(logprobs) * logprobs, axis=-1)
        return jnp.take_along_axis(logprobs, target[:, None], axis=-1)[:, 0], entropy

    if hidden.shape[0] == 1:
        first = None if kept is None else kept[0]
        logprobs, entropy = one_chunk((hidden[0], targets[0], first))
    else:
        logprobs, entropy = jax.lax.map(one_chunk, (hidden, targets, kept))
    return logprobs.reshape(-1)[:tokens], entropy.reshape(-1)[:tokens]


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
    B, T = token_ids.shape
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
        hidden[:, :-1].reshape(B * (T - 1), -1),
        output_head(spec, params),
        token_ids[:, 1:].reshape(-1),
        chunk=chunk,
        temperature=temperature,
        kept=None if kept is None else kept[:, 1:].reshape(B * (T - 1), -1),
    )
    follows = (segment_ids[:, 1:] == segment_ids[:, :-1]) & (segment_ids[:, 1:] > 0)

    def place(values: Array) -> Array:
        return jnp.pad(jnp.where(follows, values.reshape(B, T - 1), 0.0), ((0, 0), (1, 0)))

    return place(logprobs), place(entropy)


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
    B, T = token_ids.shape
    hidden = hidden_states(
        spec, params, token_ids, positions, segment_ids, dtype=dtype, attention=attention
    )
    head = output_head(spec, params)

    def one(inputs: tuple[Array, Array]) -> Array:
        x, target = inputs
        logits = jnp.matmul(x, head.astype(x.dtype), preferred_element_type=jnp.float32)
        return logits[target] >= jnp.max(logits)

    flat = hidden[:, :-1].reshape(B * (T - 1), -1)
    matches = jax.lax.map(one, (flat, token_ids[:, 1:].reshape(-1)), batch_size=chunk)
    follows = (segment_ids[:, 1:] == segment_ids[:, :-1]) & (segment_ids[:, 1:] > 0)
    return jnp.pad(follows & matches.reshape(B, T - 1), ((0, 0), (1, 0)))
