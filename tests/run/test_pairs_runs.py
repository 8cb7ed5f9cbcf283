"""Whole runs that learn from pairs of the policy's own answers, and from a task's conversations."""

import math
from pathlib import Path

import numpy as np
import pytest
from fake_judge import FakeJudge
from runs import config_of, many_digits, metrics_of, weights_of

from jaxrl_async.config.load import load
from jaxrl_async.config.schema import Config
from jaxrl_async.errors import ConfigError, DataError
from jaxrl_async.metrics.metric import metric_of
from jaxrl_async.run.loop import train

pytestmark = pytest.mark.full

TINY = (
    "model.architecture={layers: 1, width: 32, heads: 4, kv_heads: 2, head_dim: 8, mlp: 64}",
    "sampler.slots=16",
    "trainer.micro_batch_tokens=512",
    "eval.every=0",
    "metrics.peak_flops=1e9",
    "metrics.tensorboard=false",
)
PAIRED = (
    *TINY,
    "warm_start.steps=0",
    "algorithm.group_size=4",
    "algorithm.groups_per_step=2",
    "algorithm.learning_rate=1e-2",
    "sampler.max_new_tokens=16",
    "trainer.warmup_steps=1",
    "data.addition={digits: 1, eval_size: 4}",
    "checkpoint.every=2",
)


def paired(folder: Path, *overrides: str) -> Config:
    return config_of("online_dpo", folder, *PAIRED, *overrides)


def steps_of(config: Config) -> list[dict]:
    lines = [line for line in metrics_of(config) if "train/loss" in line]
    assert all(metric_of(key) for line in lines for key in line if key != "step")
    return lines


@pytest.mark.exhaustive
def test_pairs_of_what_a_judge_ranks_are_trained_on_while_others_are_drawn(tmp_path: Path) -> None:
    with FakeJudge() as server:
        server.judge = lambda text: float(len(text) % 10)
        server.faults = ["", "429", "words"]
        config = paired(
            tmp_path,
            "pairs.choose=all",
            "run.steps=4",
            "staleness.max_staleness=2",
            "algorithm.shaping=[]",
            "reward.judge.model=m",
            f"reward.judge.base_url={server.url}",
            "reward.judge.rubric=It is long.",
            "reward.judge.mode=rank",
            "reward.judge.backoff_s=0.01",
        )
        train(config)
    lines = steps_of(config)
    assert [line["step"] for line in lines] == [1, 2, 3, 4]
    assert {"judge/calls", "reward/judge", "policy/kl_reference"} <= lines[0].keys()
    for line in lines:
        assert 2 <= line["preference/pairs"] <= 2 * 6 and line["train/grad_norm"] > 0
        assert line["preference/pairs"] + line["preference/ties"] == 2 * 6
        assert line["staleness/max"] <= 2
    assert lines[0]["train/loss"] == pytest.approx(math.log(2), rel=1e-3)  # the reference itself
    assert lines[-1]["policy/kl_reference"] > 0


@pytest.mark.exhaustive
def test_a_resumed_run_learns_the_same_pairs(tmp_path: Path) -> None:
    own = (
        many_digits(tmp_path),
        "pairs.choose=best_random",
        "staleness.max_staleness=0",
        "reference.refresh_every=3",
    )
    whole = paired(tmp_path, *own, "run.steps=4", "run.name=whole")
    train(whole)
    train(paired(tmp_path, *own, "run.steps=2", "run.name=parts"))
    again = paired(
        tmp_path, *own, "run.steps=4", "run.name=parts", "run.resume=true", "run.overwrite=false"
    )
    train(again)
    keys = ("train/loss", "preference/margin", "preference/pairs", "preference/ties")
    found, wanted = ([[x[k] for k in keys] for x in steps_of(c)] for c in (again, whole))
    assert found == wanted
    weights = weights_of(whole)
    for name, values in weights_of(again).items():
        np.testing.assert_array_equal(values, weights[name], err_msg=name)


@pytest.mark.exhaustive
def test_a_group_without_a_pair_is_dropped_and_another_takes_its_place(tmp_path: Path) -> None:
    file = tmp_path / "even.py"
    file.write_text("def even(prompt, completion, reference):\n    return len(completion) > 15\n")
    config = paired(tmp_path, f"reward.function={file}:even", "run.steps=3", "algorithm.shaping=[]")
    train(config)
    lines = steps_of(config)
    assert sum(line.get("staleness/dropped_no_signal", 0) for line in lines) > 0
    assert all(line["preference/pairs"] == 2 and line["preference/ties"] == 0 for line in lines)
    assert all(line["preference/unpaired"] == 4 for line in lines)


@pytest.mark.exhaustive
def test_process_rewards_of_old_groups_are_left_out_and_counted(tmp_path: Path) -> None:
    (tmp_path / "steps.py").write_text(
        "def evens(steps):\n    return [float(len(step) % 2) for step in steps]\n"
    )
    slow = tmp_path / "slow.py"  # so that steps are rewarded before the answer is
    slow.write_text(
        "import asyncio\n"
        "async def digits(completion):\n"
        "    await asyncio.sleep(0.2)\n"
        "    return sum(c.isdigit() for c in completion) / 16\n"
    )
    config = paired(
        tmp_path,
        f"reward.function={slow}:digits",
        f"reward.process.function={tmp_path / 'steps.py'}:evens",
        "reward.process.split=token",
        "reward.process.max_age=0",
        "reward.process.max_age_s=60",
        "run.steps=6",
        "staleness.max_staleness=2",
    )
    train(config)
    lines = steps_of(config)
    old = [line.get("process/too_old", 0) for line in lines]
    stale = [line["staleness/max"] > 0 for line in lines]
    late = sum(line.get("faults/late_process_rewards", 0) for line in lines)
    assert not any(count for count, is_stale in zip(old, stale, strict=True) if not is_stale)
    assert sum(old) > 0 and sum(old) + late >= sum(stale)


TAUGHT = """
run: {job: sft}
task: {calculator: {numbers: 2, digits: 2}}
sft: {batch_size: 16}
algorithm: {learning_rate: 1.0e-2}
sampler: {max_length: 48}
trainer: {warmup_steps: 1}
checkpoint: {every: 2}
"""


def taught(folder: Path, *overrides: str) -> Config:
    file = folder / "taught.yaml"
    file.write_text(TAUGHT)
    return load(file, [*TINY, f"run.dir={folder}", *overrides])


@pytest.mark.exhaustive
def test_sft_learns_a_tasks_conversations_with_tools_and_resumes(tmp_path: Path) -> None:
    whole = taught(tmp_path, "run.name=whole", "run.steps=6")
    train(whole)
    train(taught(tmp_path, "run.name=parts", "run.steps=2"))
    again = taught(
        tmp_path,
        "run.name=parts",
        "run.steps=6",
        "run.resume=true",
        "run.overwrite=false",
    )
    train(again)
    lines = metrics_of(whole)
    assert lines[-1]["eval/loss"] < lines[0]["eval/loss"] - 0.3
    losses = [[x["train/loss"] for x in metrics_of(c) if "train/loss" in x] for c in (whole, again)]
    assert losses[0] == losses[1] and len(losses[0]) == 6
    weights = weights_of(whole)
    for name, values in weights_of(again).items():
        np.testing.assert_array_equal(values, weights[name], err_msg=name)


def test_sft_on_a_task_without_anything_to_imitate_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text(
        "from jaxrl_async import Environment, Task\n"
        "class Bare(Environment):\n"
        "    def step(self, message):\n        return None\n"
        "bare = Task(environment=Bare)\n"
        "words = ('<|im_start|>', '<|im_end|>', 'a', 'b')\n"
        "open_ = Task(records=[{'question': 'a'}] * 20, environment=Bare, words=words)\n"
    )
    with pytest.raises(ConfigError, match="has no records, and run"):
        train(taught(tmp_path, f"task={file}:bare"))
    with pytest.raises(DataError, match="nothing to imitate, which run"):
        train(taught(tmp_path, f"task={file}:open_"))
    assert not (tmp_path / "run").exists()
