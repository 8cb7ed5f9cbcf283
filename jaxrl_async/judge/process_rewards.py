"""Rewards for the steps of an answer, in addition to the reward of the whole. Needs no JAX.

        ┌─> all other scorers ──────────────> Scores ─┐
group ──┤                                             ├──> Scores with process_rewards
        └─> steps ──> function, or the judge ─────────┘
                                    └─ the group is too old: it continues without them

A step's reward is credited to its last token. Rewards that arrived in time are still dropped if
the group is older than reward.process.max_age when it is trained on (shaping.within_age).
"""

import asyncio
import functools
import inspect
import logging
from bisect import bisect_left
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np

from jaxrl_async.config.judge_section import JudgeSection, ProcessSection
from jaxrl_async.errors import (
    BadEndpoint,
    ConfigError,
    RefusedScore,
    RolloutError,
    RolloutTimeout,
)
from jaxrl_async.judge.judge import JudgeService, Transcripts, Unjudged
from jaxrl_async.judge.judge_prompt import about_steps
from jaxrl_async.ports.rollout import Scorer
from jaxrl_async.scorers.results import cited, finite
from jaxrl_async.scorers.rewards import is_async
from jaxrl_async.tasks.usercode import Threads, TooLate, run_async, side_by_side
from jaxrl_async.types import Episode, FloatArray, Prompt, Score
from jaxrl_async.user_arguments import copied_columns, read_only

log = logging.getLogger(__name__)

NAMES = ("prompt", "reference", "columns", "completion", "steps", "token_ids", "episode")
"""Names of the parameters of a user's function: task text, reference answer, whole record;
generated text, texts of the steps, generated tokens; the full Episode."""
MORE_BYTES = 3
"""Maximum bytes of a UTF-8 character after its first; each may be a token."""
LOOK_S = 0.25
"""Interval between checks of a group's age, seconds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardedStep:
    """A step of an answer."""

    text: str
    end: int  # index of its last token in the episode


class StepRewards(Protocol):
    """A function that rewards steps."""

    async def __call__(
        self, episode: Episode, prompt: Prompt, steps: Sequence[RewardedStep]
    ) -> list[float]:
        """Return a number for each step. Raises RolloutError."""
        ...


# ---- steps


def steps_of(
    episode: Episode, section: ProcessSection, decode: Callable[[Any], str]
) -> tuple[RewardedStep, ...]:
    """Split the tokens that the policy generated into steps, in order.

    Args:
        episode: one answer, of any number of turns and contexts.
            section: definition of a step.
            decode: converts token ids to text.
    """
    steps: list[RewardedStep] = []
    for begin, end in sampled_runs(episode):
        token_ids = episode.token_ids[begin:end]
        if section.split == "token":
            steps += [
                RewardedStep(text=decode(token_ids[i : i + 1]), end=begin + i)
                for i in range(end - begin)
            ]
        elif section.split == "turn":
            steps.append(RewardedStep(text=decode(token_ids), end=end - 1))
        else:
            text = decode(token_ids)
            cuts = _cuts(text, section.separator)
            lengths = _Lengths(token_ids, text, decode)
            steps += [
                RewardedStep(text=piece, end=begin + lengths.token_at(at)) for piece, at in cuts
            ]
    return tuple(steps)


def sampled_runs(episode: Episode) -> list[tuple[int, int]]:
    """Return begin and end of each span of tokens that the policy generated in one turn."""
    flags = episode.drawn.astype(np.int8)
    edges = np.diff(flags, prepend=0, append=0)
    begins = {int(i) for i in np.flatnonzero(edges == 1)}
    ends = {int(i) for i in np.flatnonzero(edges == -1)}
    for start in episode.starts[1:]:
        if episode.drawn[start] and episode.drawn[start - 1]:
            begins.add(start)
            ends.add(start)
    return list(zip(sorted(begins), sorted(ends), strict=True))


def _cuts(text: str, separator: str) -> list[tuple[str, int]]:
    """Split a text after each separator; return each piece and its end position. A piece of only
    whitespace is joined to the piece before it."""
    pieces: list[tuple[str, int]] = []
    at = 0
    while at < len(text):
        at_separator = text.find(separator, at)
        end = len(text) if at_separator < 0 else at_separator + len(separator)
        piece = text[at:end]
        if piece.strip() or not pieces:
            pieces.append((piece, end))
        else:
            pieces[-1] = (pieces[-1][0] + piece, end)
        at = end
    return pieces or [("", 0)]


class _Lengths:
    """Lengths of the text of the first tokens, found by bisection."""

    def __init__(self, token_ids: Any, text: str, decode: Callable[[Any], str]) -> None:
        self._token_ids, self._text, self._decode = token_ids, text, decode
        self._of = functools.cache(lambda count: len(decode(token_ids[:count])))

    def token_at(self, length: int) -> int:
        """Return the index of the token that completes this number of characters. The first tokens
        with so many may hold only some bytes of the last one, which are decoded as another."""
        most, expected = len(self._token_ids), self._text[length - 1 : length]
        count = 1 + bisect_left(range(1, most), length, key=self._of)
        for more in range(count, min(count + MORE_BYTES, most) + 1):
            if self._decode(self._token_ids[:more])[length - 1 : length] == expected:
                return more - 1
        return count - 1


# ---- sources of step rewards


class FunctionSteps:
    """StepRewards from a user's function, called with its parameters by name."""

    def __init__(
        self,
        function: Callable[..., Any],
        name: str,
        *,
        decode: Callable[[Any], str],
        timeout_s: float,
        threads: int,
    ) -> None:
        """Raises ConfigError if the function has a parameter with an unknown name."""
        self._function, self._name, self._decode = function, name, decode
        self._arguments = _arguments_of(function, f"reward.process.function = {name!r}")
        self._timeout_s, self._threads = timeout_s, Threads(threads)

    async def __call__(
        self, episode: Episode, prompt: Prompt, steps: Sequence[RewardedStep]
    ) -> list[float]:
        """Return a number for each step. Raises RolloutError that names function and prompt."""
        about = f"process reward {self._name} on prompt {prompt.prompt_id}"
        sampled = episode.token_ids[episode.drawn]
        values = {
            "prompt": prompt.text,
            "reference": prompt.reference,
            "columns": copied_columns(prompt.columns),
            "completion": self._decode(sampled),
            "steps": [step.text for step in steps],
            "token_ids": sampled,
            "episode": read_only(episode),
        }
        work = functools.partial(self._function, **{n: values[n] for n in self._arguments})
        try:
            if is_async(self._function):
                outcome = await run_async(work, self._timeout_s)
            else:
                outcome = await self._threads.run(work, self._timeout_s)
            return _numbers(outcome.get(), len(steps))
        except TooLate:
            raise RolloutTimeout(
                f"{about} took more than {self._timeout_s:g} s for one answer. Make it faster or "
                "raise reward.process.timeout_s."
            ) from None
        except RolloutError as error:
            raise type(error)(f"{about} {error}") from error.__cause__


def _arguments_of(function: Callable[..., object], where: str) -> tuple[str, ...]:
    """Return the names of the arguments that the function takes."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        parameters = {}.values()
    by_name = [p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    if any(p.kind is p.VAR_KEYWORD for p in parameters):
        return NAMES
    names = tuple(p.name for p in by_name if p.name in NAMES)
    unknown = [p.name for p in by_name if p.name not in NAMES and p.default is p.empty]
    unnamed = [p.name for p in parameters if p.kind is p.POSITIONAL_ONLY and p.default is p.empty]
    if unknown or unnamed or not {"steps", "token_ids", "completion", "episode"} & set(names):
        problem = (
            f"it asks for {(unknown + unnamed)[0]!r}" if unknown or unnamed else "it sees no answer"
        )
        raise ConfigError(
            f"{where} cannot be called: {problem}. It is called with its parameters by name. Known "
            f"names: {', '.join(NAMES)}."
        )
    return names


def _numbers(results: Any, count: int) -> list[float]:
    """Return one finite number for each step. Raises RefusedScore."""
    try:
        listed = None if isinstance(results, str | bytes | dict | set) else list(results)
    except TypeError:
        listed = None
    numbers = [] if listed is None else [finite(value) for value in listed]
    if listed is None or len(listed) != count or any(number is None for number in numbers):
        raise RefusedScore(
            f"gave {cited(results)}. It must return {count} finite numbers, one for each step, in "
            "order."
        )
    return [number for number in numbers if number is not None]


class JudgedSteps:
    """StepRewards from the judge: each step's number, 0 to 1, divided by the number of steps."""

    def __init__(
        self, service: JudgeService, judge: JudgeSection, rubric: str, transcripts: Transcripts
    ) -> None:
        self._service, self._judge, self._rubric = service, judge, rubric
        self._transcripts = transcripts

    async def __call__(
        self, episode: Episode, prompt: Prompt, steps: Sequence[RewardedStep]
    ) -> list[float]:
        """Return a number for each step. Raises RolloutError if the judge gave none."""
        task = self._transcripts.task(episode, prompt, reference=self._judge.show_reference)
        texts = [step.text for step in steps]
        question = about_steps(self._rubric, task, texts, self._judge.scale)
        (answer,) = await self._service.answers([question])
        if isinstance(answer, Unjudged):
            raise RolloutError(
                f"prompt {prompt.prompt_id}: steps could not be judged: {answer.reason}"
            ) from answer.reason
        return [row[0] / len(steps) for row in answer]


# ---- combined with the outcome


class ProcessTally:
    """Process rewards counted since the start. Owned by the rollouts' thread."""

    def __init__(self) -> None:
        self.steps, self.total = 0, 0.0

    def read(self) -> dict[str, float]:
        """Return the number of rewarded steps, and the sum of their rewards before weighting."""
        return {"steps": float(self.steps), "total": self.total}


class ProcessScorer:
    """ports.Scorer: another scorer's scores, with token rewards if they arrive in time."""

    def __init__(
        self,
        outcome: Scorer,
        rewards: StepRewards,
        section: ProcessSection,
        *,
        decode: Callable[[Any], str],
        count: Callable[[str], None] = lambda name: None,
        version: Callable[[], int] = lambda: 0,
    ) -> None:
        """Reward steps in parallel with `outcome`.

        Args:
            outcome: scores whole answers.
            rewards: rewards steps.
            section: definition of a step, maximum wait of a group, and the weight.
            decode: converts token ids to text.
            count: called with the name of each fault.
            version: newest version of the weights; may be replaced before the run starts.
        """
        self._outcome, self._rewards, self._section = outcome, rewards, section
        self._decode, self._count, self.version = decode, count, version
        self.tally = ProcessTally()

    async def __call__(self, episodes: tuple[Episode, ...], prompt: Prompt) -> tuple[Score, ...]:
        """Score each episode. Errors of the other scorer are passed on. Failed process rewards
        raise RolloutError if on_failure=fail."""
        work = side_by_side(self._of_episode(episode, prompt) for episode in episodes)
        process = asyncio.ensure_future(work)
        try:
            scores = await self._outcome(episodes, prompt)
            earned = await self._in_time(process, episodes, prompt)
        finally:
            if not process.done():
                process.cancel()
            with suppress(asyncio.CancelledError, Exception):
                await process
        if earned is None:
            return tuple(scores)
        weight = self._section.weight
        return tuple(
            replace(score, process_rewards=(weight * of_tokens).astype(np.float32))
            for score, of_tokens in zip(scores, earned, strict=True)
        )

    async def _of_episode(self, episode: Episode, prompt: Prompt) -> FloatArray:
        """Return an episode's token rewards before weighting, [length]."""
        earned: FloatArray = np.zeros(len(episode.token_ids), np.float32)
        steps = await asyncio.to_thread(steps_of, episode, self._section, self._decode)
        if not steps:
            return earned
        numbers = await self._rewards(episode, prompt, steps)
        for step, number in zip(steps, numbers, strict=True):
            earned[step.end] += number
        self.tally.steps += len(steps)
        self.tally.total += sum(numbers)
        return earned

    async def _in_time(
        self,
        process: "asyncio.Future[list[FloatArray]]",
        episodes: Sequence[Episode],
        prompt: Prompt,
    ) -> list[FloatArray] | None:
        """Return the process rewards; None: the group continues without them."""
        loop, section = asyncio.get_running_loop(), self._section
        until = None if section.max_age_s is None else loop.time() + section.max_age_s
        versions = [int(e.versions[e.drawn].min()) for e in episodes if e.num_drawn]
        oldest = min(versions, default=2**31 - 1)  # the version of its oldest token
        while not process.done():
            left_s = None if until is None else until - loop.time()
            aged = section.max_age is not None and self.version() - oldest >= section.max_age
            if aged or (left_s is not None and left_s <= 0):
                self._count("late_process_rewards")
                log.info("prompt %d continues without process rewards: late", prompt.prompt_id)
                return None
            looks = [LOOK_S] if section.max_age is not None else []
            looks += [] if left_s is None else [left_s]
            await asyncio.wait([process], timeout=min(looks, default=None))
        try:
            return process.result()
        except RolloutError as error:
            if section.on_failure == "fail" or isinstance(error, BadEndpoint):
                raise
            self._count("failed_process_rewards")
            log.warning("prompt %d continues without process rewards: %s", prompt.prompt_id, error)
            return None
