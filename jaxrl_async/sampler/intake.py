"""Intake of a sampler between two decode blocks: all that has arrived or, in a replay, exactly what
was recorded at this point. A sampler of several processes takes in the same in all of them."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from jaxrl_async.ports.run import Intake, NotYet, Schedule
from jaxrl_async.ports.weights import WeightSource
from jaxrl_async.sampler.batch.batch import Batch
from jaxrl_async.sampler.batch.finish import give_up
from jaxrl_async.sampler.batch.sequence import LiveRequest, Stage
from jaxrl_async.sampler.requests import Inbox
from jaxrl_async.types import VersionedParams


@dataclass(frozen=True, slots=True, kw_only=True)
class Taken:
    """The result of an intake; the requests are in the batch already."""

    incoming: Sequence[LiveRequest]
    cancelled: Sequence[Stage]
    update: VersionedParams | None  # new weights, not swapped in yet
    prescribed: bool  # by a recording, which is read again soon


class TakesIn(Protocol):
    """Decides which requests and weights enter the batch. Runs on the sampler's thread."""

    def take(self, batch: Batch, *, block: int, idle: bool, wants_weights: bool) -> Taken | NotYet:
        """Queue new requests in the batch, run commands, drop cancelled requests and poll for
        weights.

        Args:
            batch: of the sampler.
            block: number of blocks that the sampler has decoded.
            idle: there is no other work: polling may wait for a transfer.
            wants_weights: False while a version waits to be swapped in.
        """

    def stopped(self, live: LiveRequest) -> None:
        """Record that a command has taken this request out of the batch."""


class Followers(Protocol):
    """The other processes of a sampler in several processes; they repeat this one's actions."""

    def led(self, receiver: TakesIn) -> TakesIn:
        """Return a receiver that takes in what `receiver` does, in all processes."""

    def dismiss(self) -> None:
        """Report to the other processes that the sampler is closed. Idempotent."""

    def fail(self, error: BaseException) -> None:
        """End the other processes after an error of this one's sampler. Idempotent."""


class NoFollowers:
    """Followers of a sampler in one process."""

    def led(self, receiver: TakesIn) -> TakesIn:
        """Return the receiver itself."""
        return receiver

    def dismiss(self) -> None:
        """Do nothing."""

    def fail(self, error: BaseException) -> None:
        """Do nothing."""


NO_FOLLOWERS = NoFollowers()


class Receiver:
    """Takes in requests, cancellations, commands and weights, on the sampler's thread."""

    def __init__(self, name: str, inbox: Inbox, weights: WeightSource, schedule: Schedule) -> None:
        """Make the receiver of the sampler of this name."""
        self._name, self._inbox = name, inbox
        self._weights, self._schedule = weights, schedule
        self._arrived: VersionedParams | None = None  # polled in a replay, not taken yet

    def take(self, batch: Batch, *, block: int, idle: bool, wants_weights: bool) -> Taken | NotYet:
        """Take in as TakesIn describes, and record it.

        Return NotYet in a replay if a recorded event has not arrived; then only commands ran.
        """
        intake = self._schedule.due(self._name, block, bool(batch.admitted or batch.queue))
        if isinstance(intake, NotYet) or (intake is not None and not self._has_all(batch, intake)):
            self._inbox.run_commands()
            return NotYet.NOT_YET
        incoming = self._inbox.take(None if intake is None else intake.requests)
        batch.enqueue(incoming)
        self._inbox.run_commands()
        cancelled = _cancelled(batch)
        if intake is not None:
            cancelled = [s for s in cancelled if s.request.request_id in intake.cancelled]
        for sequence in cancelled:
            give_up(batch, sequence)
        update = None
        if intake is not None:
            update, self._arrived = self._arrived, None
        elif wants_weights:
            update = self._weights.poll(wait=idle)
        if incoming or cancelled or update:
            self._schedule.write(
                sampler=self._name,
                block=block,
                take=[s.request.request_id for s in incoming],
                cancel=[s.request.request_id for s in cancelled],
                version=update.version if update else None,
            )
        return Taken(
            incoming=incoming, cancelled=cancelled, update=update, prescribed=intake is not None
        )

    def stopped(self, live: LiveRequest) -> None:
        """Do nothing: there are no other processes."""

    def _has_all(self, batch: Batch, intake: Intake) -> bool:
        """Return whether all events that were recorded for this moment have arrived."""
        incoming = {s.request.request_id: s for s in self._inbox.requests()}
        if not incoming.keys() >= {*intake.requests}:
            return False
        known: list[Stage] = [*batch.queue, *batch.admitted.values()]
        by_id = {s.request.request_id: s for s in known} | incoming
        if not all(i in by_id and by_id[i].owner.gave_up for i in intake.cancelled):
            return False
        if intake.version is not None and self._arrived is None:
            self._arrived = self._weights.poll(wait=True)
        return intake.version is None or self._arrived is not None


def _cancelled(batch: Batch) -> list[Stage]:
    """Return the requests whose callers gave up: all with a slot, and requests at the head of the
    queue until as many live ones as slots were seen. A long queue is not searched every round."""
    cancelled: list[Stage] = [s for s in batch.admitted.values() if s.owner.gave_up]
    num_live = 0
    for sequence in batch.queue:
        if sequence.owner.gave_up:
            cancelled.append(sequence)
        else:
            num_live += 1
            if num_live == batch.engine.spec.total_slots:
                break
    return cancelled
