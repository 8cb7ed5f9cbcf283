"""Log-probs of given tokens: what a scoring prefill computes after the decoder. Pure.

Shapes: see sampler/device/program_arguments.py.
"""

import jax
import jax.numpy as jnp
from jax import Array

from jaxrl_async.model import decoder
from jaxrl_async.sampler.device.engine_spec import EngineSpec
from jaxrl_async.sampler.device.passes import with_used_rows
from jaxrl_async.sampler.device.program_arguments import EngineWeights, ScoreArgs, TokenScores
from jaxrl_async.sampler.device.sampling import named_logprobs, no_names

MOST_LOGITS = 2**24
"""Maximum logits that are in memory at a time: 64 MiB, 110 tokens of 151,936."""
LEAST_TOKENS = 8
"""Minimum tokens whose logits are computed together."""


def tokens_at_once(vocab: int, tokens: int) -> int:
    """Return the number of tokens whose logits are computed together, of `tokens` in a chunk.

    >>> tokens_at_once(151_936, 4096), tokens_at_once(49_152, 4096), tokens_at_once(49_152, 128)
    (104, 336, 128)
    """
    return min(tokens, max(LEAST_TOKENS, MOST_LOGITS // vocab // LEAST_TOKENS * LEAST_TOKENS))


def token_scores(
    spec: EngineSpec, weights: EngineWeights, x: Array, scored: ScoreArgs, top: int
) -> TokenScores:
    """Return the log-probs after the scored tokens of a chunk, given the last layer's results
    [n, D]. Logits exist for a few of these tokens at a time (MOST_LOGITS)."""
    n, V = x.shape[0], spec.model.vocab
    size = tokens_at_once(V, n)
    padded = n + -n % size

    def slice_of(values: Array, begin: Array) -> Array:
        values = jnp.pad(jnp.asarray(values), (0, padded - n))
        return jax.lax.dynamic_slice_in_dim(values, begin, size)

    def score_slice(step: Array, into: TokenScores) -> TokenScores:
        begin = step * size
        used = begin + jnp.arange(size) < scored.count
        params = with_used_rows(spec, weights, used).params
        rows = x[slice_of(scored.indices, begin)]
        logits = decoder.next_logits(spec.model, params, rows, mixed=spec.mixed)
        ids = jnp.asarray(scored.ids)[slice_of(scored.rows, begin)]
        found = _scores(logits, slice_of(scored.targets, begin), ids, top)

        def put(into: Array, new: Array) -> Array:
            return jax.lax.dynamic_update_slice_in_dim(into, new, begin, 0)

        return jax.tree.map(put, into, found)

    nothing = TokenScores(
        jnp.zeros(padded, jnp.float32), no_names((padded,), V, top, scored.ids.shape[1])
    )
    steps = (jnp.asarray(scored.count) + size - 1) // size
    found = jax.lax.fori_loop(0, steps, score_slice, nothing)
    return jax.tree.map(lambda values: values[:n], found)


def _scores(logits: Array, targets: Array, ids: Array, top: int) -> TokenScores:
    """Return the log-probs of targets [m] and of named tokens, given logits [m, V]."""
    named = named_logprobs(logits, jnp.concatenate([targets[:, None], ids], axis=1), top)
    logprobs = named.id_logprobs
    return TokenScores(logprobs[:, 0], named._replace(id_logprobs=logprobs[:, 1:]))
