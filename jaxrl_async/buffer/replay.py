"""The replay buffer on the host: adds locking to the pure parts, is bounded, and gates the
staleness.

        admit ──> in flight ──put──> ready ──draw──> taken ──set_live──> freed
                                       ^── give_back ──┘  (its step failed)
                     │ fail, cancel    │ stale,        └──> kept ──draw──> ... up to `reuse` times,
                     │ no signal       │ from the           │              or until it is too old
                     └──> freed        └──> dropped, freed  └──> retired, freed

A slot is one use of a group; a group has `reuse` slots, 1 by default. A slot is freed when the
weights of the step that used the group are live, or when the group is dropped. A fresh group may
then take the slot immediately, so the step can still be filled (no livelock at max_staleness 0).
Tokens of one group have versions from its ticket's up to the live one; the bound applies to the
oldest.

With when_too_old="drop", a slot is room for a group in memory: each in flight, ready or kept holds
one, which is freed when the group leaves. Rollouts then run ahead of the bound. Groups that are too
old at the draw are dropped there; groups that become too old while they are generated are cancelled
(see `watch`).
"""

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from jaxrl_async.buffer.contents import (
    BufferState,
    BufferStats,
    Contents,
    LastDraw,
    Tally,
    lengths,
)
from jaxrl_async.buffer.ledger import Ledger
from jaxrl_async.buffer.select import Rank, StepSelection, strict
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

NO_SIGNAL_STEPS, NO_SIGNAL_GROUPS = 10, 128
"""By default the run ends after this many steps' worth, and at least this many, consecutive groups
without a signal."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BufferSettings:
    """Capacity, staleness bound and order of a buffer."""

    groups_per_step: int
    max_staleness: int
    lookahead: int = 0  # newer groups that may overtake a slow one
    when_too_old: Literal["wait", "drop"] = "wait"  # rollouts wait at the gate, or run ahead
    overcommit: float = 1.0  # with drop: groups in memory per (max_staleness + 1) * groups_per_step
    reuse: int = 1  # steps that may train on one group
    rank: Rank = strict  # order of the groups that may be drawn
    has_signal: Callable[[EpisodeGroup], bool] = lambda group: True  # others are dropped when put
    # groups without a signal in one step that end the run; 0: no limit; None: most_without_signal
    # in a row
    max_resampled: int | None = None
    wants_pairs: bool = False  # a group without a pair also has no signal
    task_bounds: Mapping[str, int] = field(default_factory=dict)  # lower staleness of some tasks
    # tasks that the trainer does not wait for: their groups may be overtaken without a limit
    overtaken_tasks: frozenset[str] = frozenset()

    @property
    def most_without_signal(self) -> int:
        """Number of consecutive groups without a signal that ends the run by default."""
        return max(NO_SIGNAL_STEPS * self.groups_per_step, NO_SIGNAL_GROUPS)

    @property
    def waits(self) -> bool:
        """True if rollouts wait at the gate, so no group becomes too old."""
        return self.when_too_old == "wait"

    @property
    def least_limit(self) -> int:
        """The lowest staleness target within which a step can be filled."""
        if not self.waits:
            return 0
        return least_limit(self.groups_per_step, self.lookahead, self.reuse)

    def capacity(self, limit: int) -> int:
        """Return the number of slots for this staleness target; with "drop", the groups in
        memory."""
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

    Used by the rollout loop (admit, put, fail), the trainer (draw, give_back, pause, resume,
    set_limit) and samplers (set_live), under one lock.
    """

    def __init__(
        self,
        settings: BufferSettings,
        *,
        ledger: Ledger | None = None,
        note: Callable[..., None] = lambda **event: None,
        dropped: Callable[[str, int, Drop], None] = lambda task, number, reason: None,
        clock: Clock = time.perf_counter,
    ) -> None:
        """Create an empty buffer at version 0. Raises ConfigError if no step could ever be filled.

        Args:
            settings: bounds and order.
            ledger: records the outcome of each group.
            note: called with each change, under the lock (ports.Schedule.write). The same changes
                in the same order reproduce the buffer.
            dropped: called with the task, the number and the reason of each group that will not be
                trained on, under the lock.
            clock: for measuring wait times.
        """
        settings.check()
        self._settings = settings
        self._limit = settings.max_staleness  # the staleness target
        self._capacity = settings.capacity(self._limit)
        self._ledger, self._note, self._clock = ledger or Ledger(), note, clock
        self._on_dropped = dropped
        self._changed = threading.Condition()
        self._live = 0
        self._contents = Contents(settings.reuse)
        self._selection = StepSelection(
            self._contents,
            groups_per_step=settings.groups_per_step,
            lookahead=settings.lookahead,
            rank=settings.rank,
            task_bounds=settings.task_bounds,
        )
        self._last_draw = LastDraw()
        self._dropped: list[tuple[EpisodeGroup, Drop]] = []  # since the last draw
        self._cancelled: list[CancelledGroup] = []  # since the last draw
        self._version = 0  # that the trainer is drawing for
        self._oldest = 0  # version of the oldest tokens that may still be trained on
        self._aged: Callable[[int], None] = lambda oldest: None
        self._paused = self._closed = False

    # ---- the rollout loop

    def admit(self, timeout_s: float | None = None) -> tuple[Ticket, ...]:
        """Return tickets for all groups that may start now; block until there is at least one.

        Returns no tickets after timeout_s. Raises Closed. At max_staleness 0, all tickets of a step
        are returned by one call, since one set_live frees all slots of a step. This makes the
        sampler's schedule reproducible.
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
        """Add a finished group; return Drop.NO_SIGNAL if it contains no training signal.

        In that case its slot is freed immediately for another prompt. Raises Closed; asserts that
        its ticket is in flight.
        """
        with self._changed:
            self._raise_if_closed()
            number = group.ticket.group
            assert self._contents.is_in_flight(number), f"group {number} is not in flight"
            self._note(put=number)
            if not self._settings.has_signal(group):
                self._contents.tally.resampled += 1
                self._contents.tally.without_signal += 1
                self._drop(group, Drop.NO_SIGNAL, self._live)
                return Drop.NO_SIGNAL
            self._contents.put(group)
            self._contents.tally.without_signal = 0
            self._selection.note_ready(number)
            self._changed.notify_all()
            return None

    def fail(self, ticket: Ticket, prompt: Prompt, reason: Drop) -> None:
        """Return a ticket; its slot is freed immediately for a fresh group. Idempotent, also after
        close()."""
        with self._changed:
            number = ticket.group
            assert number not in self._contents.ready, f"group {number} has been put already"
            if not self._contents.fail(number, reason):
                return
            self._note(fail=number, reason=reason.value)
            facts = {"prompt": prompt.prompt_id, **_of_task(prompt.task)}
            self._ledger.write("dropped", group=number, **facts, reason=reason.value)
            self._forget(prompt.task, number, reason)
            self._changed.notify_all()

    def cancel(self, group: CancelledGroup) -> None:
        """Return the ticket of a group that became too old while it was generated; its slot is
        freed immediately. Idempotent, also after close()."""
        with self._changed:
            number = group.ticket.group
            assert number not in self._contents.ready, f"group {number} has been put already"
            if not self._contents.fail(number, Drop.STALE):
                return
            facts = {"oldest": group.oldest, "lengths": list(group.lengths)}
            self._note(fail=number, reason=Drop.STALE.value, **facts)
            self._cancelled.append(group)
            self._ledger.write(
                "dropped",
                reason=Drop.STALE.value,
                group=number,
                prompt=group.prompt_id,
                **_of_task(group.task),
                version=self._version,
                **facts,
            )
            self._forget(group.task, number, Drop.STALE)
            self._changed.notify_all()

    def began(self, ticket: Ticket, prompt: Prompt) -> None:
        """Record the task of a group that begins, or continues after a resume: a draw may then let
        others overtake it (overtaken_tasks)."""
        if prompt.task not in self._settings.overtaken_tasks:
            return
        with self._changed:
            if self._contents.is_in_flight(ticket.group):
                self._selection.let_overtake(ticket.group)
                self._changed.notify_all()

    def watch(self, aged: Callable[[int], None], stop: Callable[[int], None]) -> None:
        """Register `aged`. It is called, under the lock, with the oldest version whose tokens may
        still be trained on, whenever the trainer draws for a version that raises it; never if
        rollouts wait and no group may be overtaken. `stop` is not called (ports.Gate)."""
        with self._changed:
            self._aged = aged
            aged(self._oldest)

    # ---- the trainer

    def draw(self, version: int, timeout_s: float | None = None) -> Draw:
        """Take the groups of one step, fresh ones first; block until they are ready.

        Groups that are too old or from a future version are dropped, counted and reported. Raises
        Closed, TimeoutError after timeout_s, and TrainingError if too many groups had no signal
        (max_resampled).
        """
        start = self._clock()
        with self._changed:
            self._selection.begin_draw()
            self._report_age(version)
            complete = self._wait(lambda: self._complete(version), timeout_s)
            waited_s = self._clock() - start
            contents = self._contents
            contents.tally.draw_wait_s += waited_s
            if not complete:
                wanted = self._settings.groups_per_step
                raise TimeoutError(f"{wanted} groups were not ready within {timeout_s} s")
            fresh, again = self._selection.of_step(version)
            self._last_draw = contents.before_draw(version, fresh, again)
            groups = (
                *(self._take(n, version) for n in fresh),
                *(self._take_again(n, version) for n in again),
            )
            contents.tally.resampled = 0
            contents.hold(version, len(groups))
            if not self._settings.waits:  # their memory is already free
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
        """Undo the last draw: its groups return to their previous states, and the ledger records
        this.

        Used when a run ends because the step failed, so the resumed run uses the groups. Groups
        admitted or finished since then stay. A second call does nothing.
        """
        with self._changed:
            draw, self._last_draw = self._last_draw, LastDraw()
            if not draw.groups():
                return
            for group in draw.groups():
                facts = {"version": draw.version, "oldest": group.oldest_version}
                self._ledger.write("returned", group=group.ticket.group, **facts)
            self._contents.give_back(draw)
            self._selection.forget()
            self._changed.notify_all()

    def pause(self) -> None:
        """Admit no groups until resume()."""
        with self._changed:
            self._note(pause=True)
            self._paused = True

    def resume(self) -> None:
        """Admit groups again."""
        with self._changed:
            self._note(resume=True)
            self._paused = False
            self._changed.notify_all()

    def set_limit(self, limit: int) -> None:
        """Set the staleness target; asserts that a step can still be filled within it.

        If rollouts wait, admission is reduced until few enough groups are active for the target to
        hold; active groups stay, still bounded by max_staleness. If too old groups are dropped,
        groups above the target are dropped at the next draw.
        """
        least, bound = self._settings.least_limit, self._settings.max_staleness
        assert least <= limit <= bound, f"{limit} is not within {least} and the bound"
        with self._changed:
            self._note(limit=limit)
            self._limit, self._capacity = limit, self._settings.capacity(limit)
            self._changed.notify_all()

    # ---- samplers

    def set_live(self, version: int) -> None:
        """Free the slots of the steps before `version`: every sampler uses it now."""
        with self._changed:
            self._note(live=version)
            self._live = max(self._live, version)
            self._contents.release(version)
            self._changed.notify_all()

    # ---- any thread

    def close(self) -> None:
        """Wake every waiter with Closed. Idempotent."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
            self._ledger.close()

    def stats(self) -> BufferStats:
        """Return a consistent snapshot."""
        with self._changed:
            without_signal = self._contents.tally.without_signal
            return self._contents.stats(
                capacity=self._capacity,
                active=self._active(),
                no_signal=no_signal(self._settings, self._dropped) if without_signal else "",
            )

    def state(self, *, active: bool = True) -> BufferState:
        """Return the state for a resumed run. active: include the current groups. Without them, a
        resumed run generates all groups that no step has used again, under the same numbers."""
        with self._changed:
            return self._contents.state(
                active=active, limit=self._limit, ledger_lines=self._ledger.lines
            )

    def restore(self, state: BufferState, version: int) -> None:
        """Continue at the trainer's `version`, before the first admit.

        All samplers use `version` at that time, so no group is from a future version, and no slot
        waits for weights to become live. The rollouts put or fail the pending groups as usual.
        """
        with self._changed:
            self._contents.restore(state)
            self._live = version
        if state.limit is not None:
            bound = self._settings.max_staleness
            self.set_limit(max(self._settings.least_limit, min(state.limit, bound)))

    # ---- under the lock

    def _active(self) -> int:
        return self._contents.slots if self._settings.waits else self._contents.num_groups

    def _free_slots(self) -> int:
        """Return the number of groups that may start now."""
        reuse = self._settings.reuse if self._settings.waits else 1
        return may_admit(self._active(), self._capacity, reuse)

    def _complete(self, version: int) -> bool:
        """Drop groups that may not be trained on; return True if a step can be filled."""
        dropped, retired = self._selection.unfit(version, self._oldest_age, self._limit)
        for number, reason in dropped.items():
            self._drop(self._contents.ready[number], reason, version)
        for number in retired:  # too old to be reused; its remaining slots are freed
            uses = self._contents.retire(number)
            self._ledger.write("retired", group=number, version=version, uses=uses)
            self._changed.notify_all()
        if self._selection.fills_step(version):
            return True
        if dropped or retired:
            self._note(look=version, dropped=list(dropped), retired=list(retired))
        check_signal(self._settings, self._contents.tally, self._dropped)
        return False

    def _report_age(self, version: int) -> None:
        """Call `aged` if the oldest trainable version rises at this version. The same bound applies
        to the draw."""
        self._version = version
        oldest = version - self._oldest_age
        may_age = not self._settings.waits or bool(self._settings.overtaken_tasks)
        if may_age and oldest > self._oldest:
            self._oldest = oldest
            self._aged(oldest)

    @property
    def _oldest_age(self) -> int:
        """Maximum staleness of a group that is taken for the first time."""
        return self._settings.max_staleness if self._settings.waits else self._limit

    def _take(self, number: int, version: int) -> EpisodeGroup:
        """Give a ready group to the trainer for its first use."""
        group = self._contents.take(number)
        self._ledger.write("trained", **_facts(group, version), use=1)
        return group

    def _take_again(self, number: int, version: int) -> EpisodeGroup:
        """Give a kept group to the trainer again."""
        group, use = self._contents.take_again(number)
        self._ledger.write("trained", **_facts(group, version), use=use)
        return group

    def _drop(self, group: EpisodeGroup, reason: Drop, version: int) -> None:
        """Remove a finished group; its slot is freed."""
        self._contents.drop(group, reason)
        self._dropped.append((group, reason))
        self._ledger.write("dropped", reason=reason.value, **_facts(group, version))
        self._forget(group.prompt.task, group.ticket.group, reason)
        self._changed.notify_all()

    def _forget(self, task: str, number: int, reason: Drop) -> None:
        """Report a group that will not be trained on."""
        self._selection.note_dropped(number)
        self._on_dropped(task, number, reason)

    def _wait(self, ready: Callable[[], bool], timeout_s: float | None) -> bool:
        done = self._changed.wait_for(lambda: self._closed or ready(), timeout_s)
        self._raise_if_closed()
        return done

    def _raise_if_closed(self) -> None:
        if self._closed:
            raise Closed("the replay buffer is closed: the run is stopping")


def _facts(group: EpisodeGroup, version: int) -> dict[str, object]:
    """Return the ledger's fields of a finished group."""
    return {
        "group": group.ticket.group,
        "prompt": group.prompt.prompt_id,
        **_of_task(group.prompt.task),
        "version": version,
        "oldest": group.oldest_version,
        "lengths": lengths(group),
    }


def _of_task(task: str) -> dict[str, str]:
    """Return the ledger's field of a group's task, if the run has several."""
    return {"task": task} if task else {}


# ---- groups without a signal


def check_signal(
    settings: BufferSettings, tally: Tally, dropped: Sequence[tuple[EpisodeGroup, Drop]]
) -> None:
    """Raise TrainingError if too many groups had no signal; dropped: since the last draw."""
    most = settings.max_resampled
    if most is None and tally.without_signal >= settings.most_without_signal:
        steps = tally.without_signal // settings.groups_per_step
        since = f"{tally.without_signal} groups in a row, {steps} steps' worth,"
        limit = "Set algorithm.max_resampled to wait longer (0: forever)"
    elif most and tally.resampled > most:
        since = f"{tally.resampled} groups since the last step"
        limit = f"Raise algorithm.max_resampled ({most}) to wait longer"
    else:
        return
    raise TrainingError(
        f"{since} had no signal ({no_signal(settings, dropped)}): the prompts are too easy or too "
        "hard for the policy, or the reward is constant. Check the rewards in samples.jsonl, "
        "change the data or raise algorithm.group_size; algorithm.dynamic_sampling=false, "
        f"without pairs.loss, also trains on such groups. {limit}."
    )


def no_signal(settings: BufferSettings, dropped: Sequence[tuple[EpisodeGroup, Drop]]) -> str:
    """Describe the last step's worth of groups without a signal."""
    last = dropped[-settings.groups_per_step :]
    rewards = [s.total for g, why in last if why is Drop.NO_SIGNAL for s in g.scores]
    what = "no pair" if settings.wants_pairs else "all rewards of a group equal"
    if not rewards:
        return what
    return f"{what}; the last rewards are {min(rewards):.3g} to {max(rewards):.3g}"
