"""Tunix's GRPOConfig and DAPOConfig, RLTrainingConfig and RolloutConfig (0.1.7), by their own
names.

Tunix's data loader has the batch size, so algorithm.groups_per_step is not in these fields.
"""

from typing import Any

from jaxrl_async.config.peers.counterpart import (
    KEEP,
    Fields,
    NoCounterpart,
    Peer,
    PeerField,
    Setting,
    kl_estimator,
    same,
    whole,
    without,
)


def _loss(f: Fields) -> Any:
    low = f["epsilon"]
    high = low if f["epsilon_high"] is None else f["epsilon_high"]
    name = "gspo_token" if "gspo-token" in (f["loss_algo"], f["algo_variant"]) else "ppo_clip"
    return {name: {"clip_low": low, "clip_high": high}}


def _aggregate(f: Fields) -> Any:
    known: dict[str, Any] = {
        "token-mean": "token_mean",
        "sequence-mean-token-mean": "sequence_mean",
        "seq-mean-token-sum": "sequence_sum",
        "sequence-mean-token-sum-norm": "sequence_sum",  # its divisor defaults to the sequences
        "sequence-mean-token-scale": {"constant": {"divisor": f["max_tokens_to_generate"]}},
    }
    if f["loss_agg_mode"] not in known:
        raise NoCounterpart(f"there is no mode {f['loss_agg_mode']!r}; see algorithm.aggregate")
    return known[f["loss_agg_mode"]]


def _advantage(f: Fields) -> Any:
    known = {"grpo": "group_normalized", "gae": "gae", "rloo": "rloo", "drgrpo": "group_mean"}
    if f["advantage_estimator"] not in known:
        raise NoCounterpart(f"there is no estimator {f['advantage_estimator']!r} of Tunix's here")
    return known[f["advantage_estimator"]]


def _kl(f: Fields) -> Any:
    return kl_estimator(f["kl_loss_mode"], where="loss") if f["beta"] else KEEP


def _shaping(f: Fields) -> Any:
    given = f["overlong_buffer"] or {}
    if not given.get("enable"):
        return KEEP
    longest, buffer = given["max_response_length"], given["overlong_buffer_length"]
    amount = {"max_tokens": longest, "cache_tokens": buffer}
    return [{"soft_overlong": {**amount, "weight": given["overlong_buffer_penalty"]}}]


LOSS = Setting("algorithm.loss", _loss)
LENGTH = Setting(
    "sampler.max_length", lambda f: f["max_prompt_length"] + f["max_tokens_to_generate"]
)


def _field(default: object, *settings: Setting) -> PeerField:
    return PeerField(default=default, settings=settings)


_FIELDS = {
    "num_generations": _field(2, *same("algorithm.group_size")),
    "num_iterations": _field(1, *same("algorithm.epochs")),
    "beta": _field(
        0.04,
        Setting("algorithm.kl_coefficient", lambda f: f["beta"] or 0.0),
        Setting("algorithm.kl", _kl),
    ),
    "kl_loss_mode": _field("kl", Setting("algorithm.kl", _kl)),
    "epsilon": _field(0.2, LOSS),
    "epsilon_high": _field(None, LOSS),
    "loss_algo": _field("grpo", LOSS),
    "algo_variant": _field("grpo", LOSS),
    "loss_agg_mode": _field(
        "sequence-mean-token-mean", Setting("algorithm.aggregate", _aggregate)
    ),
    "advantage_estimator": _field("grpo", Setting("algorithm.advantage", _advantage)),
    "dynamic_sampling": _field(
        False, Setting("algorithm.dynamic_sampling", lambda f: bool(f["dynamic_sampling"]))
    ),
    "overlong_buffer": _field(None, Setting("algorithm.shaping", _shaping)),
    "max_tokens_to_generate": _field(64, *same("sampler.max_new_tokens"), LENGTH),
    "max_prompt_length": _field(64, *same("data.max_prompt_tokens"), LENGTH),
    "temperature": _field(0.9, *same("sampler.temperature")),
    "top_p": _field(
        1.0, Setting("sampler.top_p", lambda f: 1.0 if f["top_p"] is None else f["top_p"])
    ),
    "top_k": _field(None, Setting("sampler.top_k", lambda f: max(f["top_k"] or 0, 0))),
    "max_steps": _field(
        None, Setting("run.steps", lambda f: KEEP if f["max_steps"] is None else f["max_steps"])
    ),
    "eval_every_n_steps": _field(
        0, Setting("eval.every", lambda f: max(int(f["eval_every_n_steps"] or 0), 0))
    ),
    "max_seq_token_per_tpu": _field(
        None, Setting("trainer.micro_batch_tokens", lambda f: f["max_seq_token_per_tpu"] or KEEP)
    ),
    "mini_batch_size": _field(
        None,
        Setting(
            "algorithm.groups_per_step",
            lambda f: KEEP if f["mini_batch_size"] is None else whole(f["mini_batch_size"]),
            joint=True,
        ),
    ),
    "tensor_parallel_size": _field(
        -1,
        Setting(
            "mesh.sampler.tensor",
            lambda f: f["tensor_parallel_size"] if f["tensor_parallel_size"] > 0 else KEEP,
        ),
    ),
    **without("a reward is of a whole answer; see algorithm.shaping",
              reward_manager="sequence-level"),
    **without("algorithm.loss names the loss", policy_loss_fn="grpo"),
    **without("the KL of a token has no bound", kl_clamp_value=None),
    **without("see trainer.optimizer and algorithm.learning_rate",
              actor_optimizer=None, critic_optimizer=None),
    **without("sequences are packed into rows; trainer.micro_batch_tokens bounds the memory",
              train_micro_batch_size=None, rollout_micro_batch_size=None,
              compute_logps_micro_batch_size=None, gradient_accumulation_steps=None,
              max_inflight_computations=2),
    **without("checkpoints lie in the run's folder: run.dir, run.name and the section checkpoint",
              checkpoint_root_directory=None, checkpointing_options=None),
    **without("see the section metrics, and run.profile", metrics_logging_options=None,
              profiler_options=None, perf_metrics_options=None, metrics_prefix="",
              pbar_description="Training"),
    **without("see the section mesh", data_sharding_axis=("fsdp",), data_parallel_size=-1,
              expert_parallel_size=1),
    **without("run.seed seeds everything", seed=None),
    **without("sampler.kv_memory_mib bounds the KV cache", kv_cache_size=1024),
    **without("weights.dtype is the type of the sampler's weights", data_type=None,
              rollout_mapping_config=None),
    **without("end tokens are the tokenizer's and the model's", eos_tokens=None),
    **without("log-probs are recorded in any case", return_logprobs=False),
}  # fmt: skip
TUNIX = Peer(
    name="Tunix",
    fields=_FIELDS,
    sections={
        "rollout_vllm_": "the sampler of this package samples; see the section sampler",
        "rollout_sglang_jax_": "the sampler of this package samples; see the section sampler",
    },
    arguments={
        "reward_fns": _field(None, *same("reward=")),
        **without("metrics are parts of a reward, or log_metric in a reward function",
                  metric_fns=None),
        **without("run.seed seeds the order of the records", data_shuffle_seed=None),
        **without("give the settings themselves", algo_config=None),
        **without("give model= and the section mesh", rl_cluster=None),
    },
)  # fmt: skip
