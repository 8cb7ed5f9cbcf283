"""Runs whose experts are balanced: the correction is sent, saved and resumed with the weights."""

from pathlib import Path

import numpy as np
import pytest
from runs import config_of, many_digits, metrics_of, weights_of

from jaxrl_async.config.load import load
from jaxrl_async.config.schema import Config
from jaxrl_async.run.loop import train

pytestmark = pytest.mark.full

MODEL = (
    "model.architecture={family: glm4_moe, layers: 3, width: 32, heads: 4, kv_heads: 2, "
    "head_dim: 8, mlp: 16, experts: 4, experts_per_token: 2}"
)
COMMON = (
    MODEL,
    "model.balance={loss: 0.01, bias_rate: 0.01}",
    "data.addition={digits: 1, eval_size: 8}",
    "data.max_prompt_tokens=16",
    "checkpoint={every: 2}",
    "trainer={row_length: 32, micro_batch_tokens: 64, warmup_steps: 0}",
    "eval.every=0",
    "metrics={peak_flops: 1e9, tensorboard: false}",
)
RL = (
    "warm_start={steps: 2, batch_size: 4}",
    "sampler={slots: 8, max_length: 32, max_new_tokens: 12}",
    "algorithm={group_size: 4, groups_per_step: 4, learning_rate: 1e-2}",
    "staleness.max_staleness=0",
)
SFT = ("run.job=sft", "sft.batch_size=8", "algorithm.learning_rate=1e-2", "sampler.max_length=32")


def config_for(job: str, folder: Path, *overrides: str) -> Config:
    if job == "rl":
        return config_of("addition", folder, *COMMON, *RL, many_digits(folder), *overrides)
    (empty := folder / "empty.yaml").write_text("")
    return load(empty, [*COMMON, *SFT, f"run.dir={folder}", *overrides])


@pytest.mark.exhaustive
@pytest.mark.parametrize("job", ["rl", "sft"])
def test_a_run_that_moves_corrections_resumes_as_if_it_had_not_stopped(
    tmp_path: Path, job: str
) -> None:
    whole = config_for(job, tmp_path, "run.name=whole", "run.steps=4")
    train(whole)
    train(config_for(job, tmp_path, "run.name=parts", "run.steps=2"))
    resumed = ("run.name=parts", "run.steps=4", "run.resume=true", "run.overwrite=false")
    train(parts := config_for(job, tmp_path, *resumed))
    expected, found = weights_of(whole), weights_of(parts)
    for name, array in expected.items():
        np.testing.assert_array_equal(found[name], array, err_msg=name)
    moved = [a for name, a in expected.items() if "e_score_correction_bias" in name]
    steps = np.concatenate(moved) / 0.01
    assert len(moved) == 2 and np.abs(steps).max() > 0.5
    np.testing.assert_allclose(steps, np.round(steps), atol=1e-3)
    lines = [line for line in metrics_of(whole) if "train/loss" in line]
    assert len(lines) == 4 and all(line["experts/load_max"] >= 1 for line in lines)
    probed = [line["weights/probe_error"] for line in lines if "weights/probe_error" in line]
    assert all(apart < 1e-3 for apart in probed) and (probed or job == "sft")
