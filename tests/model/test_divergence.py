"""Two policies compared in chunks, against the whole vocabulary at once."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from builders import tiny_params, tiny_spec

from jaxrl_async.model.decoder import (
    DecoderSettings,
    TokenRows,
    hidden_states,
    output_head,
)
from jaxrl_async.model.divergence import (
    FrozenPolicy,
    chunked_over_vocab,
    divergence_of,
    reverse_kl,
    top_logprobs,
)
from jaxrl_async.model.logprobs import over_chunks, token_logprobs

pytestmark = pytest.mark.full

VOCAB = 19
SPEC, WIDE = (
    tiny_spec(VOCAB, width=w, heads=2, kv_heads=1, mlp=16, tied=t)
    for w, t in ((16, True), (24, False))
)
PARAMS, OTHER = tiny_params(SPEC), tiny_params(WIDE, 1)
TOKENS = jnp.asarray(np.random.default_rng(0).integers(0, VOCAB, (2, 10)), jnp.int32)
SEGMENTS = jnp.array([[1] * 4 + [2] * 6, [1] * 7 + [0] * 3])
POSITIONS = jnp.array([[*range(4), *range(6)], [*range(7), 0, 0, 0]])
BATCH = TokenRows(TOKENS, POSITIONS, SEGMENTS)
FOLLOWS = np.asarray((POSITIONS > 0) & (SEGMENTS > 0))


def all_logprobs(spec, params, temperature=1.0):
    """[rows, length, vocab] float64, of each token's distribution; row-first tokens are wrong."""
    hidden = hidden_states(spec, params, TOKENS, POSITIONS, SEGMENTS)
    logits = np.asarray(hidden @ output_head(spec, params), np.float64) / temperature
    logprobs = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    return np.roll(logprobs, 1, axis=1)


@pytest.mark.parametrize("chunk", [1, 7, 1000])
@pytest.mark.parametrize("kind", ["forward", "reverse", "js"])
def test_chunks_give_the_divergence_of_whole_distributions(kind, chunk):
    settings = DecoderSettings(chunk=chunk, temperature=0.8)
    measure = divergence_of(kind, 0.3)
    got = chunked_over_vocab(SPEC, PARAMS, BATCH, FrozenPolicy(WIDE, OTHER), measure, settings)
    student, teacher = (all_logprobs(*m, 0.8) for m in ((SPEC, PARAMS), (WIDE, OTHER)))
    p, q = np.exp(teacher), np.exp(student)
    middle = np.log(0.3 * p + 0.7 * q)
    wanted = {
        "forward": (p * (teacher - student)).sum(-1),
        "reverse": (q * (student - teacher)).sum(-1),
        "js": (0.3 * p * (teacher - middle) + 0.7 * q * (student - middle)).sum(-1),
    }[kind]
    np.testing.assert_allclose(got.divergence, np.where(FOLLOWS, wanted, 0), atol=2e-5)
    logprobs, entropy, *_ = token_logprobs(SPEC, PARAMS, BATCH, settings)
    np.testing.assert_allclose(got.logprobs, logprobs, atol=1e-6)
    np.testing.assert_allclose(got.entropy, entropy, atol=1e-5)


def test_the_gradient_does_not_depend_on_the_chunk_and_leaves_the_other_alone():
    def total(params, other, chunk):
        policy, settings = FrozenPolicy(WIDE, other), DecoderSettings(chunk=chunk)
        got = chunked_over_vocab(SPEC, params, BATCH, policy, divergence_of("js"), settings)
        return got.divergence.sum() + got.logprobs.sum() + got.entropy.sum()

    small, large = (jax.grad(total, argnums=(0, 1))(PARAMS, OTHER, c) for c in (4, 1000))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-4), small[0], large[0])
    assert any(np.asarray(g).any() for g in jax.tree.leaves(small[0]))
    assert not any(np.asarray(g).any() for g in jax.tree.leaves(small[1]))


def test_the_whole_vocabulary_exists_for_one_chunk_only():
    def total(params):
        other, settings = FrozenPolicy(WIDE, OTHER), DecoderSettings(chunk=3)
        got = chunked_over_vocab(SPEC, params, BATCH, other, reverse_kl, settings)
        return got.divergence.sum()

    text = str(jax.make_jaxpr(jax.grad(total))(PARAMS))
    assert f"f32[3,{VOCAB}]" in text and f"f32[18,{VOCAB}]" not in text
    assert f"f32[6,3,{VOCAB}]" not in text


def test_a_policy_is_no_distance_from_itself():
    for kind in ("forward", "reverse", "js"):
        other = FrozenPolicy(SPEC, PARAMS)
        got = chunked_over_vocab(SPEC, PARAMS, BATCH, other, divergence_of(kind))
        np.testing.assert_allclose(got.divergence, 0, atol=1e-6)


@pytest.mark.parametrize("chunk", [4, 1000])
def test_the_likeliest_tokens_come_sorted_with_their_logprobs(chunk):
    ids, logprobs = top_logprobs(SPEC, PARAMS, BATCH, DecoderSettings(chunk=chunk), k=5)
    assert ids.shape == logprobs.shape == (2, 10, 5) and ids.dtype == jnp.int32
    wanted = np.sort(all_logprobs(SPEC, PARAMS), axis=-1)[..., ::-1][..., :5]
    np.testing.assert_allclose(logprobs, np.where(FOLLOWS[..., None], wanted, 0), atol=1e-5)
    found = np.take_along_axis(all_logprobs(SPEC, PARAMS), np.asarray(ids), -1)
    np.testing.assert_allclose(found[FOLLOWS], np.asarray(logprobs)[FOLLOWS], atol=1e-5)


def test_chunks_do_not_change_what_a_function_returns_for_a_token():
    x = jnp.arange(14.0).reshape(7, 2)
    for chunk in (1, 2, 7, 9):
        got = over_chunks(lambda a, b: (a.sum(-1), b * 2), (x, x[:, 0]), chunk=chunk)
        np.testing.assert_array_equal(got[0], x.sum(-1))
        np.testing.assert_array_equal(got[1], x[:, 0] * 2)
