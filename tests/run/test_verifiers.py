"""Whole runs whose episodes environments of the library verifiers play."""

from pathlib import Path

import pytest
from runs import config_of, metrics_of

from jaxrl_async.run.loop import train

pytestmark = pytest.mark.exhaustive

TINY = (
    "model.architecture={layers: 1, width: 32, heads: 4, kv_heads: 2, head_dim: 8, mlp: 64}",
    "warm_start.steps=0",
    "sampler.max_new_tokens=8",
    "sampler.max_length=192",
    "algorithm={group_size: 2, groups_per_step: 2, learning_rate: 1e-3}",
    "trainer={micro_batch_tokens: 512, warmup_steps: 1}",
    "run.steps=3",
    "eval.every=3",
    "metrics={peak_flops: 1e9, tensorboard: false}",
)


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("single-agent", "agent: {harness: {id: verifiers_reverse, turns: 2}}"),
        ("best-of-n", "id: best-of-n, n: 3"),
    ],
)
def test_a_shipped_environment_is_trained_on(tmp_path: Path, name: str, arguments: str) -> None:
    pytest.importorskip("verifiers", reason="needs the extra [verifiers]")
    task = "task={verifiers:verifiers_reverse: {taskset: {words: 24}, " + arguments + "}}"
    config = config_of("guess_number", tmp_path, *TINY, f"run.name={name}", task)
    train(config)
    lines = metrics_of(config)
    steps = [line for line in lines if "reward/mean" in line]
    assert len(steps) == 3
    for line in steps:
        assert line["reward/mean"] == pytest.approx(2 * line["reward/share"], abs=1e-6)
        assert line["reward/letters"] > 0
        assert ("reward/pass_at_n" in line) == (name == "best-of-n")
        assert line["faults/failed_groups"] == 0
