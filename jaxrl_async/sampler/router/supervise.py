"""When a replica is taken out, restarted, or given up. Pure: no clock, no thread.

well ──trouble──> out ──backoff──> restarted ──an hour without trouble──> its restarts are forgotten
                   └── restarted too often in that time ──> lost
"""

from dataclasses import dataclass
from enum import StrEnum

from jaxrl_async.metrics.fault_counts import backoff_s

FORGIVEN_S = 3600.0
"""Time without trouble after which earlier restarts no longer count, seconds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RestartLimits:
    """When a replica has failed, and how often it may; as in config.schema.FaultsSection."""

    restarts: int = 3  # in a row
    backoff_s: float = 1.0  # before the first restart; each next one waits longer
    hang_s: float = 600.0  # longest time without progress while it has requests
    nonfinite_in_a_row: int = 8  # refused completions


@dataclass(frozen=True, slots=True, kw_only=True)
class Health:
    """The state of one replica."""

    error: BaseException | None = None  # that ended its thread
    working: bool = False  # it has requests that are not answered
    quiet_s: float = 0.0  # since it last made progress, or got work
    nonfinite: int = 0  # refused completions in a row
    restarts: int = 0  # in a row
    out_s: float | None = None  # since it was taken out; None: it is at work


class Act(StrEnum):
    """What to do with a replica."""

    NOTHING = "nothing"
    TAKE_OUT = "take out"
    START = "start again"
    GIVE_UP = "give up"


class Trouble(StrEnum):
    """How a replica has failed."""

    DEAD = "dead"
    HANGS = "hangs"
    NONFINITE = "nonfinite"


def trouble(health: Health, limits: RestartLimits) -> Trouble | None:
    """Return how a replica at work has failed, None if it is well."""
    if health.error is not None:
        return Trouble.DEAD
    if health.working and health.quiet_s > limits.hang_s:
        return Trouble.HANGS
    if health.nonfinite >= limits.nonfinite_in_a_row:
        return Trouble.NONFINITE
    return None


def decide(health: Health, limits: RestartLimits) -> Act:
    """Return what to do next with a replica."""
    if health.out_s is None:
        return Act.NOTHING if trouble(health, limits) is None else Act.TAKE_OUT
    if health.restarts >= limits.restarts:
        return Act.GIVE_UP
    ready = health.out_s >= backoff_s(limits.backoff_s, health.restarts)
    return Act.START if ready else Act.NOTHING
