"""How many samplers a run needs, from the lines of its metrics.jsonl."""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

WINDOW = 5
"""Steps over which the need is measured after each change of the number."""
MUCH_WAITING, LITTLE_WAITING = 0.15, 0.05
"""Shares of the trainer's time: above the first, samplers may be added; below the second, one may
be removed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Demand:
    """Who waited for whom over some steps."""

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

    So many that the trainer would not wait, and samplers would not idle:
    now * (1 - sampler_idles) / (1 - trainer_waits). Up at once, to twice as many at most; down one
    by one, and only if those that stay suffice. If both wait (max_staleness 0), nothing changes.

    Args:
        demand: What was measured with `now` samplers.
        now: Number of samplers at work.
        least: Fewest samplers to keep.
        most: Most samplers to have.
    """
    busy = now * (1 - demand.sampler_idles)
    needed = busy / max(1 - demand.trainer_waits, 1e-3)
    wanted = now
    if demand.trainer_waits > MUCH_WAITING:
        wanted = max(now, min(math.ceil(needed - 0.05), 2 * now))
    elif demand.trainer_waits < LITTLE_WAITING and needed <= now - 1:
        wanted = now - 1
    return min(max(wanted, least), most)


class MetricLines:
    """Steps' metrics as the file grows; read piecewise, from where it was read last."""

    def __init__(self) -> None:
        self._offset, self._rest = 0, b""

    @property
    def offset(self) -> int:
        """Bytes that were read."""
        return self._offset

    def add(self, piece: bytes) -> list[Mapping[str, float]]:
        """Return the steps that a further piece of the file completes; what is torn is left out."""
        self._offset += len(piece)
        *whole, self._rest = (self._rest + piece).split(b"\n")
        lines = []
        for text in whole:
            try:
                line = json.loads(text)
            except ValueError:
                continue
            needed = ("time/step_s", "time/wait_data_s", "sampler/idle_share")
            if isinstance(line, dict) and all(isinstance(line.get(k), int | float) for k in needed):
                lines.append(line)
        return lines
