"""The library verifiers plays runs by its own harnesses, as it ships them."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from runs import config_of, metrics_of

from jaxrl_async.run.loop import train

pytestmark = pytest.mark.exhaustive

pytest.importorskip("verifiers", reason="needs the extra [verifiers]")
TINY = (
    "warm_start.steps=0",
    "sampler={slots: 8, max_length: 4096, max_new_tokens: 128, block: 8, page_tokens: 64}",
    "algorithm={group_size: 2, groups_per_step: 2, learning_rate: 1e-3, keep_sampling_mask: true}",
    "trainer={micro_batch_tokens: 4096, warmup_steps: 1}",
    "staleness.max_staleness=0",
    "run.steps=2",
    "eval.every=0",
    "metrics={peak_flops: 1e9, tensorboard: false}",
)
HARNESSES = {
    "null": 'harness: {id: "null"}',
    "bash": "harness: {id: bash}, runtime: {type: subprocess}",
}


@pytest.fixture
def uv(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """uv on the path, which installs what the harnesses' program needs."""
    folder = Path(sys.executable).parent
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")
    if shutil.which("uv") is None:
        pytest.skip("uv is not installed, which verifiers' harnesses prepare their program with")
    from verifiers.v1.harnesses.utils.launch import CHAT_PROGRAM_SOURCE

    (tmp_path / "program.py").write_text(CHAT_PROGRAM_SOURCE, encoding="utf-8")
    words = ["uv", "sync", "--script", tmp_path / "program.py", "-q", "--no-config"]
    done = subprocess.run(words, capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"no package index for verifiers' harnesses: {done.stderr[-200:]}")


@pytest.mark.parametrize("name", HARNESSES)
def test_a_shipped_harness_is_trained_on(tmp_path: Path, name: str, held_run, uv) -> None:
    agent = f"agent: {{{HARNESSES[name]}}}"
    task = "task={verifiers:verifiers_reverse: {taskset: {words: 24}, " + agent + "}}"
    config = config_of("guess_number", tmp_path, *held_run.model, *TINY, task)
    train(config)
    lines = [line for line in metrics_of(config) if "reward/mean" in line]
    assert len(lines) == 2 and not any(line["faults/failed_groups"] for line in lines)
    apart = [line["mismatch/max"] for line in lines if "mismatch/max" in line]
    assert apart and max(apart) < 1e-5
    if name == "bash":
        assert any("<tool_response>" in prompt for prompt in held_run.prompts)
