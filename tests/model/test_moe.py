"""Routing to experts: the choice, the weights, and the sampler's choice replayed."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from builders import tiny_params, tiny_spec

from jaxrl_async.model.decoder import DecoderSettings, TokenRows
from jaxrl_async.model.families.parts import ExpertRouter
from jaxrl_async.model.logprobs import token_logprobs
from jaxrl_async.model.moe import counting, id_dtype, route

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


@pytest.mark.full
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


@pytest.mark.full
def test_replayed_experts_give_ratio_one_where_numerics_turn_the_choice(weights):
    behavior, sampled_ids = logprobs_of(weights, as_sampler=True)
    tokens = jnp.argmax(behavior + jax.random.gumbel(jax.random.key(0), behavior.shape), axis=-1)
    own, own_ids = logprobs_of(weights)
    replayed, replayed_ids = logprobs_of(weights, sampled_ids)
    flipped = np.asarray(jnp.sort(own_ids) != jnp.sort(sampled_ids)).any(axis=(1, 2))
    assert 0 < flipped.sum() < TOKENS / 2, "numerics turn some choices, not most"
    np.testing.assert_array_equal(replayed_ids, sampled_ids)

    def ratio(logprobs: Any) -> np.ndarray:
        cells = np.arange(TOKENS), np.asarray(tokens)
        return np.exp(np.asarray(logprobs)[cells] - np.asarray(behavior)[cells])

    np.testing.assert_allclose(ratio(replayed), 1, atol=1e-5)
    assert np.abs(ratio(own) - 1)[flipped].max() > 0.05
    np.testing.assert_allclose(ratio(own)[~flipped], 1, atol=1e-5)


# ---- a whole decoder

SPEC = tiny_spec(
    VOCAB, family="qwen3_moe", experts=4, experts_per_token=2, layers=2, width=16, mlp=8
)
LENGTH = 24
IDS = np.random.default_rng(5).integers(0, VOCAB, (2, LENGTH)).astype(np.int32)
PULL = np.random.default_rng(6).normal(size=(2, LENGTH)).astype(np.float32)


@pytest.fixture(scope="module")
def params() -> Any:
    return tiny_params(SPEC)


def random_experts(seed: int) -> np.ndarray:
    """[2, LENGTH, layers, 2] int8, two different ones of each token and layer."""
    noise = np.random.default_rng(seed).normal(size=(2, LENGTH, 2, 4))
    return np.argsort(noise, axis=-1)[..., :2].astype(np.int8)


def by_one_hot(params: Any, experts: Any, pull: Any) -> tuple[Any, Any]:
    """sum(pull * log-probs) where every expert computes every token, and a one-hot of the given
    ones says which count; and the experts that the router would choose. Written anew from the
    definition of the model: one sequence at a time, no scan, no sorting."""

    def norm(x: Any, scale: Any) -> Any:
        return x / jnp.sqrt((x**2).mean(-1, keepdims=True) + SPEC.norm_eps) * scale

    def turned(x: Any) -> Any:  # [T, heads, K]
        half = x.shape[-1] // 2
        angle = np.arange(LENGTH)[:, None] * SPEC.pattern[0].rope.theta ** (-np.arange(half) / half)
        cos, sin = np.cos(angle)[:, None], np.sin(angle)[:, None]
        a, b = x[..., :half], x[..., half:]
        return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], -1)

    def sequence(ids: Any, forced: Any) -> tuple[Any, Any]:
        x, free = params["embed"][ids], []
        for i in range(SPEC.layers):
            w = {name: value[i] for name, value in params["layers"].items()}
            y = norm(x, w["attn_norm"])
            q, k, v = (jnp.einsum("td,dhk->thk", y, w[n]) for n in "qkv")
            q, k = turned(norm(q, w["q_norm"])), turned(norm(k, w["k_norm"]))
            k, v = (jnp.repeat(a, SPEC.heads // SPEC.kv_heads, axis=1) for a in (k, v))
            scores = jnp.einsum("thk,shk->hts", q, k) / SPEC.head_dim**0.5
            seen = np.tril(np.ones((LENGTH, LENGTH), bool))
            shares = jax.nn.softmax(jnp.where(seen, scores, -jnp.inf), axis=-1)
            x = x + jnp.einsum("hts,shk,hkd->td", shares, v, w["o"])
            y = norm(x, w["mlp_norm"])
            logits = y @ w["router"]
            free.append(jnp.argsort(-logits, axis=-1)[:, :2])
            chosen = jax.nn.one_hot(forced[:, i], 4, dtype=logits.dtype).sum(-2)  # [T, E]
            odds = chosen * jnp.exp(logits)
            gates = odds / odds.sum(-1, keepdims=True)
            inner = [jnp.einsum("td,edf->tef", y, w[n]) for n in ("gate", "up")]
            each = jnp.einsum("tef,efd->ted", jax.nn.silu(inner[0]) * inner[1], w["down"])
            x = x + jnp.einsum("te,ted->td", gates, each)
        head = params["embed"].T if SPEC.tied else params["lm_head"]
        logprobs = jax.nn.log_softmax(norm(x, params["final_norm"]) @ head, axis=-1)
        return logprobs[np.arange(LENGTH - 1), ids[1:]], jnp.stack(free, axis=1)

    found = [sequence(ids, forced) for ids, forced in zip(IDS, experts, strict=True)]
    logprobs = jnp.stack([logs for logs, _ in found])
    return (pull[:, 1:] * logprobs).sum(), jnp.stack([free for _, free in found])


def replayed(params: Any, experts: Any, remat: str = "none") -> tuple[Any, Any]:
    """The same of the trainer's decoder, and how many layers would have chosen others."""
    positions, segments = np.broadcast_to(np.arange(LENGTH), IDS.shape), np.ones_like(IDS)
    tokens = TokenRows(IDS, positions, segments, expert_ids=experts)
    passed = token_logprobs(SPEC, params, tokens, DecoderSettings(remat=remat))
    logprobs, changed = passed.logprobs, passed.changed
    return (PULL * logprobs).sum(), changed


@pytest.mark.full
@pytest.mark.parametrize("remat", ["none", pytest.param("layer", marks=pytest.mark.exhaustive)])
def test_value_and_gradients_under_replay_are_those_of_a_one_hot_in_float64(params, remat):
    experts = random_experts(7)
    run = jax.jit(jax.value_and_grad(partial(replayed, remat=remat), has_aux=True))
    (value, changed), gradients = run(params, experts)
    with jax.enable_x64(True):
        exact = jax.tree.map(lambda w: jnp.asarray(np.asarray(w), jnp.float64), params)
        reference = jax.jit(jax.value_and_grad(by_one_hot, has_aux=True))
        (wanted, free), exactly = reference(exact, experts, np.asarray(PULL, np.float64))
        free, exactly = np.asarray(free), jax.tree.map(np.asarray, exactly)
    np.testing.assert_allclose(value, wanted, rtol=1e-5)
    for name in ("router", "gate", "up", "down", "q", "o"):
        got, want = gradients["layers"][name], exactly["layers"][name]
        np.testing.assert_allclose(got, want, atol=1e-5 * np.abs(want).max(), err_msg=name)
    assert np.abs(exactly["layers"]["router"]).max() > 0.1, "the gradient reaches the router"
    differ = (np.sort(free, axis=-1) != np.sort(experts, axis=-1)).any(axis=-1)
    np.testing.assert_array_equal(changed, differ.sum(axis=-1))


@pytest.mark.full
def test_experts_that_the_router_would_choose_itself_change_no_bit_of_the_value(params):
    """Told for all tokens, for some, or for none: the others are free. The gradient's sums may be
    fused in another order, which the last bits show."""
    _, free = jax.jit(by_one_hot)(params, random_experts(7), PULL)
    for _ in range(SPEC.layers):  # each layer's choice holds once those below are free, too
        _, free = jax.jit(by_one_hot)(params, free, PULL)
    known = np.asarray(free, np.int8)
    some = np.where(np.arange(LENGTH)[:, None, None] % 3 == 0, np.int8(-1), known)
    positions, segments = np.broadcast_to(np.arange(LENGTH), IDS.shape), np.ones_like(IDS)

    def freely(params: Any) -> Any:
        tokens = TokenRows(IDS, positions, segments)
        return (PULL * token_logprobs(SPEC, params, tokens).logprobs).sum()

    value, gradients = jax.jit(jax.value_and_grad(freely))(params)
    run = jax.jit(jax.value_and_grad(replayed, has_aux=True))
    for experts in (known, some, np.full_like(known, -1)):
        (same, changed), again = run(params, experts)
        assert not np.asarray(changed).any()
        assert value == same
        for got, want in zip(jax.tree.leaves(again), jax.tree.leaves(gradients), strict=True):
            np.testing.assert_allclose(got, want, atol=2e-6 * np.abs(want).max())


def test_ids_take_one_byte_up_to_128_experts():
    assert np.iinfo(id_dtype(128)).max == 127 and id_dtype(4) == np.int8
    assert np.iinfo(id_dtype(129)).max >= 512 and id_dtype(512) == np.int16


@pytest.mark.full
@pytest.mark.parametrize("odds", ["softmax", "sigmoid"])
def test_a_correction_and_groups_change_who_is_chosen(odds):
    """DeepSeek-V3 (arXiv:2412.19437, sec. 2.1.2): of 4 groups of 4 the 2 whose 2 best experts have
    the largest sum, and of these the 3 best; the correction counts in the choice alone."""
    rng = np.random.default_rng(3)
    logits, correction = rng.normal(size=(50, 16)), rng.normal(size=16)
    router = ExpertRouter(odds=odds, groups=4, groups_per_token=2, best_of_group=2)
    ids, _ = route(
        jnp.asarray(logits, jnp.float32), 3, router=router,
        correction=jnp.asarray(correction, jnp.float32),
    )  # fmt: skip
    raised = np.exp(logits)
    share = raised / (1 + raised) if odds == "sigmoid" else raised / raised.sum(1, keepdims=True)
    judged = share + correction
    for token, chosen in zip(judged, np.asarray(ids), strict=True):
        groups = token.reshape(4, 4)
        best = np.argsort(-np.sort(groups, axis=1)[:, 2:].sum(1))[:2]
        allowed = [4 * g + i for g in best for i in range(4)]
        assert set(chosen) == set(sorted(allowed, key=lambda e: -token[e])[:3])


@pytest.mark.full
def test_load_counts_real_tokens_alone():
    logits = jnp.asarray(np.random.default_rng(0).normal(size=(4, 6)), jnp.float32)
    real = jnp.array([True, False, True, True])
    choose, loads = counting(route, real, learns=False)
    ids, _ = choose(logits, 2)
    wanted = np.bincount(np.asarray(ids)[np.asarray(real)].ravel(), minlength=6)
    np.testing.assert_array_equal(loads[0].chosen, wanted)
    assert int(loads[0].tokens) == 3
