"""Whole runs with continuations from pivots: ledger, metrics, the bound on staleness, resuming."""

from pathlib import Path

import numpy as np
import pytest
from runs import config_of, many_digits, metrics_of, weights_of

from jaxrl_async.audit import audit_run
from jaxrl_async.config.load import load
from jaxrl_async.errors import ConfigError
from jaxrl_async.metrics.metric import comparable
from jaxrl_async.metrics.recorder import read_lines
from jaxrl_async.run.loop import train

TINY = (
    "model.architecture={layers: 1, width: 16, heads: 2, kv_heads: 1, head_dim: 8, mlp: 32}",
    "data.addition.eval_size=4",
    "warm_start.steps=0",
    "sampler.slots=8",
    "sampler.page_tokens=4",
    "sampler.max_new_tokens=12",
    "algorithm.group_size=4",
    "algorithm.groups_per_step=4",
    "algorithm.learning_rate=1e-3",
    "trainer.micro_batch_tokens=512",
    "trainer.warmup_steps=0",
    "run.steps=4",
    "eval.every=2",
    "checkpoint.every=2",
    "metrics.tensorboard=false",
)
PIVOTS = "algorithm.pivots={continuations: 3, members: 2, per_member: 2, trunk: fork}"
ADDITION = Path(__file__).parents[2] / "configs" / "addition.yaml"


def played(folder: Path, *overrides: str) -> tuple[list[dict], dict[str, np.ndarray], Path]:
    folder.mkdir(exist_ok=True)
    config = config_of("addition", folder, *TINY, many_digits(folder), *overrides)
    train(config)
    return metrics_of(config), weights_of(config), folder / config.run.name


@pytest.mark.full
@pytest.mark.exhaustive
def test_a_run_with_pivots_adds_up_and_keeps_the_bound(tmp_path: Path) -> None:
    lines, _, root = played(
        tmp_path, PIVOTS, "staleness.max_staleness=2", "algorithm.dynamic_sampling=true"
    )
    assert audit_run(root).problems == ()
    trained = [g for g in read_lines(root / "ledger.jsonl") if g["fate"] == "trained"]
    assert all(len(g["lengths"]) > 4 for g in trained), "members, then their continuations"
    assert any(len(g["lengths"]) == 4 + 2 * 2 * 3 for g in trained)
    steps = lines[1:]
    assert max(line["staleness/max"] for line in steps) <= 2
    assert sum(line["train/tokens"] for line in steps) == sum(sum(g["lengths"]) for g in trained)
    forks = sum(line.get("rollout/forks", 0) for line in steps)
    assert forks >= sum(len(g["lengths"]) - 4 for g in trained)
    for name in ("rollout/shared_tokens", "rollout/fork_tokens", "sampler/prefix_hit_share"):
        assert sum(line.get(name, 0) for line in steps) > 0
    assert all(line["faults/lost_forks"] == 0 for line in steps)


@pytest.mark.full
@pytest.mark.exhaustive
def test_at_staleness_0_a_resumed_run_with_pivots_is_the_same_bit_for_bit(tmp_path: Path) -> None:
    still = ("staleness.max_staleness=0", "sampler.slots=1", "sampler.reserve=0", PIVOTS)
    whole = played(tmp_path / "whole", *still)
    played(tmp_path / "cut", *still, "run.steps=2")
    again = played(tmp_path / "cut", *still, "run.resume=true", "run.overwrite=false")
    for one, other in zip(whole[0], again[0], strict=True):
        assert comparable(one) == comparable(other)
    for name, values in whole[1].items():
        np.testing.assert_array_equal(values, again[1][name], err_msg=name)


@pytest.mark.parametrize(
    "settings, says",
    [
        (["algorithm.pivots.trunk=fork"], "algorithm.pivots is given without continuations"),
        ([PIVOTS, "algorithm.advantage=reinforce_pp"], "compares the answers of a group"),
        ([PIVOTS, "algorithm.shaping=[{downsample: {keep: 4}}]"], "downsample"),
        ([PIVOTS, "algorithm.pivots.mark=x"], "where=mark"),
        ([PIVOTS, "algorithm.pivots.where=entropy"], "lowest_logprob"),
    ],
)
def test_pivots_that_could_not_be_compared_are_refused(settings: list[str], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        load(ADDITION, settings)


@pytest.mark.full
def test_an_environment_that_cannot_be_taken_back_is_refused(tmp_path: Path) -> None:
    config = config_of("calculator", tmp_path, "algorithm.pivots.continuations=2")
    with pytest.raises(ConfigError, match="cannot be taken back to an earlier token"):
        train(config)
