"""Whole runs in two real processes (gloo on the CPU) beside the same in one."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from jaxrl_async.metrics.metric import comparable
from jaxrl_async.metrics.recorder import read_lines

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
def many_digits(prompt, completion, reference):
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


def start(folder: Path, count: int, *overrides: str) -> list[subprocess.Popen]:
    """One run in `count` processes; on CPU devices of their own."""
    (folder / "reward.py").write_text(REWARD)
    (folder / "empty.yaml").write_text("")
    words = [*TINY, f"run.dir={folder}", f"reward.function={folder}/reward.py:many_digits"]
    meeting = [f"distributed={{coordinator: 'localhost:{free_port()}', num_processes: {count}}}"]
    return [
        subprocess.Popen(
            [
                *(sys.executable, "-m", "jaxrl_async.train", folder / "empty.yaml"),
                *(*words, *meeting, f"distributed.process_id={i}", *overrides),
            ],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=ENV,
        )
        for i in range(count)
    ]


def ended(processes: list[subprocess.Popen], timeout_s: float = 400) -> list[tuple[int, str]]:
    """Exit code and output of each; none is left running."""
    try:
        outputs = [p.communicate(timeout=timeout_s)[0] for p in processes]
    finally:
        for process in processes:
            process.kill()
    return [(p.returncode, out) for p, out in zip(processes, outputs, strict=True)]


def run(folder: Path, count: int, *overrides: str) -> list[str]:
    """A run to its end; what each process printed."""
    results = ended(start(folder, count, *overrides))
    for code, output in results:
        assert code == 0, output
    return [output for _, output in results]


def results(folder: Path, name: str) -> tuple[list[dict], dict[str, np.ndarray]]:
    lines = [comparable(line) for line in read_lines(folder / name / "metrics.jsonl")]
    return lines, load_file(folder / name / "policy" / "model.safetensors")


def assert_same_run(one: tuple, other: tuple) -> None:
    """The same numbers, up to the order in which devices add them up."""
    assert [line.keys() for line in one[0]] == [line.keys() for line in other[0]]
    for line, twin in zip(one[0], other[0], strict=True):
        for key, value in line.items():
            np.testing.assert_allclose(twin[key], value, rtol=1e-4, atol=1e-6, err_msg=key)
    for name, values in one[1].items():
        np.testing.assert_allclose(other[1][name], values, rtol=1e-3, atol=1e-5, err_msg=name)


@pytest.mark.slow
def test_a_run_in_two_processes_stopped_and_resumed_equals_one_in_one_process(runs):
    run(runs, 1, "run.name=one", "run.steps=3")
    again = ("run.name=two", "run.resume_or_start=true")
    run(runs, 2, *again, "run.steps=2")
    first, second = run(runs, 2, *again, "run.steps=3")
    assert_same_run(results(runs, "one"), results(runs, "two"))
    fates = [
        sorted((runs / name / "ledger.jsonl").read_text().splitlines()) for name in ("one", "two")
    ]
    assert set(fates[0]) <= set(fates[1]) and len(fates[1]) == len(set(fates[1]))
    assert "step 3/3" in first and "step" not in second, "process 0 alone tells of the run"
    assert "report.html" in first and "report.html" not in second
    for code, output in ended(start(runs, 2, "run.name=two")):
        assert code == 2 and "holds a run already" in output, "told in every process"


@pytest.mark.slow
def test_supervised_training_in_two_processes_equals_one_in_one(runs):
    job = ("run.job=sft", "warm_start.steps=0", "sft.batch_size=8", "run.steps=2")
    for count in (1, 2):
        run(runs, count, *job, f"run.name=in{count}")
    assert_same_run(results(runs, "in1"), results(runs, "in2"))


@pytest.mark.slow
def test_a_signal_to_one_process_saves_the_run_of_both(runs):
    processes = start(runs, 2, "run.name=told", "run.steps=100000")
    metrics = runs / "told" / "metrics.jsonl"
    deadline = time.monotonic() + 300
    while not (metrics.exists() and len(read_lines(metrics)) > 2):
        assert time.monotonic() < deadline and all(p.poll() is None for p in processes)
        time.sleep(0.2)
    processes[1].send_signal(signal.SIGTERM)
    codes = {code for code, _ in ended(processes)}
    assert len(codes) == 1, "all end alike"
    (saved,) = [p for p in (runs / "told" / "checkpoints").iterdir() if p.name.isdigit()]
    assert int(saved.name) == read_lines(metrics)[-1]["step"] < 100000


@pytest.mark.slow
def test_processes_whose_companion_dies_end_too(runs):
    words = ("run.name=left", "run.steps=100000", "distributed.heartbeat_s=10")
    processes = start(runs, 2, *words)
    metrics = runs / "left" / "metrics.jsonl"
    deadline = time.monotonic() + 300
    while not (metrics.exists() and len(read_lines(metrics)) > 1):
        assert time.monotonic() < deadline and all(p.poll() is None for p in processes)
        time.sleep(0.2)
    processes[1].kill()
    (code, output), _ = ended(processes)
    assert code != 0, output


@pytest.mark.slow
def test_an_update_over_two_processes_gives_the_losses_of_one():
    """trainer/step.py's TrainStep alone, on a mesh over the devices of all processes."""

    def losses(count: int) -> list[float]:
        address = f"localhost:{free_port()}"
        done = ended(
            [
                subprocess.Popen(
                    [sys.executable, WORKER, address, str(count), str(i)],
                    stdout=subprocess.PIPE,
                    text=True,
                    env=ENV,
                )
                for i in range(count)
            ]
        )
        told = [json.loads(output.splitlines()[-1]) for code, output in done if code == 0]
        assert len(told) == count and all(t == told[0] for t in told), "the same everywhere"
        return told[0]

    alone, together = losses(1), losses(2)
    assert len(alone) == 3 and alone[0] != alone[2], "it learns"
    np.testing.assert_allclose(together, alone, rtol=1e-5)
