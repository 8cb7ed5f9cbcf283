"""Which groups come next: every rank against the window, and each against its formula."""

from collections import Counter

import numpy as np
import pytest
from builders import episode_of, group_of
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxrl_async.buffer.select import (
    RANKS,
    advantage_size,
    recent,
    reward_variance,
    select,
    select_again,
    strict,
    waited_for,
)
from jaxrl_async.types import EpisodeGroup

REWARDS = st.lists(st.sampled_from([0.0, 0.5, 1.0]), min_size=1, max_size=4)


def group(number: int, rewards: list[float] | None = None, version: int = 0) -> EpisodeGroup:
    rewards = rewards or [0.0]
    return group_of(number, [episode_of([version])] * len(rewards), rewards, version=version)


def test_strict_order_waits_for_the_oldest():
    ready = {n: group(n) for n in (1, 2, 3)}
    assert select([0, 1, 2, 3], ready, 2, 0) == ()
    assert select([1, 2, 3], ready, 2, 0) == (1, 2)


def test_a_younger_group_overtakes_only_from_within_the_window():
    ready = {n: group(n) for n in (2, 3, 4)}
    assert select([0, 1, 2, 3, 4], ready, 3, 1) == ()
    assert select([0, 1, 2, 3, 4], ready, 3, 2) == (2,)
    assert select([0, 1, 2, 3, 4], ready, 3, 3) == (2, 3)


@pytest.mark.full
@settings(deadline=None)
@given(
    st.lists(st.integers(0, 30), unique=True, max_size=12).map(sorted),
    st.integers(1, 5),
    st.integers(0, 6),
    st.sampled_from(sorted(RANKS)),
    st.data(),
)
def test_no_group_is_overtaken_by_more_than_lookahead_others(pending, count, lookahead, rank, data):
    done = data.draw(st.sets(st.sampled_from(pending))) if pending else set()
    ready = {n: group(n, data.draw(REWARDS)) for n in sorted(done)}
    chosen = select(pending, ready, count, lookahead, rank=RANKS[rank], version=3)
    assert set(chosen) <= done and len(set(chosen)) == len(chosen) <= count
    for left in set(pending) - set(chosen):
        assert sum(n > left for n in chosen) <= lookahead
    if lookahead == 0:
        assert list(chosen) == pending[: len(chosen)]


def test_groups_that_teach_most_come_first_within_the_window():
    rewards = {0: [1.0, 1.0], 1: [1.0, 0.0], 2: [1.0, 0.0, 0.0, 0.0], 3: [3.0, -3.0]}
    ready = {n: group(n, r) for n, r in rewards.items()}
    for rank in (reward_variance, advantage_size):
        assert select([0, 1, 2, 3], ready, 3, 2, rank=rank) == (1, 2, 0)
        assert select([0, 1, 2, 3], ready, 3, 3, rank=rank) == (3, 1, 2)
        assert select([0, 1, 2, 3], ready, 3, 0, rank=rank) == (0, 1, 2)


@settings(deadline=None)
@given(REWARDS)
def test_ranks_by_reward_are_the_variance_and_the_mean_size_of_the_advantage(rewards):
    r, made = np.array(rewards), group(0, rewards)
    assert reward_variance(made, 0) == pytest.approx(-((r - r.mean()) ** 2).mean())
    assert advantage_size(made, 0) == pytest.approx(-abs(r - r.mean()).mean())


def test_recent_draws_by_weight_and_the_same_for_the_same_version():
    version, ready = 3, {n: group(n, version=n) for n in (1, 2, 3)}  # ages 2, 1 and 0
    first: Counter[int] = Counter()
    for turn in range(3000):
        renamed = {n + 10 * turn: group(n + 10 * turn, version=n) for n in ready}
        (chosen,) = select_again(renamed, 1, rank=recent, version=version)
        first[chosen % 10] += 1
    shares = np.array([first[n] / 3000 for n in (1, 2, 3)])
    np.testing.assert_allclose(shares, np.array([0.25, 0.5, 1.0]) / 1.75, atol=0.03)
    assert recent(ready[1], version) == recent(ready[1], version)
    assert recent(ready[1], version) != recent(ready[1], version + 1)


@pytest.mark.full
@settings(deadline=None)
@given(st.sets(st.integers(0, 20), max_size=9), st.integers(-1, 5), st.sampled_from(sorted(RANKS)))
def test_groups_to_use_again_are_taken_once_each_and_never_too_many(numbers, count, rank):
    kept = {n: group(n, [float(n % 2), 1.0]) for n in sorted(numbers)}
    chosen = select_again(kept, count, rank=RANKS[rank], version=1)
    assert len(set(chosen)) == len(chosen) == min(max(count, 0), len(kept))
    assert set(chosen) <= numbers
    assert select_again(kept, count, rank=strict) == tuple(sorted(numbers))[: max(count, 0)]


def by_hand(pending, ready, count, lookahead, rank, version):
    """Take one at a time: the lowest rank in the window of what is left."""
    left, taken = list(pending), []
    while left and len(taken) < count:
        window = [n for n in left if n in ready and n <= left[0] + lookahead]
        if not window:
            break
        taken.append(min(window, key=lambda n: (rank(ready[n], version), n)))
        left.remove(taken[-1])
    return tuple(taken)


@pytest.mark.full
@settings(deadline=None)
@given(
    st.lists(st.integers(0, 30), unique=True, max_size=12).map(sorted),
    st.integers(1, 6),
    st.integers(0, 8),
    st.sampled_from(sorted(RANKS)),
    st.data(),
)
def test_the_order_is_that_of_taking_one_at_a_time(pending, count, lookahead, rank, data):
    done = data.draw(st.sets(st.sampled_from(pending))) if pending else set()
    ready = {n: group(n, data.draw(REWARDS)) for n in sorted(done)}
    expected = by_hand(pending, ready, count, lookahead, RANKS[rank], 3)
    taken = select(pending, ready, count, lookahead, rank=RANKS[rank], version=3)
    assert taken == expected
    if len(taken) < count:  # what helps is exactly what waited_for says
        limit = waited_for(pending, taken, lookahead)
        for number in set(pending) - done:
            more = {**ready, number: group(number)}
            got = select(pending, more, count, lookahead, rank=RANKS[rank], version=3)
            assert (len(got) > len(taken)) == (number <= limit)
