"""The replay buffer: a lock round the pure parts. Host side, bounded, and the gate on staleness.

        admit ──> in flight ──put──> ready ──draw──> taken ──set_live──> freed
                                       ^── give_back ──┘  (no step came of it)
                     │ fail            │ stale,        └──> kept ──draw──> ... up to `reuse` times,
                     │ no signal       │ from the           │              or until it is too old
                     └──> freed        └──> dropped, freed  └──> retired, freed

A slot is one use of a group; a group has `reuse` of them, 1 by default. It is freed when the
weights of the step that used the group are live, or when the group is dropped: a fresh group may
then take the place at once, so that the step can still be filled (no livelock at max_staleness 0).
Tokens of one group carry versions from its ticket's up to the live one; the bound is on the oldest.

With when_too_old="drop" a slot is a place in memory: one for each group that is in flight, ready or
kept, free as soon as the group leaves. Rollouts then run ahead of the bound, and what has grown too
old by the draw is dropped there.
"""

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Literal

from jaxrl_async.buffer.ledger import Ledger
from jaxrl_async.buffer.select import Rank, select, select_again, strict
from jaxrl_async.errors import Closed, ConfigError, TrainingError
from jaxrl_async.ports import Clock
from jaxrl_async.staleness import (
    capacity,
    drop_reason,
    least_limit,
    may_admit,
    memory_bound,
)
from jaxrl_async.types import Draw, Drop, EpisodeGroup, Prompt, Ticket


@dataclass(frozen=True, slots=True, kw_only=True)
class BufferStats:
    """A reading of the buffer."""

    capacity: int  # slots; fewer while the limit is below max_staleness
    active: int  # slots in use
    in_flight: int  # admitted, not finished
    ready: int  # finished, not taken
    admitted: int  # since the start, groups
    trained: int  # taken by the trainer since the start, groups; each counts once
    dropped: dict[str, int]  # since the start, groups by reason (a Drop)
    kept: int = 0  # trained on, to be used again
    reused: int = 0  # uses after the first since the start
    mean_kept_tokens: float = 0.0  # drawn tokens per episode that was trained on
    mean_dropped_tokens: float = 0.0  # the same of dropped ones: compare, to see a bias by length
    admit_wait_s: float = 0.0  # rollouts on the gate, since the start
    draw_wait_s: float = 0.0  # the trainer on groups, since the start


@dataclass(frozen=True, slots=True, kw_only=True)
class BufferState:
    """What a checkpoint keeps of a buffer, read at one moment."""

    next_group: int  # number of the next ticket
    next_untaken: int  # one more than the highest number trained on
    pending: tuple[Ticket, ...] = ()  # admitted, neither finished nor given back
    ready: tuple[EpisodeGroup, ...] = ()  # finished, not taken
    kept: tuple[tuple[EpisodeGroup, int], ...] = ()  # to be used again, and uses so far
    trained: int = 0
    reused: int = 0
    dropped: Mapping[str, int] = field(default_factory=dict)
    resampled: int = 0
    kept_tokens: tuple[int, int] = (0, 0)  # total, episodes
    dropped_tokens: tuple[int, int] = (0, 0)
    limit: int | None = None  # staleness aimed at; null: as configured
    ledger_lines: int = 0


class ReplayBuffer:
    """Touched by the rollout loop (admit, put, fail), the trainer (draw, pause, resume, set_limit)
    and samplers (set_live)."""

    def __init__(
        self,
        *,
        groups_per_step: int,
        max_staleness: int,
        lookahead: int = 0,
        when_too_old: Literal["wait", "drop"] = "wait",
        overcommit: float = 1.0,
        version: int = 0,
        next_group: int = 0,
        reuse: int = 1,
        rank: Rank = strict,
        has_signal: Callable[[EpisodeGroup], bool] | None = None,
        max_resampled: int = 0,
        ledger: Ledger | None = None,
        note: Callable[..., None] = lambda **event: None,
        clock: Clock = time.perf_counter,
    ) -> None:
        """version: live in every sampler now. Raises ConfigError where no step could be filled.

        when_too_old: rollouts wait at the gate so that nothing grows too old, or run ahead, up to
        overcommit * (max_staleness + 1) * groups_per_step groups in memory, and what is too old
        when it is drawn is dropped. reuse: steps that may train on one group. rank: which of the
        groups that may be drawn come first. has_signal: groups for which it says no are dropped
        when they are put (None: none); more than max_resampled of them for one step end the run
        (0: no limit). note: told of each change, under the lock (ports.Schedule.write): the same
        changes in the same order make the same buffer.
        """
        self._waits = when_too_old == "wait"
        if self._waits and lookahead > max_staleness * groups_per_step:
            raise ConfigError(
                f"staleness.lookahead ({lookahead}) must be at most max_staleness * "
                f"groups_per_step ({max_staleness * groups_per_step}): a step could never be "
                "filled. Lower it or raise staleness.max_staleness."
            )
        self._per_step, self._max_staleness = groups_per_step, max_staleness
        self._limit = max_staleness
        self._lookahead, self._reuse, self._rank = lookahead, reuse, rank
        self._has_signal, self._max_resampled = has_signal, max_resampled
        self._capacity = (
            capacity(max_staleness, groups_per_step, lookahead, reuse)
            if self._waits
            else memory_bound(max_staleness, groups_per_step, overcommit)
        )
        assert self._capacity >= groups_per_step or self._waits, "overcommit is at least 1"
        if self._waits and self._capacity < reuse * groups_per_step:
            raise ConfigError(
                f"buffer.reuse ({reuse}) needs (max_staleness + 1) * groups_per_step to be at "
                f"least {reuse} * (groups_per_step + lookahead) = "
                f"{reuse * (groups_per_step + lookahead)}, and it is "
                f"{(max_staleness + 1) * groups_per_step}: a step could never be filled. Lower it "
                "or raise staleness.max_staleness."
            )
        self._ledger, self._note, self._clock = ledger or Ledger(), note, clock
        self._changed = threading.Condition()
        self._live, self._next_group = version, next_group
        self._pending: dict[int, Ticket] = {}  # admitted, not yet taken; ascending
        self._ready: dict[int, EpisodeGroup] = {}
        self._kept: dict[int, EpisodeGroup] = {}  # trained on, with uses left
        self._uses: dict[int, int] = {}  # of those
        self._taken: dict[int, int] = {}  # version drawn at -> slots it holds
        self._undo: Callable[[], None] = lambda: None  # the last draw
        self._dropped: list[tuple[EpisodeGroup, Drop]] = []  # since the last draw
        self._drops: Counter[str] = Counter()
        self._kept_tokens, self._dropped_tokens = _Mean(), _Mean()
        self._trained = self._reused = self._admitted = 0
        self._resampled = 0  # groups without a signal since the last draw
        self._next_untaken = next_group  # one more than the highest number trained on
        self._admit_wait_s = self._draw_wait_s = 0.0
        self._paused = self._closed = False

    # ---- the rollout loop

    def admit(self, timeout_s: float | None = None) -> tuple[Ticket, ...]:
        """Tickets for all groups that may start now; blocks until there is one.

        Empty after timeout_s. Raises Closed. At max_staleness 0 a step's tickets all come in one
        call, since one set_live frees all slots of a step: the sampler's schedule is reproducible.
        """
        start = self._clock()
        with self._changed:
            open_ = self._wait(lambda: self._free_slots() > 0 and not self._paused, timeout_s)
            self._admit_wait_s += self._clock() - start
            if not open_:
                return ()
            first, count = self._next_group, self._free_slots()
            tickets = tuple(Ticket(group=first + i, version=self._live) for i in range(count))
            for ticket in tickets:
                self._pending[ticket.group] = ticket
                self._ledger.write("admitted", group=ticket.group, version=ticket.version)
            self._next_group += count
            self._admitted += count
            self._note(admit=first, count=count, version=self._live)
            return tickets

    def put(self, group: EpisodeGroup) -> Drop | None:
        """Hand in a finished group; Drop.NO_SIGNAL where there is nothing to learn from it.

        Its slot is then free at once, for another prompt. Raises Closed; asserts that its ticket is
        in flight.
        """
        with self._changed:
            self._raise_if_closed()
            number = group.ticket.group
            assert number in self._pending and number not in self._ready, (
                f"group {number} is not in flight"
            )
            self._note(put=number)
            if self._has_signal is not None and not self._has_signal(group):
                self._resampled += 1
                self._drop(number, group, Drop.NO_SIGNAL, self._live)
                return Drop.NO_SIGNAL
            self._ready[number] = group
            self._changed.notify_all()
            return None

    def fail(self, ticket: Ticket, prompt: Prompt, reason: Drop) -> None:
        """Give a ticket back; its slot is free at once, for a fresh group. Idempotent, also after
        close()."""
        with self._changed:
            assert ticket.group not in self._ready, f"group {ticket.group} has been put already"
            if self._pending.pop(ticket.group, None) is None:
                return
            self._note(fail=ticket.group, reason=reason.value)
            self._drops[reason] += 1
            self._ledger.write(
                "dropped", group=ticket.group, prompt=prompt.prompt_id, reason=reason.value
            )
            self._changed.notify_all()

    # ---- the trainer

    def draw(self, version: int, timeout_s: float | None = None) -> Draw:
        """One step's groups, fresh ones first; blocks until they are ready.

        What is too old or from the future is dropped, counted and told. Raises Closed, TimeoutError
        after timeout_s, and TrainingError where max_resampled groups had no signal.
        """
        start = self._clock()
        with self._changed:
            complete = self._wait(lambda: self._complete(version), timeout_s)
            waited_s = self._clock() - start
            self._draw_wait_s += waited_s
            if not complete:
                raise TimeoutError(f"no {self._per_step} groups were ready within {timeout_s} s")
            fresh, again = self._selected(version)
            self._undo = self._undo_of(version, fresh, again)
            groups = (
                *(self._take(n, version) for n in fresh),
                *(self._take_again(n, version) for n in again),
            )
            self._resampled = 0
            self._taken[version] = self._taken.get(version, 0) + len(groups)
            if not self._waits:  # their places in memory are free already
                self._changed.notify_all()
            dropped, self._dropped = tuple(self._dropped), []
            self._note(
                draw=version,
                groups=[g.ticket.group for g in groups],
                dropped=[g.ticket.group for g, _ in dropped],
            )
            return Draw(groups=groups, dropped=dropped, waited_s=waited_s)

    def give_back(self) -> None:
        """The last draw came to nothing: its groups are as before it, and the ledger says so.

        For a run that ends here, so that a resumed one uses them. A second call does nothing.
        """
        with self._changed:
            undo, self._undo = self._undo, lambda: None
            undo()
            self._changed.notify_all()

    def _undo_of(
        self, version: int, fresh: tuple[int, ...], again: tuple[int, ...]
    ) -> Callable[[], None]:
        """What makes a draw of these groups undone, read before it."""
        ready = {number: self._ready[number] for number in fresh}
        kept, uses = dict(self._kept), dict(self._uses)
        next_untaken, lengths = self._next_untaken, self._kept_tokens.state

        def undo() -> None:
            for number in (*fresh, *again):
                group = ready.get(number) or kept[number]
                facts = {"version": version, "oldest": group.oldest_version}
                self._ledger.write("returned", group=number, **facts)
            tickets = {number: group.ticket for number, group in ready.items()}
            self._pending = dict(sorted((self._pending | tickets).items()))
            self._ready = dict(sorted((self._ready | ready).items()))
            self._kept, self._uses = kept, uses
            self._trained -= len(fresh)
            self._reused -= len(again)
            self._next_untaken, self._kept_tokens = next_untaken, _Mean(*lengths)
            self._taken[version] -= len(fresh) + len(again)

        return undo

    def pause(self) -> None:
        """Admit nothing until resume()."""
        with self._changed:
            self._note(pause=True)
            self._paused = True

    def resume(self) -> None:
        """Admit again."""
        with self._changed:
            self._note(resume=True)
            self._paused = False
            self._changed.notify_all()

    def set_limit(self, limit: int) -> None:
        """Aim at this staleness from now on; asserts that a step can still be filled within it.

        Where rollouts wait, fewer groups are admitted until so few are active that the limit holds;
        those that are active stay, and max_staleness bounds them as ever. Where what is too old is
        dropped, older groups are dropped at the next draw.
        """
        least = self._least_limit()
        assert least <= limit <= self._max_staleness, f"{limit} is not within {least} and the bound"
        with self._changed:
            self._note(limit=limit)
            self._limit = limit
            if self._waits:
                self._capacity = capacity(limit, self._per_step, self._lookahead, self._reuse)
            self._changed.notify_all()

    # ---- samplers

    def set_live(self, version: int) -> None:
        """Every sampler draws from `version` now: the slots of steps before it are free."""
        with self._changed:
            self._note(live=version)
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
                active=self._active(),
                in_flight=len(self._pending) - len(self._ready),
                ready=len(self._ready),
                admitted=self._admitted,
                trained=self._trained,
                dropped=dict(self._drops),
                kept=len(self._kept),
                reused=self._reused,
                mean_kept_tokens=self._kept_tokens.mean,
                mean_dropped_tokens=self._dropped_tokens.mean,
                admit_wait_s=self._admit_wait_s,
                draw_wait_s=self._draw_wait_s,
            )

    def state(self, *, active: bool = True) -> BufferState:
        """What a resumed run needs. active: with the groups that are there now; without, a resumed
        run draws anew all that no step has used, under the same numbers."""
        with self._changed:
            ready = tuple(self._ready.values()) if active else ()
            pending = (t for n, t in self._pending.items() if n not in self._ready)
            kept = ((group, self._uses[n]) for n, group in self._kept.items())
            return BufferState(
                next_group=self._next_group if active else self._next_untaken,
                next_untaken=self._next_untaken,
                pending=tuple(pending) if active else (),
                ready=ready,
                kept=tuple(kept) if active else (),
                trained=self._trained,
                reused=self._reused,
                dropped={str(reason): count for reason, count in self._drops.items()},
                resampled=self._resampled if active else 0,
                kept_tokens=self._kept_tokens.state,
                dropped_tokens=self._dropped_tokens.state,
                limit=self._limit,
                ledger_lines=self._ledger.lines,
            )

    def restore(self, state: BufferState, version: int) -> None:
        """Continue at the trainer's `version`, before the first admit.

        All samplers draw from `version` then, so that nothing is from the future, and no slot
        waits for weights to be live. Whoever owns the pending groups puts or fails them as ever.
        """
        with self._changed:
            assert not self._pending and not self._taken, "restore before anything is admitted"
            self._live, self._next_group = version, state.next_group
            tickets = [*state.pending, *(g.ticket for g in state.ready)]
            self._pending = {t.group: t for t in sorted(tickets, key=lambda t: t.group)}
            self._ready = {g.ticket.group: g for g in state.ready}
            self._kept = {g.ticket.group: g for g, _ in state.kept}
            self._uses = {g.ticket.group: uses for g, uses in state.kept}
            self._next_untaken = state.next_untaken
            self._trained, self._reused = state.trained, state.reused
            self._drops = Counter({Drop(name): count for name, count in state.dropped.items()})
            self._resampled = state.resampled
            self._kept_tokens = _Mean(*state.kept_tokens)
            self._dropped_tokens = _Mean(*state.dropped_tokens)
            self._admitted = self._trained + sum(self._drops.values()) + len(self._pending)
        if state.limit is not None:
            self.set_limit(max(self._least_limit(), min(state.limit, self._max_staleness)))

    # ---- under the lock

    def _active(self) -> int:
        if not self._waits:
            return len(self._pending) + len(self._kept)
        left = sum(self._reuse - self._uses[n] for n in self._kept)
        return len(self._pending) * self._reuse + sum(self._taken.values()) + left

    def _least_limit(self) -> int:
        if not self._waits:
            return 0
        return least_limit(self._per_step, self._lookahead, self._reuse)

    def _free_slots(self) -> int:
        return may_admit(self._active(), self._capacity, self._reuse if self._waits else 1)

    def _selected(self, version: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Numbers of the fresh groups to take, and of those to use again."""
        fresh = select(
            list(self._pending),
            self._ready,
            self._per_step,
            self._lookahead,
            rank=self._rank,
            version=version,
        )
        missing = self._per_step - len(fresh)
        return fresh, select_again(self._kept, missing, rank=self._rank, version=version)

    def _complete(self, version: int) -> bool:
        """Whether a step's groups are at hand, after dropping what may not be trained on."""
        oldest = self._max_staleness if self._waits else self._limit
        reasons = {n: drop_reason(g, version, oldest) for n, g in self._ready.items()}
        dropped = [n for n, reason in reasons.items() if reason is not None]
        retired = [
            n for n, g in self._kept.items() if drop_reason(g, version, self._limit) is not None
        ]
        for number, reason in reasons.items():
            if reason is not None:
                self._drop(number, self._ready[number], reason, version)
        for number in retired:
            self._retire(number, version)
        if sum(map(len, self._selected(version))) == self._per_step:
            return True
        if dropped or retired:
            self._note(look=version, dropped=dropped, retired=retired)
        self._raise_if_hopeless()
        return False

    def _take(self, number: int, version: int) -> EpisodeGroup:
        """A ready group leaves for the trainer; its slot stays in use."""
        del self._pending[number]
        group = self._ready.pop(number)
        lengths = [e.num_drawn for e in group.episodes]
        self._kept_tokens.add(lengths)
        self._trained += 1
        self._next_untaken = max(self._next_untaken, number + 1)
        self._ledger.write("trained", **_facts(group, version, lengths), use=1)
        if self._reuse > 1:
            self._kept[number], self._uses[number] = group, 1
        return group

    def _take_again(self, number: int, version: int) -> EpisodeGroup:
        """A kept group goes to the trainer once more, and leaves after its last use."""
        group = self._kept[number]
        self._uses[number] += 1
        self._reused += 1
        lengths = [e.num_drawn for e in group.episodes]
        self._ledger.write("trained", **_facts(group, version, lengths), use=self._uses[number])
        if self._uses[number] == self._reuse:
            del self._kept[number], self._uses[number]
        return group

    def _retire(self, number: int, version: int) -> None:
        """A kept group has grown too old to be used again; the slots of its uses left are free."""
        del self._kept[number]
        self._ledger.write("retired", group=number, version=version, uses=self._uses.pop(number))
        self._changed.notify_all()

    def _drop(self, number: int, group: EpisodeGroup, reason: Drop, version: int) -> None:
        """A finished group leaves for good; its slot is free."""
        self._ready.pop(number, None)
        del self._pending[number]
        lengths = [e.num_drawn for e in group.episodes]
        self._dropped_tokens.add(lengths)
        self._dropped.append((group, reason))
        self._drops[reason] += 1
        self._ledger.write("dropped", reason=reason.value, **_facts(group, version, lengths))
        self._changed.notify_all()

    def _raise_if_hopeless(self) -> None:
        if self._max_resampled and self._resampled > self._max_resampled:
            raise TrainingError(
                f"{self._resampled} groups since the last step had no signal (all rewards equal), "
                f"more than algorithm.max_resampled ({self._max_resampled}): the prompts are too "
                "easy or too hard for the policy, or the reward is constant. Look at the rewards "
                "in samples.jsonl, change the data or raise algorithm.group_size; "
                "algorithm.dynamic_sampling=false trains on such groups too."
            )

    def _wait(self, ready: Callable[[], bool], timeout_s: float | None) -> bool:
        done = self._changed.wait_for(lambda: self._closed or ready(), timeout_s)
        self._raise_if_closed()
        return done

    def _raise_if_closed(self) -> None:
        if self._closed:
            raise Closed("the replay buffer is closed: the run is stopping")


class _Mean:
    """Running mean of whole numbers; 0 of none."""

    def __init__(self, total: int = 0, count: int = 0) -> None:
        self._total, self._count = total, count

    @property
    def state(self) -> tuple[int, int]:
        return self._total, self._count

    def add(self, values: Iterable[int]) -> None:
        for value in values:
            self._total += value
            self._count += 1

    @property
    def mean(self) -> float:
        return self._total / self._count if self._count else 0.0


def _facts(group: EpisodeGroup, version: int, lengths: list[int]) -> dict[str, object]:
    return {
        "group": group.ticket.group,
        "prompt": group.prompt.prompt_id,
        "version": version,
        "oldest": group.oldest_version,
        "lengths": lengths,
    }
