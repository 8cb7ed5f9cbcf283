"""Whole runs of models with gated delta nets: rollouts, updates, adapters, quantised bases."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from runs import config_of, many_digits, metrics_of

from jaxrl_async import audit
from jaxrl_async.run.loop import train

pytestmark = [pytest.mark.full, pytest.mark.exhaustive]

TINY = (
    "model.architecture={layers: 4, width: 32, heads: 4, kv_heads: 2, head_dim: 8, mlp: 32}",
    "data.addition={digits: 1, eval_size: 8}",
    "data.max_prompt_tokens=16",
    "warm_start={steps: 2, batch_size: 4}",
    "sampler={slots: 8, max_length: 32, max_new_tokens: 12}",
    "algorithm={group_size: 8, groups_per_step: 4, learning_rate: 1e-2}",
    "trainer={row_length: 32, micro_batch_tokens: 512, warmup_steps: 0}",
    "eval.every=0",
    "metrics={peak_flops: 1e9, tensorboard: false}",
)
RECOMPUTE = "sampler.on_new_weights=recompute"  # else states of older weights are gone on with
FORMS = {
    "all weights": (
        "model.architecture.family=qwen3_5_text",
        "staleness.max_staleness=1",
        RECOMPUTE,
    ),
    "adapter": (
        "model.architecture={family: qwen3_5_moe_text, experts: 4}",
        "model.lora={rank: 4, alpha: 8}",
        "staleness.max_staleness=0",
    ),
    "nf4 base": (
        "model.architecture={family: qwen3_next, experts: 4}",
        "model.lora={rank: 4, alpha: 8, base: nf4, group_size: 8}",
        "staleness.max_staleness=1",
        RECOMPUTE,
    ),
    "int8 base": (
        "model.architecture.family=qwen3_5_text",
        "model.lora={rank: 4, alpha: 8, base: int8}",
        "staleness.max_staleness=0",
    ),
}


@pytest.mark.parametrize("form", FORMS)
def test_a_model_with_delta_nets_learns_from_its_rollouts(tmp_path: Path, form: str) -> None:
    """It draws more digits than it did; no token is further from the trainer's log-prob than
    rounding and new weights account for; the ledger adds up."""
    config = config_of(
        "addition", tmp_path, *TINY, many_digits(tmp_path), *FORMS[form], "run.steps=12"
    )
    train(config)
    lines: list[dict[str, Any]] = [n for n in metrics_of(config) if "train/loss" in n]
    assert len(lines) == 12
    probes = [line["weights/probe_error"] for line in lines if "weights/probe_error" in line]
    gaps = [line["mismatch/mean"] for line in lines if "mismatch/mean" in line]
    assert probes and max(probes) < 1e-4
    assert max(gaps, default=0.0) < 1e-4 and (gaps or config.staleness.max_staleness)
    rewards = np.array([line["reward/mean"] for line in lines])
    if "base" not in form:  # so few updates of so small an adapter move an average little
        assert rewards[-4:].mean() > rewards[:4].mean()
    assert audit.main([str(Path(config.run.dir) / config.run.name)]) == 0
