"""Each family against transformers: logits, files in both directions, greedy decoding."""

from pathlib import Path

import jax
import numpy as np
import pytest
from whole_rows import row_states

from jaxrl_async.config import schema
from jaxrl_async.mesh import TRAINER_RULES, make_slices, shardings
from jaxrl_async.model.decoder import output_head
from jaxrl_async.model.policy import Policy
from jaxrl_async.model.spec import weight_table
from jaxrl_async.sampler.sampler import Sampler
from jaxrl_async.types import Request, SamplingParams

pytestmark = pytest.mark.full

torch = pytest.importorskip("torch", reason="parity needs torch (extra [dev])")
transformers = pytest.importorskip("transformers", reason="parity needs transformers")

VOCAB, LENGTH = 96, 40
COMMON = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 5e5,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
FAMILIES = {
    "llama3": lambda: transformers.LlamaConfig(**COMMON, rope_parameters=LLAMA3_ROPE),
    "llama-bias": lambda: transformers.LlamaConfig(**COMMON, attention_bias=True),
    "qwen2-tied": lambda: transformers.Qwen2Config(**COMMON, tie_word_embeddings=True),
    "qwen3": lambda: transformers.Qwen3Config(**COMMON, head_dim=16),
    "qwen3-moe": lambda: transformers.Qwen3MoeConfig(
        **COMMON,
        head_dim=16,
        num_experts=8,
        num_experts_per_tok=2,
        moe_intermediate_size=24,
        norm_topk_prob=True,
    ),
}

OFTEN = {"llama3", "qwen3-moe"}
DECODED = pytest.mark.parametrize(
    "checkpoint",
    [n if n in OFTEN else pytest.param(n, marks=pytest.mark.exhaustive) for n in sorted(FAMILIES)],
    indirect=True,
)
"""For the tests that compile much: some families each time, all in the exhaustive part."""


@pytest.fixture(scope="module", params=sorted(FAMILIES))
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory):
    """A random model of the family, every weight moved off its initial value, in several files."""
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(FAMILIES[request.param]()).float().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.1 * torch.randn_like(parameter)
    folder = tmp_path_factory.mktemp(request.param)
    model.save_pretrained(folder, max_shard_size="40KB")
    assert len(list(folder.glob("*.safetensors"))) > 1
    return model, folder


def tokens() -> np.ndarray:
    return np.random.default_rng(1).integers(0, VOCAB, (2, LENGTH)).astype(np.int32)


def logits_of(model, ids: np.ndarray) -> np.ndarray:
    with torch.no_grad():
        return model(torch.tensor(ids, dtype=torch.long)).logits.numpy()


def test_logits_agree_with_transformers(checkpoint) -> None:
    model, folder = checkpoint
    policy = Policy.from_pretrained(folder)
    ids = tokens()
    positions = np.broadcast_to(np.arange(LENGTH), ids.shape)
    hidden = row_states(policy.spec, policy.params, ids, positions, np.ones_like(ids))
    ours = hidden @ output_head(policy.spec, policy.params)
    np.testing.assert_allclose(ours, logits_of(model, ids), atol=1e-4, rtol=0)


@DECODED
def test_prefill_and_decode_agree_with_transformers(checkpoint) -> None:
    """Prompts prefilled in chunks of five tokens over small pages, then decoded."""
    model, folder = checkpoint
    section = schema.SamplerSection(
        slots=3, max_length=64, max_new_tokens=24, block=4, page_tokens=8, prefill_chunk=5
    )
    sampler = Sampler(Policy.from_pretrained(folder), section=section)
    prompts = [tokens()[0, :20], tokens()[1, :7]]
    wishes = [
        Request(request_id=f"r{i}", token_ids=p, max_new_tokens=20, key=(i, 0))
        for i, p in enumerate(prompts)
    ]
    for prompt, done in zip(prompts, sampler.generate(wishes), strict=True):
        whole = np.concatenate([prompt, done.token_ids])[None]
        wanted = jax.nn.log_softmax(logits_of(model, whole)[0, len(prompt) - 1 : -1])
        np.testing.assert_allclose(
            done.logprobs, np.asarray(wanted)[np.arange(20), done.token_ids], atol=1e-4, rtol=0
        )
    sampler.close()


def test_what_we_save_transformers_loads(checkpoint, tmp_path: Path) -> None:
    model, folder = checkpoint
    Policy.from_pretrained(folder).save_pretrained(tmp_path)
    again, report = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path, dtype=torch.float32, output_loading_info=True
    )
    assert not report["missing_keys"] and not report["unexpected_keys"]
    np.testing.assert_allclose(
        logits_of(again.eval(), tokens()), logits_of(model, tokens()), atol=1e-4, rtol=0
    )


def test_loading_onto_a_mesh_gives_the_same_weights_where_the_rules_say(checkpoint) -> None:
    _, folder = checkpoint
    mesh = make_slices(schema.MeshSection(trainer=schema.AxesSection(fsdp=2, tensor=2))).trainer
    whole, split = Policy.from_pretrained(folder), Policy.from_pretrained(folder, mesh=mesh)
    wanted = shardings(weight_table(whole.spec), mesh, TRAINER_RULES)
    jax.tree.map(np.testing.assert_array_equal, whole.params, split.params)
    for array, sharding in zip(jax.tree.leaves(split.params), jax.tree.leaves(wanted), strict=True):
        assert array.sharding == sharding
    assert any(not a.sharding.is_fully_replicated for a in jax.tree.leaves(split.params))


@DECODED
def test_greedy_decoding_agrees_token_for_token(checkpoint) -> None:
    model, folder = checkpoint
    prompts = [tokens()[0, :12], tokens()[1, :7]]
    section = schema.SamplerSection(slots=4, max_length=64, max_new_tokens=24, block=5)
    sampler = Sampler(Policy.from_pretrained(folder), section=section)
    requests = [
        Request(
            request_id=f"r{i}",
            token_ids=p,
            max_new_tokens=24,
            sampling=SamplingParams(temperature=0.0),
        )
        for i, p in enumerate(prompts)
    ]
    ours = sampler.generate(requests)
    sampler.close()
    for prompt, completion in zip(prompts, ours, strict=True):
        ids = torch.tensor(prompt[None], dtype=torch.long)
        theirs = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=24,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
        )
        assert completion.token_ids.tolist() == theirs[0, len(prompt) :].tolist()
