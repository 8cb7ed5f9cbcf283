"""Log-probs and entropies over a large vocabulary, in chunks: [tokens, vocab] is never in memory as
a whole.

With top-k, top-p or min-p a token is sampled from a subset of the vocabulary. `kept` holds this
subset, so both log-probs of a ratio are over the same outcomes (Keep Sampling Mask: DeepSeek-AI
2025, DeepSeek-V3.2, arXiv:2512.02556).
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from jaxrl_async.algorithms.expert_load import ExpertLoad
from jaxrl_async.cpu.gradients import chosen
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
"""Logit of tokens that could not be sampled: their probability is 0, and gradients stay finite
(unlike with -inf)."""


def chunked_logprobs(
    hidden: Array,
    head: Array,
    targets: Array,
    *,
    chunk: int,
    temperature: float = 1.0,
    kept: Array | None = None,
    temperatures: Array | None = None,
    scales: Scales = UNSCALED,
    layout: Layout = ONE_DEVICE,
    cpu_kernels: bool = False,
    in_parts: bool = False,
) -> tuple[Array, Array]:
    """Return the log-prob of each target and the entropy of its distribution, nats.

    hidden [tokens, D], head [D, V], targets [tokens] int32 -> [tokens] float32 twice. The
    distribution is softmax(logits / temperature), over the tokens whose bits are set in kept
    [tokens, ceil(V / 8)] uint8, little-endian; None: over all. temperatures: each token's own
    [tokens], which divides its logits, too; None: all have one. scales: the model's scales, for its
    logits. cpu_kernels: use this package's CPU kernels for the results of a chunk's logits;
    in_parts: also for the logits, see layers.product.
    Differentiable; the backward pass computes a chunk's logits again, so in both passes at most
    [chunk, V] is in a device's memory at a time.
    """

    how = HeadSettings(chunk, temperature, scales, cpu_kernels, in_parts)

    def one_chunk(x: Array, target: Array, sampling: _Sampling) -> tuple[Array, Array]:
        return _results(how, x, head, target, sampling)

    inputs = (hidden, targets, _Sampling(kept, temperatures))
    logprobs, entropy = over_chunks(one_chunk, inputs, chunk=chunk, layout=layout)
    return logprobs, entropy


class _Sampling(NamedTuple):
    """How each token was sampled, in addition to HeadSettings; see chunked_logprobs' arguments."""

    kept: Array | None = None
    temperatures: Array | None = None


class HeadSettings(NamedTuple):
    """Settings of `wanted_logprobs`; see the arguments of chunked_logprobs."""

    chunk: int
    temperature: float = 1.0
    scales: Scales = UNSCALED
    cpu_kernels: bool = False
    in_parts: bool = False


def wanted_logprobs(
    hidden: Array,
    head: Array,
    targets: Array,
    wanted: Array,
    how: HeadSettings,
    kept: Array | None = None,
    temperatures: Array | None = None,
) -> tuple[Array, Array]:
    """Return the results of `chunked_logprobs` for the wanted tokens [tokens] bool, 0 for others.

    This is for one device, where a program can stop after the last wanted token. The backward pass
    computes a chunk's logits again. If the head is frozen, the forward pass instead keeps the
    gradient [tokens, D] of each token's log-prob, which the backward pass scales.
    """
    hidden, head, targets, wanted = map(jnp.asarray, (hidden, head, targets, wanted))
    sampling = jax.tree.map(jnp.asarray, _Sampling(kept, temperatures))
    order = jnp.argsort(~wanted, stable=True)
    chosen = _Wanted(wanted, order, jnp.argsort(order), jnp.sum(wanted))
    return _wanted(how, hidden, head, targets, sampling, chosen)


class _Wanted(NamedTuple):
    """The wanted tokens and their order."""

    each: Array  # [tokens] bool
    order: Array  # [tokens] int32, the wanted ones first
    position: Array  # [tokens] int32, of each token in that order
    number: Array  # [] int32

    def chunk(self, index: Array, size: int) -> Array:
        """Return the tokens of a chunk, [size] int32; arbitrary after the last token."""
        padded = jnp.pad(self.order, (0, -len(self.order) % size))
        return jax.lax.dynamic_slice_in_dim(padded, index * size, size)

    def back(self, values: Array) -> Array:
        """Return values [>= tokens, ...] from this order in the original order, 0 for tokens that
        are not wanted."""
        moved = values[self.position]
        wide = self.each.reshape(-1, *(1 for _ in moved.shape[1:]))
        return jnp.where(wide, moved, jnp.zeros((), moved.dtype))


class _Residuals(NamedTuple):
    """The residuals for the backward pass of `_wanted`."""

    hidden: Array
    head: Array
    targets: Array
    sampling: _Sampling
    wanted: _Wanted
    slopes: Array | None  # [tokens, D] gradient of each log-prob; None: the head is trained


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _wanted(
    how: HeadSettings,
    hidden: Array,
    head: Array,
    targets: Array,
    sampling: _Sampling,
    wanted: _Wanted,
) -> tuple[Array, Array]:
    return _forward(how, _Residuals(hidden, head, targets, sampling, wanted, None), slopes=False)[0]


def _wanted_forward(how: HeadSettings, *args: Any) -> tuple[tuple[Array, Array], _Residuals]:
    learns = args[1].perturbed  # the head
    hidden, head, targets, sampling, wanted = jax.tree.map(
        lambda x: x.value, args, is_leaf=lambda x: hasattr(x, "perturbed")
    )
    read = _Residuals(hidden, head, targets, sampling, wanted, None)
    results, slopes = _forward(how, read, slopes=not learns)
    return results, read._replace(slopes=slopes)


def _forward(
    how: HeadSettings, of: _Residuals, *, slopes: bool
) -> tuple[tuple[Array, Array], Array | None]:
    """Return log-probs and entropies, and the slopes if requested."""
    size, number = _even_chunk(len(of.targets), how.chunk)

    def body(index: Array, done: object) -> Any:
        x, one_chunk = _chunk_of(how, of, index, size)
        if not slopes:
            new = (*one_chunk(x, of.head), None)
        else:
            results, back = jax.vjp(lambda x: one_chunk(x, of.head), x)
            (slope,) = back((jnp.ones_like(results[0]), jnp.zeros_like(results[1])))
            new = (*results, slope)
        return jax.tree.map(
            lambda whole, part: jax.lax.dynamic_update_slice_in_dim(whole, part, index * size, 0),
            done,
            new,
        )

    each = jnp.zeros(size * number, jnp.float32)
    rows = jnp.zeros((size * number, of.hidden.shape[1]), of.hidden.dtype) if slopes else None
    chunks = -(-of.wanted.number // size)
    logprobs, entropy, kept = jax.lax.fori_loop(0, chunks, body, (each, each, rows))
    back = of.wanted.back
    return (back(logprobs), back(entropy)), None if kept is None else back(kept)


def _wanted_backward(how: HeadSettings, of: _Residuals, grads: Any) -> tuple[Any, ...]:
    nothing = jax.custom_derivatives.SymbolicZero
    to_logprobs, to_entropy = grads
    if of.slopes is not None and isinstance(to_entropy, nothing):
        if isinstance(to_logprobs, nothing):
            return None, None, None, None, None
        grad = (to_logprobs[:, None] * of.slopes).astype(of.hidden.dtype)
        return grad, None, None, None, None
    masked = tuple(
        jnp.zeros(g.shape, g.dtype) if isinstance(g, nothing) else jnp.where(of.wanted.each, g, 0.0)
        for g in grads
    )
    size, number = _even_chunk(len(of.targets), how.chunk)
    learns = of.slopes is None

    def body(index: Array, done: Any) -> Any:
        x, one_chunk = _chunk_of(how, of, index, size)
        tokens = of.wanted.chunk(index, size)
        grad = tuple(g[tokens] for g in masked)
        of_hidden, of_head = done
        if learns:
            dx, dhead = jax.vjp(one_chunk, x, of.head)[1](grad)
            of_head = of_head + dhead.astype(jnp.float32)
        else:
            (dx,) = jax.vjp(lambda x: one_chunk(x, of.head), x)[1](grad)
        return jax.lax.dynamic_update_slice_in_dim(of_hidden, dx, index * size, 0), of_head

    rows = jnp.zeros((size * number, of.hidden.shape[1]), of.hidden.dtype)
    start = (rows, jnp.zeros(of.head.shape, jnp.float32) if learns else None)
    chunks = -(-of.wanted.number // size)
    of_hidden, of_head = jax.lax.fori_loop(0, chunks, body, start)
    of_head = None if of_head is None else of_head.astype(of.head.dtype)
    return of.wanted.back(of_hidden), of_head, None, None, None


_wanted.defvjp(_wanted_forward, _wanted_backward, symbolic_zeros=True)


def _chunk_of(
    how: HeadSettings, of: _Residuals, index: Array, size: int
) -> tuple[Array, Callable[[Array, Array], tuple[Array, Array]]]:
    """Return a chunk's hidden states, 0 after the wanted ones, and the function from them and the
    head to the chunk's results."""
    tokens = of.wanted.chunk(index, size)
    sampling = jax.tree.map(lambda values: values[tokens], of.sampling)
    real = jnp.arange(size) + index * size < of.wanted.number
    x = jnp.where(real[:, None], of.hidden[tokens], jnp.zeros((), of.hidden.dtype))
    return x, lambda x, head: _results(how, x, head, of.targets[tokens], sampling)


def _even_chunk(tokens: int, chunk: int) -> tuple[int, int]:
    """Return the length of equal chunks of at most `chunk` tokens, and their number."""
    number = -(-tokens // chunk)
    return -(-tokens // number), number


def _results(
    how: HeadSettings, x: Array, head: Array, targets: Array, sampling: _Sampling
) -> tuple[Array, Array]:
    """Return the log-probs of targets [n] and the entropies [n], given hidden states [n, D]."""
    logits = logits_of(x, head, how.scales, in_parts=how.in_parts) / how.temperature
    if sampling.temperatures is not None:
        logits = logits / _divisors(sampling.temperatures)[:, None]
    if sampling.kept is not None:
        logits = jnp.where(unpacked(sampling.kept, logits.shape[-1]), logits, REFUSED)
    if how.cpu_kernels:
        return chosen(logits, targets)
    logprobs = jax.nn.log_softmax(logits, axis=-1)
    entropy = -jnp.sum(jnp.exp(logprobs) * logprobs, axis=-1)
    return jnp.take_along_axis(logprobs, targets[:, None], axis=-1)[:, 0], entropy


def _divisors(temperatures: Array) -> Array:
    """Return temperatures with 1 in place of the 0 of padding."""
    return jnp.where(temperatures > 0, temperatures, 1.0)


def blocked_logprobs(
    hidden: Array,
    head: Array,
    targets: Array,
    *,
    blocks: int,
    temperature: float = 1.0,
    temperatures: Array | None = None,
    scales: Scales = UNSCALED,
    layout: Layout = ONE_DEVICE,
) -> tuple[Array, Array]:
    """Return the results of `chunked_logprobs` for a head [D, V] sharded over fsdp.

    The vocabulary is processed in `blocks` parts, each gathered when it is used, so neither the
    head nor its gradient is ever whole on a device.

    Each token's maximum, sum of exponentials and exp-weighted sum of logits are carried from block
    to block (Milakov and Gimelshein 2018, arXiv:1805.02867). The backward pass computes a block's
    logits again. blocks divides V on each device (`vocab_blocks`).
    """
    V = head.shape[1]
    ways = layout.vocab_ways(V)

    def split(x: Array) -> Array:
        """[..., V] -> [blocks, ..., ways, V / ways / blocks]: a part of each device's columns."""
        return jnp.moveaxis(x.reshape(*x.shape[:-1], ways, blocks, -1), -2, 0)

    parts = layout.place(split(head), None, "embed", "vocab", None)
    wide = hidden.astype(jnp.float32)  # to sum the blocks' gradients in float32

    @jax.checkpoint
    def one_block(seen: tuple[Array, ...], part: tuple[Array, Array]) -> tuple[Any, None]:
        most, total, weighted, target = seen
        weights, ids = part
        weights = layout.gathered(weights.astype(hidden.dtype), ("embed", "vocab", "head_dim"))
        x = wide.astype(hidden.dtype)
        logits = jnp.einsum("td,dwv->twv", x, weights, preferred_element_type=jnp.float32)
        logits = bounded(logits, scales) / temperature
        if temperatures is not None:
            logits = logits / _divisors(temperatures)[:, None, None]
        now = jnp.maximum(most, jax.lax.stop_gradient(logits).max((1, 2)))
        before, each = jnp.exp(most - now), jnp.exp(logits - now[:, None, None])
        is_target = ids == targets[:, None, None]
        return (
            now,
            total * before + each.sum((1, 2)),
            weighted * before + (each * logits).sum((1, 2)),
            target + jnp.where(is_target, logits, 0.0).sum((1, 2)),
        ), None

    nothing = jnp.zeros(hidden.shape[0], jnp.float32)
    start = (nothing + REFUSED, nothing, nothing, nothing)
    ids = split(jnp.arange(V, dtype=jnp.int32))
    (most, total, weighted, target), _ = jax.lax.scan(one_block, start, (parts, ids))
    log_total = most + jnp.log(total)
    return target - log_total, log_total - weighted / total


def vocab_blocks(vocab: int, tokens: int, chunk: int) -> int | None:
    """Return the number of parts of a device's vocabulary; None if no number fits.

    The logits of all tokens for one part are at most as many as the logits of `chunk` tokens for
    the whole vocabulary. The number divides the vocabulary and is below four times the minimum.

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
    """hidden [..., D], head [D, V] -> [..., V] float32, scaled and bounded by a model's scales;
    in_parts: see layers.product."""
    head = head.astype(hidden.dtype)
    if in_parts:
        return bounded(product(hidden, head, in_parts=True), scales)
    return bounded(jnp.matmul(hidden, head, preferred_element_type=jnp.float32), scales)


def over_chunks(
    function: Callable[..., object],
    inputs: tuple[object, ...],
    *,
    chunk: int,
    layout: Layout = ONE_DEVICE,
) -> Any:
    """Return function(*inputs), run over at most `chunk` tokens of each device at a time.

    Every array has tokens on axis 0, in the order of the layout.

    The backward pass computes a chunk again, so in both passes the intermediates of `function` are
    in memory for one chunk only.
    """
    tokens = jax.tree.leaves(inputs)[0].shape[0]
    ways = layout.token_ways(tokens)
    each = tokens // ways
    chunk, _ = _even_chunk(each, chunk)  # equal chunks, for little padding
    padding = -each % chunk

    def split(x: Array) -> Array:
        """[tokens, ...] -> [chunks, ways * chunk, ...]: a part of each device's tokens."""
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
    """[tokens, ceil(vocab / 8)] uint8 -> [tokens, vocab] bool, like little-endian np.unpackbits."""
    each = (bits[..., None] >> jnp.arange(8, dtype=jnp.uint8)) & 1
    return each.reshape(bits.shape[0], -1)[:, :vocab].astype(bool)


class TokenLogprobs(NamedTuple):
    """The results of `token_logprobs`: [B, T], 0 at the start of a segment and in padding; and the
    load of the experts."""

    logprobs: Array  # float32, of token t from the logits at t - 1
    entropy: Array  # float32, of that distribution, nats
    changed: Array | None  # int32, as in decoder.TokenStates
    load: ExpertLoad | None  # as in decoder.TokenStates


def token_logprobs(
    spec: ModelSpec, params: Params, tokens: TokenRows, settings: DecoderSettings = ON_ONE_DEVICE
) -> TokenLogprobs:
    """Return each token's log-prob, and the entropy of its distribution; on one device, 0 for
    tokens that are not needed (TokenRows.wanted)."""
    layout, chunk, temperature = settings.layout, settings.chunk, settings.temperature
    kept, segment_ids = tokens.kept, tokens.segment_ids
    hidden, changed, load = token_states(spec, params, tokens, settings)
    targets, blocks = after(tokens.token_ids, layout), None
    temperatures = None
    if settings.temperatures and tokens.task_ids is not None:
        of_task = jnp.asarray(settings.temperatures, jnp.float32)
        temperatures = of_task[after(tokens.task_ids, layout)]
    if kept is None and layout.shares_weights:
        vocab, count = spec.vocab // layout.vocab_ways(spec.vocab), hidden.shape[0]
        blocks = vocab_blocks(vocab, count // layout.token_ways(count), chunk)
    if layout.token_ways(hidden.shape[0]) == 1 and blocks is None:
        read = _follows(segment_ids)
        if tokens.wanted is not None:
            read &= tokens.wanted[:, 1:]
        logprobs, entropy = wanted_logprobs(
            hidden,
            output_head(spec, params, layout),
            targets,
            layout.flat(jnp.pad(read, ((0, 0), (0, 1)))),
            HeadSettings(chunk, temperature, spec.scales, settings.cpu_kernels, settings.in_parts),
            None if kept is None else after(kept, layout),
            temperatures,
        )
    elif blocks is not None:
        logprobs, entropy = blocked_logprobs(
            hidden,
            output_head(spec, params),
            targets,
            blocks=blocks,
            temperature=temperature,
            temperatures=temperatures,
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
            temperatures=temperatures,
            scales=spec.scales,
            layout=layout,
            cpu_kernels=settings.cpu_kernels,
            in_parts=settings.in_parts,
        )
    logprobs, entropy = (at_targets(values, segment_ids, layout) for values in (logprobs, entropy))
    return TokenLogprobs(logprobs, entropy, changed, load)


def greedy_matches(
    spec: ModelSpec, params: Params, tokens: TokenRows, settings: DecoderSettings = ON_ONE_DEVICE
) -> Array:
    """Return whether each token is the most likely one after the previous tokens, [B, T] bool.

    False at the start of a segment and in padding. If all tokens of an answer match, greedy
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
    return at_targets(matches, tokens.segment_ids, layout)


# ---- conversion between packed rows and a list of tokens


def after(values: Array, layout: Layout = ONE_DEVICE) -> Array:
    """Return for each token the value of the next token, 0 for a row's last: [B, T, ...] -> tokens
    [B * T, ...] of the layout."""
    rest = ((0, 0) for _ in values.shape[2:])
    return layout.flat(jnp.pad(values[:, 1:], ((0, 0), (0, 1), *rest)))


def _follows(segment_ids: Array) -> Array:
    """Return whether each token, except a row's first, follows a token of its segment, [B, T - 1]
    bool."""
    return (segment_ids[:, 1:] == segment_ids[:, :-1]) & (segment_ids[:, 1:] > 0)


def at_targets(values: Array, segment_ids: Array, layout: Layout = ONE_DEVICE) -> Array:
    """Move each token's values for its next token to the next token: tokens [B * T, ...] of the
    layout -> [B, T, ...]; 0 at the start of a segment and in padding."""
    follows = _follows(segment_ids)
    values = layout.rows(values, segment_ids.shape[0])[:, :-1]
    follows = follows.reshape(*follows.shape, *(1 for _ in values.shape[2:]))
    kept = jnp.where(follows, values, jnp.zeros((), values.dtype))
    return jnp.pad(kept, ((0, 0), (1, 0), *((0, 0) for _ in values.shape[2:])))
