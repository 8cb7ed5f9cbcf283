"""Tokens know the task of their group, through packing, mini-batches and rewards."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from builders import episode_of, group_of

from jaxrl_async.algorithms.advantages import step_data
from jaxrl_async.algorithms.kl import kl
from jaxrl_async.algorithms.shaping import shape
from jaxrl_async.config import schema
from jaxrl_async.trainer.credit import Credit, PassResults
from jaxrl_async.trainer.step_data import PackedStep, deal, pack_step
from jaxrl_async.types import EpisodeGroup

ROW = 12
TASKS = ("a", "b", "c")


def group(number: int, task: str, *lengths: int) -> EpisodeGroup:
    made = group_of(number, [episode_of([-1, *[0] * n]) for n in lengths])
    return replace(made, prompt=replace(made.prompt, task=task))


GROUPS = [group(0, "b", 3, 5), group(1, "a", 2, 2), group(2, "c", 4), group(3, "b", 1)]


def packed(tasks: tuple[str, ...] = TASKS, pairs: Any = (), share: bool = False) -> PackedStep:
    return pack_step(
        shape(step_data(GROUPS), ()), ROW, pairs=pairs, share_prefixes=share, tasks=tasks
    )


@pytest.mark.parametrize("share", [False, True])
def test_each_token_has_the_index_of_its_groups_task(share: bool) -> None:
    pair = (np.array([1, 2, 3], np.int32), np.array([False, True, True]))
    step = packed(pairs=[pair, pair], share=share)
    ids, numbers = step.batch.task_ids, step.batch.sequence_ids
    assert ids is not None and ids.dtype == np.int32
    wanted = [1, 1, 0, 0, 2, 1]
    for sequence, task in enumerate(wanted):
        assert set(ids[numbers == sequence].tolist()) == {task}
    assert not ids[(numbers < 0) | (numbers >= len(wanted))].any(), "padding and demonstrations"
    assert packed(()).batch.task_ids is None


def test_mini_batches_keep_the_tasks_of_their_tokens() -> None:
    step = packed()
    for part in deal(step.batch, 2, [0]):
        batch = step.rows.at(step.index.select(part)).batch
        assert batch.task_ids is not None
        for sequence in part:
            ids = set(batch.task_ids[batch.sequence_ids == sequence].tolist())
            assert ids == {[1, 1, 0, 0, 2, 1][sequence]}


def test_a_kl_in_the_rewards_is_weighted_by_task() -> None:
    step, rng = packed(), np.random.default_rng(0)
    shape_of = step.batch.mask.shape
    results = PassResults(
        proximal=rng.normal(size=shape_of).astype(np.float32),
        reference=rng.normal(size=shape_of).astype(np.float32),
    )
    credit = Credit(
        algorithm=schema.AlgorithmSection(kl_in="reward", kl="k1", kl_coefficient=0.5),
        teacher=None,
        advantage=None,  # type: ignore[arg-type]
        level="token",
        kl=kl.resolve("k1"),
        columns=frozenset(),
        kl_factors=(0.0, 2.0, 1.0),
    )
    data, _ = credit.rewarded(step, results, 0.5)
    assert data.token_rewards is not None and results.proximal is not None
    gap = step.owned_to_groups(results.proximal - results.reference)
    factors = {"a": 0.0, "b": 2.0, "c": 1.0}
    for of_group, rewards, gaps in zip(GROUPS, data.token_rewards, gap, strict=True):
        for episode, earned, difference in zip(of_group.episodes, rewards, gaps, strict=True):
            assert earned is not None
            wanted = -0.5 * factors[of_group.prompt.task] * np.where(episode.drawn, difference, 0.0)
            np.testing.assert_allclose(earned, wanted, rtol=1e-5, atol=1e-6)
