"""Runs of several processes and of several adapters are killed, stopped and resumed."""

import importlib
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.mark.full
@pytest.mark.exhaustive
@pytest.mark.parametrize("job", ["sampler processes, stale", "several adapters", "preference"])
def test_a_run_that_is_killed_and_stopped_at_random_trains_on_everything_once(
    job: str, tmp_path: Path
) -> None:
    """benchmarks/chaos.py judges: exit codes, steps, ledger, processes left over, and the weights
    of an undisturbed run."""
    file = tmp_path / "rows.json"
    command = [sys.executable, str(BENCHMARKS / "chaos.py"), "--jobs", job, "--kills", "3"]
    done = subprocess.run(
        [*command, "--stop-s", "3", "--seed", "5", "--json", str(file), "--keep", str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=580,
        env={**os.environ, "PYTHONPATH": str(BENCHMARKS.parent)},
    )
    assert done.returncode == 0, done.stderr[-6000:]
    (row,) = json.loads(file.read_text(encoding="utf-8"))["rows"]
    assert row["failures"] == "none" and row["kills"] == 3
    assert row["trainer"] + row["sampler"] + row["both"] == 3


@pytest.fixture
def benchmark(monkeypatch):
    """Imports a benchmark by its name."""
    monkeypatch.syspath_prepend(BENCHMARKS)
    return importlib.import_module


HANDLES = """
import signal, sys
for name in sys.argv[1:]:
    signal.signal(getattr(signal, name), lambda *_: None)
print("there", flush=True)
sys.stdin.read()
"""


@pytest.mark.parametrize(
    ("own", "wanted"),
    [((), set()), (("SIGHUP",), {"SIGHUP"}), (("SIGTERM", "SIGINT"), {"SIGTERM", "SIGINT"})],
)
def test_a_death_by_a_signal_is_as_it_should_be_only_where_no_handler_is(benchmark, own, wanted):
    chaos = benchmark("chaos")
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-c", HANDLES, *own], **pipes) as process:
        assert process.stdout.readline() == b"there\n"
        handled = {n.name for n in chaos.CODES if chaos.is_handled(process.pid, n)}
        process.stdin.close()
    assert handled == wanted
    assert not chaos.is_handled(process.pid, signal.SIGHUP), "it has ended"


def test_the_soak_sees_that_most_groups_fail(benchmark):
    soak = benchmark("soak")
    update = {"train/grad_norm": 0.5, "faults/failed_groups": 1.0}
    assert soak.failed_share([update] * 10) == pytest.approx(1 / 5)
    assert soak.failed_share([{"eval/reward": 0.0, "faults/failed_groups": 4.0}]) == 1.0
    assert soak.failed_share([{"eval/reward": 0.0}]) == 0.0
