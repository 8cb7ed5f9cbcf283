"""Distillation losses against NumPy float64, and as bounds of one another."""

from itertools import pairwise

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxrl_async.config import schema
from jaxrl_async.model.decoder import DecoderSettings, TokenRows, init_params
from jaxrl_async.model.divergence import (
    FrozenPolicy,
    chunked_over_vocab,
    divergence_of,
    jensen_shannon,
    top_logprobs,
)
from jaxrl_async.model.spec import ModelSpec
from jaxrl_async.trainer.distill import (
    TeacherTop,
    distill_logits,
    distill_rows,
    distill_token,
    distill_top,
    sorted_distance,
    teacher_advantages,
)

pytestmark = pytest.mark.full

TOKENS, VOCAB = 5, 11
RNG = np.random.default_rng(0)
STUDENT, TEACHER = RNG.normal(size=(2, TOKENS, VOCAB)) * 2
KINDS = ("forward", "reverse", "js")


def softmax(x):
    return np.exp(x) / np.exp(x).sum(-1, keepdims=True)


def kl(p, q):
    return (p * np.log(p / q)).sum(-1)


def divergence(kind, p, q, beta=0.5):
    """GKD (arXiv:2306.13649): p the teacher's probabilities, q the student's."""
    if kind == "forward":
        return kl(p, q)
    if kind == "reverse":
        return kl(q, p)
    mixture = beta * p + (1 - beta) * q
    return beta * kl(p, mixture) + (1 - beta) * kl(q, mixture)


def lump(p, ids):
    chosen = np.take_along_axis(p, ids, -1)
    return np.concatenate([chosen, 1 - chosen.sum(-1, keepdims=True)], -1)


def top_of_teacher(k):
    p = softmax(TEACHER)
    ids = np.argsort(-p, -1)[:, :k]
    return ids, np.log(np.take_along_axis(p, ids, -1)).astype(np.float32)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("beta", [0.1, 0.5, 0.9])
def test_full_logits_give_the_papers_divergence(kind, beta):
    got = distill_logits(jnp.asarray(STUDENT), jnp.asarray(TEACHER), kind=kind, beta=beta)
    wanted = divergence(kind, softmax(TEACHER), softmax(STUDENT), beta)
    np.testing.assert_allclose(got, wanted, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("k", [1, 4])
def test_the_likeliest_tokens_and_the_rest_are_k_plus_one_outcomes(kind, k):
    ids, logprobs = top_of_teacher(k)
    got = distill_top(jnp.asarray(STUDENT), jnp.asarray(ids), logprobs, kind=kind, beta=0.3)
    wanted = divergence(kind, lump(softmax(TEACHER), ids), lump(softmax(STUDENT), ids), 0.3)
    np.testing.assert_allclose(got, wanted, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("kind", KINDS)
def test_one_known_token_is_the_case_of_k_one(kind):
    ids, logprobs = top_of_teacher(1)
    top = distill_top(jnp.asarray(STUDENT), jnp.asarray(ids), logprobs, kind=kind)
    token = distill_token(jnp.asarray(STUDENT), jnp.asarray(ids[:, 0]), logprobs[:, 0], kind=kind)
    np.testing.assert_array_equal(top, token)


ALONE = np.arange(VOCAB) % 6 == 0


def order_distance(logits, alone, ids, logprobs):
    """Universal Logit Distillation (arXiv:2402.12030) of the tokens that one side has not."""
    found = []
    for p, of_token, probs in zip(softmax(logits), ids, np.exp(logprobs), strict=True):
        teacher = sorted(probs[of_token < 0], reverse=True)
        student = [*sorted(p[alone], reverse=True), *[0.0] * len(teacher)]
        found.append(sum(abs(a - b) for a, b in zip(student, teacher, strict=False)))
    return np.array(found)


def with_unmatched(k, seed=0):
    """The teacher's likely tokens; some of them the student has not."""
    ids, logprobs = top_of_teacher(k)
    lacks = np.random.default_rng(seed).random(ids.shape) < 0.5
    lacks[0] = False
    return np.where(lacks, -1, ids), logprobs


@pytest.mark.parametrize("k", [1, 6])
def test_tokens_without_a_counterpart_are_compared_by_their_order(k):
    ids, logprobs = with_unmatched(k)
    student = jax.nn.log_softmax(jnp.asarray(STUDENT, jnp.float32))
    got = sorted_distance(student, jnp.asarray(ALONE), jnp.asarray(ids), jnp.asarray(logprobs))
    wanted = order_distance(STUDENT, ALONE, ids, logprobs.astype(np.float64))
    np.testing.assert_allclose(got, wanted, rtol=1e-5, atol=1e-7)
    assert got[0] == 0.0, "the student has all of them"
    assert k == 1 or (ids < 0).sum(-1).max() > ALONE.sum(), "the teacher has more of them"


def test_the_slope_of_the_order_is_the_students_alone():
    ids, logprobs = with_unmatched(6)

    def total(logits, likely):
        student = jax.nn.log_softmax(logits)
        return sorted_distance(student, jnp.asarray(ALONE), jnp.asarray(ids), likely).sum()

    of_student, of_teacher = jax.grad(total, argnums=(0, 1))(
        jnp.asarray(STUDENT, jnp.float32), jnp.asarray(logprobs)
    )
    assert not np.asarray(of_teacher).any()
    numeric = np.zeros(STUDENT.shape)
    for index in np.ndindex(*STUDENT.shape):
        ends = []
        for step in (1e-6, -1e-6):
            moved = STUDENT.copy()
            moved[index] += step
            ends.append(order_distance(moved, ALONE, ids, logprobs.astype(np.float64)).sum())
        numeric[index] = (ends[0] - ends[1]) / 2e-6
    np.testing.assert_allclose(of_student, numeric, atol=1e-5)
    assert np.abs(numeric).max() > 1e-2


@pytest.mark.parametrize("kind", KINDS)
def test_all_tokens_known_is_the_whole_divergence(kind):
    ids, logprobs = top_of_teacher(VOCAB)
    got = distill_top(jnp.asarray(STUDENT), jnp.asarray(ids), logprobs, kind=kind)
    whole = distill_logits(jnp.asarray(STUDENT), jnp.asarray(TEACHER), kind=kind)
    np.testing.assert_allclose(got, whole, atol=2e-5)
    grads = jax.grad(lambda s: distill_top(s, jnp.asarray(ids), logprobs, kind=kind).sum())(
        jnp.asarray(STUDENT, jnp.float32)
    )
    assert np.isfinite(grads).all()


@pytest.mark.parametrize("kind", KINDS)
@given(seed=st.integers(0, 10_000), scale=st.floats(0.1, 2))
@settings(max_examples=20, deadline=None)
def test_knowing_less_never_raises_a_divergence(kind, seed, scale):
    """Where the rest has a mass that float32 can tell from 0."""
    rng = np.random.default_rng(seed)
    student, teacher = jnp.asarray(rng.normal(size=(2, TOKENS, VOCAB)) * scale, jnp.float32)
    logprobs, ids = jax.lax.top_k(jax.nn.log_softmax(teacher), 6)
    losses = [
        distill_token(student, ids[:, 0], logprobs[:, 0], kind=kind),
        distill_top(student, ids[:, :3], logprobs[:, :3], kind=kind),
        distill_top(student, ids, logprobs, kind=kind),
        distill_logits(student, teacher, kind=kind),
    ]
    for less, more in pairwise(losses):
        assert (less >= -1e-5).all() and (less <= more + 1e-4 * (1 + more)).all()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("k", [None, 3])
def test_the_gradient_is_that_of_finite_differences(kind, k):
    ids, logprobs = top_of_teacher(k or 1)

    def distance(student):
        if k is None:
            return distill_logits(student, jnp.asarray(TEACHER), kind=kind).sum()
        return distill_top(student, jnp.asarray(ids), logprobs, kind=kind).sum()

    def wanted(student):
        p, q = softmax(TEACHER), softmax(student)
        return divergence(kind, *((p, q) if k is None else (lump(p, ids), lump(q, ids)))).sum()

    got, step = jax.grad(distance)(jnp.asarray(STUDENT, jnp.float32)), 1e-5
    numeric = np.zeros_like(STUDENT)
    for at in np.ndindex(STUDENT.shape):
        moved = STUDENT.copy(), STUDENT.copy()
        moved[0][at] += step
        moved[1][at] -= step
        numeric[at] = (wanted(moved[0]) - wanted(moved[1])) / (2 * step)
    np.testing.assert_allclose(got, numeric, atol=1e-4)


def test_the_same_policy_is_no_distance_and_at_the_ends_js_is_a_kl():
    student, teacher = (jax.nn.log_softmax(jnp.asarray(x)) for x in (STUDENT, TEACHER))
    for kind in KINDS:
        same = distill_logits(student, student, kind=kind)
        np.testing.assert_allclose(same, 0, atol=1e-6)
    small = 1e-3
    forward = jensen_shannon(student, teacher, beta=small) / small
    reverse = jensen_shannon(student, teacher, beta=1 - small) / small
    p, q = softmax(TEACHER), softmax(STUDENT)
    np.testing.assert_allclose(forward, kl(p, q), rtol=0.05)
    np.testing.assert_allclose(reverse, kl(q, p), rtol=0.05)


@pytest.mark.parametrize("kind", KINDS)
def test_impossible_tokens_stay_finite(kind):
    teacher = jnp.asarray(TEACHER, jnp.float32).at[:, :9].set(-jnp.inf)
    value, grads = jax.value_and_grad(lambda s: distill_logits(s, teacher, kind=kind).sum())(
        jnp.asarray(STUDENT, jnp.float32)
    )
    assert np.isfinite(value) and np.isfinite(grads).all()


def test_the_advantage_is_minus_the_log_ratio_and_carries_no_gradient():
    student, teacher = jnp.array([-1.0, -2.0, jnp.nan]), jnp.array([-3.0, -1.5, 0.0])
    mask = jnp.array([True, True, False])
    got = teacher_advantages(student, teacher, mask, coefficient=2.0)
    np.testing.assert_allclose(got, [-4, 1, 0])
    grads = jax.grad(lambda s: teacher_advantages(s, teacher, mask).sum())(student)
    np.testing.assert_array_equal(grads, 0)


def test_the_advantages_gradient_is_that_of_the_reverse_kl():
    """E over the student's own draws of -A d log p = d KL(student || teacher)."""
    p_teacher = jnp.asarray(softmax(TEACHER))

    def score_function(student):
        logprobs = jax.nn.log_softmax(student)
        chance = jax.lax.stop_gradient(jnp.exp(logprobs))
        advantages = teacher_advantages(logprobs, jnp.log(p_teacher), jnp.ones_like(logprobs, bool))
        return -jnp.sum(chance * advantages * logprobs)

    def exact(student):
        return distill_logits(student, jnp.asarray(TEACHER), kind="reverse").sum()

    student = jnp.asarray(STUDENT, jnp.float32)
    np.testing.assert_allclose(
        jax.grad(score_function)(student), jax.grad(exact)(student), atol=1e-5
    )


@pytest.mark.parametrize("kind", KINDS)
def test_rows_against_a_teachers_likeliest_tokens_equal_the_whole_at_full_k(kind):
    spec = ModelSpec.from_architecture(
        schema.ArchitectureSection(layers=1, width=16, heads=2, kv_heads=1, head_dim=8, mlp=16),
        VOCAB,
    )
    params, teacher = (init_params(spec, jax.random.key(i)) for i in (0, 1))
    token_ids = jnp.asarray(RNG.integers(0, VOCAB, (2, 9)), jnp.int32)
    segment_ids = jnp.array([[1] * 4 + [2] * 5, [1] * 6 + [0] * 3])
    positions = jnp.array([[*range(4), *range(5)], [*range(6), 0, 0, 0]])
    batch, measure = TokenRows(token_ids, positions, segment_ids), divergence_of(kind)
    top = TeacherTop(*top_logprobs(spec, teacher, batch, DecoderSettings(chunk=4), k=VOCAB))
    got = distill_rows(spec, params, batch, top, measure, DecoderSettings(chunk=3)).divergence
    other, settings = FrozenPolicy(spec, teacher), DecoderSettings(chunk=5)
    whole = chunked_over_vocab(spec, params, batch, other, measure, settings).divergence
    np.testing.assert_allclose(got, whole, atol=3e-5)
    starts = np.asarray((positions == 0) | (segment_ids == 0))
    assert not np.asarray(got)[starts].any() and (np.asarray(whole)[~starts] > 0).all()


def test_a_teacher_gets_no_gradient():
    student, teacher = jnp.asarray(np.random.default_rng(0).normal(size=(2, 3, 5)), jnp.float32)
    for kind in ("forward", "reverse", "js"):
        pull = jax.grad(lambda t, k=kind: distill_logits(student, t, kind=k).sum())(teacher)
        assert not np.any(pull)
