"""Evaluate the policy: one answer to each held-out prompt, greedy by default. Needs no JAX."""

import asyncio
import contextlib
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from jaxrl_async.errors import Closed, EndpointMisset, GivenUp, RolloutError, RolloutTimeout
from jaxrl_async.metrics.fault_counts import backoff_s
from jaxrl_async.outages import Outages
from jaxrl_async.ports.generate import Generate
from jaxrl_async.ports.rollout import Opens, Plays, Scorer
from jaxrl_async.rollout.env import MakeEnv, SingleTurn
from jaxrl_async.rollout.episode import (
    EpisodeProgress,
    PlayAgain,
    SavedEpisode,
    begin_groups,
    cancel,
    play_group,
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
class EvalResult:
    """The policy's results on the held-out prompts."""

    num_prompts: int  # without skipped ones
    mean_reward: float
    accuracy: float | None  # mean of the score part CORRECT; None: no score has it
    mean_length_tokens: float  # sampled tokens, mean over answers
    truncated_share: float  # share of answers cut off by a length bound
    samples: tuple[EvalSample, ...]
    seats: Mapping[str, float] = field(default_factory=dict)  # mean reward of each seat of a game


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
) -> EvalResult:
    """Play every prompt once and score it. The first turns of all prompts of tokens are queued in
    one call.

    Request ids are "eval/INDEX/m0/t0", of a retry "eval/INDEX.RETRY/m0/t0"; `level` is the first
    part of their priority. A prompt whose environment or scorer keeps failing is skipped, counted
    and logged. Raises RolloutError if there are no prompts, and the last error if more than half of
    the prompts fail, because then the cause is not a single record.
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
    )
    playing = _HeldOutPlay(generate, prompts, make_env, limits, effort)
    busy, failed = asyncio.Semaphore(SCORED_AT_ONCE), list[int]()

    async def one(index: int) -> list[tuple[Prompt, Episode, Score]]:
        try:
            episodes = await playing.played(index)
            async with busy:
                scores = await scorer(episodes, prompts[index])
        except (EndpointMisset, Closed):
            raise
        except RolloutError as error:
            failed.append(index)
            if 2 * len(failed) > len(prompts):
                raise
            effort.count("eval_left_out")
            log.warning("skipping held-out prompt %d in this evaluation: %s", index, error)
            return []
        return [(prompts[index], *one) for one in zip(episodes, scores, strict=True)]

    try:
        played = await all_or_none(one(i) for i in range(len(prompts)))
    finally:
        playing.cancel()
    flat = [one for of_prompt in played for one in of_prompt]
    result = eval_result(
        [prompt for prompt, _, _ in flat],
        [(episode, score) for _, episode, score in flat],
        decode=decode,
        num_samples=num_samples,
    )
    return replace(result, num_prompts=len(prompts) - len(failed))


class _HeldOutPlay:
    """The held-out prompts while they are played, each as a group of one. Owned by one loop."""

    def __init__(
        self,
        generate: Generate,
        prompts: Sequence[Prompt],
        make_env: MakeEnv,
        limits: EpisodeLimits,
        effort: EvalEffort,
    ) -> None:
        """Queue the first turns of all prompts of tokens in one call."""
        self._generate, self._prompts, self._make_env = generate, prompts, make_env
        self._limits, self._effort = limits, effort
        self._again = None
        if effort.outages is not None:
            self._again = PlayAgain(make_env=make_env, outages=effort.outages)
        self._places = asyncio.Semaphore(effort.at_once)
        self._begun = self._begin([(f"eval/{i}", p) for i, p in enumerate(prompts)])

    async def played(self, index: int) -> tuple[Episode, ...]:
        """Play a prompt, with up to effort.retries retries. Raises as `evaluate`."""
        label, effort = f"eval/{index}", self._effort
        for failures in range(effort.retries):
            try:
                return await self._attempt(index, label)
            except (RolloutTimeout, EndpointMisset, GivenUp):
                raise
            except RolloutError as error:
                wait_s = backoff_s(effort.backoff_s, failures)
                effort.count("eval_retries")
                log.warning("retrying %s in %.1f s: %s", label, wait_s, error)
            await asyncio.sleep(wait_s)
            label = f"eval/{index}.{failures + 1}"
            for member in self._begun[index]:
                cancel(member)
            (self._begun[index],) = self._begin([(label, self._prompts[index])])
        return await self._attempt(index, label)

    def cancel(self) -> None:
        """Cancel all pending turns."""
        for (member,) in self._begun:
            cancel(member)

    def _begin(self, labelled: Sequence[tuple[str, Prompt]]) -> list[tuple[EpisodeProgress, ...]]:
        groups = [(label, prompt, (SavedEpisode(),)) for label, prompt in labelled]
        return begin_groups(self._generate, self._make_env, groups, self._limits)

    async def _attempt(self, index: int, label: str) -> tuple[Episode, ...]:
        members = self._begun[index]
        async with self._places if _begins_late(members) else contextlib.nullcontext():
            return await play_group(
                self._generate,
                self._prompts[index],
                members,
                label=label,
                limits=self._limits,
                again=self._again,
            )


def _begins_late(members: Sequence[EpisodeProgress]) -> bool:
    """Return whether these start when they are played, not with a queued request."""
    return any(isinstance(member.env, Opens | Plays) for member in members)


def eval_result(
    prompts: Sequence[Prompt],
    played: Sequence[tuple[Episode, Score]],
    *,
    decode: Callable[[IntArray], str] | None = None,
    num_samples: int = 8,
) -> EvalResult:
    """Average over the answers, and decode the first `num_samples` of them."""
    rewards = np.array([score.total for _, score in played], np.float64)
    lengths = np.array([episode.num_drawn for episode, _ in played], np.float64)
    truncated = [episode.stop is StopReason.LENGTH for episode, _ in played]
    version = max((int(e.versions.max(initial=0)) for e, _ in played), default=0)
    shown = list(zip(prompts, played, strict=True))[:num_samples]
    return EvalResult(
        num_prompts=len(played),
        mean_reward=float(rewards.mean()),
        accuracy=accuracy([score for _, score in played]),
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
            for index, (prompt, (episode, score)) in enumerate(shown)
        ),
        seats=seat_rewards(played),
    )


def seat_rewards(played: Iterable[tuple[Episode, Score]]) -> dict[str, float]:
    """Return the mean reward by seat of games; empty for other episodes."""
    rewards: dict[str, list[float]] = {}
    for episode, score in played:
        if episode.seat:
            rewards.setdefault(episode.seat, []).append(score.total)
    return {seat: float(np.mean(of_seat)) for seat, of_seat in sorted(rewards.items())}


def accuracy(scores: Sequence[Score]) -> float | None:
    """Return the mean of the score part CORRECT; None if no score has it.

    A score without that part counts as wrong, unless a function did not apply to its answer.
    """
    if not any(CORRECT in score.parts for score in scores):
        return None
    counted = [score for score in scores if CORRECT in score.parts or not score.left_out]
    return float(np.mean([score.parts.get(CORRECT, 0.0) for score in counted]))
