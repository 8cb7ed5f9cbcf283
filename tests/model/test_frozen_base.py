"""A frozen base in 8 or 4 bits: what a number stands for, and one pass for trainer and sampler."""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from builders import mesh_of, tiny_params, tiny_spec

from jaxrl_async.config.lora_section import LoraSection
from jaxrl_async.errors import ConfigError
from jaxrl_async.mesh import TRAINER_RULES, shardings
from jaxrl_async.model.attention import reference
from jaxrl_async.model.decoder import (
    DecoderSettings,
    TokenRows,
    flat_forward,
    init_table,
    next_logits,
    split_layers,
)
from jaxrl_async.model.four_bits import NF4, pack_codes, unpack_codes
from jaxrl_async.model.frozen_base import (
    BaseForm,
    base_bytes,
    base_shapes,
    base_table,
    check_groups,
    form_of,
    group_of,
    merged_by_layer,
    quantized_base,
    read_base,
    restored_params,
    sent_base,
)
from jaxrl_async.model.layout import Layout
from jaxrl_async.model.logprobs import token_logprobs
from jaxrl_async.model.lora import adapter_table, joined, lora_of, merged
from jaxrl_async.model.policy import Policy
from jaxrl_async.model.spec import weight_table

DENSE = tiny_spec(40, layers=2, mlp=24, tied=False)
ROUTED = tiny_spec(40, layers=2, mlp=24, tied=False, family="qwen3_moe", experts=4)
KINDS = ("int8", "nf4", "int4", "q4_1")


def base_of(spec, kind, params, mesh=None):
    form = BaseForm(kind=kind, group=8)
    where = shardings(base_table(weight_table(spec), form), mesh or mesh_of(), TRAINER_RULES)
    return quantized_base(spec, params, form, where)


def an_adapter(spec):
    lora = lora_of(spec, LoraSection(rank=2))
    adapter = init_table(adapter_table(spec, lora), jax.random.key(1), jnp.float32)
    moved = jax.tree.map(lambda a: a + 0.01 * jnp.cos(jnp.arange(a.size)).reshape(a.shape), adapter)
    return lora, moved


@pytest.mark.full
@pytest.mark.parametrize("kind", ["nf4", "int4"])
def test_each_weight_is_the_nearest_level_times_its_groups_scale(kind):
    """Against float64 NumPy, level by level."""
    matrix = np.random.default_rng(0).normal(size=(3, 32, 5)).astype(np.float32)
    matrix[0, :8, 0] = 0
    packed, scales = pack_codes(jnp.asarray(matrix), kind, 8)
    assert packed.dtype == np.uint8 and packed.shape == (3, 16, 5) and scales.shape == (3, 4, 5)
    groups = matrix.astype(np.float64).reshape(3, 4, 8, 1, 5)
    levels = np.array(NF4) if kind == "nf4" else np.arange(-8, 8) / 7.5
    levels = levels[:, None] * np.abs(groups).max(axis=2, keepdims=True)
    nearest = np.abs(groups - levels).min(axis=3)  # a tie may be rounded either way
    got = np.asarray(unpack_codes(packed, scales, kind), np.float64).reshape(3, 4, 8, 5)
    np.testing.assert_allclose(np.abs(got - groups[:, :, :, 0]), nearest, atol=1e-6)


def test_in_q4_1_each_weight_is_the_nearest_of_sixteen_levels_above_the_least():
    """Against float64 NumPy, level by level."""
    matrix = np.random.default_rng(0).normal(size=(3, 32, 5)).astype(np.float32) + 2
    matrix[0, :8, 0] = -0.25
    packed, scales = pack_codes(jnp.asarray(matrix), "q4_1", 8)
    assert packed.shape == (3, 16, 5) and scales.shape == (3, 8, 5)
    groups = matrix.astype(np.float64).reshape(3, 4, 8, 1, 5)
    least, largest = groups.min(axis=2, keepdims=True), groups.max(axis=2, keepdims=True)
    levels = least + np.arange(16)[:, None] / 15 * (largest - least)
    nearest = np.abs(groups - levels).min(axis=3)
    got = np.asarray(unpack_codes(packed, scales, "q4_1"), np.float64).reshape(3, 4, 8, 5)
    np.testing.assert_allclose(np.abs(got - groups[:, :, :, 0]), nearest, atol=1e-6)


@pytest.mark.full
def test_the_levels_of_nf4_are_quantiles_of_a_normal_distribution():
    """Dettmers et al. 2023, sec. 3: those of 8 parts above 0 and 7 below, scaled to 1."""
    above = jax.scipy.stats.norm.ppf(np.linspace(0.9677083, 0.5, 9)[:-1])
    below = -jax.scipy.stats.norm.ppf(np.linspace(0.9677083, 0.5, 8)[:-1])
    levels = np.sort(np.concatenate([above, [0.0], below]))
    np.testing.assert_allclose(levels / levels.max(), NF4, atol=1e-5)


@pytest.mark.full
@pytest.mark.parametrize(
    ("spec", "kind"),
    [
        pytest.param(DENSE, "int8", marks=pytest.mark.exhaustive),
        (DENSE, "nf4"),
        pytest.param(ROUTED, "int4", marks=[pytest.mark.full, pytest.mark.exhaustive]),
    ],
    ids=str,
)
def test_trainer_and_sampler_compute_what_the_base_stands_for(spec, kind):
    """Log-probs of both are as near as without quantisation, and so is the adapter's gradient."""
    params, (lora, adapter) = tiny_params(spec), an_adapter(spec)
    quantised = base_of(spec, kind, params)
    ids = np.arange(14, dtype=np.int32) * 7 % 40
    rows = TokenRows(ids[None], np.arange(14, dtype=np.int32)[None], np.ones((1, 14), np.int32))

    @jax.jit
    def of_trainer(adapter, base):
        settings = DecoderSettings(remat="none")
        return token_logprobs(spec, joined(lora, base, adapter), rows, settings).logprobs[0]

    @jax.jit
    def of_sampler(base):
        whole = joined(lora, sent_base(base, jnp.float32), adapter)

        def attend(i, q, k, v):
            return reference(q[None], k[None], v[None], rows.segment_ids)[0]

        x = flat_forward(spec, whole, split_layers(spec, whole), ids, rows.positions[0], attend)
        logprobs = jax.nn.log_softmax(next_logits(spec, whole, x))
        return logprobs[np.arange(13), ids[1:]]

    restored = restored_params(spec, quantised)
    grad = jax.jit(jax.value_and_grad(lambda a, base: of_trainer(a, base)[1:].sum()))
    (sum_q, grads_q), (sum_r, grads_r) = grad(adapter, quantised), grad(adapter, restored)
    np.testing.assert_allclose(sum_q, sum_r, rtol=1e-5)
    for got, wanted in zip(jax.tree.leaves(grads_q), jax.tree.leaves(grads_r), strict=True):
        np.testing.assert_allclose(got, wanted, atol=2e-4)
    gap, plain = (
        np.abs(np.asarray(of_trainer(adapter, base))[1:] - of_sampler(base)).max()
        for base in (quantised, params)
    )
    assert gap < 4 * max(plain, 1e-6), (gap, plain)
    assert np.abs(of_trainer(adapter, quantised) - of_trainer(adapter, params)).max() > 1e-3


@pytest.mark.full
@pytest.mark.parametrize("kind", KINDS)
def test_the_backward_pass_keeps_no_widened_matrix(kind):
    spec, (lora, adapter) = DENSE, an_adapter(DENSE)
    base = base_of(spec, kind, tiny_params(spec))
    ids = np.zeros((1, 6), np.int32)

    def total(adapter):
        rows = TokenRows(ids, ids, ids + 1)
        return token_logprobs(spec, joined(lora, base, adapter), rows).logprobs.sum()

    kept = jax.eval_shape(lambda a: jax.vjp(total, a)[1], adapter)
    floats = {x.shape for x in jax.tree.leaves(kept) if x.dtype == jnp.float32}
    whole = {w.shape for name, w in weight_table(spec)["layers"].items() if len(w.shape) > 2}
    assert not floats & whole


@pytest.mark.full
@pytest.mark.parametrize("kind", ["int8", "nf4"])
def test_a_base_that_is_read_layer_by_layer_is_the_one_that_was_made(tmp_path: Path, kind):
    params = tiny_params(ROUTED)
    Policy(ROUTED, params).save_pretrained(tmp_path)
    form, mesh = BaseForm(kind=kind, group=8), mesh_of(fsdp=2, tensor=2)
    made = base_of(ROUTED, kind, params)
    read = read_base(tmp_path, ROUTED, form, mesh, jnp.float32)
    jax.tree.map(np.testing.assert_array_equal, read, made)
    shapes = base_shapes(ROUTED, form, jnp.float32)
    assert jax.tree.map(lambda x: (x.shape, x.dtype), made) == jax.tree.map(
        lambda x: (x.shape, x.dtype), shapes
    )
    assert base_bytes(ROUTED, form, jnp.float32) == sum(x.nbytes for x in jax.tree.leaves(read))
    assert len(read["layers"]["o"].sharding.device_set) == 4
    assert {s.data.shape for s in read["layers"]["q"].addressable_shards} == {
        tuple(n // d for n, d in zip(made["layers"]["q"].shape, (1, 2, 2, 1), strict=True))
    }


@pytest.mark.full
def test_a_merged_model_is_written_layer_by_layer_as_it_is_merged_whole(tmp_path: Path):
    lora, adapter = an_adapter(ROUTED)
    base = base_of(ROUTED, "nf4", tiny_params(ROUTED))
    whole = merged(ROUTED, lora, restored_params(ROUTED, base), adapter)
    parts = merged_by_layer(ROUTED, lora, base, adapter)
    np.testing.assert_allclose(parts["layers"]["gate"][1, 2], whole["layers"]["gate"][1, 2])
    Policy(ROUTED, base, lora=lora, adapter=adapter).save_pretrained(tmp_path)
    read = Policy.from_pretrained(tmp_path).params
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), read, whole)


@pytest.mark.full
@pytest.mark.parametrize("kind", ["int8", "nf4", "int4"])
def test_a_quantised_base_alone_is_written_as_what_it_stands_for(tmp_path: Path, kind):
    """And read again in the same form it is the same, but in int4, whose largest weight may be
    either 8 or 7 times the scale."""
    form = BaseForm(kind=kind, group=8)
    Policy(ROUTED, tiny_params(ROUTED)).save_pretrained(tmp_path / "whole")
    packed = Policy.from_pretrained(tmp_path / "whole", form=form)
    packed.save_pretrained(tmp_path / "restored")
    restored = Policy.from_pretrained(tmp_path / "restored")
    wanted = restored_params(ROUTED, packed.params)
    jax.tree.map(np.testing.assert_array_equal, restored.params, wanted)
    if kind == "int4":
        return
    again = Policy.from_pretrained(tmp_path / "restored", form=form)
    for found, expected in zip(
        jax.tree.leaves(restored_params(ROUTED, again.params)),
        jax.tree.leaves(wanted),
        strict=True,
    ):
        np.testing.assert_allclose(found, expected, rtol=1e-6, atol=1e-7)


def test_four_bits_take_little_more_than_half_a_byte_a_weight():
    large = tiny_spec(64, layers=2, width=256, mlp=512, heads=2, kv_heads=2, head_dim=128)
    matrices = sum(
        np.prod(w.shape) for w in weight_table(large)["layers"].values() if len(w.shape) > 2
    )
    rest = base_bytes(large, None, jnp.bfloat16) - 2 * matrices
    taken = {
        kind: (base_bytes(large, BaseForm(kind=kind, group=64), jnp.bfloat16) - rest) / matrices
        for kind in KINDS
    }
    assert taken["nf4"] == taken["int4"] == 0.5625 and 1 < taken["int8"] < 1.05


@pytest.mark.full
def test_groups_divide_the_inputs_and_devices_divide_whole_groups():
    table = weight_table(tiny_spec(40, layers=1, width=96, heads=4, head_dim=24))["layers"]
    assert group_of("q", table["q"], 64) == 48 and group_of("o", table["o"], 64) == 24
    odd = weight_table(tiny_spec(40, layers=1, mlp=25))["layers"]["down"]
    with pytest.raises(ConfigError, match=r"down has 25 inputs, an odd number.*base=int8"):
        group_of("down", odd, 64)
    form = form_of(LoraSection(rank=2, base="nf4"))
    routed = tiny_spec(40, layers=1, mlp=24, family="qwen3_moe", experts=4)
    check_groups(routed, form, mesh_of(), "mesh.trainer")
    with pytest.raises(ConfigError, match=r"Set model.lora.group_size=12"):
        check_groups(routed, form, mesh_of(tensor=2), "mesh.trainer")
    assert form_of(None) is None


@pytest.mark.parametrize("axes", [{"fsdp": 2, "tensor": 2}, {"expert": 4, "tensor": 2}], ids=str)
@pytest.mark.exhaustive
def test_a_mesh_computes_what_one_device_does(axes):
    spec = tiny_spec(40, layers=2, mlp=32, tied=False, family="qwen3_moe", experts=4)
    (lora, adapter), mesh = an_adapter(spec), mesh_of(**axes)
    check_groups(spec, BaseForm(kind="nf4", group=8), mesh, "mesh.trainer")
    rows = TokenRows(*(np.tile(x, (8, 1)) for x in (np.arange(16) % 7, np.arange(16), np.ones(16))))
    rows = TokenRows(*(x.astype(np.int32) for x in rows[:3]))
    found = []
    for where in (None, mesh):
        settings = DecoderSettings(layout=Layout(where))
        base = base_of(spec, "nf4", tiny_params(spec), where)

        def logprobs(base, adapter, settings=settings):
            return token_logprobs(spec, joined(lora, base, adapter), rows, settings).logprobs[:, 1:]

        found.append(jax.jit(logprobs)(base, adapter))
    np.testing.assert_allclose(*found, atol=2e-5)
