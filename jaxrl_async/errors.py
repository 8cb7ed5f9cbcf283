"""Define every error that a user can cause, with one base; each is also a standard-library type.

A message says what was wrong, where, and what to do.
"""

import asyncio
import threading
from typing import Any


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether the host or a device (XLA's RESOURCE_EXHAUSTED) ran out of memory."""
    return isinstance(error, MemoryError) or "RESOURCE_EXHAUSTED" in str(error)


def in_a_line(error: BaseException, most: int = 200) -> str:
    """Return an error's own words in one line, `most` characters of them."""
    return " ".join(str(error).split())[:most]


def printable(text: str, most: int = 4096) -> str:
    """Return a text that others sent as it may be logged: its first `most` characters in one line,
    with spaces for all that would begin another line or speak to a terminal."""
    return "".join(c if c.isprintable() else " " for c in text[:most])


def shown(text: str, indent: str = "") -> str:
    """Return a text of several lines, which may quote what others sent, as it may be shown on a
    terminal: each line printable, those after the first with this indent."""
    lines = text.replace("\t", "    ").split("\n")
    return f"\n{indent}".join(printable(line, len(line)) for line in lines)


def is_the_runs_own_end(error: BaseException) -> bool:
    """Return whether an exception raised in a user's code was caused by the run ending instead.

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
    """The configuration is malformed, out of range, or asks for an impossible combination."""


class DataError(JaxrlError, ValueError):
    """A dataset, record or tokenizer cannot be used as it is."""


class TextTooLong(DataError):
    """A text cannot fit the tokens that a run takes, and was not encoded."""

    def __init__(self, message: str, token_ids: Any) -> None:
        """token_ids: one more than fits, which stand for the text; they begin as it does."""
        super().__init__(message)
        self.token_ids = token_ids  # [limit + 1] int32


class CheckpointError(JaxrlError, OSError):
    """A model directory or a run's checkpoint is missing, torn, or does not fit the policy."""


class EarlierSaveError(CheckpointError):
    """The previous checkpoint could not be written; the requested one is being written."""


class FolderLost(JaxrlError, RuntimeError):
    """A run's folder was removed, moved or replaced while the run wrote into it, or another trainer
    has begun to write its checkpoints to the bucket."""


class MeshError(JaxrlError, ValueError):
    """The requested mesh does not fit the available devices."""


class WeightsError(JaxrlError, RuntimeError):
    """A weight update does not match what the sampler expects, or the probe disagrees."""


class RolloutError(JaxrlError, RuntimeError):
    """A request, an environment or a scorer failed, and the error policy does not forgive it."""


class SamplersLost(RolloutError):
    """No sampler is left, and none will come: the run ends."""


class SessionEnded(RolloutError, ConnectionAbortedError):
    """A call came for a session that has ended, or that nobody opened; the message says why."""


class SessionLimit(RolloutError):
    """A session has reached a limit and may not draw any more; the message names the limit."""


class RolloutTimeout(RolloutError, TimeoutError):
    """An environment or a scorer took longer than its limit."""


class Away(RolloutError):
    """A service that plays or judges does not answer for now; the same call may succeed later."""

    def __init__(self, message: str, wait_s: float | None = None) -> None:
        """wait_s: what the service asks for, seconds; None: it does not say."""
        super().__init__(message)
        self.wait_s = wait_s


class GivenUp(RolloutError):
    """A call was made again for long enough in an outage, and what needs it fails. It is no failure
    of the user's code."""


class EndpointMisset(RolloutError):
    """An endpoint that judges or plays will serve no call as it is set up: the run ends."""


class OutageTooLong(EndpointMisset):
    """A service has been away for longer than the run waits for it: the run ends."""


class RefusedScore(RolloutError):
    """A scorer did not return one valid score per episode; a retry would not change that."""


class StalledError(JaxrlError, TimeoutError):
    """The run as a whole made no progress for too long; the message names the part that waits."""


class TrainingError(JaxrlError, ArithmeticError):
    """Training cannot continue: steps in a row were not finite, or no group has a signal."""


class ReplayError(JaxrlError, RuntimeError):
    """A run cannot be replayed from a recorded schedule, or has diverged from it."""


class Disconnected(JaxrlError, ConnectionError):
    """The session with another process has ended; the message says why."""


class JoinRefused(JaxrlError, ConnectionRefusedError):
    """The other side does not let this process join: secret, protocol or model do not fit."""


class WrongSecret(JoinRefused):
    """The two sides have different secrets."""


class Closed(JaxrlError, RuntimeError):
    """The part was closed while a caller waited for it: the run is stopping."""


class Preempted(JaxrlError, InterruptedError):
    """SIGTERM or SIGHUP ended the run; everything is saved, and the run can be resumed."""


class Stopped(JaxrlError, InterruptedError):
    """Ctrl-C ended the run before there was a policy to write; everything else is saved."""


class RunsFailed(JaxrlError, RuntimeError):
    """Of several adapters that learnt in one run one or more failed; the message says which."""


class ProcessEndRefused(JaxrlError, RuntimeError):
    """A function of the user's wanted to end the process while a run was training in it."""


class MissingExtraError(JaxrlError, ImportError):
    """An optional dependency is needed; the message names the extra to install."""


class StopTraining(Exception):
    """Raised by a caller's on_step: end the run after this update, with everything saved."""
