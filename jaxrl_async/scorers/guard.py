"""Guard a scorer: timeout, retries, a check of its scores, and a trial before the run. No JAX.

group ──> scorer ──in time?──> Scores ──valid?──> the same Scores
            ^  │ raised, or timed out
            └──┘ retried after a wait, `retries` times, and in an outage until it is over;
                 then the group fails
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from numbers import Real
from typing import Any

import numpy as np

from jaxrl_async.errors import (
    BadEndpoint,
    Closed,
    ConfigError,
    OutageTooLong,
    RefusedScore,
    RetriesExhausted,
    RolloutError,
    RolloutTimeout,
    is_run_ending,
)
from jaxrl_async.metrics.fault_counts import UnderWay, backoff_s
from jaxrl_async.metrics.metric import names_a_metric, part_name
from jaxrl_async.outages import Outages, time_limit
from jaxrl_async.ports.rollout import Scorer
from jaxrl_async.ports.run import Clock
from jaxrl_async.scorers.results import cited, finite
from jaxrl_async.types import CORRECT, LARGEST_REWARD, Episode, IntArray, Prompt, Score, StopReason
from jaxrl_async.unavailable import unavailable_cause

log = logging.getLogger(__name__)

REWARD = "the reward"
"""Name, in Outages, of everything that scores answers."""
ROUNDING = 1e-6
"""Tolerance of a part `correct` outside of 0 to 1: sum([1 / 9] * 9) is 1.0000000000000002."""


class GuardedScorer:
    """ports.Scorer around another one, for one thread at a time. Any thread may call `oldest_s`."""

    def __init__(
        self,
        scorer: Scorer,
        *,
        timeout_s: float,
        retries: int = 0,
        backoff_s: float = 1.0,
        count: Callable[[str], None] = lambda name: None,
        outages: Outages | None = None,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
        clock: Clock = time.monotonic,
    ) -> None:
        """Guard a scorer.

        Args:
            scorer: The scorer to guard.
            timeout_s: Timeout of one call, seconds.
            retries: Retries after a failure or a timeout.
            backoff_s: Wait before the first retry, seconds; doubles with each further retry.
            count: Called with the name of each fault (metrics/fault_counts.py).
            outages: The run's; None: a separate one.
            sleep: Waits for a number of seconds.
            clock: For `oldest_s`.
        """
        self.scorer = scorer  # may be replaced before the run starts
        self._timeout_s, self._retries = timeout_s, retries
        self._backoff_s, self._count, self._sleep = backoff_s, count, sleep
        self._calls, self._outages = UnderWay(clock), outages or Outages(count=count)

    async def __call__(self, episodes: tuple[Episode, ...], prompt: Prompt) -> tuple[Score, ...]:
        """Score a group as ports.Scorer does.

        Raises RolloutError if the last try failed with any exception. Raises it immediately if the
        scorer did not return one valid score per episode, or is misconfigured (BadEndpoint),
        since a retry would not help.
        """
        try:
            with self._calls.one():
                scores = await self._outages.until_answered(
                    REWARD, lambda: self._score(episodes, prompt), about=prompt.prompt_id
                )
                return checked(scores, episodes, prompt)
        except RefusedScore:
            self._count("refused_scores")
            raise

    def oldest_s(self) -> float:
        """Return the age of the oldest running call, retries included, seconds; 0 if none runs."""
        return self._calls.oldest_s()

    async def _score(self, episodes: tuple[Episode, ...], prompt: Prompt) -> Any:
        for tries_left in range(self._retries, -1, -1):
            try:
                return await self._outcome(episodes, prompt)
            except (RefusedScore, BadEndpoint, RetriesExhausted):
                raise
            except RolloutError as error:
                if not tries_left or unavailable_cause(error) is not None:
                    raise
                self._count("scorer_retries")
                wait_s = backoff_s(self._backoff_s, self._retries - tries_left)
                log.warning("scoring again in %.1f s (%d left): %s", wait_s, tries_left, error)
                await self._sleep(wait_s)
        raise AssertionError("the last try returns or raises")

    async def _in_time(self, episodes: tuple[Episode, ...], prompt: Prompt) -> Any:
        try:
            async with time_limit(self._timeout_s) as limit:
                return await self.scorer(episodes, prompt)
        except TimeoutError:
            self._count("scorer_timeouts")
            if not limit.expired():  # the scorer's own timeout, with its own message
                raise
            raise RolloutTimeout(
                f"prompt {prompt.prompt_id}: scoring a group of {len(episodes)} took more than "
                f"{self._timeout_s:g} s. Make the scorer quicker or raise faults.scorer_timeout_s."
            ) from None

    async def _outcome(self, episodes: tuple[Episode, ...], prompt: Prompt) -> Any:
        """Return the scorer's result; convert any exception to a RolloutError."""
        try:
            return await self._in_time(episodes, prompt)
        except (RolloutError, Closed):
            raise
        except BaseException as error:
            if is_run_ending(error):
                raise
            raise RolloutError(
                f"prompt {prompt.prompt_id}: the scorer raised {type(error).__name__}: {error}"
            ) from error


def checked(scores: object, episodes: tuple[Episode, ...], prompt: Prompt) -> tuple[Score, ...]:
    """Return the scores as a tuple, each part `correct` clipped to 0 to 1.

    Raises RefusedScore with the invalid score and the reason.
    """
    where = f"prompt {prompt.prompt_id}: the scorer"
    if not isinstance(scores, list | tuple) or len(scores) != len(episodes):
        given = f"{len(scores)} scores" if isinstance(scores, list | tuple) else cited(scores)
        raise RefusedScore(
            f"{where} gave {given} for {len(episodes)} episodes. It must give one Score each, in "
            "order."
        )
    for i, (score, episode) in enumerate(zip(scores, episodes, strict=True)):
        if not isinstance(score, Score):
            raise RefusedScore(
                f"{where} gave {cited(score)} for episode {i}. It must give a Score."
            )
        numbers = {"reward": score.reward, **{f"part {k!r}": v for k, v in score.parts.items()}}
        for what, value in numbers.items():
            if not is_finite_number(value) or abs(value) > LARGEST_REWARD:
                raise RefusedScore(
                    f"{where} gave episode {i} a {what} of {cited(value)}. It must be a finite "
                    f"number of at most {LARGEST_REWARD:g}."
                )
        _check_parts(score.parts, where)
        for rewards in (score.token_rewards, score.process_rewards):
            _check_token_rewards(rewards, len(episode.token_ids), f"{where}, episode {i}")
    return tuple(map(_clip, scores))


def is_finite_number(value: object) -> bool:
    """Return whether a value is a real number, neither NaN nor infinite; a bool is not a number."""
    return isinstance(value, Real) and not isinstance(value, bool) and finite(value) is not None


def _check_parts(parts: Mapping[str, float], where: str) -> None:
    for name in parts:
        if name != part_name(name):
            raise RefusedScore(
                f"{where} names a part {name!r}, which cannot be a metric's name. Name it "
                f"{part_name(name)!r}."
            )
        if names_a_metric(name):
            raise RefusedScore(
                f"{where} names a part {name!r}, and reward/{name} is another metric. Rename "
                "the part."
            )
    if not -ROUNDING <= parts.get(CORRECT, 0.0) <= 1 + ROUNDING:
        raise RefusedScore(
            f"{where} gave a part {CORRECT!r} of {float(parts[CORRECT])!r}. This part measures "
            "how correct an answer is, and its mean is eval/accuracy: it must be from 0 to 1. "
            "Rename the part if it means something else."
        )


def _clip(score: Score) -> Score:
    """Clip a score's part `correct` to 0 to 1: rounding may have moved it outside."""
    correct = score.parts.get(CORRECT, 0.0)
    if 0 <= correct <= 1:
        return score
    return replace(score, parts={**score.parts, CORRECT: min(1.0, max(0.0, float(correct)))})


def _check_token_rewards(rewards: Any, length: int, where: str) -> None:
    if rewards is None:
        return
    shape = getattr(rewards, "shape", None)
    if shape != (length,) or not np.issubdtype(rewards.dtype, np.floating):
        raise RefusedScore(
            f"{where}: token_rewards are {cited(rewards)} of shape {shape}; they must be one float "
            f"for each of the episode's {length} tokens, or None."
        )
    wrong = ~(np.abs(rewards) <= LARGEST_REWARD)  # NaN is wrong, too
    if wrong.any():
        first = int(np.flatnonzero(wrong)[0])
        raise RefusedScore(
            f"{where}: token_rewards[{first}] is {rewards[first]}; all must be finite and at most "
            f"{LARGEST_REWARD:g}, 0 where a token earns nothing."
        )


def try_once(
    scorer: Scorer, prompt: Prompt, encode: Callable[[str], IntArray], setting: str
) -> Score:
    """Score the prompt's reference once, before the run, as if the policy had generated it. Without
    a reference, use the prompt's last token, since an answer has at least one token.

    Warns if a score's part `correct` says that the reference is not correct.

    Raises:
        ConfigError: The scorer raised, timed out or returned something other than a reward. The
            message begins with `setting`.
        OutageTooLong, RetriesExhausted: Its service did not answer; the message begins as above.
    """
    answer = encode(prompt.reference)
    answer = answer if len(answer) else prompt.token_ids[-1:]
    is_prompt = np.zeros(len(prompt.token_ids), bool)
    sampled = np.concatenate([is_prompt, np.ones(len(answer), bool)])
    episode = Episode(
        token_ids=np.concatenate([prompt.token_ids, answer]),
        drawn=sampled,
        logprobs=np.zeros(len(sampled), np.float32),
        versions=np.where(sampled, 0, -1).astype(np.int32),
        stop=StopReason.EOS,
    )

    async def score() -> tuple[Score, ...]:
        return await scorer((episode,), prompt)

    try:
        with ThreadPoolExecutor(1) as thread:  # a notebook's own thread already runs an event loop
            (tried,) = thread.submit(asyncio.run, score()).result()
    except (OutageTooLong, RetriesExhausted) as error:  # the settings may be correct
        raise type(error)(f"{setting}, tried on the first held-out prompt: {error}") from error
    except RolloutError as error:
        raise ConfigError(f"{setting}, tried on the first held-out prompt: {error}") from error
    if prompt.reference.strip() and tried.parts.get(CORRECT, 1.0) < 1.0:
        log.warning(
            "%s gives the first held-out prompt's own correct answer, %.80r, a part `correct` of "
            "%g. Unless it checks more than the answer, another grader fits these records.",
            setting,
            prompt.reference,
            tried.parts[CORRECT],
        )
    return tried
