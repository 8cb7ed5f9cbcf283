"""Whole runs of a game whose other seat is filled by each kind of opponent."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from runs import CONFIGS, config_of, metrics_of, weights_of

from jaxrl_async.config.schema import Config
from jaxrl_async.errors import ConfigError
from jaxrl_async.run.loop import train

TINY = (
    "model.architecture={layers: 1, width: 32, heads: 4, kv_heads: 2, head_dim: 8, mlp: 64}",
    "warm_start.steps=20",
    "warm_start.batch_size=16",
    "sampler.slots=1",  # what is computed together changes the last bits of log-probs
    "sampler.reserve=0",
    "staleness.max_staleness=0",
    "algorithm.group_size=2",
    "algorithm.groups_per_step=4",
    "trainer.micro_batch_tokens=512",
    "trainer.warmup_steps=1",
    "task={nim: {stones: 6, most: 3}}",
    "run.steps=6",
    "eval.every=0",
    "checkpoint.every=2",
    "metrics.samples_every=1",
    "metrics.peak_flops=1e9",
    "metrics.tensorboard=false",
)
LEAGUE = (
    "seats={second: {mixture: [policy, initial, "
    "{older: {every: 1, keep: 2, pick: worst, resident: 1}, weight: 3}], eval: initial}}"
)
TIME_S = 100.0


def nim(folder: Path, name: str, *overrides: str) -> Config:
    return config_of("nim", folder, *TINY, f"run.name={name}", *overrides)


def facts(config: Config) -> list[dict[str, float]]:
    """What two equal runs have in common, step by step."""
    kept = ("reward/", "seats/games", "seats/reward", "seats/age", "rollout/", "train/loss")
    return [
        {k: v for k, v in line.items() if k.startswith(kept) and "cancelled" not in k}
        for line in metrics_of(config)
    ]


def killed_at(version: int, folder: Path, name: str) -> None:
    """Run in a second process, and kill it once it has made this version."""
    words = [f"run.dir={folder}", *TINY, f"run.name={name}", LEAGUE]
    process = subprocess.Popen(
        [sys.executable, "-m", "jaxrl_async.train", str(CONFIGS / "nim.yaml"), *words],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    metrics, until = folder / name / "metrics.jsonl", time.monotonic() + TIME_S
    try:
        while not (metrics.exists() and f'"step": {version}' in metrics.read_text("utf-8")):
            assert process.poll() is None and time.monotonic() < until
            time.sleep(0.05)
    finally:
        process.kill()
        process.wait()


@pytest.mark.full
@pytest.mark.exhaustive
def test_a_league_survives_a_kill_and_is_the_same_bit_for_bit(tmp_path: Path) -> None:
    whole = nim(tmp_path, "whole", LEAGUE)
    train(whole)
    killed_at(4, tmp_path, "parts")
    again = nim(tmp_path, "parts", LEAGUE, "run.resume=true", "run.overwrite=false")
    train(again)
    assert facts(whole) == facts(again)
    weights = weights_of(again)
    for name, values in weights_of(whole).items():
        np.testing.assert_array_equal(values, weights[name], err_msg=name)
    files = [{p.name for p in (tmp_path / n / "league").iterdir()} for n in ("whole", "parts")]
    assert files[0] == files[1]
    snapshots = sorted(int(n) for n in files[0] if n.isdigit())
    assert snapshots[0] == 0 and snapshots[-1] == 6, "initial, and the newest"
    standings = [(tmp_path / n / "league/standings.jsonl").read_text() for n in ("whole", "parts")]
    assert standings[0] == standings[1]
    lines = metrics_of(whole)
    met = {k.removeprefix("seats/games_") for x in lines for k in x if "seats/games" in k}
    assert met == {"second.policy", "second.initial", "second.older"}
    samples = (tmp_path / "whole/samples.jsonl").read_text("utf-8").splitlines()
    shown = [json.loads(line) for line in samples]
    seated = {s["opponents"]["second"] for s in shown if s["seat"] == "first"}
    assert len(seated) > 2 and any(name.startswith("older ") for name in seated)
    assert all(s["opponents"]["second"] == "policy" for s in shown if s["seat"] == "second")
    assert not any(line.get("faults/failed_groups") for line in lines)


@pytest.mark.full
@pytest.mark.exhaustive
def test_a_model_and_its_server_are_met(tmp_path: Path) -> None:
    frozen = nim(tmp_path, "frozen", "run.steps=1")
    train(frozen)
    folder = tmp_path / "frozen" / "policy"
    model = nim(tmp_path, "model", f"seats={{second: {{model: {folder}}}}}", "run.steps=2")
    train(model)
    assert_met(metrics_of(model), "second.policy")
    server = subprocess.Popen(
        [sys.executable, "-m", "jaxrl_async.serve", "--port", "0", "--slots", "2",
         "--max-length", "64", str(folder)],
        stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
        env=os.environ | {"JAXRL_ASYNC_KEY": "sesame"},
    )  # fmt: skip
    os.environ["NIM_KEY"] = "sesame"
    try:
        assert server.stdout is not None
        line = next(line for line in server.stdout if line.startswith("serving"))
        found = re.search(r"http://\S+", line)
        assert found is not None
        seat = f"{{endpoint: '{found.group()}', model: policy, key_env: NIM_KEY, max_tokens: 4}}"
        served = nim(tmp_path, "served", f"seats={{second: {seat}}}", "run.steps=2")
        train(served)
        server.send_signal(signal.SIGINT)
        assert server.wait(60) == 0
    finally:
        del os.environ["NIM_KEY"]
        server.kill()
        server.wait()
        if server.stdout is not None:
            server.stdout.close()
    lines = metrics_of(served)
    assert_met(lines, "second.policy")
    assert sum(line.get("seats/calls", 0) for line in lines) > 0
    assert sum(line.get("seats/completion_tokens", 0) for line in lines) > 0


def assert_met(lines: list[dict[str, Any]], who: str) -> None:
    """The policy played against these alone, and was trained."""
    steps = [line for line in lines if "train/loss" in line]
    assert [line[f"seats/games_{who}"] for line in steps] == [8.0, 8.0]
    assert all("reward/seat_second" not in line for line in steps), "its turns are not trained on"
    assert not any(line.get("faults/failed_groups") for line in lines)


def test_seats_that_the_game_lacks_or_leaves_nobody_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="third is not a seat of the game"):
        train(nim(tmp_path, "a", "seats={third: initial}"))
    with pytest.raises(ConfigError, match="leaves no seat of the game to the policy"):
        train(nim(tmp_path, "a", "seats={first: initial, second: initial}"))
    with pytest.raises(ConfigError, match="NO_SUCH_KEY"):
        seat = "{endpoint: 'http://127.0.0.1:1/v1', model: m, key_env: NO_SUCH_KEY}"
        train(nim(tmp_path, "a", f"seats={{second: {seat}}}"))
    assert not (tmp_path / "a").exists()
