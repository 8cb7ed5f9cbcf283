"""Names of TRL, verl and Tunix: every field is known, and conversions give the right values.

peer_fields.json has the libraries' own fields with their defaults, as their packages declare them;
tests/agreement compares it with the installed libraries.
"""

import json
from pathlib import Path

import pytest
import yaml

from jaxrl_async.command.convert import main
from jaxrl_async.config.load import load, unknown_setting
from jaxrl_async.config.peers.counterpart import KEEP, NoCounterpart, converted
from jaxrl_async.config.peers.peer_files import nested
from jaxrl_async.config.peers.peer_hints import PEERS, peer_hint
from jaxrl_async.config.peers.trl_fields import TRL, lora_of
from jaxrl_async.config.peers.tunix_fields import TUNIX
from jaxrl_async.config.peers.verl_fields import VERL
from jaxrl_async.config.schema import Config
from jaxrl_async.errors import ConfigError

FIELDS = {
    name.partition(" ")[0]: fields
    for name, fields in json.loads(
        (Path(__file__).parent / "peer_fields.json").read_text(encoding="utf-8")
    ).items()
}
OTHER_DEFAULTS = {
    # of DAPOConfig, which GRPOConfig lacks; an example's path; a required field
    "Tunix": {"epsilon_high", "dynamic_sampling", "overlong_buffer", "eval_every_n_steps"},
    "verl": {"actor_rollout_ref.model.path", "data.train_files", "data.val_files"}
    | {"critic.model.path"},
    "TRL": set(),
}


@pytest.mark.parametrize("peer", PEERS, ids=lambda p: p.name)
def test_every_field_of_a_library_has_a_counterpart_or_a_reason(peer):
    own = FIELDS[peer.name]
    assert len(own) > 80
    missing = [name for name in own if peer.find(name) is None]
    assert missing == []
    bare = [n for n, one in peer.fields.items() if not (one.settings or one.reason)]
    assert bare == []


@pytest.mark.parametrize("peer", PEERS, ids=lambda p: p.name)
def test_defaults_are_the_librarys(peer):
    wrong = {
        name: (one.default, FIELDS[peer.name][name])
        for name, one in peer.fields.items()
        if name in FIELDS[peer.name] and one.default is not KEEP
        if json.loads(json.dumps(one.default)) != FIELDS[peer.name][name]
        and name not in OTHER_DEFAULTS[peer.name]
        and str(one.default) != FIELDS[peer.name][name]
    }
    assert wrong == {}


@pytest.mark.parametrize("peer", PEERS, ids=lambda p: p.name)
def test_counterparts_are_settings_and_their_values_are_allowed(peer):
    known = {s.path for one in peer.fields.values() for s in one.settings}
    names = {p for p in known if not p.endswith("=")}
    for path in names:
        kind = Config
        for part in path.split("."):
            assert part in kind.model_fields, path
            inner = kind.model_fields[part].annotation
            arguments = getattr(inner, "__args__", (inner,))
            kind = next((a for a in arguments if hasattr(a, "model_fields")), None)
    found = converted(peer, {}, records=10_000)
    load(nested(found.settings))
    # Tunix's default estimator of the KL has no gradient in a loss
    assert set(found.unconverted) == ({"beta"} if peer is TUNIX else set())


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"num_generations": 4, "per_device_train_batch_size": 16}, {"group_size": 4}),
        ({"gradient_accumulation_steps": 4}, {"groups_per_step": 4}),  # 8 * 4 / 8
        (
            # 8 * 4 / 4 prompts are sampled, and each half makes an update, three times
            {"steps_per_generation": 4, "gradient_accumulation_steps": 2, "num_iterations": 3}
            | {"num_generations": 4},
            {"groups_per_step": 8, "minibatches": 2, "epochs": 3},
        ),
        (
            # 8 * 8 / 4 prompts of two samplings make one update
            {"steps_per_generation": 4, "gradient_accumulation_steps": 8, "num_generations": 4},
            {"groups_per_step": 16},
        ),
        ({"generation_batch_size": 32}, {"groups_per_step": 4, "minibatches": 4}),
        ({"epsilon": 0.1}, {"loss": {"ppo_clip": {"clip_low": 0.1, "clip_high": 0.1}}}),
        (
            {"epsilon_high": 0.28, "delta": 1.5},
            {"loss": {"ppo_clip": {"clip_low": 0.2, "clip_high": 0.28, "dual_clip": 1.5}}},
        ),
        (
            {"loss_type": "dr_grpo", "max_completion_length": 700, "scale_rewards": False},
            {"aggregate": {"constant": {"divisor": 700}}, "advantage": "group_mean"},
        ),
        (
            {"loss_type": "grpo", "importance_sampling_level": "sequence", "epsilon": 3e-4}
            | {"epsilon_high": 4e-4},
            {"loss": {"gspo": {"clip_low": 3e-4, "clip_high": 4e-4}}}
            | {"aggregate": "sequence_mean"},
        ),
        ({"loss_type": "cispo", "epsilon_high": 5.0}, {"loss": {"cispo": {"clip_high": 4.0}}}),
        ({"beta": 0.04}, {"kl_coefficient": 0.04, "kl": "unbiased"}),
        ({"beta": 0.04, "use_bias_correction_kl": False}, {"kl_coefficient": 0.04, "kl": "k3"}),
        (
            {"use_vllm": True},
            {"anchor": "proximal", "correction": [{"mask": {"cap": 3.0, "level": "sequence"}}]},
        ),
        (
            {"off_policy_mask_threshold": 0.5},
            {"correction": ["truncate_token", {"opsm": {"delta": 0.5}}]},
        ),
        ({"mask_truncated_completions": True}, {"shaping": ["mask_truncated"]}),
        ({"learning_rate": "1e-5"}, {"learning_rate": 1e-5}),  # as PyYAML reads 1e-5
    ],
)
def test_the_algorithm_of_trl(given, expected):
    found = converted(TRL, given)
    told = {k.removeprefix("algorithm."): v for k, v in found.settings.items()}
    assert {name: told.get(name) for name in expected} == expected


@pytest.mark.parametrize(
    ("given", "devices", "records", "expected"),
    [
        ({"max_steps": 100}, 1, None, {"run.steps": 100, "checkpoint.every": 500}),
        # two optimizer updates a step here
        (
            {"max_steps": 101, "num_iterations": 2, "eval_strategy": "steps", "eval_steps": 10},
            1,
            None,
            {"run.steps": 51, "checkpoint.every": 250, "eval.every": 5},
        ),
        # 8 * 4 / 8 = 4 prompts a step, 25 steps an epoch
        ({"num_train_epochs": 3}, 4, 100, {"run.steps": 75, "algorithm.groups_per_step": 4}),
        (
            {"max_steps": 200, "warmup_steps": 0.1, "save_strategy": "no"},
            1,
            None,
            {"trainer.warmup_steps": 20, "checkpoint.every": 0, "trainer.schedule": "linear"},
        ),
        (
            {"max_steps": 200, "warmup_ratio": 0.1, "max_prompt_length": 100},
            1,
            None,
            {"trainer.warmup_steps": 20, "data.max_prompt_tokens": 100, "sampler.max_length": 612},
        ),
        (
            {"max_steps": 9, "report_to": ["wandb", "tensorboard"], "run_name": "x"},
            1,
            None,
            {"metrics.wandb": {"project": "huggingface", "name": "x"}},
        ),
        ({"max_steps": 9, "output_dir": "out/my run"}, 1, None, {"run.dir": "out"}),
        ({"max_steps": 9, "output_dir": "out/my run"}, 1, None, {"run.name": "my-run"}),
    ],
)
def test_the_lengths_and_names_of_trl(given, devices, records, expected):
    found = converted(TRL, given, devices=devices, records=records)
    assert {path: found.settings.get(path) for path in expected} == expected
    assert found.unconverted == {}


def test_what_trl_has_and_we_have_not_is_left_with_its_reason():
    given = {
        "max_steps": 9,
        "optim": "adafactor",
        "top_entropy_quantile": 0.2,
        "report_to": "comet",
    }
    found = converted(TRL, {**given, "loss_type": "new", "nonsense": 1, "log_completions": False})
    assert set(found.unconverted) == {"optim", "top_entropy_quantile", "report_to", "loss_type"} | {
        "nonsense"
    }
    assert (
        "trainer.optimizer takes adamw, muon" in found.unconverted["optim"]
        and "comet" in found.unconverted["report_to"]
    )
    assert "algorithm.aggregate" not in found.settings


def test_verls_units_are_converted():
    words = {
        "data.train_batch_size": 256,
        "actor_rollout_ref.actor.ppo_mini_batch_size": 64,
        "actor_rollout_ref.actor.ppo_epochs": 2,
        "actor_rollout_ref.actor.optim.lr_warmup_steps": 10,
        "actor_rollout_ref.rollout.n": 16,
        "data.max_prompt_length": 1000,
        "data.max_response_length": 3000,
        "actor_rollout_ref.actor.loss_agg_mode": "seq-mean-token-sum-norm",
        "algorithm.adv_estimator": "grpo",
        "algorithm.norm_adv_by_std_in_grpo": False,
        "actor_rollout_ref.actor.clip_ratio_high": 0.28,
        "actor_rollout_ref.actor.use_kl_loss": True,
        "data.train_files": "a.parquet",
        "actor_rollout_ref.actor.kl_loss_type": "mse",
        "reward.custom_reward_function.path": "my.py",
        "trainer.total_epochs": 2,
        "trainer.save_freq": 20,
    }
    found = converted(VERL, words, records=1000)
    expected = {
        "algorithm.groups_per_step": 256,
        "algorithm.minibatches": 4,
        "algorithm.epochs": 2,
        "trainer.warmup_steps": 80,  # verl's schedule advances once a step
        "algorithm.group_size": 16,
        "sampler.max_length": 4000,
        "sampler.max_new_tokens": 3000,
        "data.max_prompt_tokens": 1000,
        "algorithm.aggregate": {"constant": {"divisor": 3000}},
        "algorithm.advantage": "group_mean",
        "algorithm.loss": {"ppo_clip": {"clip_low": 0.2, "clip_high": 0.28, "dual_clip": 3.0}},
        "algorithm.kl": "k2",
        "algorithm.kl_coefficient": 0.001,
        "algorithm.kl_in": "loss",
        "reward.function": "my.py:compute_score",
        "run.steps": 6,  # 1000 // 256 = 3 an epoch
        "checkpoint.every": 20,
    }
    assert {path: found.settings.get(path) for path in expected} == expected
    assert found.unconverted == {}
    assert "critic.learning_rate" not in found.settings


def test_tunix_dapo():
    buffer = {"enable": True, "overlong_buffer_length": 100, "overlong_buffer_penalty": 0.5}
    given = {"epsilon_high": 0.28, "beta": None, "loss_agg_mode": "token-mean"}
    given |= {"overlong_buffer": {**buffer, "max_response_length": 500}, "dynamic_sampling": True}
    found = converted(TUNIX, given).settings
    assert found["algorithm.shaping"] == [
        {"soft_overlong": {"max_tokens": 500, "cache_tokens": 100, "weight": 0.5}}
    ]
    assert found["algorithm.loss"] == {"ppo_clip": {"clip_low": 0.2, "clip_high": 0.28}}
    assert found["algorithm.kl_coefficient"] == 0.0 and "algorithm.kl" not in found
    assert found["algorithm.dynamic_sampling"] is True


def test_adapters():
    peft = {"r": 8, "lora_alpha": 16, "lora_dropout": 0.1, "target_modules": {"v_proj", "q_proj"}}
    assert lora_of(peft) == {
        "rank": 8,
        "alpha": 16.0,
        "dropout": 0.1,
        "targets": ["q_proj", "v_proj"],
    }
    with pytest.raises(NoCounterpart, match="DoRA"):
        lora_of({**peft, "use_dora": True})
    with pytest.raises(NoCounterpart, match="target_modules"):
        lora_of({"r": 8})


# ---- hints


@pytest.mark.parametrize(
    ("override", "told"),
    [
        ("num_generations=16", "TRL's and Tunix's num_generations is algorithm.group_size=16 here"),
        ("algorithm.num_generations=16", "is algorithm.group_size=16 here"),
        ("beta=0.1", "algorithm.kl_coefficient=0.1"),
        ("epsilon_high=0.3", "algorithm.loss={ppo_clip: {clip_low: 0.2, clip_high: 0.3}} here"),
        ("report_to=wandb", "metrics.wandb={project: huggingface} here"),
        ("report_to=comet_ml", "no tracker comet_ml"),
        ("train_dataset=x", "is data= here"),
        ("max_completion_length=256", "sampler.max_new_tokens=256 and sampler.max_length=768 here"),
        ("gradient_checkpointing=true", "has no counterpart: recomputation is model.remat"),
        ("actor_rollout_ref.rollout.n=8", "is algorithm.group_size=8 here"),
        ("trainer.total_training_steps=50", "is run.steps=50 here"),
        ("trainer.n_gpus_per_node=8", "has no counterpart: see the section mesh"),
        ("clip_ratio_high=0.28", "clip_high: 0.28"),
        # our own names are not mistaken for theirs
        ("trainer.warmup_stps=3", "did you mean trainer.warmup_steps?"),
        ("sampler.seed=3", "did you mean run.seed?"),
        ("data.nonsense=3", "data.nonsense is not a setting; --help lists all keys."),
    ],
)
def test_overrides_in_another_librarys_words(override, told):
    with pytest.raises(ConfigError) as error:
        load({}, [override])
    assert told in str(error.value)


def test_a_file_in_another_librarys_words(tmp_path):
    file = tmp_path / "grpo.yaml"
    file.write_text("num_generations: 4\nper_device_train_batch_size: 8\nbeta: 0.1\n")
    with pytest.raises(ConfigError) as error:
        load(file)
    text = str(error.value)
    assert "line 1: num_generations is not a setting" in text
    # with the file's own num_generations: 8 / 4
    assert "algorithm.groups_per_step=2 here" in text
    file.write_text("actor_rollout_ref:\n  rollout:\n    n: 8\n")
    with pytest.raises(ConfigError, match="jaxrl-async convert FILE converts a whole file"):
        load(file)


def test_no_name_of_ours_is_taken_for_another_librarys():
    """Names that both have, at another place: only a whole name of the library's counts."""
    for path in ("run.seed", "sampler.temperature", "trainer.epsilon", "data.tokenizer"):
        load({path.split(".")[0]: {}})
        assert peer_hint(path, whole_name=True) is None or path == "data.tokenizer"


def test_an_adapters_field_is_an_adapter_unless_the_library_is_told_to_train_all_weights():
    """TRL reads lora_r only with use_peft; who asks about lora_r alone means an adapter."""
    hint = peer_hint("lora_r", 8, {"lora_r": 8})
    assert "model.lora={rank: 8" in hint and "leave it out" not in hint
    assert "leave it out" in peer_hint("lora_r", 8, {"lora_r": 8, "use_peft": False})


@pytest.mark.parametrize(
    ("path", "told"),
    [
        (("algorithm", "lr"), "algorithm.lr is not a setting; it is algorithm.learning_rate=3 h"),
        (("n_samples",), "it is algorithm.group_size (answers to a prompt) here"),
        (("sampler", "num_epochs"), "it is run.steps (updates) here"),
        (("algorithm", "epoch"), "did you mean algorithm."),
        (("rank",), "rank is not a setting; it is model.lora.rank=3 here."),
        (("batch_size",), "algorithm.group_size (answers to a prompt) here, or did you mean pref"),
        (("max_tokens",), "it is sampler.max_new_tokens=3 here, or did you mean reward.judge.max"),
        (("eval", "n_samples"), "eval.n_samples is not a setting; --help lists all keys."),
    ],
)
def test_a_usual_name_leads_to_what_it_is_called_here(path, told):
    assert told in unknown_setting(path, 3)


# ---- the command


def test_the_command_converts_a_file_of_trl(tmp_path, capsys):
    file, out = tmp_path / "grpo.yaml", tmp_path / "mine.yaml"
    file.write_text(
        "model_name_or_path: Qwen/Qwen3-0.6B\ndataset_name: openai/gsm8k\ndataset_config: main\n"
        "learning_rate: 1e-5\nnum_generations: 4\nmax_steps: 20\nuse_peft: true\nlora_r: 8\n"
        "chat_template_kwargs:\n  enable_thinking: false\nuse_liger_kernel: true\n"
    )
    words = [str(file), "--max_completion_length", "256", "beta=0.1", "--out", str(out)]
    assert main([*words, "--devices", "2"]) == 0
    config = load(out)
    assert config.model.path == "Qwen/Qwen3-0.6B" and config.data.addition is None
    assert config.data.jsonl.path == "openai/gsm8k:main:train"
    assert config.model.lora.rank == 8 and config.model.lora.targets == "all-linear"
    assert (config.algorithm.group_size, config.algorithm.groups_per_step) == (4, 4)
    assert (config.algorithm.learning_rate, config.algorithm.kl_coefficient) == (1e-5, 0.1)
    assert config.sampler.max_new_tokens == 256 and config.run.steps == 20
    assert config.data.chat_arguments == {"enable_thinking": False}
    assert "#   use_liger_kernel: XLA compiles everything" in out.read_text()
    assert "no counterpart: use_liger_kernel" in capsys.readouterr().err
    before = out.read_text()
    assert main([*words]) == 2 and out.read_text() == before  # never written over


def test_the_command_converts_verls_words(capsys):
    words = ["data.train_files=[a.parquet]", "actor_rollout_ref.rollout.n=8", "+data.extra=1"]
    words += [
        "trainer.logger=[console,wandb]",
        "trainer.total_epochs=2",
        "algorithm.adv_estimator=",
    ]
    assert main(["verl", *words[:-1], "algorithm.adv_estimator=rloo", "--records", "4096"]) == 0
    said = capsys.readouterr()
    tree = yaml.safe_load(said.out)
    assert tree["data"]["jsonl"]["path"] == "a.parquet" and tree["run"]["steps"] == 8
    assert tree["algorithm"]["advantage"] == "rloo" and "critic" not in tree
    assert "data.extra: verl has no field of this name" in said.err


def test_the_command_says_what_is_wrong(tmp_path, capsys):
    assert main([]) == 2
    assert main(["--help"]) == 0 and "jaxrl-async convert verl" in capsys.readouterr().out
    assert main(["trl", "num_generations"]) == 2
    assert "Write NAME=VALUE or --NAME VALUE" in capsys.readouterr().err
    assert main(["trl", "--records", "x"]) == 2
    ours = tmp_path / "ours.yaml"
    ours.write_text("run: {steps: 3}\n")
    assert main([str(ours)]) == 2
    assert "none of its settings is TRL's or verl's" in capsys.readouterr().err
    assert main(["trl", "--num_generations", "1", "--max_steps", "2"]) == 1
    assert "to be corrected" in capsys.readouterr().err
    assert main(["trl", "--out", str(tmp_path / "nowhere" / "mine.yaml")]) == 2
    assert "No such file" in capsys.readouterr().err
