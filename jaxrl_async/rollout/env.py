"""Environments answer the policy's turns. One is made for each episode and used once."""

import asyncio
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from jaxrl_async.codec import dumps, loads
from jaxrl_async.errors import RolloutError, RolloutTimeout, is_the_runs_own_end
from jaxrl_async.metrics.fault_counts import UnderWay
from jaxrl_async.ports import Clock, Env, Reply, SavesState
from jaxrl_async.types import Completion, Prompt

MakeEnv = Callable[[Prompt], Env]
"""Makes the environment of one episode."""


class SingleTurn:
    """The policy answers once; nothing answers back."""

    def __init__(self, prompt: Prompt) -> None:
        del prompt  # every environment is made from its prompt; this one does not need it

    async def step(self, prompt: Prompt, completion: Completion) -> Reply:
        """End the episode after its first turn."""
        return Reply(token_ids=np.zeros(0, np.int32), done=True)


class GuardedEnvs:
    """A MakeEnv whose environments' replies are timed and checked. Any thread may call `oldest_s`.

    Whatever an environment raises becomes a RolloutError and fails the group. There is no retry:
    the first attempt may have changed the environment.
    """

    def __init__(
        self,
        make_env: MakeEnv,
        *,
        timeout_s: float,
        vocab_size: int,
        count: Callable[[str], None] = lambda name: None,
        clock: Clock = time.monotonic,
    ) -> None:
        """Guard the environments that make_env makes.

        Args:
            make_env: Makes the environment of one episode.
            timeout_s: Longest time for one reply, seconds.
            vocab_size: Token ids of replies must be smaller.
            count: Called with the name of each fault (metrics/fault_counts.py).
            clock: For `oldest_s`.
        """
        self.make_env = make_env  # may be replaced before the run starts
        self._timeout_s, self._vocab_size = timeout_s, vocab_size
        self._count, self._calls = count, UnderWay(clock)

    def __call__(self, prompt: Prompt) -> Env:
        """Make the environment of one episode. Raises RolloutError if it cannot be made."""
        with _blamed(prompt, "cannot be made: its constructor"):
            return _Guarded(self.make_env(prompt), self, prompt)

    def oldest_s(self) -> float:
        """Return the age of the oldest pending reply, seconds; 0 if there is none."""
        return self._calls.oldest_s()

    async def reply(self, env: Env, prompt: Prompt, completion: Completion) -> Reply:
        """Ask `env` for its reply and check it.

        Raises RolloutTimeout if the reply is late, RolloutError if it is not a valid reply or the
        environment raises.
        """
        with _blamed(prompt):
            reply = await self._in_time(env, prompt, completion)
        problem = _problem(reply, self._vocab_size)
        if problem:
            self._count("refused_replies")
            raise RolloutError(f"prompt {prompt.prompt_id}: the environment gave {problem}")
        return reply

    async def _in_time(self, env: Env, prompt: Prompt, completion: Completion) -> Any:
        try:
            with self._calls.one():
                async with asyncio.timeout(self._timeout_s) as limit:
                    return await env.step(prompt, completion)
        except TimeoutError:
            self._count("env_timeouts")
            if not limit.expired():
                raise
            raise RolloutTimeout(
                f"prompt {prompt.prompt_id}: the environment took more than {self._timeout_s:g} s "
                "for one reply. Make it quicker or raise faults.env_timeout_s."
            ) from None


class _Guarded:
    """One environment of GuardedEnvs; it can be saved if the environment can."""

    def __init__(self, env: Env, guard: GuardedEnvs, prompt: Prompt) -> None:
        self._env, self._guard = env, guard
        if isinstance(env, SavesState):
            self.state = lambda: _called(prompt, "state()", env.state)
            self.restore = lambda state: _called(prompt, "restore()", env.restore, state)

    async def step(self, prompt: Prompt, completion: Completion) -> Reply:
        """Return the environment's own reply, checked."""
        return await self._guard.reply(self._env, prompt, completion)


def _called(prompt: Prompt, what: str, method: Callable[..., Any], *args: Any) -> Any:
    with _blamed(prompt, f"cannot be saved: its {what}"):
        return method(*args)


class _blamed:
    """Turn whatever an environment raises inside into a RolloutError that names the prompt.

    A class, since contextlib treats StopIteration specially.
    """

    def __init__(self, prompt: Prompt, what: str = "") -> None:
        self._who = f"prompt {prompt.prompt_id}: the environment {what}".rstrip()

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, where: object) -> None:
        if error is None or isinstance(error, RolloutError) or is_the_runs_own_end(error):
            return
        raised = f"raised {type(error).__name__}: {error}"
        raise RolloutError(f"{self._who} {raised}. Correct it.") from error


def snapshot(env: Env) -> Any:
    """Copy the state of a ports.SavesState environment; None for any other environment.

    Raises RolloutError if the state cannot be saved.
    """
    if not isinstance(env, SavesState):
        return None
    state = env.state()
    try:
        return loads(dumps(state))
    except (TypeError, ValueError, AssertionError, RecursionError) as error:
        raise RolloutError(
            f"an environment's state() gave something that no checkpoint can hold: {error}. It "
            "must give plain values, lists, mappings with text keys, and arrays."
        ) from error


def _problem(reply: Any, vocab_size: int) -> str:
    """Describe what is wrong with a reply and what it must be; "" if it is valid."""
    if not isinstance(reply, Reply):
        return f"{reply!r:.60} ({type(reply).__name__}). It must give a Reply."
    try:
        tokens = np.asarray(reply.token_ids)
    except ValueError:
        return "token_ids of rows of different lengths. They must be one row of token ids."
    if tokens.ndim != 1 or not (np.issubdtype(tokens.dtype, np.integer) or not tokens.size):
        return (
            f"token_ids of shape {tokens.shape} and type {tokens.dtype}. They must be token ids: "
            "one row of integers."
        )
    if strange := [int(i) for i in tokens if not 0 <= i < vocab_size]:
        return (
            f"the token ids {strange[:8]}, {len(strange)} of {tokens.size}, which are not in the "
            f"vocabulary of {vocab_size}. Make them with the policy's own tokenizer."
        )
    if not isinstance(reply.done, bool | np.bool_):
        return f"done={reply.done!r:.60} ({type(reply.done).__name__}). It must be True or False."
    return ""
