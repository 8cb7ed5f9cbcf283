"""A whole run whose agent program swallows its cancellation is saved on SIGTERM nevertheless."""

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from runs import CONFIGS

pytestmark = pytest.mark.full

ROOT = Path(__file__).parents[2]
PROGRAM = """
import asyncio
from pathlib import Path

from jaxrl_async import Task


async def play(session):
    (Path(__file__).parent / "begun").touch()
    while True:
        try:
            await asyncio.sleep(3600)
        except BaseException:
            pass


deaf = Task(records=[{"question": "1"}] * 8, held_out=[{"question": "2"}], program=play, words="12")
"""
TINY = (
    "model.architecture={layers: 1, width: 32, heads: 4, kv_heads: 2, head_dim: 8, mlp: 64}",
    "warm_start.steps=0",
    "sampler.slots=4",
    "algorithm={group_size: 2, groups_per_step: 2}",
    "metrics.tensorboard=false",
)


@pytest.mark.exhaustive
def test_sigterm_saves_while_an_evaluation_is_held_up(tmp_path: Path) -> None:
    (tmp_path / "deaf.py").write_text(PROGRAM, encoding="utf-8")
    place = f"run={{dir: {tmp_path}, name: run}}"
    words = [str(CONFIGS / "guess_number.yaml"), *TINY, place, f"task={tmp_path / 'deaf.py'}:deaf"]
    with open(tmp_path / "log", "w") as log:
        run = subprocess.Popen(
            [sys.executable, "-m", "jaxrl_async.train", *words], cwd=ROOT, stdout=log, stderr=log
        )
    try:
        end = time.monotonic() + 300
        while not (tmp_path / "begun").exists():
            assert run.poll() is None and time.monotonic() < end, (tmp_path / "log").read_text()
            time.sleep(0.1)
        run.send_signal(signal.SIGTERM)
        assert run.wait(120) == 75, (tmp_path / "log").read_text()
    finally:
        run.kill()
        run.wait()
    said = (tmp_path / "log").read_text()
    assert "was saved" in said and "not ended within" not in said, said
