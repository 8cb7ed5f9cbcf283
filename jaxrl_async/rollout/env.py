"""Environments: what answers the policy's turns. One is made for each episode and used once."""

import asyncio
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from jaxrl_async.errors import RolloutError, RolloutTimeout
from jaxrl_async.metrics.faults import UnderWay
from jaxrl_async.ports import Clock, Env, Reply, SavesState
from jaxrl_async.types import Completion, Prompt

MakeEnv = Callable[[Prompt], Env]
"""Makes the environment of one episode."""


class SingleTurn:
    """The policy answers once; nothing answers back."""

    def __init__(self, prompt: Prompt) -> None:
        del prompt  # every environment is made from its prompt; this one needs nothing of it

    async def step(self, prompt: Prompt, completion: Completion) -> Reply:
        """The end, after the first turn."""
        return Reply(token_ids=np.zeros(0, np.int32), done=True)


class GuardedEnvs:
    """A MakeEnv whose environments have a time limit and are checked; `oldest_s` from anywhere.

    No reply is asked for twice: an environment may have changed by the first. The group fails.
    """

    def __init__(
        self,
        make_env: MakeEnv,
        *,
        timeout_s: float,
        count: Callable[[str], None] = lambda name: None,
        clock: Clock = time.monotonic,
    ) -> None:
        """count: told the name of each fault (metrics.faults)."""
        self._make_env, self._timeout_s = make_env, timeout_s
        self._count, self._calls = count, UnderWay(clock)

    def __call__(self, prompt: Prompt) -> Env:
        """The environment of one episode."""
        return _Guarded(self._make_env(prompt), self)

    def oldest_s(self) -> float:
        """How long the longest reply under way has taken, seconds; 0: none."""
        return self._calls.oldest_s()

    async def reply(self, env: Env, prompt: Prompt, completion: Completion) -> Reply:
        """The reply of `env`. Raises RolloutTimeout, RolloutError for what is no reply, and what
        the environment raises."""
        try:
            with self._calls.one():
                async with asyncio.timeout(self._timeout_s) as limit:
                    reply = await env.step(prompt, completion)
        except TimeoutError:
            self._count("env_timeouts")
            if not limit.expired():
                raise
            raise RolloutTimeout(
                f"prompt {prompt.prompt_id}: the environment took more than {self._timeout_s:g} s "
                "for one reply. Make it quicker or raise faults.env_timeout_s."
            ) from None
        wrong = _wrong(reply)
        if wrong:
            self._count("refused_replies")
            raise RolloutError(f"prompt {prompt.prompt_id}: the environment gave {wrong}")
        return reply


class _Guarded:
    """One environment of GuardedEnvs; it can be saved where the environment can."""

    def __init__(self, env: Env, guard: GuardedEnvs) -> None:
        self._env, self._guard = env, guard
        if isinstance(env, SavesState):
            self.state, self.restore = env.state, env.restore

    async def step(self, prompt: Prompt, completion: Completion) -> Reply:
        """As the environment's own."""
        return await self._guard.reply(self._env, prompt, completion)


def _wrong(reply: Any) -> str:
    """What is wrong with a reply and what it must be; empty: nothing."""
    if not isinstance(reply, Reply):
        return f"{reply!r:.60} ({type(reply).__name__}). It must give a Reply."
    tokens = np.asarray(reply.token_ids)
    if tokens.ndim != 1 or not (np.issubdtype(tokens.dtype, np.integer) or not tokens.size):
        return (
            f"token_ids of shape {tokens.shape} and type {tokens.dtype}. They must be token ids: "
            "one row of integers."
        )
    if not isinstance(reply.done, bool | np.bool_):
        return f"done={reply.done!r:.60} ({type(reply.done).__name__}). It must be True or False."
    return ""
