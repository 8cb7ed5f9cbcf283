"""Adapters of latent attention against PEFT, both ways."""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from whole_rows import row_states

from jaxrl_async.config.lora_section import LoraSection
from jaxrl_async.model.decoder import output_head
from jaxrl_async.model.logprobs import logits_of
from jaxrl_async.model.lora import lora_of
from jaxrl_async.model.peft import load_peft, save_peft
from jaxrl_async.model.policy import Policy

pytestmark = [
    pytest.mark.exhaustive,
    pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing.*:FutureWarning"),  # of PEFT
]
torch = pytest.importorskip("torch", reason="parity needs torch (extra [dev])")
transformers = pytest.importorskip("transformers", reason="parity needs transformers")
peft = pytest.importorskip("peft")

TARGETS = ["q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj"]
IDS = np.random.default_rng(1).integers(3, 96, (2, 24)).astype(np.int32)


@pytest.fixture
def base(tmp_path: Path):
    torch.manual_seed(0)
    config = transformers.DeepseekV3Config(
        vocab_size=96, hidden_size=32, intermediate_size=48, moe_intermediate_size=24,
        num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=4, n_routed_experts=8,
        num_experts_per_tok=3, n_group=2, topk_group=1, first_k_dense_replace=1, kv_lora_rank=20,
        q_lora_rank=24, qk_nope_head_dim=12, qk_rope_head_dim=8, v_head_dim=10,
        max_position_embeddings=64,
    )  # fmt: skip
    model = transformers.AutoModelForCausalLM.from_config(config).float().eval()
    model.save_pretrained(tmp_path / "base")
    return model, tmp_path / "base"


def theirs(model) -> np.ndarray:
    with torch.no_grad():
        return model(torch.tensor(IDS, dtype=torch.long)).logits.numpy()


def ours(policy: Policy) -> np.ndarray:
    positions = np.broadcast_to(np.arange(IDS.shape[1]), IDS.shape)
    hidden = row_states(policy.spec, policy.whole, IDS, positions, np.ones_like(IDS))
    head = output_head(policy.spec, policy.whole)
    return np.asarray(logits_of(hidden, head, policy.spec.scales))


def test_what_peft_wrote_computes_the_same_here(base, tmp_path: Path) -> None:
    model, folder = base
    before = theirs(model)
    config = peft.LoraConfig(task_type="CAUSAL_LM", r=4, lora_alpha=16, target_modules=TARGETS)
    adapted = peft.get_peft_model(model, config)
    for name, weight in adapted.named_parameters():
        if "lora_" in name:
            weight.data.normal_(0, 0.1, generator=torch.Generator().manual_seed(len(name)))
    adapted.eval().save_pretrained(tmp_path / "adapter")
    policy = Policy.from_pretrained(folder, adapter=tmp_path / "adapter")
    assert np.abs(theirs(adapted) - before).max() > 0.01
    np.testing.assert_allclose(ours(policy), theirs(adapted), atol=1e-5)


def test_peft_reads_what_is_written_here(base, tmp_path: Path) -> None:
    model, folder = base
    policy = Policy.from_pretrained(folder)
    lora = lora_of(policy.spec, LoraSection(rank=4, targets=tuple(TARGETS)))
    assert lora.names == ("q_a", "q_b", "kv_a", "kv_b", "o")
    policy = policy.adapted(lora, jax.random.key(0))
    grown = jax.tree.map(
        lambda x: x + 0.1 * jax.random.normal(jax.random.key(x.size), x.shape, jnp.float32),
        policy.adapter,
    )
    policy = policy.with_trained(grown)
    save_peft(tmp_path / "adapter", policy.spec, lora, policy.adapter, str(folder))
    adapted = peft.PeftModel.from_pretrained(model, tmp_path / "adapter").eval()
    np.testing.assert_allclose(theirs(adapted), ours(policy), atol=1e-5)
    again, adapter = load_peft(tmp_path / "adapter", policy.spec)
    assert again == lora
    jax.tree.map(np.testing.assert_array_equal, adapter, policy.adapter)
