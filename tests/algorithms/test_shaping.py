"""Shaping: against the papers' formulas, and what holds for any step."""

import dataclasses
import re
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxrl_async.algorithms.advantages import step_data
from jaxrl_async.algorithms.shaping import (
    bounded,
    has_signal,
    shape,
    shaping,
    soft_overlong_penalty,
)
from jaxrl_async.errors import DataError
from jaxrl_async.metrics.metric import metric_of
from jaxrl_async.types import Episode, EpisodeGroup, Prompt, Score, StopReason, Ticket

SETTINGS = {
    "soft_overlong": {"max_tokens": 6, "cache_tokens": 3},
    "cap": {"low": 0.0, "high": 0.5},
    "overlong_filter": {"max_tokens": 4},
    "downsample": {"keep": 2},
}


def episode(length: int, stop: StopReason = StopReason.EOS) -> Episode:
    mask = np.arange(length + 1) > 0
    return Episode(
        token_ids=np.arange(length + 1, dtype=np.int32),
        drawn=mask,
        logprobs=np.zeros(length + 1, np.float32),
        versions=np.where(mask, 0, -1).astype(np.int32),
        stop=stop,
    )


def group(
    rewards: list[float],
    lengths: list[int] | None = None,
    number: int = 0,
    cut: tuple[int, ...] = (),
    penalties: list[float] | None = None,
) -> EpisodeGroup:
    lengths = lengths or [i + 1 for i in range(len(rewards))]
    stops = [StopReason.LENGTH if i in cut else StopReason.EOS for i in range(len(rewards))]
    parts = [{"penalty": p} for p in penalties] if penalties else [{}] * len(rewards)
    return EpisodeGroup(
        prompt=Prompt(
            prompt_id=number, position=0, token_ids=np.zeros(1, np.int32), text="", reference=""
        ),
        episodes=tuple(episode(n, s) for n, s in zip(lengths, stops, strict=True)),
        scores=tuple(Score(reward=r, parts=p) for r, p in zip(rewards, parts, strict=True)),
        ticket=Ticket(group=number, version=0),
    )


def shaped_by(name: str, *groups: EpisodeGroup, **settings: float):
    function = shaping.resolve({name: {**SETTINGS.get(name, {}), **settings}})
    return shape(step_data(groups), [function])


def indices(of: EpisodeGroup) -> list[int]:
    """Where its episodes stood in the group they were taken from: lengths are indices plus one."""
    return [e.num_drawn - 1 for e in of.episodes]


sizes = st.lists(
    st.tuples(st.sampled_from([0.0, 1.0, -3.0]), st.integers(0, 9), st.booleans()),
    min_size=1,
    max_size=9,
)
steps = st.lists(sizes, min_size=1, max_size=4)


def step_of(answers) -> list[EpisodeGroup]:
    return [
        group(
            [r for r, _, _ in of_group],
            [n for _, n, _ in of_group],
            number,
            tuple(i for i, (_, _, cut) in enumerate(of_group) if cut),
        )
        for number, of_group in enumerate(answers)
    ]


@pytest.mark.full
@pytest.mark.parametrize("name", sorted(shaping))
@settings(deadline=None, max_examples=40)
@given(answers=steps)
def test_whatever_is_shaped_fits_together_and_counts_what_changed(name, answers):
    groups = step_of(answers)
    before = step_data(groups)
    result = shaped_by(name, *groups)
    (key,) = result.counts
    assert metric_of(key).key == "shaping/<what>" and result.counts[key] >= 0
    data = result.data
    for g, rewards, masks in zip(data.groups, data.rewards, result.masks, strict=True):
        assert len(g.episodes) == len(g.scores) == len(rewards) == len(masks) > 0
        assert rewards.dtype == np.float64 and np.isfinite(rewards).all()
        for e, mask in zip(g.episodes, masks, strict=True):
            assert mask.dtype == bool and mask.shape == e.drawn.shape and not mask[~e.drawn].any()
    same_rewards = all(map(np.array_equal, before.rewards, data.rewards))
    trained = [m.sum() for of_group in result.masks for m in of_group]
    untouched = same_rewards and trained == [e.num_drawn for g in groups for e in g.episodes]
    assert untouched or result.counts[key] > 0
    for a, b in zip(before.rewards, step_data(groups).rewards, strict=True):
        np.testing.assert_array_equal(a, b)


def test_without_any_everything_sampled_is_trained():
    result = shape(step_data([group([1.0, 0.0])]))
    assert all(
        (m == e.drawn).all()
        for m, e in zip(result.masks[0], result.data.groups[0].episodes, strict=True)
    )
    assert result.counts == {}


@given(st.integers(0, 200), st.integers(1, 100), st.data())
def test_the_soft_penalty_falls_evenly_from_nothing_to_one_over_the_cache(length, most, data):
    cache = data.draw(st.integers(1, most))
    penalty = soft_overlong_penalty(length, most, cache)
    expected = 0 if length <= most - cache else max(((most - cache) - length) / cache, -1)
    assert penalty == pytest.approx(expected) and -1 <= penalty <= 0
    assert soft_overlong_penalty(length + 1, most, cache) <= penalty


def test_the_soft_penalty_is_added_by_sampled_length():
    result = shaped_by("soft_overlong", group([1.0, 1.0, 1.0], [3, 5, 9]), weight=0.5)
    np.testing.assert_allclose(result.data.rewards[0], [1.0, 1 - 0.5 * 2 / 3, 0.5])
    assert result.counts == {"shaping/overlong_penalized": 2}


def test_truncated_episodes_are_not_trained_on_but_still_counted_in_the_baseline():
    result = shaped_by("mask_truncated", group([1.0, 0.0], [2, 3], cut=(1,)))
    assert [m.sum() for m in result.masks[0]] == [2, 0]
    assert result.data.rewards[0].tolist() == [1.0, 0.0]
    assert result.counts == {"shaping/masked_truncated": 1}


def test_the_filter_looks_at_length_not_at_the_end():
    result = shaped_by("overlong_filter", group([1.0, 0.0, 1.0], [4, 5, 2], cut=(2,)))
    assert [m.sum() for m in result.masks[0]] == [4, 0, 2]


def test_concise_is_leads_reward():
    lengths, rewards = [2, 6, 4, 9], [1.0, 1.0, 0.0, 1.0]
    right = np.array([2, 6, 9])
    z = (right - right.mean()) / (right.std() + 1e-6)
    expected = np.exp(-0.1 * z)
    result = shaped_by("concise", group(rewards, lengths), alpha=0.1).data.rewards[0]
    np.testing.assert_allclose(result, [expected[0], expected[1], -1.0, expected[2]])


def test_length_reward_is_kimis():
    lengths, rewards = [2, 4, 6, 2], [1.0, 1.0, 0.0, 0.0]
    result = shaped_by("length_reward", group(rewards, lengths)).data.rewards[0]
    np.testing.assert_allclose(result, [1.5, 1.0, -0.5, 0.0])
    same = shaped_by("length_reward", group([1.0, 0.0], [3, 3])).data.rewards[0]
    assert same.tolist() == [1.0, 0.0]


def test_shapings_are_applied_in_order_and_their_counts_kept():
    functions = [
        shaping.resolve({"cap": {"low": 0.0, "high": 0.5}}),
        shaping.resolve("mask_truncated"),
    ]
    result = shape(step_data([group([1.0, 0.0], [2, 2], cut=(0,))]), functions)
    assert result.data.rewards[0].tolist() == [0.5, 0.0]
    assert result.counts == {"shaping/capped": 1, "shaping/masked_truncated": 1}


@settings(deadline=None, max_examples=80)
@given(
    st.lists(st.sampled_from([0.0, 1.0]), min_size=1, max_size=20),
    st.integers(2, 20),
    st.integers(0, 9),
)
def test_downsampling_keeps_shares_order_and_no_more_than_asked_for(rewards, keep, number):
    full = group(rewards, number=number)
    small = shaped_by("downsample", full, keep=keep).data.groups[0]
    assert len(small.episodes) == min(keep, len(rewards))
    assert indices(small) == sorted(set(indices(small)))
    assert [rewards[p] for p in indices(small)] == [s.reward for s in small.scores]
    if keep < len(rewards):
        share, right = keep * sum(rewards) / len(rewards), sum(s.reward for s in small.scores)
        assert abs(right - share) <= 1
        if 0 < sum(rewards) < len(rewards):
            assert 0 < right < keep, "a signal stays a signal"


def test_downsampling_is_keyed_by_identity_and_prefers_clean_solutions():
    rewards, penalties = [1.0] * 8 + [0.0] * 8, [0.0, 0.9] * 8
    first = group(rewards, number=3, penalties=penalties)
    other = group(rewards, number=4, penalties=penalties)
    alone = shaped_by("downsample", first, keep=8).data
    together = shaped_by("downsample", other, first, keep=8).data
    assert indices(alone.groups[0]) == indices(together.groups[1])
    clean = [s.parts["penalty"] == 0 for s in alone.groups[0].scores if s.reward == 1]
    assert all(clean) and len(clean) == 4
    draws = [shaped_by("downsample", first, keep=8, seed=s).data.groups[0] for s in range(20)]
    seen = {tuple(indices(g)) for g in draws}
    assert len(seen) > 10, "wrong answers are taken at random"


def test_downsampling_takes_token_rewards_and_values_along():
    full = group([1.0, 0.0, 1.0])
    tokens = tuple(np.full(i + 2, i, np.float32) for i in range(3))
    data = dataclasses.replace(step_data([full], [tokens]), token_rewards=(tokens,))
    small = shape(data, [shaping.resolve({"downsample": {"keep": 2}})])
    for e, a, b, m in zip(
        small.data.groups[0].episodes,
        small.data.token_rewards[0],
        small.data.values[0],
        small.masks[0],
        strict=True,
    ):
        assert a is b and len(a) == len(e.token_ids) == len(m)


@pytest.mark.parametrize("made", [1e300, -1e31, float("inf"), float("nan")])
def test_a_shaping_may_not_make_a_reward_without_a_finite_square(made):
    """Scorers may not give one: its spread would be infinite, and its advantage 0."""

    def mine(shaped):
        rewards = tuple(np.where(r > 0, made, r) for r in shaped.data.rewards)
        return replace(shaped, data=replace(shaped.data, rewards=rewards))

    step, name = step_data([group([1.0, 0.0])]), "mine.py:wild"
    with pytest.raises(
        DataError, match=rf"'{name}' made a reward of .*{re.escape(f'{made:g}')}.*at most 1e\+30"
    ):
        shape(step, [bounded(mine, name)])
    assert shape(step_data([group([0.0, 0.0])]), [bounded(mine, name)]).counts == {}


def test_a_signal_is_a_difference_of_rewards_or_of_a_named_part():
    assert has_signal(group([1.0, 0.0])) and not has_signal(group([0.1, 0.1, 0.1]))
    assert not has_signal(group([1.0]))
    parted = group([1.0, 1.0], penalties=[0.0, 1.0])
    assert not has_signal(parted) and has_signal(parted, part="penalty")
    assert not has_signal(parted, part="missing")


def test_differences_up_to_the_least_standard_deviation_are_no_signal():
    """Wrong answers with -0.001 a token; a population's standard deviation of exactly 0.5."""
    assert has_signal(group([-0.01, -0.02])) and not has_signal(
        group([-0.01, -0.02]), least_std=0.1
    )
    assert not has_signal(group([1.0, 0.0]), least_std=0.5)
    assert has_signal(group([1.0, 0.0]), least_std=0.49999)


def test_what_tokens_earned_is_a_signal():
    plain = group([1.0, 1.0], [2, 3])
    scores = tuple(
        dataclasses.replace(s, token_rewards=np.full(n + 1, r, np.float32))
        for s, n, r in zip(plain.scores, (2, 3), (0.0, 1.0), strict=True)
    )
    assert has_signal(dataclasses.replace(plain, scores=scores))
    before = tuple(
        dataclasses.replace(s, token_rewards=np.eye(1, n + 1, dtype=np.float32)[0] * r)
        for s, n, r in zip(plain.scores, (2, 3), (0.0, 1.0), strict=True)
    )
    assert not has_signal(dataclasses.replace(plain, scores=before)), "the prompt earns nothing"


def test_limits_of_length_and_reward_belong_to_what_is_left_alone():
    kept = [m.sum() for m in shaped_by("overlong_filter", group([1.0] * 3, [3, 4, 5])).masks[0]]
    assert kept == [3, 4, 0]
    penalties = [soft_overlong_penalty(n, 6, 3) for n in (1, 2, 3, 4, 6, 7, 9)]
    np.testing.assert_allclose(penalties, [0.0, 0.0, 0.0, -1 / 3, -1.0, -1.0, -1.0])
    capped = shaped_by("cap", group([0.0, 0.5, 0.6, -0.1]))
    assert capped.data.rewards[0].tolist() == [0.0, 0.5, 0.5, 0.0]
    assert capped.counts == {"shaping/capped": 2}


def test_a_reward_of_exactly_the_threshold_is_not_right_here_either():
    concise = shaped_by("concise", group([0.5, 1.0], [2, 2])).data.rewards[0]
    np.testing.assert_allclose(concise, [-1.0, 1.0])
    by_length = shaped_by("length_reward", group([0.5, 1.0], [2, 4])).data.rewards[0]
    np.testing.assert_allclose(by_length, [0.5, 0.5])  # the short one is wrong: no bonus
    rest = shaped_by("downsample", group([0.5] * 6 + [1.0] * 2), keep=4).data.rewards[0]
    assert sorted(rest.tolist()) == [0.5, 0.5, 0.5, 1.0]


def test_concise_of_equal_lengths_or_nothing_right():
    equal = shaped_by("concise", group([1.0, 1.0], [3, 3])).data.rewards[0]
    assert equal.tolist() == [1.0, 1.0]
    assert shaped_by("concise", group([0.0, 0.0])).data.rewards[0].tolist() == [-1.0, -1.0]


def test_a_penalty_of_0_weighs_a_thousand_times_one_of_1():
    """1 / (penalty + 1e-3): of 2 clean and 40 penalised right answers the clean ones stay."""
    rewards, penalties = [1.0] * 42 + [0.0] * 42, [0.0, 0.0] + [1.0] * 40 + [0.0] * 42
    stay = 0
    for seed in range(100):
        full = group(rewards, number=seed, penalties=penalties)
        left = shaped_by("downsample", full, keep=4, seed=seed).data.groups[0]
        stay += sum(p < 2 for p in indices(left))
    assert 170 <= stay < 200, "nearly always both, not always"
