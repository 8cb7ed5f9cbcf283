"""Two real processes, each with a sampler on the trainer's devices, beside a run in one."""

import signal
from pathlib import Path

import numpy as np
import pytest
from two_processes import alone, assert_same_run, ended, judge, results, start, wait_for_lines

from jaxrl_async.audit import audit_run
from jaxrl_async.metrics.recorder import read_lines

pytestmark = pytest.mark.full

COLOCATED = "mesh={trainer: {fsdp: 4}, sampler: {tensor: 2}, samplers: 1, colocated: true}"
APART = "mesh={trainer: {fsdp: 4}, sampler: {tensor: 2}, samplers: 2}"


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One folder for all runs: what one has compiled, the next one finds."""
    return tmp_path_factory.mktemp("runs")


@pytest.fixture(scope="module")
def judged(runs: Path) -> str:
    """The override for a reward model, whose folder this makes."""
    return judge(runs / "judge")


@pytest.mark.exhaustive
def test_colocated_in_two_processes_stopped_and_resumed_equals_slices_of_their_own(runs, judged):
    alone(runs, "run.name=one", "run.steps=4", APART, judged)
    again = ("run.name=two", "run.steps=4", "run.resume_or_start=true", COLOCATED, judged)
    processes = start(runs, *again)
    wait_for_lines(processes, runs / "two" / "metrics.jsonl", 2)
    for process in processes:
        process.send_signal(signal.SIGTERM)
    (code, first), (other_code, second) = ended(processes)
    assert code == other_code and "Traceback" not in first + second, first + second
    stopped = read_lines(runs / "two" / "metrics.jsonl")[-1]["step"]
    saved = [p.name for p in (runs / "two" / "checkpoints").iterdir() if p.name.isdigit()]
    assert saved == [str(stopped)] and stopped < 4, "both, in one step"

    (code, first), (other_code, second) = ended(start(runs, *again))
    assert (code, other_code) == (0, 0), first + second
    one, two = results(runs, "one"), results(runs, "two")
    assert_same_run(one, two, atol=1e-5)
    for name, values in one[1].items():
        np.testing.assert_allclose(two[1][name], values, rtol=0, atol=1e-5, err_msg=name)
    assert len({line["reward/model"] for line in two[0][1:]}) > 1, "the model judged"


@pytest.mark.exhaustive
def test_colocated_with_a_curriculum_two_processes_stay_within_the_bound(runs, judged):
    words = (
        "run.name=bound",
        "run.steps=5",
        "warm_start.steps=0",
        "eval.every=0",
        "checkpoint.every=3",
        "staleness.max_staleness=1",
        "data={curriculum: frontier_first, curriculum_pool: 8, curriculum_threshold: 0.2}",
    )
    for code, output in ended(start(runs, COLOCATED, judged, *words)):
        assert code == 0, output
    steps = read_lines(runs / "bound" / "metrics.jsonl")[1:]
    assert [line["step"] for line in steps] == list(range(1, 6))
    assert all(line["staleness/max"] <= 1 for line in steps)
    assert max(line.get("weights/probe_error", 0.0) for line in steps) < 1e-4
    known = [line["data/measured_prompts"] for line in steps]
    assert known == sorted(known) and known[-1] > 4, "of both processes"
    assert all(0 <= line["data/difficulty_mean"] <= 1 for line in steps[1:])
    trained = [x for x in read_lines(runs / "bound" / "ledger.jsonl") if x["fate"] == "trained"]
    assert len({x["group"] for x in trained}) == len(trained) == 5 * 4
    assert audit_run(runs / "bound").problems == ()
