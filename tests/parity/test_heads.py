"""Critics and reward models against transformers' classes of one label, in both directions."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_async.config import schema
from jaxrl_async.errors import CheckpointError
from jaxrl_async.model.decoder import TokenRows, init_params
from jaxrl_async.model.heads import (
    HEAD,
    load_head,
    save_head,
    sequence_scores,
    token_values,
    with_head,
)
from jaxrl_async.model.hf import load_params
from jaxrl_async.model.spec import ModelSpec

pytestmark = pytest.mark.full

torch = pytest.importorskip("torch", reason="parity needs torch (extra [dev])")
transformers = pytest.importorskip("transformers", reason="parity needs transformers")

VOCAB, LENGTH = 40, 12
AUTO = {
    "value": transformers.AutoModelForTokenClassification,
    "reward": transformers.AutoModelForSequenceClassification,
}


def spec_of(family: str) -> ModelSpec:
    sizes = {"layers": 2, "width": 32, "heads": 4, "kv_heads": 2, "head_dim": 8, "mlp": 48}
    tied = family != "llama"
    return ModelSpec.from_architecture(
        schema.ArchitectureSection(family=family, tied=tied, **sizes), VOCAB
    )


def ours(spec, params, head, ids):
    """[length] values of the states after each token, or [1] the score of all."""
    rows = jnp.asarray(np.append(ids, 0) if head == "value" else ids)[None]
    tokens = TokenRows(rows, jnp.arange(rows.shape[1])[None], jnp.ones_like(rows))
    if head == "value":
        return np.asarray(token_values(spec, params, tokens)[0])[0, 1:]
    return np.asarray(sequence_scores(spec, params, tokens))[0, -1:]


def theirs(model, ids):
    with torch.no_grad():
        return model(torch.tensor(ids, dtype=torch.long)[None]).logits.numpy().reshape(-1)


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize("head", ["value", "reward"])
def test_what_we_save_transformers_reads_and_scores_alike(tmp_path, family, head):
    spec = spec_of(family)
    params = with_head(spec, init_params(spec, jax.random.key(0)), head, jax.random.key(1))
    params[HEAD] = jax.tree.map(lambda w: w + jnp.arange(1, w.size + 1) / 20, params[HEAD])
    save_head(tmp_path, spec, params)
    model, report = AUTO[head].from_pretrained(
        tmp_path, dtype=torch.float32, output_loading_info=True
    )
    assert not report["missing_keys"] and not report["unexpected_keys"]
    assert model.num_labels == 1
    ids = np.random.default_rng(0).integers(1, VOCAB, LENGTH)
    np.testing.assert_allclose(
        ours(spec, params, head, ids), theirs(model.eval(), ids), atol=1e-4, rtol=1e-4
    )


@pytest.mark.parametrize("head", ["value", "reward"])
def test_what_transformers_saves_we_read(tmp_path, head):
    config = transformers.LlamaConfig(
        vocab_size=VOCAB, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, num_labels=1,
    )  # fmt: skip
    torch.manual_seed(0)
    model = AUTO[head].from_config(config).float().eval()
    model.save_pretrained(tmp_path)
    ids = np.random.default_rng(1).integers(1, VOCAB, LENGTH)
    np.testing.assert_allclose(
        ours(*load_head(tmp_path, head), head, ids), theirs(model, ids), atol=1e-4, rtol=1e-4
    )


@pytest.mark.exhaustive
def test_the_head_of_a_model_with_images_is_read_and_never_dropped(tmp_path):
    text = transformers.Gemma3TextConfig(
        vocab_size=VOCAB, hidden_size=16, intermediate_size=24, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=1, head_dim=8, sliding_window=6,
    )  # fmt: skip
    vision = transformers.SiglipVisionConfig(
        hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2,
        image_size=8, patch_size=4,
    )  # fmt: skip
    whole = transformers.Gemma3Config(
        text_config=text, vision_config=vision, mm_tokens_per_image=4, num_labels=1
    )
    torch.manual_seed(0)
    model = transformers.Gemma3ForSequenceClassification(whole).float().eval()
    model.save_pretrained(tmp_path)
    spec, params = load_head(tmp_path, "reward")
    ids = np.random.default_rng(1).integers(1, VOCAB, LENGTH)
    np.testing.assert_allclose(
        ours(spec, params, "reward", ids), theirs(model, ids), atol=1e-4, rtol=1e-4
    )
    with pytest.raises(CheckpointError, match=r"score\.weight"):
        load_params(tmp_path, spec)
