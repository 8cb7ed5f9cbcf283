"""Interfaces that all parts share: clocks, saved state, and the recorded order of events."""

from dataclasses import dataclass
from enum import Enum
from typing import Any, Protocol, runtime_checkable


@runtime_checkable
class SavesState(Protocol):
    """An environment that a resumed run can continue. An episode whose environment lacks these
    methods starts over."""

    def state(self) -> Any:
        """Return its state between two replies: plain values, lists, mappings and arrays. None: the
        state cannot be saved, and the episode starts over."""

    def restore(self, state: object) -> None:
        """Continue from this state. Called once, before the first reply."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Intake:
    """Recorded inputs that a sampler must take in between two decode blocks."""

    requests: tuple[str, ...] = ()  # ids, in the order of their queue
    cancelled: tuple[str, ...] = ()  # ids of requests whose futures were cancelled
    version: int | None = None  # of new weights; None: no new weights


class NotYet(Enum):
    """Nothing may be taken in yet: another event was recorded before this point."""

    NOT_YET = "not yet"


class Schedule(Protocol):
    """Records the order of events in a run's threads; a replay prescribes it. Any thread."""

    def write(self, **event: object) -> None:
        """Record this event, after all events written before."""

    def due(self, sampler: str, block: int, working: bool) -> Intake | NotYet | None:
        """Return what this sampler must take in now; None: everything that has arrived.

        Args:
            sampler: its name.
            block: number of blocks that it has decoded.
            working: whether it has something to decode, and could continue without new input.
        """


class Unrecorded:
    """A Schedule that records nothing and prescribes nothing."""

    def write(self, **event: object) -> None:
        """Do nothing."""

    def due(self, sampler: str, block: int, working: bool) -> None:
        """Return None: everything that has arrived is taken in."""


UNRECORDED = Unrecorded()


class Clock(Protocol):
    """A monotonic clock."""

    def __call__(self) -> float:
        """Return the seconds since some fixed moment."""
