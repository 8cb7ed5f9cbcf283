"""Reward functions in separate processes, ended at their time limit. Needs no JAX.

    rewards' thread ──call (codec)──> process: load the function, call it ──Scores──> the thread
                                         │ longer than reward.timeout_s
                                         └─ ended by SIGKILL; the next call starts another

A regular expression that backtracks, or any other C call that keeps Python's lock, stops all
threads of its process, signals included. With a separate process that does not stop the run.
"""

import asyncio
import functools
import importlib
import importlib.util
import math
import os
import select
import signal
import struct
import subprocess
import sys
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from jaxrl_async import codec
from jaxrl_async.away import asked_wait_s, away_in
from jaxrl_async.config.userfile import LOADING, LoadedSoFar, end_loading, is_own
from jaxrl_async.errors import Away, ConfigError, RefusedScore, RolloutError
from jaxrl_async.keeper import END_S, kept, kill_session
from jaxrl_async.scorers.process_pool import ProcessPool, close_all, import_path
from jaxrl_async.scorers.reward_arguments import reward_arguments_of
from jaxrl_async.scorers.reward_call import RewardCall, called, scores_of
from jaxrl_async.shown_environment import hide_secrets, is_the_runs
from jaxrl_async.tasks.usercode import TooLate, told
from jaxrl_async.types import Score

LOAD_S = 300.0
"""Timeout for starting a process and loading a function's file, seconds."""
LONGER_S = 5.0
"""Time after a call's limit at which a process whose run was killed ends itself, seconds."""
LENGTH = struct.Struct("<Q")


@dataclass(frozen=True, slots=True, kw_only=True)
class FunctionSource:
    """The location at which another process finds a function."""

    module: str
    file: str
    name: str  # within the module, with dots


def source_of(function: Callable[..., Any], name: str, where: str) -> FunctionSource:
    """Return where a function can be loaded from.

    Args:
        function: the function.
        name: as in reward.function; FILE.py:FUNCTION is loaded from there.
        where: for messages.

    Raises ConfigError if another process cannot find it.
    """
    if is_own(name):
        path, _, attribute = name.rpartition(":")
        stem = os.path.splitext(os.path.basename(path))[0]
        return FunctionSource(module=f"user_{stem}", file=os.path.abspath(path), name=attribute)
    module = str(getattr(function, "__module__", None) or "")
    attribute = str(getattr(function, "__qualname__", None) or "")
    made_in = sys.modules.get(module)
    file = str(getattr(made_in, "__file__", None) or "")
    if not os.path.isfile(file) or _found(made_in, attribute) is not function:
        raise ConfigError(
            f"{where} cannot run in a process (reward.processes): it is not defined at a module's "
            "top level, from which another process could load it. Put it into a file, and set "
            "reward.function=FILE.py:FUNCTION, or set reward.processes=0."
        )
    return FunctionSource(module=module, file=os.path.abspath(file), name=attribute)


def _found(module: Any, name: str) -> Any:
    """Return a module's attribute by its dotted name; None if it does not exist."""
    for part in name.split("."):
        module = getattr(module, part, None)
    return module


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
        self._popen: subprocess.Popen[bytes] | None = None
        self._replies = -1
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
        popen, self._popen = self._popen, None
        self._loaded.clear()
        if popen is None:
            return
        popen.terminate()  # its keeper kills it
        with suppress(OSError):
            os.close(self._replies)
        assert popen.stdin is not None
        with suppress(OSError):
            popen.stdin.close()
        try:
            popen.wait(END_S + 1)
        except subprocess.TimeoutExpired:
            popen.kill()
            popen.wait()
        kill_session(popen.pid)

    def _exchange(self, request: bytes, timeout_s: float) -> Mapping[str, Any]:
        if self._popen is None:
            self._start()
        popen = self._popen
        assert popen is not None and popen.stdin is not None
        until = time.monotonic() + timeout_s
        try:
            popen.stdin.write(request)
            popen.stdin.flush()
            (length,) = LENGTH.unpack(self._read(LENGTH.size, until))
            reply = codec.loads(memoryview(self._read(length, until)))
        except TooLate:
            self.close()
            raise
        except (BrokenPipeError, EOFError):
            code = _code_of(popen)
            self.close()
            raise RolloutError(
                f"ended its process, {code}. Correct the function; its output is on the screen."
            ) from None
        if "refused" in reply:
            raise RefusedScore(reply["refused"])
        if "away" in reply:
            raise Away(reply["away"], reply["wait_s"])
        if "raised" in reply:
            raise RolloutError(reply["raised"])
        return reply

    def _start(self) -> None:
        self._replies, to_run = os.pipe()
        try:
            self._popen = subprocess.Popen(
                kept([sys.executable, "-m", "jaxrl_async.scorers.reward_process", str(to_run)]),
                stdin=subprocess.PIPE,
                pass_fds=[to_run],
                env={
                    **{n: value for n, value in os.environ.items() if not is_the_runs(n)},
                    "PYTHONPATH": import_path(),
                    "JAX_PLATFORMS": "cpu",
                    LOADING: "1",
                },
                start_new_session=True,  # Ctrl-C is for the run
            )
        except BaseException:
            os.close(self._replies)
            raise
        finally:
            os.close(to_run)

    def _read(self, count: int, until: float) -> bytes:
        """Return the next bytes of the replies. Raises TooLate, EOFError."""
        data = bytearray()
        replies = select.poll()  # select() does not support descriptors above 1023
        replies.register(self._replies, select.POLLIN)
        while len(data) < count:
            left_s = until - time.monotonic()
            if left_s <= 0 or not replies.poll(math.ceil(1e3 * left_s)):
                raise TooLate
            more = os.read(self._replies, min(count - len(data), 1 << 20))
            if not more:
                raise EOFError
            data += more
        return bytes(data)


def _code_of(popen: "subprocess.Popen[bytes]") -> str:
    try:
        code = popen.wait(1.0)
    except subprocess.TimeoutExpired:
        return "or closed its output"
    return f"with code {code}" if code >= 0 else f"by signal {-code}"


def _packed(message: Mapping[str, Any]) -> bytes:
    data = codec.dumps(_plain(message)).tobytes()
    return LENGTH.pack(len(data)) + data


def _plain(message: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a message with its call, if it has one, as a mapping of carriers."""
    call = message.get("call")
    if call is None:
        return message
    return {**message, "call": {name: getattr(call, name) for name in CALL_FIELDS}}


CALL_FIELDS = ("prompt", "episodes", "texts", "last_texts", "asks", "step", "max_steps")


# ---- in the process


def serve_calls(requests: int, replies: int) -> None:
    """Load functions and call them until there are no more requests.

    Args:
        requests: file descriptor to read from.
        replies: file descriptor to write to.
    """
    with os.fdopen(requests, "rb") as asked, os.fdopen(replies, "wb") as given:
        while len(head := asked.read(LENGTH.size)) == LENGTH.size:
            (length,) = LENGTH.unpack(head)
            reply = _replied(codec.loads(memoryview(asked.read(length))))
            given.write(_packed(reply))
            given.flush()


def _replied(message: Mapping[str, Any]) -> dict[str, Any]:
    logged: list[list[Any]] = []
    try:
        function = loaded(FunctionSource(**message["source"]))
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
            return {"away": told(error), "wait_s": asked_wait_s(away)}
        return {"raised": told(error)}
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)


def scored(
    function: Callable[..., Any], call: RewardCall, log: Callable[[str, float], None]
) -> Sequence[Score | None]:
    """Call a function, and await its result if needed."""
    arguments = reward_arguments_of(function, "the reward")
    result = called(function, arguments, call, log)
    if isinstance(result, list):
        return result

    async def waited() -> Any:
        return await result

    return scores_of(asyncio.run(waited()), arguments, call)


@functools.cache
def loaded(source: FunctionSource) -> Callable[..., Any]:
    """Load a function: by its module's name if that can be imported, otherwise from the file. A
    script is run up to the point where it trains."""
    found = _found(_module_of(source), source.name)
    if not callable(found):
        raise RolloutError(
            f"is not defined by {source.file} before it trains, so no process can load it "
            "(reward.processes). Define it at the top, or put it into a separate file."
        )
    return found


def _module_of(source: FunctionSource) -> Any:
    with suppress(ImportError, ValueError, AttributeError):
        found = None if source.module == "__main__" else importlib.util.find_spec(source.module)
        if found is not None and found.origin and os.path.samefile(found.origin, source.file):
            return importlib.import_module(source.module)
    name = "__mp_main__" if source.module == "__main__" else source.module
    spec = importlib.util.spec_from_file_location(name, source.file)
    if spec is None or spec.loader is None:
        raise RolloutError(f"cannot be loaded from {source.file}, which is not a Python file.")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    with suppress(LoadedSoFar):
        spec.loader.exec_module(module)
    return module


def main() -> None:
    """Serve calls of the process that started this one; nothing else uses the pipes."""
    hide_secrets()  # from programs that a reward runs
    requests, replies = os.dup(0), int(sys.argv[1])
    os.set_inheritable(replies, False)
    with open(os.devnull) as nothing:
        os.dup2(nothing.fileno(), 0)
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    try:
        serve_calls(requests, replies)
    finally:
        sys.stdout.flush()
        os._exit(0)  # threads of the user's file must not keep the process alive


if __name__ == "__main__":
    main()
