"""Seams between what asks for tokens and what samples them."""

from asyncio import Future
from collections.abc import Mapping, Sequence
from concurrent.futures import Future as ThreadFuture
from dataclasses import dataclass, field
from typing import Protocol, Self

from jaxrl_async.types import (
    Completion,
    Partial,
    Request,
)


class Generate(Protocol):
    """Whatever turns requests into completions: our sampler, a router, a scripted double."""

    @property
    def seed(self) -> int | None:
        """Seed of the Partials that it can continue; None: it continues none."""
        ...

    def submit_many(self, requests: Sequence[Request | Partial]) -> "Sequence[Future[Completion]]":
        """Queue all requests at once, in this order; return a future of the running event loop for
        each.

        Queuing is atomic (no plan sees half of them), so that the same requests given to an idle
        sampler always run on the same schedule. Cancelling a future frees its slot. A Partial in
        place of a request, of this `seed`, continues where it was saved.
        """
        ...

    def progress(self) -> tuple[Partial, ...]:
        """Return all running requests that have drawn a token, as data. Callable from any thread.
        A request that is missing here and was submitted has its result in its future already, or
        has drawn nothing."""
        ...


class ReplicaStats(Protocol):
    """Statistics of one replica, which know how to merge."""

    @property
    def work_done(self) -> tuple[int, ...]:
        """Counters of which at least one rises while the replica is making progress."""
        ...

    def after(self, earlier: Self) -> Self:
        """Return these statistics plus those of the replica that this one replaced."""
        ...

    def since(self, earlier: Self) -> Self:
        """Return these statistics less the counts of an earlier reading of the same replica."""
        ...

    def ended(self) -> Self:
        """Return the statistics of a replica that is gone: its gauges are 0."""
        ...

    def beside(self, others: Sequence[Self]) -> Self:
        """Return one reading for this replica and the others that work beside it."""
        ...

    def with_waiting(self, count: int) -> Self:
        """Return these statistics with so many more requests that wait for a place."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Departure:
    """How a replica left on its own accord."""

    reason: str
    # of its running requests: what they had drawn, by the future of each; others had drawn nothing
    partials: Mapping["ThreadFuture[Completion]", Partial] = field(default_factory=dict)


class Replica(Protocol):
    """One of the samplers behind a router: all that the router uses of it."""

    @property
    def replaceable(self) -> bool:
        """Whether `successor` makes another in its place. False: it is in a process of its own, and
        its seat is gone once it has failed or left."""
        ...

    @property
    def departure(self) -> Departure | None:
        """How it left, set before `error` is; None: it is there, or it failed."""
        ...

    @property
    def seed(self) -> int | None:
        """See Generate.seed; the same for all replicas of a router."""
        ...

    @property
    def places(self) -> int:
        """Number of requests that it holds at once."""
        ...

    @property
    def rows(self) -> int:
        """Number of those that draw in a step; `places` where that is not known."""
        ...

    @property
    def has_logprobs(self) -> bool:
        """Whether its completions carry log-probs; False: they are NaN, and no sign of a fault."""
        ...

    @property
    def error(self) -> BaseException | None:
        """The exception that ended its thread, set before the futures of its requests fail;
        Disconnected: the connection to its process has ended, which is no request's fault."""
        ...

    @property
    def blamed(self) -> frozenset[str]:
        """Ids of the requests that were on its device, or may have been, when it ended with
        `error`."""
        ...

    def start(self) -> None:
        """Start its thread unless that was done before."""
        ...

    def close(self) -> None:
        """Stop it; requests that are not done fail with Closed. Idempotent."""
        ...

    def check_waits(self) -> None:
        """Raise RolloutError where waiting for this replica would never end: on its own thread, or
        in a forked process."""
        ...

    def checked(self, requests: Sequence[Request | Partial]) -> list[Request | Partial]:
        """Return the requests as any replica will serve them. Raises RolloutError for one that
        cannot be served, which names the field. Works after the replica has failed, too."""
        ...

    def start_many(self, requests: Sequence[Request | Partial]) -> "list[ThreadFuture[Completion]]":
        """Queue all requests at once, in this order; return a future for each. Raises `error` if
        its thread has ended, Closed if it was closed."""
        ...

    def progress(self) -> tuple[Partial, ...]:
        """See Generate.progress."""
        ...

    def save(self, request_id: str, *, stop: bool = False, with_kv: bool = True) -> Partial:
        """Return a running request as data. Raises RolloutError if it is not running here.

        Args:
            stop: end it, with its tokens so far and StopReason.CANCELLED.
            with_kv: include its KV if one version of the weights made all of it.
        """
        ...

    def stats(self) -> ReplicaStats:
        """Return a consistent reading of its statistics."""
        ...

    def abandon(self) -> None:
        """Detach from its thread, which is dead or hung: it produces nothing that counts from now
        on, and no weight update waits for it."""
        ...

    def successor(self) -> "Replica":
        """Return a fresh replica in the place of this one, which was abandoned: the same settings,
        the newest weights, no requests. May wait for weights. Raises Closed and WeightsError, as
        the weight source does."""
        ...
