"""The seams: one- and two-method Protocols that the parts meet at. No part imports another."""

from asyncio import Future
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, Protocol, runtime_checkable

from jaxrl_async.types import (
    Completion,
    Draw,
    Drop,
    Episode,
    EpisodeGroup,
    IntArray,
    Partial,
    Prompt,
    Request,
    Score,
    Ticket,
    VersionedParams,
)


class Generate(Protocol):
    """Whatever turns requests into completions: our sampler, a router, a scripted double."""

    def submit_many(self, requests: Sequence[Request]) -> "list[Future[Completion]]":
        """Queue all requests at once, in this order; one future each, on the running event loop.

        Queuing is atomic (no plan sees half of them), so that the same requests given to an idle
        sampler always run on the same schedule. Cancelling a future frees its slot.
        """
        ...


@runtime_checkable
class SavesProgress(Protocol):
    """A Generate whose half-drawn requests can be saved: its submit_many takes Partials, too."""

    seed: int  # Partials of another seed are refused

    def progress(self) -> tuple[Partial, ...]:
        """All requests under way that have drawn something, from any thread. What is done by then
        is in its future already."""
        ...


class Scorer(Protocol):
    """Whatever judges a group."""

    async def __call__(self, episodes: tuple[Episode, ...], prompt: Prompt) -> tuple[Score, ...]:
        """One score per episode, same order. Must not change its arguments. Called once per
        group, and again where it raised or took too long."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """What an environment answers to one turn of the policy."""

    token_ids: (
        IntArray  # [reply] int32, appended to the sequence as it is; empty with done=True ends it
    )
    done: bool


class Env(Protocol):
    """One episode's environment: made fresh for each episode, used once."""

    async def step(self, prompt: Prompt, completion: Completion) -> Reply:
        """Answer the policy's last turn."""
        ...


@runtime_checkable
class SavesState(Protocol):
    """An environment that a resumed run can go on with. One without starts its episode over."""

    def state(self) -> Any:
        """Where it is, between two replies: plain values, lists, mappings and arrays."""
        ...

    def restore(self, state: Any) -> None:
        """Go on where `state` was taken; called once, before the first reply."""
        ...


class Gate(Protocol):
    """The rollout side of the replay buffer."""

    def admit(self, timeout_s: float | None = None) -> tuple[Ticket, ...]:
        """Block until a group may start, then give tickets for all that may start now.

        Empty after timeout_s. Raises Closed when the run stops.
        """
        ...

    def put(self, group: EpisodeGroup) -> Drop | None:
        """Hand in a finished group; the reason where it was dropped at once."""
        ...

    def fail(self, ticket: Ticket, prompt: Prompt, reason: Drop) -> None:
        """Give a ticket back: the group will never come. Its slot is free again."""
        ...


class WeightSource(Protocol):
    """Where a sampler looks for new weights between two decode blocks."""

    def poll(self, *, wait: bool = False) -> VersionedParams | None:
        """Newest complete version that is newer than the last one returned, or None.

        Never blocks, but with wait=True (an idle sampler) finishes a transfer under way first.
        """
        ...

    def live(self, version: int) -> None:
        """The sampler says: from now on every new token comes from this version."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Intake:
    """What a sampler takes in between two decode blocks."""

    requests: tuple[str, ...] = ()  # ids, in the order of their queue
    cancelled: tuple[str, ...] = ()  # ids of those that nobody waits for any more
    version: int | None = None  # of new weights; None: none


class NotYet(Enum):
    """The answer of Schedule.due() where something else was recorded to happen before."""

    NOT_YET = "not yet"


class Schedule(Protocol):
    """Writes down in which order a run's threads did what; a replay prescribes it. Any thread."""

    def write(self, **event: Any) -> None:
        """Something has happened, after all that is written already."""
        ...

    def due(self, sampler: str, block: int, working: bool) -> Intake | NotYet | None:
        """What this sampler is to take in after so many blocks; None: whatever has come.

        working: it has something to decode, and could go on without.
        """
        ...


class Clock(Protocol):
    """Seconds since some moment; monotone."""

    def __call__(self) -> float: ...


class GroupSource(Protocol):
    """The trainer side of the replay buffer."""

    def draw(self, version: int, timeout_s: float | None = None) -> Draw:
        """Block until one step's groups may be trained on at this version. Raises Closed."""
        ...

    def give_back(self) -> None:
        """No step came of the last draw: its groups are as before it. For a run that ends here."""
        ...

    def pause(self) -> None:
        """Admit no further group until resume()."""
        ...

    def resume(self) -> None:
        """Admit groups again."""
        ...

    def set_limit(self, limit: int) -> None:
        """Aim at this staleness from now on, in versions; the hard bound stays."""
        ...


class Publisher(Protocol):
    """The trainer side of the weight channel."""

    def publish(self, version: int, params: Any, probe_logprobs: Any = None) -> None:
        """Send weights to every sampler, device to device, without waiting for the copy."""
        ...

    def wait_taken(self) -> None:
        """Block until every sampler has taken the last weights sent. Raises Closed."""
        ...

    def wait_live(self, version: int, timeout_s: float) -> None:
        """Block until every sampler draws from this version. Raises WeightsError after
        timeout_s."""
        ...
