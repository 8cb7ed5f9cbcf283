"""Runs of several processes and of several adapters are killed, stopped and resumed."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.mark.slow
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
