"""Token-level episodes over an environment that exchanges messages.

    open:  record ──reset──> messages ──ChatFormat.opening──> tokens
    step:  sampled tokens ──ChatFormat.message──> message ──Environment.step──> messages
           ──ChatFormat.continuation──> tokens to append, or ──opening──> a new context

Generated tokens are never tokenised again: the next turn begins with exactly the tokens of the last
one. If the chat format rewrites history, a new context begins.
"""

import asyncio
import copy
import functools
import json
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np

from jaxrl_async.data.chat_formats.chat_messages import record_tools, with_system_prompt
from jaxrl_async.errors import (
    BadEndpoint,
    DataError,
    RetriesExhausted,
    RolloutError,
    RolloutTimeout,
    StartOver,
    TextTooLong,
    Unavailable,
)
from jaxrl_async.metrics.fault_counts import backoff_s
from jaxrl_async.metrics.metric import part_name
from jaxrl_async.outages import ENVIRONMENT, Outages
from jaxrl_async.ports.rollout import ChatFormat, Reply
from jaxrl_async.rollout.long_replies import chars_of, fitted, long_texts
from jaxrl_async.tasks.task import Environment, Said, Step, Task
from jaxrl_async.tasks.toolbox import Toolbox, ToolLimits, tools_of
from jaxrl_async.tasks.usercode import (
    CallOutcome,
    DaemonThreads,
    Threads,
    TooLate,
    describe_error,
    run_either,
    settled,
)
from jaxrl_async.types import Completion, IntArray, Message, Prompt, Score
from jaxrl_async.unavailable import unavailable_cause
from jaxrl_async.user_arguments import as_json

log = logging.getLogger(__name__)

T = TypeVar("T")
NO_REPLY: IntArray = np.zeros(0, np.int32)
THREAD_CHARS = 2**16
"""Messages with more characters are tokenised in a thread, not on the episodes' event loop."""
TOKENIZER_THREADS = DaemonThreads(4)
"""Threads for tokenisation: few, because each keeps a core or Python's GIL busy."""
LOG_EACH = 100
"""Interval between logged truncated replies, in replies."""
KEPT_OPENINGS = 256
"""Maximum number of openings whose tokens are cached, keyed by their messages."""
DEFAULT_TOOL_LIMITS = ToolLimits()
QUESTION = "prompt"
"""Column in which an environment finds the prompt's text, unless the record has one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatLimits:
    """Limits of an episode of a chat environment."""

    max_turns: int = 16
    timeout_s: float = 600.0  # of one call to a method that is not async, from its start
    retries: int = 2  # of reset, and of the step of repeatable environments
    backoff_s: float = 1.0
    threads: int = 64
    tools: ToolLimits = DEFAULT_TOOL_LIMITS
    most_chars: int = 2**20  # longer replies cannot fit, and are cut to tools.result_chars
    cannot_fit: Callable[[str], bool] = lambda text: False  # the same check for shorter texts


class ChatEnvs:
    """A MakeEnv of one task: creates each episode's environment."""

    def __init__(
        self,
        task: Task,
        chat: ChatFormat,
        limits: ChatLimits,
        count: Callable[[str], None] = lambda name: None,
        outages: Outages | None = None,
    ) -> None:
        """Make it.

        Args:
            task: the task to play.
            chat: the policy's format.
            limits: limits of each episode.
            count: called with the name of each fault (metrics/fault_counts.py).
            outages: Outages of the run; None: a new object.
        """
        self.outages = outages or Outages(count=count)
        self.task, self.chat, self.limits, self.count = task, chat, limits, count
        self.threads = Threads(limits.threads)
        self._long = 0  # number of replies that were cut
        self._opened = functools.lru_cache(KEPT_OPENINGS)(
            lambda written: chat.opening(*json.loads(written))
        )

    def __call__(self, prompt: Prompt) -> "ChatEnv":
        """Return the environment of one episode; the user's environment is made when it starts."""
        return ChatEnv(self)

    def opening(
        self, messages: Sequence[Message], tools: Sequence[Mapping[str, object]]
    ) -> IntArray:
        """Return a conversation's tokens. Cached: members of a group often share an opening."""
        try:
            written = json.dumps([messages, tools])
        except (TypeError, ValueError, RecursionError):  # not plain JSON: no caching
            return self.chat.opening(messages, tools)
        return self._opened(written)

    async def following(
        self,
        before: IntArray,
        new: Sequence[Message],
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]],
    ) -> tuple[IntArray, IntArray | None]:
        """Return the tokens that follow a sequence, and None; or none, and a new context's opening.

        A text that is too long to tokenise is replaced by more tokens than fit.

        Args:
            before: [length] int32, up to the end of the policy's turn.
            new: messages that follow it.
            messages: the whole conversation, for the opening.
            tools: the tools shown to the policy.
        """
        try:
            more = await self.tokens(lambda: self.chat.continuation(before, new, tools), new)
            if more is not None:
                return more, None
            opening = await self.tokens(lambda: self.opening(messages, tools), messages)
        except TextTooLong as error:
            return error.token_ids, None
        return NO_REPLY, opening

    async def tokens(self, work: Callable[[], T], messages: Sequence[Message]) -> T:
        """Run tokenisation work; in a thread if the messages are long."""
        if chars_of(messages) <= THREAD_CHARS:
            return work()
        return await in_thread(work)

    async def reply_messages(self, given: Said, method: str) -> list[Message]:
        """Convert the result of an environment's method to messages. Those that cannot fit are cut,
        counted and logged. Raises RolloutError."""
        limits = self.limits
        messages = messages_of(given, method)
        most, left = limits.most_chars, min(limits.tools.result_chars, limits.most_chars)
        if THREAD_CHARS < chars_of(messages) <= most:
            long = long_texts(messages, THREAD_CHARS)
            if await in_thread(lambda: any(map(limits.cannot_fit, long))):
                most = left
        kept, cut = fitted(messages, most, left)
        if cut:
            self.count("long_replies")
            self._long += 1
            if self._long == 1 or self._long % LOG_EACH == 0:
                log.warning(
                    "the environment's %s gave %d characters, which cannot fit into "
                    "sampler.max_length: %d in the middle are cut (%d such replies so far). Make "
                    "it return less.",
                    method,
                    chars_of(messages),
                    cut,
                    self._long,
                )
        return kept

    async def make(self) -> Environment:
        """Return a new environment of the user's task, with its tools."""
        constructor = self.task.environment or PlainEnvironment
        env: Environment = value_of(await self.call(constructor), "constructor")
        tools = tools_of(env, env.tools, self.task.tools)
        env.run_tools = Toolbox(tools, self.threads, self.limits.tools, self.count, self.outages)
        return env

    async def call(self, function: Callable[..., Any], *given: Any) -> CallOutcome:
        """Call a user's function or method: await it if it is async, else run it in a thread.
        Raises RolloutTimeout."""
        work, limit_s = functools.partial(function, *given), self.limits.timeout_s
        try:
            if getattr(function, "__func__", function) in IMMEDIATE:
                return await settled(CallOutcome(work()), limit_s)
            return await run_either(work, self.threads, limit_s)
        except TooLate:
            name = getattr(function, "__name__", "constructor")
            raise RolloutTimeout(
                f"the environment's {name} took more than {limit_s:g} s. Make it faster or raise "
                "faults.env_timeout_s."
            ) from None

    async def retry(
        self, what: str, attempt: Callable[[], Awaitable[CallOutcome]], prompt: Prompt
    ) -> CallOutcome:
        """Retry a call that raises, at most env.retries times, and in an outage until it is over.
        Timeouts are not retried. what: its name for Outages."""

        outcome = CallOutcome()

        async def attempts() -> CallOutcome:
            nonlocal outcome
            for failures in range(self.limits.retries + 1):
                outcome = await attempt()
                if outcome.error is not None and unavailable_cause(outcome.error) is not None:
                    raise outcome.error
                if outcome.error is None or failures == self.limits.retries:
                    break
                self.count("env_retries")
                wait_s = backoff_s(self.limits.backoff_s, failures)
                log.warning("retrying %s in %.1f s: it raised %r", what, wait_s, outcome.error)
                await asyncio.sleep(wait_s)
            return outcome

        try:
            return await self.outages.until_answered(what, attempts, about=prompt.prompt_id)
        except RetriesExhausted:
            assert outcome.error is not None, "an outage is raised as an error"
            return CallOutcome(error=RetriesExhausted(describe_error(outcome.error)))


async def in_thread(work: Callable[[], T]) -> T:
    """Run work on long texts off the episodes' event loop, in one of a few threads."""
    return await asyncio.get_running_loop().run_in_executor(TOKENIZER_THREADS, work)


class PlainEnvironment(Environment):
    """The default environment of a task: the record's conversation, and the task's tools.

    It has no state.
    """

    def state(self) -> Any:
        """Return an empty state."""
        return {}

    def restore(self, state: object) -> None:
        """Do nothing: there is no state."""


IMMEDIATE = frozenset(
    (PlainEnvironment, Environment.reset, Environment.step, Environment.score, Environment.close)
)
"""Functions that return immediately and need no thread."""


@dataclass(slots=True, kw_only=True)
class _Conversation:
    """A conversation so far."""

    messages: list[Message] = field(default_factory=list)
    token_ids: IntArray = field(default_factory=lambda: NO_REPLY)  # of its current context
    turns: int = 0


class ChatEnv:
    """One episode: ports.Env, Opens, Concludes and SavesState over an Environment."""

    def __init__(self, envs: ChatEnvs) -> None:
        self._envs, self._conversation = envs, _Conversation()
        self._env: Environment | None = None
        self._saved: Any = None  # state of the user's environment, to be restored

    async def open(self, prompt: Prompt) -> IntArray:
        """Return the opening that the environment's reset produces, [opening] int32."""
        record = record_of(prompt)

        async def reset() -> CallOutcome:
            await self.close()
            self._env = await self._envs.make()
            return await self._envs.call(self._env.reset, record)

        opened = value_of(await self._envs.retry("the environment (reset)", reset, prompt), "reset")
        messages = await self._envs.reply_messages(opened, "reset")
        if not messages:
            raise RolloutError(
                f"the environment's reset gave no message for prompt {prompt.prompt_id}, whose "
                f"record has the columns {', '.join(sorted(record)) or 'none'}. Return a text or "
                "messages."
            )
        messages = list(with_system_prompt(messages, self._envs.task.system_prompt))
        tools = self.schemas(prompt)
        envs, has_tools = self._envs, bool(tools) and not self.own_schemas
        try:
            opening = await envs.tokens(lambda: envs.opening(messages, tools), messages)
            omits_tools = has_tools and np.array_equal(
                opening, await envs.tokens(lambda: envs.opening(messages, ()), messages)
            )
        except TextTooLong as error:
            opening, omits_tools = error.token_ids, False
        if omits_tools:
            raise RolloutError(
                f"the chat format does not show the tools in prompt {prompt.prompt_id}'s record. "
                "Set data.chat_format to one that shows tools, or rename the column."
            )
        self._conversation = _Conversation(messages=messages, token_ids=opening)
        return opening

    async def step(self, prompt: Prompt, completion: Completion) -> Reply:
        """Return the reply to the policy's message."""
        env, conversation = await self._ready(), self._conversation
        message = self._envs.chat.message(completion.token_ids, self.schemas(prompt))
        answers = self.own_schemas or not self.schemas(prompt)
        given = await self._step(env, message, prompt) if answers else Step(done=True)
        replies = await self._envs.reply_messages(given.messages, "step")
        turns = conversation.turns + 1
        done, cut_off = given.done or not replies, False
        if not done and turns >= self._envs.limits.max_turns:
            self._envs.count("turn_limits")
            done = cut_off = True
        before = np.concatenate([conversation.token_ids, completion.token_ids]).astype(np.int32)
        messages = [*conversation.messages, message, *([] if done else replies)]
        reply, opening = NO_REPLY, None
        if not done:
            reply, opening = await self._envs.following(
                before, replies, messages, self.schemas(prompt)
            )
        after = np.concatenate([before, reply]) if opening is None else opening
        self._conversation = _Conversation(messages=messages, token_ids=after, turns=turns)
        score = step_score(given)
        return Reply(
            token_ids=reply,
            done=done,
            reward=score.reward,
            parts=score.parts,
            opening=opening,
            cut_off=cut_off,
            opened=() if conversation.turns else as_json(conversation.messages),
            messages=as_json((message, *([] if done else replies))),
        )

    async def verdict(self) -> Score:
        """Return the result of the environment's `score` at the end."""
        env = await self._ready()
        return score_given(value_of(await self._envs.call(env.score), "score"), "score")

    async def close(self) -> None:
        """Close the environment, if it was made."""
        env, self._env = self._env, None
        if env is not None:
            value_of(await self._envs.call(env.close), "close")

    def state(self) -> Any:
        """Return the conversation and the environment's state; None: it has none."""
        own = self._saved
        if self._env is not None:
            save = getattr(self._env, "state", None)
            own = None if save is None else save()
        if own is None or (self._env is not None and not hasattr(self._env, "restore")):
            return None
        return {
            "messages": [dict(message) for message in self._conversation.messages],
            "token_ids": self._conversation.token_ids,
            "turns": self._conversation.turns,
            "own": own,
        }

    def restore(self, state: Any) -> None:
        """Continue from `state`; the user's environment is made at the next step."""
        self._conversation = _Conversation(
            messages=list(state["messages"]),
            token_ids=np.asarray(state["token_ids"], np.int32),
            turns=int(state["turns"]),
        )
        self._saved = state["own"]

    def schemas(self, prompt: Prompt) -> Sequence[Mapping[str, Any]]:
        """Return the tools that the policy may call, as OpenAI function tools; needs a made env.

        A record without a user's environment may define tools in a column `tools`. They are shown,
        but calls get no reply. Raises RolloutError if an entry is not a tool.
        """
        if self.own_schemas or self._envs.task.environment is not None:
            return self.own_schemas
        try:
            return record_tools(prompt.columns)
        except DataError as error:
            raise RolloutError(
                f"prompt {prompt.prompt_id}: {error} Or rename the column."
            ) from None

    @property
    def own_schemas(self) -> Sequence[Mapping[str, Any]]:
        """The tools that the environment runs. Available once it is made."""
        assert self._env is not None, "the environment has been made"
        return tuple(self._env.run_tools.schemas)

    async def _ready(self) -> Environment:
        """Return the user's environment, made and restored if the run was resumed."""
        if self._env is None:
            env = await self._envs.make()
            restore: Any = getattr(env, "restore", None)
            if restore is None:
                raise RolloutError(
                    f"{type(env).__name__} has no restore(state), so a saved episode cannot "
                    "continue. Resume the run with the same environment."
                )
            value_of(await self._envs.call(restore, self._saved), "restore")
            self._env, self._saved = env, None
        return self._env

    async def _step(self, env: Environment, message: Message, prompt: Prompt) -> Step:
        async def attempt() -> CallOutcome:
            return await self._envs.call(env.step, message)

        if env.repeatable:
            outcome = await self._envs.retry("the environment (step)", attempt, prompt)
        else:
            outcome = await attempt()
        given = value_of(outcome, "step")
        self._envs.outages.knows(ENVIRONMENT)
        return given if isinstance(given, Step) else Step(messages=given)


def value_of(outcome: CallOutcome, method: str) -> Any:
    """Return a method's result; convert its error to RolloutError."""
    try:
        return outcome.get()
    except (Unavailable, BadEndpoint, StartOver):
        raise
    except RolloutError as error:
        kind = RetriesExhausted if isinstance(error, RetriesExhausted) else RolloutError
        raise kind(f"the environment's {method} {error}") from error.__cause__


def step_score(step: Step) -> Score:
    """Return a step's reward and parts. The reward defaults to the sum of the parts."""
    parts = score_given(step.parts, "step")
    if step.reward is None:
        return parts
    return Score(reward=score_given(step.reward, "step").reward, parts=parts.parts)


def record_of(prompt: Prompt) -> dict[str, Any]:
    """Return a copy of a prompt's record for `Environment.reset`: its columns, `messages` if there
    are any, and the text as `prompt` unless the record has one. The episode may modify the copy."""
    record = {QUESTION: prompt.text, **copy.deepcopy(dict(prompt.columns))}
    if prompt.messages:
        record["messages"] = copy.deepcopy(list(prompt.messages))
    return record


def messages_of(given: Said, method: str) -> list[Message]:
    """Convert an environment's result to messages; a text becomes a user message. Raises
    RolloutError."""
    if given is None:
        return []
    if isinstance(given, str):
        return [{"role": "user", "content": given}] if given else []
    listed = [given] if isinstance(given, Mapping) else given
    wrong = not isinstance(listed, Sequence) or any(
        not isinstance(m, Mapping) or not isinstance(m.get("role"), str) for m in listed
    )
    if wrong:
        raise RolloutError(
            f"the environment's {method} gave {given!r:.100}. It must return a text, a message "
            "with a role, a list of these, or None."
        )
    return list(listed)


def score_given(given: Any, method: str) -> Score:
    """Convert a number, or a mapping of parts that are summed, to a Score. Raises
    RolloutError."""
    parts = given if isinstance(given, Mapping) else {}
    numbers = list(parts.values()) if isinstance(given, Mapping) else [given]
    try:
        values = [float(number) for number in numbers]
    except (TypeError, ValueError, OverflowError):
        values = [float("nan")]
    if not np.isfinite(values).all():
        raise RolloutError(
            f"the environment's {method} gave {given!r:.100}. It must be a finite number, or a "
            "mapping of names to finite numbers."
        )
    named = {part_name(name): value for name, value in zip(parts, values, strict=False)}
    if len(named) < len(parts):
        raise RolloutError(
            f"the environment's {method} gave the parts {', '.join(map(repr, parts))}, two of "
            "which have the same name as metrics. Rename one of them."
        )
    return Score(reward=float(sum(values)), parts=named)
