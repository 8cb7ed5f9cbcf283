"""Compute how many samplers a run needs from the lines of its metrics.jsonl."""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile

WINDOW = 5
"""Minimum number of steps over which the need is measured after each change of the number."""
WINDOW_S = 10.0
"""Minimum duration of these steps, seconds: samplers report only from time to time how busy they
are."""
NEEDED = ("time/step_s", "time/wait_data_s", "sampler/idle_share", "sampler/living")
"""Metrics that a step must have to count."""
CHANGES = ("faults/samplers_joined", "faults/samplers_left", "faults/samplers_cut_off")
"""Counts that are 0 in a step that had the same samplers from start to end."""
MUCH_WAITING, LITTLE_WAITING = 0.15, 0.05
"""Shares of the trainer's time: above the first, samplers may be added; below the second, one may
be removed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Demand:
    """Time shares in which trainer and samplers waited for each other over some steps."""

    trainer_waits: float  # share of the time in which too few groups were ready
    sampler_idles: float  # share of the time in which samplers had nothing to decode


def demand_of(lines: Sequence[Mapping[str, float]]) -> Demand:
    """Return the demand over some steps' metrics."""
    total_s = math.fsum(line["time/step_s"] for line in lines)
    waited_s = math.fsum(line["time/wait_data_s"] for line in lines)
    idle_s = math.fsum(line["sampler/idle_share"] * line["time/step_s"] for line in lines)
    if total_s <= 0:
        return Demand(trainer_waits=0.0, sampler_idles=0.0)
    return Demand(
        trainer_waits=min(waited_s / total_s, 1.0), sampler_idles=min(idle_s / total_s, 1.0)
    )


def wanted_samplers(demand: Demand, now: int, least: int, most: int) -> int:
    """Return how many samplers there should be.

    The result is the number at which neither the trainer nor the samplers would wait:
    now * (1 - sampler_idles) / (1 - trainer_waits). It rises immediately, at most to twice the
    present number. It falls one by one, and only if the remaining samplers suffice. If both
    sides wait (max_staleness 0), nothing changes.

    Args:
        demand: Measured with `now` samplers.
        now: Number of running samplers.
        least: Minimum number of samplers.
        most: Maximum number of samplers.
    """
    busy = now * (1 - demand.sampler_idles)
    needed = busy / max(1 - demand.trainer_waits, 1e-3)
    wanted = now
    if demand.trainer_waits > MUCH_WAITING:
        wanted = max(now, min(math.ceil(needed - 0.05), 2 * now))
    elif demand.trainer_waits < LITTLE_WAITING and needed <= now - 1:
        wanted = now - 1
    return min(max(wanted, least), most)


def steps_in(text: bytes) -> list[Mapping[str, float]]:
    """Return the steps in a piece of metrics.jsonl, without lines that are torn or belong to no
    step."""
    steps: list[Mapping[str, float]] = []
    for raw in text.split(b"\n"):
        try:
            line = json.loads(raw)
        except ValueError:
            continue
        if isinstance(line, dict) and all(isinstance(line.get(k), int | float) for k in NEEDED):
            steps.append(line)
    return steps


def measured_steps(
    steps: Sequence[Mapping[str, float]], samplers: int
) -> Sequence[Mapping[str, float]]:
    """Return the newest steps from which the need can be computed; none if there are too few yet.

    The same number of samplers was running throughout all of them. A started process does not
    count as running until it has joined and received the weights.
    """
    newest = takewhile(
        lambda step: step["sampler/living"] == samplers and not any(step.get(k) for k in CHANGES),
        reversed(steps),
    )
    counted: list[Mapping[str, float]] = []
    taken_s = 0.0
    for step in newest:
        counted.append(step)
        taken_s += step["time/step_s"]
        if len(counted) >= WINDOW and taken_s >= WINDOW_S:
            return counted
    return ()
