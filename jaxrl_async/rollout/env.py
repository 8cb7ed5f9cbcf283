"""Environments that reply to the policy's turns. Each episode has its own environment."""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import numpy as np

from jaxrl_async.codec import dumps, loads
from jaxrl_async.errors import RolloutError, RolloutTimeout, is_run_ending
from jaxrl_async.metrics.fault_counts import UnderWay
from jaxrl_async.metrics.spans import span
from jaxrl_async.outages import time_limit
from jaxrl_async.ports.rollout import Concludes, Env, Opens, Plays, Reply
from jaxrl_async.ports.run import Clock, SavesState
from jaxrl_async.types import Completion, IntArray, Prompt, Score

T = TypeVar("T")
CLOSE_S = 10.0
"""Timeout of an environment's `close`, seconds; afterwards it is abandoned."""

MakeEnv = Callable[[Prompt], Env]
"""Makes the environment of one episode."""


log = logging.getLogger(__name__)


class SingleTurn:
    """The policy answers once and gets no reply."""

    def __init__(self, prompt: Prompt) -> None:
        del prompt  # not needed; environments are always made from their prompt

    async def step(self, prompt: Prompt, completion: Completion) -> Reply:
        """End the episode after its first turn."""
        return Reply(token_ids=np.zeros(0, np.int32), done=True)


class GuardedEnvs:
    """A MakeEnv that times and checks its environments' replies. `oldest_s` is thread safe.

    Any error of an environment becomes a RolloutError and fails the group. Calls are not retried
    here, because the first attempt may have changed the environment. In an outage, the whole
    episode is played again (rollout.episode.PlayAgain).
    """

    def __init__(
        self,
        make_env: MakeEnv,
        *,
        timeout_s: float,
        vocab_size: int,
        max_length: int | None = None,
        count: Callable[[str], None] = lambda name: None,
        clock: Clock = time.monotonic,
    ) -> None:
        """Guard the environments that make_env makes.

        Args:
            make_env: Makes the environment of one episode.
            timeout_s: Timeout of one reply, seconds.
            vocab_size: Token ids of replies must be smaller.
            max_length: Openings of at least this length leave no room for an answer; they are
                counted, and logged once for each prompt. None: not checked.
            count: Called with the name of each fault (metrics/fault_counts.py).
            clock: For `oldest_s`.
        """
        self.make_env = make_env  # may be replaced before the run starts
        self._timeout_s, self._vocab_size = timeout_s, vocab_size
        self._max_length, self._logged = max_length, set[int]()
        self._count, self._calls = count, UnderWay(clock)

    def __call__(self, prompt: Prompt) -> Env:
        """Make the environment of one episode. Raises RolloutError if it cannot be made."""
        with _environment_errors(prompt, "cannot be made: its constructor"):
            env = self.make_env(prompt)
            return env if isinstance(env, Plays) else _Guarded(env, self, prompt)

    def oldest_s(self) -> float:
        """Return the age of the oldest pending reply, seconds; 0 if no reply is pending."""
        return self._calls.oldest_s()

    async def reply(self, env: Env, prompt: Prompt, completion: Completion) -> Reply:
        """Ask `env` for its reply and check it.

        Raises RolloutTimeout if the reply is late, RolloutError if it is not a valid reply or the
        environment raises.
        """
        with _environment_errors(prompt):
            reply = await self._in_time(env.step(prompt, completion), prompt, "one reply")
        self._refuse(prompt, _problem(reply, self._vocab_size))
        return reply

    async def opening(self, env: Opens, prompt: Prompt) -> IntArray:
        """Ask `env` for the beginning of its episode and check it. Raises as `reply` does."""
        with _environment_errors(prompt):
            tokens = await self._in_time(env.open(prompt), prompt, "the opening")
        problem = _problem_of_tokens(tokens, self._vocab_size, "an opening")
        self._refuse(prompt, problem or ("" if len(tokens) else "an opening without tokens."))
        self._note_length(prompt, len(tokens))
        return np.asarray(tokens, np.int32)

    async def verdict(self, env: Concludes, prompt: Prompt) -> Score | None:
        """Ask `env` for the score of its whole episode. Raises as `reply` does."""
        with _environment_errors(prompt):
            score = await self._in_time(env.verdict(), prompt, "the score")
        invalid = score is not None and not isinstance(score, Score)
        self._refuse(prompt, f"{score!r:.60} as its score. It must be a Score." if invalid else "")
        return score

    async def close(self, env: Concludes, prompt: Prompt) -> None:
        """Let `env` release its resources; errors are counted and logged."""
        try:
            async with asyncio.timeout(CLOSE_S):
                await env.close()
        except BaseException as error:
            if is_run_ending(error):
                raise
            self._count("failed_closes")
            log.warning(
                "prompt %d: the environment's close() failed: %s: %s",
                prompt.prompt_id,
                type(error).__name__,
                error,
            )

    def _note_length(self, prompt: Prompt, length: int) -> None:
        """Count an opening without room for an answer; log the first one of each prompt."""
        if self._max_length is None or length < self._max_length:
            return
        self._count("long_openings")
        if prompt.prompt_id not in self._logged:
            self._logged.add(prompt.prompt_id)
            log.warning(
                "prompt %d: its opening has %d tokens, which leaves no room for an answer in %d: "
                "the episode ends there, cut off. Shorten the record, or raise sampler.max_length.",
                prompt.prompt_id,
                length,
                self._max_length,
            )

    def _refuse(self, prompt: Prompt, problem: str) -> None:
        if problem:
            self._count("refused_replies")
            raise RolloutError(f"prompt {prompt.prompt_id}: the environment gave {problem}")

    async def _in_time(self, work: Awaitable[T], prompt: Prompt, what: str) -> T:
        try:
            with self._calls.one(), span(what, "environment", prompt=prompt.prompt_id):
                async with time_limit(self._timeout_s) as limit:
                    return await work
        except TimeoutError:
            self._count("env_timeouts")
            if not limit.expired():
                raise
            raise RolloutTimeout(
                f"prompt {prompt.prompt_id}: the environment took more than {self._timeout_s:g} s "
                f"for {what}. Make it faster or raise faults.env_timeout_s."
            ) from None


class _Guarded:
    """One environment of GuardedEnvs; it can be saved if the environment can."""

    def __init__(self, env: Env, guard: GuardedEnvs, prompt: Prompt) -> None:
        self._env, self._guard = env, guard
        if isinstance(env, SavesState):
            self.state = lambda: _called(prompt, "state()", env.state)
            self.restore = lambda state: _called(prompt, "restore()", env.restore, state)
        if isinstance(env, Opens):
            self.open = lambda prompt: guard.opening(env, prompt)
        if isinstance(env, Concludes):
            self.verdict = lambda: guard.verdict(env, prompt)
            self.close = lambda: guard.close(env, prompt)

    async def step(self, prompt: Prompt, completion: Completion) -> Reply:
        """Return the environment's reply, checked."""
        return await self._guard.reply(self._env, prompt, completion)


def _called(prompt: Prompt, what: str, method: Callable[..., object], *args: object) -> Any:
    with _environment_errors(prompt, f"cannot be saved: its {what}"):
        return method(*args)


class _environment_errors:
    """Convert any error that an environment raises inside to a RolloutError naming the prompt.

    A class, because contextlib treats StopIteration specially.
    """

    def __init__(self, prompt: Prompt, what: str = "") -> None:
        self._subject = f"prompt {prompt.prompt_id}: the environment {what}".rstrip()

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if error is None or isinstance(error, RolloutError) or is_run_ending(error):
            return
        raised = f"raised {type(error).__name__}: {error}"
        raise RolloutError(f"{self._subject} {raised}. Correct it.") from error


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
            f"an environment's state() gave a value that cannot be saved in a checkpoint: {error}. "
            "It must return plain values, lists, mappings with text keys, and arrays."
        ) from error


def _problem(reply: object, vocab_size: int) -> str:
    """Describe what is wrong with a reply and what it must be; "" if it is valid."""
    if not isinstance(reply, Reply):
        return f"{reply!r:.60} ({type(reply).__name__}). It must be a Reply."
    if problem := _problem_of_tokens(reply.token_ids, vocab_size, "token_ids"):
        return problem
    if reply.opening is not None:
        if problem := _problem_of_tokens(reply.opening, vocab_size, "an opening"):
            return problem
        if not len(reply.opening) or len(reply.token_ids):
            return "an opening without tokens, or token_ids next to it. Return one of them."
    for name, flag in (("done", reply.done), ("cut_off", reply.cut_off)):
        if not isinstance(flag, bool | np.bool_):
            return f"{name}={flag!r:.60} ({type(flag).__name__}). It must be True or False."
    return ""


def _problem_of_tokens(given: object, vocab_size: int, what: str) -> str:
    try:
        tokens = np.asarray(given)
    except ValueError:
        return f"{what} of rows of different lengths. It must be one row of token ids."
    if tokens.ndim != 1 or not (np.issubdtype(tokens.dtype, np.integer) or not tokens.size):
        return (
            f"{what} of shape {tokens.shape} and type {tokens.dtype}. It must be token ids: "
            "one row of integers."
        )
    if unknown := [int(i) for i in tokens if not 0 <= i < vocab_size]:
        return (
            f"the token ids {unknown[:8]}, {len(unknown)} of {tokens.size}, which are not in the "
            f"vocabulary of {vocab_size}. Make them with the policy's own tokenizer."
        )
    return ""
