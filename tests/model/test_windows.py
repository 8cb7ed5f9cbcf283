"""Layers that see a window, and layers whose kinds alternate: in every form of attention."""

import dataclasses
import json
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from whole_rows import row_logprobs

from jaxrl_async.config import schema
from jaxrl_async.errors import CheckpointError, ConfigError
from jaxrl_async.model import kernels
from jaxrl_async.model.attention import (
    TREE_ATTENTION,
    causal_within_segments,
    ragged_paged_reference,
    reference,
    seen_from,
    sequence_attention,
)
from jaxrl_async.model.cache import recent_pages
from jaxrl_async.model.decoder import DecoderSettings, TokenRows, init_params
from jaxrl_async.model.families.family import never
from jaxrl_async.model.families.family_registry import FAMILIES
from jaxrl_async.model.families.parts import LayerKind, repeating, runs_of
from jaxrl_async.model.gpu_packed import cudnn
from jaxrl_async.model.hf_config import spec_from_hf
from jaxrl_async.model.kernels import Scoring
from jaxrl_async.model.quantize import quantize
from jaxrl_async.model.spec import ModelSpec, weight_table
from jaxrl_async.sampler.device.engine import Engine
from jaxrl_async.sampler.device.engine_spec import EngineSpec
from jaxrl_async.testing.interpreted import interpreted_kernels
from jaxrl_async.trainer.flops import attended_length, flops_of_lengths, forward_flops

VOCAB = 40
SIZES = {"width": 16, "heads": 4, "kv_heads": 2, "head_dim": 8, "mlp": 24}


def spec_of(family: str, layers: int = 3, window: int | None = 4) -> ModelSpec:
    section = schema.ArchitectureSection(family=family, layers=layers, window=window, **SIZES)
    return ModelSpec.from_architecture(section, VOCAB)


def moved_params(spec: ModelSpec) -> Any:
    params = init_params(spec, jax.random.key(0))
    return jax.tree.map(
        lambda w: w + 0.2 * jax.random.normal(jax.random.key(w.size), w.shape), params
    )


def logprobs_of(
    spec: ModelSpec, params: Any, ids: Any, positions: Any, segments: Any, **settings: Any
) -> np.ndarray:
    rows = TokenRows(*(jnp.asarray(x, jnp.int32)[None] for x in (ids, positions, segments)))
    return np.asarray(row_logprobs(spec, params, rows, DecoderSettings(**settings))[0])


# ---- patterns


def test_layers_are_divided_into_runs_that_give_them_back():
    near, far, bare = LayerKind(window=4), LayerKind(), LayerKind(rope=None)
    rng = np.random.default_rng(0)
    for _ in range(200):
        period = [(near, far, bare)[i] for i in rng.integers(0, 3, rng.integers(1, 6))]
        more = [(near, far, bare)[i] for i in rng.integers(0, 3, rng.integers(0, 5))]
        kinds = tuple(period * rng.integers(1, 5) + more)
        again = [k for run in runs_of(kinds) for k in run.kinds * run.times]
        assert tuple(again) == kinds
        pattern = repeating(kinds)
        assert tuple(pattern[i % len(pattern)] for i in range(len(kinds))) == kinds
    assert [(r.first, len(r.kinds), r.times) for r in runs_of((near,) * 21)] == [(0, 1, 21)]


def test_published_patterns_make_few_runs():
    def runs(family: str, layers: int) -> list[tuple[int, int]]:
        window = None if family in ("smollm3", "qwen3") else 4
        return [(len(r.kinds), r.times) for r in spec_of(family, layers, window).runs]

    assert runs("gemma3_text", 26) == [(6, 4), (1, 2)]
    assert runs("gemma2", 42) == [(2, 21)]
    assert runs("olmo3", 32) == [(4, 8)]
    assert runs("smollm3", 36) == [(4, 9)]
    assert runs("mistral", 32) == runs("qwen3", 32) == [(1, 32)]


@pytest.mark.parametrize("family", FAMILIES)
def test_a_spec_survives_a_wire(family):
    experts = {"experts": 4} if FAMILIES[family].routed else {}
    window = None if FAMILIES[family].windowed is never else 4
    section = schema.ArchitectureSection(family=family, layers=4, window=window, **SIZES, **experts)
    spec = ModelSpec.from_architecture(section, VOCAB)
    assert ModelSpec.from_fields(json.loads(json.dumps(dataclasses.asdict(spec)))) == spec


def test_what_a_config_json_asks_for_in_vain_is_named():
    config = {
        "model_type": "gemma3_text",
        "vocab_size": 8,
        "hidden_size": 8,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "intermediate_size": 8,
        "sliding_window": 4,
    }
    assert [k.window for k in spec_from_hf(config, "config.json").kinds] == [4, 4]
    for more, words in (
        ({"model_type": "gpt2"}, "gemma3_text, mistral"),
        ({"layer_types": ["full_attention", "linear_attention"]}, "linear_attention"),
        ({"layer_types": ["sliding_attention"] * 2, "sliding_window": None}, "sliding_window"),
        ({"layer_types": ["full_attention"]}, "layer_types"),
        ({"use_bidirectional_attention": True}, "later tokens"),
        ({"hidden_activation": "relu"}, "gelu_pytorch_tanh"),
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, "dynamic"),
        ({"query_pre_attn_scalar": -1}, "query_pre_attn_scalar"),
    ):
        with pytest.raises(CheckpointError, match=words):
            spec_from_hf({**config, **more}, "config.json")


def test_attention_is_counted_within_the_window():
    """Ten tokens, of which each sees four at most: 16 + 6 x 7 in place of 100."""
    near, far = spec_of("mistral"), spec_of("mistral", window=None)
    assert attended_length(near, 10) == pytest.approx(5.8) and attended_length(far, 10) == 10
    assert attended_length(near, 3) == 3
    ids, ones = np.arange(10, dtype=np.int32)[None], np.ones((1, 10), np.int32)
    batch = SimpleNamespace(positions=ids, segment_ids=ones)
    for spec in (near, far):
        wanted = flops_of_lengths(spec, 10, 10 * attended_length(spec, 10))
        assert forward_flops(spec, batch) == pytest.approx(wanted)


# ---- attention


def naive(q: Any, k: Any, v: Any, segments: Any, scoring: Scoring) -> np.ndarray:
    """Loops over queries and heads in float64."""
    q, k, v = (np.asarray(x, np.float64) for x in (q, k, v))
    B, T, H, K = q.shape
    out = np.zeros_like(q)
    for b, t, h in np.ndindex(B, T, H):
        first = max(0, t - scoring.window + 1) if scoring.window else 0
        keys = [s for s in range(first, t + 1) if segments[b, s] == segments[b, t]]
        n = h * k.shape[2] // H
        scores = k[b, keys, n] @ q[b, t, h] * K**-0.5
        scores = scoring.cap * np.tanh(scores / scoring.cap) if scoring.cap else scores
        share = np.exp(scores - scores.max())
        out[b, t, h] = share / share.sum() @ v[b, keys, n]
    return out


def arrays(T: int, K: int = 8) -> tuple[Any, ...]:
    keys = jax.random.split(jax.random.key(0), 3)
    q, k, v = (
        2 * jax.random.normal(key, (2, T, n, K)) for key, n in zip(keys, (4, 2, 2), strict=True)
    )
    segments = np.sort(np.random.default_rng(0).integers(1, 4, (2, T)), axis=1).astype(np.int32)
    return q, k, v, segments


@pytest.mark.full
@pytest.mark.parametrize("scoring", [Scoring(5), Scoring(0, 1.5), Scoring(3, 1.5)])
def test_the_reference_is_what_loops_give(scoring):
    q, k, v, segments = arrays(24)
    out = reference(q, k, v, segments, scoring)
    np.testing.assert_allclose(out, naive(q, k, v, segments, scoring), atol=1e-5)


@pytest.mark.exhaustive
@pytest.mark.parametrize("scoring", [Scoring(70), Scoring(40, 1.5)])
def test_splash_sees_the_same_window_and_cap(scoring):
    """Blocks of 128, so that some lie before the window as a whole."""
    q, k, v, segments = arrays(384, 16)

    def outputs_and_gradients(attention: Any) -> Any:
        def total(*inputs: Any) -> Any:
            out = attention(*inputs, segments, scoring)
            return jnp.sum(jnp.sin(out)), out

        (_, out), gradients = jax.value_and_grad(total, (0, 1, 2), has_aux=True)(q, k, v)
        return out, *gradients

    expected = outputs_and_gradients(reference)
    with interpreted_kernels():
        got = outputs_and_gradients(kernels.splash)
    for a, b in zip(got, expected, strict=True):
        np.testing.assert_allclose(a, b, atol=5e-5)


@pytest.mark.full
def test_pages_are_read_through_the_same_window():
    q, k, v, _ = arrays(24)
    scoring = Scoring(5, 1.5)
    pages = jnp.stack([k[0], v[0]], axis=2).reshape(6, 4, 4, 8)  # 4 tokens a page
    out = ragged_paged_reference(
        q[0, 10:], pages, jnp.array([24]), jnp.arange(6)[None], jnp.array([0, 14]),
        jnp.array([1]), scoring,
    )  # fmt: skip
    whole = naive(q, k, v, np.ones((2, 24)), scoring)
    np.testing.assert_allclose(out, whole[0, 10:], atol=1e-5)


def test_cudnn_is_not_given_scores_with_a_cap():
    q, k, v, segments = arrays(8)
    with pytest.raises(ConfigError, match=r"model\.attention=flash"):
        cudnn(q, k, v, segments, Scoring(0, 2.0))
    assert sequence_attention("auto", cap=2.0) is reference


# ---- whole models


def test_a_window_that_no_layer_has_is_refused():
    with pytest.raises(ConfigError, match="none of the 3 layers of family=llama"):
        spec_of("llama")


@pytest.mark.full
@pytest.mark.parametrize(
    "family", ["gemma3_text", pytest.param("mistral", marks=pytest.mark.exhaustive)]
)
def test_contexts_that_share_a_prefix_see_the_window_of_their_own(family):
    """The second context goes on from 5 tokens of the first, the third from 2."""
    spec = spec_of(family, layers=3)
    params = moved_params(spec)
    ids = np.random.default_rng(2).integers(0, VOCAB, 20)
    segments = np.repeat([1, 2, 3], [10, 5, 5])
    positions = np.concatenate([np.arange(10), 5 + np.arange(5), 2 + np.arange(5)])
    tree = {"attention": TREE_ATTENTION["reference"], "shares_prefixes": True}
    got = logprobs_of(spec, params, ids, positions, segments, **tree)
    for start, shared in ((10, 5), (15, 2)):
        alone = np.concatenate([ids[:shared], ids[start : start + 5]])
        count = np.arange(len(alone))
        wanted = logprobs_of(spec, params, alone, count, np.ones_like(count))
        np.testing.assert_allclose(
            got[start + 1 : start + 5], wanted[shared + 1 :], atol=1e-5, rtol=0
        )


@pytest.mark.exhaustive
@pytest.mark.parametrize("kind", [None, "int8"])
@pytest.mark.parametrize("family", ["gemma2", "gemma3_text"])
def test_the_probe_of_a_sampler_is_what_the_trainer_gives(family, kind):
    spec = spec_of(family)
    params = moved_params(spec)
    if kind:
        params = quantize(weight_table(spec), params, kind, jnp.float32)
    shapes = {"slots": 1, "max_length": 32, "pages": 4, "page_tokens": 8}
    engine = Engine(EngineSpec(model=spec, **shapes))
    ids = np.random.default_rng(3).integers(0, VOCAB, 24).astype(np.int32)
    probed = engine.probe(engine.programs.prepare(params), ids)
    count = np.arange(24)
    wanted = logprobs_of(spec, params, ids, count, np.ones_like(count))
    np.testing.assert_allclose(probed, wanted[1:], atol=1e-5, rtol=0)


@pytest.mark.full
@pytest.mark.parametrize("page_tokens", [1, 3, 4])
@pytest.mark.parametrize("window", [0, 1, 2, 5, 8, 40])
def test_the_pages_of_a_window_hold_each_of_its_tokens(window, page_tokens):
    """At every position, also where the oldest token of the window is the last of its page."""
    width, positions = 8, np.arange(8 * page_tokens)
    table = np.arange(width)[None].repeat(len(positions), 0) + 100
    pages, firsts = recent_pages(jnp.asarray(table), jnp.asarray(positions), window, page_tokens)
    for position, row, first in zip(positions, np.asarray(pages), np.asarray(firsts), strict=True):
        oldest = max(0, position + 1 - window) if window else 0
        assert first <= oldest and first % page_tokens == 0
        for token in range(oldest, position + 1):
            assert row[(token - first) // page_tokens] == 100 + token // page_tokens


@pytest.mark.full
@pytest.mark.parametrize("window", [0, 1, 3, 9])
def test_what_a_query_sees_is_its_segment_up_to_itself_within_the_window(window):
    segments = np.array([[1, 1, 1, 1, 2, 2, 0, 0], [1, 2, 2, 2, 2, 2, 2, 0]])
    wanted = np.zeros((2, 8, 8), bool)
    for b, t, s in np.ndindex(wanted.shape):
        near = s <= t and (not window or s > t - window)
        wanted[b, t, s] = near and segments[b, s] == segments[b, t] and segments[b, s] > 0
    seen = causal_within_segments(jnp.asarray(segments), window)
    np.testing.assert_array_equal(seen, wanted)
    part = seen_from(jnp.asarray(segments[:, 3:6]), jnp.asarray(segments), jnp.arange(3, 6), window)
    np.testing.assert_array_equal(part, wanted[:, 3:6])
