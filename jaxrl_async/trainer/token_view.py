"""Advantages and log-probs of a few of a step's tokens, for the recorded samples."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from jaxrl_async.trainer.row_index import RowIndex
from jaxrl_async.trainer.step_data import PackedStep
from jaxrl_async.types import Episode, EpisodeGroup, FloatArray, PackedBatch

SHOWN_GROUPS, SHOWN_EPISODES = 2, 2
"""Number of a step's first groups, and of the first episodes of each, that are shown."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenView:
    """The trainer's values of an episode's tokens, in the episode's order."""

    episode: Episode
    advantages: FloatArray  # [length]; 0 for untrained tokens
    logprobs: FloatArray  # [length], of the weights before the step; 0 where a context begins


def shown_episodes(groups: Sequence[EpisodeGroup]) -> list[Episode]:
    """Return the episodes of a step that are shown."""
    return [e for group in groups[:SHOWN_GROUPS] for e in group.episodes[:SHOWN_EPISODES]]


def sights_of(
    step: PackedStep,
    episodes: Sequence[Episode],
    proximal: FloatArray | None,
    logprobs_of: Callable[[PackedBatch], FloatArray],
) -> list[TokenView]:
    """Return the values of some episodes; episodes that the step left out are missing.

    Args:
        step: after credit.
        episodes: of its groups.
        proximal: log-probs of the weights before the step, [rows, length]; None: not computed.
        logprobs_of: computes them for a batch; called with these episodes only.
    """
    there = [e for group in step.data.groups for e in group.episodes]
    numbers = [n for n, one in enumerate(there) if any(one is e for e in episodes)]
    if not numbers:
        return []
    if proximal is not None:
        logprobs = step.index.to_sequences(proximal)
    else:
        batch = step.rows.at(step.index.places_of(np.array(numbers))).batch
        logprobs = RowIndex.of(batch).to_sequences(logprobs_of(batch))
    advantages = step.index.to_sequences(step.batch.advantages)
    return [
        TokenView(episode=there[n], advantages=advantages[n], logprobs=logprobs[n]) for n in numbers
    ]
