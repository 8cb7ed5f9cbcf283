"""Decisions to take out, restart, or give up a replica. Pure: no clock, no thread.

well ──trouble──> out ──backoff──> restarted ──an hour without trouble──> its restarts are forgotten
                   ├── restarted too often in that time ──> lost
                   └── in another process ──> removed: it may join again, in a new slot
"""

from dataclasses import dataclass
from enum import StrEnum
from typing import Self

from jaxrl_async.config.schema import FaultsSection
from jaxrl_async.errors import Disconnected
from jaxrl_async.metrics.fault_counts import backoff_s

REMIND_S = 60.0
"""Time between two warnings that no sampler is available, seconds."""
FORGIVEN_S = 3600.0
"""Time without trouble after which earlier restarts no longer count, seconds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RestartLimits:
    """Limits on failures and restarts of a replica; as in config.schema.FaultsSection."""

    restarts: int = 3  # in a row
    backoff_s: float = 1.0  # before the first restart; each next one waits longer
    hang_s: float = 600.0  # maximum time without progress while it has requests
    nonfinite_in_a_row: int = 8  # refused completions

    @classmethod
    def of(cls, section: FaultsSection) -> Self:
        """Return the limits that a configuration asks for."""
        return cls(
            restarts=section.sampler_restarts,
            backoff_s=section.backoff_s,
            hang_s=section.sampler_hang_s,
            nonfinite_in_a_row=section.nonfinite_in_a_row,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Health:
    """The state of one replica."""

    error: BaseException | None = None  # the error that ended its thread
    working: bool = False  # it has requests that are not answered
    quiet_s: float = 0.0  # since it last made progress, or got work
    nonfinite: int = 0  # refused completions in a row
    restarts: int = 0  # in a row
    out_s: float | None = None  # since it was taken out; None: it is active
    left: bool = False  # it left voluntarily
    replaceable: bool = True  # see ports.Replica


class Act(StrEnum):
    """An action on a replica."""

    NOTHING = "nothing"
    TAKE_OUT = "take out"
    START = "start again"
    GIVE_UP = "give up"
    REMOVE = "remove"


class Trouble(StrEnum):
    """A failure or another end of a replica."""

    LEFT = "left"
    CUT_OFF = "cut off"
    DEAD = "dead"
    HANGS = "hangs"
    NONFINITE = "nonfinite"


def trouble(health: Health, limits: RestartLimits) -> Trouble | None:
    """Return the failure of an active replica; None if it is healthy."""
    if health.left:
        return Trouble.LEFT
    if health.error is not None:
        return Trouble.CUT_OFF if isinstance(health.error, Disconnected) else Trouble.DEAD
    if health.working and health.quiet_s > limits.hang_s:
        return Trouble.HANGS
    if health.nonfinite >= limits.nonfinite_in_a_row:
        return Trouble.NONFINITE
    return None


def decide(health: Health, limits: RestartLimits) -> Act:
    """Return the next action on a replica."""
    if health.out_s is None:
        return Act.NOTHING if trouble(health, limits) is None else Act.TAKE_OUT
    if not health.replaceable:
        return Act.REMOVE
    if health.restarts >= limits.restarts:
        return Act.GIVE_UP
    ready = health.out_s >= backoff_s(limits.backoff_s, health.restarts)
    return Act.START if ready else Act.NOTHING


def messages_due(empty_s: float) -> int:
    """Return the number of warnings due after `empty_s` seconds without a sampler."""
    return 1 + int(empty_s // REMIND_S)
