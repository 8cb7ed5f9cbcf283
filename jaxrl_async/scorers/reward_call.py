"""One call of a reward function: its arguments, and its result as Scores. Needs no JAX.

A thread of the run (rewards.py) or a process (reward_process.py) makes the same call.
"""

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from jaxrl_async.data.chat_formats.chat_messages import as_messages
from jaxrl_async.errors import RefusedScore
from jaxrl_async.metrics.metric import part_name
from jaxrl_async.scorers.results import cited, finite, score_of
from jaxrl_async.scorers.reward_arguments import (
    OF_BOTH,
    OF_THE_RUN,
    RewardArguments,
    TrainerState,
    answer_of,
    answers_of,
)
from jaxrl_async.types import Episode, Message, Prompt, Score
from jaxrl_async.user_arguments import copied

QUESTIONS = ("question", "prompt", "messages")
"""Default columns that may hold the question: the first one that exists does."""
Log = Callable[[str, float], None]
"""Called with the name and the value of a metric."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardCall:
    """The input of one call: one answer, or all answers to a prompt."""

    prompt: Prompt
    episodes: tuple[Episode, ...]
    texts: tuple[str, ...]  # what the policy sampled in each
    last_texts: tuple[str, ...]  # the last turn's text, if the episode has messages
    questions: tuple[str, ...] = QUESTIONS  # columns that may hold the question
    step: int = 0  # number of updates of the newest weights
    max_steps: int = 0  # of the run


def call_arguments(
    call: RewardCall, arguments: RewardArguments, log: Log
) -> tuple[list[Any], dict[str, Any]]:
    """Return positional and named arguments. Raises RefusedScore if the record lacks a column."""
    prompt, episodes = call.prompt, call.episodes
    if not arguments.whole_group:
        answers = answer_of(episodes[0], call.texts[0])
    elif arguments.in_lists and asks_in_messages(prompt, call.questions):
        replies = [answer_messages(call, index) for index in range(len(episodes))]
        answers = answers_of(episodes, replies, plain_messages(prompt.messages))
    else:
        answers = answers_of(episodes, call.texts, prompt.text)
        if not arguments.in_lists:
            answers = {"group": answers["group"], "completions": answers["completions"]}
    if arguments.asks_for("messages"):
        conversations = [conversation(call, index) for index in range(len(episodes))]
        answers[OF_BOTH[0]] = conversations if arguments.whole_group else conversations[0]
    state = TrainerState(global_step=call.step, max_steps=call.max_steps)
    of_run = dict(zip(OF_THE_RUN, (call.step, state, checked_log(log)), strict=True))
    hidden = {n for n in of_run if n in prompt.columns and n not in arguments.names}
    answers |= {name: value for name, value in of_run.items() if name not in hidden}
    return arguments.arguments_of(prompt, answers, len(episodes))


def call_function(
    function: Callable[..., object], arguments: RewardArguments, call: RewardCall, log: Log
) -> Any:
    """Call a function; return a Score or None (it does not apply) for each episode, or an awaitable
    of its result. Raises RefusedScore, and any exception of the function."""
    positional, named = call_arguments(call, arguments, log)
    result = function(*positional, **named)
    return result if inspect.isawaitable(result) else scores_of(result, arguments, call)


async def call_async(
    function: Callable[..., Any], arguments: RewardArguments, call: RewardCall, log: Log
) -> list[Score | None]:
    """Call an async function; otherwise like `call_function`."""
    positional, named = call_arguments(call, arguments, log)
    return scores_of(await function(*positional, **named), arguments, call)


def scores_of(result: object, arguments: RewardArguments, call: RewardCall) -> list[Score | None]:
    """Convert a function's result. Raises RefusedScore."""
    count = len(call.episodes)
    listed = one_each(result, count) if arguments.whole_group else [result]
    pairs = zip(listed, call.episodes, strict=True)
    return [None if result is None else score_of(result, episode) for result, episode in pairs]


def one_each(results: Any, count: int) -> list[Any]:
    """Return a whole group's results as a list; reject a set, which has no order."""
    try:
        listed = None if isinstance(results, str | bytes | Mapping | Set) else list(results)
    except TypeError:
        listed = None
    if listed is None or len(listed) != count:
        result = cited(results) if listed is None else f"{len(listed)} results"
        raise RefusedScore(
            f"gave {result} for {count} answers. A function of `completions` or `group` must give "
            "one result for each, in order."
        )
    return listed


def checked_log(log: Log) -> Log:
    """Return a `log` that accepts any finite number, and makes the name valid for a metric."""

    def log_metric(name: str, value: object) -> None:
        number = finite(value)
        if number is None:
            raise RefusedScore(
                f"logged the metric {name!r} with {cited(value)}. Log a finite number."
            )
        log(part_name(name), number)

    return log_metric


# ---- the conversation


def asks_in_messages(prompt: Prompt, questions: Iterable[str] = QUESTIONS) -> bool:
    """Return whether the record's own prompt is a list of chat messages, or JSON text of one."""
    question = next((v for n in questions if (v := prompt.columns.get(n)) is not None), None)
    return bool(prompt.messages) and isinstance(as_messages(question), list | tuple | np.ndarray)


def plain_messages(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """Return copies of messages as dicts."""
    return [copied(dict(message)) for message in messages]


def answer_messages(call: RewardCall, index: int) -> list[dict[str, Any]]:
    """Return an answer as messages: the policy's, with its tool calls, and the replies to it."""
    episode = call.episodes[index]
    if not episode.messages:
        return [{"role": "assistant", "content": call.texts[index]}]
    cut_off = {"content": call.last_texts[index]}
    messages = [
        m if "content" in m or "tool_calls" in m else {**m, **cut_off} for m in episode.messages
    ]
    return plain_messages(messages)


def conversation(call: RewardCall, index: int) -> list[dict[str, Any]]:
    """Return the whole conversation of an answer, the prompt included."""
    episode, prompt = call.episodes[index], call.prompt
    opening = episode.opened or prompt.messages or ({"role": "user", "content": prompt.text},)
    return [*plain_messages(opening), *answer_messages(call, index)]


def last_turn(episode: Episode) -> NDArray[np.intp]:
    """Return the positions of the tokens that the policy generated last, without a break between
    them."""
    positions = np.flatnonzero(episode.drawn)
    breaks = np.flatnonzero(np.diff(positions) > 1)
    return positions[breaks[-1] + 1 :] if len(breaks) else positions
