"""Rewards: functions on text that say how good an answer is. Needs no JAX.

A reward is `reward(prompt: str, completion: str, reference: str) -> float | Mapping[str, float]`;
of a mapping, the sum of the parts is the reward. Built-ins by name, your own as FILE.py:FUNCTION.
"""

import asyncio
import contextlib
import inspect
import math
import re
import threading
from collections.abc import Callable, Mapping
from decimal import Decimal
from difflib import get_close_matches
from numbers import Real
from typing import TypeVar

from jaxrl_async.config.schema import Reward
from jaxrl_async.config.userfile import is_own, load_function
from jaxrl_async.errors import ConfigError, RolloutError, RolloutTimeout
from jaxrl_async.types import Episode, IntArray, Prompt, Score

RewardFunction = Callable[[str, str, str], float | Mapping[str, float]]

T = TypeVar("T")

MAX_STUCK = 64
"""Threads of functions that never came back, at most: a thread cannot be stopped."""

NUMBER = re.compile(r"-?\$?[0-9][0-9,]*(?:\.[0-9]+)?|-?\$?\.[0-9]+")


def exact(prompt: str, completion: str, reference: str) -> float:
    """1 where what follows the last '#' (all of it without one) is the reference, spaces aside."""
    return float(completion.rpartition("#")[2].strip() == reference.strip())


def gsm8k(prompt: str, completion: str, reference: str) -> float:
    """1 where the final number is the reference's: the first after the last '####', else the last.

    Commas and dollar signs are left out; 18, 18.0 and $18 are the same number. The format is that
    of Cobbe et al. 2021 (arXiv:2110.14168).
    """
    right, given = final_number(reference), final_number(completion)
    return float(right is not None and given == right)


def final_number(text: str) -> Decimal | None:
    """The number that a worked answer ends with; None without one."""
    _, marker, tail = text.rpartition("####")
    found = NUMBER.findall(tail)
    if not found:
        return None
    number = found[0] if marker else found[-1]
    return Decimal(number.replace(",", "").replace("$", ""))


REWARDS: dict[str, RewardFunction] = {"exact": exact, "gsm8k": gsm8k}


def find_reward(name: str) -> RewardFunction:
    """The built-in reward of that name, or the function in FILE.py:FUNCTION. Raises ConfigError."""
    if name in REWARDS:
        return REWARDS[name]
    if is_own(name):
        function = load_function(name, "reward.function")
        _check_signature(function, f"reward.function = {name!r}")
        return function
    near = get_close_matches(name, REWARDS, n=1)
    hint = f"did you mean {near[0]!r}? " if near else ""
    raise ConfigError(
        f"reward.function = {name!r} is unknown; {hint}Known: {', '.join(sorted(REWARDS))}, "
        "or your own as FILE.py:FUNCTION."
    )


def _check_signature(function: Callable[..., object], where: str) -> None:
    if inspect.iscoroutinefunction(function):
        raise ConfigError(
            f"{where} is async. Make it a plain function: it runs in a thread of its own."
        )
    try:
        inspect.signature(function).bind("", "", "")
    except (TypeError, ValueError) as error:
        raise ConfigError(
            f"{where} cannot be called as reward(prompt, completion, reference): {error}."
        ) from None


class RewardScorer:
    """ports.Scorer over a reward function: decodes what the policy drew, calls, checks.

    A user's function runs in a daemon thread, so that one that hangs costs `timeout_s` and not the
    run. Built-ins are quick and run where they are called.
    """

    def __init__(
        self,
        function: RewardFunction,
        decode: Callable[[IntArray], str],
        *,
        timeout_s: float,
        name: str = "",
    ) -> None:
        """`decode` turns drawn tokens into text without special tokens."""
        self._function = function
        self._decode = decode
        self._timeout_s = timeout_s
        self._name = name or getattr(function, "__name__", "reward")
        self._quick = function in REWARDS.values()
        self._stuck: list[threading.Thread] = []  # took too long and may still run

    async def __call__(self, episodes: tuple[Episode, ...], prompt: Prompt) -> tuple[Score, ...]:
        """One score per episode, of all that the policy drew in it.

        Raises RolloutError naming the prompt where the function fails, gives no finite number, or
        takes the group more than timeout_s.
        """
        if self._quick:
            return self._score(episodes, prompt)
        self._stuck = [thread for thread in self._stuck if thread.is_alive()]
        if len(self._stuck) >= MAX_STUCK:
            raise RolloutError(
                f"{self._about(prompt)}: {len(self._stuck)} earlier calls have not come back, and "
                "no further one is begun. Give what the function waits for a time limit."
            )
        future, thread = _in_daemon_thread(lambda: self._score(episodes, prompt))
        try:
            return await asyncio.wait_for(future, self._timeout_s)
        except TimeoutError:
            self._stuck.append(thread)
            raise RolloutTimeout(
                f"{self._about(prompt)} took more than {self._timeout_s:g} s for a group of "
                f"{len(episodes)}. Make it quicker or raise reward.timeout_s."
            ) from None

    def _score(self, episodes: tuple[Episode, ...], prompt: Prompt) -> tuple[Score, ...]:
        return tuple(self._judge(self._decode(e.token_ids[e.drawn]), prompt) for e in episodes)

    def _judge(self, completion: str, prompt: Prompt) -> Score:
        try:
            result = self._function(prompt.text, completion, prompt.reference)
        except (Exception, SystemExit) as error:
            raise RolloutError(
                f"{self._about(prompt)} raised {type(error).__name__}: {error}. "
                "Correct the function."
            ) from error
        if isinstance(result, Mapping):
            parts = {
                str(name): self._number(part, prompt, f"part {name!r}")
                for name, part in result.items()
            }
            return Score(reward=math.fsum(parts.values()), parts=parts)
        return Score(reward=self._number(result, prompt, "a reward"))

    def _number(self, value: object, prompt: Prompt, what: str) -> float:
        if not isinstance(value, Real) or not math.isfinite(value):
            raise RolloutError(
                f"{self._about(prompt)} gave {what} of {value!r} ({type(value).__name__}). It must "
                "give a finite number, or a mapping of names to finite numbers."
            )
        return float(value)

    def _about(self, prompt: Prompt) -> str:
        text = prompt.text if len(prompt.text) <= 60 else prompt.text[:57] + "..."
        return f"reward {self._name} on prompt {prompt.prompt_id} ({text!r})"


def make_scorer(section: Reward, decode: Callable[[IntArray], str]) -> RewardScorer:
    """The scorer that the configuration asks for. Raises ConfigError."""
    function = find_reward(section.function)
    return RewardScorer(function, decode, timeout_s=section.timeout_s, name=section.function)


def _in_daemon_thread(work: Callable[[], T]) -> tuple["asyncio.Future[T]", threading.Thread]:
    """The result of `work`, from a thread that nobody waits for when the process ends."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[T] = loop.create_future()

    def settle(result: T | None, error: BaseException | None) -> None:
        if future.done():
            return
        if error is not None:
            future.set_exception(error)
        else:
            future.set_result(result)  # type: ignore[arg-type]

    def target() -> None:
        result, failure = None, None
        try:
            result = work()
        except BaseException as error:
            failure = error
        with contextlib.suppress(RuntimeError):  # the loop has ended: nobody waits any more
            loop.call_soon_threadsafe(settle, result, failure)

    thread = threading.Thread(target=target, name="reward", daemon=True)
    thread.start()
    return future, thread
