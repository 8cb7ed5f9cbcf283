"""A scripted replica for tests of the router: it answers, dies and hangs when the test says so."""

from collections.abc import Sequence
from concurrent.futures import Future

import numpy as np

from jaxrl_async.errors import Closed, Disconnected, RolloutError
from jaxrl_async.ports.generate import Departure
from jaxrl_async.sampler.requests import request_of
from jaxrl_async.sampler.stats import SamplerStats
from jaxrl_async.testing.fakes import make_completion
from jaxrl_async.types import Completion, Partial, Request


class ScriptedReplica:
    """A ports.Replica without a thread: it hangs until the test calls answer(), die() or leave().

    Attributes:
        name: Its name; a successor's name has one more prime.
        held: The unanswered requests, oldest first, and their futures.
        blocks: Decoded blocks in its statistics; answer() adds one.
        abandoned: True once it was abandoned.
        starts: Number of starts.
        partials: The result of progress().
        replaceable: False: as if in a separate process.
        departure: Set by leave().
    """

    has_logprobs = True
    seed = 0
    capacity = 4
    rows = 2

    def __init__(self, name: str = "replica", *, replaceable: bool = True) -> None:
        self.name, self.replaceable = name, replaceable
        self.departure: Departure | None = None
        self.held: list[tuple[Request | Partial, Future[Completion]]] = []
        self.blocks = self.starts = 0
        self.abandoned = False
        self.partials: tuple[Partial, ...] = ()
        self.error: BaseException | None = None
        self.blamed: frozenset[str] = frozenset()

    # ---- the port

    def start(self) -> None:
        """Implement ports.Replica."""
        self.starts += 1

    def close(self) -> None:
        """Implement ports.Replica."""
        self._fail(Closed("closed"))

    def check_waits(self) -> None:
        """Implement ports.Replica: it has no thread to wait on."""

    def checked(self, requests: Sequence[Request | Partial]) -> list[Request | Partial]:
        """Implement ports.Replica: it serves all requests."""
        return list(requests)

    def start_many(self, requests: Sequence[Request | Partial]) -> list[Future[Completion]]:
        """Implement ports.Replica."""
        if self.error is not None:
            raise self.error
        futures: list[Future[Completion]] = [Future() for _ in requests]
        self.held += zip(requests, futures, strict=True)
        return futures

    def progress(self) -> tuple[Partial, ...]:
        """Implement ports.Replica. Raises `error`."""
        if self.error is not None:
            raise self.error
        return self.partials

    def save(self, request_id: str, *, stop: bool = False, with_kv: bool = True) -> Partial:
        """Implement ports.Replica, from `partials`."""
        for partial in self.partials:
            if partial.request.request_id == request_id:
                return partial
        raise RolloutError(f"request {request_id!r} is not in the script's partials")

    def stats(self) -> SamplerStats:
        """Implement ports.Replica."""
        return SamplerStats(blocks=self.blocks, requests_done=self.blocks)

    def abandon(self) -> None:
        """Implement ports.Replica."""
        self.abandoned = True

    def successor(self) -> "ScriptedReplica":
        """Implement ports.Replica."""
        return ScriptedReplica(self.name + "'")

    # ---- the test

    @property
    def held_ids(self) -> tuple[str, ...]:
        """Ids of the unanswered requests, oldest first."""
        return tuple(request_of(given).request_id for given, _ in self.held)

    def answer(self, *, nan: bool = False) -> None:
        """Complete the oldest request. nan: with a non-finite log-prob."""
        given, future = self.held.pop(0)
        self.blocks += 1
        completion = make_completion(request_of(given), [1, 2])
        if nan:
            completion.logprobs[0] = np.nan
        if future.set_running_or_notify_cancel():
            future.set_result(completion)

    def answer_all(self) -> list[str]:
        """Complete all requests, including new ones; return their ids in order."""
        answered = []
        while self.held:
            answered.append(self.held_ids[0])
            self.answer()
        return answered

    def die(self, error: BaseException | None = None) -> None:
        """End like a replica's thread: set `error` and `blamed`, then fail the futures."""
        self.blamed = frozenset(self.held_ids)
        self.error = error or ValueError("broken")
        self._fail(self.error)

    def leave(self, partials: Sequence[Partial] = ()) -> None:
        """Hand back these requests and end."""
        by_id = {p.request.request_id: p for p in partials}
        held = [(request_of(given).request_id, future) for given, future in self.held]
        self.departure = Departure(
            reason="told to", partials={f: by_id[i] for i, f in held if i in by_id}
        )
        self.error = Disconnected("told to")
        self._fail(self.error)

    def _fail(self, error: BaseException) -> None:
        held, self.held = self.held, []
        for _, future in held:
            if not future.done():
                future.set_exception(error)
