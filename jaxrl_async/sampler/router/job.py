"""A request inside the router, and the caller that waits for it. Pure host code."""

import asyncio
import contextlib
import itertools
import logging
from concurrent.futures import Future, InvalidStateError
from dataclasses import dataclass, field
from typing import Any

from jaxrl_async.errors import RolloutError
from jaxrl_async.types import Completion, Partial, Request

log = logging.getLogger(__name__)

SUSPECT_AFTER = 2
"""Deaths of replicas that had a request on the device, after which the request runs alone."""
SUSPECT_AFTER_CUTS = 5
"""Lost connections in a row to replicas that had a request on the device, after which the request
runs alone: it may have killed the processes."""


@dataclass(slots=True, kw_only=True, eq=False)
class RouterJob:
    """One request, its replica, and its caller's future."""

    request: Request
    begun: Partial | None = None  # tokens to continue from; None: from the prompt
    future: "asyncio.Future[Completion] | Future[Completion]"  # the caller's
    loop: asyncio.AbstractEventLoop | None = None  # the caller's; None: a thread waits
    order: int = field(default_factory=itertools.count().__next__)  # of submission
    slot_known: bool = False  # the recording was read for this dealing's slot
    recorded_slot: int | None = None  # its answer
    submitted_at: float = 0.0  # submission, by the router's clock
    dealt_at: float = 0.0  # dealt to the replica that has it
    inner: Future[Completion] | None = None  # the replica's; None: no replica has it
    avoid: int | None = None  # slot whose replica sampled a log-prob that is not finite
    died: list[int] = field(default_factory=list)  # slots whose replicas died with it on the device
    cut_off: int = 0  # connections in a row that were lost with it on the device

    @property
    def suspect(self) -> bool:
        """Whether it must run alone."""
        return len(self.died) >= SUSPECT_AFTER or self.cut_off >= SUSPECT_AFTER_CUTS

    @property
    def to_blame(self) -> bool:
        """Whether it was a suspect before its replica's end. If it ran alone, it was the cause."""
        return len(self.died) > SUSPECT_AFTER or self.cut_off > SUSPECT_AFTER_CUTS

    def moved(self, partial: Partial | None) -> None:
        """Record that a replica left and handed it back with its sampled tokens; None: it had
        none."""
        self.cut_off = 0
        self.begun = self.begun if partial is None else partial

    def settle(self, result: Completion | BaseException) -> None:
        """Set the result of the caller's future, on the caller's own loop."""
        if self.loop is None:
            fulfil(self.future, result)
        else:
            with contextlib.suppress(RuntimeError):  # the loop and its tasks are closed
                self.loop.call_soon_threadsafe(fulfil, self.future, result)


def job_for_thread(given: Request | Partial) -> RouterJob:
    """Return the job of a caller that is a thread."""
    return _job(given, Future(), None)


def job_for_loop(given: Request | Partial, loop: asyncio.AbstractEventLoop) -> RouterJob:
    """Return the job of a caller on this event loop."""
    return _job(given, loop.create_future(), loop)


def refusal(job: RouterJob, cause: BaseException | None) -> RolloutError:
    """Return the error for a request that caused the deaths of replicas."""
    ends = f"{len(job.died)} samplers died with it on the device"
    if job.cut_off > SUSPECT_AFTER_CUTS:
        ends = f"the connections to {job.cut_off} samplers in a row were lost with it on the device"
    error = RolloutError(
        f"request {job.request.request_id}: {ends}, the last without any other request ({cause}). "
        "It is not retried: check the request."
    )
    error.__cause__ = cause
    return error


def _job(
    given: Request | Partial, future: Any, loop: asyncio.AbstractEventLoop | None
) -> RouterJob:
    if isinstance(given, Partial):
        return RouterJob(request=given.request, begun=given, future=future, loop=loop)
    return RouterJob(request=given, future=future, loop=loop)


def fulfil(future: Any, result: Any) -> None:
    """Set a future's result, or the exception given in its place, unless it is cancelled."""
    try:
        if isinstance(result, BaseException):
            future.set_exception(result)
        else:
            future.set_result(result)
    except (InvalidStateError, asyncio.InvalidStateError):  # cancelled meanwhile
        pass
    except BaseException as error:  # SystemExit and the like; the future catches others
        log.error("a callback of a request raised: %r", error, exc_info=error)
