"""GAE of episodes that their length cut: what comes after the last token, against float64."""

from dataclasses import replace

import numpy as np
import pytest

from jaxrl_async.algorithms import advantages as adv
from jaxrl_async.types import Episode, EpisodeGroup, Prompt, Score, StopReason, Ticket

DRAWN = np.array([0, 0, 1, 1, 0, 1, 1], bool)
VALUES = np.random.default_rng(0).normal(size=7).astype(np.float32)
LAST, REWARD = 1.7, 0.5


def step_of(stop: StopReason) -> adv.StepData:
    episode = Episode(
        token_ids=np.arange(7, dtype=np.int32),
        drawn=DRAWN,
        logprobs=np.zeros(7, np.float32),
        versions=np.where(DRAWN, 0, -1).astype(np.int32),
        stop=stop,
    )
    group = EpisodeGroup(
        prompt=Prompt(
            prompt_id=0, position=0, token_ids=np.zeros(2, np.int32), text="", reference=""
        ),
        episodes=(episode,),
        scores=(Score(reward=REWARD),),
        ticket=Ticket(group=0, version=0),
    )
    data = adv.step_data([group], [[VALUES]])
    return replace(data, last_values=(np.array([LAST]),))


def naive(after: float, gamma: float, lam: float) -> np.ndarray:
    """Schulman et al. 2015 (arXiv:1506.02438), eq. 16, as a double sum over sampled tokens."""
    v = np.append(VALUES[DRAWN].astype(np.float64), after)
    rewards = np.array([0, 0, 0, REWARD])
    deltas = rewards + gamma * v[1:] - v[:-1]
    return np.array(
        [sum((gamma * lam) ** (k - t) * deltas[k] for k in range(t, 4)) for t in range(4)]
    )


@pytest.mark.parametrize(("gamma", "lam"), [(1.0, 1.0), (0.9, 0.7)])
@pytest.mark.parametrize("stop", StopReason)
def test_the_critics_value_after_the_last_token_follows_only_where_length_cut(gamma, lam, stop):
    how = {"gamma": gamma, "lam": lam, "whiten": False}
    for bootstrap in (False, True):
        found = adv.gae(step_of(stop), bootstrap=bootstrap, **how)
        after = LAST if bootstrap and stop is StopReason.LENGTH else 0.0
        wanted = naive(after, gamma, lam)
        assert found.returns is not None
        np.testing.assert_allclose(found.advantages[0][0][DRAWN], wanted, rtol=1e-6, atol=1e-6)
        returns = wanted + VALUES[DRAWN]
        np.testing.assert_allclose(found.returns[0][0][DRAWN], returns, rtol=1e-6, atol=1e-6)
        assert not found.advantages[0][0][~DRAWN].any()


def test_by_default_nothing_follows():
    plain = adv.gae(step_of(StopReason.LENGTH))
    asked = adv.gae(step_of(StopReason.LENGTH), bootstrap=False)
    np.testing.assert_array_equal(plain.advantages[0][0], asked.advantages[0][0])
