"""Whole runs with a tiny decoder: determinism, meshes, resuming, real data, Ctrl-C."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from runs import config_of, many_digits, metrics_of, weights_of

from jaxrl_async.audit import audit_run
from jaxrl_async.config.load import load
from jaxrl_async.config.schema import Config
from jaxrl_async.errors import Preempted
from jaxrl_async.metrics.metric import comparable
from jaxrl_async.metrics.recorder import read_lines
from jaxrl_async.model.policy import Policy
from jaxrl_async.run.loop import train

pytestmark = pytest.mark.full

ROOT = Path(__file__).parents[2]
GSM8K = ROOT.parent / "shared" / "data" / "gsm8k" / "train.jsonl"
GPT2 = ROOT.parent / "shared" / "data" / "gpt2_tokenizer"

TINY = (
    "model.architecture={layers: 2, width: 32, heads: 4, kv_heads: 2, head_dim: 8, mlp: 64}",
    "data.addition.eval_size=16",
    "warm_start.steps=4",
    "warm_start.batch_size=8",
    "sampler.slots=16",
    "sampler.max_new_tokens=16",
    "algorithm.group_size=4",
    "algorithm.groups_per_step=4",
    "algorithm.learning_rate=1e-3",
    "trainer.micro_batch_tokens=512",
    "trainer.warmup_steps=2",
    "run.steps=4",
    "eval.every=2",
    "checkpoint.every=2",
    "metrics.peak_flops=1e9",
    "metrics.tensorboard=false",
)


def tiny(folder: Path, *overrides: str) -> Config:
    return config_of("addition", folder, *TINY, many_digits(folder), *overrides)


def run(folder: Path, *overrides: str) -> tuple[list[dict], dict[str, np.ndarray]]:
    """Run a tiny job and return its metrics and final weights."""
    config = tiny(folder, *overrides)
    train(config)
    return metrics_of(config), weights_of(config)


def assert_same_run(first: tuple, second: tuple) -> None:
    assert [comparable(line) for line in first[0]] == [comparable(line) for line in second[0]]
    assert first[1].keys() == second[1].keys()
    for name, values in first[1].items():
        np.testing.assert_array_equal(values, second[1][name], err_msg=name)


@pytest.fixture(scope="module")
def synchronous(tmp_path_factory: pytest.TempPathFactory) -> tuple:
    return run(tmp_path_factory.mktemp("sync"), "staleness.max_staleness=0")


def test_at_max_staleness_0_two_runs_are_the_same_bit_for_bit(
    synchronous: tuple, tmp_path: Path
) -> None:
    assert_same_run(synchronous, run(tmp_path, "staleness.max_staleness=0"))
    assert all(line.get("staleness/max", 0) == 0 for line in synchronous[0])


def test_training_2_steps_and_resuming_to_4_equals_training_4(
    synchronous: tuple, tmp_path: Path
) -> None:
    run(tmp_path, "staleness.max_staleness=0", "run.steps=2")
    resumed = run(tmp_path, "staleness.max_staleness=0", "run.resume=true", "run.overwrite=false")
    assert_same_run(synchronous, resumed)


@pytest.mark.exhaustive
def test_eight_devices_agree_with_one_on_the_losses_of_the_first_steps(
    synchronous: tuple, tmp_path: Path
) -> None:
    sharded, _ = run(
        tmp_path,
        "staleness.max_staleness=0",
        "run.steps=2",
        "mesh={trainer: {fsdp: 2, tensor: 2}, sampler: {tensor: 4}}",
    )
    for one, many in zip(synchronous[0][1:3], sharded[1:3], strict=True):
        assert many["train/loss"] == pytest.approx(one["train/loss"], abs=1e-5)
        assert many["reward/mean"] == one["reward/mean"]
        assert many["train/tokens"] == one["train/tokens"]


@pytest.mark.exhaustive
def test_colocated_and_asynchronous_stays_within_the_bound(tmp_path: Path) -> None:
    metrics, _ = run(tmp_path, "mesh.colocated=true", "staleness.max_staleness=2", "run.steps=6")
    assert [line["step"] for line in metrics] == list(range(7))
    assert max(line["staleness/max"] for line in metrics[1:]) <= 2
    assert max(line["weights/probe_error"] for line in metrics[2:]) < 1e-4


@pytest.fixture(scope="module")
def paced(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder for several runs, which then share compiled programs."""
    return tmp_path_factory.mktemp("paced")


@pytest.mark.exhaustive
def test_dropping_a_curriculum_and_an_adapted_limit_run_together(paced: Path) -> None:
    metrics, _ = run(
        paced,
        "staleness={max_staleness: 2, when_too_old: drop, adapt: ess, ess_target: 0.999999}",
        "data={curriculum: frontier_first, curriculum_pool: 8, curriculum_threshold: 0.2}",
        "eval.every=0",
        "run.steps=5",
    )
    steps = metrics[1:]
    assert [line["step"] for line in steps] == list(range(1, 6))
    limits = [line["staleness/limit"] for line in steps]
    assert set(limits) == {1, 2}, "stale data weighs less than all but all"
    assert all(line["staleness/max"] <= 2 for line in steps)
    assert 0 < steps[-1]["data/difficulty_mean"] <= 1
    assert max(line["data/longest_passed_over"] for line in steps) > 0
    lines = [json.loads(s) for s in (paced / "addition/ledger.jsonl").read_text().splitlines()]
    trained = [line for line in lines if line["fate"] == "trained"]
    assert len(trained) == 5 * 4 == len({line["prompt"] for line in trained})
    stale = [line for line in lines if line["fate"] == "dropped"]
    assert all(line["reason"] == "stale" and line["version"] > line["oldest"] for line in stale)
    reported = sum(line.get("staleness/dropped_stale", 0) for line in steps)
    assert reported == len(stale)


@pytest.mark.exhaustive
def test_at_max_staleness_0_a_curriculum_resumes_bit_for_bit(paced: Path) -> None:
    overrides = (
        "staleness.max_staleness=0",
        "data={curriculum: hard_first, curriculum_pool: 8, curriculum_threshold: 0.2}",
    )
    run(paced, *overrides, "run.steps=2", "run.name=parts")
    again = ("run.resume=true", "run.overwrite=false")
    parts = run(paced, *overrides, "run.name=parts", *again)
    assert_same_run(run(paced, *overrides, "run.name=whole"), parts)
    assert all("data/difficulty_mean" in line for line in parts[0][1:])


REPLAYED = {
    "two samplers on several devices": (
        "staleness={max_staleness: 2, lookahead: 1}",
        "mesh={trainer: {fsdp: 2}, sampler: {tensor: 2}, samplers: 2}",
    ),
    "everything that depends on time": (
        "staleness={max_staleness: 2, when_too_old: drop, lookahead: 3, adapt: ess, "
        "ess_target: 0.999999}",
        "data={curriculum: frontier_first, curriculum_pool: 8, curriculum_threshold: 0.2}",
        "algorithm.dynamic_sampling=true",
        "sampler.on_new_weights=drain",
        "mesh.colocated=true",
    ),
}


@pytest.mark.parametrize(
    "kind",
    [
        pytest.param("two samplers on several devices", marks=pytest.mark.exhaustive),
        pytest.param("everything that depends on time", marks=pytest.mark.exhaustive),
    ],
)
def test_a_recorded_run_is_replayed_bit_for_bit_each_time(kind: str, tmp_path: Path) -> None:
    first = run(tmp_path, *REPLAYED[kind], "run.name=first")
    recorded = tmp_path / "first" / "schedule.jsonl"
    for name in ("second", "third")[: 1 if "several" in kind else 2]:  # devices take long
        again = (f"run.replay_schedule={recorded}", f"run.name={name}")
        assert_same_run(first, run(tmp_path, *REPLAYED[kind], *again))
        for file in ("schedule.jsonl", "ledger.jsonl"):
            there, here = ((tmp_path / n / file).read_text() for n in ("first", name))
            assert there == here, file
    assert any(line.get("staleness/max", 0) > 0 for line in first[0])


def test_the_ledger_has_one_outcome_for_each_group(tmp_path: Path) -> None:
    run(tmp_path, "staleness.max_staleness=1")
    lines = [json.loads(s) for s in (tmp_path / "addition/ledger.jsonl").read_text().splitlines()]
    admitted = [line["group"] for line in lines if line["fate"] == "admitted"]
    ended = [line["group"] for line in lines if line["fate"] != "admitted"]
    assert len(set(admitted)) == len(admitted)
    assert len(set(ended)) == len(ended) == 16
    assert set(ended) <= set(admitted)
    assert all(line["version"] - line["oldest"] <= 1 for line in lines if line["fate"] == "trained")


def test_a_kl_to_the_reference_and_a_longer_menu_run(tmp_path: Path) -> None:
    metrics, _ = run(
        tmp_path,
        "algorithm.kl_coefficient=0.1",
        "algorithm.advantage=rloo",
        "algorithm.loss={ppo_clip: {clip_high: 0.28}}",
        "algorithm.aggregate={constant: {divisor: 16}}",
        "sampler.temperature=0.7",
        "sampler.top_k=5",
        "run.steps=2",
    )
    assert metrics[1]["mismatch/max"] < 1e-4 and metrics[1]["rollout/kept_mean"] == 5
    assert metrics[1]["policy/kl_reference"] == pytest.approx(0, abs=1e-6)
    assert metrics[2]["policy/kl_reference"] > 0


@pytest.mark.exhaustive  # its data is not part of the project: elsewhere it is skipped
@pytest.mark.skipif(not GSM8K.exists(), reason="needs ../shared/data/gsm8k")
def test_gsm8k_runs_from_a_model_directory_and_ends_as_one(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("torch")
    model = tmp_path / "model"
    config = transformers.Qwen2Config(
        vocab_size=50304,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        tie_word_embeddings=True,
    )
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(model)
    overrides = [
        f"data.jsonl.path={GSM8K}",
        f"model.path={model}",
        f"data.tokenizer={GPT2}",
        f"run.dir={tmp_path}",
        "run.steps=2",
        "run.name=gsm8k",
        "warm_start.steps=1",
        "warm_start.batch_size=2",
        "data.jsonl.eval_size=4",
        "data.max_prompt_tokens=128",
        "data.jsonl.max_bad_share=0.2",
        "sampler={slots: 8, max_length: 384, max_new_tokens: 8, block: 8}",
        "algorithm={group_size: 2, groups_per_step: 2}",
        "trainer={row_length: 384, micro_batch_tokens: 768, warmup_steps: 1}",
        "metrics.tensorboard=true",
    ]
    train(load(ROOT / "configs" / "gsm8k.yaml", overrides))
    metrics = read_lines(tmp_path / "gsm8k" / "metrics.jsonl")
    assert [line["step"] for line in metrics] == [0, 1, 2]
    assert metrics[-1]["mismatch/all_max"] < 0.1
    assert any((tmp_path / "gsm8k" / "tensorboard").iterdir())
    final = Policy.from_pretrained(tmp_path / "gsm8k" / "policy")
    assert final.spec.family == "qwen2"


def test_ctrl_c_once_finishes_the_step_saves_and_exits_0(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "jaxrl_async.train", str(ROOT / "configs/addition.yaml")]
    overrides = [*TINY, f"run.dir={tmp_path}", "run.steps=100000", "eval.every=0"]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}  # XLA_FLAGS, too: what is compiled is found
    process = subprocess.Popen(
        [*command, *overrides], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=env
    )
    metrics = tmp_path / "addition" / "metrics.jsonl"
    deadline = time.monotonic() + 240
    while time.monotonic() < deadline and len(read_lines(metrics)) < 4:
        assert process.poll() is None, process.stdout and process.stdout.read()
        time.sleep(0.2)
    process.send_signal(signal.SIGINT)
    output, _ = process.communicate(timeout=120)
    assert process.returncode == 0, output
    assert "--resume continues" in output
    last = read_lines(metrics)[-1]["step"]
    assert (tmp_path / "addition" / "checkpoints" / str(last)).is_dir()
    assert (tmp_path / "addition" / "policy" / "model.safetensors").exists()


@pytest.mark.exhaustive
def test_sigterm_saves_what_is_being_sampled_and_the_resumed_run_continues_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """One process, so that nothing is compiled twice: the signal comes while step 3 is drawn."""
    changes = ["staleness.max_staleness=2", "sampler.block=2", "checkpoint.every=0", "eval.every=9"]
    metrics = tmp_path / "addition" / "metrics.jsonl"

    def end() -> None:
        while len(read_lines(metrics)) < 3:
            time.sleep(0.005)
        os.kill(os.getpid(), signal.SIGTERM)

    ending = threading.Thread(target=end, daemon=True)
    ending.start()
    with pytest.raises(Preempted, match="was saved"):
        run(tmp_path, *changes, "run.steps=1000", "run.overwrite=false")
    ending.join()
    assert not (tmp_path / "addition" / "policy").exists()
    stopped = read_lines(metrics)[-1]["step"]
    before = audit_run(tmp_path / "addition")
    assert before.problems == () and before.active > 0
    resumed = ["run.resume=true", "run.overwrite=false", f"run.steps={stopped + 3}"]
    lines, _ = run(tmp_path, *changes, *resumed, "mesh.samplers=2")
    assert [x["step"] for x in lines] == list(range(stopped + 4))
    after = audit_run(tmp_path / "addition")
    assert after.problems == () and after.resumed == 1 and after.steps == stopped + 3
    assert "mesh.samplers 1 -> 2" in caplog.text
    ledger = read_lines(tmp_path / "addition" / "ledger.jsonl")
    mark = next(i for i, x in enumerate(ledger) if x["fate"] == "resumed")
    admitted = {x["group"] for x in ledger[:mark] if x["fate"] == "admitted"}
    done = {x["group"] for x in ledger[:mark] if x["fate"] != "admitted"}
    later = {x["group"] for x in ledger[mark:] if x["fate"] == "trained"}
    assert (admitted - done) & later, "groups from before the signal are trained on after it"


@pytest.mark.exhaustive
def test_a_sampler_with_weights_of_eight_bits_and_what_the_rounding_does(tmp_path: Path) -> None:
    """Checksums and the probe hold with them, too; the mismatch is measured, and small."""
    overrides = ("run.steps=3", "staleness.max_staleness=0", "eval.every=0", "checkpoint.every=0")
    eight = ("weights={dtype: int8, checksum: true}",)
    found = {
        name: [line["mismatch/mean"] for line in run(tmp_path, *overrides, *more)[0][1:]]
        for name, more in {"int8": eight, "wide": ()}.items()
    }
    assert len(found["int8"]) == 3 and max(found["wide"]) < 1e-5
    assert all(1e-5 < mean < 0.02 for mean in found["int8"])


GROUP_REWARD = """
async def digits(completions, group):
    return [
        {"digits": sum(c.isdigit() for c in text) / 16, "token_rewards": [0.1] * e.num_drawn}
        for text, e in zip(completions, group, strict=True)
    ]
"""


def test_several_rewards_of_a_run_are_distinguished(tmp_path: Path) -> None:
    (tmp_path / "groups.py").write_text(GROUP_REWARD)
    listed = f"reward.function=[exact, {{{tmp_path}/groups.py:digits: {{weight: 0.5}}}}]"
    lines, _ = run(tmp_path, listed, "algorithm.advantage=discounted", "run.steps=2")
    for line in lines[1:]:
        of_tokens = 0.5 * 0.1 * line["rollout/length_mean"]
        total = line["reward/correct"] + 0.5 * line["reward/digits"] + of_tokens
        assert line["reward/mean"] == pytest.approx(total, abs=1e-6)
    assert all(0 <= line["eval/accuracy"] <= 1 for line in lines if "eval/reward" in line)
