"""A frozen base from a GGUF file: its own blocks of 4 bits, kept to the last bit."""

from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from builders import mesh_of
from whole_rows import logprobs_of

gguf = pytest.importorskip("gguf", reason="the extra [gguf] is not installed")
torch = pytest.importorskip("torch", reason="the models are made with torch (extra [dev])")
transformers = pytest.importorskip("transformers")
from gguf_models import VOCAB, tiny_llama, write_gguf  # noqa: E402

from jaxrl_async.data.gguf_file import GgufTensor  # noqa: E402
from jaxrl_async.model.four_bits import unpack_codes  # noqa: E402
from jaxrl_async.model.frozen_base import BaseForm, restored_params  # noqa: E402
from jaxrl_async.model.gguf_blocks import kept_blocks  # noqa: E402
from jaxrl_async.model.gguf_tensors import GgufPart  # noqa: E402
from jaxrl_async.model.policy import Policy  # noqa: E402

pytestmark = pytest.mark.full

IDS = np.random.default_rng(3).integers(3, VOCAB, 24).astype(np.int32)


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def phi3() -> Any:
    """Files join queries, keys and values, and gate and up."""
    torch.manual_seed(0)
    config = transformers.Phi3Config(
        vocab_size=VOCAB, hidden_size=64, intermediate_size=96, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=1, pad_token_id=2, bos_token_id=1,
        eos_token_id=2, original_max_position_embeddings=512, max_position_embeddings=512,
    )  # fmt: skip
    return transformers.AutoModelForCausalLM.from_config(config).float()


def experts() -> Any:
    torch.manual_seed(0)
    config = transformers.Qwen3MoeConfig(
        vocab_size=VOCAB, hidden_size=64, intermediate_size=64, moe_intermediate_size=32,
        num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1, head_dim=32,
        num_experts=4, num_experts_per_tok=2, norm_topk_prob=True,
    )  # fmt: skip
    return transformers.AutoModelForCausalLM.from_config(config).float()


def written(path: Path, model: Any, kind: str) -> Path:
    """Write the layers' matrices in a type, the others in float32."""

    def chosen(name: str, numbers: np.ndarray) -> str:
        return kind if name.startswith("blk.") and "gate_inp" not in name else "F32"

    return write_gguf(path, model, chosen)


@pytest.mark.parametrize(
    "make, kind, form",
    [
        (tiny_llama, "Q4_0", "int4"),
        (tiny_llama, "Q4_0", "q4_1"),
        (tiny_llama, "Q4_1", "q4_1"),
        (phi3, "Q4_1", "q4_1"),
        (experts, "Q4_1", "q4_1"),
    ],
)
def test_a_base_in_the_files_own_blocks_stands_for_the_same_numbers(make, kind, form, tmp_path):
    file = written(tmp_path / "model.gguf", make(), kind)
    whole = Policy.from_pretrained(file)
    kept = Policy.from_pretrained(file, form=BaseForm(kind=form, group=32), mesh=mesh_of(tensor=2))
    assert kept.params["layers"]["down"].dtype == np.uint8
    jax.tree.map(
        np.testing.assert_array_equal, restored_params(kept.spec, kept.params), whole.params
    )
    one = Policy.from_pretrained(file, form=BaseForm(kind=form, group=32))
    wanted = logprobs_of(whole.spec, whole.params, IDS)
    np.testing.assert_allclose(logprobs_of(one.spec, one.params, IDS), wanted, atol=1e-4)


@pytest.mark.parametrize("form, group", [("int4", 32), ("q4_1", 16), ("nf4", 32), ("int8", 32)])
def test_blocks_of_another_form_are_rounded(form, group, tmp_path):
    file = written(tmp_path / "model.gguf", tiny_llama(), "Q4_1")
    whole = Policy.from_pretrained(file)
    base = Policy.from_pretrained(file, form=BaseForm(kind=form, group=group))
    restored = restored_params(base.spec, base.params)["layers"]["down"]
    exact = whole.params["layers"]["down"]
    assert 0 < np.abs(np.asarray(restored - exact)).max() < 0.2 * np.abs(exact).max()


def test_blocks_of_q4_k_are_kept_as_gguf_reads_them():
    """Of random bytes with scales that are numbers, against gguf's own reading."""
    made = np.random.default_rng(0).integers(0, 256, (6, 2, 144), dtype=np.uint8)
    made[..., :4] = (
        np.random.default_rng(1).uniform(0.01, 1, (6, 2, 2)).astype(np.float16).view("u1")
    )
    data = made.reshape(6, -1)
    part = GgufPart(tensor=GgufTensor(kind="Q4_K", shape=(6, 512), data=data), shape=(6, 512))
    packed, scales = kept_blocks(part, slice(1, 5), "q4_1")
    wanted = gguf.dequantize(data, gguf.GGMLQuantizationType.Q4_K)[1:5].T
    np.testing.assert_allclose(unpack_codes(packed, scales, "q4_1"), wanted, rtol=1e-6, atol=1e-6)
    assert kept_blocks(part, slice(None), "int4") is None
