"""A run that follows a recorded schedule: everything in the recorded order, bit for bit.

    a thread reaches a recorded event ──> it waits for its turn: the first line that is not
                                          replayed yet
                                      ──> it acts and writes its line, which must be the recorded
                                          one ──> next line

The recorded order has happened once: everything that a line needs is done by earlier lines, so no
thread waits forever with any timing. Code that must not wait (the rollouts' event loop, a sampler
that reports live weights) leaves its action to be executed when its turn comes.
"""

import json
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from jaxrl_async.buffer.replay import ReplayBuffer
from jaxrl_async.errors import Closed, ReplayError
from jaxrl_async.ports.run import Clock, Intake, NotYet
from jaxrl_async.run.replay.recording import RecordedSchedule, Recording
from jaxrl_async.types import CancelledGroup, Draw, Drop, EpisodeGroup, Prompt, Ticket

log = logging.getLogger(__name__)

STUCK_S = 900.0
"""Maximum time without any progress, seconds; the first step compiles."""

WAIT_S = 0.2
"""Interval at which a waiting thread checks whether it has waited too long, seconds."""

Event = dict[str, Any]
END: Event = {"end": True}


class Replay:
    """A ports.Schedule that prescribes a recording, and records it again. Any thread."""

    def __init__(
        self,
        recorded: RecordedSchedule,
        recording: Recording,
        *,
        stuck_s: float = STUCK_S,
        clock: Clock = time.monotonic,
    ) -> None:
        """Start before the first event.

        Args:
            recorded: the recording to follow.
            recording: records the events of the replay.
            stuck_s: maximum time without progress, seconds.
            clock: measures it.
        """
        self._recorded, self._recording = recorded, recording
        self._stuck_s, self._clock = stuck_s, clock
        self._changed = threading.Condition()
        self._next = 0  # index of the first event that is not replayed yet
        self._busy = False  # a thread has the turn
        self._later: dict[tuple[str, int], Callable[[], object]] = {}
        self._moved_at = clock()
        self._blocks: dict[str, int] = {}  # decoded by each sampler, as last reported
        self._error: ReplayError | None = None
        self._closed = False
        self._of_sampler: dict[str, deque[int]] = {}  # indices of its future events
        self._samplers_of: dict[str, deque[str]] = {}  # request -> samplers that take it, in order
        self._outcomes: dict[int, str] = {}
        self.cancelled: dict[int, Event] = {}  # groups that became too old during sampling
        for index, event in enumerate(recorded.events):
            if "sampler" in event:
                self._of_sampler.setdefault(event["sampler"], deque()).append(index)
                for request in event["take"]:
                    self._samplers_of.setdefault(request, deque()).append(event["sampler"])
            self._outcomes |= {event[end]: end for end in ("put", "fail") if end in event}
            if "oldest" in event:
                self.cancelled[event["fail"]] = event

    # ---- ports.Schedule

    def write(self, **event: Any) -> None:
        """See ports.Schedule. Raises ReplayError if the recording has another event here."""
        line = json.dumps(event)
        with self._changed:
            if self._closed:
                return
            self._raise_if_over()
            if self._next < len(self._recorded.lines):
                if line != self._recorded.lines[self._next]:
                    self._fail(
                        f"the replay has {line} where the recording has "
                        f"{self._recorded.lines[self._next]}. Up to there it is as recorded. "
                        "The cause may be another version of the code, a library or the data, or "
                        "something that depends on wall time, such as a time limit."
                    )
                if "sampler" in event:
                    self._of_sampler[event["sampler"]].popleft()
                self._next += 1
                self._moved_at = self._clock()
                self._changed.notify_all()
                if self._next == len(self._recorded.lines):
                    log.info("%s is replayed to its end", self._recorded.path)
            self._recording.write(**event)
        self._run_later()

    def due(self, sampler: str, block: int, working: bool) -> Intake | NotYet | None:
        """See ports.Schedule. Raises ReplayError if the recording cannot be followed."""
        with self._changed:
            if self._closed:
                return NotYet.NOT_YET
            self._raise_if_over()
            if self._blocks.get(sampler) != block:  # decoding continues
                self._blocks[sampler] = block
                self._moved_at = self._clock()
            self._raise_if_stuck(f"{sampler}, after {block} blocks")
            events = self._of_sampler.get(sampler)
            if not events:
                if self._at_end and not self._recorded.ended:
                    return None  # its run was killed: the rest is unknown
                return Intake() if working else NotYet.NOT_YET
            event = self._recorded.events[events[0]]
            if block < event["block"] and working:
                return Intake()
            if block != event["block"]:
                self._fail(
                    f"{sampler} has nothing to decode after {block} blocks, but took new requests "
                    f"only after {event['block']} in the recording.",
                    events[0],
                )
            if events[0] != self._next or self._busy:
                return NotYet.NOT_YET
            return Intake(
                requests=tuple(event["take"]),
                cancelled=tuple(event["cancel"]),
                version=event["version"],
            )

    def close(self) -> None:
        """Wake every waiter with Closed. Idempotent."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._recording.close()

    # ---- for threads that do something recorded

    @contextmanager
    def turn(self, *names: str, timeout_s: float | None = None) -> Iterator[Event | None]:
        """Wait until an event with one of these names is next; the caller acts inside.

        Yields the event; None after timeout_s, and END at the end of the recording if there is no
        timeout. Raises Closed, ReplayError.
        """
        event = self._wait_for(names, timeout_s)
        try:
            yield event
        finally:
            if event is not None:
                with self._changed:
                    self._busy = False
                    self._changed.notify_all()
                self._run_later()

    def later(self, name: str, number: int, act: Callable[[], object]) -> None:
        """Call `act` when this event's turn comes, on any thread; immediately if it is its turn.

        Args:
            name: of the event, such as put.
            number: its value, such as the group's number.
            act: acts and writes its line.
        """
        with self._changed:
            self._raise_if_over()
            end = self._outcomes.get(number, name)
            if name in ("put", "fail") and name != end:
                did = {"put": "was scored", "fail": "failed"}
                self._fail(
                    f"group {number} {did[name]} now, and {did[end]} in the recording. "
                    "Effects of wall time, such as reward.timeout_s, cannot be replayed.",
                    next(i for i, e in enumerate(self._recorded.events) if e.get(end) == number),
                )
            self._later[name, number] = act
        self._run_later()

    def sampler_of(self, request_id: str) -> int | None:
        """Return the number of the sampler that took this request, at its next occurrence; None:
        no sampler did."""
        with self._changed:
            names = self._samplers_of.get(request_id)
            number = names.popleft().rpartition("-")[2] if names else ""
            return int(number) if number.isdigit() else None  # a single sampler has no number

    def gate(self, buffer: ReplayBuffer, *, curriculum: bool) -> "ReplayedBuffer":
        """Return the buffer for rollouts and trainer: in the recorded order."""
        return ReplayedBuffer(buffer, self, curriculum=curriculum)

    def burst_ends(self) -> set[int]:
        """See Recording."""
        return self._recording.burst_ends()

    def chosen_tasks(self) -> Sequence[str]:
        """Return the task of each group of the recording, by number, if it has several."""
        chosen: list[str] = []
        for event in self._recorded.events:
            chosen += event.get("tasks", ())
        return chosen

    # ---- under the lock

    @property
    def _at_end(self) -> bool:
        return self._next == len(self._recorded.events)

    def _head(self) -> Event:
        return END if self._at_end else self._recorded.events[self._next]

    def _wait_for(self, names: tuple[str, ...], timeout_s: float | None) -> Event | None:
        until = None if timeout_s is None else self._clock() + timeout_s
        with self._changed:
            while True:
                self._raise_if_over()
                head = self._head()
                is_next = until is None if head is END else any(name in head for name in names)
                if is_next and not self._busy:
                    self._busy = True
                    return head
                if until is not None and self._clock() >= until:
                    return None
                self._raise_if_stuck(" or ".join(names))
                self._changed.wait(WAIT_S if until is None else max(0.0, until - self._clock()))

    def _run_later(self) -> None:
        """Execute the actions that were left and whose turn has come, in the recorded order."""
        while True:
            with self._changed:
                if self._busy or self._closed or self._error:
                    return
                name, number = next(iter(self._head().items()))
                act = self._later.pop((name, number), None)
                if act is None:
                    return
                self._busy = True
            try:
                act()
            finally:
                with self._changed:
                    self._busy = False
                    self._changed.notify_all()

    def _raise_if_over(self) -> None:
        if self._error is not None:
            raise self._error
        if self._closed:
            raise Closed("the replay is closed: the run is stopping")

    def _raise_if_stuck(self, waiter: str) -> None:
        if not self._at_end and self._clock() - self._moved_at > self._stuck_s:
            self._fail(
                f"the replay has waited for {self._stuck_s:.0f} s and cannot continue; {waiter} "
                f"asked last, and the next line is {self._recorded.lines[self._next]}. Something "
                "recorded does not happen now: check for effects of wall time, such as a time "
                "limit, or for other versions of code and data."
            )

    def _fail(self, what: str, index: int | None = None) -> None:
        location = self._recorded.location(self._next if index is None else index)
        self._error = ReplayError(f"{location}: {what}")
        self._changed.notify_all()
        raise self._error


class ReplayedBuffer:
    """The replay buffer's ports.Gate and ports.GroupSource, in the recorded order."""

    def __init__(self, buffer: ReplayBuffer, replay: Replay, *, curriculum: bool) -> None:
        self._buffer, self._replay, self._curriculum = buffer, replay, curriculum

    def watch(self, aged: Callable[[int], None], stop: Callable[[int], None]) -> None:
        """See ports.Gate: cancelled groups are prescribed, at their turn."""
        for number in self._replay.cancelled:
            self._replay.later("fail", number, lambda n=number: stop(n))  # type: ignore[misc]

    def cancel(self, group: CancelledGroup) -> None:
        """See ports.Gate; the sampled tokens are reported as recorded."""
        event = self._replay.cancelled[group.ticket.group]
        recorded = replace(group, oldest=event["oldest"], lengths=tuple(event["lengths"]))
        self._replay.later("fail", group.ticket.group, lambda: self._buffer.cancel(recorded))

    def admit(self, timeout_s: float | None = None) -> tuple[Ticket, ...]:
        """See ports.Gate."""
        with self._replay.turn("admit", timeout_s=timeout_s) as event:
            if event is None:
                return ()
            tickets = self._buffer.admit(0)
            assert tickets, f"no group may start where {event} was recorded"
        if self._curriculum:  # no later event is seen before the prompts are taken
            with self._replay.turn("prompts"):
                pass
        return tickets

    def put(self, group: EpisodeGroup) -> Drop | None:
        """See ports.Gate; None, since the group's outcome is not known before its turn."""
        if group.ticket.group in self._replay.cancelled:  # it was too old before its last token
            ticket, prompt_id = group.ticket, group.prompt.prompt_id
            self.cancel(CancelledGroup(ticket=ticket, prompt_id=prompt_id, oldest=0, lengths=()))
            return None
        self._replay.later("put", group.ticket.group, lambda: self._buffer.put(group))
        return None

    def fail(self, ticket: Ticket, prompt: Prompt, reason: Drop) -> None:
        """See ports.Gate."""
        self._replay.later("fail", ticket.group, lambda: self._buffer.fail(ticket, prompt, reason))

    def set_live(self, version: int) -> None:
        """See ReplayBuffer."""
        self._replay.later("live", version, lambda: self._buffer.set_live(version))

    def draw(self, version: int, timeout_s: float | None = None) -> Draw:
        """See ports.GroupSource; without a timeout. Raises ReplayError at the recording's end."""
        while True:
            with self._replay.turn("draw", "look") as event:
                if event is END:
                    raise ReplayError(
                        f"the recorded schedule ends at version {version}: its run was stopped "
                        "there, was killed, or continued from a checkpoint. All of it is replayed, "
                        "and saved."
                    )
                try:
                    return self._buffer.draw(version, 0)
                except TimeoutError:
                    assert event is not None and "look" in event, f"{event} was recorded"

    def give_back(self) -> None:
        """See ports.GroupSource; the recording ends with the draw."""
        self._buffer.give_back()

    def pause(self) -> None:
        """See ports.GroupSource."""
        with self._replay.turn("pause"):
            self._buffer.pause()

    def resume(self) -> None:
        """See ports.GroupSource."""
        with self._replay.turn("resume"):
            self._buffer.resume()

    def set_limit(self, limit: int) -> None:
        """See ports.GroupSource."""
        with self._replay.turn("limit"):
            self._buffer.set_limit(limit)


RunSchedule = Recording | Replay
"""The schedule of a run: a recording of its threads' events, or a replay."""
