"""Whole runs whose evaluation overtakes, and what priorities do not change."""

from pathlib import Path

import numpy as np
import pytest
from runs import config_of, many_digits, metrics_of, weights_of

from jaxrl_async.config.load import load
from jaxrl_async.errors import ConfigError
from jaxrl_async.metrics.metric import comparable
from jaxrl_async.run.loop import train
from jaxrl_async.sampler.batch.admission import WaitingQueue

TINY = (
    "model.architecture={layers: 1, width: 16, heads: 2, kv_heads: 1, head_dim: 8, mlp: 32}",
    "data.addition.eval_size=24",
    "warm_start.steps=0",
    "sampler.slots=4",
    "sampler.reserve=0",
    "sampler.max_new_tokens=12",
    "algorithm.group_size=8",
    "algorithm.groups_per_step=4",
    "algorithm.learning_rate=1e-3",
    "trainer.micro_batch_tokens=512",
    "trainer.warmup_steps=0",
    "run.steps=3",
    "eval.every=1",
    "checkpoint.every=0",
    "metrics.tensorboard=false",
)


def played(folder: Path, *overrides: str) -> tuple:
    folder.mkdir()
    config = config_of("addition", folder, *TINY, many_digits(folder), *overrides)
    train(config)
    return [comparable(line) for line in metrics_of(config)], weights_of(config)


@pytest.fixture
def overtaken(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Training's requests that were admitted while an evaluation's waited, by id."""
    found: list[str] = []
    real = WaitingQueue.admit

    def admit(queue: WaitingQueue, one) -> None:
        waits = any(live.request.request_id.startswith("eval/") for live in queue)
        if waits and one.request.request_id.startswith("g"):
            found.append(one.request.request_id)
        real(queue, one)

    monkeypatch.setattr(WaitingQueue, "admit", admit)
    return found


@pytest.mark.full
@pytest.mark.exhaustive
def test_an_evaluation_overtakes_the_groups_that_wait(tmp_path: Path, overtaken: list) -> None:
    stale = "staleness.max_staleness=4"
    played(tmp_path / "behind", stale)
    assert overtaken, "by default it queues behind them"
    overtaken.clear()
    metrics, _ = played(tmp_path / "before", stale, "priorities.evaluation=-1")
    assert not overtaken
    assert all("eval/reward" in line for line in metrics)


@pytest.mark.full
@pytest.mark.exhaustive
def test_priorities_change_no_token_of_a_synchronous_run(tmp_path: Path) -> None:
    stale = "staleness.max_staleness=0"
    first = played(tmp_path / "plain", stale)
    others = "priorities={evaluation: 1, older_first: true}"
    second = played(tmp_path / "ordered", stale, others)
    assert first[0] == second[0]
    for name, values in first[1].items():
        np.testing.assert_array_equal(values, second[1][name], err_msg=name)


@pytest.mark.parametrize(
    "setting, needs",
    [
        ("priorities.later_turns=-1", "task"),
        ("priorities.guests=1", "endpoint, or a task"),
        ("priorities.evaluation=5000", "1000"),
    ],
)
def test_a_priority_that_no_request_would_have_is_refused(setting: str, needs: str) -> None:
    with pytest.raises(ConfigError, match=needs):
        load(Path(__file__).parents[2] / "configs" / "addition.yaml", [setting])
