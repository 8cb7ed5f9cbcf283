"""Log-probs and entropies in chunks: the formula, its gradient, and that chunks do not show."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from builders import tiny_params, tiny_spec
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.extend.core import jaxprs_in_params

from jaxrl_async.config.schema import AxesSection
from jaxrl_async.mesh import make_mesh
from jaxrl_async.model.decoder import (
    DecoderSettings,
    TokenRows,
    hidden_states,
    output_head,
)
from jaxrl_async.model.layout import Layout
from jaxrl_async.model.logprobs import (
    HeadSettings,
    blocked_logprobs,
    chunked_logprobs,
    token_logprobs,
    unpacked,
    wanted_logprobs,
)

TOKENS, WIDTH, VOCAB = 13, 8, 29
SPEC = tiny_spec(VOCAB, width=16, heads=2, kv_heads=1, mlp=24)
TEMPERATURES = [0.5, 1.0, 1.7]


@pytest.fixture(scope="module")
def inputs() -> tuple[Any, Any, Any]:
    """Hidden states, head, targets; some logits are large."""
    rng = np.random.default_rng(0)
    hidden = rng.normal(size=(TOKENS, WIDTH)) * 4
    head = rng.normal(size=(WIDTH, VOCAB))
    return jnp.float32(hidden), jnp.float32(head), jnp.int32(rng.integers(0, VOCAB, TOKENS))


def exact(
    hidden: Any, head: Any, targets: Any, temperature: float, kept: Any = True
) -> tuple[Any, Any, Any]:
    """Log-prob of each target, entropy, and all probabilities, in float64; kept: [tokens, vocab]
    bool, True for all."""
    logits = np.asarray(hidden, np.float64) @ np.asarray(head, np.float64) / temperature
    highest = logits.max(axis=-1, keepdims=True)
    weights = np.where(kept, np.exp(logits - highest), 0.0)
    logprobs = logits - highest - np.log(weights.sum(axis=-1, keepdims=True))
    probs = np.where(kept, np.exp(logprobs), 0.0)
    return logprobs[np.arange(TOKENS), np.asarray(targets)], -(probs * logprobs).sum(-1), probs


@pytest.mark.full
@pytest.mark.parametrize("temperature", TEMPERATURES)
@pytest.mark.parametrize("chunk", [4, TOKENS, 1024])
def test_logprobs_and_entropy_equal_float64_numpy(inputs, chunk, temperature):
    logprobs, entropy = chunked_logprobs(*inputs, chunk=chunk, temperature=temperature)
    expected = exact(*inputs, temperature)
    assert logprobs.dtype == entropy.dtype == jnp.float32
    np.testing.assert_allclose(logprobs, expected[0], atol=1e-4)
    np.testing.assert_allclose(entropy, expected[1], atol=1e-4)


@pytest.mark.full
@pytest.mark.parametrize("temperature", TEMPERATURES)
def test_the_gradient_is_the_formulas(inputs, temperature):
    """d logprob / d logits = (onehot - p) / temperature; d entropy = -p (log p + entropy) / t."""
    hidden, head, targets = inputs
    weights = np.random.default_rng(1).normal(size=(2, TOKENS))

    def total(hidden: Any, head: Any) -> Any:
        logprobs, entropy = chunked_logprobs(
            hidden, head, targets, chunk=5, temperature=temperature
        )
        return (weights[0] * logprobs + weights[1] * entropy).sum()

    to_hidden, to_head = jax.grad(total, (0, 1))(hidden, head)
    _, entropy, probs = exact(*inputs, temperature)
    onehot = np.eye(VOCAB)[np.asarray(targets)]
    to_logits = weights[0][:, None] * (onehot - probs)
    to_logits -= weights[1][:, None] * probs * (np.log(probs) + entropy[:, None])
    to_logits /= temperature
    np.testing.assert_allclose(to_hidden, to_logits @ np.asarray(head).T, atol=2e-4)
    np.testing.assert_allclose(to_head, np.asarray(hidden).T @ to_logits, atol=2e-4)


@pytest.fixture(scope="module")
def kept(inputs) -> np.ndarray:
    """[tokens, vocab] bool: a few tokens, the target among them; once it alone, once all."""
    mask = np.random.default_rng(3).random((TOKENS, VOCAB)) < 0.2
    mask[0], mask[1] = False, True
    mask[np.arange(TOKENS), np.asarray(inputs[2])] = True
    return mask


def bits_of(mask: np.ndarray) -> np.ndarray:
    return np.packbits(mask, axis=-1, bitorder="little")


def test_bits_are_unpacked_as_numpy_packs_them(kept):
    np.testing.assert_array_equal(unpacked(jnp.asarray(bits_of(kept)), VOCAB), kept)


@pytest.mark.full
@pytest.mark.parametrize(("chunk", "temperature"), [(4, 0.7), (TOKENS, 1.0), (1024, 1.7)])
def test_masked_logprobs_are_those_of_the_kept_tokens(inputs, kept, chunk, temperature):
    hidden, head, targets = inputs
    logprobs, entropy = chunked_logprobs(
        hidden, head, targets, chunk=chunk, temperature=temperature, kept=bits_of(kept)
    )
    expected = exact(*inputs, temperature, kept)
    np.testing.assert_allclose(logprobs, expected[0], atol=1e-4)
    np.testing.assert_allclose(entropy, expected[1], atol=1e-4)
    assert logprobs[0] == entropy[0] == 0, "only one token was possible"
    whole, _ = chunked_logprobs(hidden, head, targets, chunk=chunk, temperature=temperature)
    assert float(logprobs[1]) == pytest.approx(float(whole[1]), abs=4e-6), "all bits are no mask"
    assert (logprobs >= whole - 1e-6).all() and (logprobs - whole).max() > 0.1


@pytest.mark.full
def test_the_masked_gradient_is_the_float64_differences_and_finite_even_for_large_logits(
    inputs, kept
):
    """d/dx by central differences of the formula in float64; nothing flows into refused tokens."""
    hidden, head, targets = inputs
    weights = np.random.default_rng(1).normal(size=(2, TOKENS))

    def total(hidden: Any, head: Any) -> Any:
        logprobs, entropy = chunked_logprobs(
            hidden, head, targets, chunk=5, temperature=0.7, kept=bits_of(kept)
        )
        return (weights[0] * logprobs + weights[1] * entropy).sum()

    def formula(hidden: np.ndarray, head: np.ndarray) -> float:
        logprobs, entropy, _ = exact(hidden, head, targets, 0.7, kept)
        return float((weights[0] * logprobs + weights[1] * entropy).sum())

    grads = jax.jit(jax.grad(total, (0, 1)))
    exactly = [np.asarray(x, np.float64) for x in (hidden, head)]
    for argument, gradient in enumerate(grads(hidden, head)):
        for index in np.ndindex(*gradient.shape):
            ends = []
            for step in (1e-5, -1e-5):
                moved = [x.copy() for x in exactly]
                moved[argument][index] += step
                ends.append(formula(*moved))
            wanted = (ends[0] - ends[1]) / 2e-5
            assert gradient[index] == pytest.approx(wanted, abs=1e-3, rel=1e-3)
    for gradient in grads(hidden * 1e4, head):
        assert np.isfinite(gradient).all()
    never = ~kept[2:].any(axis=0)
    _, to_head = jax.grad(
        lambda h, w: chunked_logprobs(
            h[2:], w, targets[2:], chunk=5, kept=bits_of(kept[2:])
        )[0].sum(), (0, 1)
    )(hidden, head)  # fmt: skip
    assert never.any() and (np.asarray(to_head)[:, never] == 0).all()


@pytest.mark.full
@settings(max_examples=10, deadline=None)
@given(st.integers(1, TOKENS + 3))
def test_the_chunk_does_not_show(chunk):
    rng = np.random.default_rng(2)
    hidden = jnp.float32(rng.normal(size=(TOKENS, WIDTH)))
    head = jnp.float32(rng.normal(size=(WIDTH, VOCAB)))
    targets = jnp.int32(rng.integers(0, VOCAB, TOKENS))
    bits = bits_of(rng.random((TOKENS, VOCAB)) < 0.5)
    bits[np.arange(TOKENS), targets >> 3] |= (1 << (targets & 7)).astype(np.uint8)
    whole = chunked_logprobs(hidden, head, targets, chunk=TOKENS, kept=bits)
    parts = chunked_logprobs(hidden, head, targets, chunk=chunk, kept=bits)
    for a, b in zip(parts, whole, strict=True):
        assert a.shape == (TOKENS,)
        np.testing.assert_allclose(a, b, atol=1e-6)


def test_all_logits_never_exist_at_once():
    """Neither pass holds [tokens, vocab]: no array of the program is larger than a chunk's."""
    tokens, chunk, vocab = 64, 8, 512
    hidden, head = jnp.ones((tokens, WIDTH)), jnp.ones((WIDTH, vocab))
    targets = jnp.zeros(tokens, jnp.int32)

    def total(hidden: Any, kept: Any) -> Any:
        return chunked_logprobs(hidden, head, targets, chunk=chunk, kept=kept)[0].sum()

    for kept in (None, jnp.full((tokens, vocab // 8), 255, jnp.uint8)):
        assert largest(jax.make_jaxpr(jax.grad(total))(hidden, kept).jaxpr) <= chunk * vocab


def largest(jaxpr: Any) -> int:
    """Elements of the largest array that the program computes, inner programs included."""
    sizes = [0]
    for equation in jaxpr.eqns:
        inner = list(jaxprs_in_params(equation.params))
        sizes += [largest(x) for x in inner]
        if not inner:
            sizes += [int(np.prod(v.aval.shape)) for v in equation.outvars]
    return max(sizes)


def test_bfloat16_hidden_states_give_float32_logprobs(inputs):
    hidden, head, targets = inputs
    rounded = hidden.astype(jnp.bfloat16)
    logprobs, _ = chunked_logprobs(rounded, head, targets, chunk=4)
    assert logprobs.dtype == jnp.float32
    expected, _, _ = exact(rounded, head.astype(jnp.bfloat16).astype(jnp.float32), targets, 1.0)
    np.testing.assert_allclose(logprobs, expected, atol=1e-3)


@pytest.mark.full
def test_a_token_gets_its_logprob_from_the_position_before_it():
    params = tiny_params(SPEC)
    segments = np.array([[1, 1, 1, 2, 2, 0, 0], [1, 2, 2, 2, 2, 2, 0]], np.int32)
    positions = np.array([[0, 1, 2, 0, 1, 0, 0], [0, 0, 1, 2, 3, 4, 0]], np.int32)
    ids = np.random.default_rng(0).integers(0, VOCAB, segments.shape).astype(np.int32)
    tokens, settings = TokenRows(ids, positions, segments), DecoderSettings(temperature=0.7)
    logprobs, entropy, *_ = token_logprobs(SPEC, params, tokens, settings)
    hidden = hidden_states(SPEC, params, ids, positions, segments)
    logits = np.asarray(hidden @ output_head(SPEC, params), np.float64) / 0.7
    dist = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    for b, t in np.ndindex(*segments.shape):
        follows = t > 0 and segments[b, t] > 0 and segments[b, t] == segments[b, t - 1]
        before = dist[b, t - 1]
        expected = before[ids[b, t]] if follows else 0.0
        spread = -(np.exp(before) * before).sum() if follows else 0.0
        assert logprobs[b, t] == pytest.approx(expected, abs=1e-5)
        assert entropy[b, t] == pytest.approx(spread, abs=1e-5)


@pytest.mark.full
@pytest.mark.parametrize("trained", ["head", "frozen head", "frozen head, entropy"])
@pytest.mark.parametrize("share", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("masked", [False, True])
def test_what_is_not_wanted_costs_nothing_and_changes_nothing(trained, share, masked):
    rng = np.random.default_rng(0)
    n, width, vocab = 23, 8, 19
    x, head = (rng.normal(size=s).astype(np.float32) for s in ((n, width), (width, vocab)))
    targets = rng.integers(0, vocab, n).astype(np.int32)
    wanted = rng.random(n) < share
    x[~wanted] = np.nan  # so that it would be seen
    bits = np.packbits(
        (rng.random((n, vocab)) < 0.7) | (np.arange(vocab) == targets[:, None]), -1, "little"
    )
    kept = bits if masked else None
    how = HeadSettings(chunk=5, temperature=0.7)
    takes_entropy = trained != "frozen head"
    scale = rng.normal(size=(2, n)).astype(np.float32)

    def loss(function):
        def total(x, head):
            logprobs, entropy = function(x, head)
            whole = jnp.sum(jnp.where(wanted, scale[0] * logprobs, 0))
            if takes_entropy:
                whole += jnp.sum(jnp.where(wanted, scale[1] * entropy, 0))
            return whole, (logprobs, entropy)

        return jax.value_and_grad(total, (0, 1) if trained == "head" else 0, has_aux=True)

    def only_wanted(x, head):
        return wanted_logprobs(x, head, targets, wanted, how, kept)

    def all_of_them(x, head):
        clean = jnp.where(wanted[:, None], x, 0.0)
        return chunked_logprobs(clean, head, targets, chunk=5, temperature=0.7, kept=kept)

    (_, got), grads = jax.jit(loss(only_wanted))(x, head)
    (_, expected), others = jax.jit(loss(all_of_them))(x, head)
    for a, b in zip(got, expected, strict=True):
        np.testing.assert_allclose(a, np.where(wanted, b, 0.0), atol=1e-5)
    for a, b in zip(jax.tree.leaves(grads), jax.tree.leaves(others), strict=True):
        np.testing.assert_allclose(a, b, atol=2e-5)
    plain = only_wanted(x, head)
    np.testing.assert_allclose(plain[0], got[0], atol=1e-6)


@pytest.mark.full
@pytest.mark.parametrize("axes", [{"fsdp": 4}, {"fsdp": 2, "tensor": 4}, {"data": 2, "fsdp": 2}])
def test_a_head_shared_over_fsdp_gives_the_same_by_parts_of_the_vocabulary(axes):
    """Log-probs, entropies, and the gradients of both with respect to hidden states and head."""
    rng = np.random.default_rng(0)
    x, head = rng.normal(size=(64, 16)), rng.normal(size=(16, 48))
    x, head = x.astype(np.float32), head.astype(np.float32)
    targets = rng.integers(0, 48, 64).astype(np.int32)
    sizes = AxesSection(**axes)
    layout = Layout(make_mesh(sizes, jax.devices()[: sizes.num_devices]))

    def all_of(function):
        def total(x, head):
            logprobs, entropy = function(x, head, targets, temperature=0.7)
            return jnp.mean(logprobs * jnp.arange(64.0)) + jnp.mean(entropy**2), (logprobs, entropy)

        return jax.jit(jax.value_and_grad(total, (0, 1), has_aux=True))(x, head)

    def divided(x, head, *rest, **more):
        x, head = layout.place(x, "tokens", None), layout.place(head, "embed", "vocab")
        return blocked_logprobs(x, head, *rest, blocks=3, layout=layout, **more)

    got, expected = all_of(divided), all_of(partial(chunked_logprobs, chunk=8))
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-5)
