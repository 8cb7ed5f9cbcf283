"""Advantage estimators: from the rewards of one group to one number per token. NumPy only.

An estimator takes an EpisodeGroup and gives, per episode, a float32 array `[length]` that is 0
where the policy drew nothing; it computes in float64. Edges are the same for all: a group of one,
or of equal rewards, has no baseline to compare with and gives 0 everywhere.
"""

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from jaxrl_async.trainer.registry import Registry
from jaxrl_async.types import Episode, EpisodeGroup, FloatArray

Advantages = tuple[FloatArray, ...]  # one [length] float32 per episode of the group
AdvantageFn = Callable[..., Advantages]  # (EpisodeGroup, **settings) -> Advantages

advantage: Registry[AdvantageFn] = Registry("advantage")


@advantage
def group_normalized(group: EpisodeGroup, *, epsilon: float = 1e-6) -> Advantages:
    """(r_i - mean(r)) / (std(r) + epsilon): GRPO. std is the population's (divided by G).

    Shao et al. 2024 (DeepSeekMath, arXiv:2402.03300), sec. 4.1.2, outcome supervision.
    """
    rewards = _rewards(group)
    return _per_token(group, _centered(rewards) / (rewards.std() + epsilon))


@advantage
def group_mean(group: EpisodeGroup) -> Advantages:
    """r_i - mean(r): Dr. GRPO, without the division that favours very easy and very hard prompts.

    Liu et al. 2025 (arXiv:2503.20783), sec. 3.2.
    """
    return _per_token(group, _centered(_rewards(group)))


@advantage
def rloo(group: EpisodeGroup) -> Advantages:
    """r_i - mean of the other members' rewards = G / (G - 1) * (r_i - mean(r)).

    Kool et al. 2019; Ahmadian et al. 2024 (arXiv:2402.14740).
    """
    size = len(group.episodes)
    return _per_token(group, _centered(_rewards(group)) * size / max(size - 1, 1))


def _rewards(group: EpisodeGroup) -> NDArray[np.float64]:
    return np.array([s.reward for s in group.scores], np.float64)


def _centered(rewards: NDArray[np.float64]) -> NDArray[np.float64]:
    """Rewards less their mean; exactly 0 where all are equal, whatever the rounding of the mean."""
    if np.all(rewards == rewards[0]):
        return np.zeros_like(rewards)
    return np.asarray(rewards - rewards.mean(), np.float64)


def _per_token(group: EpisodeGroup, values: NDArray[np.float64]) -> Advantages:
    return tuple(_spread(e, float(v)) for e, v in zip(group.episodes, values, strict=True))


def _spread(episode: Episode, value: float) -> FloatArray:
    """The same value on every drawn token."""
    return np.where(episode.drawn, value, 0.0).astype(np.float32)
