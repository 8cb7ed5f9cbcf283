"""How far two policies are apart at each token, exactly, in chunks: [tokens, vocab] never exists in
full.

Student and teacher here are any two distributions over the same vocabulary: the policy that learns,
which carries the gradient, and a frozen one (a reference or a larger model).
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.scipy.special import logsumexp

from jaxrl_async.algorithms.expert_load import ExpertLoad
from jaxrl_async.model.decoder import (
    ON_ONE_DEVICE,
    DecoderSettings,
    TokenRows,
    output_head,
    token_states,
)
from jaxrl_async.model.families.parts import UNSCALED, Scales
from jaxrl_async.model.logprobs import after, logits_of, over_chunks, placed
from jaxrl_async.model.spec import ModelSpec, Params

Kind = Literal["forward", "reverse", "js"]
Divergence = Callable[[Array, Array], Array]
"""Log-probs [..., outcomes] of student and teacher -> [...] nats."""

MIN_LOGPROB = -1e4
"""Log-probs below it count as this, nats: exp() of it is 0, and a divergence stays finite."""


class TokenDivergence(NamedTuple):
    """How far two policies are apart at each token; [rows, length] float32."""

    logprobs: Array  # of the policy
    entropy: Array  # of the policy, nats
    divergence: Array  # between policy and other, nats
    changed: Array | None = None  # int32, as in decoder.TokenStates
    load: ExpertLoad | None = None  # of the policy, as there


# ---- formulas: log-probs [..., outcomes] of both -> [...]


def forward_kl(student: Array, teacher: Array) -> Array:
    """KL(teacher || student) = sum_v p_T (log p_T - log p_S): covers all that the teacher does."""
    return jnp.sum(_times_log(teacher, _floored(teacher) - _floored(student)), axis=-1)


def reverse_kl(student: Array, teacher: Array) -> Array:
    """KL(student || teacher) = sum_v p_S (log p_S - log p_T): avoids what the teacher does not."""
    return jnp.sum(_times_log(student, _floored(student) - _floored(teacher)), axis=-1)


def jensen_shannon(student: Array, teacher: Array, *, beta: float = 0.5) -> Array:
    """beta KL(teacher || M) + (1 - beta) KL(student || M), M = beta teacher + (1 - beta) student.

    Generalised Jensen-Shannon divergence: Agarwal et al. 2023 (GKD, arXiv:2306.13649), eq. 1. Over
    beta it tends to the forward KL at beta -> 0, over 1 - beta to the reverse KL at beta -> 1. 0 at
    both ends themselves, where it says nothing: 0 < beta < 1.
    """
    mixture = jnp.log(beta) + _floored(teacher), jnp.log1p(-beta) + _floored(student)
    middle = jnp.logaddexp(*mixture)
    return beta * forward_kl(middle, teacher) + (1 - beta) * forward_kl(middle, student)


def divergence_of(kind: Kind, beta: float = 0.5) -> Divergence:
    """Return the divergence of that name: `forward` KL(teacher || student), `reverse` KL(student ||
    teacher), `js` jensen_shannon with this beta."""
    if kind == "js":
        assert 0 < beta < 1, "js needs 0 < beta < 1"
        return lambda student, teacher: jensen_shannon(student, teacher, beta=beta)
    return {"forward": forward_kl, "reverse": reverse_kl}[kind]


def entropy_of(logprobs: Array) -> Array:
    """-sum_v p log p, nats."""
    return -jnp.sum(_times_log(logprobs, _floored(logprobs)), axis=-1)


def _floored(logprobs: Array) -> Array:
    return jnp.maximum(logprobs, MIN_LOGPROB)


def _times_log(logprobs: Array, difference: Array) -> Array:
    """Return exp(logprobs) * difference; outcomes of probability 0 give 0."""
    return jnp.exp(_floored(logprobs)) * difference


# ---- in chunks


def _among(logprobs: Array, size: int) -> Array:
    """Normalise log-probs [..., vocab] among the first `size` tokens."""
    if size == logprobs.shape[-1]:
        return logprobs
    return jax.nn.log_softmax(logprobs[..., :size], axis=-1)


def log_softmax_of(
    hidden: Array, head: Array, temperature: float = 1.0, scales: Scales = UNSCALED
) -> Array:
    """hidden [tokens, D], head [D, V] -> log-probs [tokens, V] float32.

    scales: of the model, for its logits.
    """
    return jax.nn.log_softmax(logits_of(hidden, head, scales) / temperature, axis=-1)


def chunked_divergence(
    hidden: Array,
    head: Array,
    other_hidden: Array,
    other_head: Array,
    targets: Array,
    measure: Divergence,
    settings: DecoderSettings,
    scales: Scales = UNSCALED,
    other_scales: Scales = UNSCALED,
) -> TokenDivergence:
    """Return log-prob, entropy and divergence from the other policy of each token, [tokens] each.

    hidden [tokens, D], head [D, V]; the other policy's may have another width. If one vocabulary is
    larger, the divergence is between what both say of the first tokens, which both have.
    """
    common = min(head.shape[-1], other_head.shape[-1])
    temperature = settings.temperature
    other_head = jax.lax.stop_gradient(other_head)

    def one_chunk(x: Array, other: Array, target: Array) -> TokenDivergence:
        logprobs = log_softmax_of(x, head, temperature, scales)
        others = log_softmax_of(other, other_head, temperature, other_scales)
        drawn = jnp.take_along_axis(logprobs, target[:, None], axis=-1)[:, 0]
        apart = measure(_among(logprobs, common), _among(others, common))
        return TokenDivergence(drawn, entropy_of(logprobs), apart)

    inputs = (hidden, jax.lax.stop_gradient(other_hidden), targets)
    return over_chunks(one_chunk, inputs, chunk=settings.chunk, layout=settings.layout)


# ---- of a packed batch


class FrozenPolicy(NamedTuple):
    """A policy that another one is compared with; no gradient goes into it."""

    spec: ModelSpec
    params: Params


def chunked_over_vocab(
    spec: ModelSpec,
    params: Params,
    tokens: TokenRows,
    other: FrozenPolicy,
    measure: Divergence,
    settings: DecoderSettings = ON_ONE_DEVICE,
) -> TokenDivergence:
    """Return log-prob, entropy and divergence from the other policy of each token, [B, T] each.

    Each is of the distribution that token t is drawn from, placed as token_logprobs places it; 0
    where a segment starts and in padding. The other policy may be of another shape; of
    vocabularies padded to different sizes, the tokens that both have are compared. The expert_ids
    are the policy's alone: the other one chooses for itself.
    """
    layout = settings.layout
    hidden, changed, load = token_states(spec, params, tokens, settings)
    alone, frozen = tokens._replace(expert_ids=None), replace(settings, remat="none")
    measured = chunked_divergence(
        hidden,
        output_head(spec, params, layout),
        token_states(other.spec, other.params, alone, frozen).hidden,
        output_head(other.spec, other.params, layout),
        after(tokens.token_ids, layout),
        measure,
        settings,
        spec.scales,
        other.spec.scales,
    )
    in_rows = [placed(values, tokens.segment_ids, layout) for values in measured[:3]]
    return TokenDivergence(in_rows[0], in_rows[1], in_rows[2], changed, load)


def top_logprobs(
    spec: ModelSpec,
    params: Params,
    tokens: TokenRows,
    settings: DecoderSettings = ON_ONE_DEVICE,
    *,
    k: int,
    vocab: int | None = None,
) -> tuple[Array, Array]:
    """Return the k likeliest tokens at each place and their log-probs, likeliest first.

    [B, T, k] int32 and float32; 0 where a segment starts and in padding. vocab: consider ids below
    it alone; None: all.
    """
    layout, segment_ids = settings.layout, tokens.segment_ids
    head = output_head(spec, params, layout)

    def one_chunk(x: Array) -> tuple[Array, Array]:
        whole = log_softmax_of(x, head, settings.temperature, spec.scales)
        logprobs, ids = jax.lax.top_k(whole[:, :vocab], k)
        return ids.astype(jnp.int32), logprobs

    hidden = token_states(spec, params, tokens, settings).hidden
    ids, logprobs = over_chunks(one_chunk, (hidden,), chunk=settings.chunk, layout=layout)
    return placed(ids, segment_ids, layout), placed(logprobs, segment_ids, layout)


def logprobs_at(
    spec: ModelSpec,
    params: Params,
    tokens: TokenRows,
    chosen: Array,
    settings: DecoderSettings = ON_ONE_DEVICE,
) -> Array:
    """Return the log-probs of the ids chosen [B, T, k], each at its place; [B, T, k] float32.

    Placed as `top_logprobs` places them.
    """
    layout = settings.layout
    head = output_head(spec, params, layout)

    def one_chunk(x: Array, ids: Array) -> Array:
        logprobs = log_softmax_of(x, head, settings.temperature, spec.scales)
        return jnp.take_along_axis(logprobs, ids, axis=-1)

    hidden = token_states(spec, params, tokens, settings).hidden
    inputs = (hidden, after(chosen, layout))
    logprobs = over_chunks(one_chunk, inputs, chunk=settings.chunk, layout=layout)
    return placed(logprobs, tokens.segment_ids, layout)


# ---- few outcomes and the rest


def lumped(logprobs: Array, ids: Array) -> Array:
    """Return log-probs of the k different ids [tokens, k], and of all other tokens together:
    [tokens, vocab] -> [tokens, k + 1]."""
    chosen = jnp.take_along_axis(logprobs, ids, axis=-1)
    rows = jnp.arange(ids.shape[0])[:, None]
    rest = logsumexp(_floored(logprobs).at[rows, ids].set(MIN_LOGPROB), axis=-1, keepdims=True)
    return jnp.concatenate([chosen, rest], axis=-1)
