"""What every advantage estimator must do, whoever registers it."""

import numpy as np
import pytest

from jaxrl_async.trainer.advantages import advantage
from jaxrl_async.types import Episode, EpisodeGroup, Prompt, Score, StopReason, Ticket

NAMES = sorted(advantage)


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
        scores=tuple(Score(reward=r) for r in rewards),
        ticket=Ticket(group=0, version=0),
    )


@pytest.mark.parametrize("name", NAMES)
def test_one_float32_array_per_episode_and_zero_where_nothing_was_drawn(name):
    group = group_of([1.0, 0.0, 0.5])
    result = advantage[name](group)
    assert [a.shape for a in result] == [e.token_ids.shape for e in group.episodes]
    assert all(a.dtype == np.float32 for a in result)
    assert all((a[~e.drawn] == 0).all() for a, e in zip(result, group.episodes, strict=True))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("reward", [0.0, 1.0, 0.1, -7.3, 1e30])
def test_equal_rewards_give_exactly_nothing(name, reward):
    assert all((a == 0).all() for a in advantage[name](group_of([reward] * 3)))


@pytest.mark.parametrize("name", NAMES)
def test_a_group_of_one_gives_nothing_and_is_finite(name):
    (only,) = advantage[name](group_of([2.0]))
    assert (only == 0).all()


@pytest.mark.parametrize("name", NAMES)
def test_a_shift_of_all_rewards_changes_nothing(name):
    plain = advantage[name](group_of([1.0, 0.0, 0.5, 0.25]))
    shifted = advantage[name](group_of([101.0, 100.0, 100.5, 100.25]))
    for a, b in zip(plain, shifted, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6)


@pytest.mark.parametrize("name", NAMES)
def test_better_rewards_get_larger_advantages(name):
    group = group_of([1.0, 0.0, 0.5, 0.2])
    best, worst, middle, _ = (
        a.sum() / max(e.num_drawn, 1)
        for a, e in zip(advantage[name](group), group.episodes, strict=True)
    )
    assert best > middle > worst


@pytest.mark.parametrize("name", NAMES)
def test_the_group_is_not_changed(name):
    group = group_of([1.0, 0.0])
    before = [e.logprobs.copy() for e in group.episodes]
    advantage[name](group)
    for a, e in zip(before, group.episodes, strict=True):
        np.testing.assert_array_equal(a, e.logprobs)
