"""Exact divergence of two policies at each token, in chunks: [tokens, vocab] is never in memory as
a whole.

Student and teacher here are any two distributions over the same vocabulary: the policy being
trained, which carries the gradient, and a frozen policy (a reference or a larger model).
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
from jaxrl_async.model.logprobs import after, at_targets, logits_of, over_chunks
from jaxrl_async.model.spec import ModelSpec, Params

Kind = Literal["forward", "reverse", "js"]
Divergence = Callable[[Array, Array], Array]
"""Log-probs [..., outcomes] of student and teacher -> [...] nats."""

MIN_LOGPROB = -1e4
"""Lower bound of log-probs, nats: its exp() is 0, and divergences stay finite."""


class TokenDivergence(NamedTuple):
    """The divergence of two policies at each token; [rows, length] float32."""

    logprobs: Array  # of the policy
    entropy: Array  # of the policy, nats
    divergence: Array  # between policy and other, nats
    changed: Array | None = None  # int32, as in decoder.TokenStates
    load: ExpertLoad | None = None  # of the policy, as in decoder.TokenStates


# ---- formulas: log-probs [..., outcomes] of both -> [...]


def forward_kl(student: Array, teacher: Array) -> Array:
    """KL(teacher || student) = sum_v p_T (log p_T - log p_S): mode-covering."""
    return jnp.sum(_times_log(teacher, _floored(teacher) - _floored(student)), axis=-1)


def reverse_kl(student: Array, teacher: Array) -> Array:
    """KL(student || teacher) = sum_v p_S (log p_S - log p_T): mode-seeking."""
    return jnp.sum(_times_log(student, _floored(student) - _floored(teacher)), axis=-1)


def jensen_shannon(student: Array, teacher: Array, *, beta: float = 0.5) -> Array:
    """beta KL(teacher || M) + (1 - beta) KL(student || M), M = beta teacher + (1 - beta) student.

    Generalised Jensen-Shannon divergence: Agarwal et al. 2023 (GKD, arXiv:2306.13649), eq. 1.
    Divided by beta it tends to the forward KL for beta -> 0; divided by 1 - beta, to the reverse KL
    for beta -> 1. It is 0 at beta = 0 and 1, so 0 < beta < 1 is required.
    """
    mixture = jnp.log(beta) + _floored(teacher), jnp.log1p(-beta) + _floored(student)
    middle = jnp.logaddexp(*mixture)
    return beta * forward_kl(middle, teacher) + (1 - beta) * forward_kl(middle, student)


def divergence_of(kind: Kind, beta: float = 0.5) -> Divergence:
    """Return a divergence by name: `forward` KL(teacher || student), `reverse` KL(student ||
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
    """Return exp(logprobs) * difference; outcomes with probability 0 give 0."""
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

    scales: the model's scales, for its logits.
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

    hidden [tokens, D], head [D, V]; the other policy's width may differ. If one vocabulary is
    larger, the divergence is over the tokens that both have, renormalised.
    """
    common = min(head.shape[-1], other_head.shape[-1])
    temperature = settings.temperature
    other_head = jax.lax.stop_gradient(other_head)

    def one_chunk(x: Array, other: Array, target: Array) -> TokenDivergence:
        logprobs = log_softmax_of(x, head, temperature, scales)
        others = log_softmax_of(other, other_head, temperature, other_scales)
        sampled = jnp.take_along_axis(logprobs, target[:, None], axis=-1)[:, 0]
        distance = measure(_among(logprobs, common), _among(others, common))
        return TokenDivergence(sampled, entropy_of(logprobs), distance)

    inputs = (hidden, jax.lax.stop_gradient(other_hidden), targets)
    return over_chunks(one_chunk, inputs, chunk=settings.chunk, layout=settings.layout)


# ---- of a packed batch


class FrozenPolicy(NamedTuple):
    """A policy for comparison, without gradient."""

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

    The values at t are for the distribution of token t, as in token_logprobs; 0 at the start of a
    segment and in padding. The other policy may have another architecture. If the vocabularies are
    padded to different sizes, the tokens that both have are compared. The expert_ids are only for
    the policy: the other policy's router chooses its experts.
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
    in_rows = [at_targets(values, tokens.segment_ids, layout) for values in measured[:3]]
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
    """Return the k most likely tokens at each position and their log-probs, in descending order.

    [B, T, k] int32 and float32; 0 at the start of a segment and in padding. vocab: consider only
    ids below it; None: all.
    """
    layout, segment_ids = settings.layout, tokens.segment_ids
    head = output_head(spec, params, layout)

    def one_chunk(x: Array) -> tuple[Array, Array]:
        whole = log_softmax_of(x, head, settings.temperature, spec.scales)
        logprobs, ids = jax.lax.top_k(whole[:, :vocab], k)
        return ids.astype(jnp.int32), logprobs

    hidden = token_states(spec, params, tokens, settings).hidden
    ids, logprobs = over_chunks(one_chunk, (hidden,), chunk=settings.chunk, layout=layout)
    return at_targets(ids, segment_ids, layout), at_targets(logprobs, segment_ids, layout)


def logprobs_at(
    spec: ModelSpec,
    params: Params,
    tokens: TokenRows,
    chosen: Array,
    settings: DecoderSettings = ON_ONE_DEVICE,
) -> Array:
    """Return the log-probs of the chosen ids [B, T, k] at each position; [B, T, k] float32.

    Positions are as in `top_logprobs`.
    """
    layout = settings.layout
    head = output_head(spec, params, layout)

    def one_chunk(x: Array, ids: Array) -> Array:
        logprobs = log_softmax_of(x, head, settings.temperature, spec.scales)
        return jnp.take_along_axis(logprobs, ids, axis=-1)

    hidden = token_states(spec, params, tokens, settings).hidden
    inputs = (hidden, after(chosen, layout))
    logprobs = over_chunks(one_chunk, inputs, chunk=settings.chunk, layout=layout)
    return at_targets(logprobs, tokens.segment_ids, layout)


# ---- chosen tokens and the rest


def lumped(logprobs: Array, ids: Array) -> Array:
    """Return log-probs of k distinct ids [tokens, k], and of all other tokens together: [tokens,
    vocab] -> [tokens, k + 1]. An id of -1 is no token: its log-prob is MIN_LOGPROB."""
    known = ids >= 0
    chosen = jnp.take_along_axis(logprobs, jnp.where(known, ids, 0), axis=-1)
    rows = jnp.arange(ids.shape[0])[:, None]
    cells = rows, jnp.where(known, ids, logprobs.shape[-1])
    rest = _floored(logprobs).at[cells].set(MIN_LOGPROB, mode="drop")
    return jnp.concatenate(
        [jnp.where(known, chosen, MIN_LOGPROB), logsumexp(rest, axis=-1, keepdims=True)], axis=-1
    )
