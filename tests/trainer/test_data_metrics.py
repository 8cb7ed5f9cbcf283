"""What a step's groups say: against counts made by hand."""

from dataclasses import replace

import numpy as np
import pytest
from builders import episode_of, group_of

from jaxrl_async.metrics.metric import metric_of
from jaxrl_async.trainer.data_metrics import drop_measures, group_measures, task_measures
from jaxrl_async.types import (
    CancelledGroup,
    Drop,
    Episode,
    EpisodeGroup,
    StopReason,
    Ticket,
)


def group(number: int, episodes: list[Episode], rewards: list[float]) -> EpisodeGroup:
    return group_of(number, episodes, rewards, parts=[{"exact": r} for r in rewards], version=3)


def test_rewards_lengths_and_lags_are_counted_over_all_episodes() -> None:
    groups = [
        group(0, [episode_of([-1, 3, 4]), episode_of([-1, 4], StopReason.LENGTH)], [1.0, 0.0]),
        group(1, [episode_of([-1, 4, 4, 4]), episode_of([-1, 4])], [1.0, 1.0]),
    ]
    values = group_measures(groups, version=4)
    assert values["reward/mean"] == pytest.approx(0.75)
    assert values["reward/std"] == pytest.approx(np.std([1, 0, 1, 1]))
    assert values["reward/exact"] == pytest.approx(0.75)
    assert values["reward/zero_variance_share"] == 0.5
    assert values["rollout/length_mean"] == pytest.approx(7 / 4)
    assert values["rollout/length_max"] == 3
    counted = {k: v for k, v in values.items() if k.startswith("rollout/lengths_to_")}
    assert counted == {f"rollout/lengths_to_{n}": c for n, c in ((1, 2), (2, 1), (4, 1))}
    assert values["rollout/truncated_share"] == 0.25
    assert (values["staleness/tokens_lag_0"], values["staleness/tokens_lag_1"]) == (6, 1)
    assert values["staleness/max"] == 1
    assert values["staleness/mean"] == pytest.approx(1 / 7)


def test_each_of_several_tasks_is_measured_alone() -> None:
    groups = [
        group(0, [episode_of([-1, 3, 4]), episode_of([-1, 4], StopReason.LENGTH)], [1.0, 0.0]),
        group(1, [episode_of([-1, 4, 4, 4]), episode_of([-1, 4])], [1.0, 1.0]),
        group(2, [episode_of([-1, 4]), episode_of([-1, 4])], [0.0, 0.0]),
    ]
    assert task_measures(groups, 4) == {}
    named = [
        replace(g, prompt=replace(g.prompt, task=task))
        for g, task in zip(groups, ["a", "b", "b"], strict=True)
    ]
    values = task_measures(named, 4)
    for task, own in (("a", groups[:1]), ("b", groups[1:])):
        alone = group_measures(own, 4)
        assert values[f"task/{task}/groups"] == len(own)
        for name in ("reward/mean", "reward/std", "reward/exact", "reward/zero_variance_share"):
            assert values[f"task/{task}/{name}"] == alone[name]
        assert values[f"task/{task}/length_mean"] == alone["rollout/length_mean"]
        assert values[f"task/{task}/truncated_share"] == alone["rollout/truncated_share"]
        assert values[f"task/{task}/staleness_mean"] == alone["staleness/mean"]
    assert all(metric_of(key) for key in values)


def test_lengths_are_counted_by_the_power_of_two_that_they_reach() -> None:
    episodes = [episode_of([-1, *[4] * n]) for n in (0, 1, 2, 3, 4, 5, 8, 9, 1024, 1025)]
    values = group_measures([group(0, episodes, [0.0] * len(episodes))], version=4)
    counted = {k.rpartition("_")[2]: v for k, v in values.items() if "/lengths_to_" in k}
    expected = {"0": 1, "1": 1, "2": 1, "4": 2, "8": 2, "16": 1, "1024": 1, "2048": 1}
    assert counted == expected


def test_each_lag_has_its_reward_length_and_divergence() -> None:
    groups = [
        group(0, [episode_of([-1, 3, 4]), episode_of([-1, 4])], [1.0, 0.0]),
        group(1, [episode_of([-1, 4, 4, 4]), episode_of([-1, -1])], [3.0, 9.0]),
    ]
    kl = [
        [np.array([7, 0.5, 0.1], np.float32), np.array([7, 0.2], np.float32)],
        [np.array([7, 0.3, 0.3, 0.3], np.float32), np.array([7, 7], np.float32)],
    ]
    values = group_measures(groups, version=4, kl=kl)
    assert {k: v for k, v in values.items() if k.startswith("staleness/lag_")} == pytest.approx(
        {
            "staleness/lag_0_reward": (1 + 0 + 3 * 3) / 5,
            "staleness/lag_0_length": (2 + 1 + 3 * 3) / 5,
            "staleness/lag_0_kl": (0.1 + 0.2 + 3 * 0.3) / 5,
            "staleness/lag_1_reward": 1.0,
            "staleness/lag_1_length": 2.0,
            "staleness/lag_1_kl": 0.5,
        }
    )
    assert all(metric_of(key) for key in values)
    assert "staleness/lag_0_kl" not in group_measures(groups, version=4)
    nothing = [group(0, [episode_of([-1, -1])], [1.0])]
    assert not [k for k in group_measures(nothing, version=4) if "lag_" in k]


def test_drops_are_counted_by_reason_with_their_length() -> None:
    stale = group(0, [episode_of([-1, 0, 0]), episode_of([-1, 0])], [0.0, 0.0])
    values = drop_measures([(stale, Drop.STALE), (stale, Drop.STALE)], trained=6)
    assert values == {
        "staleness/dropped_stale": 2.0,
        "staleness/dropped_share": 0.25,
        "staleness/wasted_tokens": 6.0,
        "staleness/dropped_length_mean": 1.5,
    }
    none = {"staleness/dropped_share": 0.0, "staleness/wasted_tokens": 0.0}
    assert drop_measures([], trained=3) == none
    cut = CancelledGroup(ticket=Ticket(group=9, version=0), prompt_id=1, oldest=0, lengths=(5, 2))
    values = drop_measures([], [cut], trained=3)
    assert values == {
        "staleness/dropped_stale": 1.0,
        "staleness/cancelled": 1.0,
        "staleness/dropped_share": 0.25,
        "staleness/wasted_tokens": 7.0,
    }, "the lengths of what was not finished say nothing of a bias"
    assert all(metric_of(key) for key in values)
