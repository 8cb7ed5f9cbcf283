"""Jobs without a sampler, on a tiny decoder: what they learn, resuming, bad records, a scorer."""

import json
import signal
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file

from jaxrl_async.config.load import load
from jaxrl_async.config.schema import Config
from jaxrl_async.data.addition import addition_tokenizer
from jaxrl_async.errors import CheckpointError, ConfigError, DataError
from jaxrl_async.metrics.metric import comparable
from jaxrl_async.metrics.recorder import read_lines
from jaxrl_async.model.heads import load_head
from jaxrl_async.model.policy import Policy
from jaxrl_async.run.loop import train
from jaxrl_async.trainer.update import Update

ROOT = Path(__file__).parents[2]

TINY = (
    "model.architecture={layers: 1, width: 32, heads: 4, kv_heads: 2, head_dim: 8, mlp: 64}",
    "data.addition={digits: 1, eval_size: 8}",
    "data.max_prompt_tokens=16",
    "sampler.max_length=32",
    "trainer={row_length: 32, micro_batch_tokens: 256}",
    "algorithm.learning_rate=1e-2",
    "run.steps=4",
    "eval.every=2",
    "checkpoint.every=0",
    "metrics={peak_flops: 1e9, tensorboard: false}",
)
KTO = "preference.loss={kto: {beta: 0.5}}"


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One folder for all runs: what one has compiled, the next one finds."""
    return tmp_path_factory.mktemp("runs")


def config_of(folder: Path, *overrides: str) -> Config:
    empty = folder / "empty.yaml"
    empty.write_text("")
    jobs = [word.partition("=")[2] for word in overrides if word.startswith("run.job=")]
    size = f"{jobs[-1] if jobs else 'sft'}.batch_size=8"
    return load(empty, [*TINY, size, f"run.dir={folder}", *overrides])


def run(folder: Path, *overrides: str) -> tuple[list[dict], dict[str, np.ndarray]]:
    """Metrics and final weights of a tiny run."""
    config = config_of(folder, *overrides)
    train(config)
    root = folder / config.run.name
    kind = "reward_model" if config.run.job == "reward_model" else "policy"
    return read_lines(root / "metrics.jsonl"), load_file(root / kind / "model.safetensors")


EASY = [{"prompt": f"{i}+1=", "chosen": "11", "rejected": "9"} for i in range(10)]
"""Pairs whose better answer shows in each token."""


def worked(folder: Path) -> Path:
    """A file of answers for a warm start."""
    path = folder / "worked.jsonl"
    path.write_text("\n".join(json.dumps({"prompt": "1+1=", "answer": str(i)}) for i in range(9)))
    return path


def assert_same_run(one: tuple, other: tuple) -> None:
    assert [comparable(line) for line in one[0]] == [comparable(line) for line in other[0]]
    assert one[1].keys() == other[1].keys()
    for name, values in one[1].items():
        np.testing.assert_array_equal(values, other[1][name], err_msg=name)


def records(folder: Path, *lines: dict) -> str:
    path = folder / "records.jsonl"
    path.write_text("\n".join(json.dumps(line) for line in lines))
    return f"data={{addition: null, jsonl: {{path: {path}, eval_size: 2}}, max_prompt_tokens: 16}}"


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A directory with the embedded task's tokenizer, for records of a file."""
    folder = tmp_path_factory.mktemp("tokenizer")
    addition_tokenizer().save_pretrained(folder)
    return f"data.tokenizer={folder}"


@pytest.mark.full
def test_sft_learns_reports_and_ends_as_a_policy_and_a_report(runs: Path) -> None:
    metrics, weights = run(runs, "run.job=sft", "run.steps=6", "run.name=sft")
    assert [line["step"] for line in metrics] == list(range(7))
    assert ["eval/loss" in line for line in metrics] == [True, False] * 3 + [True]
    assert metrics[-1]["eval/loss"] < metrics[0]["eval/loss"] - 0.3
    assert 0 <= metrics[-1]["eval/accuracy"] <= metrics[-1]["eval/token_accuracy"] <= 1
    assert metrics[1]["throughput/mfu"] > 0
    folder = runs / "sft"
    spec = Policy.from_pretrained(folder / "policy").spec
    assert (spec.width, spec.eos_ids, spec.pad_id) == (32, addition_tokenizer().eos_ids, 0)
    assert (folder / "policy" / "generation_config.json").is_file()
    assert "Held-out loss" in (folder / "report.html").read_text("utf-8")
    assert len(weights) > 5


@pytest.mark.full
@pytest.mark.parametrize(
    "job",
    [
        ("run.job=preference", KTO),
        pytest.param(("run.job=reward_model",), marks=[pytest.mark.full, pytest.mark.exhaustive]),
    ],
    ids=str,
)
def test_two_updates_and_resuming_to_four_equal_four(runs: Path, job: tuple) -> None:
    name = job[0].partition("=")[2]
    whole = run(runs, *job, f"run.name={name}_whole")
    run(runs, *job, f"run.name={name}_parts", "run.steps=2")
    parts = run(runs, *job, f"run.name={name}_parts", "run.resume=true")
    assert_same_run(whole, parts)


@pytest.mark.full
def test_ctrl_c_finishes_the_step_and_resuming_equals_a_run_without_it(
    runs: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    whole = run(runs, "run.job=sft", "run.name=not_stopped")
    update = Update.update

    def interrupted(self: Any, *args: Any, at: float, **how: Any) -> Any:
        outcome = update(self, *args, at=at, **how)
        if at == 1:  # the second one
            signal.raise_signal(signal.SIGINT)
        return outcome

    monkeypatch.setattr(Update, "update", interrupted)
    stopped, _ = run(runs, "run.job=sft", "run.name=stopped")
    assert [line["step"] for line in stopped] == [0, 1, 2]
    assert "stopped early by SIGINT: everything is saved" in capsys.readouterr().out
    monkeypatch.undo()
    assert_same_run(whole, run(runs, "run.job=sft", "run.name=stopped", "run.resume=true"))


@pytest.mark.full
def test_dpo_ranks_held_out_pairs_and_starts_at_chance(runs: Path, tokenizer: str) -> None:
    metrics, _ = run(
        runs,
        "run.name=dpo",
        "run.job=preference",
        "run.steps=6",
        records(runs, *EASY),
        tokenizer,
        "warm_start={steps: 2, batch_size: 8, path: " + str(worked(runs)) + "}",
        "data.jsonl.prompt_field=prompt",
        "data.jsonl.answer_field=answer",
        "eval.every=0",
    )
    assert metrics[0]["eval/accuracy"] == 0.5 and metrics[0]["eval/margin"] == 0
    assert metrics[0]["eval/loss"] == pytest.approx(np.log(2), rel=1e-6)
    assert metrics[-1]["eval/accuracy"] == 1 and metrics[-1]["eval/margin"] > 0.1


@pytest.mark.full
def test_a_reference_of_ones_own_is_what_the_policy_is_compared_with(runs: Path) -> None:
    run(runs, "run.job=sft", "run.steps=1", "run.name=other")
    job = ["run.job=preference", "run.steps=1", "eval.every=0", "run.seed=3"]
    other = f"preference.reference={runs / 'other' / 'policy'}"
    metrics, _ = run(runs, *job, other, "run.name=compared")
    assert abs(metrics[0]["eval/margin"]) > 1e-3  # not the weights at the start
    wider = "model.architecture={layers: 1, width: 64, heads: 4, kv_heads: 2, head_dim: 8, mlp: 64}"
    with pytest.raises(ConfigError, match=r"another kind of model"):
        run(runs, *job, other, "run.name=wider", wider)
    with pytest.raises(ConfigError, match="that compares with it"):
        run(runs, *job, other, "run.name=simpo", "preference.loss=simpo")


@pytest.mark.full
def test_a_reward_model_ends_as_a_directory_with_a_head(runs: Path, tokenizer: str) -> None:
    job = ["run.job=reward_model", "run.name=judge", records(runs, *EASY), tokenizer]
    metrics, _ = run(runs, *job, "run.steps=6", "eval.every=0")
    assert metrics[-1]["eval/accuracy"] == 1
    assert metrics[-1]["eval/margin"] > metrics[0]["eval/margin"]
    folder = runs / "judge" / "reward_model"
    spec, params = load_head(folder, "reward")
    assert params["value_head"]["kernel"].shape == (spec.width,)
    assert (folder / "tokenizer.json").is_file()


@pytest.mark.full
def test_records_of_a_file_are_trained_on_and_bad_ones_counted(
    runs: Path, tokenizer: str, caplog: pytest.LogCaptureFixture
) -> None:
    good = [{"prompt": f"{i}+1=", "answer": str(i + 1)} for i in range(8)]
    data = records(runs, *good, {"prompt": "1+1=", "answer": "1" * 40}, {"prompt": "1+1="})
    fields = ["data.jsonl.prompt_field=prompt", "data.jsonl.answer_field=answer"]
    job = ["run.job=sft", data, *fields, tokenizer, "run.steps=1", "run.name=first"]
    with pytest.raises(DataError, match=r"2 of 10 records cannot be used .*trainer.row_length"):
        run(runs, *job)
    caplog.clear()
    metrics, _ = run(runs, *job, "data.jsonl.max_bad_share=0.2", "run.name=second")
    assert metrics[-1]["step"] == 1
    assert sum("2 of 10 records skipped" in r.message for r in caplog.records) == 1


@pytest.mark.full
def test_judged_answers_are_for_kto_only(runs: Path, tokenizer: str) -> None:
    judged = [
        {"prompt": f"{i}+1=", "completion": str(i + good), "label": bool(good)}
        for good in (0, 1)
        for i in range(6)
    ]
    job = ["run.job=preference", records(runs, *judged), tokenizer, "run.steps=1"]
    metrics, _ = run(runs, *job, KTO, "run.name=judged")
    assert "preference/accuracy" not in metrics[1] and metrics[1]["preference/kl_baseline"] >= 0
    for other in ("run.job=preference", "run.job=reward_model"):
        with pytest.raises(DataError, match=r"12 of 12 records have one answer .*kto"):
            run(runs, *job, other, "run.name=other", "run.overwrite=true")


@pytest.mark.full
def test_a_checkpoint_of_another_job_is_refused(runs: Path) -> None:
    run(runs, "run.job=sft", "run.steps=1", "run.name=refused")
    with pytest.raises(CheckpointError, match=r"run.job=sft.* run.job=preference"):
        simpo = ["run.job=preference", "preference.loss=simpo", "run.resume=true"]
        run(runs, *simpo, "run.name=refused")


def test_impossible_settings_are_refused(runs: Path) -> None:
    with pytest.raises(ConfigError, match=r"warm_start.steps=0"):
        config_of(runs, "run.job=sft", "warm_start.steps=5")
    with pytest.raises(ConfigError, match=r"reward.function=none leaves the run without a reward"):
        config_of(runs, "reward.function=none")
    with pytest.raises(ConfigError, match=r"data.addition.digits = 5 makes examples of up to"):
        run(runs, "run.job=sft", "data.addition.digits=5", "run.name=digits")


def test_the_samplers_devices_are_not_asked_for() -> None:
    mesh = Config.model_validate({"mesh": {"trainer": {"fsdp": 4}, "samplers": 3}}).mesh
    assert mesh.num_devices == 7 and mesh.without_samplers.num_devices == 4


@pytest.mark.full
@pytest.mark.exhaustive
def test_a_sharded_trainer_learns_the_same(runs: Path) -> None:
    assert jax.device_count() == 8
    job = ["run.job=sft", "run.steps=1", "eval.every=0"]
    one, _ = run(runs, *job, "run.name=one")
    many, _ = run(runs, *job, "run.name=many", "mesh.trainer={fsdp: 2, tensor: 2}")
    for key in ("train/loss", "eval/loss", "eval/token_accuracy", "train/tokens"):
        assert many[1][key] == pytest.approx(one[1][key], abs=1e-5), key


@pytest.mark.full
@pytest.mark.exhaustive
def test_the_three_steps_of_rlhf_run_one_after_the_other(tmp_path: Path) -> None:
    recipes, runs = ROOT / "configs" / "rlhf_three_steps", tmp_path / "runs"
    policy = f"model.path={runs / '1_sft' / 'policy'}"
    judge = f"reward.model={runs / '2_reward_model' / 'reward_model'}"
    quick = [
        f"run.dir={runs}",
        "run.steps=2",
        "trainer.warmup_steps=1",
        "data.addition.eval_size=16",
        "metrics={peak_flops: 1e9, tensorboard: false}",
    ]
    small = "model.architecture={layers: 1, width: 32, heads: 4, kv_heads: 2, head_dim: 8, mlp: 64}"
    few = ["sampler.slots=16", "algorithm.group_size=4", "algorithm.groups_per_step=4"]
    train(load(recipes / "1_sft.yaml", [*quick, small]))
    train(load(recipes / "2_reward_model.yaml", [*quick, policy]))
    train(load(recipes / "3_ppo.yaml", [*quick, *few, "critic.warmup_steps=1", policy, judge]))
    lines = read_lines(runs / "3_ppo" / "metrics.jsonl")
    assert [line["step"] for line in lines] == [0, 1, 2]
    assert lines[1]["reward/mean"] == pytest.approx(lines[1]["reward/model"], abs=1e-5)
    assert 0 <= lines[1]["reward/correct"] <= 1 and "eval/accuracy" in lines[2]
    assert lines[2]["policy/kl_reference"] >= 0


DELTA = (
    "model.architecture={family: qwen3_next, layers: 4, width: 32, heads: 4, kv_heads: 2, "
    "head_dim: 8, mlp: 48, experts: 4}"
)


@pytest.mark.full
@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "more",
    [
        (),
        ("model.lora={rank: 4, alpha: 16, base: int8}",),
        ("model={dtype: bfloat16, param_dtype: bfloat16, remat: dots, balance: {loss: 0.01}}",),
    ],
    ids=["whole", "adapter", "bfloat16"],
)
def test_gated_delta_nets_learn_from_given_answers(runs: Path, more: tuple) -> None:
    name = f"delta{len(str(more))}"
    metrics, weights = run(runs, DELTA, "run.job=sft", "run.steps=6", f"run.name={name}", *more)
    assert metrics[-1]["eval/loss"] < metrics[0]["eval/loss"] - 0.2
    assert "model.layers.0.linear_attn.in_proj_qkvz.weight" in weights
    assert Policy.from_pretrained(runs / name / "policy").spec.family == "qwen3_next"


@pytest.mark.full
@pytest.mark.exhaustive
def test_gated_delta_nets_learn_from_rollouts_of_their_own(runs: Path) -> None:
    """The sampler's states give the log-probs that the trainer finds, update after update."""
    empty = runs / "empty.yaml"
    empty.write_text("")
    rollouts = ("run.name=delta-rl", "warm_start.steps=8", "sampler.slots=16", "run.steps=4")
    train(load(empty, [*TINY, DELTA, f"run.dir={runs}", *rollouts]))
    lines = read_lines(runs / "delta-rl" / "metrics.jsonl")
    assert [line["step"] for line in lines] == [0, 1, 2, 3, 4]
    first = lines[1]
    assert first["staleness/mean"] == 0 and first["mismatch/all_max"] < 1e-3  # rounding: 1e-4
    assert first["train/grad_norm"] > 0 and first["rollout/length_mean"] > 2
