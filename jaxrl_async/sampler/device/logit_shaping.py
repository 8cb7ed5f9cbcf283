"""Changes of logits before they are sampled from: grammar masks, biases, stop tokens that are not
allowed yet, and penalties. Pure; only programs of blocks with such a request contain it.

Shapes: S slots, R rows that decode, V vocabulary, W = ceil(V / 32) words of bits, F steps of a
block, B biased tokens, L tokens of the longest sequence.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from jaxrl_async.sampler.device.sampling import MASKED

AnyArray = Any
"""An array of a program: traced, on the device, or in NumPy before or after."""


class Shaping(NamedTuple):
    """What shapes the logits of each slot [S] in a block, or of each row [R] in its loop."""

    allowed: AnyArray  # [S, W] uint32, bits of the tokens that may follow the forced ones
    forced: AnyArray  # [S, F] int32, the only possible token of each first step; -1: none
    steps: AnyArray  # [S] int32, steps that the slot takes part in
    bias_ids: AnyArray  # [S, B] int32; V: none
    bias: AnyArray  # [S, B] float32
    min_tokens: AnyArray  # [S] int32, generated tokens before a stop token is possible
    penalties: "Penalties | None" = None  # None: no request has any


class Penalties(NamedTuple):
    """Penalties of each slot [S], and the tokens that they count."""

    frequency: AnyArray  # [S] float32
    presence: AnyArray  # [S] float32
    repetition: AnyArray  # [S] float32
    token_ids: AnyArray  # [S, L] int32, prompt and answer so far; V: none
    prompts: AnyArray  # [S] int32, tokens of the prompt


class Counts(NamedTuple):
    """How often each token has occurred in the sequence of each row."""

    answer: Array  # [R, V] int32
    prompt: Array  # [R, V] int32


def counts_of(penalties: Penalties, vocab: int) -> Counts:
    """Count the tokens of sequences, [R, L] -> [R, V]."""
    ids = jnp.asarray(penalties.token_ids)
    rows = jnp.arange(len(ids))[:, None]
    nothing = jnp.zeros((len(ids), vocab), jnp.int32)
    in_prompt = jnp.arange(ids.shape[1]) < jnp.asarray(penalties.prompts)[:, None]
    return Counts(
        nothing.at[rows, ids].add(~in_prompt, mode="drop"),
        nothing.at[rows, ids].add(in_prompt, mode="drop"),
    )


def shaped(
    logits: Array,
    shaping: Shaping,
    step: Array,
    num_sampled: Array,
    stop_ids: Array,
    counts: Counts | None,
) -> Array:
    """Return the logits that are sampled from, [R, V]: stop tokens that are not allowed yet are
    impossible, then biases are added, then penalties are applied, in vLLM's order, and last the
    tokens that the grammar refuses are made impossible.

    Args:
        logits: [R, V] float32 of the model.
        shaping: of each row.
        step: [R] steps that the row has made in this block.
        num_sampled: [R] tokens that the row's request has sampled.
        stop_ids: [R, E]; -1 is none.
        counts: of the row's tokens; None: without penalties.
    """
    R, V = logits.shape
    rows = jnp.arange(R)[:, None]
    early = (num_sampled < shaping.min_tokens)[:, None] & (stop_ids >= 0)
    logits = logits.at[rows, jnp.where(early, stop_ids, V)].set(MASKED, mode="drop")

    def biased(logits: Array) -> Array:
        return logits.at[rows, shaping.bias_ids].add(shaping.bias, mode="drop")

    logits = jax.lax.cond(jnp.any(shaping.bias_ids < V), biased, lambda logits: logits, logits)
    if counts is not None and shaping.penalties is not None:
        logits = penalized(logits, shaping.penalties, counts)
    possible = unpacked(shaping.allowed, V)
    index = jnp.minimum(step, shaping.forced.shape[1] - 1)
    forced = jnp.take_along_axis(shaping.forced, index[:, None], axis=1)
    possible = jnp.where(forced >= 0, jnp.arange(V) == forced, possible)
    return jnp.where(possible, logits, MASKED)


def penalized(logits: Array, penalties: Penalties, counts: Counts) -> Array:
    """Return logits [R, V] with penalties.

    repetition: logits of tokens in prompt or answer are divided by it if positive, else multiplied
    (CTRL, Keskar et al. 2019, arXiv:1909.05858, section 4.1, with vLLM's and transformers' sign).
    frequency, presence: logit - frequency * count - presence * (count > 0), where count is of the
    answer alone (OpenAI's API reference, "Advanced usage: parameter details").
    """
    seen = (counts.answer > 0) | (counts.prompt > 0)
    factor = jnp.where(seen, penalties.repetition[:, None], 1.0)
    logits = jnp.where(logits > 0, logits / factor, logits * factor)
    logits = logits - penalties.frequency[:, None] * counts.answer
    return logits - penalties.presence[:, None] * (counts.answer > 0)


def unpacked(words: Array, vocab: int) -> Array:
    """Return the bits of [R, W] uint32, [R, vocab] bool: bit i of word w is token 32 w + i."""
    bits = (words[:, :, None] >> jnp.arange(32, dtype=jnp.uint32)) & 1
    flags: Array = bits.reshape(len(words), -1)[:, :vocab].astype(bool)
    return flags


def counted(counts: Counts, tokens: Array, alive: Array) -> Counts:
    """Return the counts with the tokens [R] that rows [R] bool have sampled."""
    rows = jnp.arange(len(tokens))
    return counts._replace(answer=counts.answer.at[rows, tokens].add(alive.astype(jnp.int32)))
