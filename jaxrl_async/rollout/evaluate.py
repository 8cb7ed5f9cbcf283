"""Evaluate the policy: one answer to each held-out prompt, greedy by default. Needs no JAX."""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from jaxrl_async.errors import RolloutError
from jaxrl_async.ports import Generate, Scorer
from jaxrl_async.rollout.env import MakeEnv, SingleTurn
from jaxrl_async.rollout.episode import (
    EpisodeLimits,
    SavedEpisode,
    all_or_none,
    begin_groups,
    cancel,
    play_group,
)
from jaxrl_async.types import CORRECT, Episode, IntArray, Prompt, SamplingParams, Score, StopReason

GREEDY = SamplingParams(temperature=0.0)
SCORED_AT_ONCE = 16
"""Most scorer calls at a time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalSample:
    """One answer, for people to read."""

    prompt: str
    completion: str  # empty without a decode function
    reference: str
    reward: float


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalResult:
    """The policy's results on the held-out prompts."""

    num_prompts: int
    mean_reward: float
    accuracy: float | None  # mean of the rewards' part CORRECT; None: no reward has it
    mean_length_tokens: float  # drawn, mean over answers
    truncated_share: float  # share of answers cut off by a length bound
    samples: tuple[EvalSample, ...]


async def evaluate(
    generate: Generate,
    prompts: Sequence[Prompt],
    scorer: Scorer,
    *,
    sampling: SamplingParams = GREEDY,
    stop_token_ids: tuple[int, ...],
    max_new_tokens: int,
    max_length: int,
    make_env: MakeEnv = SingleTurn,
    decode: Callable[[IntArray], str] | None = None,
    num_samples: int = 8,
) -> EvalResult:
    """Play every prompt once and score it; all first turns are queued in one call.

    Request ids are "eval/INDEX/m0/t0". Raises RolloutError without prompts, and whatever the
    environment or the scorer raises: an evaluation with holes would not be comparable.
    """
    if not prompts:
        raise RolloutError(
            "there are no held-out prompts to evaluate on. Set eval_size to at least 1."
        )
    limits = EpisodeLimits(
        sampling=sampling,
        stop_token_ids=stop_token_ids,
        max_new_tokens=max_new_tokens,
        max_length=max_length,
    )
    groups = [(f"eval/{i}", p, (SavedEpisode(),)) for i, p in enumerate(prompts)]
    begun = begin_groups(generate, make_env, groups, limits)
    busy = asyncio.Semaphore(SCORED_AT_ONCE)

    async def one(index: int) -> tuple[Episode, Score]:
        label, prompt, _ = groups[index]
        episodes = await play_group(generate, prompt, begun[index], label=label, limits=limits)
        async with busy:
            (score,) = await scorer(episodes, prompt)
        return episodes[0], score

    try:
        played = await all_or_none(one(i) for i in range(len(prompts)))
    finally:
        for (member,) in begun:
            cancel(member)
    return eval_result(prompts, played, decode=decode, num_samples=num_samples)


def eval_result(
    prompts: Sequence[Prompt],
    played: Sequence[tuple[Episode, Score]],
    *,
    decode: Callable[[IntArray], str] | None = None,
    num_samples: int = 8,
) -> EvalResult:
    """Average over the answers, and decode the first `num_samples` of them."""
    rewards = np.array([score.reward for _, score in played], np.float64)
    lengths = np.array([episode.num_drawn for episode, _ in played], np.float64)
    truncated = [episode.stop is StopReason.LENGTH for episode, _ in played]
    return EvalResult(
        num_prompts=len(played),
        mean_reward=float(rewards.mean()),
        accuracy=accuracy([score for _, score in played]),
        mean_length_tokens=float(lengths.mean()),
        truncated_share=float(np.mean(truncated)),
        samples=tuple(
            EvalSample(
                prompt=prompt.text,
                completion=decode(episode.token_ids[episode.drawn]) if decode else "",
                reference=prompt.reference,
                reward=score.reward,
            )
            for prompt, (episode, score) in list(zip(prompts, played, strict=True))[:num_samples]
        ),
    )


def accuracy(scores: Sequence[Score]) -> float | None:
    """Return the mean of the scores' part CORRECT; None if no score has it.

    A score without that part counts as wrong.
    """
    if not any(CORRECT in score.parts for score in scores):
        return None
    return float(np.mean([score.parts.get(CORRECT, 0.0) for score in scores]))
