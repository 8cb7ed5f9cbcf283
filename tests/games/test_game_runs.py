"""Whole runs of games: the same twice, resumed in the middle, with members that are left out."""

from pathlib import Path

import numpy as np
import pytest
from runs import config_of, metrics_of, weights_of

from jaxrl_async.config.schema import Config
from jaxrl_async.errors import ConfigError
from jaxrl_async.run.loop import train

TINY = (
    "model.architecture={layers: 1, width: 32, heads: 4, kv_heads: 2, head_dim: 8, mlp: 64}",
    "warm_start.steps=10",
    "warm_start.batch_size=16",
    "algorithm.group_size=3",
    "algorithm.groups_per_step=2",
    "algorithm.learning_rate=1e-3",
    "trainer.micro_batch_tokens=512",
    "trainer.warmup_steps=1",
    "run.steps=4",
    "eval.every=2",
    "metrics.peak_flops=1e9",
    "metrics.tensorboard=false",
)
# One sequence at a time: what is computed together, and with it the last bits of log-probs,
# depends on when the games answer.
EXACT = ("staleness.max_staleness=0", "sampler.slots=1", "sampler.reserve=0")
SAME = ("reward/", "rollout/length_", "rollout/turns_mean", "eval/", "train/tokens", "train/loss")


def played(name: str, folder: Path, *overrides: str) -> Config:
    config = config_of(name, folder, *TINY, *overrides)
    train(config)
    return config


def assert_same_bits(first: Config, second: Config) -> None:
    lines = [
        [{k: v for k, v in line.items() if k.startswith(SAME)} for line in metrics_of(config)]
        for config in (first, second)
    ]
    assert lines[0] == lines[1]
    weights = weights_of(second)
    for name, values in weights_of(first).items():
        np.testing.assert_array_equal(values, weights[name], err_msg=name)


@pytest.mark.full
@pytest.mark.exhaustive
@pytest.mark.parametrize("name", ["nim", "proposer_solver"])
def test_a_game_is_the_same_twice_bit_for_bit(name: str, tmp_path: Path) -> None:
    short = (*EXACT, "checkpoint.every=0", "run.steps=3")
    one, two = (played(name, tmp_path, *short, f"run.name={n}") for n in ("one", "two"))
    assert_same_bits(one, two)
    steps = [line for line in metrics_of(one) if "train/loss" in line]
    seats = {"nim": "first", "proposer_solver": "proposer"}
    assert all(f"reward/seat_{seats[name]}" in line for line in steps)
    assert any("eval/seat_" in key for line in metrics_of(one) for key in line)


@pytest.mark.full
@pytest.mark.exhaustive
def test_a_resumed_run_begins_its_games_anew_and_plays_the_same(tmp_path: Path) -> None:
    whole = played("nim", tmp_path, *EXACT, "checkpoint.every=2", "run.name=whole")
    parts = ("run.name=parts", *EXACT, "checkpoint.every=2")
    played("nim", tmp_path, *parts, "run.steps=2")
    again = played("nim", tmp_path, *parts, "run.resume=true", "run.overwrite=false")
    assert_same_bits(whole, again)


@pytest.mark.full
@pytest.mark.exhaustive
def test_games_with_members_left_out_and_groups_without_signal(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text(FAILS, encoding="utf-8")
    config = played(
        "nim",
        tmp_path,
        f"task={file}:fails",
        "staleness.max_staleness=1",
        "algorithm.oversample=1",
        "algorithm.min_members=2",
        "algorithm.dynamic_sampling=true",
        "algorithm.shaping=[{soft_overlong: {max_tokens: 4, cache_tokens: 2}}]",
        "eval.every=0",
        "faults.max_failures=1000",
    )
    lines = metrics_of(config)
    steps = [line for line in lines if "train/loss" in line]
    assert [line["step"] for line in steps] == [1, 2, 3, 4]
    assert all(0 <= line["reward/seat_first"] <= 1 for line in steps)
    assert all(line["reward/zero_variance_share"] == 0 for line in steps)
    assert max(line.get("faults/lost_members", 0) for line in lines) > 0


FAILS = """
import itertools
from jaxrl_async import Task
from jaxrl_async.games.nim import Nim, nim

made = itertools.count(1)
whole = nim(stones=8, most=2)


class Fails(Nim):
    async def step(self, said):
        if next(made) % 7 == 0:
            raise ValueError("out of stones")
        return await super().step(said)


fails = Task(records=whole.records, game=lambda: Fails(2), words=whole.words)
"""


def test_a_game_with_pivots_or_an_environment_beside_it_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"is a game, and algorithm.pivots"):
        played("nim", tmp_path, "algorithm.pivots.continuations=2")
    file = tmp_path / "both.py"
    file.write_text(f"{FAILS}\nboth = Task(game=Fails, tools=[print])", encoding="utf-8")
    with pytest.raises(ConfigError, match="has a program or a game"):
        played("nim", tmp_path, f"task={file}:both")
