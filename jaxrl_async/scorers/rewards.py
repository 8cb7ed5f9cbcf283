"""Score answers with reward functions, built-in or the user's. Needs no JAX.

group ──> text ──> each function ──> its results ──> Scores ──> weighted sums
                   (one call for each answer, or one for all; reward_call.py: the call,
                    reward_arguments.py: its arguments, results.py: its result,
                    usercode.py: its thread, reward_process.py: its process)

Built-ins are given by name (graders.py), user functions as FILE.py:FUNCTION.
"""

import functools
import inspect
import logging
import math
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from difflib import get_close_matches
from typing import TYPE_CHECKING, Any

import numpy as np

from jaxrl_async.config.schema import RewardSection
from jaxrl_async.config.userfile import is_own, load_function
from jaxrl_async.errors import ConfigError, RefusedScore, RolloutError, RolloutTimeout, Unavailable
from jaxrl_async.later import Later
from jaxrl_async.scorers.answers import opened_thinking
from jaxrl_async.scorers.graders import exact, gsm8k, read_answer
from jaxrl_async.scorers.graders import math as same_math
from jaxrl_async.scorers.results import MODEL, added, distinct_parts
from jaxrl_async.scorers.reward_arguments import RewardArguments, reward_arguments_of
from jaxrl_async.scorers.reward_call import (
    QUESTIONS,
    Log,
    RewardCall,
    call_async,
    call_function,
    last_turn,
    scores_of,
)
from jaxrl_async.tasks.usercode import CallOutcome, Threads, TooLate, run_async, side_by_side
from jaxrl_async.types import Episode, IntArray, Prompt, Score

if TYPE_CHECKING:
    from jaxrl_async.scorers import reward_process
    from jaxrl_async.tasks import function_source
else:
    function_source = Later("jaxrl_async.tasks.function_source")
    reward_process = Later("jaxrl_async.scorers.reward_process")

log = logging.getLogger(__name__)

RewardFunction = Callable[..., Any]
"""Returns a number, a mapping of parts or a Score (results.py); for a group, a list of them."""

REWARDS: dict[str, RewardFunction] = {"exact": exact, "gsm8k": gsm8k, "math": same_math}
QUICK = (exact, gsm8k)
"""Built-ins that run on the caller's thread."""
OPENING_TOKENS = 16
"""Number of tokens before an answer in which the prompt may open its thinking."""


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
        "or your own function as FILE.py:FUNCTION."
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Judge:
    """One reward function, with its weight."""

    function: RewardFunction
    name: str  # as in reward.function
    weight: float = 1.0
    setting: str = "reward.function"  # the setting that names it

    @property
    def short_name(self) -> str:
        """Name of the part for a plain number: FUNCTION of FILE.py:FUNCTION."""
        return self.name.rpartition(":")[2]

    @property
    def where(self) -> str:
        """The setting, for the start of messages."""
        return f"{self.setting} = {self.name!r}"


class RewardScorer:
    """ports.Scorer over reward functions: decodes generated tokens, calls, checks, adds up."""

    def __init__(
        self,
        judges: Sequence[Judge],
        decode: Callable[[IntArray], str],
        *,
        timeout_s: float,
        threads: int = 16,
        processes: int = 0,
        taken: Set[str] = frozenset(),
        alone: bool = True,
        questions: tuple[str, ...] = QUESTIONS,
        max_steps: int = 0,
        marks: Mapping[int, str] | None = None,
    ) -> None:
        """Create a scorer of these functions, which must have distinct short names.

        Args:
            judges: The functions with their weights.
            decode: Converts generated tokens to text without special tokens.
            timeout_s: Timeout of one call, seconds.
            threads: Maximum threads for functions that are not async.
            processes: Maximum processes for user functions that are not async; 0: threads.
            taken: Names of parts that other scorers provide.
            alone: Nothing else rewards an answer to which no function applies.
            questions: Columns that may hold a record's question; the first one that exists does.
            max_steps: Updates of the whole run.
            marks: Text of the special tokens that are thinking marks, by id; the built-in
                functions see them, although `decode` leaves them out.

        Raises ConfigError if a function cannot be called, or no process could load it.
        """
        self._judges = [
            (judge, reward_arguments_of(judge.function, judge.where)) for judge in judges
        ]
        self._decode, self._timeout_s, self._threads = decode, timeout_s, Threads(threads)
        self._marks = dict(marks or {})
        self._taken, self._alone = taken, alone
        self._questions, self._max_steps = questions, max_steps
        self.version: Callable[[], int] = lambda: 0  # replaced when a run begins
        self._sources: dict[str, function_source.FunctionSource] = {}
        if processes:
            self._processes = reward_process.RewardProcesses(processes)
            self._askers = Threads(processes, replaced=False)  # a process ends its calls itself
            self._sources = {
                judge.name: function_source.source_of(judge.function, judge.name, judge.where)
                for judge in judges
                if judge.function not in REWARDS.values() and not is_async(judge.function)
            }

    def check(self, prompts: Iterable[Prompt]) -> None:
        """Raise ConfigError if a function asks for a column that none of these prompts has."""
        prompts = list(prompts)
        for judge, arguments in self._judges:
            arguments.check(prompts, judge.where)

    def close(self) -> None:
        """End the processes, if any, and call `close` of the functions that have it. They are used
        again if the run needs them again."""
        if self._sources:
            self._processes.close()
        for judge, _ in self._judges:
            if callable(close := getattr(judge.function, "close", None)):
                close()

    def final_answer(self, episode: Episode) -> str | None:
        """Return the final answer in an episode as the first function reads it that can: a built-in
        one, or one with an attribute `final_answer`, a function of the completion. None: no
        function can, or there is no answer."""
        text = _graded_text(episode, self._decode, self._marks)
        for judge, _ in self._judges:
            if judge.function in REWARDS.values():
                return read_answer(judge.function, text)
            if (own := getattr(judge.function, "final_answer", None)) is not None:
                return _own_answer(own, text, judge.where)
        return None

    async def __call__(self, episodes: tuple[Episode, ...], prompt: Prompt) -> tuple[Score, ...]:
        """Score each episode by all tokens that the policy generated in it. Built-in functions use
        only its last turn, which has the answer; tool calls come before it.

        Raises RolloutError, naming function and prompt, if a function fails, returns something
        other than a reward, or times out, and if no function applies to an answer that nothing else
        rewards.
        """
        texts = tuple(self._decode(e.token_ids[e.drawn]) for e in episodes)
        full = RewardCall(
            prompt=prompt,
            episodes=episodes,
            texts=texts,
            last_texts=tuple(
                self._decode(e.token_ids[last_turn(e)]) if e.messages else text
                for e, text in zip(episodes, texts, strict=True)
            ),
            questions=self._questions,
            step=self.version(),
            max_steps=self._max_steps,
        )
        logged: list[dict[str, list[float]]] = [{} for _ in episodes]
        by_judge = await side_by_side(
            self._scores_of(judge, arguments, full, logged) for judge, arguments in self._judges
        )
        names = [judge.short_name for judge, _ in self._judges]
        weights = [judge.weight for judge, _ in self._judges]
        with _about(" and ".join(names), prompt):
            by_function = distinct_parts(dict(zip(names, by_judge, strict=True)), self._taken)
            by_answer = list(zip(*by_function, strict=True))
            if self._alone and any(all(s is None for s in scores) for scores in by_answer):
                raise RefusedScore(
                    "gave None (does not apply) for an answer that nothing else rewards. Give a "
                    "number, or add a function that applies to such records."
                )
            return tuple(
                replace(
                    added(list(zip(weights, scores, strict=True))),
                    logged={name: math.fsum(each) / len(each) for name, each in values.items()},
                )
                for scores, values in zip(by_answer, logged, strict=True)
            )

    async def _scores_of(
        self,
        judge: Judge,
        arguments: RewardArguments,
        full: RewardCall,
        logged: Sequence[dict[str, list[float]]],
    ) -> list[Score | None]:
        """Return one function's Score of each episode; None if it does not apply."""
        if judge.function in REWARDS.values():
            graded = tuple(_graded_text(e, self._decode, self._marks) for e in full.episodes)
            full = replace(full, texts=graded)
        calls = [full] if arguments.whole_group else _each(full)
        logs = [logged] if arguments.whole_group else [[metrics] for metrics in logged]
        results = await side_by_side(
            self._call(judge, arguments, call, _log_to(log))
            for call, log in zip(calls, logs, strict=True)
        )
        return [score for scores in results for score in scores]

    async def _call(
        self, judge: Judge, arguments: RewardArguments, call: RewardCall, log: Log
    ) -> list[Score | None]:
        with _about(judge.name, call.prompt):
            if any(judge.function is quick for quick in QUICK):
                return call_function(judge.function, arguments, call, log)
            try:
                if judge.name in self._sources:
                    return await self._in_process(self._sources[judge.name], call, log)
                work = functools.partial(call_function, judge.function, arguments, call, log)
                if is_async(judge.function):
                    work = functools.partial(call_async, judge.function, arguments, call, log)
                    return list((await run_async(work, self._timeout_s)).get())
                result = (await self._threads.run(work, self._timeout_s)).get()
                if inspect.isawaitable(result):  # a lambda around an async function
                    again = functools.partial(_await_result, result, arguments, call)
                    result = (await run_async(again, self._timeout_s)).get()
                return list(result)
            except TooLate as late:
                what = "the group" if arguments.whole_group else "one answer"
                lock = f" {LOCKED}" if late.overdue_s > LOCKED_S and not self._sources else ""
                raise RolloutTimeout(
                    f"took more than {self._timeout_s:g} s for {what}.{lock} Make it quicker or "
                    "raise reward.timeout_s; an async function must await everything that it waits "
                    "for."
                ) from None

    async def _in_process(
        self, source: "function_source.FunctionSource", call: RewardCall, log: Log
    ) -> list[Score | None]:
        """Return a process's result; the process enforces the timeout."""
        ask = functools.partial(self._processes.ask, source, call, self._timeout_s)
        outcome: CallOutcome = await self._askers.run(
            ask, 2 * reward_process.LOAD_S + self._timeout_s
        )
        if isinstance(outcome.error, TooLate):
            raise outcome.error
        scores, logged = outcome.get()
        for name, value in logged:
            log(name, value)
        return list(scores)


LOCKED_S = 1.0
LOCKED = (
    "It held Python's lock meanwhile, which stopped the whole run, as a backtracking regular "
    "expression does: set reward.processes."
)


async def _await_result(
    result: Awaitable[object], arguments: RewardArguments, call: RewardCall
) -> list[Score | None]:
    return scores_of(await result, arguments, call)


def _each(call: RewardCall) -> list[RewardCall]:
    """Return a call for each answer of a call for all of them."""
    return [
        replace(call, episodes=(episode,), texts=(text,), last_texts=(last,))
        for episode, text, last in zip(call.episodes, call.texts, call.last_texts, strict=True)
    ]


def _log_to(logged: Sequence[dict[str, list[float]]]) -> Log:
    """Return a function that adds a metric's value to these answers' values."""

    def log(name: str, value: float) -> None:
        for values in logged:
            values.setdefault(name, []).append(value)

    return log


def _graded_text(
    episode: Episode, decode: Callable[[IntArray], str], marks: Mapping[int, str]
) -> str:
    """Return the text of the policy's last turn, after the thinking mark at the end of the prompt,
    if any. marks: as in RewardScorer."""

    def text_of(token_ids: IntArray) -> str:
        """Return the text from the last mark on, since the answer cannot be before it."""
        last = next(iter(np.flatnonzero(np.isin(token_ids, [*marks]))[::-1]), None)
        if last is None:
            return decode(token_ids)
        return marks[int(token_ids[last])] + decode(token_ids[last + 1 :])

    turn = last_turn(episode) if episode.num_turns > 1 else np.flatnonzero(episode.drawn)
    text = text_of(episode.token_ids[turn])
    first = int(turn[0]) if len(turn) else 0
    opened = opened_thinking(text_of(episode.token_ids[max(0, first - OPENING_TOKENS) : first]))
    return f"{opened}\n{text}" if opened else text


def _own_answer(read: Callable[[str], object], text: str, where: str) -> str | None:
    """Return the final answer that a user's function reads; None, and a warning, if it fails."""
    try:
        answer = read(text)
    except Exception as error:
        log.warning("%s: final_answer raised %s: %s", where, type(error).__name__, error)
        return None
    return None if answer is None else str(answer)


class _about:
    """Add function and prompt to the message of a RolloutError raised inside."""

    def __init__(self, name: str, prompt: Prompt) -> None:
        text = prompt.text if len(prompt.text) <= 60 else prompt.text[:57] + "..."
        self._head = f"reward {name} on prompt {prompt.prompt_id} ({text!r})"

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, _: object) -> None:
        if isinstance(error, Unavailable):
            raise Unavailable(f"{self._head} {error}", error.wait_s) from error.__cause__
        if isinstance(error, RolloutError):
            raise type(error)(f"{self._head} {error}") from error.__cause__


def is_async(function: RewardFunction) -> bool:
    """Return whether calling the function returns a coroutine."""
    return any(map(inspect.iscoroutinefunction, (function, type(function).__call__)))


def make_scorer(
    section: RewardSection,
    decode: Callable[[IntArray], str],
    prompts: Iterable[Prompt] = (),
    of_task: Sequence[RewardFunction] = (),
    *,
    alone: bool = True,
    questions: tuple[str, ...] = QUESTIONS,
    max_steps: int = 0,
    marks: Mapping[int, str] | None = None,
) -> RewardScorer:
    """Create the configured scorer.

    Args:
        section: names the functions.
        decode: converts generated tokens to text without special tokens.
        prompts: samples, whose columns the functions may ask for.
        of_task: a task's functions; reward.function adds to them if it is set.
        alone: as in RewardScorer, as are questions, max_steps and marks.

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
        processes=section.processes,
        taken=frozenset() if section.model is None else frozenset({MODEL}),
        alone=alone,
        questions=questions,
        max_steps=max_steps,
        marks=marks,
    )
    scorer.check(prompts)
    return scorer


def _name_of(function: RewardFunction) -> str:
    """Return a function's own name, or its class's name if it has none."""
    return str(getattr(function, "__name__", type(function).__name__))
