"""Schedule when simulated samplers join and leave: at given times, or preempted at random."""

from collections.abc import Callable

import numpy as np

from jaxrl_async.errors import ConfigError
from jaxrl_async.plan.pipeline import Turnover
from jaxrl_async.plan.simulated_sampler import value_sampler
from jaxrl_async.plan.timeline import Timeline


class SimulatedTurnover:
    """Lets samplers join and leave on the timeline."""

    def __init__(
        self,
        turnover: Turnover,
        timeline: Timeline,
        chance: np.random.Generator,
        joins: Callable[[], None],
        removes: Callable[[bool], bool],
    ) -> None:
        """Schedule the changes, and the first preemption.

        Args:
            turnover: The changes and their durations.
            timeline: The simulation's events.
            chance: Random numbers for preemptions.
            joins: Called when the process of a new sampler has started.
            removes: Called to remove a sampler, with notice or not; returns whether there was one.
        """
        self._turnover, self._time, self._chance = turnover, timeline, chance
        self._joins, self._removes = joins, removes
        self._replaced_s = value_sampler(turnover.replaced_s, chance)
        for change in turnover.changes:
            timeline.after(change.at_s, self._change, change.joins, change.leaves, change.kills)
        self._next_preemption()

    def _next_preemption(self) -> None:
        if self._turnover.preempted_per_minute > 0:
            seconds = self._chance.exponential(60 / self._turnover.preempted_per_minute)
            self._time.after(float(seconds), self._preempt)

    def _change(self, joins: int, leaves: int, kills: int) -> None:
        for _ in range(joins):
            self._time.after(self._turnover.start_s, self._joins)
        for number in range(leaves + kills):
            self._removes(number < leaves)

    def _preempt(self) -> None:
        """Remove one sampler, and schedule its replacement."""
        turnover = self._turnover
        if self._removes(self._chance.random() < turnover.handed_back_share):
            replaced_s = float(self._replaced_s(1)[0])
            self._time.after(replaced_s + turnover.start_s, self._joins)
        self._next_preemption()


def check_wait(turnover: Turnover, waited_s: float) -> None:
    """Raise ConfigError if a run would time out after this long without any sampler."""
    if waited_s > turnover.wait_s:
        raise ConfigError(
            f"the simulated run was without any sampler for {waited_s:.0f} s and ended: "
            f"turnover.wait_s ({turnover.wait_s:g}) is the limit. Raise it (remote.wait_s), or "
            "let samplers be replaced sooner."
        )
