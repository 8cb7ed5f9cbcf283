"""The replay buffer: a lock round the pure parts. Host side, bounded, and the gate on staleness.

        admit ──> in flight ──put──> ready ──draw──> taken ──set_live──> freed
                                       ^── give_back ──┘  (no step came of it)
                     │ fail, cancel    │ stale,        └──> kept ──draw──> ... up to `reuse` times,
                     │ no signal       │ from the           │              or until it is too old
                     └──> freed        └──> dropped, freed  └──> retired, freed

A slot is one use of a group; a group has `reuse` of them, 1 by default. It is freed when the
weights of the step that used the group are live, or when the group is dropped: a fresh group may
then take the place at once, so that the step can still be filled (no livelock at max_staleness 0).
Tokens of one group carry versions from its ticket's up to the live one; the bound is on the oldest.

With when_too_old="drop" a slot is a place in memory: one for each group that is in flight, ready or
kept, free as soon as the group leaves. Rollouts then run ahead of the bound. What has grown too old
by the draw is dropped there; what has done so while it is drawn is cancelled: `watch` says when.
"""

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from jaxrl_async.buffer.contents import (
    BufferState,
    BufferStats,
    Contents,
    LastDraw,
    lengths,
)
from jaxrl_async.buffer.eligibility import Judge
from jaxrl_async.buffer.ledger import Ledger
from jaxrl_async.buffer.select import Rank, select, select_again, strict, waited_for
from jaxrl_async.errors import Closed, ConfigError, TrainingError
from jaxrl_async.ports.run import Clock
from jaxrl_async.staleness import (
    capacity,
    least_limit,
    may_admit,
    memory_bound,
    never_fills_a_step,
)
from jaxrl_async.types import CancelledGroup, Draw, Drop, EpisodeGroup, Prompt, Ticket

HOPELESS_STEPS, HOPELESS_GROUPS = 10, 128
"""As many steps' worth of groups without a signal in a row, and so many at least, end the run by
default."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BufferSettings:
    """How many groups a buffer holds, how old they may grow, and which come first."""

    groups_per_step: int
    max_staleness: int
    lookahead: int = 0  # younger groups that may overtake a slow one
    when_too_old: Literal["wait", "drop"] = "wait"  # rollouts wait at the gate, or run ahead
    overcommit: float = 1.0  # with drop: groups in memory per (max_staleness + 1) * groups_per_step
    reuse: int = 1  # steps that may train on one group
    rank: Rank = strict  # which of the groups that may be drawn come first
    has_signal: Callable[[EpisodeGroup], bool] = lambda group: True  # others are dropped when put
    # groups without a signal in one step that end the run; None: `hopeless` in a row; 0: no limit
    max_resampled: int | None = None
    wants_pairs: bool = False  # no signal is also: no pair

    @property
    def hopeless(self) -> int:
        """Groups without a signal in a row that end the run by default."""
        return max(HOPELESS_STEPS * self.groups_per_step, HOPELESS_GROUPS)

    @property
    def waits(self) -> bool:
        """Whether rollouts wait at the gate so that nothing grows too old."""
        return self.when_too_old == "wait"

    @property
    def least_limit(self) -> int:
        """The lowest staleness target within which a step can be filled."""
        if not self.waits:
            return 0
        return least_limit(self.groups_per_step, self.lookahead, self.reuse)

    def capacity(self, limit: int) -> int:
        """Return the slots for this staleness target; with drop the places in memory."""
        if not self.waits:
            return memory_bound(self.max_staleness, self.groups_per_step, self.overcommit)
        return capacity(limit, self.groups_per_step, self.lookahead, self.reuse)

    def check(self) -> None:
        """Raise ConfigError if no step could ever be filled."""
        assert self.overcommit >= 1 or self.waits, "overcommit is at least 1"
        problem = never_fills_a_step(
            self.max_staleness, self.groups_per_step, self.lookahead, self.reuse
        )
        if self.waits and problem:
            raise ConfigError(problem)


class ReplayBuffer:
    """The groups between rollouts and trainer, and the gate that bounds their staleness.

    Touched by the rollout loop (admit, put, fail), the trainer (draw, give_back, pause, resume,
    set_limit) and samplers (set_live), under one lock.
    """

    def __init__(
        self,
        settings: BufferSettings,
        *,
        ledger: Ledger | None = None,
        note: Callable[..., None] = lambda **event: None,
        clock: Clock = time.perf_counter,
    ) -> None:
        """Make an empty buffer at version 0. Raises ConfigError if no step could ever be filled.

        Args:
            settings: the bounds and the order.
            ledger: where the fate of each group is written.
            note: called with each change, under the lock (ports.Schedule.write): the same changes
                in the same order make the same buffer.
            clock: for the times waited.
        """
        settings.check()
        self._settings = settings
        self._limit = settings.max_staleness  # the staleness target
        self._capacity = settings.capacity(self._limit)
        self._ledger, self._note, self._clock = ledger or Ledger(), note, clock
        self._changed = threading.Condition()
        self._live = 0
        self._contents = Contents(settings.reuse)
        self._judge, self._judge_again = Judge(), Judge()  # of ready groups, of kept ones
        self._last_draw = LastDraw()
        # while a draw waits: only a group of at most this number can fill its step; None: look
        self._waits_for: int | None = None
        self._dropped: list[tuple[EpisodeGroup, Drop]] = []  # since the last draw
        self._cancelled: list[CancelledGroup] = []  # since the last draw
        self._version = 0  # that the trainer draws for
        self._oldest = 0  # version of the oldest tokens that may still be trained on
        self._aged: Callable[[int], None] = lambda oldest: None
        self._paused = self._closed = False

    # ---- the rollout loop

    def admit(self, timeout_s: float | None = None) -> tuple[Ticket, ...]:
        """Give tickets for all groups that may start now; block until there is one.

        Empty after timeout_s. Raises Closed. At max_staleness 0 a step's tickets all come in one
        call, since one set_live frees all slots of a step: the sampler's schedule is reproducible.
        """
        start = self._clock()
        with self._changed:
            is_open = self._wait(lambda: self._free_slots() > 0 and not self._paused, timeout_s)
            self._contents.tally.admit_wait_s += self._clock() - start
            if not is_open:
                return ()
            tickets = self._contents.admit(self._free_slots(), self._live)
            for ticket in tickets:
                self._ledger.write("admitted", group=ticket.group, version=ticket.version)
            self._note(admit=tickets[0].group, count=len(tickets), version=self._live)
            return tickets

    def put(self, group: EpisodeGroup) -> Drop | None:
        """Hand in a finished group; return Drop.NO_SIGNAL if it has nothing to learn from.

        Its slot is then free at once, for another prompt. Raises Closed; asserts that its ticket is
        in flight.
        """
        with self._changed:
            self._raise_if_closed()
            number = group.ticket.group
            assert self._contents.is_in_flight(number), f"group {number} is not in flight"
            self._note(put=number)
            if not self._settings.has_signal(group):
                self._contents.tally.resampled += 1
                self._contents.tally.barren += 1
                self._drop(group, Drop.NO_SIGNAL, self._live)
                return Drop.NO_SIGNAL
            self._contents.put(group)
            self._contents.tally.barren = 0
            if self._waits_for is not None and number <= self._waits_for:
                self._waits_for = None
            self._changed.notify_all()
            return None

    def fail(self, ticket: Ticket, prompt: Prompt, reason: Drop) -> None:
        """Give a ticket back; its slot is free at once, for a fresh group. Idempotent, also after
        close()."""
        with self._changed:
            number = ticket.group
            assert number not in self._contents.ready, f"group {number} has been put already"
            if not self._contents.fail(number, reason):
                return
            self._waits_for = None
            self._note(fail=number, reason=reason.value)
            self._ledger.write(
                "dropped", group=number, prompt=prompt.prompt_id, reason=reason.value
            )
            self._changed.notify_all()

    def cancel(self, group: CancelledGroup) -> None:
        """Give back the ticket of a group that has become too old while it was drawn; its slot is
        free at once. Idempotent, also after close()."""
        with self._changed:
            number = group.ticket.group
            assert number not in self._contents.ready, f"group {number} has been put already"
            if not self._contents.fail(number, Drop.STALE):
                return
            self._waits_for = None
            facts = {"oldest": group.oldest, "lengths": list(group.lengths)}
            self._note(fail=number, reason=Drop.STALE.value, **facts)
            self._cancelled.append(group)
            self._ledger.write(
                "dropped",
                reason=Drop.STALE.value,
                group=number,
                prompt=group.prompt_id,
                version=self._version,
                **facts,
            )
            self._changed.notify_all()

    def watch(self, aged: Callable[[int], None], stop: Callable[[int], None]) -> None:
        """Call `aged`, under the lock, with the version of the oldest tokens that may still be
        trained on whenever the trainer asks for groups of a version at which that rises; never
        where rollouts wait. `stop` is not called (ports.Gate)."""
        with self._changed:
            self._aged = aged
            aged(self._oldest)

    # ---- the trainer

    def draw(self, version: int, timeout_s: float | None = None) -> Draw:
        """Take one step's groups, fresh ones first; block until they are ready.

        What is too old or from the future is dropped, counted and reported. Raises Closed,
        TimeoutError after timeout_s, and TrainingError if too many groups had no signal
        (max_resampled).
        """
        start = self._clock()
        with self._changed:
            self._waits_for = None
            self._tell_age(version)
            complete = self._wait(lambda: self._complete(version), timeout_s)
            waited_s = self._clock() - start
            contents = self._contents
            contents.tally.draw_wait_s += waited_s
            if not complete:
                wanted = self._settings.groups_per_step
                raise TimeoutError(f"no {wanted} groups were ready within {timeout_s} s")
            fresh, again = self._selected(version)
            self._last_draw = contents.before_draw(version, fresh, again)
            groups = (
                *(self._take(n, version) for n in fresh),
                *(self._take_again(n, version) for n in again),
            )
            contents.tally.resampled = 0
            contents.hold(version, len(groups))
            if not self._settings.waits:  # their places in memory are free already
                self._changed.notify_all()
            dropped, self._dropped = tuple(self._dropped), []
            cancelled, self._cancelled = tuple(self._cancelled), []
            self._note(
                draw=version,
                groups=[g.ticket.group for g in groups],
                dropped=[g.ticket.group for g, _ in dropped],
            )
            return Draw(groups=groups, dropped=dropped, waited_s=waited_s, cancelled=cancelled)

    def give_back(self) -> None:
        """Undo the last draw: its groups are as before it, and the ledger says so.

        For a run that ends because the step failed, so that a resumed one uses the groups. What was
        admitted or finished since stays. A second call does nothing.
        """
        with self._changed:
            draw, self._last_draw = self._last_draw, LastDraw()
            if not draw.groups():
                return
            for group in draw.groups():
                facts = {"version": draw.version, "oldest": group.oldest_version}
                self._ledger.write("returned", group=group.ticket.group, **facts)
            self._contents.give_back(draw)
            self._judge.forget()
            self._judge_again.forget()
            self._changed.notify_all()

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
        """Set the staleness target; asserts that a step can still be filled within it.

        Where rollouts wait, fewer groups are admitted until so few are active that the target
        holds; those that are active stay, and max_staleness bounds them as before. Where too old
        groups are dropped, those above the target are dropped at the next draw.
        """
        least, bound = self._settings.least_limit, self._settings.max_staleness
        assert least <= limit <= bound, f"{limit} is not within {least} and the bound"
        with self._changed:
            self._note(limit=limit)
            self._limit, self._capacity = limit, self._settings.capacity(limit)
            self._changed.notify_all()

    # ---- samplers

    def set_live(self, version: int) -> None:
        """Free the slots of the steps before `version`: every sampler draws from it now."""
        with self._changed:
            self._note(live=version)
            self._live = max(self._live, version)
            self._contents.release(version)
            self._changed.notify_all()

    # ---- anybody

    def close(self) -> None:
        """Wake every waiter with Closed. Idempotent."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
            self._ledger.close()

    def stats(self) -> BufferStats:
        """Return a consistent reading."""
        with self._changed:
            contents, tally = self._contents, self._contents.tally
            return BufferStats(
                capacity=self._capacity,
                active=self._active(),
                in_flight=len(contents.pending) - len(contents.ready),
                ready=len(contents.ready),
                admitted=tally.admitted,
                trained=tally.trained,
                dropped={reason.value: count for reason, count in tally.dropped.items()},
                kept=len(contents.kept),
                barren=tally.barren,
                no_signal=self._no_signal() if tally.barren else "",
                reused=tally.reused,
                mean_kept_tokens=tally.kept_tokens.mean,
                mean_dropped_tokens=tally.dropped_tokens.mean,
                admit_wait_s=tally.admit_wait_s,
                draw_wait_s=tally.draw_wait_s,
            )

    def state(self, *, active: bool = True) -> BufferState:
        """Return what a resumed run needs. active: with the groups that are there now; without, a
        resumed run draws anew all that no step has used, under the same numbers."""
        with self._changed:
            return self._contents.state(
                active=active, limit=self._limit, ledger_lines=self._ledger.lines
            )

    def restore(self, state: BufferState, version: int) -> None:
        """Continue at the trainer's `version`, before the first admit.

        All samplers draw from `version` then, so that nothing is from the future, and no slot
        waits for weights to be live. The rollouts put or fail the pending groups as usual.
        """
        with self._changed:
            self._contents.restore(state)
            self._live = version
        if state.limit is not None:
            bound = self._settings.max_staleness
            self.set_limit(max(self._settings.least_limit, min(state.limit, bound)))

    # ---- under the lock

    def _active(self) -> int:
        return self._contents.slots if self._settings.waits else self._contents.places

    def _free_slots(self) -> int:
        """Return how many groups may start now."""
        reuse = self._settings.reuse if self._settings.waits else 1
        return may_admit(self._active(), self._capacity, reuse)

    def _fresh(self, version: int) -> tuple[int, ...]:
        """Return the numbers of the fresh groups to take."""
        settings, contents = self._settings, self._contents
        fresh = select(
            list(contents.pending),
            contents.ready,
            settings.groups_per_step,
            settings.lookahead,
            rank=settings.rank,
            version=version,
        )
        return fresh

    def _selected(self, version: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Return the numbers of the fresh groups to take, and of those to use again."""
        settings, fresh = self._settings, self._fresh(version)
        missing = settings.groups_per_step - len(fresh)
        again = select_again(self._contents.kept, missing, rank=settings.rank, version=version)
        return fresh, again

    def _complete(self, version: int) -> bool:
        """Drop what may not be trained on; return whether a step can be filled."""
        contents, settings = self._contents, self._settings
        oldest = settings.max_staleness if settings.waits else self._limit
        dropped = self._judge.unfit(contents.ready, version, oldest)
        retired = self._judge_again.unfit(contents.kept, version, self._limit)
        for number, reason in dropped.items():
            self._drop(contents.ready[number], reason, version)
        for number in retired:
            self._retire(number, version)
        wanted = settings.groups_per_step
        enough = len(contents.ready) + len(contents.kept) >= wanted
        if enough and self._waits_for is None:
            fresh = self._fresh(version)
            if len(fresh) + len(contents.kept) >= wanted:
                return True
            self._waits_for = waited_for(contents.pending, frozenset(fresh), settings.lookahead)
        if dropped or retired:
            self._note(look=version, dropped=list(dropped), retired=list(retired))
        self._raise_if_hopeless()
        return False

    def _tell_age(self, version: int) -> None:
        """Tell who watches if tokens that could be trained on before are too old at this version.
        What the bound of this moment refuses is refused at the draw, too."""
        self._version = version
        oldest = version - self._limit
        if not self._settings.waits and oldest > self._oldest:
            self._oldest = oldest
            self._aged(oldest)

    def _take(self, number: int, version: int) -> EpisodeGroup:
        """Give a ready group to the trainer for its first use."""
        group = self._contents.take(number)
        self._ledger.write("trained", **_facts(group, version), use=1)
        return group

    def _take_again(self, number: int, version: int) -> EpisodeGroup:
        """Give a kept group to the trainer once more."""
        group, use = self._contents.take_again(number)
        self._ledger.write("trained", **_facts(group, version), use=use)
        return group

    def _retire(self, number: int, version: int) -> None:
        """Remove a kept group that is too old to be used again; its remaining slots are free."""
        uses = self._contents.retire(number)
        self._ledger.write("retired", group=number, version=version, uses=uses)
        self._changed.notify_all()

    def _drop(self, group: EpisodeGroup, reason: Drop, version: int) -> None:
        """Remove a finished group for good; its slot is free."""
        self._contents.drop(group, reason)
        self._waits_for = None
        self._dropped.append((group, reason))
        self._ledger.write("dropped", reason=reason.value, **_facts(group, version))
        self._changed.notify_all()

    def _raise_if_hopeless(self) -> None:
        settings, tally = self._settings, self._contents.tally
        most = settings.max_resampled
        if most is None and tally.barren >= settings.hopeless:
            steps = tally.barren // settings.groups_per_step
            since = f"{tally.barren} groups in a row, {steps} steps' worth,"
            limit = "Set algorithm.max_resampled to wait for longer (0: for ever)"
        elif most and tally.resampled > most:
            since = f"{tally.resampled} groups since the last step"
            limit = f"Raise algorithm.max_resampled ({most}) to wait for longer"
        else:
            return
        raise TrainingError(
            f"{since} had no signal ({self._no_signal()}): the prompts are too easy or too hard "
            "for the policy, or the reward is constant. Look at the rewards in samples.jsonl, "
            "change the data or raise algorithm.group_size; algorithm.dynamic_sampling=false, "
            f"without pairs.loss, trains on such groups too. {limit}."
        )

    def _no_signal(self) -> str:
        """Say what the last step's worth of groups without a signal was like."""
        last = self._dropped[-self._settings.groups_per_step :]
        rewards = [s.total for g, why in last if why is Drop.NO_SIGNAL for s in g.scores]
        what = "no pair" if self._settings.wants_pairs else "all rewards of a group alike"
        if not rewards:
            return what
        return f"{what}; the last rewards are {min(rewards):.3g} to {max(rewards):.3g}"

    def _wait(self, ready: Callable[[], bool], timeout_s: float | None) -> bool:
        done = self._changed.wait_for(lambda: self._closed or ready(), timeout_s)
        self._raise_if_closed()
        return done

    def _raise_if_closed(self) -> None:
        if self._closed:
            raise Closed("the replay buffer is closed: the run is stopping")


def _facts(group: EpisodeGroup, version: int) -> dict[str, object]:
    """Return what the ledger says of a group that is finished."""
    return {
        "group": group.ticket.group,
        "prompt": group.prompt.prompt_id,
        "version": version,
        "oldest": group.oldest_version,
        "lengths": lengths(group),
    }
