"""The rollout loop: many groups at a time on one asyncio loop. Needs no JAX.

                                               ┌────────── one task per group ──────────┐
    gate.admit ─> Tickets, Prompts ──submit_many──> Completions ──env──> Episodes ──scorer──> Scores
        ^         (a burst in ticket order,                                                  │
        │          all its requests at once)                                                 v
        └──────────── slots freed by the trainer, or by gate.fail <───────────────────── gate.put

The gate bounds how many groups are played at once; the loop has no bound of its own.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial

from jaxrl_async.errors import Closed, JaxrlError, RolloutError, is_the_runs_own_end
from jaxrl_async.ports import Gate, Generate, Scorer
from jaxrl_async.rollout.env import MakeEnv, SingleTurn
from jaxrl_async.rollout.episode import (
    EpisodeLimits,
    EpisodeProgress,
    SavedEpisode,
    Turn,
    begin_groups,
    cancel,
    play_group,
    request_id,
    saved_episode,
)
from jaxrl_async.types import (
    Drop,
    EpisodeGroup,
    Partial,
    Prompt,
    Ticket,
)

log = logging.getLogger(__name__)

ADMIT_S = 0.2
"""Longest wait in one call of the gate, seconds: a cancelled loop may take so long to end."""
PROGRESS_S = 30.0
"""Longest wait for the loop to report the running groups, seconds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Playing:
    """A group that is being played."""

    ticket: Ticket
    prompt: Prompt
    members: tuple[EpisodeProgress, ...]

    @property
    def label(self) -> str:
        """The group's part of its requests' ids."""
        return f"g{self.ticket.group}"


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedGroup:
    """A group that was being played, as data."""

    ticket: Ticket
    prompt: Prompt
    episodes: tuple[SavedEpisode, ...]


SAVED_KINDS: tuple[type, ...] = (SavedGroup, SavedEpisode, Turn)
"""Records that a checkpoint holds of the rollouts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutStats:
    """Totals since the start."""

    groups: int  # handed to the gate
    failures: int  # given back to the gate
    active: int  # being played now
    env_s: float  # seconds that environments took, over all episodes
    score_s: float  # seconds that scorers took, over all groups
    gate_wait_s: float  # seconds in which the gate was shut


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutSettings:
    """How groups are played, and when playing is given up."""

    group_size: int
    limits: EpisodeLimits
    max_failures: int = 8  # groups that fail in a row and end the run


class RolloutLoop:
    """Plays groups until the gate closes. Owned by one thread; `stats` from any."""

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
    ) -> None:
        """observe: called with each scored group before it goes to the gate, whatever follows."""
        self._prompts = prompts
        self._generate = generate
        self._scorer = scorer
        self._gate = gate
        self._settings = settings
        self._make_env, self._observe = make_env, observe
        self._restored: tuple[SavedGroup, ...] = ()  # played before all others
        self._playing: dict[int, Playing] = {}  # by number; what fails or closes stays
        self._loop: asyncio.AbstractEventLoop | None = None  # while it runs
        self._first_cause: BaseException | None = None  # of the failures in a row
        self._failures_in_a_row = 0
        self._groups = self._failures = self._active = 0
        self._env_s = self._score_s = self._gate_wait_s = 0.0

    def stats(self) -> RolloutStats:
        """Return the totals so far."""
        return RolloutStats(
            groups=self._groups,
            failures=self._failures,
            active=self._active,
            env_s=self._env_s,
            score_s=self._score_s,
            gate_wait_s=self._gate_wait_s,
        )

    def restore(self, groups: Sequence[SavedGroup]) -> None:
        """Play these groups of a checkpoint first; their tickets are the gate's already. Call it
        before `run`."""
        self._restored = tuple(groups)

    async def run(self) -> None:
        """Admit and play groups until the gate closes.

        consumes      tickets, and one prompt for each
        waits for     gate.admit()     unblocked by live weights, by failed groups, and by close
        produces      one task per group, whose first turns are all queued in one call per burst
        on failure    RolloutError after `max_failures` failed groups in a row, with the first
                      cause; Closed ends it quietly; nothing stays in flight, also when cancelled
        """
        running: set[asyncio.Task[None]] = set()
        self._loop = asyncio.get_running_loop()
        try:
            async with asyncio.TaskGroup() as tasks:
                burst = self._begin(self._restored) if self._restored else []
                while burst or (burst := await self._next_burst()):
                    for group in burst:
                        task = tasks.create_task(self._play(group))
                        running.add(task)
                        task.add_done_callback(running.discard)
                        task.add_done_callback(partial(_cancel, group))
                    burst = []
                for task in running:
                    task.cancel()
        except BaseExceptionGroup as errors:
            raise _first(errors) from None
        finally:
            self._loop = None

    def progress(self, timeout_s: float = PROGRESS_S) -> tuple[SavedGroup, ...]:
        """Return all groups that are being played as data. Callable from any other thread.

        The sampler is read first: what it finishes meanwhile is in the episodes. Raises
        RolloutError after timeout_s.
        """
        drawn, loop = self._drawn(), self._loop
        if loop is None:
            return self._saved(drawn)
        saved: Future[tuple[SavedGroup, ...]] = Future()
        try:
            loop.call_soon_threadsafe(lambda: saved.set_result(self._saved(drawn)))
            return saved.result(timeout_s)
        except (RuntimeError, TimeoutError):
            if self._loop is None:  # it has ended meanwhile
                return self._saved(drawn)
            raise RolloutError(
                f"the rollouts did not report within {timeout_s:.0f} s what is running: an "
                "environment or a scorer blocks their event loop. Let it await, or use a thread."
            ) from None

    def snapshot(self) -> tuple[SavedGroup, ...]:
        """Return what `progress` does, on the loop's own thread."""
        return self._saved(self._drawn())

    def _drawn(self) -> dict[str, Partial]:
        try:
            return {p.request.request_id: p for p in self._generate.progress()}
        except Exception as error:
            log.warning(
                "the sampler does not report its running requests (%s): a run resumed from here "
                "draws their turns from the start",
                _text_of(error),
            )
            return {}

    def _saved(self, drawn: Mapping[str, Partial]) -> tuple[SavedGroup, ...]:
        return tuple(
            SavedGroup(
                ticket=group.ticket,
                prompt=group.prompt,
                episodes=tuple(
                    saved_episode(member, drawn.get(request_id(group.label, m, len(member.turns))))
                    for m, member in enumerate(group.members)
                ),
            )
            for group in self._playing.values()
        )

    def _begin(self, groups: Sequence[SavedGroup]) -> list[Playing]:
        """Queue what all these groups need next, in one call. Empty: the sampler is closed."""
        asked = [(f"g{g.ticket.group}", g.prompt, g.episodes) for g in groups]
        try:
            begun = begin_groups(self._generate, self._make_env, asked, self._settings.limits)
        except Closed:
            return []
        burst = [
            Playing(ticket=g.ticket, prompt=g.prompt, members=members)
            for g, members in zip(groups, begun, strict=True)
        ]
        self._playing |= {group.ticket.group: group for group in burst}
        return burst

    async def _next_burst(self) -> list[Playing]:
        """Wait for tickets; queue the first turns of all their groups at once. Empty: the gate is
        closed."""
        tickets: tuple[Ticket, ...] = ()
        while not tickets:
            started = time.monotonic()
            try:
                tickets = await asyncio.to_thread(self._gate.admit, ADMIT_S)
            except Closed:
                return []
            finally:
                self._gate_wait_s += time.monotonic() - started
        fresh = (SavedEpisode(),) * self._settings.group_size
        return self._begin(
            [
                SavedGroup(ticket=ticket, prompt=self._next_prompt(), episodes=fresh)
                for ticket in sorted(tickets, key=lambda t: t.group)
            ]
        )

    def _next_prompt(self) -> Prompt:
        prompt = next(self._prompts, None)
        if prompt is None:
            raise RolloutError(
                "the prompts ran out before the run ended. Give a stream that repeats."
            )
        return prompt

    async def _play(self, playing: Playing) -> None:
        """Play, score and hand in one group.

        consumes      a ticket, its prompt, the turns that are already queued
        waits for     the sampler, the environments, the scorer
        produces      an EpisodeGroup into the gate
        on failure    the ticket is given back (Drop.FAILED) and counted; too many in a row end the
                      run
        """
        self._active += 1
        try:
            group = await self._make_group(playing)
            self._observe(group)
            self._gate.put(group)
            del self._playing[playing.ticket.group]
            self._groups += 1
            self._failures_in_a_row = 0
        except Closed:
            return
        except (Exception, asyncio.CancelledError) as error:
            if is_the_runs_own_end(error):
                raise
            self._forgive(playing.ticket, playing.prompt, error)
        finally:
            self._active -= 1

    async def _make_group(self, playing: Playing) -> EpisodeGroup:
        prompt = playing.prompt
        episodes = await play_group(
            self._generate,
            prompt,
            playing.members,
            label=playing.label,
            limits=self._settings.limits,
            spent_s=self._count_env,
        )
        started = time.monotonic()
        try:
            scores = tuple(await self._scorer(episodes, prompt))
        finally:
            self._score_s += time.monotonic() - started
        if len(scores) != len(episodes):
            raise RolloutError(
                f"prompt {prompt.prompt_id}: the scorer gave {len(scores)} scores for "
                f"{len(episodes)} episodes. It must give one each, in order."
            )
        return EpisodeGroup(prompt=prompt, episodes=episodes, scores=scores, ticket=playing.ticket)

    def _count_env(self, seconds: float) -> None:
        self._env_s += seconds

    def _forgive(self, ticket: Ticket, prompt: Prompt, error: BaseException) -> None:
        """Give the ticket back, unless too many groups have failed in a row."""
        self._failures += 1
        if self._failures_in_a_row == 0:
            self._first_cause = error
        self._failures_in_a_row += 1
        if self._failures_in_a_row >= self._settings.max_failures:
            cause = self._first_cause
            raise RolloutError(
                f"{self._failures_in_a_row} groups failed in a row, last on prompt "
                f"{prompt.prompt_id}; the first failure was {_text_of(cause)}. Correct the "
                "environment or the reward."
            ) from cause
        log.warning(
            "group %d, prompt %d failed: %s", ticket.group, prompt.prompt_id, _text_of(error)
        )
        del self._playing[ticket.group]
        self._gate.fail(ticket, prompt, Drop.FAILED)


def _cancel(group: Playing, _: object) -> None:
    for member in group.members:
        cancel(member)


def _text_of(error: BaseException | None) -> str:
    kind = "" if isinstance(error, JaxrlError) else f"{type(error).__name__}: "
    return f"{kind}{error}"


def _first(errors: BaseExceptionGroup[BaseException]) -> BaseException:
    """Return the first leaf of a group of exceptions."""
    inner = errors.exceptions[0]
    return _first(inner) if isinstance(inner, BaseExceptionGroup) else inner
