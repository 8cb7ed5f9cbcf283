"""Jobs without a sampler, on a tiny decoder: what they learn, resuming, bad records, a scorer."""

import json
from pathlib import Path

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file

from jaxrl_async.config.load import load
from jaxrl_async.config.schema import Config
from jaxrl_async.errors import CheckpointError, ConfigError, DataError
from jaxrl_async.metrics.metric import comparable
from jaxrl_async.metrics.recorder import read_lines
from jaxrl_async.model.heads import load_head
from jaxrl_async.model.policy import Policy
from jaxrl_async.run.loop import train
from jaxrl_async.run.offline import trainer_only

ROOT = Path(__file__).parents[2]

TINY = (
    "model.architecture={layers: 1, width: 32, heads: 4, kv_heads: 2, head_dim: 8, mlp: 64}",
    "data.addition={digits: 1, eval_size: 8}",
    "data.max_prompt_tokens=16",
    "sampler.max_length=32",
    "trainer={row_length: 32, micro_batch_tokens: 256}",
    "algorithm.learning_rate=1e-2",
    "sft.batch_size=8",
    "preference.batch_size=8",
    "run.steps=4",
    "eval.every=2",
    "checkpoint.every=0",
    "metrics={peak_flops: 1e9, tensorboard: false}",
)
KTO = "preference.loss={kto: {beta: 0.5}}"


def config_of(folder: Path, *overrides: str) -> Config:
    empty = folder / "empty.yaml"
    empty.write_text("")
    return load(empty, [*TINY, f"run.dir={folder}", *overrides])


def run(folder: Path, *overrides: str) -> tuple[list[dict], dict[str, np.ndarray]]:
    """Metrics and final weights of a tiny run."""
    config = config_of(folder, *overrides)
    train(config)
    root = folder / config.run.name
    kind = "reward_model" if config.run.job == "reward_model" else "policy"
    return read_lines(root / "metrics.jsonl"), load_file(root / kind / "model.safetensors")


def records(folder: Path, *lines: dict) -> str:
    path = folder / "records.jsonl"
    path.write_text("\n".join(json.dumps(line) for line in lines))
    return f"data={{source: jsonl, jsonl: {{path: {path}, eval_size: 2}}, max_prompt_tokens: 16}}"


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A directory with the embedded task's tokenizer, for records of a file."""
    from jaxrl_async.data.addition import addition_tokenizer

    folder = tmp_path_factory.mktemp("tokenizer")
    addition_tokenizer().save_pretrained(folder)
    return f"data.tokenizer={folder}"


def test_sft_learns_reports_and_ends_as_a_policy_and_a_report(tmp_path: Path) -> None:
    metrics, weights = run(tmp_path, "run.job=sft", "run.steps=6")
    assert [line["step"] for line in metrics] == list(range(7))
    assert ["eval/loss" in line for line in metrics] == [True, False] * 3 + [True]
    assert metrics[-1]["eval/loss"] < metrics[0]["eval/loss"] - 0.3
    assert 0 <= metrics[-1]["eval/accuracy"] <= metrics[-1]["eval/token_accuracy"] <= 1
    assert metrics[1]["throughput/mfu"] > 0
    folder = tmp_path / "run"
    loaded = Policy.from_pretrained(folder / "policy")
    table = np.asarray(loaded.params["embed"]) if "embed" in loaded.params else None
    assert table is None or table.shape[1] == loaded.spec.width
    assert "Held-out loss" in (folder / "report.html").read_text("utf-8")
    assert len(weights) > 5


@pytest.mark.parametrize(
    "job", [("run.job=sft",), ("run.job=preference", KTO), ("run.job=reward_model",)], ids=str
)
def test_two_updates_and_resuming_to_four_equal_four(tmp_path: Path, job: tuple) -> None:
    whole = run(tmp_path, *job, "run.name=whole")
    run(tmp_path, *job, "run.name=parts", "run.steps=2")
    parts = run(tmp_path, *job, "run.name=parts", "run.resume=true")
    assert [comparable(line) for line in whole[0]] == [comparable(line) for line in parts[0]]
    assert whole[1].keys() == parts[1].keys()
    for name, values in whole[1].items():
        np.testing.assert_array_equal(values, parts[1][name], err_msg=name)


def test_dpo_ranks_held_out_pairs_and_starts_at_chance(tmp_path: Path) -> None:
    metrics, _ = run(
        tmp_path,
        "run.job=preference",
        "run.steps=12",
        "preference.loss={dpo: {beta: 0.5}}",
        "warm_start={steps: 2, batch_size: 8}",
        "eval.every=0",
    )
    assert metrics[0]["eval/accuracy"] == 0.5 and metrics[0]["eval/margin"] == 0
    assert metrics[0]["eval/loss"] == pytest.approx(np.log(2), rel=1e-6)
    assert metrics[-1]["eval/accuracy"] >= 0.75 and metrics[-1]["eval/margin"] > 0.1


def test_a_reference_of_ones_own_is_what_the_policy_is_compared_with(tmp_path: Path) -> None:
    run(tmp_path, "run.job=sft", "run.steps=1", "run.name=other")
    job = ["run.job=preference", "run.steps=1", "eval.every=0", "run.seed=3"]
    other = f"preference.reference={tmp_path / 'other' / 'policy'}"
    metrics, _ = run(tmp_path, *job, other, "run.name=compared")
    assert abs(metrics[0]["eval/margin"]) > 1e-3  # not the weights at the start
    wider = "model.architecture={layers: 1, width: 64, heads: 4, kv_heads: 2, head_dim: 8, mlp: 64}"
    with pytest.raises(ConfigError, match=r"another kind of model"):
        run(tmp_path, *job, other, "run.name=wider", wider)
    with pytest.raises(ConfigError, match="compares with no reference"):
        run(tmp_path, *job, other, "run.name=simpo", "preference.loss=simpo")


def test_a_reward_model_ends_as_a_directory_with_a_head(tmp_path: Path) -> None:
    metrics, _ = run(tmp_path, "run.job=reward_model", "run.steps=12", "eval.every=0")
    assert metrics[-1]["eval/accuracy"] >= 0.75
    assert metrics[-1]["eval/margin"] > metrics[0]["eval/margin"]
    folder = tmp_path / "run" / "reward_model"
    spec, params = load_head(folder, "reward")
    assert params["value_head"]["kernel"].shape == (spec.width,)
    assert (folder / "tokenizer.json").is_file()


def test_records_of_a_file_are_learnt_and_bad_ones_counted(
    tmp_path: Path, tokenizer: str, caplog: pytest.LogCaptureFixture
) -> None:
    good = [{"prompt": f"{i}+1=", "answer": str(i + 1)} for i in range(8)]
    data = records(tmp_path, *good, {"prompt": "1+1=", "answer": "1" * 40}, {"prompt": "1+1="})
    fields = ["data.jsonl.prompt_field=prompt", "data.jsonl.answer_field=answer"]
    job = ["run.job=sft", data, *fields, tokenizer, "run.steps=1"]
    with pytest.raises(DataError, match=r"2 of 10 records cannot be used .*trainer.row_length"):
        run(tmp_path, *job)
    caplog.clear()
    metrics, _ = run(tmp_path, *job, "data.jsonl.max_bad_share=0.2", "run.name=second")
    assert metrics[-1]["step"] == 1
    assert sum("2 of 10 records skipped" in r.message for r in caplog.records) == 1


def test_judged_answers_are_for_kto_only(tmp_path: Path, tokenizer: str) -> None:
    judged = [
        {"prompt": f"{i}+1=", "completion": str(i + good), "label": bool(good)}
        for i in range(6)
        for good in (0, 1)
    ]
    job = ["run.job=preference", records(tmp_path, *judged), tokenizer, "run.steps=1"]
    metrics, _ = run(tmp_path, *job, KTO)
    assert "preference/accuracy" not in metrics[1] and metrics[1]["preference/kl_baseline"] >= 0
    for other in ("run.job=preference", "run.job=reward_model"):
        with pytest.raises(DataError, match=r"12 of 12 records have one answer .*kto"):
            run(tmp_path, *job, other, "run.name=other", "run.overwrite=true")


def test_a_checkpoint_of_another_job_is_refused(tmp_path: Path) -> None:
    run(tmp_path, "run.job=sft", "run.steps=1", "eval.every=0")
    with pytest.raises(CheckpointError, match=r"run.job=sft.* run.job=preference"):
        run(tmp_path, "run.job=preference", "preference.loss=simpo", "run.resume=true")


def test_impossible_settings_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"warm_start.steps=0"):
        config_of(tmp_path, "run.job=sft", "warm_start.steps=5")
    with pytest.raises(ConfigError, match=r"reward.function=none leaves no reward"):
        config_of(tmp_path, "reward.function=none")
    with pytest.raises(ConfigError, match=r"data.addition.digits = 5 makes examples of up to"):
        run(tmp_path, "run.job=sft", "data.addition.digits=5", "run.overwrite=true")


def test_the_samplers_devices_are_not_asked_for() -> None:
    mesh = Config.model_validate({"mesh": {"trainer": {"fsdp": 4}, "samplers": 3}}).mesh
    assert mesh.num_devices == 7 and trainer_only(mesh).num_devices == 4


def test_a_sharded_trainer_learns_the_same(tmp_path: Path) -> None:
    assert jax.device_count() == 8
    job = ["run.job=sft", "run.steps=1", "eval.every=0"]
    one, _ = run(tmp_path, *job)
    many, _ = run(tmp_path, *job, "run.name=many", "mesh.trainer={fsdp: 2, tensor: 2}")
    for key in ("train/loss", "eval/loss", "eval/token_accuracy", "train/tokens"):
        assert many[1][key] == pytest.approx(one[1][key], abs=1e-5), key


@pytest.mark.slow
def test_the_three_steps_of_rlhf_run_one_after_the_other(tmp_path: Path) -> None:
    recipes, runs = ROOT / "configs" / "rlhf_three_steps", tmp_path / "runs"
    policy = f"model.path={runs / '1_sft' / 'policy'}"
    judge = f"reward.model={runs / '2_reward_model' / 'reward_model'}"
    quick = [
        f"run.dir={runs}",
        "run.steps=2",
        "data.addition.eval_size=16",
        "metrics={peak_flops: 1e9, tensorboard: false}",
    ]
    small = "model.architecture={layers: 1, width: 32, heads: 4, kv_heads: 2, head_dim: 8, mlp: 64}"
    few = ["sampler.slots=16", "algorithm.group_size=4", "algorithm.groups_per_step=4"]
    train(load(recipes / "1_sft.yaml", [*quick, small]))
    train(load(recipes / "2_reward_model.yaml", [*quick, policy]))
    train(load(recipes / "3_ppo.yaml", [*quick, *few, policy, judge]))
    lines = read_lines(runs / "3_ppo" / "metrics.jsonl")
    assert [line["step"] for line in lines] == [0, 1, 2]
    assert lines[1]["reward/mean"] == pytest.approx(lines[1]["reward/model"], abs=1e-5)
    assert 0 <= lines[1]["reward/function"] <= 1 and "eval/accuracy" in lines[2]
    assert lines[2]["policy/kl_reference"] >= 0
