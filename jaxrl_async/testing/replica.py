"""A replica that answers, dies and hangs when the test says so: for a router without samplers."""

from collections.abc import Sequence
from concurrent.futures import Future

import numpy as np

from jaxrl_async.errors import Closed, RolloutError
from jaxrl_async.sampler.stats import SamplerStats
from jaxrl_async.testing.fakes import make_completion
from jaxrl_async.types import Completion, Partial, Request


class ScriptedReplica:
    """A ports.Replica without a thread. One that is never told to answer hangs.

    Attributes:
        name: Its own; its successor's has a prime more.
        held: The requests that it has not answered, oldest first, and their futures.
        blocks: What its statistics give as decoded blocks; answer() counts one.
        abandoned: Whether it was taken out.
        starts: How often it was started.
        partials: What progress() returns.
    """

    has_logprobs = True
    seed = 0
    places = 4

    def __init__(self, name: str = "replica") -> None:
        self.name = name
        self.held: list[tuple[Request | Partial, Future[Completion]]] = []
        self.blocks = self.starts = 0
        self.abandoned = False
        self.partials: tuple[Partial, ...] = ()
        self.error: BaseException | None = None
        self.blamed: frozenset[str] = frozenset()

    # ---- the port

    def start(self) -> None:
        """See ports.Replica."""
        self.starts += 1

    def close(self) -> None:
        """See ports.Replica."""
        self._fail(Closed("closed"))

    def check_waits(self) -> None:
        """See ports.Replica: it has no thread to wait on."""

    def checked(self, requests: Sequence[Request | Partial]) -> list[Request | Partial]:
        """See ports.Replica: it serves all."""
        return list(requests)

    def start_many(self, requests: Sequence[Request | Partial]) -> list[Future[Completion]]:
        """See ports.Replica."""
        if self.error is not None:
            raise self.error
        futures: list[Future[Completion]] = [Future() for _ in requests]
        self.held += zip(requests, futures, strict=True)
        return futures

    def progress(self) -> tuple[Partial, ...]:
        """See ports.Replica. Raises `error`."""
        if self.error is not None:
            raise self.error
        return self.partials

    def save(self, request_id: str, *, stop: bool = False, with_kv: bool = True) -> Partial:
        """See ports.Replica: of `partials`."""
        for partial in self.partials:
            if partial.request.request_id == request_id:
                return partial
        raise RolloutError(f"request {request_id!r} is not in the script's partials")

    def stats(self) -> SamplerStats:
        """See ports.Replica."""
        return SamplerStats(blocks=self.blocks, requests_done=self.blocks)

    def abandon(self) -> None:
        """See ports.Replica."""
        self.abandoned = True

    def successor(self) -> "ScriptedReplica":
        """See ports.Replica."""
        return ScriptedReplica(self.name + "'")

    # ---- the test

    @property
    def held_ids(self) -> tuple[str, ...]:
        """Ids of the requests that it has not answered, oldest first."""
        return tuple(_request(given).request_id for given, _ in self.held)

    def answer(self, *, nan: bool = False) -> None:
        """Complete the oldest request. nan: with a log-prob that is not finite."""
        given, future = self.held.pop(0)
        self.blocks += 1
        completion = make_completion(_request(given), [1, 2])
        if nan:
            completion.logprobs[0] = np.nan
        if future.set_running_or_notify_cancel():
            future.set_result(completion)

    def die(self, error: BaseException | None = None) -> None:
        """End as a replica's thread does: set `error` and `blamed`, then fail the futures."""
        self.blamed = frozenset(self.held_ids)
        self.error = error or ValueError("broken")
        self._fail(self.error)

    def _fail(self, error: BaseException) -> None:
        held, self.held = self.held, []
        for _, future in held:
            if not future.done():
                future.set_exception(error)


def _request(given: Request | Partial) -> Request:
    return given.request if isinstance(given, Partial) else given
