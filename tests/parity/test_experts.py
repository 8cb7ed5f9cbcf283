"""Families with experts: files in MXFP4, replayed routes, adapters, 8 and 4 bits."""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from builders import tiny_params
from whole_rows import row_logprobs

from jaxrl_async.config import schema
from jaxrl_async.config.lora_section import LoraSection
from jaxrl_async.errors import CheckpointError
from jaxrl_async.model.decoder import TokenRows
from jaxrl_async.model.frozen_base import BaseForm, base_table, quantized_base, restored_params
from jaxrl_async.model.hf import load_params, save_params
from jaxrl_async.model.lora import joined, lora_of, merged
from jaxrl_async.model.moe import gated, route
from jaxrl_async.model.mxfp4 import mxfp4_numbers
from jaxrl_async.model.peft import load_peft, save_peft
from jaxrl_async.model.policy import Policy
from jaxrl_async.model.spec import ModelSpec, weight_table
from jaxrl_async.sampler.sampler import Sampler
from jaxrl_async.sampler.setup import SamplerSettings
from jaxrl_async.types import Request

pytestmark = pytest.mark.full

torch = pytest.importorskip("torch", reason="parity needs torch (extra [dev])")
transformers = pytest.importorskip("transformers", reason="parity needs transformers")

VOCAB = 64
SIZES = {"layers": 3, "width": 32, "heads": 4, "kv_heads": 2, "head_dim": 16, "mlp": 32}
ROUTED = ["gpt_oss", "glm4_moe", "qwen2_moe"]
FAMILY = pytest.mark.parametrize("family", ROUTED)


def spec_of(family: str, **more) -> ModelSpec:
    window = {"window": 7} if family == "gpt_oss" else {}
    section = schema.ArchitectureSection(
        family=family, experts=8, experts_per_token=2, **SIZES, **window, **more
    )
    return ModelSpec.from_architecture(section, VOCAB)


def moved(spec: ModelSpec):
    """Random weights, also of norms, biases, sinks and corrections."""
    return jax.tree.map(
        lambda w: w + 0.1 * jax.random.normal(jax.random.key(w.size), w.shape), tiny_params(spec)
    )


def logprobs(spec: ModelSpec, params, ids: np.ndarray, expert_ids=None) -> np.ndarray:
    rows = TokenRows(
        jnp.asarray(ids)[None], jnp.arange(len(ids))[None], jnp.ones((1, len(ids)), jnp.int32)
    )
    rows = rows._replace(expert_ids=None if expert_ids is None else jnp.asarray(expert_ids)[None])
    return np.asarray(row_logprobs(spec, params, rows))[0]


IDS = np.random.default_rng(3).integers(3, VOCAB, 30).astype(np.int32)


def test_numbers_in_mxfp4_are_those_of_transformers() -> None:
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    rng = np.random.default_rng(0)
    blocks = rng.integers(0, 256, (2, 6, 3, 16)).astype(np.uint8)
    scales = rng.integers(100, 140, (2, 6, 3)).astype(np.uint8)
    wanted = convert_moe_packed_tensors(torch.tensor(blocks), torch.tensor(scales)).float().numpy()
    np.testing.assert_array_equal(np.swapaxes(mxfp4_numbers(blocks, scales), 1, 2), wanted)
    assert np.isnan(mxfp4_numbers(blocks, np.full_like(scales, 255))).all()


def test_clamped_activations_are_those_of_gpt_oss() -> None:
    config = transformers.GptOssConfig(hidden_size=4, intermediate_size=4, num_local_experts=1)
    layer = transformers.models.gpt_oss.modeling_gpt_oss.GptOssExperts(config)
    both = np.random.default_rng(0).normal(0, 8, (50, 8)).astype(np.float32)
    wanted = layer._apply_gate(torch.tensor(both)).numpy()
    got = gated("clamped_silu", jnp.asarray(both[:, ::2]), jnp.asarray(both[:, 1::2]))
    np.testing.assert_allclose(got, wanted, rtol=1e-5, atol=1e-5)


def test_a_correction_chooses_and_does_not_weigh() -> None:
    router = spec_of("glm4_moe").router
    logits = jnp.asarray([[2.0, 1.0, 0.0, -1.0]])
    correction = jnp.asarray([0.0, 0.0, 0.0, 5.0])

    def weights(logits, correction):
        ids, share = route(logits, 2, router=router, correction=correction)
        return share[:, 0].sum(), (ids, share)

    gradient, (ids, share) = jax.grad(weights, (0, 1), has_aux=True)(logits, correction)
    odds = 1 / (1 + np.exp([1.0, -2.0]))
    assert ids.tolist() == [[3, 0]]
    np.testing.assert_allclose(share[0], odds / odds.sum(), rtol=1e-5)
    assert np.any(gradient[0]) and not np.any(gradient[1])


def in_mxfp4(folder: Path) -> None:
    """Store the experts of a directory in MXFP4, rounded to what that holds."""
    from safetensors.numpy import load_file, save_file

    tensors = load_file(folder / "model.safetensors")
    rng = np.random.default_rng(5)
    for name in [n for n in tensors if n.endswith(("gate_up_proj", "down_proj"))]:
        experts, inputs, outputs = tensors.pop(name).shape
        shape = (experts, outputs, inputs // 32)
        tensors[name + "_blocks"] = rng.integers(0, 256, (*shape, 16)).astype(np.uint8)
        tensors[name + "_scales"] = rng.integers(122, 126, shape).astype(np.uint8)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


@pytest.mark.exhaustive
def test_a_directory_in_mxfp4_is_read_as_its_numbers(tmp_path: Path) -> None:
    from safetensors.numpy import load_file, save_file
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    spec = spec_of("gpt_oss", tied=False)
    save_params(tmp_path, spec, moved(spec))
    in_mxfp4(tmp_path)
    params = load_params(tmp_path, spec)
    stored = load_file(tmp_path / "model.safetensors")
    for layer in range(spec.layers):
        name = f"model.layers.{layer}.mlp.experts."
        whole = {
            part: convert_moe_packed_tensors(
                *(torch.tensor(stored[f"{name}{part}_{end}"]) for end in ("blocks", "scales"))
            )
            for part in ("gate_up_proj", "down_proj")
        }
        both = whole["gate_up_proj"].float().numpy()
        ours = {n: np.asarray(params["layers"][n][layer]) for n in ("gate", "up", "down")}
        np.testing.assert_array_equal(ours["gate"], both[..., ::2])
        np.testing.assert_array_equal(ours["up"], both[..., 1::2])
        np.testing.assert_array_equal(ours["down"], whole["down_proj"].float().numpy())
    stored["model.layers.0.mlp.experts.down_proj_scales"] = np.zeros((8, 32, 2), np.uint8)
    save_file(stored, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=r"down_proj: its _blocks .* must be U8"):
        load_params(tmp_path, spec)


@pytest.mark.exhaustive
@FAMILY
def test_replayed_routes_give_the_samplers_log_probs(family) -> None:
    spec = spec_of(family)
    params = moved(spec)
    section = schema.SamplerSection(
        slots=2, max_length=48, max_new_tokens=16, block=4, page_tokens=8, prefill_chunk=8
    )
    with Sampler(
        Policy(spec, params), section=section, settings=SamplerSettings(keep_routing=True)
    ) as sampler:
        (done,) = sampler.generate([Request(request_id="r", token_ids=IDS[:20], max_new_tokens=16)])
    whole = np.concatenate([IDS[:20], done.token_ids])
    routes = np.concatenate([done.expert_ids, np.full_like(done.expert_ids[:1], -1)])
    replayed = logprobs(spec, params, whole, routes)
    np.testing.assert_allclose(done.logprobs, replayed[20:], atol=1e-5, rtol=0)
    other = np.where(routes >= 0, (routes + 1) % 8, routes)
    assert np.abs(logprobs(spec, params, whole, other) - replayed).max() > 1e-3


@pytest.mark.exhaustive
@FAMILY
def test_an_adapter_changes_experts_as_merged_weights_do(family, tmp_path: Path) -> None:
    spec = spec_of(family)
    base = moved(spec)
    policy = Policy(spec, base)
    lora = lora_of(spec, LoraSection(rank=4))
    policy = policy.adapted(lora, jax.random.key(0))
    adapter = jax.tree.map(
        lambda x: x + 0.05 * jax.random.normal(jax.random.key(x.size), x.shape), policy.adapter
    )
    beside = logprobs(spec, joined(lora, base, adapter), IDS)
    added = logprobs(spec, merged(spec, lora, base, adapter), IDS)
    np.testing.assert_allclose(beside, added, atol=1e-4)
    assert np.abs(beside - logprobs(spec, base, IDS)).max() > 0.01
    save_peft(tmp_path, spec, lora, adapter, None)
    again, loaded = load_peft(tmp_path, spec)
    assert again == lora
    jax.tree.map(np.testing.assert_array_equal, loaded, adapter)


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("family", "kind"), [("gpt_oss", "int8"), ("gpt_oss", "nf4"), ("glm4_moe", "int8")]
)
def test_a_quantised_base_computes_what_it_stands_for(family, kind) -> None:
    spec = spec_of(family)
    form, params = BaseForm(kind=kind, group=16), moved(spec)
    table = base_table(weight_table(spec), form)
    one = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    where = {n: dict.fromkeys(t, one) if isinstance(t, dict) else one for n, t in table.items()}
    base = quantized_base(spec, params, form, where)
    routed = "layers"
    assert base[routed]["gate"].dtype == (jnp.int8 if kind == "int8" else jnp.uint8)
    assert base[routed]["router"].dtype == jnp.float32
    stands_for = restored_params(spec, base)
    np.testing.assert_allclose(
        logprobs(spec, base, IDS), logprobs(spec, stands_for, IDS), atol=2e-4
    )
    assert np.abs(np.asarray(stands_for[routed]["gate"] - params[routed]["gate"])).max() < 0.3


@pytest.mark.exhaustive
def test_layers_that_predict_further_tokens_are_left_out(tmp_path: Path) -> None:
    from safetensors.numpy import load_file, save_file

    spec = spec_of("glm4_moe")
    params = moved(spec)
    save_params(tmp_path, spec, params)
    stored = load_file(tmp_path / "model.safetensors")
    stored[f"model.layers.{spec.layers}.eh_proj.weight"] = np.ones((2, 2), np.float32)
    save_file(stored, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=r"1 tensors not part of this model .*eh_proj"):
        load_params(tmp_path, spec)
    config = tmp_path / "config.json"
    said = config.read_text().replace(
        '"num_nextn_predict_layers": 0', '"num_nextn_predict_layers": 1'
    )
    config.write_text(said)
    jax.tree.map(np.testing.assert_array_equal, load_params(tmp_path, spec), params)
