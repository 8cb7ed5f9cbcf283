"""Handles the messages of a sampler in another process, on its session's thread: checks them
against the requests and passes them on. Pure host code.

    Answers, RemoteReply ──> checked ──> futures        an invalid message ends the replica
    Beat ──────────────────> stats, places              and the session immediately; none of
    Died, Leaving, the end > everything fails           its contents are used
"""

import threading
from collections.abc import Callable
from typing import TypeVar

import numpy as np

from jaxrl_async.errors import Disconnected, RolloutError
from jaxrl_async.ports.generate import Departure
from jaxrl_async.remote.sampler.answer_checks import (
    checked_completion,
    checked_remote_partial,
    checked_stats,
    checked_text,
)
from jaxrl_async.remote.sampler.outstanding import Outstanding, OutstandingRequests
from jaxrl_async.remote.wire.messages import (
    Answers,
    Beat,
    Died,
    Leaving,
    RemoteFailure,
    RemoteReply,
)
from jaxrl_async.sampler.request_checks import RequestCheck
from jaxrl_async.sampler.router.job import fulfil
from jaxrl_async.sampler.stats import SamplerStats
from jaxrl_async.types import Completion, Partial

Checked = TypeVar("Checked")


class ReplicaMessages:
    """The session's side of a RemoteReplica: a handler for each kind of message. The session has
    checked that the fields match their types.

    Attributes:
        stats: Of the last beat.
        reported: Partials of the last report of all running requests, by wire id.
        thread: Identity of the session's thread, once a message has arrived.
    """

    def __init__(
        self,
        peer: str,
        requests: OutstandingRequests,
        check: RequestCheck,
        *,
        newest: Callable[[], int],
        count: Callable[[str, int], None],
        on_room: Callable[[], None],
    ) -> None:
        """Start without any messages.

        Args:
            peer: Name of the sampler, for messages.
            requests: Its outstanding requests.
            check: Has the samplers' limits.
            newest: Returns the newest version that any sampler may have.
            count: Called with the name and number of each fault (metrics.fault_counts).
            on_room: Called when the sampler may have room for more requests.
        """
        self.stats = SamplerStats()
        self.reported: dict[str, Partial] = {}
        self.thread: int | None = None
        self._peer, self._requests, self._check = peer, requests, check
        self._newest, self._count, self._on_room = newest, count, on_room

    def take_answers(self, message: Answers) -> None:
        """Check all answers, then pass them on. Raises RolloutError."""
        results = self._checked("an answer", lambda: self._results(message))
        done = self._requests.pop(results)
        self._on_room()
        for out, result in zip(done, results.values(), strict=True):
            if out is not None:  # else it has been closed in the meantime
                fulfil(out.future, result)

    def take_reply(self, message: RemoteReply) -> None:
        """Pass partials to the caller that requested them. Raises RolloutError."""
        question = self._requests.question(message.number)
        if question is None:
            return  # the caller no longer waits
        about = question.about
        if message.error:
            fulfil(question.answer, RolloutError(f"{self._peer}: {checked_text(message.error)}"))
        elif about is None:
            fulfil(
                question.answer, self._checked("a report", lambda: self._report(message.partials))
            )
        else:
            fulfil(question.answer, self._checked("a save", lambda: self._saved(message, about)))

    def take_beat(self, message: Beat) -> None:
        """Keep the statistics. Raises RolloutError."""
        self.stats = self._checked("a beat", lambda: checked_stats(message.stats))
        if 0 < message.places < 2**31:
            self._requests.capacity = message.places

    def take_died(self, message: Died) -> None:
        """Fail everything, and record which requests were on the device."""
        requests = self._requests.by_wire_id()
        outs = [requests.get(i) for i in message.blamed]
        blamed = frozenset(out.request.request_id for out in outs if out is not None)
        error = RolloutError(f"{self._peer} died: {checked_text(message.error)}")
        self._requests.finish(error, blamed=blamed)

    def take_leaving(self, message: Leaving) -> None:
        """Take back the requests. Raises RolloutError."""
        checked = self._checked("a hand-back", lambda: self._checked_partials(message.partials))
        requests = self._requests.by_wire_id()
        partials = {requests[i].future: p for i, p in checked.items() if i in requests}
        departure = Departure(reason=checked_text(message.reason), partials=partials)
        error = Disconnected(f"{self._peer} has left: {departure.reason}")
        self._requests.finish(error, departure=departure)

    def cut_off(self, reason: str) -> None:
        """Fail the requests, because the session has ended. The first ones sent may have been on
        the device."""
        sent = [out for out in self._requests.by_wire_id().values() if out.sent]
        blamed = frozenset(out.request.request_id for out in sent[: self._requests.capacity])
        self._requests.finish(Disconnected(f"{self._peer}: {reason}"), blamed=blamed)

    def _results(self, message: Answers) -> dict[str, Completion | RolloutError]:
        """Return the checked answers, by wire id."""
        results: dict[str, Completion | RolloutError] = {}
        answers: list[Completion | RemoteFailure] = [*message.completions, *message.failures]
        for answer in answers:
            if answer.request_id in results:
                raise RolloutError(
                    f"request {checked_text(answer.request_id)!r} is answered twice."
                )
            out = self._requests.find(answer.request_id)
            if out is None:
                continue
            if isinstance(answer, RemoteFailure):
                results[out.wire_id] = RolloutError(f"{self._peer}: {checked_text(answer.error)}")
                continue
            results[out.wire_id] = checked_completion(
                answer,
                out.given,
                self._check.limits,
                newest=self._newest(),
                stopped=out.stopped,
                oldest=out.oldest,
            )
        return results

    def _report(self, partials: tuple[Partial, ...]) -> tuple[Partial, ...]:
        """Return the partials of all running requests, and keep them."""
        running = self._checked_partials(partials)
        given = {i: out.given for i, out in self._requests.by_wire_id().items()}
        waiting = {i: g for i, g in given.items() if isinstance(g, Partial)}  # in any queue
        self.reported = waiting | running
        return tuple(self.reported.values())

    def _saved(self, message: RemoteReply, out: Outstanding) -> tuple[Partial, ...]:
        """Return the one saved request, which may have ended since."""
        (saved,) = message.partials
        return (self._checked_partial(saved, out),)

    def _checked_partial(self, partial: Partial, out: Outstanding) -> Partial:
        newest = self._newest()
        room = self._check.limits
        return checked_remote_partial(partial, out.given, room, newest=newest, oldest=out.oldest)

    def _checked_partials(self, partials: tuple[Partial, ...]) -> dict[str, Partial]:
        """Return the checked partials of requests that are still outstanding, by wire id. A partial
        with a non-finite log-prob is dropped: its request restarts."""
        requests = self._requests.by_wire_id()
        known = [(p, requests.get(p.request.request_id)) for p in partials]
        checked = {
            out.wire_id: self._checked_partial(p, out)
            for p, out in known
            if out is not None and not out.future.done()
        }
        return {i: p for i, p in checked.items() if np.isfinite(p.logprobs).all()}

    def _checked(self, what: str, check: Callable[[], Checked]) -> Checked:
        """Return the result of the check. On failure, count the fault, end the replica immediately,
        and raise RolloutError, which ends the session."""
        self.thread = threading.get_ident()
        try:
            return check()
        except (RolloutError, TypeError, AttributeError, ValueError, OverflowError) as error:
            self._count("refused_answers", 1)
            self.cut_off(f"{what} is invalid: {error}")
            raise RolloutError(f"{what} of {self._peer} is invalid: {error}") from error
