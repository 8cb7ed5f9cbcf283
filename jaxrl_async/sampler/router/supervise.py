"""When a sampler is taken out, started again, or given up. Pure: no clock, no thread.

well ──trouble──> out ──backoff──> started again ──an hour without trouble──> as new
                   └── too often in that time ──> lost
"""

from dataclasses import dataclass
from enum import StrEnum

from jaxrl_async.metrics.fault_counts import backoff_s

FORGIVEN_S = 3600.0
"""Time without trouble after which earlier restarts no longer count, seconds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RestartLimits:
    """What is borne with; as in config.schema.Faults."""

    restarts: int = 3
    backoff_s: float = 1.0
    hang_s: float = 600.0
    nonfinite_in_a_row: int = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Health:
    """What is known of one sampler now."""

    error: BaseException | None = None  # that ended its thread
    working: bool = False  # requests were given to it and not answered
    quiet_s: float = 0.0  # since it last got on, or got work
    nonfinite: int = 0  # refused completions in a row
    restarts: int = 0  # in a row
    out_s: float | None = None  # since it was taken out; None: it is in


class Act(StrEnum):
    """What is to be done with a sampler."""

    NOTHING = "nothing"
    TAKE_OUT = "take out"
    START = "start again"
    GIVE_UP = "give up"


class Trouble(StrEnum):
    """What is wrong with a sampler."""

    DEAD = "dead"
    HANGS = "hangs"
    NONFINITE = "nonfinite"


def trouble(health: Health, limits: RestartLimits) -> Trouble | None:
    """What is wrong; None: nothing."""
    if health.error is not None:
        return Trouble.DEAD
    if health.working and health.quiet_s > limits.hang_s:
        return Trouble.HANGS
    if health.nonfinite >= limits.nonfinite_in_a_row:
        return Trouble.NONFINITE
    return None


def decide(health: Health, limits: RestartLimits) -> Act:
    """The next thing to do with a sampler."""
    if health.out_s is None:
        return Act.NOTHING if trouble(health, limits) is None else Act.TAKE_OUT
    if health.restarts >= limits.restarts:
        return Act.GIVE_UP
    ready = health.out_s >= backoff_s(limits.backoff_s, health.restarts)
    return Act.START if ready else Act.NOTHING
