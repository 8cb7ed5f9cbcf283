"""A whole run whose rows share prompts learns what it learns with answers apart."""

from pathlib import Path

import numpy as np
import pytest
from runs import config_of, many_digits, metrics_of, weights_of

from jaxrl_async.run.loop import train

pytestmark = pytest.mark.full

STILL = (
    "model.architecture={layers: 1, width: 16, heads: 2, kv_heads: 1, head_dim: 8, mlp: 32}",
    "data.addition.eval_size=4",
    "warm_start={steps: 3, batch_size: 8}",
    "sampler={slots: 1, page_tokens: 4, max_length: 48, max_new_tokens: 6, reserve: 0}",
    "algorithm={group_size: 4, groups_per_step: 4, learning_rate: 1.0e-3}",
    "trainer={micro_batch_tokens: 144, warmup_steps: 0}",
    "staleness.max_staleness=0",
    "run.steps=3",
    "metrics.tensorboard=false",
)


def run(folder: Path, *overrides: str) -> tuple[list[dict], dict[str, np.ndarray]]:
    folder.mkdir()
    config = config_of("addition", folder, *STILL, many_digits(folder), *overrides)
    train(config)
    return metrics_of(config)[1:], weights_of(config)


@pytest.mark.exhaustive
def test_a_run_shares_its_prompts_by_default_and_learns_the_same(
    tmp_path: Path,
) -> None:
    apart, weights = run(tmp_path / "apart", "trainer.share_prefixes=false")
    shared, other = run(tmp_path / "shared")  # by default, on a CPU device
    assert all(line["train/shared_tokens"] > 0.1 for line in shared)
    assert not any("train/shared_tokens" in line for line in apart)
    for a, b in zip(apart, shared, strict=True):
        assert a["train/tokens"] == b["train/tokens"]
        assert a["reward/mean"] == b["reward/mean"]
        np.testing.assert_allclose(a["train/grad_norm"], b["train/grad_norm"], rtol=1e-3)
    for name, weight in weights.items():
        np.testing.assert_allclose(other[name], weight, atol=2e-4, err_msg=name)
