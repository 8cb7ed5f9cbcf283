"""Evaluate the policy: one answer, or several, to each held-out prompt, greedy by default. Needs no
JAX."""

import asyncio
import contextlib
import logging
import math
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from jaxrl_async.errors import (
    BadEndpoint,
    Closed,
    RetriesExhausted,
    RolloutError,
    RolloutTimeout,
)
from jaxrl_async.metrics.fault_counts import backoff_s
from jaxrl_async.outages import Outages
from jaxrl_async.ports.generate import Generate
from jaxrl_async.ports.rollout import Opens, Plays, Scorer
from jaxrl_async.rollout.env import MakeEnv, SingleTurn
from jaxrl_async.rollout.episode import (
    PlayAgain,
    SavedEpisode,
    begin_groups,
    cancel,
    play_episode,
    restart_episode,
)
from jaxrl_async.rollout.quorum import all_or_none
from jaxrl_async.types import (
    CORRECT,
    Constraint,
    Episode,
    EpisodeLimits,
    IntArray,
    Prompt,
    SamplingParams,
    Score,
    StopReason,
    TurnPriority,
)

log = logging.getLogger(__name__)

GREEDY = SamplingParams(temperature=0.0)
SCORED_AT_ONCE = 16
"""Maximum number of concurrent scorer calls."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalSample:
    """One answer of an evaluation, for inspection."""

    index: int  # of the answer in the evaluation, by prompt
    seat: str  # of a game; empty: not a game
    prompt: str
    completion: str  # empty without a decode function
    reference: str
    reward: float
    version: int  # newest version of the weights that gave the evaluation's answers


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalEffort:
    """Settings for held-out episodes that are more than one answer to a prompt of tokens."""

    at_once: int = 64  # concurrent episodes that their environment opens or plays; in order
    retries: int = 0  # of an episode that fails; not after a timeout
    backoff_s: float = 1.0  # wait before the first retry, seconds; doubles with each further one
    count: Callable[[str], None] = lambda name: None  # called with the name of each fault
    outages: Outages | None = None  # waited out; None: an outage is an ordinary failure


ONE_TRY = EvalEffort()


@dataclass(frozen=True, slots=True, kw_only=True)
class PlayedPrompt:
    """A prompt of an evaluation with its answers."""

    index: int  # of the prompt in the evaluation
    prompt: Prompt
    samples: tuple[int, ...]  # the sample of each answer; in a game each seat has an answer
    episodes: tuple[Episode, ...]  # the answers
    scores: tuple[Score, ...]  # of the answers

    @property
    def rewards(self) -> tuple[float, ...]:
        """The total reward of each answer."""
        return tuple(score.total for score in self.scores)

    @property
    def correct(self) -> tuple[float, ...]:
        """The part CORRECT of the answers that count in the accuracy (`counted`)."""
        return tuple(s.parts.get(CORRECT, 0.0) for s in self.scores if counted(s))


def played_prompt(
    index: int,
    prompt: Prompt,
    by_sample: Sequence[Sequence[Episode]],
    scores: tuple[Score, ...],
) -> PlayedPrompt:
    """Return a prompt with its answers; by_sample: the scored answers of each sample."""
    return PlayedPrompt(
        index=index,
        prompt=prompt,
        samples=tuple(m for m, answers in enumerate(by_sample) for _ in answers),
        episodes=tuple(episode for answers in by_sample for episode in answers),
        scores=scores,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalResult:
    """The policy's results on the held-out prompts."""

    num_prompts: int  # without skipped ones
    mean_reward: float
    accuracy: float | None  # mean of the score part CORRECT; None: no score has it
    mean_length_tokens: float  # sampled tokens, mean over answers
    truncated_share: float  # share of answers cut off by a length bound
    samples: tuple[EvalSample, ...]
    seats: Mapping[str, float] = field(default_factory=dict)  # mean reward of each seat of a game
    played: tuple[PlayedPrompt, ...] = ()  # without skipped prompts


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
    level: int = 0,
    effort: EvalEffort = ONE_TRY,
    constraint: Callable[[Prompt], Constraint | None] | None = None,
    by_task: Mapping[str, EpisodeLimits] | None = None,
    samples: int = 1,
    label: str = "eval",
) -> EvalResult:
    """Play every prompt `samples` times and score its answers together. The first turns of all
    prompts of tokens are queued in one call.

    Request ids are "LABEL/INDEX/mSAMPLE/t0", of a retry "LABEL/INDEX.RETRY/mSAMPLE/t0"; `level` is
    the first part of their priority, and `by_task` has the limits of some tasks' prompts, if they
    differ. A prompt whose environment or scorer keeps failing is skipped, counted and logged.
    Raises RolloutError if there are no prompts, and the last error if more than half of the prompts
    fail, because then the cause is not a single record.
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
        priority=TurnPriority(first=level, later=level),
        for_training=False,
        constraint=constraint,
        by_task={} if by_task is None else by_task,
    )
    playing = _HeldOutPlay(generate, prompts, make_env, limits, effort, samples, label)
    busy, failed = asyncio.Semaphore(SCORED_AT_ONCE), list[int]()

    async def play_one(index: int) -> list[PlayedPrompt]:
        try:
            by_sample = await all_or_none(playing.play(index, m) for m in range(samples))
            episodes = tuple(episode for answers in by_sample for episode in answers)
            async with busy:
                scores = await scorer(episodes, prompts[index])
        except (BadEndpoint, Closed):
            raise
        except RolloutError as error:
            failed.append(index)
            if 2 * len(failed) > len(prompts):
                raise
            effort.count("eval_left_out")
            log.warning("skipping held-out prompt %d in this evaluation: %s", index, error)
            return []
        return [played_prompt(index, prompts[index], by_sample, scores)]

    try:
        played = await all_or_none(play_one(i) for i in range(len(prompts)))
    finally:
        playing.cancel()
    return eval_result([one for results in played for one in results], decode, num_samples)


class _HeldOutPlay:
    """The samples of the held-out prompts while they are played. Owned by one loop."""

    def __init__(
        self,
        generate: Generate,
        prompts: Sequence[Prompt],
        make_env: MakeEnv,
        limits: EpisodeLimits,
        effort: EvalEffort,
        samples: int,
        label: str,
    ) -> None:
        """Queue the first turns of all prompts of tokens in one call."""
        self._generate, self._prompts, self._make_env = generate, prompts, make_env
        self._limits, self._effort, self._label = limits, effort, label
        self._play: Callable[..., Coroutine[Any, Any, tuple[Episode, ...]]] = play_episode
        if effort.outages is not None:
            self._play = PlayAgain(make_env=make_env, outages=effort.outages).play
        self._slots = asyncio.Semaphore(effort.at_once)
        new = (SavedEpisode(),) * samples
        groups = [(f"{label}/{i}", p, new) for i, p in enumerate(prompts)]
        self._begun = begin_groups(generate, make_env, groups, limits)

    async def play(self, index: int, sample: int) -> tuple[Episode, ...]:
        """Play a sample of a prompt, with up to effort.retries retries; return its answer, or those
        of a game's seats. Raises as `evaluate`."""
        label, effort = f"{self._label}/{index}", self._effort
        for failures in range(effort.retries):
            try:
                return await self._attempt(index, sample, label)
            except (RolloutTimeout, BadEndpoint, RetriesExhausted):
                raise
            except RolloutError as error:
                wait_s = backoff_s(effort.backoff_s, failures)
                effort.count("eval_retries")
                log.warning("retrying %s in %.1f s: %s", label, wait_s, error)
            await asyncio.sleep(wait_s)
            label = f"{self._label}/{index}.{failures + 1}"
            restart_episode(
                self._generate,
                self._make_env,
                self._prompts[index],
                self._begun[index][sample],
                label,
                sample,
                self._limits,
            )
        return await self._attempt(index, sample, label)

    def cancel(self) -> None:
        """Cancel all pending turns."""
        for members in self._begun:
            for member in members:
                cancel(member)

    async def _attempt(self, index: int, sample: int, label: str) -> tuple[Episode, ...]:
        member = self._begun[index][sample]
        late = isinstance(member.env, Opens | Plays)  # starts when it is played
        async with self._slots if late else contextlib.nullcontext():
            return await self._play(
                self._generate,
                self._prompts[index],
                member,
                label=label,
                member=sample,
                limits=self._limits.of(self._prompts[index]),
                spent_s=lambda seconds: None,
            )


def eval_result(
    played: Sequence[PlayedPrompt],
    decode: Callable[[IntArray], str] | None = None,
    num_samples: int = 8,
) -> EvalResult:
    """Average over the answers, and decode the first `num_samples` of them."""
    answers = [
        (one.prompt, episode, score)
        for one in played
        for episode, score in zip(one.episodes, one.scores, strict=True)
    ]
    rewards = np.array([score.total for _, _, score in answers], np.float64)
    lengths = np.array([episode.num_drawn for _, episode, _ in answers], np.float64)
    truncated = [episode.stop is StopReason.LENGTH for _, episode, _ in answers]
    version = max((int(e.versions.max(initial=0)) for _, e, _ in answers), default=0)
    return EvalResult(
        num_prompts=len(played),
        mean_reward=float(rewards.mean()),
        accuracy=accuracy([score for _, _, score in answers]),
        mean_length_tokens=float(lengths.mean()),
        truncated_share=float(np.mean(truncated)),
        samples=tuple(
            EvalSample(
                index=index,
                seat=episode.seat,
                prompt=prompt.text,
                completion=decode(episode.token_ids[episode.drawn]) if decode else "",
                reference=prompt.reference,
                reward=score.total,
                version=version,
            )
            for index, (prompt, episode, score) in enumerate(answers[:num_samples])
        ),
        seats=seat_rewards((episode, score) for _, episode, score in answers),
        played=tuple(played),
    )


def seat_rewards(played: Iterable[tuple[Episode, Score]]) -> dict[str, float]:
    """Return the mean reward by seat of games; empty for other episodes."""
    rewards: dict[str, list[float]] = {}
    for episode, score in played:
        if episode.seat:
            rewards.setdefault(episode.seat, []).append(score.total)
    return {seat: float(np.mean(values)) for seat, values in sorted(rewards.items())}


def accuracy(scores: Sequence[Score]) -> float | None:
    """Return the mean of the score part CORRECT; None if no score has it.

    A score without that part counts as wrong, unless a function did not apply to its answer.
    """
    if not any(CORRECT in score.parts for score in scores):
        return None
    return float(np.mean([s.parts.get(CORRECT, 0.0) for s in scores if counted(s)]))


def counted(score: Score) -> bool:
    """Return whether an answer counts in the accuracy."""
    return CORRECT in score.parts or not score.left_out


def clustered_stderr(groups: Iterable[Sequence[float]]) -> float | None:
    """Return the standard error of the mean of all values; None with values of fewer than two
    prompts.

    Values of one prompt are not independent, so prompts are the clusters (Miller 2024,
    arXiv:2411.00640, equation 4), here with the correction G / (G - 1) for G clusters: for equally
    many values a prompt it is the usual standard error of the prompts' means.

    groups: the values of each prompt.
    """
    kept = [group for group in groups if len(group)]
    if len(kept) < 2:
        return None
    count = sum(len(group) for group in kept)
    mean = math.fsum(value for group in kept for value in group) / count
    squares = math.fsum(math.fsum(value - mean for value in group) ** 2 for group in kept)
    return math.sqrt(squares * len(kept) / (len(kept) - 1)) / count
