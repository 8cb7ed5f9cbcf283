"""TRL's GRPOConfig (1.16, with transformers' TrainingArguments) and the arguments of GRPOTrainer.

Losses, corrections and advantages are compared with TRL's own code in tests/agreement. Two things
are not equal: our group_normalized divides by the population's standard deviation, TRL by the
sample's, so advantages are sqrt(G / (G - 1)) times larger here; and generation overlaps with
training, unless staleness.max_staleness=0.
"""

import math
from collections.abc import Mapping
from pathlib import PurePath
from typing import Any

from jaxrl_async.config.peers.counterpart import (
    DEVICES,
    KEEP,
    PROMPT_TOKENS,
    RECORDS,
    Fields,
    NoCounterpart,
    Peer,
    PeerField,
    Setting,
    chat_arguments,
    other_trackers,
    plain,
    run_name,
    same,
    tracker,
    whole,
    without,
)

EPSILON = 1e-4
"""TRL's addition to a standard deviation."""


# ---- batches


def _rows(f: Fields) -> int:
    """Return the sequences that all devices process at the same time."""
    return int(f["per_device_train_batch_size"]) * int(f[DEVICES])


def _generation_steps(f: Fields) -> int:
    """Return TRL's steps_per_generation, as its __post_init__ fills it."""
    if f["steps_per_generation"] is not None:
        return int(f["steps_per_generation"])
    if f["generation_batch_size"] is not None:
        return int(f["generation_batch_size"]) // _rows(f)
    return int(f["gradient_accumulation_steps"])


def _minibatches(f: Fields) -> int:
    generation, accumulated = _generation_steps(f), int(f["gradient_accumulation_steps"])
    if generation % accumulated == 0:
        return generation // accumulated
    if accumulated % generation == 0 and f["num_iterations"] == 1:
        return 1
    raise NoCounterpart(
        f"steps_per_generation ({generation}) and gradient_accumulation_steps ({accumulated}) do "
        "not divide into whole updates; set algorithm.groups_per_step and minibatches"
    )


def _groups(f: Fields) -> int:
    sequences = _rows(f) * max(_generation_steps(f), int(f["gradient_accumulation_steps"]))
    if sequences % int(f["num_generations"]):
        raise NoCounterpart(
            f"a batch of {sequences} sequences is not a whole number of groups of "
            f"{f['num_generations']}; set algorithm.groups_per_step (prompts per step)"
        )
    return whole(sequences // int(f["num_generations"]))


def _updates(f: Fields) -> int:
    """Return the optimizer updates of one step here."""
    return int(f["num_iterations"]) * _minibatches(f)


def _steps_of_an_epoch(f: Fields) -> int:
    if f[RECORDS] is None:
        raise NoCounterpart(
            "epochs are counted in records, whose number is unknown here; give it, or set run.steps"
        )
    return whole(f[RECORDS] // _groups(f))


def _steps(f: Fields) -> int:
    if f["max_steps"] and f["max_steps"] > 0:
        return math.ceil(f["max_steps"] / _updates(f))
    return whole(float(f["num_train_epochs"]) * _steps_of_an_epoch(f))


def _every(strategy: str, steps: str) -> Any:
    """Return the conversion of a strategy (no, steps, epoch) to an interval in steps here."""

    def interval(f: Fields) -> Any:
        kind, number = plain(f[strategy]), f[steps]
        if kind == "no":
            return 0
        if kind == "epoch":
            return _steps_of_an_epoch(f)
        if kind != "steps":
            raise NoCounterpart(f"there is no strategy {kind!r}; give a number of updates")
        number = f["logging_steps"] if number is None else number
        if 0 < number < 1:  # a share of all updates
            return max(round(number * _steps(f)), 1)
        return max(round(number / _updates(f)), 1)

    return interval


# ---- the algorithm


def _loss(f: Fields) -> Any:
    kind, low = plain(f["loss_type"]), f["epsilon"]
    high = low if f["epsilon_high"] is None else f["epsilon_high"]
    if kind == "cispo":
        if high < 1:
            raise NoCounterpart("cispo's epsilon_high is the largest ratio, so it must be above 1")
        return {"cispo": {"clip_high": high - 1}}
    if kind == "sapo":
        taus = {"tau_pos": f["sapo_temperature_pos"], "tau_neg": f["sapo_temperature_neg"]}
        return {"sapo": taus}
    if kind == "vespo":
        powers = {"power_pos": f["vespo_k_pos"], "rate_pos": f["vespo_lambda_pos"]}
        more = {"power_neg": f["vespo_k_neg"], "rate_neg": f["vespo_lambda_neg"]}
        return {"vespo": {**powers, **more}}
    clips = {"clip_low": low, "clip_high": high}
    if f["importance_sampling_level"] == "sequence":
        if kind not in ("grpo", "luspo") or f["delta"] is not None:
            raise NoCounterpart(
                "ratios of whole sequences (algorithm.loss=gspo) are for loss_type grpo or luspo, "
                "without delta"
            )
        return {"gspo": clips}
    return {"ppo_clip": clips if f["delta"] is None else {**clips, "dual_clip": f["delta"]}}


def _aggregate(f: Fields) -> Any:
    kind = plain(f["loss_type"])
    if kind == "dr_grpo":
        return {"constant": {"divisor": f["max_completion_length"]}}
    known = {"grpo": "sequence_mean", "sapo": "sequence_mean", "luspo": "sequence_sum"}
    known |= dict.fromkeys(("dapo", "bnpo", "cispo", "vespo"), "token_mean")
    if kind not in known:
        raise NoCounterpart(f"there is no loss_type {kind!r}; see algorithm.loss")
    return known[kind]


def _advantage(f: Fields) -> Any:
    scale = {True: "group", False: "none"}.get(f["scale_rewards"], f["scale_rewards"])
    if f["multi_objective_aggregation"] == "normalize_then_sum":
        return {"gdpo": {"epsilon": EPSILON}}
    if scale == "batch":
        raise NoCounterpart(
            "no estimator divides by the deviation of the batch's rewards; the nearest is "
            "algorithm.advantage=reinforce_pp_baseline"
        )
    return {"group_normalized": {"epsilon": EPSILON}} if scale == "group" else "group_mean"


def _kl(f: Fields) -> Any:
    if not f["beta"]:
        return KEEP
    return "unbiased" if f["use_bias_correction_kl"] else "k3"


def _is_corrected(f: Fields) -> bool:
    return bool(f["use_vllm"] and f["vllm_importance_sampling_correction"])


def _correction(f: Fields) -> Any:
    found: list[Any] = []
    if _is_corrected(f):
        found.append(_bounds(f))
    if f["off_policy_mask_threshold"] is not None:
        own = [] if found else ["truncate_token"]  # the default, which a list replaces
        found += [*own, {"opsm": {"delta": f["off_policy_mask_threshold"]}}]
    return found or KEEP


def _bounds(f: Fields) -> Any:
    """Return TRL's correction between its sampler and its trainer."""
    level, _, kind = str(f["vllm_importance_sampling_mode"]).partition("_")
    high = f["vllm_importance_sampling_cap"] or f["vllm_importance_sampling_clip_max"]
    low = f["vllm_importance_sampling_clip_min"]
    if high is None or kind not in ("truncate", "mask"):
        raise NoCounterpart("give vllm_importance_sampling_clip_max; see algorithm.correction")
    of_level = {} if level == "token" else {"level": level}
    if kind == "truncate":
        return (
            {"truncate": {"cap": high, **of_level}}
            if low is None
            else {"band": {"low": low, "high": high, **of_level}}
        )
    if low is not None and level == "token":
        return {"icepop": {"low": low, "cap": high}}
    return {"mask": {"cap": high, **({} if low is None else {"low": low}), **of_level}}


def _reference(f: Fields, setting: str) -> Any:
    if not f["sync_ref_model"]:
        return KEEP
    alpha, steps = f["ref_model_mixup_alpha"], f["ref_model_sync_steps"]
    every = max(round(steps / _updates(f)), 1)
    if alpha == 1 or every == 1:
        own = every if alpha == 1 else 1 - alpha
        return own if setting == ("refresh_every" if alpha == 1 else "ema") else KEEP
    raise NoCounterpart(
        "a reference that is mixed with the policy every few steps: set reference.ema (a share of "
        "it each update) or reference.refresh_every (a copy)"
    )


# ---- optimizer, files, names


def _schedule(f: Fields) -> Any:
    kind = plain(f["lr_scheduler_type"])
    known = {"linear": "linear", "cosine": "cosine"}
    known |= dict.fromkeys(("constant", "constant_with_warmup"), "constant")
    if kind not in known:
        raise NoCounterpart(f"there is no schedule {kind!r}: constant, linear or cosine")
    return known[kind]


def _warmup(f: Fields) -> int:
    steps = f["warmup_steps"] or f["warmup_ratio"]
    if 0 < steps < 1:  # a share of all updates
        return round(steps * _steps(f) * _updates(f))
    return int(steps)


def _optimizer(f: Fields) -> Any:
    if not str(plain(f["optim"])).startswith("adamw"):
        raise NoCounterpart(
            f"there is no optimizer {plain(f['optim'])!r}; trainer.optimizer takes adamw, muon or "
            "your own"
        )
    return KEEP


def _half(f: Fields) -> Any:
    if f["fp16"]:
        raise NoCounterpart("there is no float16; model.dtype=bfloat16 needs no loss scale")
    return "float32" if f["bf16"] is False else KEEP  # null: bfloat16 where a chip multiplies in it


def _folder(f: Fields) -> Any:
    parent = None if f["output_dir"] is None else str(PurePath(f["output_dir"]).parent)
    return KEEP if parent in (None, ".") else parent


def _name(f: Fields) -> Any:
    return KEEP if f["output_dir"] is None else run_name(PurePath(f["output_dir"]).name)


def _weights_of_the_model(f: Fields) -> Any:
    given = dict(f["model_init_kwargs"] or {})
    kind = str(given.pop("dtype", given.pop("torch_dtype", ""))).removeprefix("torch.")
    given.pop("attn_implementation", None)
    if given or kind not in ("", "auto", "float32", "bfloat16"):
        raise NoCounterpart(
            f"of {f['model_init_kwargs']} only dtype float32 and bfloat16 have a counterpart, "
            "model.param_dtype"
        )
    return kind if kind in ("float32", "bfloat16") else KEEP


def lora_of(peft: object) -> dict[str, Any]:
    """Return PEFT's LoraConfig, an object or a mapping, as model.lora. Raises NoCounterpart for
    what cannot be trained here."""
    given = peft if isinstance(peft, Mapping) else vars(peft)
    unknown = {
        "bias": ("none", "biases are not trained"),
        "use_dora": (False, "there is no DoRA"),
        "modules_to_save": (None, "no further modules are trained"),
        "layers_to_transform": (None, "name the layers in model.lora.targets"),
        "rank_pattern": ({}, "all matrices have one rank"),
        "alpha_pattern": ({}, "all matrices have one alpha"),
    }
    for name, (usual, reason) in unknown.items():
        if given.get(name) and given[name] != usual:
            raise NoCounterpart(f"peft_config: {name} = {given[name]!r}: {reason}")
    found: dict[str, Any] = {"rank": given.get("r", 8), "alpha": float(given.get("lora_alpha", 8))}
    if given.get("lora_dropout"):
        found["dropout"] = float(given["lora_dropout"])
    if given.get("use_rslora"):
        found["rslora"] = True
    targets = given.get("target_modules")
    if targets is None:
        raise NoCounterpart("peft_config: give target_modules, such as 'all-linear'")
    return found | {"targets": targets if isinstance(targets, str) else sorted(targets)}


def _script_lora(f: Fields) -> Any:
    if not f["use_peft"]:
        return KEEP
    names = ("lora_alpha", "lora_dropout", "use_rslora", "use_dora")
    given = {name: f[name] for name in names}
    given |= {"r": f["lora_r"], "modules_to_save": f["lora_modules_to_save"]}
    return lora_of({**given, "target_modules": f["lora_target_modules"] or "all-linear"})


def _script_dtype(f: Fields) -> Any:
    return f["dtype"] if f["dtype"] in ("float32", "bfloat16") else KEEP


def _dataset(f: Fields, split: str) -> Any:
    if not f["dataset_name"]:
        return KEEP
    return ":".join(filter(None, (f["dataset_name"], f["dataset_config"], f[split])))


def _script_rewards(f: Fields) -> Any:
    if f["reward_funcs"]:
        raise NoCounterpart(
            f"write reward functions {f['reward_funcs']} to a file: reward.function=FILE.py:NAME"
        )
    return KEEP


# ---- the tables

LOSS, AGGREGATE = Setting("algorithm.loss", _loss), Setting("algorithm.aggregate", _aggregate)
ADVANTAGE = Setting("algorithm.advantage", _advantage)
CORRECTION = Setting("algorithm.correction", _correction)
ANCHOR = Setting("algorithm.anchor", lambda f: "proximal" if _is_corrected(f) else KEEP)
GROUPS = Setting("algorithm.groups_per_step", _groups, joint=True)
MINIBATCHES = Setting(
    "algorithm.minibatches", lambda f: KEEP if _minibatches(f) == 1 else _minibatches(f), joint=True
)
STEPS = Setting("run.steps", _steps, joint=True)
KL = Setting("algorithm.kl", _kl)
REFRESH = Setting("reference.refresh_every", lambda f: _reference(f, "refresh_every"))
EMA = Setting("reference.ema", lambda f: _reference(f, "ema"))
TRACKERS = (
    Setting("metrics.wandb", tracker("wandb", "report_to", "project", "project", "run_name")),
    Setting("metrics.mlflow", tracker("mlflow", "report_to", "project", "experiment")),
    Setting("metrics.trackio", tracker("trackio", "report_to", "project", "project")),
    Setting("metrics", other_trackers("report_to", ("wandb", "mlflow", "trackio", "tensorboard"))),
)
EVAL = Setting("eval.every", _every("eval_strategy", "eval_steps"), joint=True)
SAVE = Setting("checkpoint.every", _every("save_strategy", "save_steps"), joint=True)
LORA = Setting("model.lora", _script_lora, switches=("use_peft",))
DATASET = (
    Setting("data.jsonl.path", lambda f: _dataset(f, "dataset_train_split")),
    Setting(
        "data.jsonl.eval_path",
        lambda f: KEEP if f["eval_strategy"] == "no" else _dataset(f, "dataset_test_split"),
    ),
)
ADAPTIVE = (
    Setting(
        "algorithm.entropy_target",
        lambda f: f["entropy_target"] if f["use_adaptive_entropy"] else KEEP,
    ),
    Setting(
        "algorithm.entropy_step",
        lambda f: f["entropy_coef_delta"] if f["use_adaptive_entropy"] else KEEP,
    ),
)


def _field(default: object, *settings: Setting) -> PeerField:
    return PeerField(default=default, settings=settings)


_ALGORITHM = {
    "num_generations": _field(8, *same("algorithm.group_size"), GROUPS),
    "num_iterations": _field(1, *same("algorithm.epochs")),
    "per_device_train_batch_size": _field(8, GROUPS),
    "gradient_accumulation_steps": _field(1, GROUPS, MINIBATCHES),
    "steps_per_generation": _field(None, GROUPS, MINIBATCHES),
    "generation_batch_size": _field(None, GROUPS, MINIBATCHES),
    "max_steps": _field(-1, STEPS),
    "num_train_epochs": _field(3.0, STEPS),
    "loss_type": _field("dapo", LOSS, AGGREGATE),
    "epsilon": _field(0.2, LOSS),
    "epsilon_high": _field(None, LOSS),
    "delta": _field(None, LOSS),
    "importance_sampling_level": _field("token", LOSS),
    "sapo_temperature_neg": _field(1.05, LOSS),
    "sapo_temperature_pos": _field(1.0, LOSS),
    "vespo_k_pos": _field(2.0, LOSS),
    "vespo_lambda_pos": _field(3.0, LOSS),
    "vespo_k_neg": _field(3.0, LOSS),
    "vespo_lambda_neg": _field(2.0, LOSS),
    "scale_rewards": _field("group", ADVANTAGE),
    "multi_objective_aggregation": _field("sum_then_normalize", ADVANTAGE),
    "beta": _field(0.0, *same("algorithm.kl_coefficient"), KL),
    "use_bias_correction_kl": _field(True, KL),
    "sync_ref_model": _field(False, REFRESH, EMA),
    "ref_model_mixup_alpha": _field(0.6, REFRESH, EMA),
    "ref_model_sync_steps": _field(512, REFRESH, EMA),
    "entropy_coef": _field(0.0, *same("algorithm.entropy_coefficient")),
    "use_adaptive_entropy": _field(False, *ADAPTIVE),
    "entropy_target": _field(0.2, *ADAPTIVE),
    "entropy_coef_delta": _field(0.005, *ADAPTIVE),
    "mask_truncated_completions": _field(
        False,
        Setting(
            "algorithm.shaping",
            lambda f: ["mask_truncated"] if f["mask_truncated_completions"] else KEEP,
        ),
    ),
    "use_vllm": _field(False, CORRECTION, ANCHOR),
    "vllm_importance_sampling_correction": _field(True, CORRECTION, ANCHOR),
    "vllm_importance_sampling_mode": _field("sequence_mask", CORRECTION),
    "vllm_importance_sampling_clip_max": _field(3.0, CORRECTION),
    "vllm_importance_sampling_clip_min": _field(None, CORRECTION),
    "vllm_importance_sampling_cap": _field(None, CORRECTION),
    "off_policy_mask_threshold": _field(None, CORRECTION),
    "router_aux_loss_coef": _field(
        None, Setting("model.balance.loss", lambda f: f["router_aux_loss_coef"] or KEEP)
    ),
}
_SAMPLING = {
    "max_completion_length": _field(
        512,
        *same("sampler.max_new_tokens"),
        Setting(
            "sampler.max_length",
            lambda f: (
                f["vllm_max_model_length"]
                or f["max_completion_length"] + (f["max_prompt_length"] or PROMPT_TOKENS)
            ),
        ),
        Setting("algorithm.aggregate", _aggregate, joint=True),
    ),
    "max_prompt_length": _field(  # of earlier versions
        None, Setting("data.max_prompt_tokens", lambda f: f["max_prompt_length"] or KEEP)
    ),
    "vllm_max_model_length": _field(
        None, Setting("sampler.max_length", lambda f: f["vllm_max_model_length"] or KEEP)
    ),
    "temperature": _field(1.0, *same("sampler.temperature")),
    "top_p": _field(1.0, *same("sampler.top_p")),
    "top_k": _field(0, Setting("sampler.top_k", lambda f: max(f["top_k"] or 0, 0))),
    "min_p": _field(None, Setting("sampler.min_p", lambda f: f["min_p"] or 0.0)),
    "chat_template_kwargs": _field(
        None, Setting("data.chat_arguments", lambda f: chat_arguments(f["chat_template_kwargs"]))
    ),
    "max_tool_calling_iterations": _field(
        None,
        Setting(
            "env.max_turns",
            lambda f: (
                KEEP
                if f["max_tool_calling_iterations"] is None
                else f["max_tool_calling_iterations"] + 1
            ),
        ),
    ),
    "vllm_tensor_parallel_size": _field(1, *same("mesh.sampler.tensor")),
}
_TRAINING = {
    "model_init_kwargs": _field(None, Setting("model.param_dtype", _weights_of_the_model)),
    "learning_rate": _field(1e-6, *same("algorithm.learning_rate")),
    "lr_scheduler_type": _field("linear", Setting("trainer.schedule", _schedule)),
    "warmup_steps": _field(0, Setting("trainer.warmup_steps", _warmup)),
    "warmup_ratio": _field(0.0, Setting("trainer.warmup_steps", _warmup)),  # formerly
    "optim": _field("adamw_torch_fused", Setting("trainer", _optimizer)),
    "weight_decay": _field(0.0, *same("trainer.weight_decay")),
    "adam_beta1": _field(0.9, *same("trainer.beta1")),
    "adam_beta2": _field(0.999, *same("trainer.beta2")),
    "adam_epsilon": _field(1e-8, *same("trainer.epsilon")),
    "max_grad_norm": _field(
        1.0, Setting("trainer.max_grad_norm", lambda f: f["max_grad_norm"] or 1e30)
    ),
    "bf16": _field(None, Setting("model.dtype", _half)),
    "fp16": _field(False, Setting("model.dtype", _half)),
    "seed": _field(42, *same("run.seed")),
    "output_dir": _field(None, Setting("run.dir", _folder), Setting("run.name", _name)),
    "report_to": _field("none", *TRACKERS),
    "project": _field("huggingface", *TRACKERS[:3]),
    "run_name": _field(None, TRACKERS[0]),
    "eval_strategy": _field("no", EVAL),
    "eval_steps": _field(None, EVAL),
    "save_strategy": _field("steps", SAVE),
    "save_steps": _field(500, SAVE),
    "save_total_limit": _field(
        None, Setting("checkpoint.keep", lambda f: f["save_total_limit"] or KEEP)
    ),
    "resume_from_checkpoint": _field(
        None, Setting("run.resume", lambda f: True if f["resume_from_checkpoint"] else KEEP)
    ),
}
_UNCONVERTED = {
    **without("nothing is drawn out of a model but an adapter's inputs (model.lora.dropout)",
              disable_dropout=False),
    **without("log-probs are computed in float32 in any case", cast_lm_head_to_fp32=False),
    **without("code of a model's folder is never run; see data.chat_format and model.decoder",
              trust_remote_code=False),
    **without("a held-out prompt gets one answer; more: evals.NAME.samples",
              num_generations_eval=None),
    **without("records are shuffled in any case, in an order of run.seed",
              shuffle_dataset=True, data_seed=None, train_sampling_strategy="random",
              length_column_name="length"),
    **without("sampling has no such setting; sampler.temperature, top_k, top_p and min_p are there",
              generation_kwargs=None, repetition_penalty=1.0, vllm_structured_outputs_regex=None),
    **without("give weights with the functions: reward.function=[{my.py:f: {weight: 0.5}}]",
              reward_weights=None),
    **without("there is no threshold of a token's entropy", top_entropy_quantile=1.0),
    **without("the weight of the entropy bonus has no bounds",
              entropy_coef_min=0.0, entropy_coef_max=1.0),
    **without("the sampler of this package samples, and needs no such setting; see the section "
              "sampler, and sampler.engine=vllm",
              vllm_mode="colocate", vllm_model_impl="vllm", vllm_enable_sleep_mode=False,
              vllm_server_base_url=None, vllm_server_host="0.0.0.0", vllm_server_port=8000,
              vllm_server_timeout=240.0, vllm_group_port=51216, cache_implementation=None,
              use_transformers_continuous_batching=False, use_transformers_paged=False,
              transformers_continuous_batching_config=None, use_cache=False),
    **without("sampler.kv_memory_mib is in MiB, not a share", vllm_gpu_memory_utilization=0.3),
    **without("answers are recorded every metrics.samples_every updates, and on the dashboard",
              log_completions=False, log_multimodal=True, num_completions_to_print=None,
              log_unique_prompts=False, log_completions_hub_repo=None),
    **without("sequences are packed into rows; trainer.micro_batch_tokens bounds the memory",
              pad_to_multiple_of="auto", auto_find_batch_size=False, torch_empty_cache_steps=None,
              per_device_eval_batch_size=8, eval_accumulation_steps=None,
              average_tokens_across_devices=True),
    **without("the mesh shards weights and optimizer: mesh.trainer",
              ds3_gather_for_generation=True, fsdp=None, fsdp_config=None, deepspeed=None,
              accelerator_config=None, parallelism_config=None, ddp_find_unused_parameters=None,
              ddp_bucket_cap_mb=None, ddp_broadcast_buffers=None, ddp_static_graph=None,
              ddp_backend=None, ddp_timeout=1800, local_rank=-1),
    **without("recomputation is model.remat",
              gradient_checkpointing=True, gradient_checkpointing_kwargs=None,
              activation_checkpointing=None, activation_checkpointing_kwargs=None),
    **without("XLA compiles everything", torch_compile=False, torch_compile_backend=None,
              torch_compile_mode=None, use_liger_kernel=False, liger_kernel_config=None, tf32=None,
              bf16_full_eval=False, fp16_full_eval=False, full_determinism=False),
    **without("the schedule has no arguments", lr_scheduler_kwargs=None),
    **without("see trainer.optimizer", optim_args=None, optim_target_modules=None),
    **without("not for learning from rewards",
              label_smoothing_factor=0.0, neftune_noise_alpha=None, label_names=None,
              prediction_loss_only=False, include_for_metrics=[], batch_eval_metrics=False,
              eval_do_concat_batches=True, eval_use_gather_object=False),
    **without("metrics are written after each update; the log is run.logs",
              logging_strategy="steps", logging_steps=10, logging_first_step=False,
              log_on_each_node=True, logging_nan_inf_filter=True, log_level="passive",
              log_level_replica="warning", disable_tqdm=None, skip_memory_metrics=True, debug="",
              include_num_input_tokens_seen="no"),
    **without("the run is evaluated at its start and at its end in any case",
              eval_on_start=False, eval_delay=0),
    **without("metrics.trackio takes the project alone", trackio_space_id=None,
              trackio_bucket_id=None, trackio_static_space_id=None),
    **without("checkpoints hold all that a resumed run needs; the newest policy is kept",
              save_only_model=False, save_on_each_node=False, enable_jit_checkpoint=False,
              load_best_model_at_end=False, metric_for_best_model=None, greater_is_better=None,
              ignore_data_skip=False, restore_callback_states_from_checkpoint=False),
    **without("jaxrl-async export RUN OUT --upload OWNER/NAME uploads a policy",
              push_to_hub=False, hub_token=None, hub_private_repo=None, hub_model_id=None,
              hub_strategy="every_save", hub_always_push=False, hub_revision=None),
    **without("JAX_PLATFORMS=cpu computes on the CPU", use_cpu=False),
    **without("records are read in this process; all their columns are kept",
              dataloader_drop_last=False, dataloader_num_workers=0, dataloader_pin_memory=True,
              dataloader_persistent_workers=False, dataloader_prefetch_factor=None,
              dataloader_multiprocessing_context=None, dataloader_in_order=True,
              remove_unused_columns=False),
    **without("run.job says what a run does", do_train=False, do_eval=False, do_predict=False),
}  # fmt: skip
_ARGUMENTS = {
    "reward_funcs": _field(None, *same("reward=")),
    "model": _field(None, *same("model=")),
    "tools": _field(None, *same("tools=")),
    "train_dataset": _field(None, *same("data=")),
    "eval_dataset": _field(None, *same("eval_data=")),
    "peft_config": _field(None, Setting("model.lora", lambda f: lora_of(f["peft_config"]))),
    "callbacks": _field(None, *same("callbacks=")),
    "environment_factory": _field(None, *same("task=")),
    **without("give the settings themselves, or **jaxrl_async.from_trl(args, ...)", args=None),
    **without("data.tokenizer names another tokenizer than the model's", processing_class=None),
    **without("reward.model is the folder of a reward model", reward_processing_classes=None),
    **without("see trainer.optimizer", optimizers=(None, None)),
    **without("model.lora.base is the format of frozen weights", quantization_config=None),
    **without("a task's program plays whole episodes: task=Task(program=...)", rollout_func=None),
}
_SCRIPT = {  # of `trl grpo`: its ScriptArguments and ModelConfig
    "model_name_or_path": _field(
        None, Setting("model.path", lambda f: f["model_name_or_path"] or KEEP)
    ),
    "dtype": _field("float32", Setting("model.param_dtype", _script_dtype)),
    "use_peft": _field(False, LORA),
    "lora_r": _field(16, LORA),
    "lora_alpha": _field(32, LORA),
    "lora_dropout": _field(0.05, LORA),
    "lora_target_modules": _field(None, LORA),
    "use_rslora": _field(False, LORA),
    "use_dora": _field(False, LORA),
    "lora_modules_to_save": _field(None, LORA),
    "dataset_name": _field(None, *DATASET),
    "dataset_config": _field(None, *DATASET),
    "dataset_train_split": _field("train", *DATASET),
    "dataset_test_split": _field("test", *DATASET),
    "reward_funcs": _field(None, Setting("reward.function", _script_rewards)),
    **without("reward.model is the folder of a reward model", reward_model_name_or_path=None),
    **without("model.path is a folder or a name", model_revision="main"),
    **without("trainer.cpu_kernels and model.attention choose attention", attn_implementation=None),
    **without("model.lora.base is the format of frozen weights", load_in_8bit=False,
              load_in_4bit=False, bnb_4bit_quant_type="nf4", use_bnb_nested_quant=False,
              bnb_4bit_quant_storage=None),
    **without("name the matrices in model.lora.targets", lora_target_parameters=None,
              lora_task_type="CAUSAL_LM"),
    **without("records are read as a whole", dataset_streaming=False),
    **without("only the policy's own weights are trained", ignore_bias_buffers=False),
}  # fmt: skip
TRL = Peer(
    name="TRL",
    fields={**_ALGORITHM, **_SAMPLING, **_TRAINING, **_UNCONVERTED, **_SCRIPT},
    arguments=_ARGUMENTS,
    notes={
        "sampler.max_length": "TRL does not bound prompts: without max_prompt_length "
        f"this leaves {PROMPT_TOKENS} tokens",
        "algorithm.advantage": "group_normalized divides by the deviation of the population, TRL "
        "by that of the sample: advantages are sqrt(G / (G - 1)) times larger",
        "staleness.max_staleness": "generation overlaps with training; 0 is TRL's order",
    },
)
