"""The rollout loop: many groups at a time on one asyncio loop. Needs no JAX.

                                               ┌────────── one task per group ──────────┐
    gate.admit ─> Tickets, Prompts ──submit_many──> Completions ──env──> Episodes ──scorer──> Scores
        ^         (a burst in ticket order,                                                  │
        │          all its requests in one call)                                             v
        └──────────── slots freed by the trainer, or by gate.fail <───────────────────── gate.put

The gate limits the number of concurrent groups; the loop has no other limit. The gate also
reports when pending tokens have become too old: such a group is cancelled immediately.
"""

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from jaxrl_async.algorithms.forks import without_forks
from jaxrl_async.errors import (
    BadEndpoint,
    Closed,
    RetriesExhausted,
    RolloutError,
    RolloutTimeout,
    SamplersLost,
    WeightsError,
    is_run_ending,
    with_kind,
)
from jaxrl_async.metrics.fault_counts import LONGEST_BACKOFF_S, backoff_s
from jaxrl_async.metrics.spans import span
from jaxrl_async.outages import Outages, time_limit
from jaxrl_async.ports.generate import Generate
from jaxrl_async.ports.rollout import Gate, Plays, Scorer
from jaxrl_async.ports.run import Clock
from jaxrl_async.rollout.env import MakeEnv, SingleTurn
from jaxrl_async.rollout.episode import (
    PlayAgain,
    SavedEpisode,
    begin_groups,
    cancel,
    play_group,
    sampled_versions,
)
from jaxrl_async.rollout.pivots import Continuation, PivotPlan, planned_forks, sample_forks
from jaxrl_async.rollout.quorum import Quota
from jaxrl_async.rollout.running_groups import PROGRESS_S, Playing, RunningGroups, SavedGroup
from jaxrl_async.tasks.usercode import end_tasks
from jaxrl_async.types import (
    Drop,
    Episode,
    EpisodeGroup,
    EpisodeLimits,
    Prompt,
    Score,
    Ticket,
)

log = logging.getLogger(__name__)

ADMIT_S = 0.2
"""Maximum wait in one call of the gate, seconds. A cancelled loop may take this long to end."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutStats:
    """Totals since the start."""

    groups: int = 0  # put into the gate
    failures: int = 0  # given back to the gate
    restarts: int = 0  # groups of a checkpoint, played by programs, that were started over
    continued_episodes: int = 0  # unfinished episodes of a checkpoint that continue
    restarted_episodes: int = 0  # those that had tokens of the policy and start over
    lost_members: int = 0  # failed members whose groups continued without them
    cancelled_members: int = 0  # started beyond group_size, and not among the first to end
    cancelled_turn_tokens: int = 0  # sampled by cancelled members in turns that had ended
    forks: int = 0  # continuations sampled from pivots
    lost_forks: int = 0  # failed continuations whose groups continued without them
    fork_tokens: int = 0  # sampled by continuations
    shared_tokens: int = 0  # tokens before the pivots, which continuations did not sample again
    active: int = 0  # running groups
    env_s: float = 0.0  # seconds in environments, over all episodes
    score_s: float = 0.0  # seconds in scorers, over all groups
    gate_wait_s: float = 0.0  # seconds of waiting for the gate

    def plus(self, **more: float) -> "RolloutStats":
        """Return the totals with more of some."""
        return replace(self, **{name: getattr(self, name) + value for name, value in more.items()})


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutSettings:
    """Settings for playing groups, and limits on failures."""

    group_size: int  # number of members in a whole group
    limits: EpisodeLimits
    oversample: int = 0  # extra members; the first group_size members that end are kept
    least_members: int | None = None  # minimum with which a group continues; None: all
    pivots: PivotPlan | None = None  # continuations of its episodes of one turn; None: none
    tasks: tuple[str, ...] = ()  # names of several tasks; (): one
    timeouts_s: Mapping[str, float] = field(default_factory=dict)  # of a group, by task, seconds
    max_failures: int = 8  # number of consecutive failed groups that ends the run
    backoff_s: float = 1.0  # wait after a failure, seconds; doubles with each consecutive one


class ConsecutiveFailures:
    """Failed groups in a row, and the wait after one. Owned by one thread.

    Failures are consecutive if each group started after the previous failure was known: groups that
    ran at the same time may share one cause. Once a group has succeeded, later failures are
    followed by a wait, which doubles with each.
    """

    def __init__(
        self, most: int, first_wait_s: float, clock: Clock, *, always_waits: bool = False
    ) -> None:
        """Count none.

        Args:
            most: number that ends the run.
            first_wait_s: wait after one failure, seconds.
            clock: for the wait.
            always_waits: wait also before any group has succeeded.
        """
        self.number = 0
        self.backoff_until_s = 0.0  # on the clock: no group starts before
        self._most, self._first_wait_s, self._clock = most, first_wait_s, clock
        self._first: BaseException | None = None  # cause
        self._some_succeeded = always_waits

    def succeeded(self) -> None:
        """Note that a group has succeeded."""
        self.number, self.backoff_until_s, self._some_succeeded = 0, 0.0, True

    def failed(self, prompt: Prompt, error: BaseException, *, after: int) -> None:
        """Count a failure, unless its group started before the last one was known; raise
        RolloutError if there are too many.

        after: `number` when the group started.
        """
        if after < self.number:
            return
        self._first = error if self.number == 0 else self._first
        self.number += 1
        if self._some_succeeded:
            self.backoff_until_s = self._clock() + backoff_s(self._first_wait_s, self.number - 1)
        if self.number >= self._most:
            raise RolloutError(
                f"{self.number} groups failed in a row, each started after the previous failure, "
                f"the last on prompt {prompt.prompt_id}. Correct the environment or the reward. "
                f"The first failure was: {with_kind(self._first)}"
            ) from self._first


class FailuresByTask:
    """Failed groups in a row of each task of a run. Owned by one thread; `is_backing_off` is
    thread safe.

    With several tasks, one that fails waits alone, and longer after each failure; the run ends only
    once the last groups of all tasks have failed.
    """

    def __init__(self, tasks: Sequence[str], most: int, first_wait_s: float, clock: Clock) -> None:
        """Count none. tasks: names of those with a weight, of several; (): one. The others as in
        ConsecutiveFailures."""
        self._names = tuple(tasks) or ("",)
        self._most, self._first_wait_s, self._clock = most, first_wait_s, clock
        several = len(self._names) > 1
        self._by_task = {name: self._none(always_waits=several) for name in self._names}

    def _none(self, *, always_waits: bool) -> ConsecutiveFailures:
        return ConsecutiveFailures(
            self._most, self._first_wait_s, self._clock, always_waits=always_waits
        )

    def of(self, prompt: Prompt) -> ConsecutiveFailures:
        """Return the failures of a prompt's task, also of one without a weight."""
        if self._names == ("",):
            return self._by_task[""]
        if prompt.task not in self._by_task:
            self._by_task[prompt.task] = self._none(always_waits=True)
        return self._by_task[prompt.task]

    @property
    def backoff_until_s(self) -> float:
        """Time on the clock before which no task starts a group."""
        return min(self._by_task[name].backoff_until_s for name in self._names)

    def is_backing_off(self, task: str) -> bool:
        """Return whether a task starts no group for now."""
        own = self._by_task.get(task)
        return own is not None and self._clock() < own.backoff_until_s

    def failed(self, prompt: Prompt, error: BaseException, *, after: int) -> None:
        """Count a failure as ConsecutiveFailures does. Raises RolloutError if all tasks fail."""
        own = self.of(prompt)
        try:
            own.failed(prompt, error, after=after)
        except RolloutError as given_up:
            if all(self._by_task[name].number >= self._most for name in self._names):
                raise
            if own.number == self._most:
                log.error(
                    "task %s: %s The other tasks continue, and this one is tried again at "
                    "intervals of up to %.0f s.",
                    prompt.task,
                    given_up,
                    LONGEST_BACKOFF_S,
                )


class RolloutLoop:
    """Plays groups until the gate closes. Owned by one thread; `stats` is thread safe."""

    def __init__(
        self,
        prompts: Iterator[Prompt],
        generate: Generate,
        scorer: Scorer,
        gate: Gate,
        *,
        settings: RolloutSettings,
        make_env: MakeEnv = SingleTurn,
        observe: Callable[[EpisodeGroup], None] = lambda group: None,
        begins: Callable[[Ticket, Prompt], None] = lambda ticket, prompt: None,
        outages: Outages | None = None,
        may_begin: Callable[[], bool] = lambda: True,
        clock: Clock = time.monotonic,
    ) -> None:
        """Start nothing yet.

        Args:
            prompts: source of the groups' prompts.
            generate: the sampler.
            scorer: scores groups.
            gate: admits groups, and receives finished ones.
            settings: settings for playing groups.
            make_env: makes the environment of an episode.
            observe: called with each scored group before it goes to the gate.
            begins: called before a group's environments are made, also when a group is resumed.
            outages: waited out by each episode; None: an outage is an ordinary failure.
            may_begin: called before each prompt is taken; False: its group waits until others end.
            clock: for the wait after a failure.
        """
        self._prompts = prompts
        self._generate = generate
        self._scorer = scorer
        self._gate = gate
        self._settings = settings
        self._make_env, self._observe, self._begins = make_env, observe, begins
        self._again = (
            None
            if outages is None
            else PlayAgain(make_env=make_env, outages=outages, on_restart=self._note_restart)
        )
        self._clock = clock
        self.failures = FailuresByTask(
            settings.tasks, settings.max_failures, settings.backoff_s, clock
        )
        self._may_begin = may_begin
        self._held: tuple[Ticket, ...] = ()  # for groups that no task may start yet
        self._group_ended = asyncio.Event()  # a group has ended since tickets were last held
        self._restored: tuple[SavedGroup, ...] = ()  # played before all others
        self._running = RunningGroups(generate, gate)
        self._stats = RolloutStats()

    def stats(self) -> RolloutStats:
        """Return the totals so far."""
        return self._stats

    def restore(self, groups: Sequence[SavedGroup]) -> None:
        """Play these groups of a checkpoint first; the gate already has their tickets. Call this
        before `run`."""
        self._restored = tuple(groups)
        episodes = [episode for group in groups for episode in group.episodes]
        self._stats = self._stats.plus(
            continued_episodes=sum(episode.continues for episode in episodes),
            restarted_episodes=sum(episode.restarts for episode in episodes),
        )

    async def run(self) -> None:
        """Admit and play groups until the gate closes.

        consumes      tickets, and one prompt for each
        waits for     gate.admit()     unblocked by live weights, by failed groups, and by close
        produces      one task per group, whose first turns are all queued in one call per burst
        on failure    RolloutError after `max_failures` failed groups in a row, with the first
                      cause; returns on Closed; no task is left running, also when cancelled

        An additional task cancels groups that the gate reports as too old.
        """
        running: set[asyncio.Task[None]] = set()
        self._running.open()
        try:
            async with asyncio.TaskGroup() as tasks:
                running.add(tasks.create_task(self._running.cancel_old()))
                try:
                    burst = self._begin(self._restored) if self._restored else []
                    self._note_restarts(self._restored, burst)
                    while burst or (burst := await self._next_burst()):
                        for group in burst:
                            task = tasks.create_task(self._play(group))
                            self._running.started(group, task)
                            running.add(task)
                            task.add_done_callback(running.discard)
                            task.add_done_callback(partial(_cancel, group))
                        burst = []
                finally:
                    await end_tasks(running)
        except BaseExceptionGroup as errors:
            raise _first_leaf(errors) from None
        finally:
            self._running.close()

    def progress(self, timeout_s: float = PROGRESS_S) -> tuple[SavedGroup, ...]:
        """Return all running groups as data. May be called from any other thread; see
        RunningGroups.progress."""
        return self._running.progress(timeout_s)

    def snapshot(self) -> tuple[SavedGroup, ...]:
        """Return the same as `progress`, on the loop's own thread."""
        return self._running.snapshot()

    def _begin(self, groups: Sequence[SavedGroup]) -> list[Playing]:
        """Queue the next requests of these groups in one call. Empty: the sampler is closed."""
        for group in groups:
            self._begins(group.ticket, group.prompt)
        labelled = [(f"g{g.ticket.group}", g.prompt, g.episodes) for g in groups]
        try:
            begun = begin_groups(self._generate, self._make_env, labelled, self._settings.limits)
        except Closed:
            return []
        burst = [
            Playing(
                ticket=g.ticket,
                prompt=g.prompt,
                members=members,
                after=self.failures.of(g.prompt).number,
            )
            for g, members in zip(groups, begun, strict=True)
        ]
        self._running.add(burst)
        return burst

    def _note_restart(self) -> None:
        """Count a restored episode whose environment could not be restored."""
        self._stats = self._stats.plus(restarted_episodes=1)

    def _note_restarts(self, saved: Sequence[SavedGroup], burst: Sequence[Playing]) -> None:
        """Count and log restored groups that start over."""
        number = len(_started_over(saved, burst))
        self._stats = self._stats.plus(restarts=number)
        if number:
            log.warning(
                "%d groups with open sessions or games start over with the same random numbers: if "
                "the program or game repeats its calls, the same weights give the same samples",
                number,
            )

    async def _next_burst(self) -> list[Playing]:
        """Wait for tickets, and for the backoff after a failure; then queue the first turns of all
        their groups in one call. Empty: the gate is closed."""
        tickets, begun = self._held, list[SavedGroup]()
        fresh = (SavedEpisode(),) * (self._settings.group_size + self._settings.oversample)
        while not begun:
            started = time.monotonic()
            try:
                with span("wait at the gate", "gate"):
                    wait_s = ADMIT_S
                    if self._held:  # until a group ends, or the wait of a task is over
                        await self._wait_for_end()
                        wait_s = 0.0
                    tickets += await asyncio.to_thread(self._gate.admit, wait_s)
            except Closed:
                return []
            finally:
                self._stats = self._stats.plus(gate_wait_s=time.monotonic() - started)
            if self._clock() < self.failures.backoff_until_s:
                continue
            self._group_ended.clear()
            waiting = sorted(tickets, key=lambda t: t.group)
            while waiting and self._may_begin():
                prompt = _next_prompt(self._prompts)
                begun.append(SavedGroup(ticket=waiting.pop(0), prompt=prompt, episodes=fresh))
            tickets = self._held = tuple(waiting)
        return self._begin(begun)

    async def _wait_for_end(self) -> None:
        """Wait until a group ends, for ADMIT_S at most."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._group_ended.wait(), ADMIT_S)

    async def _play(self, playing: Playing) -> None:
        """Play and score one group, and put it into the gate.

        consumes      a ticket, its prompt, the turns that are already queued
        waits for     the sampler, the environments, the scorer
        produces      an EpisodeGroup into the gate
        on failure    the ticket is given back (Drop.FAILED) and counted; too many consecutive
                      failures end the run, and a misconfigured scorer ends it immediately
        """
        self._stats = self._stats.plus(active=1)
        try:
            group = await self._make_in_time(playing)
            if playing not in self._running:
                return
            self._observe(without_forks(group))
            self._gate.put(group)
            self._running.remove(playing)
            self._stats = self._stats.plus(groups=1)
            self.failures.of(playing.prompt).succeeded()
        except Closed:
            return
        except (Exception, asyncio.CancelledError) as error:
            if playing not in self._running:
                return
            if is_run_ending(error) or isinstance(error, BadEndpoint):
                raise
            self._give_back(playing, error)
        finally:
            self._stats = self._stats.plus(active=-1)
            self._running.ended(playing)
            self._group_ended.set()

    async def _make_in_time(self, playing: Playing) -> EpisodeGroup:
        """Play and score a group within its task's timeout. Raises RolloutTimeout."""
        task = playing.prompt.task
        limit_s = self._settings.timeouts_s.get(task)
        if limit_s is None:
            return await self._make_group(playing)
        try:
            async with time_limit(limit_s) as limit:
                return await self._make_group(playing)
        except TimeoutError:
            if not limit.expired():
                raise
            raise RolloutTimeout(
                f"prompt {playing.prompt.prompt_id}: the group took more than {limit_s:g} s. Make "
                f"the task faster or raise tasks.{task}.timeout_s."
            ) from None

    async def _make_group(self, playing: Playing) -> EpisodeGroup:
        prompt, settings = playing.prompt, self._settings
        limits = settings.limits.of(prompt)

        def left_out(member: int, error: BaseException | None) -> None:
            self._count_left_out(playing, member, error)

        episodes = await play_group(
            self._generate,
            prompt,
            playing.members,
            label=playing.label,
            limits=limits,
            again=self._again,
            quota=Quota.of(
                len(playing.members), group_size=settings.group_size, least=settings.least_members
            ),
            left_out=left_out,
            spent_s=self._count_env,
        )
        continued, lost = await _sample_continuations(self._generate, settings, playing, episodes)
        sampled = sum(one.episode.num_drawn for one in continued)
        self._stats = self._stats.plus(
            forks=len(continued),
            lost_forks=lost,
            fork_tokens=sampled,
            shared_tokens=sum(one.whole.num_drawn for one in continued) - sampled,
        )
        judged = (*episodes, *(c.whole for c in continued))
        episodes = (*episodes, *(c.episode for c in continued))
        started = time.monotonic()
        try:
            with span("score", "scorer", prompt=prompt.prompt_id, answers=len(judged)):
                scores = tuple(await self._scorer(judged, prompt))
        finally:
            self._stats = self._stats.plus(score_s=time.monotonic() - started)
        _check_scores(scores, episodes, prompt)
        episodes = tuple(replace(e, opened=(), messages=()) for e in episodes)  # scorers read them
        return EpisodeGroup(prompt=prompt, episodes=episodes, scores=scores, ticket=playing.ticket)

    def _count_left_out(self, playing: Playing, m: int, error: BaseException | None) -> None:
        if error is None:
            tokens = len(sampled_versions(playing.members[m], ()))
            self._stats = self._stats.plus(cancelled_members=1, cancelled_turn_tokens=tokens)
            return
        self._stats = self._stats.plus(lost_members=1)
        log.warning(
            "group %d, prompt %d continues without its member %d, which failed: %s",
            playing.ticket.group,
            playing.prompt.prompt_id,
            m,
            with_kind(error),
        )

    def _count_env(self, seconds: float) -> None:
        self._stats = self._stats.plus(env_s=seconds)

    def _give_back(self, playing: Playing, error: BaseException) -> None:
        """Give the ticket back, unless too many consecutive groups have failed, or the samplers
        have ended, in which case all groups would fail.

        An outage that was waited out for the maximum time does not count as one of them.
        """
        self._stats = self._stats.plus(failures=1)
        if isinstance(error, WeightsError | SamplersLost):
            raise error
        ticket, prompt = playing.ticket, playing.prompt
        if not isinstance(error, RetriesExhausted):
            self.failures.failed(prompt, error, after=playing.after)
        log.warning(
            "group %d, prompt %d failed: %s", ticket.group, prompt.prompt_id, with_kind(error)
        )
        self._running.remove(playing)
        self._gate.fail(ticket, prompt, Drop.FAILED)


def _next_prompt(prompts: Iterator[Prompt]) -> Prompt:
    """Return the next prompt. Raises RolloutError if there is none."""
    prompt = next(prompts, None)
    if prompt is None:
        raise RolloutError(
            "the prompts ran out before the run ended. Use an iterator that repeats."
        )
    return prompt


async def _sample_continuations(
    generate: Generate, settings: RolloutSettings, playing: Playing, episodes: Sequence[Episode]
) -> tuple[list[Continuation], int]:
    """Sample the continuations of a group's episodes from their pivots. Return them, and the number
    of those that failed."""
    if settings.pivots is None:
        return [], 0
    numbers = [m for m, member in enumerate(playing.members) if not member.left_out]
    forks = planned_forks(
        settings.pivots,
        playing.prompt,
        list(zip(numbers, episodes, strict=True)),
        label=playing.label,
        limits=settings.limits.of(playing.prompt),
    )
    done = await sample_forks(generate, forks, episodes, settings.limits.of(playing.prompt))
    return done, len(forks) - len(done)


def _check_scores(scores: Sequence[Score], episodes: Sequence[Episode], prompt: Prompt) -> None:
    """Raise RolloutError unless each episode has a score."""
    if len(scores) != len(episodes):
        raise RolloutError(
            f"prompt {prompt.prompt_id}: the scorer gave {len(scores)} scores for "
            f"{len(episodes)} episodes. It must return one for each, in order."
        )


def _started_over(saved: Sequence[SavedGroup], burst: Sequence[Playing]) -> list[Playing]:
    """Return the restored groups that have a member, played by a program or a game, without a saved
    call."""
    return [
        group
        for saved_group, group in zip(saved, burst, strict=False)
        if any(
            isinstance(member.env, Plays) and not (one.calls or one.left_out)
            for one, member in zip(saved_group.episodes, group.members, strict=False)
        )
    ]


def _cancel(group: Playing, _: object) -> None:
    for member in group.members:
        cancel(member)


def _first_leaf(errors: BaseExceptionGroup[BaseException]) -> BaseException:
    """Return the first leaf of a group of exceptions."""
    inner = errors.exceptions[0]
    return _first_leaf(inner) if isinstance(inner, BaseExceptionGroup) else inner
