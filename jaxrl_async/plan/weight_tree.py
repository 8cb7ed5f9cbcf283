"""The tree in which samplers forward a version of the weights, which repairs itself. Pure, no
clock.

    trainer ──> 0 ──> 2 ──> 6 ...      each sends a version to `fanout` others, pieces of it as soon
           │     └──> 3                as it has them
           └──> 1 ──> 4, 5

The rules are the same as in remote/weights. Samplers take positions in the order of the offers. One
fetches one version at a time, and is offered the newest one once it generates with the last. At
most two versions are offered at a time; a newer version replaces one that is waiting to be offered.
If a source is lost, its receivers continue with the next source above it.
"""

from collections import Counter
from dataclasses import dataclass, field

from jaxrl_async.plan.pipeline import TransferTree

TRAINER = -1
"""The trainer's number as a source."""
EPSILON_S = 1e-9
MAX_VERSIONS = 2
"""Maximum number of versions that are fetched at the same time."""


@dataclass(slots=True, kw_only=True, eq=False)
class Sending:
    """One transfer of a version to a sampler."""

    version: int
    sampler: int
    sources: list[int]  # samplers above it, nearest first
    part: float = 1.0  # share of the bytes that its present source sends
    began_s: float = 0.0  # with its present source
    ends_s: float = 0.0  # assuming that its source has everything in time
    children: int = 0  # number of samplers to which this one sends

    @property
    def source(self) -> int:
        """The number of the sampler that sends, or TRAINER."""
        return self.sources[0] if self.sources else TRAINER


@dataclass(slots=True, kw_only=True)
class _Broadcast:
    """The broadcast of one version to the fleet."""

    trainer_children: int = 0
    sendings: list[Sending] = field(default_factory=list)  # in the order of the offers
    by_sampler: dict[int, Sending] = field(default_factory=dict)


class WeightTree:
    """All transfers, and the samplers that wait for one."""

    def __init__(self, tree: TransferTree) -> None:
        self._tree = tree
        self.sent_bytes = 0.0  # by the trainer, since the start
        self.moved = 0  # transfers that continued with another source
        self.replaced = 0  # versions that were never offered, since a newer one was published
        self.under_way: dict[int, Sending] = {}  # by sampler
        self._newest = 0
        self._pending: int | None = None
        self._broadcasts = {0: _Broadcast()}
        self._fetched: Counter[int] = Counter()  # running transfers, by version
        self._waiting: dict[int, None] = {}  # can begin now, in order of request
        self._up_to_date: dict[int, None] = {}  # have the newest version, and room for the next one

    def publish(self, version: int) -> None:
        """Offer a newer version from now on."""
        self.replaced += self._pending is not None
        self._pending = version

    def ready(self, sampler: int, version: int) -> None:
        """Record that a sampler has room for a version newer than this one."""
        (self._waiting if version < self._newest else self._up_to_date)[sampler] = None

    def start(self, now: float) -> list[Sending]:
        """Start all transfers that can begin, and return them."""
        if self._pending is not None and len(self._fetched) < MAX_VERSIONS:
            self._newest, self._pending = self._pending, None
            self._broadcasts = {v: s for v, s in self._broadcasts.items() if v in self._fetched}
            self._broadcasts[self._newest] = _Broadcast()
            self._waiting |= self._up_to_date
            self._up_to_date = {}
        broadcast, waiting = self._broadcasts[self._newest], self._waiting
        self._waiting = {}
        new = [self._offer(broadcast, sampler) for sampler in waiting]
        for sending in new:
            self._set_times(sending, now)
        return new

    def _offer(self, broadcast: _Broadcast, sampler: int) -> Sending:
        parent = len(broadcast.sendings) // self._tree.fanout - 1
        sources = []
        if parent >= 0:
            above = broadcast.sendings[parent]
            sources = [above.sampler, *above.sources]
        sending = Sending(version=self._newest, sampler=sampler, sources=sources)
        broadcast.sendings.append(sending)
        broadcast.by_sampler[sampler] = self.under_way[sampler] = sending
        self._fetched[self._newest] += 1
        self._count_child(sending, 1)
        return sending

    def poll(self, sending: Sending, now: float) -> float | None:
        """Return the seconds until the next check of this transfer; 0: it is done now; None: it was
        cancelled."""
        if self.under_way.get(sending.sampler) is not sending:
            return None
        remaining_s = self._ends_s(sending) - now
        if remaining_s > EPSILON_S:
            return remaining_s
        self._end(sending, now)
        return 0.0

    def _ends_s(self, sending: Sending) -> float:
        """Return when a transfer ends, which is not before the source has everything."""
        above = self._broadcasts[sending.version].by_sampler.get(sending.source)
        if above is None or self.under_way.get(above.sampler) is not above:
            return sending.ends_s
        return max(sending.ends_s, self._ends_s(above) + self._tree.hop_s)

    def remove(self, sampler: int, now: float) -> list[Sending]:
        """Remove a sampler; return the transfers that continue with another source."""
        self._waiting.pop(sampler, None)
        self._up_to_date.pop(sampler, None)
        if (sending := self.under_way.get(sampler)) is not None:
            self._end(sending, now)
        for broadcast in self._broadcasts.values():
            if (own := broadcast.by_sampler.pop(sampler, None)) is not None:
                broadcast.sendings.remove(own)
        moved = []
        for other in self.under_way.values():
            if other.source == sampler:
                other.part *= 1 - self._progress(other, now)
                moved.append(other)
            if sampler in other.sources:
                other.sources.remove(sampler)
        for other in moved:
            self._count_child(other, 1)
            self._set_times(other, now)
        self.moved += len(moved)
        return moved

    def _count_child(self, sending: Sending, count: int) -> None:
        """Add `count` to the number of its source's children."""
        broadcast = self._broadcasts[sending.version]
        above = broadcast.by_sampler.get(sending.source)
        if above is None:
            broadcast.trainer_children += count
        else:
            above.children += count

    def _set_times(self, sending: Sending, now: float) -> None:
        tree, broadcast = self._tree, self._broadcasts[sending.version]
        above = broadcast.by_sampler.get(sending.source)
        if above is None:
            rate = tree.trainer_bytes_per_s / broadcast.trainer_children
        else:
            rate = tree.sampler_bytes_per_s / above.children
        rate = min(rate, tree.sampler_bytes_per_s)
        sending.began_s = now
        sending.ends_s = now + tree.hop_s + sending.part * tree.num_bytes / rate

    def _progress(self, sending: Sending, now: float) -> float:
        """Return the sent share of the present source's part; count the bytes if from the
        trainer."""
        sending_s = sending.ends_s - sending.began_s
        share = min(1.0, (now - sending.began_s) / sending_s) if sending_s > 0 else 1.0
        if sending.source == TRAINER:
            self.sent_bytes += share * sending.part * self._tree.num_bytes
        return share

    def _end(self, sending: Sending, now: float) -> None:
        """Unregister a transfer, done or not."""
        self._progress(sending, now)
        self._count_child(sending, -1)
        del self.under_way[sending.sampler]
        self._fetched[sending.version] -= 1
        if not self._fetched[sending.version]:
            del self._fetched[sending.version]
