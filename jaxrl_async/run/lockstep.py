"""Several processes that make the same steps: what they tell each other, and who writes.

    process 0   samplers, rollouts, buffer ──draw──┐            ┌──> the same groups ──> Trainer
    process 1   samplers, rollouts, buffer ──draw──┴── gather ──┴──> the same groups ──> Trainer

The trainer's mesh spans all processes, so that each must run its programs in the same order: every
decision of the trainer's thread is made from values that are equal everywhere. A process that
fails alone leaves the others waiting; it ends at once, and JAX's coordinator ends them.
"""

import json
import math
import time
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any, NoReturn, Protocol

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxrl_async.buffer.ledger import Ledger
from jaxrl_async.codec import dumps, loads
from jaxrl_async.errors import Closed, DataError
from jaxrl_async.ports import Clock, GroupSource
from jaxrl_async.run.signals import Stop
from jaxrl_async.types import Draw, EpisodeGroup

SMALLEST = 1024
"""Bytes of the smallest message; longer ones are padded to powers of two (one program each)."""

ROUND_S = 1.0
"""Longest wait for groups until the processes look whether one of them was asked to stop, seconds.
"""


class Lockstep:
    """This process's place among those that make one run. All must call the same methods in the
    same order, on one thread at a time; alone, nothing is sent and JAX is not touched."""

    def __init__(self) -> None:
        self.count, self.index = 1, 0
        if jax.distributed.is_initialized():
            self.count, self.index = jax.process_count(), jax.process_index()
        self.writes = self.index == 0  # logs, metrics, ledger, report
        if self.count > 1:
            first = {d.process_index: d for d in reversed(jax.devices())}
            mesh = Mesh(np.array([first[i] for i in range(self.count)]), ("process",))
            self._mine = NamedSharding(mesh, PartitionSpec("process"))
            everywhere = NamedSharding(mesh, PartitionSpec())
            self._share = jax.jit(lambda x: x, out_shardings=everywhere)

    def gather(self, message: bytes) -> list[bytes]:
        """Every process's message, in the order of the processes."""
        if self.count == 1:
            return [message]
        lengths = [int(n) for n in self._gathered(np.array([len(message)], np.int32))[:, 0]]
        size = max(SMALLEST, 1 << (max(lengths) - 1).bit_length())
        padded = np.frombuffer(message.ljust(size, b"\0"), np.uint8)
        return [row[:n].tobytes() for row, n in zip(self._gathered(padded), lengths, strict=True)]

    def gather_json(self, value: Any) -> list[Any]:
        """The same of JSON values."""
        if self.count == 1:
            return [value]
        return [json.loads(text) for text in self.gather(json.dumps(value).encode())]

    def mean(self, values: Mapping[str, float], weight: float) -> dict[str, float]:
        """Means over all processes, each with its weight."""
        told = self.gather_json([dict(values), weight])
        total = sum(w for _, w in told)
        return {key: math.fsum(v[key] * w for v, w in told) / total for key in values}

    def _gathered(self, mine: np.ndarray) -> np.ndarray:
        """[n] of each process -> [processes, n]."""
        shape = (self.count, *mine.shape)
        rows = jax.make_array_from_process_local_data(self._mine, mine[None], shape)
        return np.asarray(self._share(rows))


class StopRequests(Protocol):
    """Whatever knows whether somebody asked for a stop."""

    def is_set(self) -> bool: ...

    @property
    def preempted(self) -> bool: ...


class SharedStop:
    """A stop that all processes make in the same step, whichever of them was asked."""

    def __init__(self, stop: Stop, lockstep: Lockstep) -> None:
        self._stop, self._lockstep, self._reason = stop, lockstep, ""

    def is_set(self) -> bool:
        """Whether any process was asked. Exchanges: all must call it."""
        self._reason = pass_on(self._stop, self._lockstep.gather_json(self._stop.reason))
        return bool(self._reason)

    @property
    def preempted(self) -> bool:
        """Whether that was by SIGTERM, as agreed on when `is_set` was asked last."""
        return self._reason == "SIGTERM"


def pass_on(stop: Stop, reasons: Iterable[str]) -> str:
    """Ask for a stop here, too, where there is a reason in any process: the first one."""
    reason = next(filter(None, reasons), "")
    if reason:
        stop.request(reason)
    return reason


class SharedSource:
    """A GroupSource over the buffers of all processes: each gives its part of a step's groups.

    Group k of process i of n is group k n + i of the run, as its prompt's place in the stream is.
    Used by the trainer's thread; `is_set` is the stop agreed on at the last draw.
    """

    def __init__(
        self,
        buffer: GroupSource,
        lockstep: Lockstep,
        stop: Stop,
        kept: Ledger,
        ledger: Ledger,
        *,
        clock: Clock = time.perf_counter,
    ) -> None:
        """kept: the buffer's own ledger, which keeps its lines; ledger: the run's."""
        self._buffer, self._lockstep, self._stop = buffer, lockstep, stop
        self._kept, self._ledger, self._clock = kept, ledger, clock
        self._reason = ""  # for the stop that all have agreed on
        self.alone = False  # whether this process failed where the others may not have
        self._trained: list[list[dict[str, Any]]] = []  # lines of the last draw, by process

    def is_set(self) -> bool:
        """Whether any process had been asked to stop by the last draw. Exchanges nothing."""
        return bool(self._reason)

    @property
    def preempted(self) -> bool:
        """Whether that was by SIGTERM."""
        return self._reason == "SIGTERM"

    def draw(self, version: int, timeout_s: float | None = None) -> Draw:
        """One step's groups of all processes, the same in each; timeout_s is not looked at.

        Raises Closed in all where one is asked to stop while one waits for groups: a step's groups
        may take longer than the time there is to save. Raises what the buffer raises.
        """
        start, mine = self._clock(), None
        while True:
            mine = mine or self._try(version)
            told = self._lockstep.gather_json([mine is not None, self._stop.reason])
            self._reason = pass_on(self._stop, [reason for _, reason in told])
            if mine is not None and all(ready for ready, _ in told):
                break
            if self._reason:
                self._give_up(drawn=mine is not None)
        sent = dumps({"draw": mine, "ledger": self._kept.take()}).tobytes()
        shares = [read(message) for message in self._lockstep.gather(sent)]
        lines = [share["ledger"] for share in shares]
        self._trained = [[x for x in of if x["fate"] == "trained"] for of in lines]
        self._write(lines)
        waited_s = self._clock() - start
        return replace(merged([share["draw"] for share in shares]), waited_s=waited_s)

    def _try(self, version: int) -> Draw | None:
        try:
            return self._buffer.draw(version, ROUND_S)
        except TimeoutError:
            return None
        except BaseException:
            self.alone = True
            raise

    def _give_up(self, *, drawn: bool) -> NoReturn:
        """What was drawn is not trained on after all: it is in the buffer as before."""
        if drawn:
            self._buffer.give_back()
        untold = ("trained", "returned")
        lines = [line for line in self._kept.take() if line["fate"] not in untold]
        self._write(self._lockstep.gather_json(lines))
        raise Closed("asked to stop while a step's groups were not complete")

    def give_back(self) -> None:
        """As the buffer's, in this process alone: nobody knows whether the others failed, too."""
        self.alone = True
        self._buffer.give_back()
        told = ("group", "version", "oldest")
        lines = [[{k: x[k] for k in told} for x in of] for of in self._trained]
        self._write([[{"fate": "returned", **x} for x in of] for of in lines])

    def settle(self, until: int | None = None) -> None:
        """Write down what became of groups since the last draw; until: of this process's kept
        ledger."""
        self._write(self._lockstep.gather_json(self._kept.take(until)))

    def pause(self) -> None:
        """As the buffer's."""
        self._buffer.pause()

    def resume(self) -> None:
        """As the buffer's."""
        self._buffer.resume()

    def set_limit(self, limit: int) -> None:
        """As the buffer's."""
        self._buffer.set_limit(limit)

    def _write(self, lines: list[list[dict[str, Any]]]) -> None:
        if not self._lockstep.writes:
            return
        for process, of_process in enumerate(lines):
            for line in of_process:
                facts = line | {"group": line["group"] * self._lockstep.count + process}
                self._ledger.write(**facts)


def read(message: bytes) -> Any:
    """What another process has sent. Raises DataError for anything else."""
    try:
        return loads(np.frombuffer(message, np.uint8))
    except ValueError as error:
        raise DataError(
            f"a message from another process cannot be read ({error}). Run the same version of "
            "jaxrl_async in all processes."
        ) from error


def merged(draws: list[Draw]) -> Draw:
    """One step's draws of all processes as one: in turns, the order of one process."""
    count = len(draws)
    numbered = [
        (
            tuple(_renumbered(g, count, i) for g in draw.groups),
            tuple((_renumbered(g, count, i), reason) for g, reason in draw.dropped),
        )
        for i, draw in enumerate(draws)
    ]
    return Draw(
        groups=tuple(g for turn in zip(*(n[0] for n in numbered), strict=True) for g in turn),
        dropped=tuple(d for n in numbered for d in n[1]),
        waited_s=max(draw.waited_s for draw in draws),
    )


def _renumbered(group: EpisodeGroup, count: int, process: int) -> EpisodeGroup:
    number = group.ticket.group * count + process
    return replace(group, ticket=replace(group.ticket, group=number))
