"""Process rewards count up to an age of their own, for every advantage that can use them."""

from dataclasses import replace

import numpy as np
import pytest
from builders import episode_of, group_of
from hypothesis import given
from hypothesis import strategies as st

from jaxrl_async.algorithms.advantages import advantage, returns_of, step_data
from jaxrl_async.algorithms.shaping import within_age
from jaxrl_async.types import EpisodeGroup, Score

VERSION = 7


def judged(number: int, versions: tuple[int, ...], process: bool = True) -> EpisodeGroup:
    """A group of three answers of two tokens, the first tokens sampled by these versions."""
    episodes = [episode_of([-1, version, 7]) for version in versions]
    group = group_of(number, episodes, [0.0, 1.0, 0.25])
    scores = [
        replace(
            score,
            token_rewards=np.array([0, 0.5, 0], np.float32),
            process_rewards=np.array([0, i, -2 * i], np.float32) if process else None,
        )
        for i, score in enumerate(group.scores)
    ]
    return replace(group, scores=tuple(scores))


def bare(group: EpisodeGroup) -> EpisodeGroup:
    return replace(
        group, scores=tuple(replace(score, process_rewards=None) for score in group.scores)
    )


@given(st.lists(st.tuples(*[st.integers(0, 7)] * 3), min_size=1, max_size=4), st.integers(0, 8))
def test_a_group_older_than_the_limit_loses_those_of_all_its_answers(ages, limit) -> None:
    groups = [judged(i, tuple(VERSION - age for age in of)) for i, of in enumerate(ages)]
    kept, counts = within_age(groups, VERSION, limit)
    old = [max(of) > limit for of in ages]
    assert counts == {"process/too_old": sum(old)}
    for before, after, is_old in zip(groups, kept, old, strict=True):
        wanted = bare(before) if is_old else before
        for one, other in zip(after.scores, wanted.scores, strict=True):
            np.testing.assert_array_equal(one.by_token, other.by_token)
            assert one.total == other.total and one.token_rewards is other.token_rewards


def test_without_a_limit_or_process_rewards_nothing_is_left_out_or_counted() -> None:
    groups = (judged(0, (0, 0, 0)),)
    assert within_age(groups, VERSION, None) == (groups, {})
    plain = (judged(0, (0, 0, 0), process=False),)
    assert within_age(plain, VERSION, 0) == (plain, {})
    assert Score(reward=1.0).by_token is None


BLIND = ("pass_at_k", "maxrl")
"""Advantages that look at whether a return is above a threshold."""


@pytest.mark.parametrize("name", [n for n in advantage if n != "gae"])
def test_every_advantage_uses_them_up_to_the_limit_and_not_beyond(name: str) -> None:
    choice = {name: {"k": 2}} if name == "pass_at_k" else name
    estimator = advantage.resolve(choice, group_size=3)
    groups = [judged(i, (VERSION - 2,) * 3) for i in range(2)]

    def of(some: object) -> list[np.ndarray]:
        return [np.asarray(a) for g in estimator(step_data(some)).advantages for a in g]  # type: ignore[arg-type]

    young, _ = within_age(groups, VERSION, 2)
    old, counts = within_age(groups, VERSION, 1)
    assert counts == {"process/too_old": 2}
    without = of([bare(g) for g in groups])
    for one, other in zip(of(old), without, strict=True):
        np.testing.assert_array_equal(one, other)
    changed = any((one != other).any() for one, other in zip(of(young), without, strict=True))
    assert changed or name in BLIND
    assert [r.tolist() for r in returns_of(step_data(young))] == [[0.5, 0.5, -1.25]] * 2
