"""The programs of a plan have what a run's have; lowered here for CPU devices, never compiled."""

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from builders import tiny_spec
from jax.sharding import AbstractMesh

from jaxrl_async.config import schema
from jaxrl_async.errors import ConfigError
from jaxrl_async.mesh import SAMPLER_RULES, Slices, make_mesh, shardings
from jaxrl_async.model.decoder import init_params
from jaxrl_async.model.families.parts import Latent
from jaxrl_async.model.quantize import quantize, quantized_table
from jaxrl_async.model.spec import ModelSpec, weight_table
from jaxrl_async.plan import programs as lowering
from jaxrl_async.plan.chip_placement import Placement, place_on_chips
from jaxrl_async.plan.chips import CHIPS, parse_slice
from jaxrl_async.plan.programs import Lowered, check, lowered
from jaxrl_async.run.builders.samplers import SentWeights
from jaxrl_async.sampler.device.engine import Engine, weight_shardings
from jaxrl_async.sampler.device.engine_spec import EngineSpec

BASE: dict[str, Any] = {
    "model": {
        "architecture": {
            "layers": 2, "width": 16, "heads": 4, "kv_heads": 2, "head_dim": 8, "mlp": 24,
            "vocab": 32,
        },
    },
    "mesh": {"trainer": {"fsdp": 4}, "sampler": {"tensor": 2}, "samplers": 2},
    "data": {"max_prompt_tokens": 100},
    "sampler": {
        "slots": 2, "max_length": 160, "max_new_tokens": 32, "block": 2, "prefill_chunk": 100,
    },
    "algorithm": {"groups_per_step": 2, "group_size": 2},
    "trainer": {"micro_batch_tokens": 640},
}  # fmt: skip


def config_of(**sections: dict[str, Any]) -> schema.Config:
    return schema.Config.model_validate(
        BASE | {name: BASE.get(name, {}) | given for name, given in sections.items()}
    )


def placement_on_cpu(config: schema.Config) -> Placement:
    return Placement(
        trainer=parse_slice("v5e-4"),
        sampler=parse_slice("v5p-1"),
        num_samplers=2,
        slices=Slices(
            make_mesh(config.mesh.trainer, jax.devices()[:4]),
            (make_mesh(config.mesh.sampler, jax.devices()[4:6]),),
            False,
        ),
    )


def programs_of(config: schema.Config) -> dict[str, Lowered]:
    found, _ = lowered(config, lowering.spec_of(config), placement_on_cpu(config))
    return {one.name: one for one in found}


def arguments(program: Lowered) -> list[str]:
    """Types of what a program takes: "float32[4,160]"."""
    return [f"{x.dtype}{list(x.shape)}" for x in jax.tree.leaves(program.program.args_info)]


@pytest.fixture(scope="module")
def plain() -> dict[str, Lowered]:
    return programs_of(config_of())


@pytest.mark.full
def test_nothing_is_compiled_to_lower_the_programs_and_the_push_is_lowered_once(monkeypatch):
    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("compiled")

    calls, push = [], SentWeights.push
    monkeypatch.setattr(SentWeights, "push", lambda *a: calls.append(a) or push(*a))
    monkeypatch.setattr(jax.stages.Lowered, "compile", refuse)
    assert set(programs_of(config_of())) == {
        "gradient", "update", "cast", "prepare", "prefill", "decode"
    }  # fmt: skip
    assert len(calls) == 1


@pytest.mark.full
@pytest.mark.parametrize(
    ("axes", "kind"), [({}, None), ({"tensor": 2}, "int8"), ({"data": 2, "tensor": 2}, None)]
)
def test_prepared_weights_lie_where_they_are_said_to(axes, kind):
    spec = ModelSpec.from_architecture(config_of().model.architecture, 32)
    section = schema.AxesSection(**axes)
    mesh = make_mesh(section, jax.devices()[: section.num_devices])
    table, params = weight_table(spec), init_params(spec, jax.random.key(0))
    if kind:
        params = quantize(table, params, kind, jnp.float32)
        table = quantized_table(table)
    params = jax.device_put(params, shardings(table, mesh, SAMPLER_RULES))
    engine = Engine(EngineSpec(model=spec, slots=2, max_length=32, pages=4, mesh=mesh))
    prepared = engine.prepare(params)
    said = weight_shardings(spec, mesh, params, prepared)
    assert jax.tree.structure(said) == jax.tree.structure(prepared)
    for array, where in zip(jax.tree.leaves(prepared), jax.tree.leaves(said), strict=True):
        assert array.sharding.is_equivalent_to(where, array.ndim)


# ---- what the Learner gives a gradient


@pytest.mark.full
def test_an_offloaded_reference_comes_as_a_column(plain):
    kl = {"algorithm": {**BASE["algorithm"], "kl_coefficient": 0.1}}
    held = arguments(programs_of(config_of(**kl))["gradient"])
    trainer = {**BASE["trainer"], "offload": ["reference"]}
    offloaded = arguments(programs_of(config_of(**kl, trainer=trainer))["gradient"])
    none = arguments(plain["gradient"])
    assert len(offloaded) == len(none) + 1, "its log-probs"
    assert len(held) > len(none) + 5, "its weights"


@pytest.mark.full
@pytest.mark.parametrize(
    ("algorithm", "sampler", "more"),
    [
        pytest.param({"loss": "clip_cov"}, {}, ["float32", "float32"], id="clip_cov"),
        pytest.param({"loss": {"kl_cov": {}}}, {}, ["float32", "float32"], id="kl_cov"),
        pytest.param({"epochs": 2}, {}, ["float32"], id="proximal"),
        pytest.param(
            {"epochs": 2, "kl_coefficient": 0.1}, {}, ["float32", "float32"], id="reference"
        ),
        pytest.param({"supervised_coefficient": 0.5}, {}, ["float32"], id="supervised"),
        pytest.param({"keep_sampling_mask": True}, {"top_k": 5}, ["uint8"], id="masks"),
        pytest.param({"keep_sampling_mask": True}, {}, [], id="masks of all"),
    ],
)
def test_a_gradient_takes_the_columns_of_its_algorithm(plain, algorithm, sampler, more):
    config = config_of(algorithm=BASE["algorithm"] | algorithm, sampler=BASE["sampler"] | sampler)
    found, before = arguments(programs_of(config)["gradient"]), arguments(plain["gradient"])
    assert len(found) == len(before) + len(more)
    for kind in set(more):
        added = sum(x.startswith(kind) for x in found) - sum(x.startswith(kind) for x in before)
        assert added == more.count(kind)
    assert ("uint8[4, 160, 4]" in found) == ("uint8" in more), "a bit for each of 32 tokens"


@pytest.mark.full
def test_an_update_takes_masters_where_weights_in_bfloat16_have_them(plain):
    def wide(program: Lowered) -> int:
        return sum(x.startswith("float32") for x in arguments(program))

    leaves = len(jax.tree.leaves(weight_table(lowering.spec_of(config_of()))))
    model = {"model": {**BASE["model"], "param_dtype": "bfloat16"}}
    masters = programs_of(config_of(**model))["update"]
    trainer = {"trainer": {**BASE["trainer"], "rounding": "stochastic"}}
    stochastic = programs_of(config_of(**model, **trainer))["update"]
    assert wide(plain["update"]) == wide(masters), "masters in place of weights"
    assert wide(masters) == wide(stochastic) + leaves


@pytest.mark.full
def test_masks_that_are_kept_come_out_of_the_decode_block(plain):
    sampler = BASE["sampler"] | {"top_k": 5}
    keeps = config_of(algorithm=BASE["algorithm"] | {"keep_sampling_mask": True}, sampler=sampler)

    def results(program: Lowered) -> int:
        return len(jax.tree.leaves(program.program.out_info))

    assert results(programs_of(keeps)["decode"]) == results(plain["decode"]) + 2


@pytest.mark.full
def test_experts_that_are_replayed_come_out_of_the_sampler_and_into_the_gradient():
    experts = {"family": "qwen3_moe", "experts": 4, "experts_per_token": 2}
    model = {"architecture": BASE["model"]["architecture"] | experts}
    freely = programs_of(config_of(model=model))
    replayed = programs_of(config_of(model=model, algorithm={"keep_routing": True}))
    found, before = arguments(replayed["gradient"]), arguments(freely["gradient"])
    assert sorted(found) == sorted([*before, "int8[4, 160, 2, 2]"])
    for name in ("prefill", "decode"):
        told, silent = (jax.tree.leaves(p[name].program.out_info) for p in (replayed, freely))
        assert len(told) == len(silent) + 1 and {str(x.dtype) for x in told} >= {"int8"}


@pytest.mark.full
def test_a_prefill_counts_the_tokens_that_it_was_compiled_for():
    config = config_of()
    found, held = lowered(config, lowering.spec_of(config), placement_on_cpu(config))
    assert held.chunk_tokens > config.sampler.prefill_chunk
    prefill = next(one for one in found if one.name == "prefill")
    assert f"int32[{held.chunk_tokens}]" in arguments(prefill)


@pytest.mark.parametrize(("tensor", "devices"), [(2, 2), (3, 1)])
def test_a_prefill_on_the_pages_computes_each_query_with_the_tokens_up_to_its_own(tensor, devices):
    """Two products of 128 columns for each head that a device has."""
    config = config_of(sampler={"attention": "ragged"}, mesh={"sampler": {"tensor": tensor}})
    spec = lowering.spec_of(config)
    mesh = AbstractMesh((tensor,), ("tensor",))
    engine = EngineSpec(
        model=spec,
        slots=2,
        max_length=160,
        pages=10,
        mesh=mesh,
        ragged=True,
        on_tpu=True,
        samples_by_kernel=False,
    )
    kernel = lowering.prefill_kernel(config, engine, 300)
    seen = sum(position + 1 for position in range(100)) * 3  # of three prompts
    assert kernel.flops == pytest.approx(2 * 2 * seen * (4 / devices) * 128 * 2)
    assert (kernel.times, kernel.length, kernel.width) == (2, 100, 128)
    assert lowering.prefill_kernel(config, replace(engine, ragged=False), 300) is None


@pytest.mark.parametrize(("platform", "columns"), [("tpu", 128 + 128), ("gpu", 30 + 30)])
def test_a_prefill_of_latent_attention_counts_the_columns_of_its_one_head(platform, columns):
    """A rank of 24 and 6 numbers that turn, for each of 4 heads, in 2 layers."""
    spec = tiny_spec(64, family="deepseek_v3", layers=2, experts=4, kv_heads=4, head_dim=12)
    config = config_of()
    place = {"ragged": True, f"on_{platform}": True, "samples_by_kernel": False}
    engine = EngineSpec(model=spec, slots=2, max_length=160, pages=10, **place)
    kernel = lowering.prefill_kernel(config, engine, 300)
    seen = 3 * sum(position + 1 for position in range(100))
    assert kernel.flops == pytest.approx(2 * seen * spec.heads * columns * 2)
    assert kernel.width == columns // 2


def test_on_a_tpu_a_token_in_the_pages_costs_kimi_k2_640_and_512_columns_in_each_head():
    """64 heads on two devices, 61 layers: 576 numbers a token and their 512 of values, padded."""
    latent = Latent(rank=512, query_rank=1536, rotated=64, value=128)
    spec = replace(
        tiny_spec(64, family="deepseek_v3", layers=61, experts=4), heads=64, kv_heads=64,
        head_dim=192, latent=latent,
    )  # fmt: skip
    place = {"on_tpu": True, "samples_by_kernel": False, "mesh": AbstractMesh((2,), ("tensor",))}
    engine = EngineSpec(model=spec, slots=2, max_length=160, pages=10, ragged=True, **place)
    kernel = lowering.pair_kernel(engine)
    assert kernel.flops == 2 * 61 * 32 * (640 + 512)
    assert (kernel.times, kernel.width) == (61, 640)
    assert lowering.pair_kernel(replace(engine, ragged=False)) is None


@pytest.mark.full
def test_a_plan_has_the_prefill_that_a_tpus_sampler_compiles():
    config = config_of(sampler={"attention": "ragged", "prefill_chunk": 300})
    found, held = lowered(config, lowering.spec_of(config), placement_on_cpu(config))
    prefill = next(one for one in found if one.name == "prefill")
    assert held.chunk_tokens == 300 and held.prefill_kernel is not None
    assert len(jax.tree.leaves(prefill.program.out_info)) == 1 + 2, "logits, and each layer's pages"


@pytest.mark.full
@pytest.mark.parametrize("dtype", [None, "int8"])
def test_an_adapter_alone_is_trained_and_sent_beside_its_base(plain, dtype):
    lora = {**BASE["model"], "lora": {"rank": 4, "dropout": 0.1}}
    config = config_of(model=lora, weights={"dtype": dtype})
    found, held = lowered(config, lowering.spec_of(config), placement_on_cpu(config))
    programs = {one.name: one for one in found}
    base = len(jax.tree.leaves(weight_table(lowering.spec_of(config))))
    adapter = len(jax.tree.leaves(held.sent))
    columns = len(arguments(plain["gradient"])) - 2 * base
    noise = 2  # numbers of update and micro-batch
    assert len(arguments(programs["gradient"])) == base + 2 * adapter + columns + noise
    assert len(arguments(programs["cast"])) == adapter
    assert all("lora" in jax.tree_util.keystr(p) for p, _ in jax.tree.leaves_with_path(held.sent))
    assert len(arguments(programs["prepare"])) == len(jax.tree.leaves(held.weights)) > adapter
    whole = {str(x.dtype) for x in jax.tree.leaves(held.weights)}
    assert ("int8" in whole) == (dtype == "int8")


# ---- what is refused


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"run": {"job": "sft"}}, "run.job=sft has no samplers. Set run.job=rl"),
        ({"teacher": {"source": "self", "form": "loss"}}, "Set teacher.form=advantage"),
    ],
)
def test_a_run_that_no_plan_is_made_of_is_refused(sections, message):
    config = schema.Config.model_validate(BASE | sections)
    with pytest.raises(ConfigError) as error:
        check(config)
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("generation", "trainer", "sampler", "said"),
    [
        ("v5e", {"fsdp": 4}, {"tensor": 2}, "mesh.sampler has 2 devices .* v5e-1 or v5e-4"),
        ("v6e", {"fsdp": 4}, {"tensor": 3}, "mesh.sampler has 3 devices .* power of two"),
        ("tpu7x", {"fsdp": 8}, {}, "mesh.sampler has 1 devices .* a tpu7x chip is 2"),
    ],
)
def test_a_sampler_that_is_no_slice_is_refused_with_what_was_asked(
    generation, trainer, sampler, said
):
    section = schema.MeshSection(
        samplers_in="external",
        trainer=schema.AxesSection(**trainer),
        sampler=schema.AxesSection(**sampler),
    )
    count = CHIPS[generation].devices * 4 // section.sampler.num_devices or 1
    section = section.model_copy(update={"samplers": count})
    chips = count * section.sampler.num_devices // CHIPS[generation].devices
    config = config_of().model_copy(update={"mesh": section})
    with pytest.raises(ConfigError, match=said):
        place_on_chips(config, parse_slice(f"{generation}-4"), (CHIPS[generation], chips))


@pytest.mark.full
def test_two_programs_of_other_devices_have_keys_of_their_own(plain):
    """The text is the same; the topology is not."""
    from jaxrl_async.plan.compiled import key_of

    one = plain["cast"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("jaxrl_async.plan.compiled.version", lambda name: "1")
        assert key_of(one) == key_of(replace(one))
        assert key_of(one) != key_of(replace(one, slice=parse_slice("v6e-4")))
