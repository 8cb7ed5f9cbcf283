"""Seams that all parts share: clocks, saved state, and the recorded order of events."""

from dataclasses import dataclass
from enum import Enum
from typing import Any, Protocol, runtime_checkable


@runtime_checkable
class SavesState(Protocol):
    """An environment that a resumed run can continue. An episode whose environment lacks these
    methods starts over."""

    def state(self) -> Any:
        """Return its state between two replies: plain values, lists, mappings and arrays. None: it
        cannot be continued, and its episode starts over."""
        ...

    def restore(self, state: Any) -> None:
        """Continue from this state; called once, before the first reply."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Intake:
    """What a sampler must take in between two decode blocks, as it was recorded."""

    requests: tuple[str, ...] = ()  # ids, in the order of their queue
    cancelled: tuple[str, ...] = ()  # ids of those whose futures were cancelled
    version: int | None = None  # of new weights; None: no new weights


class NotYet(Enum):
    """Nothing may be taken in yet: something else was recorded to happen before."""

    NOT_YET = "not yet"


class Schedule(Protocol):
    """Records in which order a run's threads did what; a replay prescribes it. Any thread."""

    def write(self, **event: Any) -> None:
        """Record that this event has happened, after all events written before."""
        ...

    def due(self, sampler: str, block: int, working: bool) -> Intake | NotYet | None:
        """Return what this sampler must take in now; None: whatever has come.

        Args:
            sampler: its name.
            block: number of blocks that it has decoded.
            working: whether it has something to decode, and could continue without taking anything.
        """
        ...


class Unrecorded:
    """A Schedule that records nothing and prescribes nothing."""

    def write(self, **event: Any) -> None:
        """Do nothing."""

    def due(self, sampler: str, block: int, working: bool) -> None:
        """Return None: whatever has come is taken in."""


UNRECORDED = Unrecorded()


class Clock(Protocol):
    """A monotone clock."""

    def __call__(self) -> float:
        """Return the seconds since some fixed moment."""
        ...
