"""The same with Tunix."""

import json
from pathlib import Path

import grain
import jax
import jax.numpy as jnp
import optax
from start_task import MODEL, RECORDS, score
from tunix.generate.tokenizer_adapter import Tokenizer
from tunix.models.qwen3 import model as qwen3
from tunix.models.qwen3 import params as qwen3_params
from tunix.rl.grpo.grpo_learner import GRPOConfig, GRPOLearner
from tunix.rl.rl_cluster import ClusterConfig, RLCluster, RLTrainingConfig, Role
from tunix.rl.rollout.base_rollout import RolloutConfig


def right(prompts, completions, answer, **kwargs):
    return [score(text, str(a)) for text, a in zip(completions, answer, strict=True)]


config = json.loads((Path(MODEL) / "config.json").read_text())
sizes = qwen3.ModelConfig(
    num_layers=config["num_hidden_layers"],
    vocab_size=config["vocab_size"],
    embed_dim=config["hidden_size"],
    hidden_dim=config["intermediate_size"],
    num_heads=config["num_attention_heads"],
    num_kv_heads=config["num_key_value_heads"],
    head_dim=config["head_dim"],
    rope_theta=10_000,
    norm_eps=config["rms_norm_eps"],
    use_tied_embedding=config["tie_word_embeddings"],
)
mesh = jax.make_mesh((1, 1), ("fsdp", "tp"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
actor, reference = (
    qwen3_params.create_model_from_safe_tensors(MODEL, sizes, mesh, jnp.float32) for _ in range(2)
)
cluster = RLCluster(
    actor=actor,
    reference=reference,
    tokenizer=Tokenizer("huggingface", MODEL, add_bos=False, add_eos=False),
    cluster_config=ClusterConfig(
        role_to_mesh={Role.ACTOR: mesh, Role.REFERENCE: mesh, Role.ROLLOUT: mesh},
        training_config=RLTrainingConfig(
            actor_optimizer=optax.adamw(1e-6),
            eval_every_n_steps=100,
            max_steps=3,
            mini_batch_size=4,
            train_micro_batch_size=4,
        ),
        rollout_config=RolloutConfig(
            max_tokens_to_generate=32, max_prompt_length=32, kv_cache_size=128
        ),
    ),
)
data = grain.MapDataset.source([{"prompts": r["question"], "answer": r["answer"]} for r in RECORDS])
learner = GRPOLearner(cluster, GRPOConfig(num_generations=4), right)
with mesh:
    learner.train(data.batch(4))
