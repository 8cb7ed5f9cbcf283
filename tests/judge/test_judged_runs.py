"""Whole runs whose answers and steps a judge scores over HTTP."""

import json
from pathlib import Path

import pytest
from fake_judge import FakeJudge
from runs import config_of, metrics_of

from jaxrl_async.config.schema import Config
from jaxrl_async.errors import BadEndpoint, ConfigError
from jaxrl_async.run.loop import train

TINY = (
    "model.architecture={layers: 1, width: 32, heads: 4, kv_heads: 2, head_dim: 8, mlp: 64}",
    "warm_start.steps=0",
    "sampler.slots=16",
    "sampler.max_new_tokens=16",
    "sampler.max_length=64",
    "algorithm.group_size=4",
    "algorithm.groups_per_step=2",
    "algorithm.advantage=discounted",
    "trainer.micro_batch_tokens=512",
    "trainer.warmup_steps=1",
    "data.addition.eval_size=4",
    "eval.every=0",
    "metrics.peak_flops=1e9",
    "metrics.tensorboard=false",
    "checkpoint.every=2",
)
STEPS = """
def evens(steps):
    return [float(len(step) % 2 == 0) for step in steps]
"""


def judged(folder: Path, server: FakeJudge, *overrides: str) -> Config:
    (folder / "steps.py").write_text(STEPS, encoding="utf-8")
    return config_of(
        "addition",
        folder,
        *TINY,
        "reward.judge.model=m",
        f"reward.judge.base_url={server.url}",
        "reward.judge.rubric={even: It is even., long: It is long.}",
        "reward.judge.mode=rank",
        "reward.judge.backoff_s=0.01",
        *overrides,
    )


@pytest.mark.exhaustive
def test_a_run_is_judged_and_resumed_without_paying_twice(tmp_path: Path) -> None:
    with FakeJudge() as server:
        server.judge = lambda text: float(len(text) % 10)
        server.faults = ["", "429", "words"]
        own = (
            f"reward.process.function={tmp_path / 'steps.py'}:evens",
            "reward.process.split=token",
        )
        first = judged(tmp_path, server, *own, "run.steps=2")
        train(first)
        paid = len(server.bodies)
        again = judged(
            tmp_path, server, *own, "run.steps=4", "run.resume=true", "run.overwrite=false"
        )
        train(again)
    lines = metrics_of(again)
    steps = [line for line in lines if "train/loss" in line]
    assert [line["step"] for line in steps] == [1, 2, 3, 4]
    assert {"reward/even", "reward/long", "judge/calls", "process/steps"} <= steps[0].keys()
    assert sum(line["process/steps"] for line in steps) > 0
    assert sum(line["faults/judge_busy"] for line in steps[:2]) <= 1
    cached = tmp_path / first.run.name / "judge_cache.jsonl"
    keys = [json.loads(line)["key"] for line in cached.read_text("utf-8").splitlines()]
    assert len(keys) == len(set(keys)), "nothing is kept twice"
    assert paid < len(server.bodies)


@pytest.mark.exhaustive
def test_a_judge_whose_key_is_withdrawn_ends_the_run_at_once(tmp_path: Path) -> None:
    with FakeJudge() as server:
        server.faults = [*[""] * 3, *["401"] * 500]
        with pytest.raises(BadEndpoint, match=r"answers 401.*Correct reward\.judge"):
            train(judged(tmp_path, server, "run.steps=20", "faults.backoff_s=0.01"))
        calls = len(server.bodies)
    assert calls <= 3 + 8, "each group under way asks once at most"


def test_a_judge_that_cannot_work_is_refused_before_anything_is_made(tmp_path: Path) -> None:
    with FakeJudge() as server:
        server.faults = ["404"]
        with pytest.raises(ConfigError, match=r"reward\.judge, tried on the first held-out prompt"):
            train(judged(tmp_path, server))
        (tmp_path / "bad.py").write_text("def f(a):\n    return 1", encoding="utf-8")
        with pytest.raises(ConfigError, match="it asks for 'a'"):
            train(judged(tmp_path, server, f"reward.process.function={tmp_path / 'bad.py'}:f"))
    assert not (tmp_path / "addition").exists()
