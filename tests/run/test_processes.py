"""Whole runs in two real processes (gloo on the CPU) beside the same in one."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import jax
import numpy as np
import pytest
import update_worker
from safetensors.numpy import load_file

from jaxrl_async.config.load import load
from jaxrl_async.metrics.metric import comparable
from jaxrl_async.metrics.recorder import read_lines
from jaxrl_async.run.loop import train

ROOT = Path(__file__).parents[2]
WORKER = Path(__file__).with_name("update_worker.py")

TINY = (
    "model.architecture={layers: 1, width: 32, heads: 4, kv_heads: 2, head_dim: 8, mlp: 64}",
    "data.addition={digits: 1, eval_size: 6}",
    "data.max_prompt_tokens=16",
    "warm_start={steps: 1, batch_size: 4}",
    "sampler={slots: 8, max_length: 32, max_new_tokens: 8}",
    "algorithm={group_size: 2, groups_per_step: 4, learning_rate: 1e-2}",
    "trainer={row_length: 32, micro_batch_tokens: 128}",
    "mesh={trainer: {fsdp: 2}, samplers: 2}",
    "eval.every=2",
    "checkpoint.every=0",
    "metrics={peak_flops: 1e9, tensorboard: false}",
    "staleness.max_staleness=0",
)
ENV = {
    **os.environ,
    "PYTHONPATH": str(ROOT),
    "XLA_FLAGS": "--xla_backend_optimization_level=0",  # devices of their own
}
REWARD = """
import time

def many_digits(prompt, completion, reference):
    time.sleep(0.05)  # a step takes long enough to be told to stop after it
    return sum(c.isdigit() for c in completion) / 8
"""


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One folder for all runs: what one has compiled, the next one finds."""
    return tmp_path_factory.mktemp("runs")


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("localhost", 0))
        return free.getsockname()[1]


def words(folder: Path, *overrides: str) -> list[str]:
    """A tiny run's configuration, as on the command line."""
    (folder / "reward.py").write_text(REWARD)
    (folder / "empty.yaml").write_text("")
    settings = [*TINY, f"run.dir={folder}", f"reward.function={folder}/reward.py:many_digits"]
    return [str(folder / "empty.yaml"), *settings, *overrides]


def alone(folder: Path, *overrides: str) -> None:
    """A run in this process."""
    file, *rest = words(folder, *overrides)
    train(load(file, rest))


def start(folder: Path, *overrides: str) -> list[subprocess.Popen]:
    """The same in two processes, on CPU devices of their own."""
    meeting = f"distributed={{coordinator: 'localhost:{free_port()}', num_processes: 2}}"
    return [
        subprocess.Popen(
            [
                *(sys.executable, "-m", "jaxrl_async.train", *words(folder, *overrides)),
                *(meeting, f"distributed.process_id={i}"),
            ],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=ENV,
        )
        for i in range(2)
    ]


def ended(processes: list[subprocess.Popen], timeout_s: float = 400) -> list[tuple[int, str]]:
    """Exit code and output of each; none is left running."""
    try:
        outputs = [p.communicate(timeout=timeout_s)[0] for p in processes]
    finally:
        for process in processes:
            process.kill()
    return [(p.returncode, out) for p, out in zip(processes, outputs, strict=True)]


def wait_for_lines(processes: list[subprocess.Popen], metrics: Path, count: int) -> None:
    """Until a run has made so many records."""
    deadline = time.monotonic() + 300
    while not (metrics.exists() and len(read_lines(metrics)) >= count):
        assert time.monotonic() < deadline and all(p.poll() is None for p in processes)
        time.sleep(0.05)


def results(folder: Path, name: str) -> tuple[list[dict], dict[str, np.ndarray]]:
    lines = [comparable(line) for line in read_lines(folder / name / "metrics.jsonl")]
    return lines, load_file(folder / name / "policy" / "model.safetensors")


def assert_same_run(one: tuple, other: tuple) -> None:
    """The same numbers, up to the order in which devices add them up; a run that was stopped
    evaluates once more."""
    for line, twin in zip(one[0], other[0], strict=True):
        assert {k for k in line.keys() ^ twin.keys() if not k.startswith("eval/")} == set()
        for key in line.keys() & twin.keys():
            np.testing.assert_allclose(twin[key], line[key], rtol=1e-4, atol=1e-6, err_msg=key)
    for name, values in one[1].items():
        np.testing.assert_allclose(other[1][name], values, rtol=1e-3, atol=1e-5, err_msg=name)


@pytest.mark.slow
@pytest.mark.exhaustive
def test_a_run_in_two_processes_told_to_stop_and_resumed_equals_one_in_one_process(runs):
    alone(runs, "run.name=one", "run.steps=6")
    again = ("run.name=two", "run.steps=6", "run.resume_or_start=true")
    processes = start(runs, *again)
    wait_for_lines(processes, runs / "two" / "metrics.jsonl", 2)
    processes[1].send_signal(signal.SIGTERM)
    codes = [code for code, _ in ended(processes)]
    stopped = read_lines(runs / "two" / "metrics.jsonl")[-1]["step"]
    saved = [p.name for p in (runs / "two" / "checkpoints").iterdir() if p.name.isdigit()]
    assert codes[0] == codes[1] and saved == [str(stopped)] and stopped < 6, "both, in one step"

    (code, first), (other_code, second) = ended(start(runs, *again))
    assert (code, other_code) == (0, 0), first + second
    assert_same_run(results(runs, "one"), results(runs, "two"))
    trained = [
        sorted(
            (x for x in read_lines(runs / name / "ledger.jsonl") if x["fate"] == "trained"),
            key=lambda x: x["group"],
        )
        for name in ("one", "two")
    ]
    assert trained[0] == trained[1] and len(trained[0]) == 6 * 4
    assert "step 6/6" in first and "step" not in second, "process 0 alone tells of the run"
    assert "report.html" in first and "report.html" not in second


@pytest.mark.slow
@pytest.mark.exhaustive
def test_supervised_training_in_two_processes_equals_one_in_one(runs):
    job = ("run.job=sft", "warm_start.steps=0", "sft.batch_size=8", "run.steps=2")
    alone(runs, *job, "run.name=sft1")
    for code, output in ended(start(runs, *job, "run.name=sft2")):
        assert code == 0, output
    assert_same_run(results(runs, "sft1"), results(runs, "sft2"))


@pytest.mark.slow
def test_a_process_whose_companion_dies_ends_too(runs):
    job = ("run.job=sft", "warm_start.steps=0", "sft.batch_size=8", "run.steps=100000")
    processes = start(runs, *job, "run.name=left", "distributed.heartbeat_s=10")
    wait_for_lines(processes, runs / "left" / "metrics.jsonl", 2)
    processes[1].kill()
    (code, output), _ = ended(processes)
    assert code != 0, output


@pytest.mark.slow
def test_an_update_over_two_processes_gives_the_losses_of_one():
    """The policy's update alone, on a mesh over the devices of both."""
    address = f"localhost:{free_port()}"
    processes = [
        subprocess.Popen(
            [sys.executable, WORKER, address, str(i)], stdout=subprocess.PIPE, text=True, env=ENV
        )
        for i in range(2)
    ]
    done = ended(processes)
    assert [code for code, _ in done] == [0, 0]
    first, second = (json.loads(output.splitlines()[-1]) for _, output in done)
    expected = update_worker.losses(jax.devices()[: update_worker.DEVICES])
    assert first == second and expected[0] != expected[2], "the same everywhere, and it learns"
    np.testing.assert_allclose(first, expected, rtol=1e-5)
