"""The live version of the weights in each sampler: state shared by the channel's threads.

    live version = the lowest version of all samplers that count; it never decreases

A remote sampler counts from the moment it enters, with a version that is not older than the live
one. It may leave at any time. So no counting sampler ever generates with a version older than the
live one, whichever samplers join and leave. The buffer's gate relies on this.
"""

import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from jaxrl_async.errors import Closed
from jaxrl_async.metrics.spans import add_span
from jaxrl_async.metrics.trace_file import TRACE_CLOCK
from jaxrl_async.ports.run import Clock
from jaxrl_async.weights.remote_port import Traffic


@dataclass(frozen=True, slots=True, kw_only=True)
class ChannelStats:
    """Times and size of the last transfer; `published` and `remote` count all transfers."""

    published: int = 0  # updates since the start
    transfer_bytes: int = 0  # moved to one sampler
    publish_s: float = 0.0  # the trainer's time in publish, including waits, seconds
    wait_s: float = 0.0  # part of it until the previous update was taken, seconds
    transfer_s: float = 0.0  # from publish to complete, in the last sampler so far, seconds
    live_s: float = 0.0  # from publish to live in every sampler, seconds
    remote: Traffic = field(default_factory=Traffic)  # to samplers in separate processes


@dataclass(slots=True, kw_only=True, eq=False)
class ExchangeEntry:
    """One sampler's contribution to the live version. Changed under the exchange's lock."""

    live_version: int  # the version that it uses
    counts: bool = True  # the live version waits for it

    @property
    def pending(self) -> bool:
        """True if the next publish must wait until the sampler has taken its update."""
        return False


@dataclass(slots=True, kw_only=True)
class Exchange:
    """State shared by the trainer's and the samplers' threads; guarded by `changed`."""

    entries: list[ExchangeEntry]
    live_version: int  # all counting samplers use it, or a newer version
    on_live: Callable[[int], None]
    count: Callable[[str], None]
    clock: Clock
    published_at: dict[int, float] = field(default_factory=dict)  # of versions not live everywhere
    stats: ChannelStats = field(default_factory=ChannelStats)
    closed: bool = False
    changed: threading.Condition = field(default_factory=threading.Condition)
    unreported: deque[int] = field(default_factory=deque)  # live versions not yet passed to on_live
    reporting: bool = False  # a thread is calling on_live
    last_behind: ExchangeEntry | None = None  # last sampler found to hold the live version back

    @property
    def all_taken(self) -> bool:
        """True if every sampler has taken its update."""
        return not any(entry.pending for entry in self.entries)

    @property
    def is_empty(self) -> bool:
        """True if no sampler counts."""
        return not any(entry.counts for entry in self.entries)

    def seconds_since_publish(self, version: int) -> float:
        """Return the age of a version that is not yet live in all samplers; 0 for any other."""
        now = self.clock()
        return now - self.published_at.get(version, now)

    def arrived(self, version: int) -> None:
        """Record that a remote sampler has received a version completely."""
        with self.changed:
            self.note_transfer(version)

    def note_transfer(self, version: int) -> None:
        """Record that one more sampler has received a version completely. Needs the lock."""
        since_s, now = self.seconds_since_publish(version), TRACE_CLOCK()
        self.stats = replace(self.stats, transfer_s=since_s)
        add_span("transfer", now - since_s, now, "weights: transfer", version=version)

    def raise_live(self) -> None:
        """Raise `live_version` to the lowest version of all counting samplers. Needs the lock; call
        `report_live` afterwards, without it."""
        if self._holds_back(self.last_behind):
            return
        # the last sampler to join is likely the last to swap, so few searches scan all samplers
        self.last_behind = next(filter(self._holds_back, reversed(self.entries)), None)
        if self.last_behind is not None:
            return
        lowest = min((s.live_version for s in self.entries if s.counts), default=None)
        if lowest is None or lowest <= self.live_version:
            return
        self.live_version = lowest
        live_s, now = self.seconds_since_publish(lowest), TRACE_CLOCK()
        self.stats = replace(self.stats, live_s=live_s)
        add_span("until live", now - live_s, now, "weights: live", version=lowest)
        self.published_at = {v: t for v, t in self.published_at.items() if v > lowest}
        self.unreported.append(lowest)
        self.changed.notify_all()

    def _holds_back(self, entry: ExchangeEntry | None) -> bool:
        """Return True if this sampler holds the live version back."""
        return entry is not None and entry.counts and entry.live_version <= self.live_version

    def report_live(self) -> None:
        """Call on_live with each version that has become live, in ascending order, without the
        lock. One thread at a time does this, also for the others."""
        while True:
            with self.changed:
                if self.reporting or not self.unreported:
                    return
                self.reporting, version = True, self.unreported.popleft()
            try:
                self.on_live(version)
            finally:
                with self.changed:
                    self.reporting = False

    def enter(self, entry: ExchangeEntry, version: int) -> bool:
        """Start to count a sampler that uses this version. Return False, without a change, if the
        version is older than the live one. Needs the lock."""
        if version < self.live_version:
            return False
        entry.live_version, entry.counts = version, True
        self.raise_live()
        self.changed.notify_all()
        return True

    def remove(self, entry: ExchangeEntry) -> None:
        """Stop waiting for a sampler, and remove it. Needs the lock; idempotent."""
        entry.counts = False
        if entry in self.entries:
            self.entries.remove(entry)
        self.raise_live()
        self.changed.notify_all()

    def raise_if_closed(self) -> None:
        """Raise Closed if the channel is closed."""
        if self.closed:
            raise Closed("the weight channel is closed: the run is stopping")
