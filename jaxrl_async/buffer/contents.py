"""The contents of a replay buffer: its groups with their states, and counts of their outcomes.

Bookkeeping only; buffer/replay.py adds the lock, the clock, the ledger and the waiting.
"""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from jaxrl_async.types import Drop, EpisodeGroup, Ticket


@dataclass(frozen=True, slots=True, kw_only=True)
class BufferStats:
    """A snapshot of the buffer's statistics."""

    capacity: int  # slots; fewer while the limit is below max_staleness
    active: int  # slots in use
    in_flight: int  # admitted, not finished
    ready: int  # finished, not taken
    admitted: int  # since the start, groups
    trained: int  # taken by the trainer since the start, groups; each counts once
    dropped: dict[str, int]  # since the start, groups by reason (a Drop)
    kept: int = 0  # trained on, and kept for reuse
    without_signal: int = 0  # groups without a signal since the last one with a signal
    no_signal: str = ""  # description of these groups, for messages
    reused: int = 0  # uses after the first since the start
    mean_kept_tokens: float = 0.0  # generated tokens per trained episode
    mean_dropped_tokens: float = 0.0  # per dropped episode; compare to detect a length bias
    admit_wait_s: float = 0.0  # rollouts waiting at the gate, since the start, seconds
    draw_wait_s: float = 0.0  # the trainer waiting for groups, since the start, seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class BufferState:
    """The state of a buffer for a checkpoint, read atomically."""

    next_group: int  # number of the next ticket
    next_untaken: int  # one more than the highest number trained on
    pending: tuple[Ticket, ...] = ()  # admitted, neither finished nor returned
    ready: tuple[EpisodeGroup, ...] = ()  # finished, not taken
    kept: tuple[tuple[EpisodeGroup, int], ...] = ()  # kept for reuse, with uses so far
    trained: int = 0
    reused: int = 0
    dropped: Mapping[str, int] = field(default_factory=dict)
    resampled: int = 0
    kept_tokens: tuple[int, int] = (0, 0)  # total, episodes
    dropped_tokens: tuple[int, int] = (0, 0)
    limit: int | None = None  # staleness target; None: as configured
    ledger_lines: int = 0


@dataclass(slots=True)
class RunningMean:
    """The running mean of integers; 0 without any."""

    total: int = 0
    count: int = 0

    def add(self, values: Iterable[int]) -> None:
        """Add these values."""
        for value in values:
            self.total += value
            self.count += 1

    @property
    def pair(self) -> tuple[int, int]:
        """(total, count)."""
        return self.total, self.count

    @property
    def mean(self) -> float:
        """total / count."""
        return self.total / self.count if self.count else 0.0


@dataclass(slots=True, kw_only=True)
class Tally:
    """Counts of the groups' outcomes, and the time waited, since the start of the run."""

    admitted: int = 0
    trained: int = 0
    reused: int = 0
    resampled: int = 0  # groups without a signal since the last draw
    without_signal: int = 0  # groups without a signal since the last one with a signal
    dropped: Counter[Drop] = field(default_factory=Counter)
    kept_tokens: RunningMean = field(default_factory=RunningMean)
    dropped_tokens: RunningMean = field(default_factory=RunningMean)
    admit_wait_s: float = 0.0
    draw_wait_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class LastDraw:
    """The changes of the last draw, needed to undo it."""

    version: int = 0
    fresh: Mapping[int, EpisodeGroup] = field(default_factory=dict)  # by number, first uses
    again: tuple[int, ...] = ()  # numbers of reused groups
    kept: Mapping[int, EpisodeGroup] = field(default_factory=dict)  # before the draw
    uses: Mapping[int, int] = field(default_factory=dict)
    next_untaken: int = 0
    kept_tokens: tuple[int, int] = (0, 0)

    def groups(self) -> tuple[EpisodeGroup, ...]:
        """Return the groups of the draw, fresh ones first."""
        return (*self.fresh.values(), *(self.kept[number] for number in self.again))


class Contents:
    """The groups of a buffer by number, from their admission to their last use. Not locked."""

    def __init__(self, reuse: int) -> None:
        """reuse: steps that may train on one group."""
        self._reuse = reuse
        self.next_group = 0
        self.next_untaken = 0  # one more than the highest number trained on
        self.pending: dict[int, Ticket] = {}  # admitted, not yet taken; ascending
        self.ready: dict[int, EpisodeGroup] = {}
        self.kept: dict[int, EpisodeGroup] = {}  # trained on, with uses left
        self.uses: dict[int, int] = {}  # so far, of the kept groups
        self.taken: dict[int, int] = {}  # version drawn for -> slots in use
        self.tally = Tally()

    @property
    def slots(self) -> int:
        """Number of slots in use: outstanding uses of groups."""
        left = self._reuse * len(self.kept) - sum(self.uses.values())
        return len(self.pending) * self._reuse + sum(self.taken.values()) + left

    @property
    def num_groups(self) -> int:
        """Number of groups in memory."""
        return len(self.pending) + len(self.kept)

    def admit(self, count: int, version: int) -> tuple[Ticket, ...]:
        """Return the next `count` tickets."""
        first = self.next_group
        tickets = tuple(Ticket(group=first + i, version=version) for i in range(count))
        self.pending |= {ticket.group: ticket for ticket in tickets}
        self.next_group += count
        self.tally.admitted += count
        return tickets

    def put(self, group: EpisodeGroup) -> None:
        """Add a finished group."""
        self.ready[group.ticket.group] = group

    def is_in_flight(self, number: int) -> bool:
        """Return True if this group was admitted and is not finished."""
        return number in self.pending and number not in self.ready

    def fail(self, number: int, reason: Drop) -> bool:
        """Remove a group that will never be finished; return False if it was not pending."""
        if self.pending.pop(number, None) is None:
            return False
        self.tally.dropped[reason] += 1
        return True

    def drop(self, group: EpisodeGroup, reason: Drop) -> None:
        """Remove a finished group."""
        self.ready.pop(group.ticket.group, None)
        del self.pending[group.ticket.group]
        self.tally.dropped_tokens.add(lengths(group))
        self.tally.dropped[reason] += 1

    def take(self, number: int) -> EpisodeGroup:
        """Give a ready group to the trainer; its slot stays in use."""
        del self.pending[number]
        group = self.ready.pop(number)
        self.tally.kept_tokens.add(lengths(group))
        self.tally.trained += 1
        self.next_untaken = max(self.next_untaken, number + 1)
        if self._reuse > 1:
            self.kept[number], self.uses[number] = group, 1
        return group

    def take_again(self, number: int) -> tuple[EpisodeGroup, int]:
        """Give a kept group to the trainer again; return it and the number of this use. The last
        use removes it."""
        group = self.kept[number]
        self.uses[number] += 1
        self.tally.reused += 1
        use = self.uses[number]
        if use == self._reuse:
            del self.kept[number], self.uses[number]
        return group, use

    def retire(self, number: int) -> int:
        """Remove a kept group before its last use; return its number of uses."""
        del self.kept[number]
        return self.uses.pop(number)

    def hold(self, version: int, count: int) -> None:
        """Keep the slots of `count` groups in use until a version later than this one is live."""
        self.taken[version] = self.taken.get(version, 0) + count

    def release(self, live: int) -> None:
        """Free the slots of the steps whose weights are live."""
        for version in [v for v in self.taken if v < live]:
            del self.taken[version]

    def before_draw(self, version: int, fresh: Iterable[int], again: tuple[int, ...]) -> LastDraw:
        """Return the data that `give_back` needs. Call it before these groups are taken."""
        return LastDraw(
            version=version,
            fresh={number: self.ready[number] for number in fresh},
            again=again,
            kept=dict(self.kept),
            uses=dict(self.uses),
            next_untaken=self.next_untaken,
            kept_tokens=self.tally.kept_tokens.pair,
        )

    def give_back(self, draw: LastDraw) -> None:
        """Undo a draw; groups admitted or finished since then stay."""
        tickets = {number: group.ticket for number, group in draw.fresh.items()}
        self.pending = dict(sorted((self.pending | tickets).items()))
        self.ready = dict(sorted({**self.ready, **draw.fresh}.items()))
        self.kept, self.uses = dict(draw.kept), dict(draw.uses)
        self.tally.trained -= len(draw.fresh)
        self.tally.reused -= len(draw.again)
        self.next_untaken = draw.next_untaken
        self.tally.kept_tokens = RunningMean(*draw.kept_tokens)
        self.taken[draw.version] -= len(draw.fresh) + len(draw.again)

    def stats(self, *, capacity: int, active: int, no_signal: str) -> BufferStats:
        """Return the statistics; the arguments as there."""
        tally = self.tally
        return BufferStats(
            capacity=capacity,
            active=active,
            in_flight=len(self.pending) - len(self.ready),
            ready=len(self.ready),
            admitted=tally.admitted,
            trained=tally.trained,
            dropped={reason.value: count for reason, count in tally.dropped.items()},
            kept=len(self.kept),
            without_signal=tally.without_signal,
            no_signal=no_signal,
            reused=tally.reused,
            mean_kept_tokens=tally.kept_tokens.mean,
            mean_dropped_tokens=tally.dropped_tokens.mean,
            admit_wait_s=tally.admit_wait_s,
            draw_wait_s=tally.draw_wait_s,
        )

    def state(self, *, active: bool, limit: int, ledger_lines: int) -> BufferState:
        """Return the full state. active: include the current groups."""
        pending = (t for n, t in self.pending.items() if n not in self.ready)
        kept = ((group, self.uses[n]) for n, group in self.kept.items())
        tally = self.tally
        return BufferState(
            next_group=self.next_group if active else self.next_untaken,
            next_untaken=self.next_untaken,
            pending=tuple(pending) if active else (),
            ready=tuple(self.ready.values()) if active else (),
            kept=tuple(kept) if active else (),
            trained=tally.trained,
            reused=tally.reused,
            dropped={str(reason): count for reason, count in tally.dropped.items()},
            resampled=tally.resampled if active else 0,
            kept_tokens=tally.kept_tokens.pair,
            dropped_tokens=tally.dropped_tokens.pair,
            limit=limit,
            ledger_lines=ledger_lines,
        )

    def restore(self, state: BufferState) -> None:
        """Restore a state, in a buffer that has admitted nothing yet."""
        assert not self.pending and not self.taken, "restore before anything is admitted"
        tickets = [*state.pending, *(g.ticket for g in state.ready)]
        self.next_group, self.next_untaken = state.next_group, state.next_untaken
        self.pending = {t.group: t for t in sorted(tickets, key=lambda t: t.group)}
        self.ready = {g.ticket.group: g for g in state.ready}
        self.kept = {g.ticket.group: g for g, _ in state.kept}
        self.uses = {g.ticket.group: uses for g, uses in state.kept}
        dropped = Counter({Drop(name): count for name, count in state.dropped.items()})
        self.tally = Tally(
            admitted=state.trained + sum(dropped.values()) + len(self.pending),
            trained=state.trained,
            reused=state.reused,
            resampled=state.resampled,
            dropped=dropped,
            kept_tokens=RunningMean(*state.kept_tokens),
            dropped_tokens=RunningMean(*state.dropped_tokens),
        )


def lengths(group: EpisodeGroup) -> list[int]:
    """Return the number of generated tokens of each episode."""
    return [episode.num_drawn for episode in group.episodes]
