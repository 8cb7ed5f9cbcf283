"""Routing to experts: the choice, the weights, and the sampler's choice replayed."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_async.model.moe import route

TOKENS, WIDTH, EXPERTS, CHOSEN, VOCAB, LAYERS = 512, 16, 32, 4, 31, 2


def test_the_likeliest_experts_share_the_weight_by_their_probabilities():
    logits = np.random.default_rng(0).normal(size=(3, 5, EXPERTS)).astype(np.float32)
    ids, weights = route(jnp.asarray(logits), CHOSEN)
    assert ids.shape == weights.shape == (3, 5, CHOSEN)
    assert ids.dtype == jnp.int32 and weights.dtype == jnp.float32
    np.testing.assert_array_equal(ids, np.argsort(-logits, axis=-1)[..., :CHOSEN])
    probs = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
    chosen = np.take_along_axis(probs, np.asarray(ids), -1)
    np.testing.assert_allclose(weights, chosen / chosen.sum(-1, keepdims=True), rtol=1e-5)


def test_forced_experts_replace_the_choice_and_not_the_weights():
    logits = jnp.array([[3.0, 1.0, 2.0, 0.0]] * 3)
    forced = jnp.array([[3, 1], [-1, 1], [2, 0]])
    ids, weights = route(logits, 2, forced)
    assert ids.tolist() == [[3, 1], [0, 2], [2, 0]], "with a -1 the token chooses for itself"
    e = np.exp(1.0)
    np.testing.assert_allclose(weights[0], [1 / (1 + e), e / (1 + e)], rtol=1e-6)
    np.testing.assert_allclose(weights[2], [1 / (1 + e), e / (1 + e)], rtol=1e-6)


def test_the_gradient_flows_through_the_weights_of_forced_experts_alone():
    logits = np.random.default_rng(1).normal(size=(4, EXPERTS))
    forced = np.array([[7, 0, 30, 2], [1, 2, 31, 9], [3, 6, 5, 4], [5, 4, 11, 10]])
    pull = np.random.default_rng(2).normal(size=forced.shape)

    def total(logits: Any) -> Any:
        return (pull * route(logits, CHOSEN, jnp.asarray(forced))[1]).sum()

    got = np.asarray(jax.grad(total)(jnp.float32(logits)))
    chosen = np.exp(np.take_along_axis(logits, forced, -1))
    g = chosen / chosen.sum(-1, keepdims=True)
    wanted = np.zeros_like(logits)
    np.put_along_axis(wanted, forced, g * (pull - (g * pull).sum(-1, keepdims=True)), -1)
    np.testing.assert_allclose(got, wanted, atol=1e-6)
    assert np.count_nonzero(got) == forced.size


@pytest.fixture(scope="module")
def weights() -> dict[str, Any]:
    rng = np.random.default_rng(4)
    return {
        "router": jnp.float32(rng.normal(size=(LAYERS, WIDTH, EXPERTS))),
        "experts": jnp.float32(rng.normal(size=(LAYERS, EXPERTS, WIDTH, WIDTH)) / WIDTH**0.5),
        "head": jnp.float32(rng.normal(size=(WIDTH, VOCAB))),
        "x": jnp.float32(rng.normal(size=(TOKENS, WIDTH))),
    }


def logprobs_of(weights: Any, forced: Any = None, *, as_sampler: bool = False) -> tuple[Any, Any]:
    """Two layers of experts and a head: log-probs [tokens, vocab], experts [tokens, layers, k].

    as_sampler: its router sums in another order and chooses by logits rounded to bfloat16.
    """
    x, chosen = weights["x"], []
    for layer in range(LAYERS):
        router = weights["router"][layer]
        logits = x[:, ::-1] @ router[::-1] if as_sampler else x @ router
        wanted = None if forced is None else forced[:, layer]
        if as_sampler:
            wanted, _ = route(logits.astype(jnp.bfloat16), CHOSEN)
        ids, share = route(logits, CHOSEN, wanted)
        outputs = jnp.einsum("td,tkdf->tkf", x, weights["experts"][layer][ids])
        x = x + jnp.tanh(jnp.einsum("tk,tkf->tf", share, outputs))
        chosen.append(ids)
    return jax.nn.log_softmax(x @ weights["head"]), jnp.stack(chosen, axis=1)


def test_replayed_experts_give_ratio_one_where_numerics_turn_the_choice(weights):
    behavior, drawn_by = logprobs_of(weights, as_sampler=True)
    tokens = jnp.argmax(behavior + jax.random.gumbel(jax.random.key(0), behavior.shape), axis=-1)
    own, own_ids = logprobs_of(weights)
    replayed, replayed_ids = logprobs_of(weights, drawn_by)
    flipped = np.asarray(jnp.sort(own_ids) != jnp.sort(drawn_by)).any(axis=(1, 2))
    assert 0 < flipped.sum() < TOKENS / 2, "numerics turn some choices, not most"
    np.testing.assert_array_equal(replayed_ids, drawn_by)

    def ratio(logprobs: Any) -> np.ndarray:
        places = np.arange(TOKENS), np.asarray(tokens)
        return np.exp(np.asarray(logprobs)[places] - np.asarray(behavior)[places])

    np.testing.assert_allclose(ratio(replayed), 1, atol=1e-5)
    assert np.abs(ratio(own) - 1)[flipped].max() > 0.05
    np.testing.assert_allclose(ratio(own)[~flipped], 1, atol=1e-5)
