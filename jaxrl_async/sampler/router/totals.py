"""One reading of replicas that come and go: a counter never falls, and times stay means over the
replicas that were there."""

from collections.abc import Mapping

from jaxrl_async.ports.generate import ReplicaStats
from jaxrl_async.sampler.stats import SamplerStats


class RouterTotals:
    """The statistics from before the last join or leave, and what each replica had counted then.

    While nobody joins or leaves, a reading is that of the replicas beside one another.
    """

    def __init__(self) -> None:
        self._before: ReplicaStats | None = None
        self._counted: dict[int, ReplicaStats] = {}  # by seat, at the last change

    def read(self, seats: Mapping[int, ReplicaStats]) -> ReplicaStats:
        """Return one reading, given those of all seats."""
        parts = [
            stats.since(self._counted[number]) if number in self._counted else stats
            for number, stats in seats.items()
        ]
        if not parts:
            return SamplerStats() if self._before is None else self._before
        now = parts[0].beside(parts[1:])
        return now if self._before is None else now.after(self._before)

    def change(self, seats: Mapping[int, ReplicaStats]) -> None:
        """Take note that a seat is about to be added or removed, given the readings of all."""
        if seats:
            self._before, self._counted = self.read(seats).ended(), dict(seats)
