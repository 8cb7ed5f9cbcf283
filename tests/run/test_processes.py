"""Whole runs in two real processes (gloo on the CPU) beside the same in one."""

import json
import signal
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest
import update_worker
from safetensors.numpy import load_file
from two_processes import (
    ENV,
    alone,
    assert_same_run,
    ended,
    free_port,
    judge,
    results,
    start,
    wait_for_lines,
)

from jaxrl_async.evals.eval_answers import read_answers_of
from jaxrl_async.metrics.recorder import read_lines

pytestmark = pytest.mark.full

WORKER = Path(__file__).with_name("update_worker.py")


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One folder for all runs: what one has compiled, the next one finds."""
    return tmp_path_factory.mktemp("runs")


@pytest.mark.exhaustive
def test_a_run_in_two_processes_stopped_and_resumed_equals_one_in_one_process(runs):
    judged = judge(runs / "judge")
    named = "evals={three: {samples: 3, temperature: 0.7, every: 3, pass_reward: 0.1}}"
    alone(runs, "run.name=one", "run.steps=6", judged, named)
    again = ("run.name=two", "run.steps=6", "run.resume_or_start=true", judged, named)
    processes = start(runs, *again)
    wait_for_lines(processes, runs / "two" / "metrics.jsonl", 2)
    processes[1].send_signal(signal.SIGTERM)
    codes = [code for code, _ in ended(processes)]
    stopped = read_lines(runs / "two" / "metrics.jsonl")[-1]["step"]
    saved = [p.name for p in (runs / "two" / "checkpoints").iterdir() if p.name.isdigit()]
    assert codes[0] == codes[1] and saved == [str(stopped)] and stopped < 6, "both, in one step"

    (code, first), (other_code, second) = ended(start(runs, *again))
    assert (code, other_code) == (0, 0), first + second
    assert_same_run(results(runs, "one"), results(runs, "two"), atol=1e-5)
    trained = [
        sorted(
            (x for x in read_lines(runs / name / "ledger.jsonl") if x["fate"] == "trained"),
            key=lambda x: x["group"],
        )
        for name in ("one", "two")
    ]
    assert trained[0] == trained[1] and len(trained[0]) == 6 * 4
    for step in (0, 3, 6):
        file = f"evals/three/{step}.jsonl"
        one, two = (read_answers_of(runs / name / file) for name in ("one", "two"))
        assert [(a.index, a.sample) for a in two] == [divmod(i, 3) for i in range(18)]
        assert [a.completion for a in two] == [a.completion for a in one]
    assert "step 6/6" in first and "step" not in second, "only process 0 reports the run"
    assert "report.html" in first and "report.html" not in second


@pytest.mark.exhaustive
def test_supervised_training_in_two_processes_equals_one_in_one(runs):
    job = ("run.job=sft", "warm_start.steps=0", "sft.batch_size=8", "run.steps=2")
    alone(runs, *job, "run.name=sft1")
    for code, output in ended(start(runs, *job, "run.name=sft2")):
        assert code == 0, output
    assert_same_run(results(runs, "sft1"), results(runs, "sft2"))


@pytest.mark.exhaustive
def test_an_adapter_in_two_processes_stopped_and_resumed_equals_one_in_one(runs):
    lora = ("model.lora={rank: 2, alpha: 4, dropout: 0.2}", "checkpoint.every=1", "eval.every=0")
    alone(runs, *lora, "run.name=lora1", "run.steps=2")
    again = (*lora, "run.name=lora2", "run.resume_or_start=true")
    for steps in (1, 2):
        for code, output in ended(start(runs, *again, f"run.steps={steps}")):
            assert code == 0, output
    assert_same_run(results(runs, "lora1"), results(runs, "lora2"), atol=1e-5)
    one, two = (
        load_file(runs / name / "adapter" / "adapter_model.safetensors")
        for name in ("lora1", "lora2")
    )
    for name, array in one.items():
        np.testing.assert_allclose(two[name], array, atol=1e-5, err_msg=name)


@pytest.mark.exhaustive
def test_a_process_whose_companion_dies_ends_too(runs):
    job = ("run.job=sft", "warm_start.steps=0", "sft.batch_size=8", "run.steps=100000")
    processes = start(runs, *job, "run.name=left", "distributed.heartbeat_s=10")
    wait_for_lines(processes, runs / "left" / "metrics.jsonl", 2)
    processes[1].kill()
    (code, output), _ = ended(processes)
    assert code != 0, output


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
