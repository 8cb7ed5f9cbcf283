"""Whole runs on tasks of several turns: learned against their control, repeated and resumed."""

import json
from pathlib import Path

import numpy as np
import pytest
from runs import config_of, metrics_of, run_job, weights_of

from jaxrl_async.audit import audit_run
from jaxrl_async.config.schema import Config
from jaxrl_async.errors import ConfigError, Stopped
from jaxrl_async.run.loop import train

pytestmark = pytest.mark.full

TINY = (
    "model.architecture={layers: 1, width: 32, heads: 4, kv_heads: 2, head_dim: 8, mlp: 64}",
    "warm_start.steps=20",
    "warm_start.batch_size=16",
    "sampler.slots=16",
    "algorithm.group_size=4",
    "algorithm.groups_per_step=4",
    "algorithm.learning_rate=1e-3",
    "trainer.micro_batch_tokens=512",
    "trainer.warmup_steps=1",
    "run.steps=4",
    "eval.every=2",
    "metrics.samples_every=1",
    "metrics.peak_flops=1e9",
    "metrics.tensorboard=false",
)


def game(folder: Path, *overrides: str) -> Config:
    return config_of("guess_number", folder, *TINY, *overrides)


@pytest.mark.parametrize("age", [0, 2])
def test_an_evaluation_beside_the_updates_measures_the_version_that_it_is_told_for(
    tmp_path: Path, age: int
) -> None:
    alone = ("sampler.slots=1", "sampler.reserve=0")  # equal to the last bit
    beside = game(tmp_path, *alone, f"staleness.max_staleness={age}", "eval.asynchronous=true")
    train(beside)
    assert not audit_run(tmp_path / beside.run.name).problems
    lines = metrics_of(beside)
    told = {x["step"]: x["eval/reward"] for x in lines if "eval/reward" in x}
    assert sorted(told) == [0, 2, 4]
    assert all("time/wait_eval_s" in x for x in lines[1:])
    if age:  # what is drawn depends on time
        return
    waits = game(tmp_path, *alone, "staleness.max_staleness=0", "run.name=waits")
    train(waits)
    assert told == {x["step"]: x["eval/reward"] for x in metrics_of(waits) if "eval/reward" in x}
    weights = weights_of(waits)
    for name, values in weights_of(beside).items():
        np.testing.assert_allclose(values, weights[name], atol=1e-6, err_msg=name)


SAME = ("reward/mean", "rollout/length_mean", "rollout/turns_mean", "eval/reward", "train/tokens")


def assert_same(first: Config, second: Config) -> None:
    """Both runs drew the same tokens and learned the same from them. Log-probs may differ in their
    last bits: with whom a turn is prefilled together depends on when environments answer."""
    lines = [[{k: x[k] for k in SAME if k in x} for x in metrics_of(c)] for c in (first, second)]
    assert lines[0] == lines[1]
    weights = weights_of(second)
    for name, values in weights_of(first).items():
        np.testing.assert_allclose(values, weights[name], atol=1e-4, err_msg=name)


@pytest.mark.exhaustive
def test_a_game_is_the_same_twice_and_resumed_in_the_middle(tmp_path: Path) -> None:
    # One sequence at a time: what is computed together, and with it the last bits of log-probs,
    # depends on when the environments answer.
    alone = ("sampler.slots=1", "sampler.reserve=0")
    on_policy = ("staleness.max_staleness=0", "checkpoint.every=2", *alone)
    whole = game(tmp_path, *on_policy, "run.name=whole")
    train(whole)
    train(game(tmp_path, *on_policy, "run.name=parts", "run.steps=2"))
    again = game(tmp_path, *on_policy, "run.name=parts", "run.resume=true", "run.overwrite=false")
    train(again)
    assert_same(whole, again)
    samples = (tmp_path / "whole" / "samples.jsonl").read_text("utf-8").splitlines()
    shown = [json.loads(line) for line in samples]
    assert all(s["prompt"] == "<user>1 to 8<eos><assistant>" for s in shown)
    several = [s for s in shown if s["turns"] > 1]
    assert several and all("<eos><user>" in s["completion"] for s in several)
    for tokens in (s["tokens"] for s in shown):
        drawn = [v is not None for v in tokens["version"]]
        for name in ("advantage", "difference"):  # over turns, in the episode's own order
            assert [v is not None for v in tokens[name]] == drawn
        known = zip(tokens["difference"], drawn, strict=True)
        assert max(abs(v) for v, is_drawn in known if is_drawn) < 1e-4, "of the same weights"
    assert any(v for s in shown for v in s["tokens"]["advantage"])
    steps = [line for line in metrics_of(whole) if "train/loss" in line]
    assert all(line["rollout/turns_mean"] > 1 for line in steps)
    assert all(line["reward/mean"] >= 0 and "reward/correct" in line for line in steps)


LONG = """
from jaxrl_async import Environment, Step, Task

class Answers(Environment):
    def step(self, message):
        return Step(reward=float("1" in message["content"]), done=True)

def records(split):
    return [{"question": "1" * (80 if i % 3 == 1 else 3)} for i in range(12)]

task = Task(records=records, environment=Answers, words="0123456789")
"""


@pytest.mark.exhaustive
def test_records_that_are_too_long_cost_themselves_and_neither_run_nor_evaluation(
    tmp_path: Path,
) -> None:
    (tmp_path / "long.py").write_text(LONG, encoding="utf-8")
    task = f"task={tmp_path / 'long.py'}:task"
    lengths = ("sampler.max_length=48", "sampler.max_new_tokens=4", "faults.max_failures=1")
    config = game(tmp_path, task, "warm_start.steps=0", "eval.episodes_at_once=5", *lengths)
    train(config)
    lines = metrics_of(config)
    evaluated = [line["eval/truncated_share"] for line in lines if "eval/reward" in line]
    assert len(evaluated) == 3 and all(share >= 1 / 3 for share in evaluated)
    assert sum(line.get("faults/long_openings", 0) for line in lines) >= 12 + 4
    steps = [line for line in lines if "train/loss" in line]
    assert [line["step"] for line in steps] == [1, 2, 3, 4]
    assert max(line["rollout/truncated_share"] for line in steps) > 0
    assert not any(line.get("faults/failed_evaluations") for line in lines)


@pytest.mark.exhaustive
def test_records_of_which_none_has_room_are_refused_at_the_start(tmp_path: Path) -> None:
    (tmp_path / "long.py").write_text(LONG.replace("i % 3 == 1", "i >= 0"), encoding="utf-8")
    lengths = ("sampler.max_length=48", "sampler.max_new_tokens=4")
    config = game(tmp_path, f"task={tmp_path / 'long.py'}:task", "warm_start.steps=0", *lengths)
    with pytest.raises(ConfigError, match=r"no room for an answer in sampler\.max_length=48"):
        train(config)


OWN = """
import threading
from jaxrl_async import Environment, Step, Task

class Mine(Environment):
    tools = ("look",)

    def reset(self, record):
        self.left = record["turns"]
        return record["question"]

    def look(self, at: str) -> str:
        "Look."
        return at

    async def step(self, message):
        self.left -= 1
        return Step(messages="1" if self.left else None, reward=0.5)

    def state(self):
        return {"left": self.left}

    def restore(self, state):
        self.left = state["left"]

task = Task(
    records=[{"question": str(i % 10), "turns": 1 + i % 3, "answer": "1"} for i in range(40)],
    environment=Mine,
    reward=lambda completion, turns: {"length": len(completion) / 100, "turns": turns},
    words="0123456789",
)
"""


@pytest.mark.exhaustive
def test_a_task_of_the_users_file_runs_with_stale_weights_and_resumes(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text(OWN, encoding="utf-8")
    own = (
        f"task={file}:task",
        "staleness.max_staleness=2",
        "checkpoint.every=1",
        "sampler.max_new_tokens=40",
        "sampler.max_length=64",
        "eval.every=0",
    )
    train(game(tmp_path, *own, "run.steps=3"))
    again = game(tmp_path, *own, "run.steps=6", "run.resume=true", "run.overwrite=false")
    train(again)
    steps = [line for line in metrics_of(again) if "train/loss" in line]
    assert [line["step"] for line in steps] == list(range(1, 7))
    assert all(
        {"reward/environment", "reward/length", "reward/turns"} <= line.keys() for line in steps
    )


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["data.addition=null", "data.jsonl.path={bad}"], r"data.jsonl.path .* has no effect"),
        (["data.addition.digits=3"], r"data.addition.digits \(3\) has no effect"),
        (["task=addition", "env={}"], "task = 'addition' is unknown"),
        (["task={bad}:task"], "tried on the first held-out record: the environment's reset raised"),
    ],
)
def test_what_cannot_work_is_refused_before_anything_is_made(
    overrides: list[str], words: str, tmp_path: Path
) -> None:
    file = tmp_path / "bad.py"
    file.write_text(OWN.replace('record["turns"]', 'record["turn"]'), encoding="utf-8")
    changed = [text.replace("{bad}", str(file)) for text in overrides]
    with pytest.raises((ConfigError, Stopped), match=words):
        train(game(tmp_path, *changed))
    assert not (tmp_path / "guess_number").exists()


LEARNED = {  # steps that are enough, and by how much the held-out reward rises at least
    "guess_number": (40, 0.1),
    "nim": (20, 0.2),
    "calculator": (15, 0.3),
    "chain_sum": (80, 0.1),
}


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", LEARNED)
def test_a_task_is_learned_and_its_control_is_not(name: str, tmp_path: Path) -> None:
    steps, rise = LEARNED[name]
    if name == "chain_sum":
        pytest.importorskip("reasoning_gym")
    settings = ("eval.every=0", "eval.temperature=1", "trainer.warmup_steps=2")
    control = ("run.name=control", "run.steps=2", "algorithm.learning_rate=0")
    before = [
        line["eval/reward"]
        for line in run_job(name, tmp_path, *settings, *control)
        if "eval/reward" in line
    ]
    learned = (  # goes on from the control's weights, which the warm start made
        f"model.path={tmp_path / 'control' / 'policy'}",
        "warm_start.steps=0",
        f"run.steps={steps}",
    )
    lines = run_job(name, tmp_path, *settings, *learned)
    after = [line["eval/reward"] for line in lines if "eval/reward" in line]
    assert abs(before[-1] - before[0]) < rise / 2
    assert after[0] == pytest.approx(before[-1], abs=rise / 2)
    assert after[-1] - after[0] >= rise
