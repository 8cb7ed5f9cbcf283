"""Whole runs of a user's own decoder: resumed, with an adapter, with samplers in processes."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from runs import config_of, many_digits, metrics_of, weights_of

from jaxrl_async.errors import ConfigError
from jaxrl_async.run.loop import train

pytestmark = pytest.mark.full

FILE = Path(__file__).parents[2] / "configs" / "own_decoder" / "parallel.py"
TINY = (
    "model.architecture={layers: 2, width: 32, heads: 4, kv_heads: 2, head_dim: 8, mlp: 64}",
    "data.addition={digits: 1, eval_size: 8}",
    "data.max_prompt_tokens=16",
    "warm_start={steps: 2, batch_size: 4}",
    "sampler={slots: 8, max_length: 32, max_new_tokens: 12}",
    "algorithm={group_size: 4, groups_per_step: 4, learning_rate: 1e-2}",
    "trainer={row_length: 32, micro_batch_tokens: 512, warmup_steps: 0}",
    "eval.every=0",
    "metrics={peak_flops: 1e9, tensorboard: false}",
)


def rl(folder: Path, *overrides: str) -> Any:
    file = folder / "mine.py"
    if not file.exists():
        file.write_bytes(FILE.read_bytes())
    own = f"model.decoder={file}:ParallelLayer"
    return config_of("addition", folder, *TINY, own, many_digits(folder), *overrides)


@pytest.mark.exhaustive
def test_a_resumed_run_continues_equally_and_refuses_another_text(tmp_path: Path) -> None:
    exact = ("staleness.max_staleness=0", "checkpoint={every: 2}")
    whole = rl(tmp_path, *exact, "run.name=whole", "run.steps=4")
    train(whole)
    train(rl(tmp_path, *exact, "run.name=parts", "run.steps=2"))
    again = ("run.name=parts", "run.steps=4", "run.resume=true", "run.overwrite=false")
    train(rl(tmp_path, *exact, *again))
    expected = weights_of(whole)
    for name, array in weights_of(rl(tmp_path, *exact, *again)).items():
        np.testing.assert_array_equal(array, expected[name], err_msg=name)
    lines = [line for line in metrics_of(whole) if "weights/probe_error" in line]
    assert lines and all(line["weights/probe_error"] < 1e-4 for line in lines)
    with (tmp_path / "mine.py").open("a") as file:
        file.write("\n# another text\n")
    with pytest.raises(ConfigError, match="has changed since the run began"):
        train(rl(tmp_path, *exact, *again, "run.steps=6"))


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "overrides",
    [
        ("mesh={trainer: {fsdp: 2, tensor: 2}, sampler: {tensor: 2}}", "model.lora.rank=4"),
        ("weights.dtype=int8", "weights.probe=false", "model.remat=layer"),
        ("mesh.samplers_in=processes",),
    ],
    ids=["meshes and adapter", "int8", "a process"],
)
def test_an_own_decoder_learns_in_other_forms_of_a_run(tmp_path: Path, overrides: tuple) -> None:
    config = rl(tmp_path, *overrides, "run.steps=2")
    train(config)
    lines = [line for line in metrics_of(config) if "train/loss" in line]
    assert len(lines) == 2 and all(np.isfinite(line["train/loss"]) for line in lines)
