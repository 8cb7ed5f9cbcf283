"""Score answers with reward functions, built in or the user's. Needs no JAX.

group ──> text ──> each function ──> its results ──> Scores ──> weighted sums
                   (one call for each answer, or one for all; reward_arguments.py: its arguments,
                    usercode.py: its thread, results.py: its result)

Built-ins by name (graders.py), your own as FILE.py:FUNCTION.
"""

import functools
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any

import numpy as np

from jaxrl_async.config.schema import RewardSection
from jaxrl_async.config.userfile import is_own, load_function
from jaxrl_async.errors import ConfigError, RefusedScore, RolloutError, RolloutTimeout
from jaxrl_async.scorers.graders import exact, gsm8k, math
from jaxrl_async.scorers.results import MODEL, added, cited, distinct_parts, score_of
from jaxrl_async.scorers.reward_arguments import RewardArguments, answer_of, reward_arguments_of
from jaxrl_async.tasks.usercode import Threads, TooLate, run_async, side_by_side
from jaxrl_async.types import Episode, IntArray, Prompt, Score

RewardFunction = Callable[..., Any]
"""Returns a number, a mapping of parts or a Score (results.py); for a group, a list of them."""

REWARDS: dict[str, RewardFunction] = {"exact": exact, "gsm8k": gsm8k, "math": math}
QUICK = (exact, gsm8k)
"""Built-ins that run on the caller's thread."""


def find_reward(name: str) -> RewardFunction:
    """Return the built-in reward of that name, or FILE.py:FUNCTION. Raises ConfigError."""
    if name in REWARDS:
        return REWARDS[name]
    if is_own(name):
        function = load_function(name, "reward.function")
        reward_arguments_of(function, f"reward.function = {name!r}")
        return function
    near = get_close_matches(name, REWARDS, n=1)
    hint = f"did you mean {near[0]!r}? " if near else ""
    raise ConfigError(
        f"reward.function = {name!r} is unknown; {hint}Known: {', '.join(sorted(REWARDS))}, "
        "or your own as FILE.py:FUNCTION."
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Judge:
    """One reward function, with its weight."""

    function: RewardFunction
    name: str  # as in reward.function
    weight: float = 1.0
    setting: str = "reward.function"  # that names it

    @property
    def short_name(self) -> str:
        """Name of the part for a plain number: FUNCTION of FILE.py:FUNCTION."""
        return self.name.rpartition(":")[2]

    @property
    def where(self) -> str:
        """The setting, for the start of messages."""
        return f"{self.setting} = {self.name!r}"


class RewardScorer:
    """ports.Scorer over reward functions: decodes drawn tokens, calls, checks, adds up."""

    def __init__(
        self,
        judges: Sequence[Judge],
        decode: Callable[[IntArray], str],
        *,
        timeout_s: float,
        threads: int = 16,
        taken: Set[str] = frozenset(),
    ) -> None:
        """Make a scorer of these functions, which must have distinct short names.

        Args:
            judges: The functions with their weights.
            decode: Turns drawn tokens into text without special tokens.
            timeout_s: Longest time for one call, seconds.
            threads: Most threads for functions that are not async.
            taken: Names of parts that other scorers provide.

        Raises ConfigError if a function cannot be called.
        """
        self._judges = [
            (judge, reward_arguments_of(judge.function, judge.where)) for judge in judges
        ]
        self._decode, self._timeout_s, self._threads = decode, timeout_s, Threads(threads)
        self._taken = taken

    def check(self, prompts: Iterable[Prompt]) -> None:
        """Raise ConfigError if a function asks for a column that none of these prompts has."""
        prompts = list(prompts)
        for judge, arguments in self._judges:
            arguments.check(prompts, judge.where)

    async def __call__(self, episodes: tuple[Episode, ...], prompt: Prompt) -> tuple[Score, ...]:
        """Score each episode by all tokens that the policy drew in it; the built-in functions look
        at its last turn alone, which has the answer: tool calls stand before it.

        Raises RolloutError, naming function and prompt, if a function fails, returns something
        other than a reward, or takes longer than timeout_s for a call.
        """
        texts = [self._decode(e.token_ids[e.drawn]) for e in episodes]
        by_judge = await side_by_side(
            self._judged(judge, arguments, episodes, texts, prompt)
            for judge, arguments in self._judges
        )
        names = [judge.short_name for judge, _ in self._judges]
        weights = [judge.weight for judge, _ in self._judges]
        with _about(" and ".join(names), prompt):
            by_function = distinct_parts(dict(zip(names, by_judge, strict=True)), self._taken)
            return tuple(
                added(list(zip(weights, scores, strict=True)))
                for scores in zip(*by_function, strict=True)
            )

    async def _judged(
        self,
        judge: Judge,
        arguments: RewardArguments,
        episodes: Sequence[Episode],
        texts: Sequence[str],
        prompt: Prompt,
    ) -> list[Score]:
        """Return one function's Score of each episode."""
        if judge.function in REWARDS.values():
            texts = [
                self._decode(_last_turn(episode)) if episode.num_turns > 1 else text
                for episode, text in zip(episodes, texts, strict=True)
            ]
        if arguments.whole_group:
            answers = {"completions": list(texts), "group": tuple(episodes)}
            results = await self._called(judge, arguments, prompt, answers)
        else:
            results = await side_by_side(
                self._called(judge, arguments, prompt, answer_of(episode, text))
                for episode, text in zip(episodes, texts, strict=True)
            )
        with _about(judge.name, prompt):
            listed = _one_each(results, len(episodes))
            return [score_of(r, episode) for r, episode in zip(listed, episodes, strict=True)]

    async def _called(
        self, judge: Judge, arguments: RewardArguments, prompt: Prompt, answers: Mapping[str, Any]
    ) -> Any:
        with _about(judge.name, prompt):
            positional, named = arguments.given(prompt, answers)
            work = functools.partial(judge.function, *positional, **named)
            if any(judge.function is quick for quick in QUICK):
                return work()
            try:
                if is_async(judge.function):
                    return (await run_async(work, self._timeout_s)).get()
                result = (await self._threads.run(work, self._timeout_s)).get()
                if inspect.isawaitable(result):  # a lambda around an async function
                    result = (await run_async(lambda: result, self._timeout_s)).get()
                return result
            except TooLate:
                what = "the group" if arguments.whole_group else "one answer"
                raise RolloutTimeout(
                    f"took more than {self._timeout_s:g} s for {what}. Make it quicker or raise "
                    "reward.timeout_s; an async function must await whatever it waits for."
                ) from None


def _last_turn(episode: Episode) -> IntArray:
    """Return the tokens that the policy drew last, without a break between them."""
    places = np.flatnonzero(episode.drawn)
    breaks = np.flatnonzero(np.diff(places) > 1)
    return episode.token_ids[places[breaks[-1] + 1 :] if len(breaks) else places]


class _about:
    """Add function and prompt to the message of a RolloutError raised inside."""

    def __init__(self, name: str, prompt: Prompt) -> None:
        text = prompt.text if len(prompt.text) <= 60 else prompt.text[:57] + "..."
        self._head = f"reward {name} on prompt {prompt.prompt_id} ({text!r})"

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: Any, error: BaseException | None, _: object) -> None:
        if isinstance(error, RolloutError):
            raise type(error)(f"{self._head} {error}") from error.__cause__


def _one_each(results: Any, count: int) -> list[Any]:
    """Return a whole group's results as a list; refuse a set, which has no order."""
    try:
        listed = None if isinstance(results, str | bytes | Mapping | Set) else list(results)
    except TypeError:
        listed = None
    if listed is None or len(listed) != count:
        given = cited(results) if listed is None else f"{len(listed)} results"
        raise RefusedScore(
            f"gave {given} for {count} answers. A function of `completions` or `group` must give "
            "one result for each, in order."
        )
    return listed


def is_async(function: RewardFunction) -> bool:
    """Return whether calling the function returns a coroutine."""
    return any(map(inspect.iscoroutinefunction, (function, type(function).__call__)))


def make_scorer(
    section: RewardSection,
    decode: Callable[[IntArray], str],
    prompts: Iterable[Prompt] = (),
    of_task: Sequence[RewardFunction] = (),
) -> RewardScorer:
    """Make the configured scorer.

    Args:
        section: names the functions.
        decode: turns drawn tokens into text without special tokens.
        prompts: samples, for whose columns the functions may ask.
        of_task: a task's functions; reward.function adds to them if it is set.

    Raises ConfigError if a function is unknown or cannot be called.
    """
    judges = [Judge(function=f, name=_name_of(f), setting="the task's reward") for f in of_task]
    if not of_task or section.function is not None:
        judges += [
            Judge(function=find_reward(name), name=name, weight=weight)
            for name, weight in section.weights.items()
        ]
    names = [judge.short_name for judge in judges]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise ConfigError(
            f"reward.function has two functions named {twice[0]!r}: their parts would be one "
            "metric. Rename one of them."
        )
    scorer = RewardScorer(
        judges,
        decode,
        timeout_s=section.timeout_s,
        threads=section.threads,
        taken=frozenset() if section.model is None else frozenset({MODEL}),
    )
    scorer.check(prompts)
    return scorer


def _name_of(function: RewardFunction) -> str:
    """Return a function's own name, that of its class if it has none."""
    return str(getattr(function, "__name__", type(function).__name__))
