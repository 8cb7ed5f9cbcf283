"""Which version of the weights is live in which sampler: what the channel's threads share.

    live version = the lowest of all samplers that count, and it never falls

A sampler on the trainer's side of a wire counts from the moment it enters, with a version that is
not older than the live one. It leaves whenever it likes. So no sampler that counts ever draws from
anything older than the live version, whatever joins and leaves: the buffer's gate builds on that.
"""

import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from jaxrl_async.errors import Closed
from jaxrl_async.metrics.spans import add_span
from jaxrl_async.metrics.trace_file import TRACE_CLOCK
from jaxrl_async.ports.run import Clock
from jaxrl_async.weights.traffic import Traffic


@dataclass(frozen=True, slots=True, kw_only=True)
class ChannelStats:
    """The last transfer's times and size; `published` and `remote` count all."""

    published: int = 0  # updates since the start
    transfer_bytes: int = 0  # moved to one sampler
    publish_s: float = 0.0  # the trainer's time in publish, waiting included, seconds
    wait_s: float = 0.0  # of that, until the update before was taken, seconds
    transfer_s: float = 0.0  # from publish to complete, in the last sampler so far, seconds
    live_s: float = 0.0  # from publish to live in every sampler, seconds
    remote: Traffic = field(default_factory=Traffic)  # to samplers in processes of their own


@dataclass(slots=True, kw_only=True, eq=False)
class Standing:
    """One sampler's part in the live version. Changed under the exchange's lock."""

    live_version: int  # it draws from this version
    counts: bool = True  # whether the live version waits for it

    @property
    def pending(self) -> bool:
        """Whether the next publish waits until the sampler has taken its update."""
        return False


@dataclass(slots=True, kw_only=True)
class Exchange:
    """What the trainer's and the samplers' threads share; `changed` guards it."""

    standings: list[Standing]
    live_version: int  # every sampler that counts draws from it, or from something newer
    on_live: Callable[[int], None]
    count: Callable[[str], None]
    clock: Clock
    published_at: dict[int, float] = field(default_factory=dict)  # of versions not live everywhere
    stats: ChannelStats = field(default_factory=ChannelStats)
    closed: bool = False
    changed: threading.Condition = field(default_factory=threading.Condition)
    untold: deque[int] = field(default_factory=deque)  # live versions that on_live was not given
    telling: bool = False  # a thread is calling on_live
    last_late: Standing | None = None  # held the live version back when it was last looked for

    @property
    def all_taken(self) -> bool:
        """Whether no sampler has yet to take its update."""
        return not any(standing.pending for standing in self.standings)

    @property
    def deserted(self) -> bool:
        """Whether no sampler counts."""
        return not any(standing.counts for standing in self.standings)

    def seconds_since_publish(self, version: int) -> float:
        """Return the age of a version that is not live everywhere; 0 for any other."""
        now = self.clock()
        return now - self.published_at.get(version, now)

    def arrived(self, version: int) -> None:
        """Take note that a remote sampler has every byte of a version: the last so far."""
        with self.changed:
            self.note_transfer(version)

    def note_transfer(self, version: int) -> None:
        """Take note that the last sampler so far has all of a version. Under the lock."""
        since_s, now = self.seconds_since_publish(version), TRACE_CLOCK()
        self.stats = replace(self.stats, transfer_s=since_s)
        add_span("transfer", now - since_s, now, "weights: transfer", version=version)

    def raise_live(self) -> None:
        """Move `live_version` up to the lowest of all that count. Under the lock; call `tell`
        after it, without."""
        if self._holds_back(self.last_late):
            return
        # the last sampler to come is likely the last to sample from it: few looks at all samplers
        self.last_late = next(filter(self._holds_back, reversed(self.standings)), None)
        if self.last_late is not None:
            return
        lowest = min((s.live_version for s in self.standings if s.counts), default=None)
        if lowest is None or lowest <= self.live_version:
            return
        self.live_version = lowest
        live_s, now = self.seconds_since_publish(lowest), TRACE_CLOCK()
        self.stats = replace(self.stats, live_s=live_s)
        add_span("until live", now - live_s, now, "weights: live", version=lowest)
        self.published_at = {v: t for v, t in self.published_at.items() if v > lowest}
        self.untold.append(lowest)
        self.changed.notify_all()

    def _holds_back(self, standing: Standing | None) -> bool:
        """Return whether the live version cannot rise because of this sampler."""
        return (
            standing is not None and standing.counts and standing.live_version <= self.live_version
        )

    def tell(self) -> None:
        """Call on_live with each version that has become live, in rising order, outside the lock:
        on one thread at a time, which does it for the others, too."""
        while True:
            with self.changed:
                if self.telling or not self.untold:
                    return
                self.telling, version = True, self.untold.popleft()
            try:
                self.on_live(version)
            finally:
                with self.changed:
                    self.telling = False

    def enter(self, standing: Standing, version: int) -> bool:
        """Count a sampler that draws from this version from now on; False if that is older than
        the live one: then nothing has changed. Under the lock."""
        if version < self.live_version:
            return False
        standing.live_version, standing.counts = version, True
        self.raise_live()
        self.changed.notify_all()
        return True

    def remove(self, standing: Standing) -> None:
        """Wait for a sampler no more, and forget it. Under the lock; idempotent."""
        standing.counts = False
        if standing in self.standings:
            self.standings.remove(standing)
        self.raise_live()
        self.changed.notify_all()

    def raise_if_closed(self) -> None:
        """Raise Closed once the channel is closed."""
        if self.closed:
            raise Closed("the weight channel is closed: the run is stopping")
