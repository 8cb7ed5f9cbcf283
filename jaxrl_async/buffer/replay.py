"""The replay buffer: a lock round the pure parts. Host side, bounded, and the gate on staleness.

        admit ──> in flight ──put──> ready ──draw──> taken ──set_live──> freed
                     │ fail            │ stale, from the future
                     └──> freed        └──> dropped, freed

A group's slot is freed when the weights of the step that used it are live, or when it is dropped.
"""

import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from jaxrl_async.buffer.ledger import Ledger
from jaxrl_async.buffer.staleness import capacity, drop_reason, select
from jaxrl_async.errors import Closed
from jaxrl_async.ports import Clock
from jaxrl_async.types import Draw, Drop, EpisodeGroup, Prompt, Ticket


@dataclass(frozen=True, slots=True, kw_only=True)
class BufferStats:
    """A reading of the buffer."""

    capacity: int  # slots
    active: int  # slots in use
    in_flight: int  # admitted, not finished
    ready: int  # finished, not taken
    admitted: int  # since the start
    trained: int  # taken by the trainer since the start
    dropped: dict[str, int]  # since the start, by reason


class ReplayBuffer:
    """Touched by the rollout loop (admit, put, fail), the trainer (draw, pause) and samplers
    (set_live)."""

    def __init__(
        self,
        *,
        groups_per_step: int,
        max_staleness: int,
        lookahead: int = 0,
        version: int = 0,
        next_group: int = 0,
        ledger: Ledger | None = None,
        clock: Clock = time.perf_counter,
    ) -> None:
        self._per_step, self._max_staleness, self._lookahead = (
            groups_per_step,
            max_staleness,
            lookahead,
        )
        self._capacity = capacity(max_staleness, groups_per_step, lookahead)
        self._ledger, self._clock = ledger or Ledger(), clock
        self._changed = threading.Condition()
        self._live, self._next_group = version, next_group
        self._pending: dict[int, Ticket] = {}  # admitted, not yet taken; ascending
        self._ready: dict[int, EpisodeGroup] = {}
        self._taken: dict[int, int] = {}  # version drawn at -> slots it holds
        self._dropped: list[tuple[EpisodeGroup, Drop]] = []  # since the last draw
        self._drops: Counter[str] = Counter()
        self._trained = 0
        self._admitted = 0
        self._paused = self._closed = False

    # ---- the rollout loop

    def admit(self, timeout_s: float | None = None) -> tuple[Ticket, ...]:
        """Tickets for all groups that may start now; blocks until there is one.

        Empty after timeout_s. Raises Closed. At max_staleness 0 a step's tickets all come in one
        call.
        """
        with self._changed:
            self._wait(lambda: self._free_slots() > 0 and not self._paused, timeout_s)
            if self._paused:
                return ()
            tickets = tuple(
                Ticket(group=self._next_group + i, version=self._live)
                for i in range(self._free_slots())
            )
            for ticket in tickets:
                self._pending[ticket.group] = ticket
                self._ledger.write("admitted", group=ticket.group, version=ticket.version)
            self._next_group += len(tickets)
            self._admitted += len(tickets)
            return tickets

    def put(self, group: EpisodeGroup) -> Drop | None:
        """Hand in a finished group. Raises Closed; asserts that its ticket is in flight."""
        with self._changed:
            self._raise_if_closed()
            number = group.ticket.group
            assert number in self._pending and number not in self._ready, (
                f"group {number} is not in flight"
            )
            self._ready[number] = group
            self._changed.notify_all()
            return None

    def fail(self, ticket: Ticket, prompt: Prompt, reason: Drop) -> None:
        """Give a ticket back; its slot is free at once, for a fresh group."""
        with self._changed:
            if self._pending.pop(ticket.group, None) is None:
                return
            self._drops[reason] += 1
            self._ledger.write(
                "dropped", group=ticket.group, prompt=prompt.prompt_id, reason=reason.value
            )
            self._changed.notify_all()

    # ---- the trainer

    def draw(self, version: int, timeout_s: float | None = None) -> Draw:
        """One step's groups, in order of admission; blocks until they are ready.

        What is too old or from the future is dropped, counted and told. Raises Closed, and
        TimeoutError after timeout_s.
        """
        start = self._clock()
        with self._changed:
            if not self._wait(lambda: self._complete(version), timeout_s):
                raise TimeoutError(f"no {self._per_step} groups were ready within {timeout_s} s")
            numbers = self._selected()
            groups = tuple(self._ready.pop(n) for n in numbers)
            for group in groups:
                del self._pending[group.ticket.group]
                self._ledger.write(
                    "trained",
                    group=group.ticket.group,
                    prompt=group.prompt.prompt_id,
                    version=version,
                    oldest=group.oldest_version,
                )
            self._ledger.flush()
            self._taken[version] = self._taken.get(version, 0) + len(groups)
            self._trained += len(groups)
            dropped, self._dropped = tuple(self._dropped), []
            return Draw(groups=groups, dropped=dropped, waited_s=self._clock() - start)

    def pause(self) -> None:
        """Admit nothing until resume()."""
        with self._changed:
            self._paused = True

    def resume(self) -> None:
        """Admit again."""
        with self._changed:
            self._paused = False
            self._changed.notify_all()

    # ---- samplers

    def set_live(self, version: int) -> None:
        """Every sampler draws from `version` now: the slots of steps before it are free."""
        with self._changed:
            self._live = max(self._live, version)
            for at in [v for v in self._taken if v < version]:
                del self._taken[at]
            self._changed.notify_all()

    # ---- anybody

    def close(self) -> None:
        """Wake every waiter with Closed. Idempotent."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
            self._ledger.close()

    def stats(self) -> BufferStats:
        """A consistent reading."""
        with self._changed:
            return BufferStats(
                capacity=self._capacity,
                active=self._capacity - self._free_slots(),
                in_flight=len(self._pending) - len(self._ready),
                ready=len(self._ready),
                admitted=self._admitted,
                trained=self._trained,
                dropped=dict(self._drops),
            )

    # ---- under the lock

    def _free_slots(self) -> int:
        return self._capacity - len(self._pending) - sum(self._taken.values())

    def _selected(self) -> tuple[int, ...]:
        return select(list(self._pending), self._ready, self._per_step, self._lookahead)

    def _complete(self, version: int) -> bool:
        """Whether a step's groups are at hand, after dropping those that may not be trained on."""
        for number, group in list(self._ready.items()):
            reason = drop_reason(group, version, self._max_staleness)
            if reason is not None:
                self._drop(number, group, reason)
        return len(self._selected()) == self._per_step

    def _drop(self, number: int, group: EpisodeGroup, reason: Drop) -> None:
        del self._ready[number], self._pending[number]
        self._dropped.append((group, reason))
        self._drops[reason] += 1
        self._ledger.write(
            "dropped",
            group=number,
            prompt=group.prompt.prompt_id,
            reason=reason.value,
            length=sum(e.num_drawn for e in group.episodes),
        )
        self._changed.notify_all()

    def _wait(self, ready: Callable[[], bool], timeout_s: float | None) -> bool:
        done = self._changed.wait_for(lambda: self._closed or ready(), timeout_s)
        self._raise_if_closed()
        return done

    def _raise_if_closed(self) -> None:
        if self._closed:
            raise Closed("the replay buffer is closed: the run is stopping")
