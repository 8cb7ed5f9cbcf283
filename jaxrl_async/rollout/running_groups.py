"""The groups that a rollout loop plays now: as data for a checkpoint, and cancelled once they are
too old. Needs no JAX."""

import asyncio
import contextlib
import logging
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass

from jaxrl_async.errors import RolloutError, with_kind
from jaxrl_async.ports.generate import Generate
from jaxrl_async.ports.rollout import Gate, Plays
from jaxrl_async.rollout.episode import (
    EpisodeProgress,
    SavedCalls,
    SavedEpisode,
    request_id,
    sampled_versions,
    saved_episode,
)
from jaxrl_async.rollout.episode_assembly import Turn
from jaxrl_async.types import CancelledGroup, IntArray, Partial, Prompt, Ticket

log = logging.getLogger(__name__)

UNSAVED = "a run resumed from here samples their turns from the start"
UNSEEN = "any of them that are too old are dropped once they are complete"
"""Consequences, for log messages, of a sampler that does not report its progress."""
PROGRESS_S = 30.0
"""Maximum wait for the loop to report the running groups, seconds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedGroup:
    """A running group as data."""

    ticket: Ticket
    prompt: Prompt
    episodes: tuple[SavedEpisode, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Playing:
    """A running group."""

    ticket: Ticket
    prompt: Prompt
    members: tuple[EpisodeProgress, ...]
    after: int = 0  # number of consecutive failures when it started

    @property
    def label(self) -> str:
        """The group's part of its request ids."""
        return f"g{self.ticket.group}"

    def sampled_versions(self, partials: Sequence[Partial]) -> list[IntArray]:
        """Return the versions of each member's sampled tokens so far, [sampled] int32.

        partials: the sampled parts of this group's running requests.
        """
        versions = []
        for m, member in enumerate(self.members):
            turn = request_id(self.label, m, len(member.turns))
            prefix = f"{self.label}/m{m}" if isinstance(member.env, Plays) else turn
            own = [p for p in partials if f"{p.request.request_id}/".startswith(f"{prefix}/")]
            versions.append(sampled_versions(member, own))
        return versions

    def saved(self, partials: Mapping[str, Partial]) -> SavedGroup:
        """Return the group as data. partials: sampled parts of running requests, by id."""
        ids = (request_id(self.label, m, len(one.turns)) for m, one in enumerate(self.members))
        return SavedGroup(
            ticket=self.ticket,
            prompt=self.prompt,
            episodes=tuple(
                saved_episode(member, partials.get(turn))
                for member, turn in zip(self.members, ids, strict=True)
            ),
        )


SAVED_KINDS: tuple[type, ...] = (SavedGroup, SavedEpisode, SavedCalls, Turn)
"""Record types of the rollouts in a checkpoint."""


class RunningGroups:
    """The groups that run now, which other threads ask for, or have cancelled. Owned by the event
    loop's thread, except where a method says otherwise."""

    def __init__(self, generate: Generate, gate: Gate) -> None:
        """Have no group yet.

        generate: the sampler, which reports its running requests.
        gate: reports pending tokens that are too old, and gets the tickets of these groups.
        """
        self._generate, self._gate = generate, gate
        self._loop: asyncio.AbstractEventLoop | None = None  # from `open` to `close`
        self._groups: dict[int, Playing] = {}  # by number; groups that fail or close remain
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._aged = asyncio.Event()  # `_oldest` has risen
        self._oldest = 0  # version of the oldest tokens that may still be trained on

    def open(self) -> None:
        """Use the running event loop, and watch the gate."""
        self._loop = asyncio.get_running_loop()
        self._gate.watch(self._note_age, self._note_stop)

    def close(self) -> None:
        """Note that the event loop ends."""
        self._loop = None

    def add(self, groups: Sequence[Playing]) -> None:
        """Add groups whose first requests are queued."""
        self._groups |= {group.ticket.group: group for group in groups}

    def started(self, group: Playing, task: asyncio.Task[None]) -> None:
        """Note the task that plays a group."""
        self._tasks[group.ticket.group] = task

    def ended(self, group: Playing) -> None:
        """Forget the task of a group."""
        self._tasks.pop(group.ticket.group, None)

    def __contains__(self, group: Playing) -> bool:
        """Return whether this group is still running: not cancelled, its ticket not given back."""
        return group.ticket.group in self._groups

    def remove(self, group: Playing) -> None:
        """Remove a group that has gone into the gate, or whose ticket is given back."""
        del self._groups[group.ticket.group]

    # ---- groups that become too old while they run

    def _note_age(self, oldest: int) -> None:
        """Request the cancellation of groups with tokens older than this version. Thread safe."""

        def note() -> None:
            self._oldest = max(self._oldest, oldest)
            self._aged.set()

        self._soon(note)

    def _note_stop(self, number: int) -> None:
        """Cancel this group on request of a replay. Thread safe."""

        def stop() -> None:
            playing = self._groups.get(number)
            if playing is not None and number in self._tasks:
                self._cancel(playing, playing.ticket.version, ())

        self._soon(stop)

    def _soon(self, call: Callable[[], None]) -> None:
        """Call a function on the loop's thread, unless the loop has ended."""
        loop = self._loop
        if loop is not None:
            with contextlib.suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(call)

    async def cancel_old(self) -> None:
        """Cancel each group with a token that is too old to be trained on, as soon as possible.

        consumes      the gate's signal that `_oldest` has risen
        waits for     the sampler's report of the sampled parts of running turns
        produces      gate.cancel for each such group; its requests are cancelled
        on failure    if a sampler does not report, its running turns are not checked
        """
        while True:
            await self._aged.wait()
            self._aged.clear()
            oldest = self._oldest
            if all(p.ticket.version >= oldest for p in self._groups.values()):
                continue  # no token is older than its group's ticket
            partials = await asyncio.to_thread(_reported, self._generate, UNSEEN)
            running = [p for n, p in self._groups.items() if n in self._tasks]
            for playing, first, lengths in _too_old(running, partials, oldest):
                self._cancel(playing, first, lengths)

    def _cancel(self, playing: Playing, oldest: int, lengths: tuple[int, ...]) -> None:
        """Cancel a group that is too old.

        Args:
            playing: the group.
            oldest: version of its oldest token.
            lengths: number of sampled tokens of each member.
        """
        self.remove(playing)
        self._gate.cancel(
            CancelledGroup(
                ticket=playing.ticket,
                prompt_id=playing.prompt.prompt_id,
                oldest=oldest,
                lengths=lengths,
                task=playing.prompt.task,
            )
        )
        self._tasks[playing.ticket.group].cancel()

    # ---- conversion to data

    def progress(self, timeout_s: float = PROGRESS_S) -> tuple[SavedGroup, ...]:
        """Return all running groups as data. May be called from any other thread.

        The sampler is read first; anything that it finishes meanwhile is in the episodes. Raises
        RolloutError after timeout_s.
        """
        partials, loop = _reported(self._generate, UNSAVED), self._loop
        if loop is None:
            return self._saved(partials)
        saved: Future[tuple[SavedGroup, ...]] = Future()
        try:
            loop.call_soon_threadsafe(lambda: saved.set_result(self._saved(partials)))
            return saved.result(timeout_s)
        except (RuntimeError, TimeoutError):
            if self._loop is None:  # it has ended in the meantime
                return self._saved(partials)
            raise RolloutError(
                f"the rollouts did not report their running groups within {timeout_s:.0f} s: an "
                "environment or a scorer blocks their event loop. Make it await, or use a thread."
            ) from None

    def snapshot(self) -> tuple[SavedGroup, ...]:
        """Return the same as `progress`, on the loop's own thread."""
        return self._saved(_reported(self._generate, UNSAVED))

    def _saved(self, partials: Mapping[str, Partial]) -> tuple[SavedGroup, ...]:
        return tuple(group.saved(partials) for group in self._groups.values())


def _reported(generate: Generate, consequence: str) -> dict[str, Partial]:
    """Return the sampled parts of running turns by request id; empty if the sampler does not report
    them. consequence: for the log message."""
    try:
        return {p.request.request_id: p for p in generate.progress()}
    except Exception as error:
        message = "the sampler does not report its running requests (%s): %s"
        log.warning(message, with_kind(error), consequence)
        return {}


def _too_old(
    running: Sequence[Playing], partials: Mapping[str, Partial], oldest: int
) -> list[tuple[Playing, int, tuple[int, ...]]]:
    """Return the groups with a token older than this version, each with the version of its oldest
    token and the number of sampled tokens of each member.

    partials: the sampled parts of running turns by request id.
    """
    by_label: dict[str, list[Partial]] = {}
    for request, part in partials.items():
        by_label.setdefault(request.partition("/")[0], []).append(part)
    found = []
    for playing in running:
        versions = playing.sampled_versions(by_label.get(playing.label, ()))
        first = min((int(v.min()) for v in versions if len(v)), default=oldest)
        if first < oldest:
            found.append((playing, first, tuple(len(v) for v in versions)))
    return found
