"""verl's trainer for PPO and GRPO (main_ppo, configuration ppo_trainer), by dotted names."""

from collections.abc import Mapping
from typing import Any

from jaxrl_async.config.peers.counterpart import (
    KEEP,
    RECORDS,
    Fields,
    NoCounterpart,
    Peer,
    PeerField,
    Setting,
    chat_arguments,
    kl_estimator,
    other_trackers,
    run_name,
    same,
    tracker,
    whole,
    without,
)

ACTOR, ROLLOUT, MODEL = (f"actor_rollout_ref.{name}" for name in ("actor", "rollout", "model"))
OPTIM, TURNS = f"{ACTOR}.optim", f"{ROLLOUT}.multi_turn"


def _minibatches(f: Fields) -> int:
    prompts, part = f["data.train_batch_size"], f[f"{ACTOR}.ppo_mini_batch_size"]
    if prompts % part and prompts > part:
        raise NoCounterpart(
            f"data.train_batch_size ({prompts}) is not a multiple of ppo_mini_batch_size ({part}); "
            "set algorithm.minibatches"
        )
    return max(prompts // part, 1)


def _steps(f: Fields) -> int:
    if f["trainer.total_training_steps"]:
        return int(f["trainer.total_training_steps"])
    if f[RECORDS] is None:
        raise NoCounterpart(
            "epochs are counted in records, whose number is unknown here; give it, or set run.steps"
        )
    return whole(f["trainer.total_epochs"] * (f[RECORDS] // f["data.train_batch_size"]))


def _warmup(f: Fields) -> int:
    """verl's schedule advances once a step, ours with each optimizer update."""
    steps = f[f"{OPTIM}.lr_warmup_steps"]
    if steps is None or steps < 0:
        share = f[f"{OPTIM}.lr_warmup_steps_ratio"]
        steps = share * _steps(f) if share else 0
    return round(steps * f[f"{ACTOR}.ppo_epochs"] * _minibatches(f))


def _schedule(f: Fields) -> Any:
    kind = f[f"{OPTIM}.warmup_style"] or f[f"{OPTIM}.lr_scheduler_type"]
    if kind not in ("constant", "cosine", "linear"):
        raise NoCounterpart(f"there is no schedule {kind!r}: constant, linear or cosine")
    return kind


def _loss(f: Fields) -> Any:
    kind = f[f"{ACTOR}.policy_loss.loss_mode"]
    ratio, low, high = (f[f"{ACTOR}.clip_ratio{end}"] for end in ("", "_low", "_high"))
    clips = {
        "clip_low": ratio if low is None else low,
        "clip_high": ratio if high is None else high,
    }
    if kind == "vanilla":
        bound = f[f"{ACTOR}.clip_ratio_c"]
        return {"ppo_clip": {**clips, "dual_clip": bound} if bound else clips}
    if kind == "gspo":
        return {"gspo": clips}
    if kind == "geo_mean":
        return {"geo_mean": clips}
    if kind == "sapo":
        return {"sapo": {"tau_pos": f[f"{ACTOR}.tau_pos"], "tau_neg": f[f"{ACTOR}.tau_neg"]}}
    if kind == "gpg":
        return "gpg"
    raise NoCounterpart(f"set algorithm.loss by hand for loss_mode {kind!r} (docs/functions.md)")


def _aggregate(f: Fields) -> Any:
    kind = f[f"{ACTOR}.loss_agg_mode"]
    divisor = f[f"{ACTOR}.loss_scale_factor"] or f["data.max_response_length"]
    known: dict[str, Any] = {
        "token-mean": "token_mean",
        "seq-mean-token-mean": "sequence_mean",
        "seq-mean-token-sum": "sequence_sum",
        "seq-mean-token-sum-norm": {"constant": {"divisor": divisor}},
    }
    if kind not in known:
        raise NoCounterpart(f"there is no loss_agg_mode {kind!r}; see algorithm.aggregate")
    return known[kind]


def _advantage(f: Fields) -> Any:
    kind = str(f["algorithm.adv_estimator"])
    if kind == "gae":
        return {"gae": {"gamma": f["algorithm.gamma"], "lam": f["algorithm.lam"]}}
    if kind == "grpo":
        return "group_normalized" if f["algorithm.norm_adv_by_std_in_grpo"] else "group_mean"
    known: dict[str, Any] = {
        "rloo": "rloo",
        "opo": "opo",
        "reinforce_plus_plus": {"reinforce_pp": {"gamma": f["algorithm.gamma"]}},
        "reinforce_plus_plus_baseline": "reinforce_pp_baseline",
    }
    if kind not in known:
        raise NoCounterpart(f"there is no estimator {kind!r}; see algorithm.advantage")
    return known[kind]


def _kl_in(f: Fields) -> str | None:
    """Return where the KL goes; None: nowhere."""
    in_loss, in_reward = f[f"{ACTOR}.use_kl_loss"], f["algorithm.use_kl_in_reward"]
    if in_loss and in_reward:
        raise NoCounterpart("the KL is in the loss or in the reward (algorithm.kl_in), not in both")
    return "loss" if in_loss else "reward" if in_reward else None


def _kl(f: Fields) -> Any:
    where = _kl_in(f)
    if where is None:
        return KEEP
    kind = f[f"{ACTOR}.kl_loss_type" if where == "loss" else "algorithm.kl_penalty"]
    return kl_estimator(kind, where=where)


def _coefficient(f: Fields) -> Any:
    where = _kl_in(f)
    if where == "reward" and f["algorithm.kl_ctrl.type"] != "fixed":
        raise NoCounterpart("set algorithm.kl_coefficient, kl_target and kl_horizon by hand")
    names = {"loss": f"{ACTOR}.kl_loss_coef", "reward": "algorithm.kl_ctrl.kl_coef"}
    return KEEP if where is None else f[names[where]]


def _correction(f: Fields) -> Any:
    kind, cap = (f[f"algorithm.rollout_correction.rollout_is{end}"] for end in ("", "_threshold"))
    if kind is None:
        return KEEP
    if kind not in ("token", "sequence"):
        raise NoCounterpart(f"there is no correction {kind!r}; see algorithm.correction")
    return [{"truncate": {"cap": cap, **({} if kind == "token" else {"level": kind})}}]


def _anchor(f: Fields) -> Any:
    corrected = f["algorithm.rollout_correction.rollout_is"] is not None
    bypassed = f["algorithm.rollout_correction.bypass_mode"]
    return "proximal" if corrected and not bypassed else KEEP


def _shaping(f: Fields) -> Any:
    found: list[Any] = []
    if f["reward_model.overlong_buffer.enable"]:
        length, factor = (
            f[f"reward_model.overlong_buffer.{name}"] for name in ("len", "penalty_factor")
        )
        amounts = {"max_tokens": f["data.max_response_length"], "cache_tokens": length}
        found.append({"soft_overlong": {**amounts, "weight": factor}})
    return found or KEEP


def _lora(f: Fields) -> Any:
    rank = f[f"{MODEL}.lora_rank"]
    if not rank:
        return KEEP
    if f[f"{MODEL}.exclude_modules"]:
        raise NoCounterpart("name the adapted matrices themselves: model.lora.targets")
    targets = f[f"{MODEL}.target_modules"]
    return {"rank": rank, "alpha": float(f[f"{MODEL}.lora_alpha"]), "targets": targets}


def _file(name: str) -> Any:
    """Return the conversion of verl's list of files, which may be one file."""

    def path(f: Fields) -> Any:
        given = f[name]
        files = [given] if isinstance(given, str) else list(given or ())
        if len(files) > 1:
            raise NoCounterpart("data.jsonl has one path; put the files into one folder")
        return str(files[0]) if files else KEEP

    return path


def _reward(f: Fields) -> Any:
    for section in ("reward.custom_reward_function", "custom_reward_function"):
        if path := f[f"{section}.path"]:
            return f"{path}:{f[f'{section}.name'] or 'compute_score'}"
    return KEEP


def _if_critic(name: str) -> Any:
    return lambda f: f[name] if f["algorithm.adv_estimator"] == "gae" else KEEP


def _every(name: str) -> Any:
    return lambda f: max(int(f[name] or 0), 0)


LOSS = Setting("algorithm.loss", _loss)
AGGREGATE = Setting("algorithm.aggregate", _aggregate)
ADVANTAGE = Setting("algorithm.advantage", _advantage)
MINIBATCHES = Setting(
    "algorithm.minibatches", lambda f: KEEP if _minibatches(f) == 1 else _minibatches(f), joint=True
)
STEPS = Setting("run.steps", _steps, joint=True)
WARMUP = Setting("trainer.warmup_steps", _warmup, joint=True)
SCHEDULE = Setting("trainer.schedule", _schedule)
KL = (
    Setting("algorithm.kl_coefficient", _coefficient),
    Setting("algorithm.kl", _kl),
    Setting("algorithm.kl_in", lambda f: _kl_in(f) or KEEP),
)
CORRECTION = (
    Setting("algorithm.correction", _correction),
    Setting("algorithm.anchor", _anchor),
)
SHAPING = Setting("algorithm.shaping", _shaping)
REWARD = Setting("reward.function", _reward)
STALENESS = Setting(
    "staleness.max_staleness",
    lambda f: (
        KEEP
        if f["trainer.v1.trainer_mode"] == "sync"
        else f["trainer.v1.sampler.max_off_policy_threshold"]
    ),
)
LORA = Setting("model.lora", _lora)
LENGTH = Setting(
    "sampler.max_length", lambda f: f["data.max_prompt_length"] + f["data.max_response_length"]
)
NAMES = ("trainer.logger", "trainer.project_name")
TRACKERS = (
    Setting("metrics.wandb", tracker("wandb", *NAMES, "project", "trainer.experiment_name")),
    Setting("metrics.mlflow", tracker("mlflow", *NAMES, "experiment")),
    Setting("metrics.trackio", tracker("trackio", *NAMES, "project")),
    Setting(
        "metrics",
        other_trackers(NAMES[0], ("console", "wandb", "mlflow", "trackio", "tensorboard", "file")),
    ),
)


def _field(default: object, *settings: Setting) -> PeerField:
    return PeerField(default=default, settings=settings)


def _below(prefix: str, fields: Mapping[str, PeerField]) -> dict[str, PeerField]:
    return {f"{prefix}.{name}": one for name, one in fields.items()}


_FIELDS = {
    "data.train_batch_size": _field(1024, *same("algorithm.groups_per_step"), MINIBATCHES),
    "data.max_prompt_length": _field(512, *same("data.max_prompt_tokens"), LENGTH),
    "data.max_response_length": _field(512, *same("sampler.max_new_tokens"), LENGTH),
    "data.train_files": _field(
        None,
        Setting("data.jsonl.path", _file("data.train_files")),
    ),
    "data.val_files": _field(None, Setting("data.jsonl.eval_path", _file("data.val_files"))),
    "data.prompt_key": _field(
        "prompt",
        Setting(
            "data.jsonl.messages_field",
            lambda f: KEEP if _file("data.train_files")(f) is KEEP else f["data.prompt_key"],
        ),
    ),
    "data.tokenizer": _field(
        None, Setting("data.tokenizer", lambda f: f["data.tokenizer"] or KEEP)
    ),
    "data.seed": _field(None, Setting("run.seed", lambda f: f["data.seed"] or KEEP)),
    "data.apply_chat_template_kwargs": _field(
        None,
        Setting(
            "data.chat_arguments", lambda f: chat_arguments(f["data.apply_chat_template_kwargs"])
        ),
    ),
    **_below(ROLLOUT, {
        "n": _field(1, *same("algorithm.group_size")),
        "temperature": _field(1.0, *same("sampler.temperature")),
        "top_p": _field(1.0, Setting("sampler.top_p", lambda f: float(f[f"{ROLLOUT}.top_p"]))),
        "top_k": _field(-1, Setting("sampler.top_k", lambda f: max(f[f"{ROLLOUT}.top_k"], 0))),
        "val_kwargs.temperature": _field(0.0, *same("eval.temperature")),
        "multi_turn.max_assistant_turns": _field(
            None, Setting("env.max_turns", lambda f: f[f"{TURNS}.max_assistant_turns"] or KEEP)),
        "max_model_len": _field(
            None, Setting("sampler.max_length", lambda f: f[f"{ROLLOUT}.max_model_len"] or KEEP)),
        **without("see sampler.engine", name=None),
    }),
    **_below(MODEL, {
        "path": _field(None, Setting("model.path", lambda f: f[f"{MODEL}.path"] or KEEP)),
        "tokenizer_path": _field(
            None, Setting("data.tokenizer", lambda f: f[f"{MODEL}.tokenizer_path"] or KEEP)),
        "lora_rank": _field(0, LORA),
        "lora_alpha": _field(16, LORA),
        "target_modules": _field("all-linear", LORA),
        "exclude_modules": _field(None, LORA),
    }),
    **_below(ACTOR, {
        "ppo_mini_batch_size": _field(256, MINIBATCHES),
        "ppo_epochs": _field(1, *same("algorithm.epochs")),
        "clip_ratio": _field(0.2, LOSS),
        "clip_ratio_low": _field(0.2, LOSS),
        "clip_ratio_high": _field(0.2, LOSS),
        "clip_ratio_c": _field(3.0, LOSS),
        "tau_pos": _field(1.0, LOSS),
        "tau_neg": _field(1.05, LOSS),
        "policy_loss.loss_mode": _field("vanilla", LOSS),
        "loss_agg_mode": _field("token-mean", AGGREGATE),
        "loss_scale_factor": _field(None, AGGREGATE),
        "entropy_coeff": _field(0, *same("algorithm.entropy_coefficient")),
        "use_kl_loss": _field(False, *KL),
        "kl_loss_coef": _field(0.001, *KL),
        "kl_loss_type": _field("low_var_kl", *KL),
        "grad_clip": _field(1.0, *same("trainer.max_grad_norm")),
        "optim.lr": _field(1e-6, *same("algorithm.learning_rate")),
        "optim.lr_warmup_steps": _field(-1, WARMUP),
        "optim.lr_warmup_steps_ratio": _field(0.0, WARMUP),
        "optim.weight_decay": _field(0.01, *same("trainer.weight_decay")),
        "optim.betas": _field(
            [0.9, 0.999],
            Setting("trainer.beta1", lambda f: f[f"{OPTIM}.betas"][0]),
            Setting("trainer.beta2", lambda f: f[f"{OPTIM}.betas"][1])),
        "optim.lr_scheduler_type": _field("constant", SCHEDULE),
        "optim.warmup_style": _field(None, SCHEDULE),
    }),
    "algorithm.adv_estimator": _field("gae", ADVANTAGE),
    "algorithm.gamma": _field(1.0, ADVANTAGE),
    "algorithm.lam": _field(1.0, ADVANTAGE),
    "algorithm.norm_adv_by_std_in_grpo": _field(True, ADVANTAGE),
    "algorithm.use_kl_in_reward": _field(False, *KL),
    "algorithm.kl_penalty": _field("kl", *KL),
    "algorithm.kl_ctrl.type": _field("fixed", *KL),
    "algorithm.kl_ctrl.kl_coef": _field(0.001, *KL),
    "algorithm.rollout_correction.rollout_is": _field(None, *CORRECTION),
    "algorithm.rollout_correction.rollout_is_threshold": _field(2.0, *CORRECTION),
    "algorithm.rollout_correction.bypass_mode": _field(False, *CORRECTION),
    "algorithm.filter_groups.enable": _field(
        False,
        Setting(
            "algorithm.dynamic_sampling", lambda f: bool(f["algorithm.filter_groups.enable"])
        ),
    ),
    "reward_model.overlong_buffer.enable": _field(False, SHAPING),
    "reward_model.overlong_buffer.len": _field(0, SHAPING),
    "reward_model.overlong_buffer.penalty_factor": _field(0.0, SHAPING),
    "critic.optim.lr": _field(1e-5, Setting("critic.learning_rate", _if_critic("critic.optim.lr"))),
    "critic.cliprange_value": _field(
        0.5, Setting("critic.clip", _if_critic("critic.cliprange_value"))
    ),
    "critic.model.path": _field(
        None, Setting("critic.path", lambda f: _if_critic("critic.model.path")(f) or KEEP)
    ),
    "trainer.critic_warmup": _field(
        0, Setting("critic.warmup_steps", _if_critic("trainer.critic_warmup"))
    ),
    "reward.custom_reward_function.path": _field(None, REWARD),
    "reward.custom_reward_function.name": _field("compute_score", REWARD),
    "custom_reward_function.path": _field(None, REWARD),
    "custom_reward_function.name": _field(None, REWARD),
    "trainer.v1.trainer_mode": _field("sync", STALENESS),
    "trainer.v1.sampler.max_off_policy_threshold": _field(8, STALENESS),
    "trainer.total_training_steps": _field(None, STEPS),
    "trainer.total_epochs": _field(30, STEPS),
    "trainer.experiment_name": _field(
        "gsm8k",
        Setting("run.name", lambda f: run_name(str(f["trainer.experiment_name"]))),
        TRACKERS[0],
    ),
    "trainer.project_name": _field("verl_examples", *TRACKERS[:3]),
    "trainer.logger": _field(["console", "wandb"], *TRACKERS),
    "trainer.save_freq": _field(-1, Setting("checkpoint.every", _every("trainer.save_freq"))),
    "trainer.test_freq": _field(-1, Setting("eval.every", _every("trainer.test_freq"))),
    "trainer.max_actor_ckpt_to_keep": _field(
        None,
        Setting("checkpoint.keep", lambda f: f["trainer.max_actor_ckpt_to_keep"] or KEEP),
    ),
}  # fmt: skip
_MESH = "see the section mesh"
_PACKED = "sequences are packed into rows; trainer.micro_batch_tokens bounds the memory"
_SAMPLER = "the sampler of this package samples; see the section sampler, and sampler.engine=vllm"
_PROFILE = "run.profile traces steps, metrics.spans all threads"
_FILES = "checkpoints lie in the run's folder: run.dir, run.name and the section checkpoint"
_FAST = "XLA compiles everything; recomputation is model.remat"
_OPTIMIZER = "see trainer.optimizer, and the section trainer"
_RECORDS = "records are read by the section data"
_REWARD = "see the sections reward and reward.judge"
_LEAVES = {
    **_below("data", {
        **without("one reward is for all records; a reward function may read a column",
                  reward_fn_key="data_source"),
        **without("longer prompts are left out and counted, never cut", truncation="error",
                  filter_overlong_prompts=False, filter_overlong_prompts_workers=1),
        **without("a task's tools are functions of Python (docs/environments.md)",
                  tool_config_path=KEEP, function_tool_path=KEEP),
        **without("records are shuffled in any case, in an order of run.seed", shuffle=True,
                  validation_shuffle=False),
        **without("data.jsonl.eval_size bounds held-out records; a file has all training records",
                  train_max_samples=-1, val_max_samples=-1, val_batch_size=None,
                  gen_batch_size=None),
        **without(_RECORDS, use_shm=False, return_raw_input_ids=False, return_raw_chat=True,
                  return_full_prompt=False, dataloader_num_workers=8, trust_remote_code=False),
        **without("images are in the records (docs/images.md)", image_patch_size=14,
                  image_key="images", video_key="videos", audio_key="audios",
                  return_multi_modal_inputs=True),
    }),
    **_below("trainer", {
        **without(_MESH, nnodes=1, n_gpus_per_node=8, device="cuda", use_legacy_worker_impl="auto",
                  use_v1=True,
                  ray_wait_register_center_timeout=300),
        **without(_PACKED, balance_batch=True),
        **without("metrics.samples_every records answers", log_val_generations=0,
                  rollout_data_dir=None, validation_data_dir=None),
        **without("run.resume and run.resume_or_start resume a run", resume_mode="auto",
                  resume_from_path=None),
        **without("the run is evaluated at its start and at its end in any case",
                  val_before_train=True, val_only=False),
        **without(_FILES, default_local_dir=KEEP, del_local_ckpt_after_load=False,
                  max_critic_ckpt_to_keep=None, checkpoint_callback_class=None),
        **without("run.copy_to copies a run to a bucket", default_hdfs_dir=None),
        **without("checkpoint.grace_s is the time to save after a signal", esi_redundant_time=0),
    }),
    **_below("critic", {
        **without("the critic trains with the policy, in its batches", rollout_n=KEEP,
                  ppo_mini_batch_size=KEEP, ppo_micro_batch_size=None,
                  ppo_micro_batch_size_per_gpu=KEEP, use_dynamic_bsz=KEEP,
                  ppo_max_token_len_per_gpu=32768, forward_max_token_len_per_gpu=KEEP,
                  forward_micro_batch_size=KEEP, forward_micro_batch_size_per_gpu=KEEP,
                  ppo_epochs=KEEP, shuffle=KEEP, data_loader_seed=42, loss_agg_mode=KEEP,
                  loss_scale_factor=KEEP, grad_clip=1.0),
        **without("algorithm.advantage=gae trains a critic", enable=None),
        **without(_MESH, strategy="fsdp", ulysses_sequence_parallel_size=1),
    }),
    "algorithm.use_pf_ppo": PeerField(
        default=False, reason="samples are not weighted by their rewards"
    ),
    "algorithm.rollout_correction.rollout_rs": PeerField(
        default=None, reason="algorithm.correction=reject rejects sequences; set it by hand"
    ),
    "algorithm.rollout_correction.rollout_rs_threshold": PeerField(
        default=None, reason="algorithm.correction=reject rejects sequences; set it by hand"
    ),
    "algorithm.rollout_correction.loss_type": PeerField(
        default="ppo_clip", reason="it is algorithm.loss"
    ),
    "algorithm.rollout_correction.rollout_is_batch_normalize": PeerField(
        default=False, reason="the weights of a correction are not normalised"
    ),
}  # fmt: skip
_UNCONVERTED = {
    "actor_rollout_ref": "it has no counterpart here",
    f"{ACTOR}": _PACKED,
    f"{ACTOR}.fsdp_config": _MESH,
    f"{ACTOR}.checkpoint": _FILES,
    f"{ACTOR}.profiler": _PROFILE,
    f"{ACTOR}.router_replay": "algorithm.keep_routing replays the sampler's choice of experts",
    f"{ACTOR}.optim": _OPTIMIZER,
    f"{ACTOR}.policy_loss": "set algorithm.loss by hand for these (docs/functions.md)",
    f"{ACTOR}.strategy": _MESH,
    f"{ACTOR}.shuffle": "run.seed shuffles the parts of a step (algorithm.minibatches)",
    f"{ACTOR}.freeze_vision_tower": "towers of images are frozen in any case",
    "actor_rollout_ref.ref": "the reference is computed where the policy is; see reference",
    "actor_rollout_ref.hybrid_engine": "mesh.colocated shares devices",
    "actor_rollout_ref.nccl_timeout": "see the section faults",
    ROLLOUT: _SAMPLER,
    f"{ROLLOUT}.prompt_length": "it is data.max_prompt_length, which is converted",
    f"{ROLLOUT}.response_length": "it is data.max_response_length, which is converted",
    f"{ROLLOUT}.val_kwargs": "a held-out prompt gets one answer; more: evals.NAME.samples",
    f"{ROLLOUT}.multi_turn": "tools and turns belong to the task (docs/environments.md)",
    f"{ROLLOUT}.agent": "agents are programs of a task (docs/agents.md)",
    f"{ROLLOUT}.profiler": _PROFILE,
    f"{ROLLOUT}.trace": "metrics.samples_every records answers",
    f"{ROLLOUT}.prometheus": "metrics.prometheus is the run's",
    MODEL: _FAST,
    f"{MODEL}.trust_remote_code": "code of a model's folder is never run; see model.decoder",
    f"{MODEL}.external_lib": "code of a model's folder is never run; see model.decoder",
    f"{MODEL}.custom_chat_template": "data.chat_format takes a FILE.jinja",
    f"{MODEL}.lora_adapter_path": "jaxrl-async export MODEL OUT --adapter DIR adds an adapter",
    f"{MODEL}.mtp": "no further tokens are predicted at a time",
    f"{MODEL}.hf_config_path": "config.json is read from model.path",
    f"{MODEL}.override_config": "config.json is read from model.path",
    "reward_manager": _REWARD,
    "reward.reward_manager": _REWARD,
    "reward.reward_model": "reward.model is the folder of a reward model; see the section reward",
    "reward.sandbox_fusion": _REWARD,
    "reward.num_workers": "reward.threads and reward.processes bound concurrent calls",
    "sandbox_fusion": _REWARD,
    "skip": "run.replay_schedule replays a run",
    "trainer.v1": "see the section staleness",
    "critic.optim": "the other settings are the policy's: see the section trainer",
    "critic.fsdp": _MESH,
    "critic.model": "the critic has the policy's sizes and mesh; see the section critic",
    "critic.checkpoint": _FILES,
    "critic.profiler": _PROFILE,
    "data.custom_cls": _RECORDS,
    "data.sampler": "data.curriculum orders the prompts",
    "data.datagen": _RECORDS,
    "reward_model": "reward.model is the folder of a reward model; see the section reward",
    "algorithm.filter_groups": "algorithm.signal_part and max_resampled belong to it",
    "algorithm.pf_ppo": "samples are not weighted by their rewards",
    "algorithm.kl_ctrl": "algorithm.kl_target and kl_horizon adapt the coefficient",
    "global_profiler": _PROFILE,
    "transfer_queue": "the replay buffer is in the trainer's memory",
    "ray_kwargs": "docs/devices.md starts a run on Ray",
    "distillation": "see the section teacher",
}
VERL = Peer(
    name="verl",
    fields={**_FIELDS, **_LEAVES},
    sections=_UNCONVERTED,
    notes={
        "data.jsonl.messages_field": "answers are read from the column data.jsonl.answer_field; "
        "verl's are in reward_model.ground_truth: write a column of them",
        "algorithm.advantage": "group_normalized divides by the deviation of the population, verl "
        "by that of the sample: advantages are sqrt(G / (G - 1)) times larger",
        "staleness.max_staleness": "generation overlaps with training; 0 is verl's order",
    },
)
