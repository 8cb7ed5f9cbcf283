"""Models in GGUF files, in the conventions of llama.cpp's converter, against transformers."""

from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from whole_rows import row_states

gguf = pytest.importorskip("gguf", reason="the extra [gguf] is not installed")
from gguf_models import VOCAB, write_gguf  # noqa: E402

from jaxrl_async.errors import CheckpointError  # noqa: E402
from jaxrl_async.model.decoder import output_head  # noqa: E402
from jaxrl_async.model.logprobs import logits_of  # noqa: E402
from jaxrl_async.model.policy import Policy  # noqa: E402

pytestmark = pytest.mark.full

torch = pytest.importorskip("torch", reason="parity needs torch (extra [dev])")
transformers = pytest.importorskip("transformers", reason="parity needs transformers")

LENGTH = 40
COMMON = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "pad_token_id": 2,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 5e5,
    "factor": 32.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 1e4,
    "factor": 4.0,
    "original_max_position_embeddings": 16,
}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", {"tie_word_embeddings": True, "attention_bias": True}),
    "llama3": ("LlamaConfig", {"head_dim": 32, "rope_parameters": LLAMA3}),
    "mistral": ("MistralConfig", {"sliding_window": None, "head_dim": 32}),
    "mixtral": (
        "MixtralConfig",
        {"sliding_window": None, "num_local_experts": 4, "num_experts_per_tok": 2},
    ),
    "qwen2": ("Qwen2Config", {"rope_parameters": YARN}),
    "qwen2_moe": ("Qwen2MoeConfig", {**EXPERTS, "shared_expert_intermediate_size": 40}),
    "qwen3": ("Qwen3Config", {"head_dim": 32, "tie_word_embeddings": True}),
    "qwen3_moe": ("Qwen3MoeConfig", {**EXPERTS, "head_dim": 32, "norm_topk_prob": True}),
    "gemma2": (
        "Gemma2Config",
        {
            "head_dim": 24,
            "query_pre_attn_scalar": 24,
            "sliding_window": 7,
            "attn_logit_softcapping": 2.0,
            "final_logit_softcapping": 3.0,
        },
    ),
    "gemma3": (
        "Gemma3TextConfig",
        {
            "num_hidden_layers": 7,
            "head_dim": 24,
            "query_pre_attn_scalar": 24,
            "sliding_window": 7,
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            },
        },
    ),
    "phi3": (
        "Phi3Config",
        {
            "sliding_window": 9,
            "partial_rotary_factor": 0.5,
            "original_max_position_embeddings": 512,
        },
    ),
    "phi3-long": (
        "Phi3Config",
        {
            "original_max_position_embeddings": 64,
            "rope_parameters": {
                "rope_type": "longrope",
                "rope_theta": 1e4,
                "short_factor": [1.1, 1.2, 1.3, 1.4],
                "long_factor": [2.0, 3.0, 4.0, 5.0],
                "partial_rotary_factor": 0.5,
            },
        },
    ),
    "olmo2": ("Olmo2Config", {}),
    "olmo3": ("Olmo3Config", {"sliding_window": 7}),
    "smollm3": ("SmolLM3Config", {"num_hidden_layers": 5}),
    "granite": (
        "GraniteConfig",
        {
            "embedding_multiplier": 3.0,
            "logits_scaling": 2.5,
            "residual_multiplier": 0.4,
            "attention_multiplier": 0.2,
        },
    ),
}
EACH_TIME = {"llama", "gemma3", "mixtral"}
"""Rows in another order; norms plus 1, and what is not in the file; experts in one tensor."""


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def made(name: str) -> Any:
    """A random model of the family, every weight moved off its initial value."""
    torch.manual_seed(0)
    config, more = MODELS[name]
    chosen = getattr(transformers, config)(**{**COMMON, **more})
    chosen._attn_implementation = "eager"  # the only one with Gemma 2's cap
    model = transformers.AutoModelForCausalLM.from_config(chosen).float().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.2 * torch.randn_like(parameter)
    return model


def tokens() -> np.ndarray:
    return np.random.default_rng(1).integers(3, VOCAB, (2, LENGTH)).astype(np.int32)


def theirs(model: Any) -> np.ndarray:
    with torch.no_grad():
        logits = model(torch.tensor(tokens(), dtype=torch.long)).logits
    return torch.log_softmax(logits.float(), -1).numpy()


def ours(policy: Policy) -> np.ndarray:
    ids = tokens()
    positions = np.broadcast_to(np.arange(ids.shape[1]), ids.shape)
    hidden = row_states(policy.spec, policy.params, ids, positions, np.ones_like(ids))
    head = output_head(policy.spec, policy.params)
    return np.asarray(jax.nn.log_softmax(logits_of(hidden, head, policy.spec.scales)))


def test_every_architecture_that_is_read_is_tested_here() -> None:
    from gguf_models import ARCHITECTURES as WRITTEN

    from jaxrl_async.data.gguf_config import ARCHITECTURES

    types = {made_of.removesuffix("Config") for made_of, _ in MODELS.values()}
    kinds = {getattr(transformers, f"{name}Config").model_type for name in types}
    assert {WRITTEN.get(kind, kind) for kind in kinds} == set(ARCHITECTURES)


@pytest.mark.parametrize(
    "name",
    [n if n in EACH_TIME else pytest.param(n, marks=pytest.mark.exhaustive) for n in MODELS],
)
def test_logprobs_agree_with_the_model_that_was_written(name: str, tmp_path: Path) -> None:
    """And what we save of it transformers loads, with the same logits."""
    model = made(name)
    policy = Policy.from_pretrained(write_gguf(tmp_path / "model.gguf", model))
    np.testing.assert_allclose(ours(policy), theirs(model), atol=1e-4, rtol=0)
    policy.save_pretrained(tmp_path / "saved")
    again, report = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "saved",
        dtype=torch.float32,
        output_loading_info=True,
        attn_implementation="eager",
    )
    assert type(again) is type(model) or name == "mistral", "whose files are called llama"
    assert not report["missing_keys"] and not report["unexpected_keys"]
    np.testing.assert_allclose(theirs(again.eval()), theirs(model), atol=2e-5, rtol=0)


def test_an_architecture_that_is_not_read_is_named_with_what_to_do(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "model.gguf", "mamba")
    writer.add_tensor("token_embd.weight", np.zeros((4, 4), np.float32))
    for step in ("write_header_to_file", "write_kv_data_to_file", "write_tensors_to_file", "close"):
        getattr(writer, step)()
    with pytest.raises(CheckpointError, match=r"'mamba' are not supported, only llama.+directory"):
        Policy.from_pretrained(tmp_path / "model.gguf")
