"""What must end of what runs at once: all, the first few of more, or fewer than were begun."""

import asyncio
from collections.abc import Callable, Coroutine, Iterable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from jaxrl_async.errors import Closed, EndpointMisset, RolloutError

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Quota:
    """When a group is complete."""

    wanted: int  # members: the first so many that end make the group
    least: int  # members with which a group goes on where others failed, at most `wanted`

    @staticmethod
    def of(members: int, *, group_size: int, least: int | None) -> "Quota":
        """Return the quota of a group.

        Args:
            members: that were begun.
            group_size: members that make a whole group.
            least: members with which it goes on; None: with a whole group alone.
        """
        wanted = min(group_size, members)
        return Quota(wanted=wanted, least=min(least or wanted, wanted))


async def first_ended(
    work: Sequence[Coroutine[None, None, T]],
    quota: Quota,
    leave_out: Callable[[int, BaseException | None], None],
) -> tuple[T, ...]:
    """Return the results of the first `wanted` that end, in the order of `work`; end the others.

    Of those that end in one round of the event loop, the first to end is the first here.

    Args:
        work: what runs at once.
        quota: how many are wanted, and how many are enough if others fail.
        leave_out: called with the place in `work` of each one that is left out, and its exception;
            None: it was not needed. Before it is cancelled.

    Raises the first exception once fewer than `least` have ended or may still end; Closed and
    EndpointMisset at once. Whatever happens, nothing runs on.
    """
    tasks = [asyncio.ensure_future(one) for one in work]
    places = {task: place for place, task in enumerate(tasks)}
    ended: list[asyncio.Task[T]] = []  # in this order
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
            if isinstance(error, Closed | EndpointMisset):
                raise error
            if len(kept) + len(tasks) - seen < quota.least:
                raise first
            leave_out(places[task], error)
        if len(kept) < quota.least:  # of a resumed group, with fewer members than are needed now
            raise first or RolloutError(f"{len(tasks)} members are left, fewer than {quota.least}.")
        for task in [*ended[seen:], *(t for t in tasks if t not in ended)]:
            leave_out(places[task], _error_of(task) if task in ended else None)
        return tuple(task.result() for task in sorted(kept, key=places.__getitem__))
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
    """Return what a task that is done raised, a cancellation that nobody asked for included."""
    return asyncio.CancelledError() if task.cancelled() else task.exception()
