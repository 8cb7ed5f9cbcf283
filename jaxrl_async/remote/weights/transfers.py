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
class Recipient:
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

    recipient: Recipient
    version: int
    sources: tuple[str, ...]  # addresses, best first


@dataclass(slots=True)
class Alarms:
    """Heap of times that may change: an alarm is valid only while its sampler still has this
    time."""

    _heap: list[tuple[float, int, Recipient]] = field(default_factory=list)
    _numbers: Iterator[int] = field(default_factory=count)

    def add(self, at_s: float, recipient: Recipient) -> None:
        """Set an alarm for a sampler, at its current time."""
        heapq.heappush(self._heap, (at_s, next(self._numbers), recipient))

    def passed(self, now_s: float, time_of: Callable[[Recipient], float | None]) -> list[Recipient]:
        """Remove the alarms up to now; return the samplers whose alarms are still valid, each once.

        time_of: returns the time of a sampler, or None if it has no time.
        """
        passed = dict[Recipient, None]()
        while self._heap and self._heap[0][0] <= now_s:
            at_s, _, recipient = heapq.heappop(self._heap)
            if time_of(recipient) == at_s:
                passed[recipient] = None
        return list(passed)

    def first(self, time_of: Callable[[Recipient], float | None]) -> float | None:
        """Return the time of the first valid alarm; None: no alarm is valid."""
        while self._heap and time_of(self._heap[0][2]) != self._heap[0][0]:
            heapq.heappop(self._heap)
        return self._heap[0][0] if self._heap else None


@dataclass(slots=True, kw_only=True)
class Transfers:
    """The state of all transfers. Times are seconds of any monotonic clock."""

    fanout: int
    timeout_s: float
    recipients: list[Recipient] = field(default_factory=list)
    kept: list[int] = field(default_factory=list)  # versions that can be fetched, ascending
    holders: dict[int, list[Recipient]] = field(default_factory=dict)  # that relay it, as offered
    _fetched: Counter[int] = field(default_factory=Counter)  # transfers in progress, by version
    _addresses: Counter[str] = field(default_factory=Counter)  # of all recipients
    _unchecked: dict[Recipient, None] = field(default_factory=dict)  # that `due` must check
    _dues: Alarms = field(default_factory=Alarms)  # each due_s
    _holds: Alarms = field(default_factory=Alarms)  # each held_until_s

    def join(self, recipient: Recipient) -> None:
        """Add a sampler without weights."""
        self.recipients.append(recipient)
        self._addresses[recipient.address] += 1
        self._unchecked[recipient] = None

    def leave(self, recipient: Recipient) -> None:
        """Remove a sampler. Idempotent."""
        self._stop(recipient)
        if not recipient.left and recipient in self.recipients:
            self.recipients.remove(recipient)
            self._addresses[recipient.address] -= 1
        recipient.left, recipient.held_until_s = True, None
        self._unchecked.pop(recipient, None)
        for version in self.holders:
            self._forget(recipient, version)

    def relays(self, address: str) -> bool:
        """Return True if a sampler relays weights at this address."""
        return bool(address) and self._addresses[address] > 0

    # ---- versions

    def blocking(self, version: int) -> list[int] | None:
        """Return the versions to withdraw before a newer one can be kept; None: not possible yet,
        since samplers fetch all kept versions."""
        assert not self.kept or version > self.kept[-1]
        if len(self.kept) < KEPT:
            return []
        return [v for v in self.kept if not self._is_fetched(v)][:1] or None

    def keep(self, version: int) -> None:
        """Record that a version can be fetched."""
        self.kept.append(version)
        self._unchecked = dict.fromkeys(self.recipients)

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
        for recipient in tuple(self._unchecked):
            if recipient.ready and (recipient.staged is None or recipient.staged < newest):
                if now_s < recipient.due_s:
                    continue  # check again then
                offers.append(self._offer(recipient, newest, now_s, trainer))
            del self._unchecked[recipient]
        return offers

    def sent(self, recipient: Recipient) -> None:
        """Record that the session has accepted the last offer to a sampler."""
        recipient.sending = False
        self._recheck(recipient)

    def staged(self, recipient: Recipient, version: int) -> bool:
        """Record that a sampler has a version; return True if this is new.

        Raises WeightsError for a version that was not offered to it.
        """
        if recipient.offered is None or version > recipient.offered:
            raise WeightsError(
                f"{recipient.name} reports that it has version {version}, but was offered "
                f"{'nothing' if recipient.offered is None else f'version {recipient.offered}'}"
            )
        if recipient.staged is not None and version <= recipient.staged:
            return False
        recipient.staged, recipient.failures = version, 0
        if recipient.fetching is not None and recipient.fetching <= version:
            self._end(recipient)
        self._recheck(recipient)
        return True

    def live(self, recipient: Recipient, version: int, enter: Callable[[int], bool]) -> None:
        """Record that a sampler generates with a version. Raises WeightsError if it cannot.

        enter: lets it join with this version; returns False if the version is too old.
        """
        if recipient.staged is None or not (recipient.live or 0) <= version <= recipient.staged:
            raise WeightsError(
                f"{recipient.name} reports that it generates with version {version}, but has "
                f"{'nothing' if recipient.staged is None else f'version {recipient.staged}'}"
            )
        recipient.live = version
        recipient.late = not enter(version)
        recipient.held_until_s = None if not recipient.late else recipient.held_until_s
        self._recheck(recipient)

    def torn(self, recipient: Recipient, version: int, now_s: float) -> bool:
        """Record that a transfer has failed; return True if it was in progress."""
        if recipient.fetching != version:
            return False
        self._fail(recipient, now_s)
        return True

    def expired(self, now_s: float) -> list[Recipient]:
        """Return the samplers whose transfers have timed out; these count as failed."""
        passed = self._dues.passed(now_s, lambda t: t.due_s)
        late = [t for t in passed if t.fetching is not None]
        for recipient in late:
            self._fail(recipient, now_s)
        return late

    def hold_expired(self, now_s: float) -> list[Recipient]:
        """Return the samplers whose hold has expired: the live version no longer waits for them."""
        expired = self._holds.passed(now_s, lambda t: t.held_until_s)
        for recipient in expired:
            recipient.late, recipient.held_until_s = False, None
        return expired

    def next_s(self, now_s: float) -> float | None:
        """Return the time at which something becomes due; None: never."""
        due_s = self._dues.first(
            lambda t: t.due_s if t.fetching is not None or t.due_s > now_s else None
        )
        times = [s for s in (due_s, self._holds.first(lambda t: t.held_until_s)) if s is not None]
        return min(times, default=None)

    def _offer(self, recipient: Recipient, version: int, now_s: float, trainer: str) -> DueOffer:
        recipient.offered = recipient.fetching = version
        self._fetched[version] += 1
        self._set_due(recipient, now_s + self.timeout_s)
        self._hold_until(recipient, recipient.due_s if recipient.late else None)
        holders = self.holders.setdefault(version, [])
        sources = sources_of_next(
            len(holders), lambda index: holders[index].address, self.fanout, trainer
        )
        if recipient.address:
            holders.append(recipient)
        return DueOffer(recipient=recipient, version=version, sources=sources)

    def _fail(self, recipient: Recipient, now_s: float) -> None:
        self._stop(recipient)
        self._set_due(recipient, now_s + backoff_s(RETRY_S, recipient.failures))
        recipient.failures += 1
        if recipient.held_until_s is not None:
            self._hold_until(recipient, now_s)
        self._recheck(recipient)

    def _stop(self, recipient: Recipient) -> None:
        """End the transfer to a sampler, and do not use it as a source."""
        if recipient.fetching is not None:
            self._forget(recipient, recipient.fetching)
        self._end(recipient)

    def _forget(self, recipient: Recipient, version: int) -> None:
        """Stop using a sampler as a source of this version."""
        if recipient in (holders := self.holders.get(version, [])):
            holders.remove(recipient)

    def _end(self, recipient: Recipient) -> None:
        """Record that no transfer to a sampler is in progress."""
        if recipient.fetching is not None:
            self._fetched[recipient.fetching] -= 1
        recipient.fetching, recipient.due_s = None, 0.0

    def _set_due(self, recipient: Recipient, at_s: float) -> None:
        recipient.due_s = at_s
        self._dues.add(at_s, recipient)

    def _hold_until(self, recipient: Recipient, at_s: float | None) -> None:
        recipient.held_until_s = at_s
        if at_s is not None:
            self._holds.add(at_s, recipient)

    def _recheck(self, recipient: Recipient) -> None:
        """Make `due` check a sampler that can fetch."""
        if recipient.ready:
            self._unchecked[recipient] = None

    def _is_fetched(self, version: int) -> bool:
        return self._fetched[version] > 0


def sources_of_next(
    index: int, address_at: Callable[[int], str], fanout: int, trainer: str
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
        index: Number of relaying members that joined before it.
        address_at: Returns the address of each of them by its index, from 0.
        fanout: Number of members to which the trainer, and each member, sends the weights directly.
        trainer: Its address; "": it has none, and is omitted.
    """
    last = (trainer,) if trainer else ()
    above = islice(_ancestors(index, fanout), MOST_SOURCES - len(last))
    return (*map(address_at, above), *last)


def _ancestors(index: int, fanout: int) -> Iterator[int]:
    """Yield parent and its siblings, grandparent and its siblings, and so on; all before `index`.

    Children of one parent start at different siblings of it, so they spread out when it dies.
    """
    parent, child = index // fanout - 1, index % fanout
    while parent >= 0:
        yield parent
        first = parent // fanout * fanout
        siblings = min(fanout, index - first) - 1
        for number in range(siblings):
            sibling = first + (child + number) % siblings
            yield sibling + (sibling >= parent)  # skip the parent itself
        parent = parent // fanout - 1
