"""What every advantage estimator must do, whoever registers it."""

import dataclasses

import numpy as np
import pytest

from jaxrl_async.algorithms.advantages import StepData, advantage, step_data
from jaxrl_async.errors import ConfigError
from jaxrl_async.types import Episode, EpisodeGroup, Prompt, Score, StopReason, Ticket

NAMES = sorted(advantage)
ABSOLUTE = {"reinforce", "gae"}
"""They compare with no other episode: equal rewards are something to learn from."""
RELATIVE = sorted(set(NAMES) - ABSOLUTE)
BINARY = {"pass_at_k", "grpo_lead"}
"""They know right and wrong only, or look at the share that is right."""
OF_SCALE = {"maxrl"}
"""A shift of all rewards means something else to them."""
OVER_BATCH = {
    "reinforce_pp", "reinforce_pp_baseline", "gdpo", "discounted_batch", "gae", "batch_mean",
}  # fmt: skip
"""A group's advantages depend on the other groups."""


def group_of(rewards: list[float], seed: int = 0) -> EpisodeGroup:
    """Multi-turn episodes of different lengths; the last one draws nothing."""
    rng = np.random.default_rng(seed)
    episodes = []
    for place in range(len(rewards)):
        length = 4 + place
        drawn = rng.random(length) < 0.6
        drawn[0] = False
        drawn[1] = place < len(rewards) - 1 or len(rewards) == 1
        if place == len(rewards) - 1 and len(rewards) > 1:
            drawn[:] = False
        episodes.append(
            Episode(
                token_ids=rng.integers(0, 9, length).astype(np.int32),
                drawn=drawn,
                logprobs=np.where(drawn, -1.0, 0.0).astype(np.float32),
                versions=np.where(drawn, 3, -1).astype(np.int32),
                stop=StopReason.EOS,
            )
        )
    prompt = Prompt(prompt_id=0, position=0, token_ids=np.zeros(1, np.int32), text="", reference="")
    return EpisodeGroup(
        prompt=prompt,
        episodes=tuple(episodes),
        scores=tuple(Score(reward=r, parts={"a": r, "b": -2 * r}) for r in rewards),
        ticket=Ticket(group=0, version=0),
    )


def step_of(*groups: EpisodeGroup, value: float = 0.0) -> StepData:
    """A step, with a critic that says the same everywhere."""
    values = [
        [np.full(len(e.token_ids), value, np.float32) for e in group.episodes] for group in groups
    ]
    return step_data(groups, values)


def per_group(name: str, *groups: EpisodeGroup, **how: float) -> tuple:
    return advantage[name](step_of(*groups, **how)).advantages


@pytest.mark.parametrize("name", NAMES)
def test_one_float32_array_per_episode_and_zero_where_nothing_was_drawn(name):
    groups = group_of([1.0, 0.0, 0.5]), group_of([0.0, 1.0], 1), group_of([1.0], 2)
    result = advantage[name](step_of(*groups, value=0.3))
    for values in (result.advantages, result.returns):
        assert values is not None or name != "gae"
        for group, of_group in zip(groups, values or (), strict=values is not None):
            assert [a.shape for a in of_group] == [e.token_ids.shape for e in group.episodes]
            assert all(a.dtype == np.float32 and np.isfinite(a).all() for a in of_group)
            pairs = zip(of_group, group.episodes, strict=True)
            assert all((a[~e.drawn] == 0).all() for a, e in pairs)


@pytest.mark.parametrize("name", RELATIVE)
@pytest.mark.parametrize("reward", [0.0, 1.0, 0.1, -7.3, 1e30])
def test_equal_rewards_give_exactly_nothing(name, reward):
    (of_group,) = per_group(name, group_of([reward] * 3))
    assert all((a == 0).all() for a in of_group)


@pytest.mark.parametrize("name", RELATIVE)
def test_a_group_of_one_gives_nothing_and_is_finite(name):
    ((only,),) = per_group(name, group_of([2.0]))
    assert (only == 0).all()


def test_it_is_declared_which_give_nothing_to_a_group_of_one_whatever_its_tokens_earned():
    """Beside a larger group, and with a reward for one of its tokens."""
    lone, others = group_of([2.0]), group_of([1.0, 0.0], 1)
    earned = np.linspace(0, 1, len(lone.episodes[0].token_ids)).astype(np.float32)
    data = step_of(lone, others, value=0.1)
    data = dataclasses.replace(data, token_rewards=((earned,), (None, None)))
    nothing = {n for n in NAMES if (advantage[n](data).advantages[0][0] == 0).all()}
    # centred in its group and then over the step, it is minus the step's mean, which is rarely 0
    compared = {n for n in NAMES if advantage.facts(n).compared_in_group}
    assert nothing | {"reinforce_pp_baseline", "gdpo"} == compared


@pytest.mark.parametrize("name", NAMES)
def test_it_is_declared_which_blow_small_differences_up(name):
    """Rewards that differ by 1e-4, beside a group where they differ by 1: as for a KL in them."""
    small, large = group_of([1e-4, 0.0, 2e-4]), group_of([1.0, 0.0, 0.0], 1)
    of_small = advantage[name](step_of(small, large)).advantages[0]
    blown = max(np.abs(a).max() for a in of_small) > 0.5
    others = {"reinforce_pp", "reinforce_pp_baseline", "discounted_batch", "gae"}  # over the step
    assert blown == advantage.facts(name).divided_in_group or name in others


@pytest.mark.parametrize("name", NAMES)
def test_an_estimator_of_sequences_gives_all_tokens_of_an_episode_the_same(name):
    groups = group_of([1.0, 0.0, 0.5]), group_of([0.0, 1.0], 1)
    rng = np.random.default_rng(0)
    earned = [[rng.random(len(e.token_ids), np.float32) for e in g.episodes] for g in groups]
    data = dataclasses.replace(step_of(*groups, value=0.3), token_rewards=tuple(map(tuple, earned)))
    of_groups = zip(groups, advantage[name](data).advantages, strict=True)
    pairs = [pair for g, of_group in of_groups for pair in zip(g.episodes, of_group, strict=True)]
    same = all(len(set(a[e.drawn].tolist())) <= 1 for e, a in pairs)
    assert same == (advantage.facts(name).level == "sequence")


@pytest.mark.parametrize("name", NAMES)
def test_an_estimator_that_needs_no_critic_does_without_its_values(name):
    data = dataclasses.replace(step_of(group_of([1.0, 0.0])), values=None)
    if "values" in advantage.facts(name).needs:
        with pytest.raises(ConfigError, match="needs a critic's values"):
            advantage[name](data)
    else:
        advantage[name](data)


@pytest.mark.parametrize("name", sorted(set(RELATIVE) - BINARY - OF_SCALE))
def test_a_shift_of_all_rewards_changes_nothing(name):
    (plain,) = per_group(name, group_of([1.0, 0.0, 0.5, 0.25]))
    (shifted,) = per_group(name, group_of([101.0, 100.0, 100.5, 100.25]))
    for a, b in zip(plain, shifted, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5)


@pytest.mark.parametrize("name", sorted(set(NAMES) - BINARY - {"gdpo"}))
def test_better_rewards_get_larger_advantages(name):
    group = group_of([1.0, 0.0, 0.5, 0.2])
    (of_group,) = per_group(name, group)
    best, worst, middle, _ = (
        a.sum() / max(e.num_drawn, 1) for a, e in zip(of_group, group.episodes, strict=True)
    )
    assert best > middle > worst


@pytest.mark.parametrize("name", NAMES)
def test_right_answers_are_above_wrong_ones(name):
    plain = group_of([1.0, 0.0, 1.0, 0.0, 0.0, 0.0, 0.0])
    group = dataclasses.replace(plain, scores=tuple(Score(reward=s.reward) for s in plain.scores))
    (of_group,) = per_group(name, group)
    means = [a.sum() / max(e.num_drawn, 1) for a, e in zip(of_group, group.episodes, strict=True)]
    assert min(means[0], means[2]) > max(means[1], *means[3:6])


@pytest.mark.parametrize("name", NAMES)
def test_another_order_of_episodes_and_groups_permutes_the_results(name):
    groups = group_of([1.0, 0.0, 0.5, 0.2]), group_of([0.0, 1.0], 1)

    def turned(group: EpisodeGroup) -> EpisodeGroup:
        return dataclasses.replace(group, episodes=group.episodes[::-1], scores=group.scores[::-1])

    plain = per_group(name, *groups, value=0.1)
    other = per_group(name, *[turned(g) for g in groups[::-1]], value=0.1)
    for of_group, of_turned in zip(plain, other[::-1], strict=True):
        for a, b in zip(of_group, of_turned[::-1], strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-12)


@pytest.mark.parametrize("name", sorted(set(NAMES) - OVER_BATCH))
def test_a_group_does_not_depend_on_the_others(name):
    groups = group_of([1.0, 0.0, 0.5, 0.2]), group_of([9.0, 1.0], 1)
    for a, b in zip(per_group(name, groups[0])[0], per_group(name, *groups)[0], strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("name", NAMES)
def test_completions_without_tokens_are_no_trouble(name):
    group = group_of([1.0, 0.0])
    empty = dataclasses.replace(group.episodes[0], drawn=np.zeros(4, bool))
    nothing = dataclasses.replace(group, episodes=(empty, empty))
    for values in per_group(name, nothing):
        assert all((a == 0).all() for a in values)
    assert per_group(name) == ()


@pytest.mark.full
@pytest.mark.parametrize("name", NAMES)
def test_nothing_given_is_changed(name):
    data = step_of(group_of([1.0, 0.0]), value=0.5)
    data = dataclasses.replace(
        data, token_rewards=((np.ones(4, np.float32), None),), rewards=(data.rewards[0],)
    )
    arrays = [data.rewards[0], data.token_rewards[0][0], *data.values[0]]
    arrays += [e.drawn for e in data.groups[0].episodes]
    before = [a.copy() for a in arrays]
    advantage[name](data)
    for a, b in zip(arrays, before, strict=True):
        np.testing.assert_array_equal(a, b)
