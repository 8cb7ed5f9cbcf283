"""Every error that a user can cause. One base class; each kind is also a standard-library type.

A message says what was wrong, where, and what to do.
"""

import asyncio
import threading


def is_out_of_memory(error: BaseException) -> bool:
    """Whether the host or, as XLA says it, a device had too little memory."""
    return isinstance(error, MemoryError) or "RESOURCE_EXHAUSTED" in str(error)


def is_the_runs_own_end(error: BaseException) -> bool:
    """Whether an exception that comes out of a user's code is not of its making: the task that runs
    it is cancelled, its coroutine is closed, or the user pressed Ctrl-C in the main thread."""
    if isinstance(error, KeyboardInterrupt):
        return threading.current_thread() is threading.main_thread()
    if not isinstance(error, asyncio.CancelledError | GeneratorExit):
        return False
    try:
        task = asyncio.current_task()
    except RuntimeError:  # no loop runs: a coroutine that is left behind is closed
        return True
    return task is not None and task.cancelling() > 0


class JaxrlError(Exception):
    """Base of all errors raised on purpose by jaxrl_async."""


class ConfigError(JaxrlError, ValueError):
    """The configuration is malformed, out of range, or asks for an impossible combination."""


class DataError(JaxrlError, ValueError):
    """A dataset, record or tokenizer cannot be used as it is."""


class CheckpointError(JaxrlError, OSError):
    """A model directory or a run's checkpoint is missing, torn, or does not fit the policy."""


class EarlierSaveError(CheckpointError):
    """The checkpoint before the one asked for could not be written; that one is under way."""


class MeshError(JaxrlError, ValueError):
    """The mesh asked for does not fit the devices that are there."""


class WeightsError(JaxrlError, RuntimeError):
    """A weight update does not match what the sampler expects, or the probe disagrees."""


class RolloutError(JaxrlError, RuntimeError):
    """A request, an environment or a scorer failed, and the error policy does not forgive it."""


class RolloutTimeout(RolloutError, TimeoutError):
    """An environment or a scorer took longer than its limit."""


class RefusedScore(RolloutError):
    """What a scorer gave is no score of each episode, and asking again would not change that."""


class StalledError(JaxrlError, TimeoutError):
    """The run as a whole made no progress for too long; the message names the part that waits."""


class TrainingError(JaxrlError, ArithmeticError):
    """Training cannot go on: steps in a row were not finite, or no group has anything to teach."""


class ReplayError(JaxrlError, RuntimeError):
    """A run cannot be replayed from a recorded schedule, or has come apart from it."""


class Closed(JaxrlError, RuntimeError):
    """The part was closed while somebody waited on it: the run is stopping."""


class Preempted(JaxrlError, InterruptedError):
    """The run was told to end by SIGTERM; everything is saved, and a resumed run goes on."""


class Stopped(JaxrlError, InterruptedError):
    """The run was told to end by Ctrl-C before there was a policy to write; all else is saved."""


class MissingExtraError(JaxrlError, ImportError):
    """An optional dependency is needed; the message names the extra to install."""
