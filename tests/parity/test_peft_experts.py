"""Adapters of experts, which transformers holds in one tensor a layer: PEFT's target_parameters,
read and written."""

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from whole_rows import row_states

from jaxrl_async.config import schema
from jaxrl_async.config.lora_section import LoraSection
from jaxrl_async.errors import CheckpointError
from jaxrl_async.mesh import TRAINER_RULES, make_mesh, shardings
from jaxrl_async.model.decoder import init_params, output_head
from jaxrl_async.model.lora import Lora, adapter_table, lora_of
from jaxrl_async.model.peft import load_peft
from jaxrl_async.model.peft_experts import as_filed, from_filed
from jaxrl_async.model.policy import Policy
from jaxrl_async.model.spec import ModelSpec, Weight

pytestmark = [
    pytest.mark.full,
    pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing.*:FutureWarning"),
    # PEFT compares patterns with modules alone, and applies them to parameters, too
    pytest.mark.filterwarnings("ignore:.*rank_pattern keys did not match.*:RuntimeWarning"),
    pytest.mark.filterwarnings("ignore:.*alpha_pattern keys did not match.*:RuntimeWarning"),
]
torch = pytest.importorskip("torch")
peft = pytest.importorskip("peft")
transformers = pytest.importorskip("transformers")


def spec_of(family: str, **sizes) -> ModelSpec:
    section = schema.ArchitectureSection(
        family=family, layers=sizes.pop("layers", 2), width=32, heads=4, kv_heads=2, head_dim=8,
        mlp=16, experts=4, tied=False, **sizes,
    )  # fmt: skip
    return ModelSpec.from_architecture(section, 64)


SPEC = spec_of("gpt_oss", window=7)
ONE_BY_ONE = {
    "qwen2_moe": spec_of("qwen2_moe"),
    "glm4_moe": spec_of("glm4_moe"),
    "deepseek_v3": spec_of("deepseek_v3"),
    "qwen3_5_moe_text": dataclasses.replace(  # see tests/parity/test_families.DELTA
        spec_of("qwen3_5_moe_text", layers=4), norm_eps=1e-3
    ),
    "mixtral": spec_of("mixtral"),
}
"""Files hold experts one by one; beside them are experts that all tokens use, dense layers, or
nothing."""
IDS = np.random.default_rng(0).integers(0, 64, (2, 12)).astype(np.int32)
TENSORS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]


def random_like(tree, scale: float = 0.1):
    keys = iter(jax.random.split(jax.random.key(1), 200))
    return jax.tree.map(lambda x: x + scale * jax.random.normal(next(keys), x.shape), tree)


def base(folder: Path, spec: ModelSpec = SPEC) -> Policy:
    policy = Policy(spec, random_like(init_params(spec, jax.random.key(0)), 0.2))
    policy.save_pretrained(folder)
    return policy


def theirs(model) -> np.ndarray:
    with torch.no_grad():
        return model(torch.tensor(IDS, dtype=torch.long)).logits.numpy()


def ours(policy: Policy) -> np.ndarray:
    rows = (jnp.asarray(IDS), jnp.tile(jnp.arange(12), (2, 1)), jnp.ones_like(IDS))
    hidden = row_states(policy.spec, policy.whole, *rows)
    return np.asarray(hidden @ output_head(policy.spec, policy.params))


def their_model(folder: Path):
    auto = transformers.AutoModelForCausalLM
    return auto.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()


def test_an_adapter_in_files_is_the_one_that_was_written() -> None:
    lora = lora_of(SPEC, LoraSection(rank=3))
    assert isinstance(lora, Lora)
    rng = np.random.default_rng(0)
    adapter = jax.tree.map(
        lambda w: rng.normal(size=w.shape).astype(np.float32),
        adapter_table(SPEC, lora),
        is_leaf=lambda w: isinstance(w, Weight),
    )
    filed = as_filed(SPEC, lora, adapter)
    assert filed["layers"]["gate_lora_a"].shape == (2, 32, 4 * 6)
    assert filed["layers"]["gate_lora_b"].shape == (2, 6 * 4, 32)
    jax.tree.map(np.testing.assert_array_equal, from_filed(SPEC, lora, filed), adapter)


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "section",
    [
        LoraSection(rank=3, dropout=0.1),
        LoraSection(rank=2, rslora=True, targets=("down_proj", "v_proj")),
        LoraSection(rank=2, targets=("gate_proj", "up_proj")),
    ],
    ids=["all", "some", "experts alone"],
)
def test_peft_computes_with_the_experts_that_are_written_here(tmp_path: Path, section) -> None:
    policy = base(tmp_path / "base")
    lora = lora_of(SPEC, section)
    policy = policy.adapted(lora, jax.random.key(0))
    policy = policy.with_trained(random_like(policy.adapter))
    policy.save_adapter(tmp_path / "adapter", str(tmp_path / "base"))
    adapted = peft.PeftModel.from_pretrained(their_model(tmp_path / "base"), tmp_path / "adapter")
    assert np.abs(theirs(their_model(tmp_path / "base")) - ours(policy)).max() > 0.1
    np.testing.assert_allclose(theirs(adapted.eval()), ours(policy), atol=1e-4)
    mesh = make_mesh(schema.AxesSection(fsdp=2, expert=2, tensor=2), jax.devices()[:8])
    again, read = load_peft(
        tmp_path / "adapter", SPEC, lambda table: shardings(table, mesh, TRAINER_RULES)
    )
    assert again == dataclasses.replace(lora, dropout=0.0)
    jax.tree.map(np.testing.assert_array_equal, read, policy.adapter)


def assert_reads_what_peft_wrote(
    folder: Path, tensors: Sequence[str], spec: ModelSpec = SPEC
) -> None:
    """An adapter that PEFT made of these tensors computes here what it does there."""
    base(folder / "base", spec)
    config = peft.LoraConfig(
        task_type="CAUSAL_LM", r=3, lora_alpha=9, target_modules=["q_proj", "o_proj"],
        target_parameters=tensors,
    )  # fmt: skip
    adapted = peft.get_peft_model(their_model(folder / "base"), config)
    for name, weight in adapted.named_parameters():
        if "lora_" in name:
            weight.data.normal_(0, 0.1, generator=torch.Generator().manual_seed(len(name)))
    adapted.eval().save_pretrained(folder / "adapter")
    policy = Policy.from_pretrained(folder / "base", adapter=folder / "adapter")
    wanted = theirs(adapted)
    assert np.abs(wanted - ours(Policy.from_pretrained(folder / "base"))).max() > 0.1
    np.testing.assert_allclose(ours(policy), wanted, atol=1e-4)


@pytest.mark.exhaustive
@pytest.mark.parametrize("tensors", [TENSORS, TENSORS[:1]], ids=["both", "one"])
def test_what_peft_wrote_of_experts_computes_the_same_here(tmp_path: Path, tensors) -> None:
    assert_reads_what_peft_wrote(tmp_path, tensors)
    file = tmp_path / "adapter" / "adapter_config.json"
    said = json.loads(file.read_text())
    file.write_text(json.dumps(said | {"target_parameters": ["self_attn.sinks"]}))
    with pytest.raises(CheckpointError, match=r"target_parameters .*sinks.* is not supported"):
        load_peft(tmp_path / "adapter", SPEC)


@pytest.mark.exhaustive
@pytest.mark.parametrize("family", ONE_BY_ONE)
def test_peft_reads_adapters_of_experts_beside_other_modules_of_their_names(
    tmp_path: Path, family: str
) -> None:
    spec = ONE_BY_ONE[family]
    policy = base(tmp_path / "base", spec)
    lora = lora_of(spec, LoraSection(rank=3))
    policy = policy.adapted(lora, jax.random.key(0))
    policy = policy.with_trained(random_like(policy.adapter))
    policy.save_adapter(tmp_path / "adapter", str(tmp_path / "base"))
    adapted = peft.PeftModel.from_pretrained(their_model(tmp_path / "base"), tmp_path / "adapter")
    assert np.abs(theirs(their_model(tmp_path / "base")) - ours(policy)).max() > 0.1
    np.testing.assert_allclose(theirs(adapted.eval()), ours(policy), atol=1e-4)
    again, read = load_peft(tmp_path / "adapter", spec)
    assert again == lora
    jax.tree.map(np.testing.assert_array_equal, read, policy.adapter)


@pytest.mark.exhaustive
@pytest.mark.parametrize("family", ["qwen2_moe", "qwen3_5_moe_text"])
def test_what_peft_wrote_of_experts_that_files_hold_one_by_one_computes_the_same_here(
    tmp_path: Path, family: str
) -> None:
    """In one tensor a layer, and an expert that all tokens use as a parameter."""
    tensors = [*TENSORS, "shared_expert.up_proj.weight"]
    assert_reads_what_peft_wrote(tmp_path, tensors, ONE_BY_ONE[family])
