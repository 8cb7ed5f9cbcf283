"""Define the errors that a user can cause. They share a base; each is also a standard error type.

A message says what was wrong, where, and what to do.
"""

import asyncio
import importlib
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether the host or a device (XLA's RESOURCE_EXHAUSTED) ran out of memory."""
    return isinstance(error, MemoryError) or "RESOURCE_EXHAUSTED" in str(error)


def in_a_line(error: BaseException, most: int = 200) -> str:
    """Return an error's message on one line, cut after `most` characters."""
    return " ".join(str(error).split())[:most]


def with_kind(error: BaseException | None) -> str:
    """Return an error's message, after its type's name unless it is a JaxrlError."""
    kind = "" if isinstance(error, JaxrlError) else f"{type(error).__name__}: "
    return f"{kind}{error}"


def printable(text: str, most: int = 4096) -> str:
    """Return received text in a form that is safe to log: its first `most` characters on one line,
    with spaces in place of line breaks and terminal control characters."""
    return "".join(c if c.isprintable() else " " for c in text[:most])


def shown(text: str, indent: str = "") -> str:
    """Return text of several lines, which may quote received text, in a form that is safe for a
    terminal. Every line is printable; lines after the first get this indent."""
    lines = text.replace("\t", "    ").split("\n")
    return f"\n{indent}".join(printable(line, len(line)) for line in lines)


def is_run_ending(error: BaseException) -> bool:
    """Return whether an exception raised in a user's code comes from the run's end.

    That is the case if the task that runs the code is cancelled, its coroutine is closed, or the
    user pressed Ctrl-C in the main thread.
    """
    if isinstance(error, KeyboardInterrupt):
        return threading.current_thread() is threading.main_thread()
    if not isinstance(error, asyncio.CancelledError | GeneratorExit):
        return False
    try:
        task = asyncio.current_task()
    except RuntimeError:  # no running loop: an abandoned coroutine is being closed
        return True
    return task is not None and task.cancelling() > 0


class JaxrlError(Exception):
    """Base of all errors raised on purpose by jaxrl_async."""


class ConfigError(JaxrlError, ValueError):
    """The configuration is malformed, out of range, or requests an impossible combination."""


class DataError(JaxrlError, ValueError):
    """A dataset, record or tokenizer cannot be used."""


class TextTooLong(DataError):
    """A text is longer than a run's token limit and was not fully encoded."""

    def __init__(self, message: str, token_ids: Any) -> None:
        """token_ids: one more than the limit; they begin as the text's own tokens do."""
        super().__init__(message)
        self.token_ids = token_ids  # [limit + 1] int32


class CheckpointError(JaxrlError, OSError):
    """A model directory or a run's checkpoint is missing, torn, or does not fit the policy."""


class EarlierSaveError(CheckpointError):
    """The previous checkpoint could not be written; the one requested now is being written."""


class FolderLost(JaxrlError, RuntimeError):
    """A run's folder was removed, moved or replaced while the run wrote into it, or another trainer
    has begun to write its checkpoints to the bucket."""


class MeshError(JaxrlError, ValueError):
    """The requested mesh does not fit the available devices."""


class WeightsError(JaxrlError, RuntimeError):
    """A weight update does not match what the sampler expects, or the probe's log-probs differ."""


class RolloutError(JaxrlError, RuntimeError):
    """A request, an environment or a scorer failed, and the error policy does not tolerate it."""


class RequestRefused(RolloutError):
    """A request that a sampler cannot serve."""

    def __init__(self, request: str, field: str, reason: str) -> None:
        """Name what is wrong.

        Args:
            request: the request's name, for the message.
            field: of the request, such as shaping.bias.
            reason: what is wrong with the field, and what to do.
        """
        super().__init__(f"{request}: {field} {reason}")
        self.field, self.reason = field, reason


class SamplersLost(RolloutError):
    """No sampler is left and none can join, so the run ends."""


class SessionEnded(RolloutError, ConnectionAbortedError):
    """A call named a session that has ended or was never opened; the message says why."""


class SessionLimit(RolloutError):
    """A session has reached a limit and may not generate more; the message names the limit."""


class RolloutTimeout(RolloutError, TimeoutError):
    """An environment or a scorer took longer than its limit."""


class Unavailable(RolloutError):
    """A service that plays or judges is temporarily unavailable; a retry may succeed."""

    def __init__(self, message: str, wait_s: float | None = None) -> None:
        """wait_s: the wait that the service asks for, seconds; None: it does not say."""
        super().__init__(message)
        self.wait_s = wait_s


class StartOver(RolloutError):
    """A saved episode cannot continue, since its environment is not in the saved state; it is
    played again from its beginning."""


class RetriesExhausted(RolloutError):
    """A call was retried for long enough during an outage; its episode or group fails. The user's
    code is not at fault."""


class BadEndpoint(RolloutError):
    """An endpoint that judges or plays is configured such that every call fails; the run ends."""


class OutageTooLong(BadEndpoint):
    """A service was unavailable for longer than the run waits for it; the run ends."""


class RefusedScore(RolloutError):
    """A scorer did not return one valid score per episode; a retry would not help."""


class StalledError(JaxrlError, TimeoutError):
    """The run as a whole made no progress for too long; the message names the part that is
    waiting."""


class TrainingError(JaxrlError, ArithmeticError):
    """Training cannot continue: steps in a row were not finite, or no group has a signal."""


class ReplayError(JaxrlError, RuntimeError):
    """A run cannot be replayed from a recorded schedule, or has diverged from it."""


class Disconnected(JaxrlError, ConnectionError):
    """The connection to another process has ended; the message says why."""


class JoinRefused(JaxrlError, ConnectionRefusedError):
    """The other side rejects this process: the secret, protocol or model does not match."""


class WrongSecret(JoinRefused):
    """The two sides have different secrets."""


class Closed(JaxrlError, RuntimeError):
    """A component was closed while a caller waited for it, because the run is stopping."""


class Preempted(JaxrlError, InterruptedError):
    """SIGTERM or SIGHUP ended the run. Everything is saved, and the run can be resumed."""


class Stopped(JaxrlError, InterruptedError):
    """Ctrl-C ended the run before a policy could be written; everything else is saved."""


class RunsFailed(JaxrlError, RuntimeError):
    """One or more of the adapters that were trained in one run failed; the message says which."""


class ProcessEndRefused(JaxrlError, RuntimeError):
    """A user's function tried to end the process while a run was training in it."""


class MissingExtraError(JaxrlError, ImportError):
    """An optional dependency is missing; the message names the extra to install."""


def extra_module(name: str, extra: str, needs: str, instead: str = "") -> Any:
    """Return a module of an extra. Raises MissingExtraError.

    Args:
        name: of the module.
        extra: that installs it.
        needs: what needs which package, for the message.
        instead: what else may be done.
    """
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise MissingExtraError(
            f"{needs} ({error}): pip install 'jaxrl_async[{extra}]'{instead}."
        ) from None


class StopTraining(Exception):
    """Raised by a caller's on_step to end the run after this update, with everything saved."""


@contextmanager
def naming(where: str) -> Iterator[None]:
    """Begin ConfigErrors and DataErrors raised inside with the setting or section that they are
    about; "": they stay as they are."""
    try:
        yield
    except (ConfigError, DataError) as error:
        if not where:
            raise
        raise type(error)(f"{where}: {error}") from error


def exit_code_after(error: Exception) -> int:
    """Print an error that ends a command to stderr; return the exit code: 2 for a ConfigError,
    else 1."""
    if isinstance(error, ConfigError):
        print(f"config error: {error}", file=sys.stderr)
        return 2
    print(f"{type(error).__name__}: {error}", file=sys.stderr)
    return 1
