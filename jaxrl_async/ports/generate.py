"""Interfaces between what asks for tokens and what samples them."""

from asyncio import Future
from collections.abc import Mapping, Sequence
from concurrent.futures import Future as ThreadFuture
from dataclasses import dataclass, field
from typing import Protocol, Self, runtime_checkable

from jaxrl_async.types import Completion, Constraint, Partial, Request


class Generate(Protocol):
    """Turns requests into completions: a sampler, a router, or a scripted test double."""

    @property
    def seed(self) -> int | None:
        """Seed of the Partials that it can continue; None: it cannot continue any."""

    def submit_many(self, requests: Sequence[Request | Partial]) -> "Sequence[Future[Completion]]":
        """Queue all requests together, in this order; return a future of the running event loop for
        each.

        Queuing is atomic (no scheduling step sees only part of them), so the same requests given to
        an idle sampler always run on the same schedule. Cancelling a future frees its slot. A
        Partial of this `seed` in place of a request continues where it was saved.
        """

    def progress(self) -> tuple[Partial, ...]:
        """Return all running requests that have generated a token, as data. Callable from any
        thread.
        A submitted request that is missing here already has its result in its future, or has
        generated nothing yet."""


@runtime_checkable
class PreparesConstraints(Protocol):
    """A ports.Generate that can compile a constraint before a request has it."""

    def prepare(self, constraint: Constraint) -> None:
        """Compile a constraint on this thread, which may take seconds; requests with it are then
        queued without delay. Callable from any thread. Raises RequestRefused if it cannot be
        followed."""


class ReplicaStats(Protocol):
    """Statistics of one replica, with methods to merge them."""

    @property
    def work_done(self) -> tuple[int, ...]:
        """Counters; at least one rises while the replica is making progress."""

    def after(self, earlier: Self) -> Self:
        """Return these statistics plus the statistics of the replica that this one replaced."""

    def since(self, earlier: Self) -> Self:
        """Return these statistics minus the counts of an earlier reading of the same replica."""

    def ended(self) -> Self:
        """Return the statistics of a replica that is gone: its gauges are 0."""

    def merged_with(self, others: Sequence[Self]) -> Self:
        """Return one reading for this replica and the others that work alongside it."""

    def with_waiting(self, count: int) -> Self:
        """Return these statistics with `count` more requests waiting for a slot."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Departure:
    """The voluntary departure of a replica: its reason, and its running requests."""

    reason: str
    # of its running requests, by the future of each: what was sampled; others had nothing
    partials: Mapping["ThreadFuture[Completion]", Partial] = field(default_factory=dict)


class Replica(Protocol):
    """One of the samplers behind a router, with all that the router uses of it."""

    @property
    def replaceable(self) -> bool:
        """Whether `successor` makes a replacement. False: the replica is in a separate process, and
        its slot is removed once it has failed or left."""

    @property
    def departure(self) -> Departure | None:
        """Its departure, set before `error`; None: it is running, or it failed."""

    @property
    def seed(self) -> int | None:
        """See Generate.seed. All replicas of a router have the same seed."""

    @property
    def capacity(self) -> int:
        """Maximum number of requests that it holds at the same time."""

    @property
    def rows(self) -> int:
        """Maximum number of requests that generate in one step; `capacity` if that is not known."""

    @property
    def has_logprobs(self) -> bool:
        """Whether its completions carry log-probs; False: they are NaN, which is not a fault."""

    @property
    def error(self) -> BaseException | None:
        """The exception that ended its thread, set before the futures of its requests fail.
        Disconnected: the connection to its process has ended, which no request caused."""

    @property
    def blamed(self) -> frozenset[str]:
        """Ids of the requests that were on its device, or may have been, when it ended with
        `error`."""

    def start(self) -> None:
        """Start its thread unless it is already started."""

    def close(self) -> None:
        """Stop it; unfinished requests fail with Closed. Idempotent."""

    def check_waits(self) -> None:
        """Raise RolloutError if waiting for this replica would never end: on its own thread, or in
        a forked process."""

    def checked(self, requests: Sequence[Request | Partial]) -> list[Request | Partial]:
        """Return the requests in the form that any replica serves. Raises RolloutError, naming the
        field, for one that cannot be served. Also works after the replica has failed."""

    def start_many(self, requests: Sequence[Request | Partial]) -> "list[ThreadFuture[Completion]]":
        """Queue all requests together, in this order; return a future for each. Raises `error` if
        its thread has ended, Closed if it was closed."""

    def progress(self) -> tuple[Partial, ...]:
        """See Generate.progress."""

    def save(self, request_id: str, *, stop: bool = False, with_kv: bool = True) -> Partial:
        """Return a running request as data. Raises RolloutError if it is not running here.

        Args:
            stop: end the request, with its tokens so far and StopReason.CANCELLED.
            with_kv: include its KV if a single version of the weights computed all of it.
        """

    def stats(self) -> ReplicaStats:
        """Return a consistent reading of its statistics."""

    def abandon(self) -> None:
        """Detach from its thread, which is dead or hung: its results no longer count, and no weight
        update waits for it."""

    def successor(self) -> "Replica":
        """Return a new replica in place of this one, which was abandoned: the same settings, the
        newest weights, no requests. May wait for weights. Raises Closed and WeightsError, as the
        weight source does."""
