"""Log-probs and entropies over a large vocabulary, in chunks: [tokens, vocab] never exists in
full.

With top-k, top-p or min-p a token is drawn from a few of the vocabulary. `kept` says from which, so
that both log-probs of a ratio are of one set of outcomes (Keep Sampling Mask: DeepSeek-AI 2025,
DeepSeek-V3.2, arXiv:2512.02556).
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from jaxrl_async.algorithms.expert_load import ExpertLoad
from jaxrl_async.model.cpu.gradients import chosen
from jaxrl_async.model.decoder import (
    ON_ONE_DEVICE,
    DecoderSettings,
    TokenRows,
    bounded,
    output_head,
    token_states,
)
from jaxrl_async.model.families.parts import UNSCALED, Scales
from jaxrl_async.model.layers import product
from jaxrl_async.model.layout import ONE_DEVICE, Layout
from jaxrl_async.model.spec import ModelSpec, Params

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
    scales: Scales = UNSCALED,
    layout: Layout = ONE_DEVICE,
    cpu_kernels: bool = False,
    in_parts: bool = False,
) -> tuple[Array, Array]:
    """Return the log-prob of each target and the entropy of its distribution, nats.

    hidden [tokens, D], head [D, V], targets [tokens] int32 -> [tokens] float32 twice. The
    distribution is softmax(logits / temperature), over the tokens whose bits are set in kept
    [tokens, ceil(V / 8)] uint8, little-endian; None: over all. scales: of the model, for its
    logits. cpu_kernels: compute by kernels of our own what is made of a chunk's logits; in_parts:
    and the logits, see layers.product.
    Differentiable; the backward pass computes a chunk's logits again, so at most [chunk, V] exists
    at once on a device in either pass.
    """

    def one_chunk(x: Array, target: Array, bits: Array | None) -> tuple[Array, Array]:
        logits = logits_of(x, head, scales, in_parts=in_parts) / temperature
        if bits is not None:
            logits = jnp.where(unpacked(bits, logits.shape[-1]), logits, REFUSED)
        if cpu_kernels:
            return chosen(logits, target)
        logprobs = jax.nn.log_softmax(logits, axis=-1)
        entropy = -jnp.sum(jnp.exp(logprobs) * logprobs, axis=-1)
        return jnp.take_along_axis(logprobs, target[:, None], axis=-1)[:, 0], entropy

    inputs = (hidden, targets, kept)
    logprobs, entropy = over_chunks(one_chunk, inputs, chunk=chunk, layout=layout)
    return logprobs, entropy


def blocked_logprobs(
    hidden: Array,
    head: Array,
    targets: Array,
    *,
    blocks: int,
    temperature: float = 1.0,
    scales: Scales = UNSCALED,
    layout: Layout = ONE_DEVICE,
) -> tuple[Array, Array]:
    """Return what `chunked_logprobs` does for a head [D, V] that fsdp shares.

    The vocabulary is taken in `blocks` parts, each gathered when it is used, so that neither the
    head nor its gradient is ever whole on a device.

    Every token's maximum, sum of exponentials and sum of logits so weighted are carried from block
    to block (Milakov and Gimelshein 2018, arXiv:1805.02867); the backward pass computes a block's
    logits again. blocks divides V on each device (`vocab_blocks`).
    """
    V = head.shape[1]
    ways = layout.vocab_ways(V)

    def split(x: Array) -> Array:
        """[..., V] -> [blocks, ..., ways, V / ways / blocks]: of every device some of its own."""
        return jnp.moveaxis(x.reshape(*x.shape[:-1], ways, blocks, -1), -2, 0)

    parts = layout.place(split(head), None, "embed", "vocab", None)
    wide = hidden.astype(jnp.float32)  # so that the blocks' gradients are summed in it

    @jax.checkpoint
    def one_block(seen: tuple[Array, ...], part: tuple[Array, Array]) -> tuple[Any, None]:
        most, total, weighted, drawn = seen
        weights, ids = part
        weights = layout.gathered(weights.astype(hidden.dtype), ("embed", "vocab", "head_dim"))
        x = wide.astype(hidden.dtype)
        logits = jnp.einsum("td,dwv->twv", x, weights, preferred_element_type=jnp.float32)
        logits = bounded(logits, scales) / temperature
        now = jnp.maximum(most, jax.lax.stop_gradient(logits).max((1, 2)))
        before, each = jnp.exp(most - now), jnp.exp(logits - now[:, None, None])
        is_target = ids == targets[:, None, None]
        return (
            now,
            total * before + each.sum((1, 2)),
            weighted * before + (each * logits).sum((1, 2)),
            drawn + jnp.where(is_target, logits, 0.0).sum((1, 2)),
        ), None

    nothing = jnp.zeros(hidden.shape[0], jnp.float32)
    start = (nothing + REFUSED, nothing, nothing, nothing)
    ids = split(jnp.arange(V, dtype=jnp.int32))
    (most, total, weighted, drawn), _ = jax.lax.scan(one_block, start, (parts, ids))
    log_total = most + jnp.log(total)
    return drawn - log_total, log_total - weighted / total


def vocab_blocks(vocab: int, tokens: int, chunk: int) -> int | None:
    """Return into how many parts to take a device's vocabulary; None if no number fits.

    The logits of all tokens for a part are no more than those of `chunk` tokens for all of it. The
    number divides the vocabulary and is below four times the least one.

    >>> vocab_blocks(151_936, 8192, 1024), vocab_blocks(151_936, 8192, 1500)
    (8, 8)
    >>> vocab_blocks(1187, 8192, 1024) is None
    True
    """
    least = -(-tokens // chunk)
    return next((n for n in range(least, 4 * least) if vocab % n == 0), None)


def logits_of(
    hidden: Array, head: Array, scales: Scales = UNSCALED, *, in_parts: bool = False
) -> Array:
    """hidden [..., D], head [D, V] -> [..., V] float32, scaled and bounded as a model's scales say;
    in_parts: see layers.product."""
    head = head.astype(hidden.dtype)
    if in_parts:
        return bounded(product(hidden, head, in_parts=True), scales)
    return bounded(jnp.matmul(hidden, head, preferred_element_type=jnp.float32), scales)


def over_chunks(
    function: Callable[..., Any],
    inputs: tuple[Any, ...],
    *,
    chunk: int,
    layout: Layout = ONE_DEVICE,
) -> Any:
    """Return function(*inputs), run over at most `chunk` tokens of each device at once.

    Every array has tokens on axis 0, in the order of the layout.

    The backward pass computes a chunk again, so what exists inside `function` never exists for more
    than one chunk in either pass.
    """
    tokens = jax.tree.leaves(inputs)[0].shape[0]
    ways = layout.token_ways(tokens)
    each = tokens // ways
    chunk = -(-each // -(-each // chunk))  # equal ones, for little padding
    padding = -each % chunk

    def split(x: Array) -> Array:
        """[tokens, ...] -> [chunks, ways * chunk, ...]: of every device some of its own."""
        own = x.reshape(ways, each, *x.shape[1:])
        own = jnp.pad(own, ((0, 0), (0, padding), *((0, 0) for _ in x.shape[1:])))
        parts = jnp.moveaxis(own.reshape(ways, -1, chunk, *x.shape[1:]), 1, 0)
        return layout.place(parts.reshape(-1, ways * chunk, *x.shape[1:]), None, "tokens")

    def together(x: Array) -> Array:
        own = jnp.moveaxis(x.reshape(-1, ways, chunk, *x.shape[2:]), 0, 1)
        own = own.reshape(ways, -1, *x.shape[2:])[:, :each]
        return layout.place(own.reshape(tokens, *x.shape[2:]), "tokens")

    one_chunk = jax.checkpoint(lambda parts: function(*parts))
    parts = jax.tree.map(split, inputs)
    if each <= chunk:
        return one_chunk(jax.tree.map(lambda x: x[0], parts))
    return jax.tree.map(together, jax.lax.map(one_chunk, parts))


def unpacked(bits: Array, vocab: int) -> Array:
    """[tokens, ceil(vocab / 8)] uint8 -> [tokens, vocab] bool, as np.unpackbits little-endian."""
    each = (bits[..., None] >> jnp.arange(8, dtype=jnp.uint8)) & 1
    return each.reshape(bits.shape[0], -1)[:, :vocab].astype(bool)


class TokenLogprobs(NamedTuple):
    """What `token_logprobs` gives; [B, T], 0 where a segment starts and in padding; and the load
    of the experts."""

    logprobs: Array  # float32, of token t from the logits at t - 1
    entropy: Array  # float32, of that distribution, nats
    changed: Array | None  # int32, as in decoder.TokenStates
    load: ExpertLoad | None  # as there


def token_logprobs(
    spec: ModelSpec, params: Params, tokens: TokenRows, settings: DecoderSettings = ON_ONE_DEVICE
) -> TokenLogprobs:
    """Return each token's log-prob, and the entropy of the distribution that it is drawn from."""
    layout, chunk, temperature = settings.layout, settings.chunk, settings.temperature
    kept, segment_ids = tokens.kept, tokens.segment_ids
    hidden, changed, load = token_states(spec, params, tokens, settings)
    targets, blocks = after(tokens.token_ids, layout), None
    if kept is None and layout.shares_weights:
        vocab, count = spec.vocab // layout.vocab_ways(spec.vocab), hidden.shape[0]
        blocks = vocab_blocks(vocab, count // layout.token_ways(count), chunk)
    if blocks is not None:
        logprobs, entropy = blocked_logprobs(
            hidden,
            output_head(spec, params),
            targets,
            blocks=blocks,
            temperature=temperature,
            scales=spec.scales,
            layout=layout,
        )
    else:
        logprobs, entropy = chunked_logprobs(
            hidden,
            output_head(spec, params, layout),
            targets,
            chunk=chunk,
            temperature=temperature,
            kept=None if kept is None else after(kept, layout),
            scales=spec.scales,
            layout=layout,
            cpu_kernels=settings.cpu_kernels,
            in_parts=settings.in_parts,
        )
    logprobs, entropy = (placed(values, segment_ids, layout) for values in (logprobs, entropy))
    return TokenLogprobs(logprobs, entropy, changed, load)


def greedy_matches(
    spec: ModelSpec, params: Params, tokens: TokenRows, settings: DecoderSettings = ON_ONE_DEVICE
) -> Array:
    """Return whether each token is the likeliest one after those before it, [B, T] bool.

    False where a segment starts and in padding. Where all tokens of an answer match, greedy
    decoding gives exactly this answer.
    """
    layout = settings.layout
    hidden = token_states(spec, params, tokens, settings).hidden
    head = output_head(spec, params, layout)

    def one_chunk(x: Array, target: Array) -> Array:
        logits = logits_of(x, head, spec.scales)
        return jnp.take_along_axis(logits, target[:, None], -1)[:, 0] >= jnp.max(logits, axis=-1)

    inputs = (hidden, after(tokens.token_ids, layout))
    matches = over_chunks(one_chunk, inputs, chunk=settings.chunk, layout=layout)
    return placed(matches, tokens.segment_ids, layout)


# ---- a packed batch's tokens in one list, and back


def after(values: Array, layout: Layout = ONE_DEVICE) -> Array:
    """Return for each token the value of the next one, 0 for a row's last: [B, T, ...] -> tokens
    [B * T, ...] of the layout."""
    rest = ((0, 0) for _ in values.shape[2:])
    return layout.flat(jnp.pad(values[:, 1:], ((0, 0), (0, 1), *rest)))


def placed(values: Array, segment_ids: Array, layout: Layout = ONE_DEVICE) -> Array:
    """Move what each token computed of the next one to that one: tokens [B * T, ...] of the layout
    -> [B, T, ...]; 0 where a segment starts and in padding."""
    follows = (segment_ids[:, 1:] == segment_ids[:, :-1]) & (segment_ids[:, 1:] > 0)
    values = layout.rows(values, segment_ids.shape[0])[:, :-1]
    follows = follows.reshape(*follows.shape, *(1 for _ in values.shape[2:]))
    kept = jnp.where(follows, values, jnp.zeros((), values.dtype))
    return jnp.pad(kept, ((0, 0), (1, 0), *((0, 0) for _ in values.shape[2:])))
