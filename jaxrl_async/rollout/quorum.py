"""Waiting for concurrent work: for all, for the first few, or for a minimum if others fail."""

import asyncio
from collections.abc import Callable, Coroutine, Iterable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from jaxrl_async.errors import BadEndpoint, Closed, RolloutError

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Quota:
    """Numbers of members that complete a group."""

    wanted: int  # the group is complete once this many have ended
    least: int  # minimum with which a group continues if others fail, at most `wanted`

    @staticmethod
    def of(members: int, *, group_size: int, least: int | None) -> "Quota":
        """Return the quota of a group.

        Args:
            members: number of members that were started.
            group_size: number of members in a whole group.
            least: minimum with which it continues; None: only with a whole group.
        """
        wanted = min(group_size, members)
        return Quota(wanted=wanted, least=min(least or wanted, wanted))


async def first_ended(
    work: Sequence[Coroutine[None, None, T]],
    quota: Quota,
    leave_out: Callable[[int, BaseException | None], None],
) -> tuple[T, ...]:
    """Return the results of the first `wanted` that end, in the order of `work`; end the others.

    If several end in one round of the event loop, they count in the order in which they ended.

    Args:
        work: coroutines to run concurrently.
        quota: number of needed results, and the minimum if others fail.
        leave_out: called with the index in `work` of each dropped item and its exception; None: it
            was not needed. Called before it is cancelled.

    Raises the first exception once `least` can no longer be reached; Closed and BadEndpoint
    immediately. No task is left running in any case.
    """
    tasks = [asyncio.ensure_future(one) for one in work]
    indices = {task: index for index, task in enumerate(tasks)}
    ended: list[asyncio.Task[T]] = []  # in order of completion
    for task in tasks:
        task.add_done_callback(ended.append)
    kept: list[asyncio.Task[T]] = []
    first: BaseException | None = None
    seen = 0
    try:
        while len(kept) < quota.wanted and seen < len(tasks):
            waiting = [task for task in tasks if task not in ended]
            if waiting and seen == len(ended):
                await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            task, seen = ended[seen], seen + 1
            error = _error_of(task)
            if error is None:
                kept.append(task)
                continue
            first = first or error
            if isinstance(error, Closed | BadEndpoint):
                raise error
            if len(kept) + len(tasks) - seen < quota.least:
                raise first
            leave_out(indices[task], error)
        if len(kept) < quota.least:  # a resumed group with fewer members than are now needed
            raise first or RolloutError(f"{len(tasks)} members are left, fewer than {quota.least}.")
        for task in [*ended[seen:], *(t for t in tasks if t not in ended)]:
            leave_out(indices[task], _error_of(task) if task in ended else None)
        return tuple(task.result() for task in sorted(kept, key=indices.__getitem__))
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def all_or_none(work: Iterable[Coroutine[None, None, T]]) -> tuple[T, ...]:
    """Return all results in order, or raise the first exception after ending all other work."""
    tasks = [asyncio.ensure_future(one) for one in work]
    try:
        return tuple(await asyncio.gather(*tasks))
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _error_of(task: "asyncio.Task[T]") -> BaseException | None:
    """Return the exception of a finished task, or CancelledError if it was cancelled."""
    return asyncio.CancelledError() if task.cancelled() else task.exception()
