"""A request inside the router, and the caller that waits for it. Pure host code."""

import asyncio
import contextlib
import logging
from concurrent.futures import Future, InvalidStateError
from dataclasses import dataclass, field
from typing import Any

from jaxrl_async.errors import RolloutError
from jaxrl_async.types import Completion, Partial, Request

log = logging.getLogger(__name__)

SUSPECT_AFTER = 2
"""Deaths of replicas that had a request on the device, after which it is tried alone."""


@dataclass(slots=True, kw_only=True, eq=False)
class RouterJob:
    """One request, where it is, and its caller's future."""

    request: Request
    begun: Partial | None = None  # where to continue; None: at the prompt
    future: "asyncio.Future[Completion] | Future[Completion]"  # the caller's
    loop: asyncio.AbstractEventLoop | None = None  # the caller's; None: a thread waits
    inner: Future[Completion] | None = None  # the replica's; None: no replica has it
    avoid: int | None = None  # seat whose replica drew a log-prob that is not finite
    died: list[int] = field(default_factory=list)  # seats whose replicas died with it on the device

    @property
    def suspect(self) -> bool:
        """Whether it must be tried alone."""
        return len(self.died) >= SUSPECT_AFTER

    def settle(self, result: Completion | BaseException) -> None:
        """Set the result of the caller's future, on the caller's own loop."""
        if self.loop is None:
            _set(self.future, result)
        else:
            with contextlib.suppress(RuntimeError):  # the loop is closed, and its tasks with it
                self.loop.call_soon_threadsafe(_set, self.future, result)


def job_for_thread(given: Request | Partial) -> RouterJob:
    """Return the job of a caller that is a thread."""
    return _job(given, Future(), None)


def job_for_loop(given: Request | Partial, loop: asyncio.AbstractEventLoop) -> RouterJob:
    """Return the job of a caller on this event loop."""
    return _job(given, loop.create_future(), loop)


def refusal(job: RouterJob, cause: BaseException | None) -> RolloutError:
    """Return the error for a request that is to blame for the deaths of replicas."""
    error = RolloutError(
        f"request {job.request.request_id}: {len(job.died)} samplers died that had it on the "
        f"device, the last with nothing else to do ({cause}). It is not tried again: look at what "
        "it asks."
    )
    error.__cause__ = cause
    return error


def _job(
    given: Request | Partial, future: Any, loop: asyncio.AbstractEventLoop | None
) -> RouterJob:
    if isinstance(given, Partial):
        return RouterJob(request=given.request, begun=given, future=future, loop=loop)
    return RouterJob(request=given, future=future, loop=loop)


def _set(future: Any, result: Completion | BaseException) -> None:
    try:
        if isinstance(result, BaseException):
            future.set_exception(result)
        else:
            future.set_result(result)
    except (InvalidStateError, asyncio.InvalidStateError):  # cancelled meanwhile
        pass
    except BaseException as error:  # SystemExit and the like; the future catches others
        log.error("a callback of a request raised: %r", error, exc_info=error)
