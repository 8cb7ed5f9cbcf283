"""Formulas against NumPy float64, written from the papers."""

import numpy as np
import pytest

from jaxrl_async.trainer.advantages import group_mean, group_normalized, rloo
from jaxrl_async.types import Episode, EpisodeGroup, Prompt, Score, StopReason, Ticket


def group_of(rewards: list[float]) -> EpisodeGroup:
    """One episode per reward: a prompt token, then as many drawn tokens as the place plus one."""
    prompt = Prompt(prompt_id=0, position=0, token_ids=np.zeros(1, np.int32), text="", reference="")
    episodes = []
    for place in range(len(rewards)):
        length = place + 2
        episodes.append(
            Episode(
                token_ids=np.arange(length, dtype=np.int32),
                drawn=np.arange(length) > 0,
                logprobs=np.zeros(length, np.float32),
                versions=np.where(np.arange(length) > 0, 0, -1).astype(np.int32),
                stop=StopReason.EOS,
            )
        )
    scores = tuple(Score(reward=r) for r in rewards)
    return EpisodeGroup(
        prompt=prompt, episodes=tuple(episodes), scores=scores, ticket=Ticket(group=0, version=0)
    )


def values(advantages) -> list[float]:
    """The one value on each episode's drawn tokens."""
    for a in advantages:
        assert a[0] == 0 and len(set(a[1:].tolist())) == 1
    return [float(a[1]) for a in advantages]


REWARDS = [1.0, 0.0, 0.25, 3.5]


def test_group_normalized_is_grpo():
    r = np.array(REWARDS)
    expected = (r - r.mean()) / (np.sqrt(((r - r.mean()) ** 2).mean()) + 1e-6)
    np.testing.assert_allclose(values(group_normalized(group_of(REWARDS))), expected, rtol=1e-6)


def test_group_mean_is_dr_grpo():
    r = np.array(REWARDS)
    np.testing.assert_allclose(values(group_mean(group_of(REWARDS))), r - r.mean(), rtol=1e-6)


def test_rloo_compares_with_the_others():
    expected = [r - np.mean(REWARDS[:i] + REWARDS[i + 1 :]) for i, r in enumerate(REWARDS)]
    np.testing.assert_allclose(values(rloo(group_of(REWARDS))), expected, rtol=1e-6)


@pytest.mark.parametrize("epsilon", [1e-6, 0.5])
def test_epsilon_is_added_to_the_standard_deviation(epsilon):
    (first, _) = values(group_normalized(group_of([1.0, 0.0]), epsilon=epsilon))
    assert first == pytest.approx(0.5 / (0.5 + epsilon))
