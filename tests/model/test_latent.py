"""Latent attention: what trainer and sampler compute of it is the same, and little is cached."""

import dataclasses
from contextlib import closing
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from builders import mesh_of, tiny_params, tiny_spec
from whole_rows import row_logprobs

from jaxrl_async.config import schema
from jaxrl_async.config.lora_section import LoraSection
from jaxrl_async.errors import CheckpointError, ConfigError
from jaxrl_async.mesh import TRAINER_RULES, shardings
from jaxrl_async.model import cache
from jaxrl_async.model.adapter_stack import AdapterRoom
from jaxrl_async.model.attention import reference
from jaxrl_async.model.decoder import (
    TokenRows,
    flat_forward,
    init_table,
    next_logits,
    settings_on,
    split_layers,
)
from jaxrl_async.model.frozen_base import BaseForm, base_table, quantized_base
from jaxrl_async.model.hf_config import hf_config_of, spec_from_hf
from jaxrl_async.model.kv_layout import layout_of
from jaxrl_async.model.layers import fuse
from jaxrl_async.model.lora import adapter_table, joined, lora_of, merged
from jaxrl_async.model.spec import ModelSpec, weight_table
from jaxrl_async.sampler.sampler import Sampler
from jaxrl_async.sampler.setup import SamplerSettings, kv_plan
from jaxrl_async.trainer.flops import flops_of_lengths, num_matmul_params
from jaxrl_async.types import Request, SamplingParams

VOCAB = 40
SPEC = tiny_spec(
    VOCAB, family="deepseek_v3", layers=2, experts=4, kv_heads=4, head_dim=12, tied=False
)
SECTION = schema.SamplerSection(
    slots=4, max_length=48, max_new_tokens=16, block=4, page_tokens=8, prefill_chunk=8
)
IDS = np.arange(14, dtype=np.int32) * 7 % VOCAB


def an_adapter(seed: int = 1, rank: int = 2, spec: ModelSpec = SPEC):
    lora = lora_of(spec, LoraSection(rank=rank, alpha=4))
    made = init_table(adapter_table(spec, lora), jax.random.key(seed), jnp.float32)
    grown = jax.tree.map(lambda x: x + 0.2 * jax.random.normal(jax.random.key(seed), x.shape), made)
    return lora, grown


def of_trainer(params, ids=IDS, spec: ModelSpec = SPEC) -> np.ndarray:
    n = len(ids)
    rows = TokenRows(*map(jnp.asarray, (ids[None], np.arange(n)[None], np.ones((1, n), np.int32))))
    return np.asarray(row_logprobs(spec, params, rows))[0]


def of_sampler(params, spec: ModelSpec = SPEC, *, fused: bool = False) -> np.ndarray:
    """Log-probs of IDS[1:] by the form that is cached."""

    def attend(i, q, k, v):
        assert k.shape[1:] == spec.cached_shape[1:] and not v.size
        return reference(q[None], k[None], v[None], jnp.ones((1, len(IDS)), jnp.int32))[0]

    @jax.jit
    def logprobs(params):
        layers = split_layers(spec, params)
        layers = [fuse(layer) for layer in layers] if fused else layers
        x = flat_forward(spec, params, layers, IDS, jnp.arange(len(IDS)), attend)
        return jax.nn.log_softmax(next_logits(spec, params, x))

    return np.asarray(logprobs(params))[np.arange(len(IDS) - 1), IDS[1:]]


@pytest.mark.full
@pytest.mark.parametrize(
    "kind", ["", *(pytest.param(k, marks=pytest.mark.exhaustive) for k in ("q", "int8", "nf4"))]
)
def test_both_forms_with_an_adapter_give_the_same(kind) -> None:
    """q: queries are made of x itself."""
    latent = dataclasses.replace(SPEC.latent, query_rank=0 if kind == "q" else 8)
    spec = dataclasses.replace(SPEC, latent=latent)
    params, (lora, adapter) = tiny_params(spec), an_adapter(spec=spec)
    if kind in ("int8", "nf4"):
        form = BaseForm(kind=kind, group=8)
        where = shardings(base_table(weight_table(spec), form), mesh_of(), TRAINER_RULES)
        params = quantized_base(spec, params, form, where)
    whole = joined(lora, params, adapter)
    got = of_sampler(whole, spec, fused=kind == "q")
    np.testing.assert_allclose(got, of_trainer(whole, spec=spec)[1:], atol=1e-5)
    without = {name: x for name, x in adapter["layers"].items() if not name.startswith("kv_b")}
    other = of_sampler(joined(lora, params, {**adapter, "layers": without}), spec)
    assert np.abs(other - got).max() > 1e-3, "the adapter of kv_b counts"


def test_a_token_is_cached_as_one_narrow_vector_and_flops_count_both_widths() -> None:
    latent = SPEC.latent
    width = latent.rank + latent.rotated
    assert (latent.rotated, latent.value, width) == (6, 6, 30)
    pages = jax.eval_shape(lambda: cache.init_pages(SPEC, layout_of(SPEC.kinds), 5, 8, jnp.float32))
    assert sum(x.size for x in jax.tree.leaves(pages)) == SPEC.layers * 5 * 8 * width
    plan = kv_plan(SPEC, SECTION, jnp.float32)
    assert plan.page_bytes == SPEC.layers * 8 * width * 4
    flops = flops_of_lengths(SPEC, 0.0, 100.0)
    assert flops == SPEC.layers * SPEC.heads * (12 + 6) * 100
    assert flops_of_lengths(SPEC, 1.0, 0.0) == 2 * num_matmul_params(SPEC)


def test_a_config_is_read_as_it_was_written_and_kimis_as_deepseeks() -> None:
    config = hf_config_of(SPEC)
    assert spec_from_hf(config, "config.json") == SPEC
    kimi = {**config, "model_type": "kimi_k2"}
    assert spec_from_hf(kimi, "config.json") == SPEC
    for wrong, words in (
        ({"attention_bias": True}, "attention_bias"),
        ({"topk_method": "greedy"}, 'topk_method "greedy"'),
        ({"scoring_func": "softmax"}, "scoring_func"),
        ({"num_key_value_heads": 2}, r"num_key_value_heads \(2\)"),
        ({"v_head_dim": 13}, r"v_head_dim \(13\)"),
        ({"qk_rope_head_dim": 5}, "even"),
        ({"n_group": 3}, r"n_group \(3\)"),
        ({"first_k_dense_replace": -1}, "first_k_dense_replace = -1"),
        ({"moe_layer_freq": 2}, "moe_layer_freq"),
        ({"kv_lora_rank": "x"}, "kv_lora_rank"),
    ):
        with pytest.raises(CheckpointError, match=words):
            spec_from_hf({**config, **wrong}, "config.json")


def test_on_a_tpu_pages_are_read_in_place_and_count_whole_registers() -> None:
    """A token is 30 numbers, and as many as fill registers of 128 in each layer's pages."""
    chip = SimpleNamespace(devices=np.array([SimpleNamespace(platform="tpu")]), size=1)
    section = SECTION.model_copy(update={"page_tokens": 16})
    plan = kv_plan(SPEC, section, jnp.bfloat16, mesh=chip)
    assert plan.page_bytes == SPEC.layers * 16 * 128 * 2 and not plan.copy_bytes
    layout = layout_of(SPEC.kinds)
    pages = jax.eval_shape(lambda: cache.init_pages(SPEC, layout, 5, 16, jnp.bfloat16, ragged=True))
    assert [x.shape for x in pages.k] == [(5, 16, 128)] * SPEC.layers and not pages.v
    for tokens in (4, 12, 20, 1032, 4096):
        other = section.model_copy(update={"page_tokens": tokens})
        message = rf"page_tokens={tokens}: .* multiple of 8 up to 1024, or .*gathered"
        with pytest.raises(ConfigError, match=message):
            kv_plan(SPEC, other, jnp.bfloat16, mesh=chip)
        gathered = other.model_copy(update={"attention": "gathered"})
        assert kv_plan(SPEC, gathered, jnp.bfloat16, mesh=chip).copy_bytes > 0
    for tokens in (8, 24, 1024):
        fits = section.model_copy(update={"page_tokens": tokens})
        assert not kv_plan(SPEC, fits, jnp.bfloat16, mesh=chip).copy_bytes


@pytest.mark.full
@pytest.mark.exhaustive
def test_pages_of_both_forms_give_the_same_tokens() -> None:
    """The plain one of the kernel's references, and gathering."""
    completions = []
    for attention in ("ragged", "gathered"):
        section = SECTION.model_copy(update={"attention": attention})
        with closing(Sampler((SPEC, tiny_params(SPEC)), section=section)) as sampler:
            assert sampler.engine.spec.prefills_in_pages == (attention == "ragged")
            done = sampler.generate([request(i) for i in range(4)])
            completions.append([c.token_ids.tolist() for c in done])
    assert completions[0] == completions[1]


def request(number: int, adapter: str = "", **more) -> Request:
    return Request(
        request_id=f"{adapter}/{number}",
        token_ids=np.roll(IDS, number),
        max_new_tokens=12,
        sampling=SamplingParams(temperature=1.0),
        key=(number, 0),
        adapter=adapter,
        **more,
    )


def completions(params, requests, mesh=None):
    with Sampler((SPEC, params), section=SECTION, mesh=mesh) as sampler:
        return sampler.generate([dataclasses.replace(w, adapter="") for w in requests])


def same(one, other) -> None:
    assert one.token_ids.tolist() == other.token_ids.tolist()
    np.testing.assert_allclose(one.logprobs, other.logprobs, atol=1e-4)


@pytest.mark.exhaustive
def test_adapters_in_one_block_sample_what_each_samples_alone() -> None:
    base, made = tiny_params(SPEC), {"a": an_adapter(1), "b": an_adapter(2, rank=3)}
    requests = [request(i, name) for i in range(2) for name in ("", "a", "b")]
    settings = SamplerSettings(adapters=AdapterRoom(places=3, rank=4))
    with Sampler((SPEC, base), section=SECTION, settings=settings) as sampler:
        for name, one in made.items():
            sampler.adapters.load(name, one)
        mixed = sampler.generate(requests)
    for name in ("", "a", "b"):
        params = merged(SPEC, *(made[name][0], base, made[name][1])) if name else base
        own = [w for w in requests if w.adapter == name]
        got = [done for w, done in zip(requests, mixed, strict=True) if w.adapter == name]
        for one, other in zip(got, completions(params, own), strict=True):
            same(one, other)
    assert len({tuple(done.token_ids) for done in mixed}) == len(requests)


@pytest.mark.exhaustive
def test_a_request_saved_with_its_cache_continues_on_a_mesh() -> None:
    params, one = tiny_params(SPEC), request(3)
    (whole,) = completions(params, [one])
    with Sampler((SPEC, params), section=SECTION.model_copy(update={"block": 1})) as sampler:
        future = sampler.start_many([one])[0]
        while not (partial := sampler.save(one.request_id, stop=False)).token_ids.size:
            assert not future.done()
        sampler.save(one.request_id, stop=True)
    assert partial.kv.shape[:2] == (2, 1) and partial.kv.shape[3:] == (1, 30)
    with Sampler((SPEC, params), section=SECTION, mesh=mesh_of(expert=2, tensor=2)) as there:
        (done,) = there.resume([partial])
        assert there.stats().prefill_tokens == 1, "KV is a short cut"
    same(done, whole)
    with (
        pytest.raises(Exception, match="another model made it"),
        Sampler((SPEC, params), section=SECTION) as here,
    ):
        here.resume([dataclasses.replace(partial, kv=partial.kv[..., :-1])])


@pytest.mark.exhaustive
def test_contexts_that_share_a_prefix_give_what_separate_ones_give() -> None:
    params, left = tiny_params(SPEC), 5
    other = np.concatenate([IDS[:left], IDS[:6] + 1])
    ids = np.concatenate([IDS, other[left:]])
    positions = np.concatenate([np.arange(len(IDS)), np.arange(left, len(other))])
    segments = np.repeat([1, 2], [len(IDS), len(other) - left])
    settings = settings_on(
        mesh_of(), SPEC, dtype=jnp.float32, attention="reference", shares_prefixes=True
    )
    rows = TokenRows(*(jnp.asarray(x[None], jnp.int32) for x in (ids, positions, segments)))
    got = np.asarray(row_logprobs(SPEC, params, rows, settings))[0]
    np.testing.assert_allclose(got[1 : len(IDS)], of_trainer(params)[1:], atol=1e-5)
    np.testing.assert_allclose(
        got[len(IDS) + 1 :], of_trainer(params, other)[left + 1 :], atol=1e-5
    )
