"""Draw one token per slot, with its log-prob under the distribution that it was drawn from.

Shapes: S slots, V vocabulary. Randomness is one uniform number per slot, keyed by identity (request
and position), never by slot, neighbours or time.
"""

from collections.abc import Iterable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from jaxrl_async.types import Request

AnyArray = Any
"""An array of a program: traced or on the device, or NumPy on its way there or back."""

MASKED = -jnp.inf


class Controls(NamedTuple):
    """Sampling parameters of each slot."""

    temperature: AnyArray  # [S] float32; 0 is greedy
    top_k: AnyArray  # [S] int32; 0 is all
    top_p: AnyArray  # [S] float32
    min_p: AnyArray  # [S] float32


class Mix(NamedTuple):
    """The sampling that the requests of a block ask for together; static, so that a block computes
    nothing else."""

    truncated: bool = False  # a request uses top-k, top-p or min-p: logits are sorted
    greedy: bool = False  # a request has temperature 0
    extras: bool = False  # a request wants full_logprobs and kept


def mix_of(requests: Iterable[Request]) -> Mix:
    """Return the sampling that these requests ask for together."""
    requests = list(requests)
    sampling = [r.sampling for r in requests]
    return Mix(
        truncated=any(s.truncates for s in sampling),
        greedy=any(s.temperature == 0 for s in sampling),
        extras=any(r.extras for r in requests),
    )


def together(mixes: Iterable[Mix]) -> Mix:
    """Return the sampling of blocks whose requests ask for any of these."""
    return Mix(*(any(asked) for asked in zip(Mix(), *mixes, strict=True)))


class SampledTokens(NamedTuple):
    """One step's tokens, with their log-probs and the tokens that could have been drawn."""

    tokens: Array  # [S] int32
    logprobs: Array  # [S] float32, under the distribution that was drawn from
    full_logprobs: Array | None = None  # [S] float32, under the model's own distribution
    kept: Array | None = None  # [S, V / 32] uint32, a bit for each token that could be drawn


def sample(
    logits: Array,
    controls: Controls,
    keys: Array,
    positions: Array,
    mix: Mix,
) -> SampledTokens:
    """Draw a token for each slot.

    Args:
        logits: [S, V] float32.
        controls: the slots' sampling parameters.
        keys: [S, 2] uint32 key data.
        positions: [S] int32, position of the new token in its sequence.
        mix: the sampling that any slot asks for.
    """
    greedy = controls.temperature == 0
    scaled = logits / jnp.where(greedy, 1.0, controls.temperature)[:, None]
    if mix.truncated:
        scaled = jnp.where(greedy[:, None], scaled, truncated_logits(scaled, controls))
    logprobs = jax.nn.log_softmax(scaled, axis=-1)
    tokens = inverse_cdf(jnp.exp(logprobs), uniforms(keys, positions))
    if mix.greedy:
        tokens = jnp.where(greedy, jnp.argmax(logits, axis=-1), tokens).astype(jnp.int32)
    token_logprobs = _at(logprobs, tokens)
    if not mix.extras:
        return SampledTokens(tokens, token_logprobs)
    full = _at(jax.nn.log_softmax(logits, axis=-1), tokens)
    return SampledTokens(tokens, token_logprobs, full, packed_bits(scaled > MASKED))


def _at(values: Array, tokens: Array) -> Array:
    return jnp.take_along_axis(values, tokens[:, None], axis=-1)[:, 0]


def packed_bits(mask: Array) -> Array:
    """Pack [S, V] bool into [S, ceil(V / 32)] uint32: bit i of word w is token 32 w + i."""
    S, V = mask.shape
    words = jnp.pad(mask, ((0, 0), (0, -V % 32))).reshape(S, -1, 32).astype(jnp.uint32)
    return jnp.sum(words << jnp.arange(32, dtype=jnp.uint32), axis=-1, dtype=jnp.uint32)


def truncated_logits(logits: Array, controls: Controls) -> Array:
    """Set temperature-scaled logits to -inf where top-k, then top-p, then min-p refuse the token;
    ties stay.

    top-p keeps the likeliest tokens up to and including the one that reaches the probability
    (Holtzman et al. 2020, arXiv:1904.09751); min-p those at least min_p times as likely as the
    likeliest (Nguyen et al. 2024, arXiv:2407.01082).
    """
    V = logits.shape[-1]
    ranked = -jnp.sort(-logits, axis=-1)
    k = jnp.where(controls.top_k > 0, jnp.minimum(controls.top_k, V), V)
    floor = jnp.take_along_axis(ranked, (k - 1)[:, None], axis=-1)
    kept = jnp.where(ranked >= floor, ranked, MASKED)
    probabilities = jax.nn.softmax(kept, axis=-1)
    before = jnp.cumsum(probabilities, axis=-1) - probabilities
    top_p = controls.top_p[:, None]
    in_nucleus = ((before < top_p) | (top_p >= 1)) & (kept > MASKED)  # their rounded sum may be 1
    nucleus_floor = jnp.min(jnp.where(in_nucleus, kept, jnp.inf), axis=-1, keepdims=True)
    likely_floor = ranked[:, :1] + jnp.log(controls.min_p)[:, None]
    return jnp.where(logits >= jnp.maximum(nucleus_floor, likely_floor), logits, MASKED)


def uniforms(keys: Array, positions: Array) -> Array:
    """Return [S] float32 in [0, 1): one number for each (key, position)."""

    def one(key: Array, position: Array) -> Array:
        folded = jax.random.fold_in(jax.random.wrap_key_data(key), position)
        return jax.random.uniform(folded)

    return jax.vmap(one)(keys, positions)


def inverse_cdf(probabilities: Array, u: Array) -> Array:
    """Return the token whose interval of the cumulated probabilities holds u: [S, V], [S] -> [S]
    int32.

    Two levels (blocks of about sqrt(V), then within one), which costs one pass and keeps float32's
    error at that of a short sum. Never gives a token of probability 0.
    """
    S, V = probabilities.shape
    width = 1 << max(0, (V - 1).bit_length() // 2)
    padded = jnp.pad(probabilities, ((0, 0), (0, -V % width))).reshape(S, -1, width)
    ends = jnp.cumsum(padded.sum(axis=-1), axis=-1)
    target = u * ends[:, -1]
    block = jnp.minimum(jnp.sum(ends <= target[:, None], axis=-1), ends.shape[1] - 1)
    start = jnp.where(
        block > 0, jnp.take_along_axis(ends, jnp.maximum(block - 1, 0)[:, None], 1)[:, 0], 0.0
    )
    inner = jnp.take_along_axis(padded, block[:, None, None], axis=1)[:, 0]
    within = jnp.sum(jnp.cumsum(inner, axis=-1) <= (target - start)[:, None], axis=-1)
    within = jnp.minimum(within, width - 1)
    possible = jnp.take_along_axis(inner, within[:, None], axis=-1)[:, 0] > 0
    within = jnp.where(possible, within, jnp.argmax(inner, axis=-1))  # rounding at an edge
    return (block * width + within).astype(jnp.int32)
