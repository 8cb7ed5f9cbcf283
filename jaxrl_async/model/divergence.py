"""How far two policies are apart at each token, exactly, in chunks: [tokens, vocab] never exists in
full.

Student and teacher here are any two distributions over the same vocabulary: the policy that learns,
which carries the gradient, and a frozen one (a reference or a larger model).
"""

from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.scipy.special import logsumexp

from jaxrl_async.model.attention import reference
from jaxrl_async.model.decoder import Params, output_head, replayed_states, token_states
from jaxrl_async.model.kernels import SequenceAttention
from jaxrl_async.model.layout import ONE_DEVICE, Layout
from jaxrl_async.model.logprobs import after, logits_of, over_chunks, placed
from jaxrl_async.model.spec import ModelSpec

Kind = Literal["forward", "reverse", "js"]

MIN_LOGPROB = -1e4
"""Log-probs below it count as this, nats: exp() of it is 0, and a divergence stays finite."""


class TokenDivergence(NamedTuple):
    """What `chunked_over_vocab` says of each token; [rows, length] float32."""

    logprobs: Array  # of the policy
    entropy: Array  # of the policy, nats
    divergence: Array  # between policy and other, nats
    changed: Array | None = None  # int32, as decoder.replayed_states counts; None: nothing replayed


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


def divergence_of(kind: Kind, beta: float = 0.5) -> Callable[[Array, Array], Array]:
    """(student, teacher log-probs) -> divergence; beta is that of `js`."""
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
    """exp(logprobs) * difference; outcomes of probability 0 give nothing."""
    return jnp.exp(_floored(logprobs)) * difference


# ---- in chunks


def _among(logprobs: Array, size: int) -> Array:
    """Log-probs [..., vocab] among the first `size` tokens."""
    if size == logprobs.shape[-1]:
        return logprobs
    return jax.nn.log_softmax(logprobs[..., :size], axis=-1)


def log_softmax_of(hidden: Array, head: Array, temperature: float = 1.0) -> Array:
    """hidden [tokens, D], head [D, V] -> log-probs [tokens, V] float32."""
    return jax.nn.log_softmax(logits_of(hidden, head) / temperature, axis=-1)


def chunked_divergence(
    hidden: Array,
    head: Array,
    other_hidden: Array,
    other_head: Array,
    targets: Array,
    *,
    kind: Kind,
    beta: float = 0.5,
    chunk: int,
    temperature: float = 1.0,
    layout: Layout = ONE_DEVICE,
) -> TokenDivergence:
    """Log-prob of each target, entropy, and divergence to the other policy; [tokens] float32 each.

    hidden [tokens, D], head [D, V]; those of the other may have another width. Where one has more
    tokens, the divergence is between what both say of the first ones, which both have.
    """
    common = min(head.shape[-1], other_head.shape[-1])
    measure = divergence_of(kind, beta)
    other_head = jax.lax.stop_gradient(other_head)

    def one_chunk(x: Array, other: Array, target: Array) -> TokenDivergence:
        logprobs = log_softmax_of(x, head, temperature)
        others = log_softmax_of(other, other_head, temperature)
        drawn = jnp.take_along_axis(logprobs, target[:, None], axis=-1)[:, 0]
        apart = measure(_among(logprobs, common), _among(others, common))
        return TokenDivergence(drawn, entropy_of(logprobs), apart)

    inputs = (hidden, jax.lax.stop_gradient(other_hidden), targets)
    return over_chunks(one_chunk, inputs, chunk=chunk, layout=layout)


# ---- of a packed batch


def chunked_over_vocab(
    spec: ModelSpec,
    params: Params,
    other_params: Params,
    token_ids: Array,
    positions: Array,
    segment_ids: Array,
    *,
    kind: Kind,
    beta: float = 0.5,
    other_spec: ModelSpec | None = None,
    dtype: Any = jnp.float32,
    remat: str = "none",
    attention: SequenceAttention = reference,
    chunk: int = 1024,
    temperature: float = 1.0,
    layout: Layout = ONE_DEVICE,
    expert_ids: Array | None = None,
) -> TokenDivergence:
    """At t: of the distribution that token t is drawn from, as token_logprobs places them.

    kind: `forward` is KL(other || policy), `reverse` KL(policy || other), `js` jensen_shannon with
    the other as teacher. No gradient goes into the other, whose spec may differ; of vocabularies
    padded to different sizes what both have is compared. 0 where a segment starts and in padding.
    expert_ids: the policy's, as in decoder.replayed_states; the other chooses for itself.
    """
    arrays = (token_ids, positions, segment_ids)
    other_spec = other_spec or spec
    how: dict[str, Any] = {"dtype": dtype, "attention": attention, "layout": layout}
    hidden, changed = replayed_states(spec, params, *arrays, expert_ids, remat=remat, **how)
    measured = chunked_divergence(
        hidden,
        output_head(spec, params, layout),
        token_states(other_spec, other_params, *arrays, **how),
        output_head(other_spec, other_params, layout),
        after(token_ids, layout),
        kind=kind,
        beta=beta,
        chunk=chunk,
        temperature=temperature,
        layout=layout,
    )
    found = TokenDivergence(*(placed(values, segment_ids, layout) for values in measured[:3]))
    return found._replace(changed=changed)


def top_logprobs(
    spec: ModelSpec,
    params: Params,
    token_ids: Array,
    positions: Array,
    segment_ids: Array,
    *,
    k: int,
    vocab: int | None = None,
    dtype: Any = jnp.float32,
    attention: SequenceAttention = reference,
    chunk: int = 1024,
    temperature: float = 1.0,
    layout: Layout = ONE_DEVICE,
) -> tuple[Array, Array]:
    """At t: the k likeliest tokens there and their log-probs, likeliest first.

    [B, T] inputs -> [B, T, k] int32 and float32; 0 where a segment starts and in padding. vocab:
    look at ids below it alone; None: at all.
    """
    head = output_head(spec, params, layout)

    def one_chunk(x: Array) -> tuple[Array, Array]:
        logprobs, ids = jax.lax.top_k(log_softmax_of(x, head, temperature)[:, :vocab], k)
        return ids.astype(jnp.int32), logprobs

    hidden = token_states(
        spec, params, token_ids, positions, segment_ids,
        dtype=dtype, attention=attention, layout=layout,
    )  # fmt: skip
    ids, logprobs = over_chunks(one_chunk, (hidden,), chunk=chunk, layout=layout)
    return placed(ids, segment_ids, layout), placed(logprobs, segment_ids, layout)


def logprobs_at(
    spec: ModelSpec,
    params: Params,
    token_ids: Array,
    positions: Array,
    segment_ids: Array,
    chosen: Array,
    *,
    dtype: Any = jnp.float32,
    attention: SequenceAttention = reference,
    chunk: int = 1024,
    temperature: float = 1.0,
    layout: Layout = ONE_DEVICE,
) -> Array:
    """At t: log-probs of the ids chosen [B, T, k] there; [B, T, k] float32, placed as
    `top_logprobs` places them."""
    head = output_head(spec, params, layout)

    def one_chunk(x: Array, ids: Array) -> Array:
        return jnp.take_along_axis(log_softmax_of(x, head, temperature), ids, axis=-1)

    hidden = token_states(
        spec, params, token_ids, positions, segment_ids,
        dtype=dtype, attention=attention, layout=layout,
    )  # fmt: skip
    inputs = (hidden, after(chosen, layout))
    found = over_chunks(one_chunk, inputs, chunk=chunk, layout=layout)
    return placed(found, segment_ids, layout)


# ---- few outcomes and the rest


def lumped(logprobs: Array, ids: Array) -> Array:
    """Log-probs [tokens, vocab] -> [tokens, k + 1]: of the k different ids [tokens, k], and of all
    others together."""
    chosen = jnp.take_along_axis(logprobs, ids, axis=-1)
    rows = jnp.arange(ids.shape[0])[:, None]
    rest = logsumexp(_floored(logprobs).at[rows, ids].set(MIN_LOGPROB), axis=-1, keepdims=True)
    return jnp.concatenate([chosen, rest], axis=-1)
