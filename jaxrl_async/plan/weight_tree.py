"""Who sends a version of the weights to which sampler: a tree that repairs itself. Pure, no clock.

    trainer ──> 0 ──> 2 ──> 6 ...      each sends a version to at most `fanout` others, as soon as
           │     └──> 3                it has all of it; a newer version replaces an older offer
           └──> 1 ──> 4, 5

A sampler that goes leaves its place with its source free, and those to which it was sending ask
the next source that has a free place.
"""

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

from jaxrl_async.plan.pipeline import TransferTree

TRAINER = -1
"""The trainer's number as a source."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Sending:
    """One transfer of a version, from a source to a sampler."""

    version: int
    source: int  # number of a sampler, or TRAINER
    sampler: int
    seconds: float
    began_s: float


class WeightTree:
    """The transfers of the newest version."""

    def __init__(self, tree: TransferTree) -> None:
        self._tree = tree
        self.version = 0
        self.sent_bytes = 0.0  # by the trainer, since the start
        self.transfers = self.aborted = 0  # complete, and not
        self._waiting: deque[int] = deque()  # samplers without a source
        self._sources = deque([TRAINER])  # with a free place, those that were first in front
        self._free = {TRAINER: tree.fanout}  # free places, by source
        self._source_of: dict[int, int] = {}  # of each sampler that has the version, or gets it
        self._under_way: dict[int, Sending] = {}  # by sampler

    def offer(self, version: int, samplers: Iterable[int], now: float) -> None:
        """Offer a newer version to these samplers; what is under way of an older one is aborted."""
        for sending in self._under_way.values():
            self._abort(sending, now)
        self.version = version
        self._waiting, self._sources = deque(samplers), deque([TRAINER])
        self._free = {TRAINER: self._tree.fanout}
        self._source_of, self._under_way = {}, {}

    def want(self, sampler: int) -> None:
        """Offer the newest version to one more sampler."""
        self._waiting.append(sampler)

    def start(self, now: float) -> list[Sending]:
        """Start all transfers for which there is a place, and return them."""
        pairs = []
        while self._waiting and self._sources:
            source, sampler = self._sources[0], self._waiting.popleft()
            pairs.append((source, sampler))
            self._source_of[sampler] = source
            self._free[source] -= 1
            if not self._free[source]:
                self._sources.popleft()
        at_once: dict[int, int] = {}
        for source in [s.source for s in self._under_way.values()] + [s for s, _ in pairs]:
            at_once[source] = at_once.get(source, 0) + 1
        new = [
            Sending(
                version=self.version,
                source=source,
                sampler=sampler,
                seconds=self._seconds(source, at_once[source]),
                began_s=now,
            )
            for source, sampler in pairs
        ]
        self._under_way |= {sending.sampler: sending for sending in new}
        return new

    def arrived(self, sending: Sending) -> bool:
        """Make the sampler a source; False: the transfer was aborted meanwhile."""
        sampler = sending.sampler
        if self._under_way.get(sampler) is not sending:
            return False
        del self._under_way[sampler]
        self.transfers += 1
        if sending.source == TRAINER:
            self.sent_bytes += self._tree.num_bytes
        self._free[sampler] = self._tree.fanout
        self._sources.append(sampler)
        return True

    def gone(self, sampler: int, now: float) -> None:
        """Take a sampler out; others take over what it was sending."""
        if sampler in self._waiting:
            self._waiting.remove(sampler)
        if (sending := self._under_way.pop(sampler, None)) is not None:
            self._abort(sending, now)
        if self._free.pop(sampler, 0):
            self._sources.remove(sampler)
        source = self._source_of.pop(sampler, None)
        if source is not None and source in self._free:
            self._free[source] += 1
            if self._free[source] == 1:
                self._sources.append(source)
        orphans = [s for s in self._under_way.values() if s.source == sampler]
        for sending in orphans:
            self._abort(sending, now)
            del self._under_way[sending.sampler], self._source_of[sending.sampler]
            self._waiting.appendleft(sending.sampler)

    def _seconds(self, source: int, at_once: int) -> float:
        tree = self._tree
        rate = tree.trainer_bytes_per_s if source == TRAINER else tree.sampler_bytes_per_s
        return tree.hop_s + tree.num_bytes / min(rate / at_once, tree.sampler_bytes_per_s)

    def _abort(self, sending: Sending, now: float) -> None:
        self.aborted += 1
        if sending.source == TRAINER and sending.seconds:
            share = min(1.0, (now - sending.began_s) / sending.seconds)
            self.sent_bytes += share * self._tree.num_bytes
