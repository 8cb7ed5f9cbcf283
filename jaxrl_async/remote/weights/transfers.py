"""Decides which version of the weights each sampler is offered, and which versions are kept. Pure.

    pending ──room──> kept ──due──> fetching ──staged──> staged ──live──> live ──> due again
    (device)          (host)            │ torn, or too late: retried a few times
                                        └──> given up

A sampler fetches one version at a time. When that version is live, it is offered the newest one. A
slow sampler therefore skips versions, and the others do not wait for it. At most two versions are
kept: the newest, for samplers that join, and the version that a slow sampler still fetches.

If a sampler tries to join with weights older than the live version, its next transfer holds the
live version: it does not advance past that offer until the sampler has joined. Otherwise a sampler
that fetches more slowly than the others could be too late every time.

The cost of an event does not depend on the number of samplers: `due` checks only samplers with new
events, and times are kept in heaps (Alarms).
"""

import heapq
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import count, islice

from jaxrl_async.errors import WeightsError
from jaxrl_async.metrics.fault_counts import backoff_s

KEPT = 2
"""Maximum number of versions kept at the same time."""
TRIES = 3
"""Number of consecutive failed transfers after which a sampler is given up."""
RETRY_S = 1.0
"""Wait after the first failed transfer, seconds; it doubles."""
MOST_SOURCES = 8
"""Maximum number of sources of one member: enough for several simultaneous failures."""


@dataclass(slots=True, kw_only=True, eq=False)
class Taker:
    """The transfer state of one sampler."""

    name: str
    address: str  # HOST:PORT at which it relays weights; "": it does not
    offered: int | None = None  # newest version offered to it
    fetching: int | None = None  # version in transfer to it
    staged: int | None = None  # newest version that it has
    live: int | None = None  # version that it generates with
    late: bool = False  # it tried to join with a version older than the live one
    held_until_s: float | None = None  # the live version waits until then for it to join
    sending: bool = False  # its last offer waits for space in the session's queue
    due_s: float = 0.0  # deadline of its transfer, or time of the next offer
    failures: int = 0  # consecutive failed transfers
    left: bool = False  # it gets no more offers

    @property
    def ready(self) -> bool:
        """True if it can start fetching: it has room for one version in addition to the live
        one."""
        busy = self.left or self.sending or self.fetching is not None
        return not busy and self.staged == self.live


@dataclass(frozen=True, slots=True, kw_only=True)
class DueOffer:
    """A version to offer to a sampler now."""

    taker: Taker
    version: int
    sources: tuple[str, ...]  # addresses, best first


@dataclass(slots=True)
class Alarms:
    """Heap of times that may change: an alarm is valid only while its sampler still has this
    time."""

    _heap: list[tuple[float, int, Taker]] = field(default_factory=list)
    _numbers: Iterator[int] = field(default_factory=count)

    def add(self, at_s: float, taker: Taker) -> None:
        """Set an alarm for a sampler, at its current time."""
        heapq.heappush(self._heap, (at_s, next(self._numbers), taker))

    def passed(self, now_s: float, time_of: Callable[[Taker], float | None]) -> list[Taker]:
        """Remove the alarms up to now; return the samplers whose alarms are still valid, each once.

        time_of: returns the time of a sampler, or None if it has no time.
        """
        passed = dict[Taker, None]()
        while self._heap and self._heap[0][0] <= now_s:
            at_s, _, taker = heapq.heappop(self._heap)
            if time_of(taker) == at_s:
                passed[taker] = None
        return list(passed)

    def first(self, time_of: Callable[[Taker], float | None]) -> float | None:
        """Return the time of the first valid alarm; None: no alarm is valid."""
        while self._heap and time_of(self._heap[0][2]) != self._heap[0][0]:
            heapq.heappop(self._heap)
        return self._heap[0][0] if self._heap else None


@dataclass(slots=True, kw_only=True)
class Transfers:
    """The state of all transfers. Times are seconds of any monotonic clock."""

    fanout: int
    timeout_s: float
    takers: list[Taker] = field(default_factory=list)
    kept: list[int] = field(default_factory=list)  # versions that can be fetched, ascending
    holders: dict[int, list[Taker]] = field(default_factory=dict)  # that relay it, as offered
    _fetched: Counter[int] = field(default_factory=Counter)  # transfers in progress, by version
    _addresses: Counter[str] = field(default_factory=Counter)  # of all takers
    _news: dict[Taker, None] = field(default_factory=dict)  # takers that `due` must check
    _dues: Alarms = field(default_factory=Alarms)  # each due_s
    _holds: Alarms = field(default_factory=Alarms)  # each held_until_s

    def join(self, taker: Taker) -> None:
        """Add a sampler without weights."""
        self.takers.append(taker)
        self._addresses[taker.address] += 1
        self._news[taker] = None

    def leave(self, taker: Taker) -> None:
        """Remove a sampler. Idempotent."""
        self._stop(taker)
        if not taker.left and taker in self.takers:
            self.takers.remove(taker)
            self._addresses[taker.address] -= 1
        taker.left, taker.held_until_s = True, None
        self._news.pop(taker, None)
        for version in self.holders:
            self._forget(taker, version)

    def passes_on(self, address: str) -> bool:
        """Return True if a sampler relays weights at this address."""
        return bool(address) and self._addresses[address] > 0

    # ---- versions

    def in_the_way(self, version: int) -> list[int] | None:
        """Return the versions to withdraw before a newer one can be kept; None: not possible yet,
        since samplers fetch all kept versions."""
        assert not self.kept or version > self.kept[-1]
        if len(self.kept) < KEPT:
            return []
        return [v for v in self.kept if not self._is_fetched(v)][:1] or None

    def keep(self, version: int) -> None:
        """Record that a version can be fetched."""
        self.kept.append(version)
        self._news = dict.fromkeys(self.takers)

    def drop(self, versions: Iterable[int]) -> None:
        """Record that versions can no longer be fetched."""
        for version in versions:
            self.kept.remove(version)
            self.holders.pop(version, None)

    def outdated(self) -> list[int]:
        """Return the versions that no sampler fetches or will fetch."""
        return [v for v in self.kept[:-1] if not self._is_fetched(v)]

    # ---- samplers

    def due(self, now_s: float, trainer: str) -> list[DueOffer]:
        """Return the offers to send now, and mark their transfers as started.

        trainer: its address, the last source of every sampler.
        """
        if not self.kept:
            return []
        newest, offers = self.kept[-1], []
        for taker in tuple(self._news):
            if taker.ready and (taker.staged is None or taker.staged < newest):
                if now_s < taker.due_s:
                    continue  # check again then
                offers.append(self._offer(taker, newest, now_s, trainer))
            del self._news[taker]
        return offers

    def sent(self, taker: Taker) -> None:
        """Record that the session has accepted the last offer to a sampler."""
        taker.sending = False
        self._look(taker)

    def staged(self, taker: Taker, version: int) -> bool:
        """Record that a sampler has a version; return True if this is new.

        Raises WeightsError for a version that was not offered to it.
        """
        if taker.offered is None or version > taker.offered:
            raise WeightsError(
                f"{taker.name} reports that it has version {version}, but was offered "
                f"{'nothing' if taker.offered is None else f'version {taker.offered}'}"
            )
        if taker.staged is not None and version <= taker.staged:
            return False
        taker.staged, taker.failures = version, 0
        if taker.fetching is not None and taker.fetching <= version:
            self._end(taker)
        self._look(taker)
        return True

    def live(self, taker: Taker, version: int, enter: Callable[[int], bool]) -> None:
        """Record that a sampler generates with a version. Raises WeightsError if it cannot.

        enter: lets it join with this version; returns False if the version is too old.
        """
        if taker.staged is None or not (taker.live or 0) <= version <= taker.staged:
            raise WeightsError(
                f"{taker.name} reports that it generates with version {version}, but has "
                f"{'nothing' if taker.staged is None else f'version {taker.staged}'}"
            )
        taker.live = version
        taker.late = not enter(version)
        taker.held_until_s = None if not taker.late else taker.held_until_s
        self._look(taker)

    def torn(self, taker: Taker, version: int, now_s: float) -> bool:
        """Record that a transfer has failed; return True if it was in progress."""
        if taker.fetching != version:
            return False
        self._fail(taker, now_s)
        return True

    def expired(self, now_s: float) -> list[Taker]:
        """Return the samplers whose transfers have timed out; these count as failed."""
        passed = self._dues.passed(now_s, lambda t: t.due_s)
        late = [t for t in passed if t.fetching is not None]
        for taker in late:
            self._fail(taker, now_s)
        return late

    def unheld(self, now_s: float) -> list[Taker]:
        """Return the samplers whose hold has expired: the live version no longer waits for them."""
        unheld = self._holds.passed(now_s, lambda t: t.held_until_s)
        for taker in unheld:
            taker.late, taker.held_until_s = False, None
        return unheld

    def next_s(self, now_s: float) -> float | None:
        """Return the time at which something becomes due; None: never."""
        due_s = self._dues.first(
            lambda t: t.due_s if t.fetching is not None or t.due_s > now_s else None
        )
        times = [s for s in (due_s, self._holds.first(lambda t: t.held_until_s)) if s is not None]
        return min(times, default=None)

    def _offer(self, taker: Taker, version: int, now_s: float, trainer: str) -> DueOffer:
        taker.offered = taker.fetching = version
        self._fetched[version] += 1
        self._set_due(taker, now_s + self.timeout_s)
        self._hold_until(taker, taker.due_s if taker.late else None)
        holders = self.holders.setdefault(version, [])
        found = sources_of_next(
            len(holders), lambda place: holders[place].address, self.fanout, trainer
        )
        if taker.address:
            holders.append(taker)
        return DueOffer(taker=taker, version=version, sources=found)

    def _fail(self, taker: Taker, now_s: float) -> None:
        self._stop(taker)
        self._set_due(taker, now_s + backoff_s(RETRY_S, taker.failures))
        taker.failures += 1
        if taker.held_until_s is not None:
            self._hold_until(taker, now_s)
        self._look(taker)

    def _stop(self, taker: Taker) -> None:
        """End the transfer to a sampler, and do not use it as a source."""
        if taker.fetching is not None:
            self._forget(taker, taker.fetching)
        self._end(taker)

    def _forget(self, taker: Taker, version: int) -> None:
        """Stop using a sampler as a source of this version."""
        if taker in (holders := self.holders.get(version, [])):
            holders.remove(taker)

    def _end(self, taker: Taker) -> None:
        """Record that no transfer to a sampler is in progress."""
        if taker.fetching is not None:
            self._fetched[taker.fetching] -= 1
        taker.fetching, taker.due_s = None, 0.0

    def _set_due(self, taker: Taker, at_s: float) -> None:
        taker.due_s = at_s
        self._dues.add(at_s, taker)

    def _hold_until(self, taker: Taker, at_s: float | None) -> None:
        taker.held_until_s = at_s
        if at_s is not None:
            self._holds.add(at_s, taker)

    def _look(self, taker: Taker) -> None:
        """Make `due` check a sampler that can fetch."""
        if taker.ready:
            self._news[taker] = None

    def _is_fetched(self, version: int) -> bool:
        return self._fetched[version] > 0


def sources_of_next(
    place: int, address_at: Callable[[int], str], fanout: int, trainer: str
) -> tuple[str, ...]:
    """Return the addresses from which the next member fetches, best first, the trainer's last.

    fanout 2, members in order of joining:      trainer
                                              ┌────┴────┐
                                              0         1
                                            ┌─┴─┐     ┌─┴─┐
                                            2   3     4   5      sources of 5:  1, 0, trainer

    A member's sources are its parent, its parent's siblings, its grandparent and so on; the trainer
    is the last. If a source has died, the member immediately uses the next one, without
    coordination. All of a member's sources joined before it, so there are no cycles.

    Args:
        place: Number of relaying members that joined before it.
        address_at: Returns the address of each of them by its place, from 0.
        fanout: Number of members to which the trainer, and each member, sends the weights directly.
        trainer: Its address; "": it has none, and is omitted.
    """
    last = (trainer,) if trainer else ()
    above = islice(_places_above(place, fanout), MOST_SOURCES - len(last))
    return (*map(address_at, above), *last)


def _places_above(place: int, fanout: int) -> Iterator[int]:
    """Yield parent and its siblings, grandparent and its siblings, and so on; all before `place`.

    Children of one parent start at different siblings of it, so they spread out when it dies.
    """
    parent, turn = place // fanout - 1, place % fanout
    while parent >= 0:
        yield parent
        eldest = parent // fanout * fanout
        siblings = min(fanout, place - eldest) - 1
        for number in range(siblings):
            sibling = eldest + (turn + number) % siblings
            yield sibling + (sibling >= parent)  # skip the parent itself
        parent = parent // fanout - 1
