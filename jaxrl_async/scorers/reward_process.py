"""Reward functions in separate processes, ended at their time limit. Needs no JAX.

    rewards' thread ──call (codec)──> process: load the function, call it ──Scores──> the thread
                                         │ longer than reward.timeout_s
                                         └─ ended by SIGKILL; the next call starts another

A regular expression that backtracks, or any other C call that keeps Python's lock, stops all
threads of its process, signals included. With a separate process that does not stop the run.
"""

import asyncio
import signal
import struct
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jaxrl_async import codec
from jaxrl_async.away import asked_wait_s, away_in
from jaxrl_async.config.userfile import end_loading
from jaxrl_async.errors import Away, RefusedScore, RolloutError
from jaxrl_async.scorers.process_pool import ProcessPool, close_all
from jaxrl_async.scorers.reward_arguments import reward_arguments_of
from jaxrl_async.scorers.reward_call import RewardCall, called, scores_of
from jaxrl_async.tasks.function_source import FunctionSource, load_function
from jaxrl_async.tasks.user_process import UserProcess, serve_requests
from jaxrl_async.tasks.usercode import TooLate, describe_error
from jaxrl_async.types import Score

LOAD_S = 300.0
"""Timeout for starting a process and loading a function's file, seconds."""
LONGER_S = 5.0
"""Time after a call's limit at which a process whose run was killed ends itself, seconds."""
LENGTH = struct.Struct("<Q")


class RewardProcesses:
    """At most `most` processes that call reward functions. For any thread."""

    def __init__(self, most: int) -> None:
        """Start none yet."""
        end_loading()
        self._pool = ProcessPool([_Process() for _ in range(most)])
        weakref.finalize(self, close_all, self._pool.free)

    def ask(
        self, source: FunctionSource, call: RewardCall, timeout_s: float
    ) -> tuple[list[Score | None], list[tuple[str, float]]]:
        """Return the function's result for each episode, and the metrics that it logged.

        Raises TooLate after timeout_s, RolloutError if the function raised or ended its process.
        """
        with self._pool.one() as process:
            return process.ask(source, call, timeout_s)

    def close(self) -> None:
        """End the idle processes; each restarts when it is needed."""
        self._pool.close()


class _Process:
    """One process, started when first needed and restarted after it ended. One thread at a time."""

    def __init__(self) -> None:
        self._process = UserProcess("jaxrl_async.scorers.reward_process")
        self._loaded: set[FunctionSource] = set()

    def ask(self, source: FunctionSource, call: RewardCall, timeout_s: float) -> Any:
        where = {"module": source.module, "file": source.file, "name": source.name}
        try:
            request = _packed({"source": where, "call": call, "timeout_s": timeout_s})
        except (TypeError, ValueError, RecursionError) as error:
            raise RefusedScore(
                f"cannot be called in a process (reward.processes): {error}. Give columns of plain "
                "values, lists, mappings with text keys, and arrays."
            ) from error
        if source not in self._loaded:
            try:
                self._exchange(_packed({"source": where, "call": None}), LOAD_S)
            except TooLate:
                raise RolloutError(
                    f"was not loaded from {source.file} within {LOAD_S:g} s. See what the file "
                    "does when it is imported."
                ) from None
            self._loaded.add(source)
        reply = self._exchange(request, timeout_s)
        logged = [(str(name), float(value)) for name, value in reply["logged"]]
        return list(reply["scores"]), logged

    def close(self) -> None:
        """End the process and everything that it has started. Idempotent."""
        self._loaded.clear()
        self._process.close()

    def _exchange(self, request: bytes, timeout_s: float) -> Mapping[str, Any]:
        try:
            reply = codec.loads(memoryview(self._process.exchange(request, timeout_s)))
        except BaseException:
            self._loaded.clear()  # the process has ended
            raise
        if "refused" in reply:
            raise RefusedScore(reply["refused"])
        if "away" in reply:
            raise Away(reply["away"], reply["wait_s"])
        if "raised" in reply:
            raise RolloutError(reply["raised"])
        return reply


def _packed(message: Mapping[str, object]) -> bytes:
    return codec.dumps(_plain(message)).tobytes()


def _plain(message: Mapping[str, object]) -> Mapping[str, Any]:
    """Return a message with its call, if it has one, as a mapping of carriers."""
    call = message.get("call")
    if call is None:
        return message
    return {**message, "call": {name: getattr(call, name) for name in CALL_FIELDS}}


CALL_FIELDS = ("prompt", "episodes", "texts", "last_texts", "asks", "step", "max_steps")


# ---- in the process


def reply_to(request: bytes) -> bytes:
    """Load a function and call it, as another process asked for."""
    return _packed(_replied(codec.loads(memoryview(request))))


def _replied(message: Mapping[str, Any]) -> dict[str, Any]:
    logged: list[list[Any]] = []
    try:
        function = load_function(FunctionSource(**message["source"]))
        if message["call"] is None:
            return {"scores": [], "logged": []}
        signal.setitimer(signal.ITIMER_REAL, message["timeout_s"] + LONGER_S)
        call = RewardCall(**message["call"])
        scores = scored(function, call, lambda name, value: logged.append([name, value]))
        return {"scores": scores, "logged": logged}
    except RefusedScore as error:
        return {"refused": str(error)}
    except RolloutError as error:
        return {"raised": str(error)}
    except BaseException as error:  # every exception belongs to the call
        if (away := away_in(error)) is not None:
            return {"away": describe_error(error), "wait_s": asked_wait_s(away)}
        return {"raised": describe_error(error)}
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)


def scored(
    function: Callable[..., object], call: RewardCall, log: Callable[[str, float], None]
) -> Sequence[Score | None]:
    """Call a function, and await its result if needed."""
    arguments = reward_arguments_of(function, "the reward")
    result = called(function, arguments, call, log)
    if isinstance(result, list):
        return result

    async def waited() -> Any:
        return await result

    return scores_of(asyncio.run(waited()), arguments, call)


if __name__ == "__main__":
    serve_requests(reply_to)
