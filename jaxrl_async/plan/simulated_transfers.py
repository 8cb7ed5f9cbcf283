"""The transfers of a WeightTree on the simulation's timeline."""

from collections.abc import Callable

from jaxrl_async.plan.timeline import Timeline
from jaxrl_async.plan.weight_tree import Sending, WeightTree


class SimulatedTransfers:
    """Starts all transfers that can begin, and polls each one until its weights have arrived."""

    def __init__(
        self,
        tree: WeightTree,
        timeline: Timeline,
        stage_s: float,
        staged: Callable[[Sending], None],
    ) -> None:
        """staged: called with a transfer stage_s after it is done, when its weights can be swapped
        in."""
        self._tree, self._time, self._stage_s, self._staged = tree, timeline, stage_s, staged

    def offer(self, version: int) -> None:
        """Offer a newer version from now on."""
        self._tree.publish(version)
        self.start()

    def ready(self, sampler: int, version: int) -> None:
        """Record that a sampler has room for a version newer than this one; start() begins its
        transfer."""
        self._tree.ready(sampler, version)

    def start(self) -> None:
        """Start all transfers that can begin."""
        for sending in self._tree.start(self._time.now):
            self._look(sending)

    def end(self, sampler: int) -> None:
        """Remove a sampler; transfers from it continue with another source."""
        for sending in self._tree.gone(sampler, self._time.now):
            self._look(sending)
        self.start()

    def _look(self, sending: Sending) -> None:
        """Stage the weights if they have arrived, otherwise check again when they may have."""
        seconds = self._tree.look(sending, self._time.now)
        if seconds is not None and seconds > 0:
            self._time.after(seconds, self._look, sending)
        elif seconds is not None:
            self._time.after(self._stage_s, self._staged, sending)
            self.start()
