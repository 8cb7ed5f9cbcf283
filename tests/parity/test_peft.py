"""Adapters that PEFT wrote draw here what they draw there, and the other way round."""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from whole_rows import row_states

from jaxrl_async.config.lora_section import LoraSection
from jaxrl_async.errors import JaxrlError
from jaxrl_async.model.decoder import output_head
from jaxrl_async.model.lora import lora_of
from jaxrl_async.model.peft import load_peft, save_peft
from jaxrl_async.model.policy import Policy

pytestmark = [
    pytest.mark.full,
    pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing.*:FutureWarning"),  # of PEFT
]
torch = pytest.importorskip("torch")
peft = pytest.importorskip("peft")
transformers = pytest.importorskip("transformers")

SIZES = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
}
IDS = np.random.default_rng(0).integers(0, 64, (2, 12)).astype(np.int32)
FAMILIES = {
    "llama": (transformers.LlamaConfig, transformers.LlamaForCausalLM),
    "qwen2": (transformers.Qwen2Config, transformers.Qwen2ForCausalLM),
    "qwen3": (transformers.Qwen3Config, transformers.Qwen3ForCausalLM),
}


def saved_model(family: str, folder: Path):
    config, model = FAMILIES[family]
    sizes = {k: v for k, v in SIZES.items() if family != "qwen2" or k != "head_dim"}
    torch.manual_seed(0)
    made = model(config(**sizes)).eval()
    made.save_pretrained(folder)
    return made


def theirs(model) -> np.ndarray:
    with torch.no_grad():
        return model(torch.tensor(IDS, dtype=torch.long)).logits.numpy()


def ours(policy: Policy) -> np.ndarray:
    rows = (jnp.asarray(IDS), jnp.tile(jnp.arange(12), (2, 1)), jnp.ones_like(IDS))
    hidden = row_states(policy.spec, policy.whole, *rows)
    return np.asarray(hidden @ output_head(policy.spec, policy.params))


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(
    "settings",
    [
        {"r": 4, "lora_alpha": 16, "target_modules": "all-linear"},
        {"r": 3, "lora_alpha": 5, "use_rslora": True, "target_modules": ["q_proj", "down_proj"]},
    ],
    ids=["all", "some"],
)
def test_what_peft_wrote_computes_the_same_here(tmp_path: Path, family: str, settings) -> None:
    model = saved_model(family, tmp_path / "base")
    adapted = peft.get_peft_model(model, peft.LoraConfig(task_type="CAUSAL_LM", **settings))
    for name, weight in adapted.named_parameters():
        if "lora_" in name:
            weight.data.normal_(0, 0.1, generator=torch.Generator().manual_seed(len(name)))
    adapted.eval().save_pretrained(tmp_path / "adapter")
    policy = Policy.from_pretrained(tmp_path / "base", adapter=tmp_path / "adapter")
    wanted = theirs(adapted)
    assert np.abs(wanted - ours(Policy.from_pretrained(tmp_path / "base"))).max() > 0.01
    np.testing.assert_allclose(ours(policy), wanted, atol=1e-5)
    np.testing.assert_allclose(ours(policy.merged()), wanted, atol=1e-5)
    policy.save_pretrained(tmp_path / "merged")
    merged = FAMILIES[family][1].from_pretrained(tmp_path / "merged").eval()
    np.testing.assert_allclose(theirs(merged), wanted, atol=1e-5)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(
    "section",
    [
        LoraSection(rank=4, dropout=0.1),
        LoraSection(rank=2, rslora=True, targets=("k_proj", "up_proj")),
    ],
    ids=["all", "some"],
)
def test_peft_reads_what_is_written_here(tmp_path: Path, family: str, section) -> None:
    saved_model(family, tmp_path / "base")
    policy = Policy.from_pretrained(tmp_path / "base")
    lora = lora_of(policy.spec, section)
    policy = policy.adapted(lora, jax.random.key(0))
    grown = jax.tree.map(
        lambda x: x + 0.1 * jax.random.normal(jax.random.key(x.size), x.shape), policy.adapter
    )
    policy = policy.with_trained(grown)
    save_peft(tmp_path / "adapter", policy.spec, lora, policy.adapter, str(tmp_path / "base"))
    model = FAMILIES[family][1].from_pretrained(tmp_path / "base")
    theirs_adapted = peft.PeftModel.from_pretrained(model, tmp_path / "adapter").eval()
    np.testing.assert_allclose(theirs(theirs_adapted), ours(policy), atol=1e-5)
    again, adapter = load_peft(tmp_path / "adapter", policy.spec)
    assert again == lora
    for name, array in policy.adapter["layers"].items():
        np.testing.assert_array_equal(adapter["layers"][name], array)


def test_an_adapter_of_another_kind_or_model_is_refused(tmp_path: Path) -> None:
    saved_model("qwen3", tmp_path / "base")
    policy = Policy.from_pretrained(tmp_path / "base")
    lora = lora_of(policy.spec, LoraSection(rank=4))
    adapter = policy.adapted(lora, jax.random.key(0)).adapter
    save_peft(tmp_path / "adapter", policy.spec, lora, adapter, None)
    file = tmp_path / "adapter" / "adapter_config.json"
    whole = file.read_text()
    for old, new, words in (
        ('"LORA"', '"IA3"', "IA3"),
        ('"r": 4', '"r": 8', "misshapen"),
        ('"r": 4', '"r": 4, "use_dora": true', "DoRA"),
        ('"r": 4', '"r": 4, "init_lora_weights": "pissa_niter_4"', "changed the base model"),
        ('"r": 4', '"r": 4, "alora_invocation_tokens": [3]', "begins within a sequence"),
        ('"r": 4', '"r": 70000', "rank: .* less than or equal"),
        ('"lora_alpha": 32.0', '"lora_alpha": Infinity', "alpha: .* finite"),
        ('"q_proj"', '"q_proj("', "not a regular expression"),
        ('"bias": "none"', '"bias": "all"', "bias"),
        ('"r": 4', '"r": 0', "above 0"),
        ('"lora_dropout": 0.0', '"lora_dropout": 1', "below 1"),
        ('"q_proj"', '"no_proj"', "adapter_config.json: target_modules .*no_proj"),
        ('"q_proj"', '"lm_head"', "adapter_config.json: target_modules .*lm_head"),
    ):
        assert old in whole
        file.write_text(whole.replace(old, new))
        with pytest.raises(JaxrlError, match=words):
            load_peft(tmp_path / "adapter", policy.spec)
