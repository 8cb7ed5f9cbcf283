"""Several processes that make the same steps: their messages, and which of them writes.

    process 0   samplers, rollouts, buffer ──draw──┐            ┌──> the same groups ──> Trainer
    process 1   samplers, rollouts, buffer ──draw──┴── gather ──┴──> the same groups ──> Trainer

If the samplers are separate processes, the first process alone has rollouts and a buffer
(`players` is 1), and the others get their groups from it.

The trainer's mesh spans all processes: each must run its programs in the same order. Every decision
of the trainer's thread is therefore made from values that are equal everywhere. A process that
fails alone leaves the others waiting; it ends immediately, and JAX's coordinator ends them.

A colocated sampler decodes on the devices that carry the messages. Its programs run in its process
alone and always end, so there is no circular wait; but a message that waits for another process
would block them. Hence the processes meet on the host first.
"""

import json
import math
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NoReturn, Protocol, cast

import jax
import numpy as np
from jax._src import distributed  # barriers have no public name; orbax uses them from there, too
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxrl_async.buffer.ledger import Ledger
from jaxrl_async.codec import dumps, loads
from jaxrl_async.errors import Closed, DataError, MeshError
from jaxrl_async.ports.rollout import GroupSource
from jaxrl_async.run.signals import HURRIED, Stop
from jaxrl_async.types import Draw, EpisodeGroup, Ticket

SMALLEST = 1024
"""Bytes of the smallest message; longer ones are padded to powers of two (one program each)."""

MEETING_S = 3600
"""Maximum wait for the other processes before a message, seconds."""

ROUND_S = 1.0
"""Maximum wait for groups before the processes exchange requests to stop, seconds."""


class Lockstep:
    """The processes that make one run, and the index of this one; one process is a Lockstep of one.

    All must call the same methods in the same order, on one thread at a time. With one process
    nothing is sent and JAX is not touched.
    """

    def __init__(self, *, first_plays: bool = False, colocated: bool = False) -> None:
        """Ask JAX which process this is.

        Args:
            first_plays: only the first process plays rollouts.
            colocated: each process decodes on the devices that carry the messages.
        """
        index, count = 0, 1
        self._meet: Callable[[], None] = _no_meeting
        if jax.distributed.is_initialized():
            index, count = jax.process_index(), jax.process_count()
        self._set_rank(index, count, first_plays=first_plays)
        if self.count > 1:
            first = {d.process_index: d for d in reversed(jax.devices())}
            mesh = Mesh(np.array([first[i] for i in range(self.count)]), ("process",))
            self._by_process = NamedSharding(mesh, PartitionSpec("process"))
            everywhere = NamedSharding(mesh, PartitionSpec())
            self._share = jax.jit(lambda x: x, out_shardings=everywhere)
            if colocated:
                self._meet = HostMeeting(distributed_meetings())

    def _set_rank(self, index: int, count: int, *, first_plays: bool) -> None:
        self.index, self.count = index, count
        self.writes = index == 0  # logs, metrics, ledger, report
        self.players = 1 if first_plays else count  # processes with rollouts, the first ones
        self.plays = index < self.players
        self.player = index if self.plays else 0  # index of its share of the data

    # ---- differences between one process and several

    def agreed_stop(self, stop: Stop) -> "StopRequests":
        """Return a stop flag that all processes see in the same step."""
        return stop if self.count == 1 else SharedStop(stop, self)

    def buffer_ledger(self, ledger: Ledger) -> Ledger:
        """Return the ledger that this process's buffer writes: the run's, or one that keeps its
        lines until the first process collects them."""
        return ledger if self.count == 1 else Ledger(keep=True)

    def schedule_file(self, path: Path) -> Path | None:
        """Return the path of the recorded schedule; None: several processes record none."""
        return path if self.count == 1 else None

    def joined(self, source: GroupSource, stop: Stop, lines: Ledger, ledger: Ledger) -> "RunBuffer":
        """Join the buffers of all processes.

        Args:
            source: this process's buffer.
            stop: this process's signals.
            lines: the buffer's, as `buffer_ledger` gave it.
            ledger: the run's.
        """
        if self.count == 1:
            return RunBuffer(source=source, stop=stop, accounts=OwnAccounts())
        shared = SharedSource(source if self.plays else NO_GROUPS, self, stop, lines, ledger)
        return RunBuffer(source=shared, stop=shared, accounts=shared)

    # ---- messages

    def gather(self, message: bytes) -> list[bytes]:
        """Return every process's message, in the order of the processes."""
        if self.count == 1:
            return [message]
        self._meet()
        lengths = [int(n) for n in self._gather(np.array([len(message)], np.int32))[:, 0]]
        size = max(SMALLEST, 1 << (max(lengths) - 1).bit_length())
        padded = np.frombuffer(message.ljust(size, b"\0"), np.uint8)
        return [row[:n].tobytes() for row, n in zip(self._gather(padded), lengths, strict=True)]

    def gather_json(self, value: object) -> list[Any]:
        """Return every process's JSON value, in the order of the processes."""
        if self.count == 1:
            return [value]
        return [json.loads(text) for text in self.gather(json.dumps(value).encode())]

    def mean(self, values: Mapping[str, float], weight: float) -> dict[str, float]:
        """Return the means over all processes, each with its weight; a process of weight 0 need not
        know a value."""
        weighted = self.gather_json([dict(values), weight])
        total = sum(w for _, w in weighted)
        names = next((v for v, w in weighted if w), values)
        return {key: math.fsum(v[key] * w for v, w in weighted if w) / total for key in names}

    def _gather(self, row: np.ndarray) -> np.ndarray:
        """[n] of each process -> [processes, n]."""
        shape = (self.count, *row.shape)
        rows = jax.make_array_from_process_local_data(self._by_process, row[None], shape)
        return np.asarray(self._share(rows))


class Meetings(Protocol):
    """The used methods of jax.distributed's client."""

    def wait_at_barrier(self, barrier_id: str, timeout_in_ms: int) -> None:
        """Return once all processes have called this. Raises JaxRuntimeError."""


def distributed_meetings() -> Meetings:
    """Return the client of this JAX world."""
    return cast(Meetings, distributed.global_state.client)


class HostMeeting:
    """Waits on the host until all processes have arrived. All must call it equally often."""

    def __init__(self, meetings: Meetings) -> None:
        self._meetings, self._number = meetings, 0

    def __call__(self) -> None:
        """Wait for all. Raises MeshError if one does not arrive."""
        self._number += 1
        try:
            self._meetings.wait_at_barrier(f"lockstep/{self._number}", MEETING_S * 1000)
        except jax.errors.JaxRuntimeError as error:
            raise MeshError(
                f"another process did not arrive for an exchange within {MEETING_S} s, or has "
                f"ended: {str(error).splitlines()[0]}. Check its output, and resume the run."
            ) from error


def _no_meeting() -> None:
    """Do nothing: devices that wait for the others have no other work."""


class StopRequests(Protocol):
    """A stop flag."""

    def is_set(self) -> bool:
        """Return whether a stop was requested."""

    @property
    def preempted(self) -> bool:
        """Whether the reason is SIGTERM or SIGHUP: there is little time."""


class Accounts(Protocol):
    """The link from this process's buffer to the ledger of the whole run."""

    @property
    def failed_alone(self) -> bool:
        """Whether this process failed where the others may not have: nothing can be saved."""

    def settle(self, until: int | None = None) -> None:
        """Write the outcomes of groups up to this number of lines of the buffer's ledger."""


class OwnAccounts:
    """The Accounts of a run of one process, whose buffer writes the run's ledger itself."""

    failed_alone = False

    def settle(self, until: int | None = None) -> None:
        """See Accounts: nothing remains to be written."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunBuffer:
    """The buffers of all processes as one, for the trainer and its checkpoints."""

    source: GroupSource  # gives the groups of a step
    stop: StopRequests  # the same in all processes in a step
    accounts: Accounts


class NoGroups:
    """The GroupSource of a process without rollouts: its part of each step is empty."""

    def draw(self, version: int, timeout_s: float | None = None) -> Draw:
        """Return no groups."""
        return Draw(groups=(), dropped=(), waited_s=0.0)

    def give_back(self) -> None:
        """Do nothing: nothing was drawn."""

    def pause(self) -> None:
        """Do nothing: nothing is admitted."""

    def resume(self) -> None:
        """Do nothing: nothing is admitted."""

    def set_limit(self, limit: int) -> None:
        """Do nothing: no group is ever too old."""


NO_GROUPS = NoGroups()


class SharedStop:
    """A stop flag that all processes see in the same step, whichever of them got the request."""

    def __init__(self, stop: Stop, lockstep: Lockstep) -> None:
        self._stop, self._lockstep, self._reason = stop, lockstep, ""

    def is_set(self) -> bool:
        """Return whether any process got a request. Sends messages: all must call it."""
        self._reason = pass_on(self._stop, self._lockstep.gather_json(self._stop.reason))
        return bool(self._reason)

    @property
    def preempted(self) -> bool:
        """Whether the reason is SIGTERM or SIGHUP, as agreed in the last `is_set`."""
        return self._reason in HURRIED


def pass_on(stop: Stop, reasons: Iterable[str]) -> str:
    """Return the first reason for a stop in any process, and request a stop here; "": none."""
    reason = next(filter(None, reasons), "")
    if reason:
        stop.request(reason)
    return reason


class SharedSource:
    """A GroupSource over the buffers of all processes: each gives its part of a step's groups.

    Group k of process i of n is group k n + i of the run, as is its prompt's index in the stream.
    Used by the trainer's thread; `is_set` is the stop agreed at the last draw.
    """

    def __init__(
        self,
        buffer: GroupSource,
        lockstep: Lockstep,
        stop: Stop,
        buffer_ledger: Ledger,
        ledger: Ledger,
    ) -> None:
        """kept: the buffer's own ledger, which keeps its lines; ledger: the run's."""
        self._buffer, self._lockstep, self._stop = buffer, lockstep, stop
        self.pause, self.resume, self.set_limit = buffer.pause, buffer.resume, buffer.set_limit
        self._buffer_ledger, self._ledger = buffer_ledger, ledger
        self._reason = ""  # for the agreed stop
        self.failed_alone = False
        self._trained: list[list[dict[str, Any]]] = []  # lines of the last draw, by process

    def is_set(self) -> bool:
        """Return whether any process had a request to stop by the last draw. Sends nothing."""
        return bool(self._reason)

    @property
    def preempted(self) -> bool:
        """Whether the reason is SIGTERM or SIGHUP."""
        return self._reason in HURRIED

    def draw(self, version: int, timeout_s: float | None = None) -> Draw:
        """Draw one step's groups of all processes, the same in each; timeout_s is ignored.

        Raises Closed in all processes if one gets a request to stop while one waits for groups: a
        step's groups may take longer than the time left to save. Raises the buffer's errors.
        """
        start, own = time.perf_counter(), None
        while True:
            own = own or self._try(version)
            reports = self._lockstep.gather_json([own is not None, self._stop.reason])
            self._reason = pass_on(self._stop, [reason for _, reason in reports])
            if own is not None and all(ready for ready, _ in reports):
                break
            if self._reason:
                self._give_up(has_draw=own is not None)
        sent = dumps({"draw": own, "ledger": self._buffer_ledger.take()}).tobytes()
        shares = [read_message(message) for message in self._lockstep.gather(sent)]
        lines = [share["ledger"] for share in shares]
        self._trained = [
            [line for line in of_process if line["fate"] == "trained"] for of_process in lines
        ]
        self._write(lines)
        waited_s = time.perf_counter() - start
        players = shares[: self._lockstep.players]
        return replace(merged_draws([share["draw"] for share in players]), waited_s=waited_s)

    def _try(self, version: int) -> Draw | None:
        try:
            return self._buffer.draw(version, ROUND_S)
        except TimeoutError:
            return None
        except BaseException:
            self.failed_alone = True
            raise

    def _give_up(self, *, has_draw: bool) -> NoReturn:
        """Raise Closed; the groups of the draw go back to the buffer, untrained."""
        if has_draw:
            self._buffer.give_back()
        unwritten = ("trained", "returned")
        lines = [line for line in self._buffer_ledger.take() if line["fate"] not in unwritten]
        self._write(self._lockstep.gather_json(lines))
        raise Closed("asked to stop while a step's groups were not complete")

    def give_back(self) -> None:
        """See GroupSource; in this process alone, since the others may not have failed."""
        self.failed_alone = True
        self._buffer.give_back()
        facts = ("group", "version", "oldest")
        self._write(
            [
                [{"fate": "returned", **{key: line[key] for key in facts}} for line in of_process]
                for of_process in self._trained
            ]
        )

    def settle(self, until: int | None = None) -> None:
        """See Accounts. Sends messages: all must call it."""
        self._write(self._lockstep.gather_json(self._buffer_ledger.take(until)))

    def _write(self, lines: list[list[dict[str, Any]]]) -> None:
        if not self._lockstep.writes:
            return
        for process, of_process in enumerate(lines):
            for line in of_process:
                facts = line | {"group": line["group"] * self._lockstep.players + process}
                self._ledger.write(**facts)


def read_message(message: bytes) -> Any:
    """Decode a message of another process. Raises DataError for anything else."""
    try:
        return loads(np.frombuffer(message, np.uint8))
    except ValueError as error:
        raise DataError(
            f"a message from another process cannot be read ({error}). Run the same version of "
            "jaxrl_async in all processes."
        ) from error


def merged_draws(draws: list[Draw]) -> Draw:
    """Merge one step's draws of all processes: interleaved, as one process would order them."""
    count = len(draws)
    numbered = [
        (
            tuple(_renumber(g, count, i) for g in draw.groups),
            tuple((_renumber(g, count, i), reason) for g, reason in draw.dropped),
        )
        for i, draw in enumerate(draws)
    ]
    return Draw(
        groups=tuple(g for turn in zip(*(n[0] for n in numbered), strict=True) for g in turn),
        dropped=tuple(d for n in numbered for d in n[1]),
        waited_s=max(draw.waited_s for draw in draws),
        cancelled=tuple(
            replace(group, ticket=_global_ticket(group.ticket, count, i))
            for i, draw in enumerate(draws)
            for group in draw.cancelled
        ),
    )


def _renumber(group: EpisodeGroup, count: int, process: int) -> EpisodeGroup:
    return replace(group, ticket=_global_ticket(group.ticket, count, process))


def _global_ticket(ticket: Ticket, count: int, process: int) -> Ticket:
    return replace(ticket, group=ticket.group * count + process)
