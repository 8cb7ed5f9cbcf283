"""Each family's record against transformers: random weights, contexts of several windows."""

from pathlib import Path
from typing import Any, get_args

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from builders import mesh_of
from safetensors.numpy import load_file, save_file
from whole_rows import row_logprobs, row_states

from jaxrl_async.config import schema
from jaxrl_async.config.lora_section import LoraSection
from jaxrl_async.config.model_section import ROUTED_FAMILIES, FamilyName
from jaxrl_async.errors import CheckpointError
from jaxrl_async.mesh import TRAINER_RULES, shardings
from jaxrl_async.model.decoder import (
    ON_ONE_DEVICE,
    DecoderSettings,
    TokenRows,
    init_params,
    output_head,
    settings_on,
)
from jaxrl_async.model.families.family import never
from jaxrl_async.model.families.family_registry import FAMILIES
from jaxrl_async.model.heads import save_head, sequence_scores, token_values, with_head
from jaxrl_async.model.logprobs import logits_of, token_logprobs
from jaxrl_async.model.lora import lora_of
from jaxrl_async.model.peft import load_peft, save_peft
from jaxrl_async.model.policy import Policy
from jaxrl_async.model.spec import ModelSpec, weight_table
from jaxrl_async.sampler.sampler import Sampler
from jaxrl_async.types import LogprobRequest, Request, SamplingParams

pytestmark = pytest.mark.full

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing.*:FutureWarning"),  # of PEFT
]
torch = pytest.importorskip("torch", reason="parity needs torch (extra [dev])")
transformers = pytest.importorskip("transformers", reason="parity needs transformers")
peft = pytest.importorskip("peft")

VOCAB, LENGTH = 96, 40
CLOSE = 2e-5
"""Largest difference of a log-prob: each side is within 1e-5 of float64, in its own order."""
COMMON = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 7,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
LINEAR = {"rope_type": "linear", "factor": 4.0}
PLAIN = {"rope_type": "default"}
LATENT = {
    "num_hidden_layers": 4,
    "num_key_value_heads": 4,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 24,
    "kv_lora_rank": 20,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "v_head_dim": 10,
}
DELTA = {
    "head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 6,
    "linear_key_head_dim": 12,
    "linear_value_head_dim": 10,
    "linear_conv_kernel_dim": 3,
    "rms_norm_eps": 1e-3,
}
"""A read of nearly nothing is divided by its length: with a smaller eps transformers' own two forms
of the rule (chunks, tokens) differ by more than 1e-4 in the logits."""
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "gemma2": (
        "Gemma2Config",
        {
            "head_dim": 16,
            "sliding_window": 7,
            "query_pre_attn_scalar": 24,
            "attn_logit_softcapping": 2.0,
            "final_logit_softcapping": 3.0,
        },
    ),
    "gemma3": (
        "Gemma3TextConfig",
        {
            "head_dim": 16,
            "sliding_window": 7,
            "query_pre_attn_scalar": 24,
            "layer_types": (["sliding_attention"] * 2 + ["full_attention"]) * 2
            + ["sliding_attention"],
            "rope_parameters": {
                "full_attention": {**LINEAR, "rope_theta": 1e6},
                "sliding_attention": {**PLAIN, "rope_theta": 1e4},
            },
        },
    ),
    "mistral": ("MistralConfig", {"sliding_window": 7}),
    "ministral": (
        "MinistralConfig",
        {
            "head_dim": 8,
            "sliding_window": 7,
            "layer_types": (["full_attention"] + ["sliding_attention"] * 3) * 2,
            "num_hidden_layers": 8,
        },
    ),
    "ministral3": (
        "Ministral3Config",
        {
            "head_dim": 8,
            "sliding_window": 9,
            "rope_parameters": {
                **YARN,
                "rope_theta": 1e4,
                "mscale": 1.0,
                "mscale_all_dim": 0.5,
                "llama_4_scaling_beta": 0.3,
                "beta_fast": 4.0,
            },
        },
    ),
    "mixtral": (
        "MixtralConfig",
        {"sliding_window": 9, "num_local_experts": 8, "num_experts_per_tok": 2},
    ),
    "phi3": ("Phi3Config", {"sliding_window": 9, "partial_rotary_factor": 0.5}),
    "phi4-mini": (
        "Phi3Config",
        {
            "original_max_position_embeddings": 64,
            "rope_parameters": {
                "rope_type": "longrope",
                "rope_theta": 1e4,
                "short_factor": [1.1, 1.3],
                "long_factor": [2.0, 3.0],
                "partial_rotary_factor": 0.5,
            },
        },
    ),
    "olmo2": ("Olmo2Config", {}),
    "olmo3": (
        "Olmo3Config",
        {
            "sliding_window": 7,
            "num_hidden_layers": 8,
            "rope_parameters": {
                "full_attention": {**YARN, "rope_theta": 5e5},
                "sliding_attention": {**PLAIN, "rope_theta": 5e5},
            },
        },
    ),
    "smollm3": ("SmolLM3Config", {"num_hidden_layers": 9}),
    "granite": (
        "GraniteConfig",
        {
            "embedding_multiplier": 3.0,
            "logits_scaling": 2.5,
            "residual_multiplier": 0.4,
            "attention_multiplier": 0.2,
        },
    ),
    "qwen2-window": (
        "Qwen2Config",
        {"use_sliding_window": True, "sliding_window": 7, "max_window_layers": 3},
    ),
    "qwen3-window-yarn": (
        "Qwen3Config",
        {
            "head_dim": 16,
            "use_sliding_window": True,
            "sliding_window": 7,
            "max_window_layers": 4,
            "rope_parameters": {**YARN, "rope_theta": 1e4},
        },
    ),
    "gpt_oss": (
        "GptOssConfig",
        {
            "num_hidden_layers": 4,
            "num_local_experts": 8,
            "num_experts_per_tok": 2,
            "head_dim": 16,
            "sliding_window": 7,
            "rope_parameters": {**YARN, "rope_theta": 1e4, "truncate": False},
        },
    ),
    "glm4_moe": (
        "Glm4MoeConfig",
        {
            "num_hidden_layers": 4,
            "first_k_dense_replace": 2,
            "n_routed_experts": 8,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 24,
            "n_shared_experts": 2,
            "n_group": 4,
            "topk_group": 2,
            "routed_scaling_factor": 1.7,
            "use_qk_norm": True,
            "attention_bias": True,
            "head_dim": 16,
        },
    ),
    "deepseek_v3": (
        "DeepseekV3Config",
        {
            **LATENT,
            "q_lora_rank": 24,
            "n_group": 4,
            "topk_group": 2,
            "routed_scaling_factor": 1.7,
            "first_k_dense_replace": 2,
            "n_shared_experts": 2,
            "rope_parameters": {
                **YARN,
                "rope_theta": 1e4,
                "mscale": 1.0,
                "mscale_all_dim": 0.7,
                "beta_fast": 4.0,
            },
        },
    ),
    "moonlight": (
        "DeepseekV3Config",
        {
            **LATENT,
            "q_lora_rank": None,
            "n_group": 1,
            "topk_group": 1,
            "first_k_dense_replace": 1,
            "rms_norm_eps": 1e-3,
            "rope_interleave": False,
        },
    ),
    "deepseek_v2": (
        "DeepseekV2Config",
        {
            **LATENT,
            "q_lora_rank": 24,
            "n_group": 4,
            "topk_group": 2,
            "topk_method": "group_limited_greedy",
            "routed_scaling_factor": 1.7,
            "first_k_dense_replace": 1,
            "n_shared_experts": 2,
            "rope_parameters": {
                **YARN,
                "rope_theta": 1e4,
                "mscale": 0.7,
                "mscale_all_dim": 0.7,
                "beta_fast": 4.0,
            },
        },
    ),
    "qwen2_moe": (
        "Qwen2MoeConfig",
        {
            "num_hidden_layers": 3,
            "num_experts": 8,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 24,
            "shared_expert_intermediate_size": 40,
            "mlp_only_layers": [1],
            "use_sliding_window": True,
            "sliding_window": 7,
            "max_window_layers": 2,
        },
    ),
    "qwen3_moe-dense": (
        "Qwen3MoeConfig",
        {
            "num_hidden_layers": 4,
            "num_experts": 8,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 24,
            "decoder_sparse_step": 2,
            "head_dim": 16,
        },
    ),
    "qwen3_next": (
        "Qwen3NextConfig",
        {
            **DELTA,
            "num_hidden_layers": 4,
            "num_experts": 8,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 24,
            "shared_expert_intermediate_size": 40,
        },
    ),
    "qwen3_5": (
        "Qwen3_5TextConfig",
        {**DELTA, "num_hidden_layers": 5, "tie_word_embeddings": True},
    ),
    "qwen3_5_moe": (
        "Qwen3_5MoeTextConfig",
        {
            **DELTA,
            "num_hidden_layers": 4,
            "num_experts": 8,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 24,
            "shared_expert_intermediate_size": 40,
        },
    ),
    "llama-linear": ("LlamaConfig", {"rope_parameters": {**LINEAR, "rope_theta": 1e4}}),
}

EACH_TIME = {"gemma3"}
OFTEN = pytest.mark.parametrize(
    "checkpoint",
    [n if n in EACH_TIME else pytest.param(n, marks=pytest.mark.exhaustive) for n in MODELS],
    indirect=True,
)
ALL = pytest.mark.parametrize("checkpoint", list(MODELS), indirect=True)
SAMPLED = pytest.mark.parametrize(
    "checkpoint",
    [
        *("gemma2", "gemma3", "ministral3", "mixtral", "phi3", "gpt_oss", "glm4_moe", "qwen2_moe"),
        *("deepseek_v3", "qwen3_5_moe"),
    ],
    indirect=True,
)
"""Caps; a mixed pattern; queries that grow; a window in all layers; part of a head turns; sinks;
layers with and without experts; latent attention; gated delta nets."""
ADAPTED = pytest.mark.parametrize("checkpoint", ["gemma3", "phi3", "qwen3_5"], indirect=True)
"""Norms on both sides; matrices that files join; gated delta nets, with joined ones, too."""
MESHES = pytest.mark.parametrize(
    "checkpoint", ["gemma3", "olmo3", "deepseek_v3", "qwen3_5"], indirect=True
)


@pytest.fixture(scope="module")
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory):
    """A random model of the family, every weight moved off its initial value."""
    torch.manual_seed(0)
    config, more = MODELS[request.param]
    made = getattr(transformers, config)(**{**COMMON, **more})
    made._attn_implementation = "eager"  # the only one with Gemma 2's cap
    model = transformers.AutoModelForCausalLM.from_config(made).float().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.2 * torch.randn_like(parameter)
        for name, parameter in model.named_parameters():
            if "A_log" in name:
                parameter -= 3  # memories of many tokens
        for name, buffer in model.named_buffers():
            if "correction" in name:
                buffer += 0.2 * torch.randn_like(buffer)
    folder = tmp_path_factory.mktemp(request.param)
    model.save_pretrained(folder, max_shard_size="60KB")
    return model, folder


def tokens() -> np.ndarray:
    return np.random.default_rng(1).integers(3, VOCAB, (2, LENGTH)).astype(np.int32)


def theirs(model, ids: np.ndarray) -> np.ndarray:
    with torch.no_grad():
        return model(torch.tensor(ids, dtype=torch.long)).logits.numpy()


def ours(policy: Policy, ids: np.ndarray) -> np.ndarray:
    positions = np.broadcast_to(np.arange(ids.shape[1]), ids.shape)
    hidden = row_states(policy.spec, policy.whole, ids, positions, np.ones_like(ids))
    head = output_head(policy.spec, policy.whole)
    return np.asarray(logits_of(hidden, head, policy.spec.scales))


def trained_logprobs(
    policy: Policy, ids: np.ndarray, settings: DecoderSettings = ON_ONE_DEVICE
) -> np.ndarray:
    positions = np.broadcast_to(np.arange(ids.shape[1]), ids.shape)
    rows = TokenRows(*map(jnp.asarray, (ids, positions, np.ones_like(ids))))
    return np.asarray(row_logprobs(policy.spec, policy.whole, rows, settings))


def test_a_configuration_may_name_every_family() -> None:
    assert set(get_args(FamilyName)) == set(FAMILIES)
    assert set(ROUTED_FAMILIES) == {name for name, family in FAMILIES.items() if family.routed}


@OFTEN
def test_logits_agree_with_transformers(checkpoint) -> None:
    model, folder = checkpoint
    policy = Policy.from_pretrained(folder)
    np.testing.assert_allclose(ours(policy, tokens()), theirs(model, tokens()), atol=1e-4, rtol=0)


@pytest.mark.exhaustive
@ALL
def test_what_we_save_transformers_and_we_load(checkpoint, tmp_path: Path) -> None:
    model, folder = checkpoint
    policy = Policy.from_pretrained(folder)
    policy.save_pretrained(tmp_path)
    again, report = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path, dtype=torch.float32, output_loading_info=True, attn_implementation="eager"
    )
    assert type(again) is type(model)
    assert not report["missing_keys"] and not report["unexpected_keys"]
    np.testing.assert_allclose(theirs(again.eval(), tokens()), theirs(model, tokens()), atol=1e-5)
    ours_again = Policy.from_pretrained(tmp_path)
    assert ours_again.spec == policy.spec
    jax.tree.map(np.testing.assert_array_equal, ours_again.params, policy.params)


@pytest.mark.exhaustive
@SAMPLED
def test_a_sampler_draws_what_transformers_would_and_the_trainer_gives_the_same(checkpoint) -> None:
    """Greedy, in small pages and chunks; a second request continues what the first one saw, whose
    pages are stored."""
    model, folder = checkpoint
    policy = Policy.from_pretrained(folder)
    section = schema.SamplerSection(
        slots=3, max_length=64, max_new_tokens=24, block=4, page_tokens=8, prefill_chunk=5
    )
    sampler = Sampler(policy, section=section)
    prompts = [tokens()[0, :20], tokens()[1, :5], tokens()[0, :36]]
    greedy = SamplingParams(temperature=0.0)
    for first, prompt in enumerate(prompts):
        request = Request(
            request_id=f"r{first}", token_ids=prompt, max_new_tokens=20, sampling=greedy
        )
        (done,) = sampler.generate([request])
        whole = np.concatenate([prompt, done.token_ids])[None]
        said = jax.nn.log_softmax(theirs(model, whole)[0, len(prompt) - 1 : -1])
        n = len(done.token_ids)
        assert done.token_ids.tolist() == np.argmax(said, axis=-1).tolist()
        wanted = np.asarray(said)[np.arange(n), done.token_ids]
        np.testing.assert_allclose(done.logprobs, wanted, atol=1e-4, rtol=0)
        trained = trained_logprobs(policy, whole)[0, len(prompt) :]
        # Each is within 1e-5 of float64 (most: 2e-6), rounded in an order of its own
        np.testing.assert_allclose(done.logprobs, trained, atol=2e-5, rtol=0)
    hits = sampler.stats().prefix_hit_tokens
    assert hits >= 16 or (policy.spec.delta and not hits), "states are not stored"
    sampler.close()


@pytest.mark.exhaustive
@SAMPLED
def test_a_sampler_scores_as_transformers_does(checkpoint) -> None:
    """Log-probs of a prompt and of its likeliest and named tokens, in small pages and chunks."""
    model, folder = checkpoint
    policy = Policy.from_pretrained(folder)
    section = schema.SamplerSection(
        slots=3, max_length=64, max_new_tokens=24, block=4, page_tokens=8, prefill_chunk=13
    )
    wish = LogprobRequest(prompt=True, top=5, ids=(7, 90))
    prompts = [tokens()[0, :36], tokens()[1, :5], tokens()[1, :29]]
    asked = [
        Request(request_id=f"r{i}", token_ids=prompt, max_new_tokens=0, logprobs=wish)
        for i, prompt in enumerate(prompts)
    ]
    with Sampler(policy, section=section) as sampler:
        answers = sampler.generate(asked)
    for prompt, done in zip(prompts, answers, strict=True):
        said, found, n = theirs(model, prompt[None])[0], done.prompt_logprobs, len(prompt) - 1
        said = np.asarray(said, np.float64)[:-1]
        said -= np.log(np.exp(said).sum(-1, keepdims=True))
        order = np.argsort(-said, axis=-1)[:, :5]
        assert found.top_ids[1:].tolist() == order.tolist()
        for ours, wanted in (
            (found.logprobs, said[np.arange(n), prompt[1:]]),
            (found.top_logprobs, np.take_along_axis(said, order, -1)),
            (found.id_logprobs, said[:, [7, 90]]),
        ):
            np.testing.assert_allclose(ours[1:], wanted, atol=CLOSE, rtol=0)


@pytest.mark.exhaustive
@MESHES
@pytest.mark.parametrize(
    "axes", [{"fsdp": 4, "tensor": 2}, {"fsdp": 2, "context": 4}], ids=lambda a: "-".join(a)
)
def test_meshes_of_eight_devices_give_the_same(checkpoint, axes) -> None:
    _, folder = checkpoint
    mesh = mesh_of(**axes)
    alone, split = Policy.from_pretrained(folder), Policy.from_pretrained(folder, mesh=mesh)
    wanted = shardings(weight_table(alone.spec), mesh, TRAINER_RULES)
    for array, sharding in zip(jax.tree.leaves(split.params), jax.tree.leaves(wanted), strict=True):
        assert array.sharding == sharding
    ids = np.tile(tokens(), (4, 1))
    rows = TokenRows(
        *map(jnp.asarray, (ids, np.tile(np.arange(LENGTH), (8, 1)), np.ones_like(ids)))
    )
    settings = settings_on(mesh, alone.spec, dtype=jnp.float32, attention="auto")

    def both(params: Any, settings: DecoderSettings) -> Any:
        return jax.jit(
            jax.value_and_grad(
                lambda p: token_logprobs(alone.spec, p, rows, settings).logprobs.sum()
            )
        )(params)

    total, gradient = both(alone.params, ON_ONE_DEVICE)
    split_total, split_gradient = both(split.params, settings)
    np.testing.assert_allclose(split_total, total, rtol=1e-5)
    for one, other in zip(jax.tree.leaves(gradient), jax.tree.leaves(split_gradient), strict=True):
        np.testing.assert_allclose(other, one, atol=2e-4 * float(np.abs(one).max() + 1))


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "checkpoint",
    ["mixtral", "gpt_oss", "glm4_moe", "qwen2_moe", "deepseek_v3", "qwen3_next", "qwen3_5_moe"],
    indirect=True,
)
def test_experts_divided_over_a_mesh_give_the_same(checkpoint) -> None:
    _, folder = checkpoint
    mesh = mesh_of(expert=4, tensor=2)
    alone, split = Policy.from_pretrained(folder), Policy.from_pretrained(folder, mesh=mesh)
    ids = np.tile(tokens(), (4, 1))
    settings = settings_on(mesh, alone.spec, dtype=jnp.float32, attention="auto")
    # Delta nets divided over devices round differently, by 1.7e-5 at one token without AVX-512.
    np.testing.assert_allclose(
        trained_logprobs(split, ids, settings), trained_logprobs(alone, ids), atol=4e-5, rtol=0
    )


@pytest.mark.exhaustive
@ADAPTED
def test_what_peft_wrote_computes_the_same_here(checkpoint, tmp_path: Path) -> None:
    model, folder = checkpoint
    base = type(model).from_pretrained(folder, attn_implementation="eager").float()
    config = peft.LoraConfig(task_type="CAUSAL_LM", r=4, lora_alpha=16, target_modules="all-linear")
    adapted = peft.get_peft_model(base, config)
    for name, weight in adapted.named_parameters():
        if "lora_" in name:
            weight.data.normal_(0, 0.1, generator=torch.Generator().manual_seed(len(name)))
    adapted.eval().save_pretrained(tmp_path / "adapter")
    policy = Policy.from_pretrained(folder, adapter=tmp_path / "adapter")
    wanted = theirs(adapted, tokens())
    assert np.abs(wanted - theirs(model, tokens())).max() > 0.01
    np.testing.assert_allclose(ours(policy, tokens()), wanted, atol=1e-4)
    policy.save_pretrained(tmp_path / "merged")
    merged = type(model).from_pretrained(tmp_path / "merged", attn_implementation="eager")
    np.testing.assert_allclose(theirs(merged.eval(), tokens()), wanted, atol=1e-4)


@pytest.mark.exhaustive
@ADAPTED
def test_peft_reads_what_is_written_here(checkpoint, tmp_path: Path) -> None:
    model, folder = checkpoint
    policy = Policy.from_pretrained(folder)
    lora = lora_of(policy.spec, LoraSection(rank=4, rslora=True))
    policy = policy.adapted(lora, jax.random.key(0))
    grown = jax.tree.map(
        lambda x: x + 0.05 * jax.random.normal(jax.random.key(x.size), x.shape), policy.adapter
    )
    policy = policy.with_trained(grown)
    save_peft(tmp_path, policy.spec, lora, policy.adapter, str(folder))
    base = type(model).from_pretrained(folder, attn_implementation="eager").float()
    adapted = peft.PeftModel.from_pretrained(base, tmp_path).eval()
    np.testing.assert_allclose(theirs(adapted, tokens()), ours(policy, tokens()), atol=1e-4)
    again, adapter = load_peft(tmp_path, policy.spec)
    assert again == lora
    jax.tree.map(np.testing.assert_array_equal, adapter, policy.adapter)


@pytest.mark.exhaustive
def test_the_text_part_of_a_model_with_images_is_read_alone(tmp_path: Path) -> None:
    config, more = MODELS["gemma3"]
    kinds = ["sliding_attention", "sliding_attention", "full_attention"]
    three = {"num_hidden_layers": len(kinds), "layer_types": kinds}
    text = getattr(transformers, config)(**{**COMMON, **more, **three})
    vision = transformers.SiglipVisionConfig(
        hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2,
        image_size=8, patch_size=4,
    )  # fmt: skip
    torch.manual_seed(0)
    whole = transformers.Gemma3Config(text_config=text, vision_config=vision, mm_tokens_per_image=4)
    whole.eos_token_id = [2, 5]
    model = transformers.Gemma3ForConditionalGeneration(whole).float().eval()
    model.save_pretrained(tmp_path)
    policy = Policy.from_pretrained(tmp_path)
    assert (policy.spec.family, policy.spec.eos_ids) == ("gemma3_text", (2, 5))
    np.testing.assert_allclose(ours(policy, tokens()), theirs(model, tokens()), atol=1e-4, rtol=0)


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", ["qwen3_5", "qwen3_5_moe"])
def test_the_text_part_of_qwen3_5_is_read_alone(tmp_path: Path, name: str) -> None:
    """Experts, if any, are in one tensor a layer, as they are published."""
    config, more = MODELS[name]
    text = getattr(transformers, config)(**{**COMMON, **more, "num_hidden_layers": 4})
    vision = {"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2}
    torch.manual_seed(0)
    kind = config.removesuffix("TextConfig")
    whole = getattr(transformers, kind + "Config")(
        text_config=text.to_dict(), vision_config={**vision, "out_hidden_size": 32},
        tie_word_embeddings=text.tie_word_embeddings,
    )  # fmt: skip
    model = getattr(transformers, kind + "ForConditionalGeneration")(whole).float().eval()
    model.save_pretrained(tmp_path, save_original_format=False)
    policy = Policy.from_pretrained(tmp_path)
    assert policy.spec.family == name + "_text"
    np.testing.assert_allclose(ours(policy, tokens()), theirs(model, tokens()), atol=1e-4, rtol=0)
    if "moe" in name:
        held = load_file(tmp_path / "model.safetensors")
        (gate_up, *_) = (n for n in held if n.endswith("layers.2.mlp.experts.gate_up_proj"))
        held[gate_up] = held[gate_up][:-1]  # an expert is missing
        save_file(held, tmp_path / "model.safetensors")
        with pytest.raises(CheckpointError, match=r"layers.2.mlp.experts.0.gate_proj.weight"):
            Policy.from_pretrained(tmp_path)


@pytest.mark.exhaustive
@pytest.mark.parametrize("checkpoint", ["qwen3_next"], indirect=True)
def test_tensors_that_predict_further_tokens_are_left_out(checkpoint, tmp_path: Path, caplog):
    model, folder = checkpoint
    Policy.from_pretrained(folder).save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    more = {"mtp.fc.weight": np.ones((3, 2), np.float32), "mtp.norm.weight": np.ones(2, np.float32)}
    save_file({**load_file(file), **more}, file)
    with caplog.at_level("INFO"):
        policy = Policy.from_pretrained(tmp_path)
    assert "2 tensors for multi-token prediction" in caplog.text
    np.testing.assert_allclose(ours(policy, tokens()), theirs(model, tokens()), atol=1e-4, rtol=0)


AUTO = {
    "value": ("TokenClassification", transformers.AutoModelForTokenClassification),
    "reward": ("SequenceClassification", transformers.AutoModelForSequenceClassification),
}


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("family", "head"),
    [(n, "reward") for n in FAMILIES]
    + [("gemma2", "value"), ("gemma3_text", "value"), ("phi3", "value"), ("smollm3", "value")],
)
def test_transformers_scores_with_heads_that_we_save(tmp_path: Path, family, head, caplog) -> None:
    window = {} if FAMILIES[family].windowed is never else {"window": 5}
    sizes = {"layers": 4, "width": 32, "heads": 4, "kv_heads": 2, "head_dim": 8, "mlp": 48}
    routed = {"experts": 4} if FAMILIES[family].routed else {}
    section = schema.ArchitectureSection(family=family, tied=True, **sizes, **window, **routed)
    spec = ModelSpec.from_architecture(section, VOCAB)
    ending, auto = AUTO[head]
    moved = jax.tree.map(
        lambda w: w + 0.1 * jax.random.normal(jax.random.key(w.size), w.shape),
        init_params(spec, jax.random.key(0)),
    )
    params = with_head(spec, moved, head, jax.random.key(1))
    save_head(tmp_path, spec, params)
    if ending not in FAMILIES[family].heads:
        assert f"For{ending}" in caplog.text and "has no" in caplog.text
        return
    model, report = auto.from_pretrained(
        tmp_path, dtype=torch.float32, output_loading_info=True, attn_implementation="eager"
    )
    assert not report["missing_keys"] and not report["unexpected_keys"]
    ids = tokens()[:1]
    given = np.append(ids, [[3]], axis=1) if head == "value" else ids
    rows = TokenRows(*map(jnp.asarray, (given, np.arange(given.size)[None], given * 0 + 1)))
    scores = theirs(model.eval(), ids).reshape(-1)
    if head == "value":
        mine = token_values(spec, params, rows)[0][0, 1:]
    else:
        mine = sequence_scores(spec, params, rows)[0, -1:]
    np.testing.assert_allclose(np.asarray(mine), scores, atol=1e-4, rtol=1e-4)
