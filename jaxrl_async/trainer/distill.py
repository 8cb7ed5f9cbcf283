"""Distillation: per-token losses between a student's logits and a teacher's log-probs.

    known about the teacher          function            exact
    ───────────────────────────────  ──────────────────  ───────────────────────────────────────
    its logits, [tokens, vocab]      distill_logits      yes
    its k likeliest, [tokens, k]     distill_top         of those k and of the others as one
    log-prob of the token, [tokens]  distill_token       of the token and of the others as one
    that of a span of tokens         distill_spans       of the span and of all other texts as one
    tokens that the student has not  sorted_distance     no: of probabilities in their order
    the same, for tokens that the    teacher_advantages  an estimate: one sample of the reverse KL
    student sampled

Rows are independent tokens: model.logprobs.over_chunks can run the first three functions in chunks,
as `distill_rows` does for a packed batch. Merging outcomes never raises a divergence, so each is a
lower bound of the one above it.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.scipy.special import logsumexp
from jax.typing import ArrayLike

from jaxrl_async.model.decoder import (
    ON_ONE_DEVICE,
    DecoderSettings,
    TokenRows,
    output_head,
    token_states,
)
from jaxrl_async.model.divergence import (
    MIN_LOGPROB,
    Divergence,
    Kind,
    TokenDivergence,
    divergence_of,
    entropy_of,
    log_softmax_of,
    lumped,
)
from jaxrl_async.model.logprobs import after, at_targets, over_chunks
from jaxrl_async.model.spec import ModelSpec, Params

MIN_REST = 1e-7
"""Minimum mass of a teacher's other tokens: the smallest that float32 resolves in 1 - sum."""


def distill_logits(
    student_logits: Array, teacher_logits: Array, *, kind: Kind, beta: float = 0.5
) -> Array:
    """Return the divergence between two softmaxes, [tokens, vocab] twice -> [tokens] nats.

    forward: KL(teacher || student), Hinton et al. 2015 (arXiv:1503.02531); reverse: KL(student ||
    teacher), MiniLLM (arXiv:2306.08543); js: GKD (arXiv:2306.13649), eq. 1.
    """
    student = jax.nn.log_softmax(student_logits.astype(jnp.float32), axis=-1)
    teacher = jax.nn.log_softmax(teacher_logits.astype(jnp.float32), axis=-1)
    return divergence_of(kind, beta)(student, jax.lax.stop_gradient(teacher))


def distill_top(
    student_logits: Array,
    teacher_ids: Array,
    teacher_logprobs: Array,
    *,
    kind: Kind,
    beta: float = 0.5,
) -> Array:
    """Return the divergence over the teacher's k likeliest tokens and the rest; [tokens] nats.

    student_logits [tokens, vocab]; teacher_ids [tokens, k], distinct; teacher_logprobs [tokens, k],
    of its whole distribution.
    """
    student = jax.nn.log_softmax(student_logits.astype(jnp.float32), axis=-1)
    return divergence_of(kind, beta)(*_outcomes(student, teacher_ids, teacher_logprobs))


def distill_token(
    student_logits: Array,
    token_ids: Array,
    teacher_logprobs: Array,
    *,
    kind: Kind,
    beta: float = 0.5,
) -> Array:
    """Return `distill_top` for one known token: token_ids, teacher_logprobs [tokens]."""
    ids, logprobs = token_ids[:, None], teacher_logprobs[:, None]
    return distill_top(student_logits, ids, logprobs, kind=kind, beta=beta)


def _outcomes(student: Array, ids: Array, teacher_logprobs: Array) -> tuple[Array, Array]:
    """Return both over the same outcomes: the ids and, if other tokens exist, these as one."""
    others = ids.shape[-1] < student.shape[-1]
    both = lumped(student, ids), with_rest(teacher_logprobs)
    return both if others else (both[0][:, :-1], both[1][:, :-1])


def with_rest(logprobs: Array) -> Array:
    """Append the remaining mass, at least MIN_REST: [tokens, k] -> [tokens, k + 1]."""
    logprobs = jax.lax.stop_gradient(logprobs.astype(jnp.float32))
    rest = jnp.log(jnp.maximum(-jnp.expm1(logsumexp(logprobs, axis=-1)), MIN_REST))
    return jnp.concatenate([logprobs, rest[:, None]], axis=-1)


def teacher_advantages(
    student_logprobs: ArrayLike,
    teacher_logprobs: ArrayLike,
    mask: ArrayLike,
    *,
    coefficient: float = 1.0,
) -> Array:
    """Return A_t = -coefficient (log p_S - log p_T) of the sampled token; 0 outside the mask.

    On-policy distillation (Lu and Thinking Machines 2025, "On-Policy Distillation"): a policy
    gradient with these advantages descends the per-token reverse KL. Its one-sample estimate is
    log p_S - log p_T, where p_S is the distribution that the token was sampled from. No gradient
    flows through the result.
    """
    gap = jnp.where(mask, jnp.subtract(student_logprobs, teacher_logprobs), 0.0)
    return jax.lax.stop_gradient(-coefficient * gap)


class TeacherSpans(NamedTuple):
    """Log-probs of spans of tokens by teachers with another tokenizer; each span is in one row."""

    # [B, T, n] int32, index in the row of the last token of the token's span, for each of n
    # teachers; -1: the token is in none
    last: Array
    logprobs: Array  # [B, T, n] float32, of the whole span, at its last token


def distill_spans(logprobs: Array, spans: TeacherSpans, measure: Divergence) -> Array:
    """Return the divergence between student and teachers of each span's text and of all other texts
    together, at the span's last token; [B, T, n] nats, 0 elsewhere.

    logprobs: [B, T] the student's, of the tokens in the rows. The log-prob of a span is the sum of
    its tokens'. This merges outcomes of the span's tokens together: it is a lower bound of the sum
    of their divergences.
    """
    length = logprobs.shape[1]

    def totals(of_row: Array, last: Array) -> Array:
        index = jnp.where(last < 0, length, last)
        return jnp.zeros_like(of_row).at[index].add(of_row, mode="drop")

    of_teachers = jax.vmap(jax.vmap(totals, in_axes=(None, 1), out_axes=1))
    students = of_teachers(logprobs, spans.last)
    is_last = spans.last == jnp.arange(length)[None, :, None]
    student = jnp.stack([students, _log_rest(students)], axis=-1)
    teacher = jnp.where(is_last, jax.lax.stop_gradient(spans.logprobs), 0.0)
    divergence = measure(student, jnp.stack([teacher, _log_rest(teacher)], axis=-1))
    return jnp.where(is_last, divergence, 0.0)


def _log_rest(logprobs: Array) -> Array:
    """Return the log of the remaining mass, at least MIN_REST."""
    return jnp.log(jnp.maximum(-jnp.expm1(logprobs), MIN_REST))


class Unmatched(NamedTuple):
    """How the tokens are compared that only one of two tokenizers has."""

    alone: Array  # [vocab] bool, the student's tokens that the teacher has not
    weight: float  # of their distance next to the divergence


def sorted_distance(
    student: Array, alone: Array, teacher_ids: Array, teacher_logprobs: Array
) -> Array:
    """Return sum_i |p_(i) - q_(i)|, [tokens]: p_(1) >= p_(2) >= ... are the student's probabilities
    of tokens that the teacher has not, and q_(i) the teacher's of likely tokens that the student
    has not.

    Universal Logit Distillation, Boizard et al. 2024 (arXiv:2402.12030), of the tokens that do not
    match, as in GOLD (_compute_hybrid_uld_loss of trl.experimental.gold). GOLD compares all of
    them. Here the sum ends with the teacher's likely ones, which are known: a lower bound.

    student [tokens, vocab] log-probs; alone [vocab]; teacher_ids [tokens, k], -1: the student has
    not this token; teacher_logprobs [tokens, k].
    """
    k = min(teacher_ids.shape[-1], student.shape[-1])
    probs = jnp.exp(jax.lax.stop_gradient(teacher_logprobs.astype(jnp.float32)))
    teacher = jax.lax.top_k(jnp.where(teacher_ids < 0, probs, 0.0), k)[0]
    own = jax.lax.top_k(jnp.where(alone, jnp.exp(student), 0.0), k)[0]
    return jnp.sum(jnp.where(teacher > 0, jnp.abs(own - teacher), 0.0), axis=-1)


class TeacherTop(NamedTuple):
    """A teacher's k likeliest tokens at each position, as model.divergence.top_logprobs returns."""

    ids: Array  # [B, T, k] int32, distinct; -1: the student has not this token
    logprobs: Array  # [B, T, k] float32, of the teacher's whole distribution
    # [B, T, n] float32: the last axis above has the k of each of n teachers, one after another,
    # and the divergence is the sum of theirs with these weights. None: one teacher, of weight 1
    weights: Array | None = None
    spans: TeacherSpans | None = None  # if some teachers have another tokenizer


def distill_rows(
    spec: ModelSpec,
    params: Params,
    tokens: TokenRows,
    teacher: TeacherTop,
    measure: Divergence,
    settings: DecoderSettings = ON_ONE_DEVICE,
    unmatched: Unmatched | None = None,
) -> TokenDivergence:
    """Return `distill_top` of a packed batch, in chunks of tokens, plus `distill_spans`, and plus
    `sorted_distance` if tokens are `unmatched`; [B, T] each, nats.

    Log-probs, entropy and tokens.expert_ids are the student's. Values are 0 where a segment starts
    and in padding.
    """
    layout = settings.layout
    head = output_head(spec, params, layout)
    hidden, changed, load = token_states(spec, params, tokens, settings)

    def compared(student: Array, ids: Array, logprobs: Array) -> Array:
        known = jnp.where(ids < 0, MIN_LOGPROB, logprobs)
        gap = measure(*_outcomes(student, ids, known))
        if unmatched is None:
            return gap
        return gap + unmatched.weight * sorted_distance(student, unmatched.alone, ids, logprobs)

    def one_chunk(
        x: Array, target: Array, ids: Array, logprobs: Array, *weights: Array
    ) -> TokenDivergence:
        student = log_softmax_of(x, head, settings.temperature, spec.scales)
        sampled = jnp.take_along_axis(student, target[:, None], axis=-1)[:, 0]
        if not weights:
            gap = compared(student, ids, logprobs)
        else:
            of_each = weights[0].T  # [teachers, tokens]
            parts = (jnp.split(a, len(of_each), axis=-1) for a in (ids, logprobs))
            each = zip(of_each, *parts, strict=True)
            gap = sum(w * compared(student, i, p) for w, i, p in each)
        return TokenDivergence(sampled, entropy_of(student), gap)

    columns = (a for a in (tokens.token_ids, *teacher[:3]) if a is not None)
    inputs = (after(a, layout) for a in columns)
    measured = over_chunks(one_chunk, (hidden, *inputs), chunk=settings.chunk, layout=layout)
    in_rows = [at_targets(values, tokens.segment_ids, layout) for values in measured[:3]]
    if teacher.spans is not None and teacher.weights is not None:
        of_spans = distill_spans(in_rows[0], teacher.spans, measure)
        in_rows[2] += jnp.sum(teacher.weights * of_spans, axis=-1)
    return TokenDivergence(in_rows[0], in_rows[1], in_rows[2], changed, load)
