"""Which sampler is offered which version of the weights, and which versions are kept for it: pure.

    pending ──room──> kept ──due──> fetching ──staged──> staged ──live──> live ──> due again
    (device)          (host)            │ torn, or too late: due again, a few times
                                        └──> given up

A sampler fetches one version at a time and is offered the next, the newest then, once it draws from
that. So a slow one skips versions, and nobody waits for it. At most two versions are kept: the
newest, for whoever joins, and the one that a slow sampler still fetches.

One that comes to join with weights older than the live ones is held for at its next transfer: the
live version does not rise past that offer until it has joined. Otherwise a sampler that fetches
more slowly than the others could be too late each time, for ever.

Every event costs the same however many samplers there are: `due` looks at those alone to which
something has happened, and times are in heaps (alarms.py).
"""

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from jaxrl_async.errors import WeightsError
from jaxrl_async.metrics.fault_counts import backoff_s
from jaxrl_async.remote.weights import fetch_tree
from jaxrl_async.remote.weights.deadlines import Alarms

KEPT = 2
"""Most versions that are kept at once."""
TRIES = 3
"""Transfers in a row that may fail before a sampler is given up."""
RETRY_S = 1.0
"""Wait after the first failed transfer, seconds; it doubles."""


@dataclass(slots=True, kw_only=True, eq=False)
class Taker:
    """One sampler that takes weights."""

    name: str
    address: str  # HOST:PORT at which it passes weights on; "": it does not
    offered: int | None = None  # the newest version that it was offered
    fetching: int | None = None  # the version under way to it
    staged: int | None = None  # the newest version that it has
    live: int | None = None  # the version that it draws from
    late: bool = False  # it came to join with a version older than the live one
    held_until_s: float | None = None  # until then the live version waits for it to join
    sending: bool = False  # its last offer waits until the session has room
    due_s: float = 0.0  # when its transfer must be done, or when it may be offered one again
    failures: int = 0  # transfers in a row
    left: bool = False  # it is offered nothing any more

    @property
    def ready(self) -> bool:
        """Whether it can begin to fetch: it has room for one version beside the live one."""
        busy = self.left or self.sending or self.fetching is not None
        return not busy and self.staged == self.live


@dataclass(frozen=True, slots=True, kw_only=True)
class DueOffer:
    """A version that a sampler is offered now."""

    taker: Taker
    version: int
    sources: tuple[str, ...]  # addresses, the best first


@dataclass(slots=True, kw_only=True)
class Transfers:
    """The state of all transfers. Times are seconds of any monotone clock."""

    fanout: int
    timeout_s: float
    takers: list[Taker] = field(default_factory=list)
    kept: list[int] = field(default_factory=list)  # versions that can be fetched, rising
    holders: dict[int, list[Taker]] = field(default_factory=dict)  # in the order of their offers
    _passing: dict[int, list[Taker]] = field(default_factory=dict)  # of those, who passes it on
    _fetched: Counter[int] = field(default_factory=Counter)  # transfers under way, by version
    _addresses: Counter[str] = field(default_factory=Counter)  # of the takers
    _news: dict[Taker, None] = field(default_factory=dict)  # to whom `due` must look
    _dues: Alarms[Taker] = field(default_factory=Alarms)  # each due_s
    _holds: Alarms[Taker] = field(default_factory=Alarms)  # each held_until_s

    def join(self, taker: Taker) -> None:
        """Take in a sampler that has nothing yet."""
        self.takers.append(taker)
        self._addresses[taker.address] += 1
        self._news[taker] = None

    def leave(self, taker: Taker) -> None:
        """Forget a sampler. Idempotent."""
        self._stop(taker)
        if not taker.left and taker in self.takers:
            self.takers.remove(taker)
            self._addresses[taker.address] -= 1
        taker.left, taker.held_until_s = True, None
        self._news.pop(taker, None)
        for version in self.holders:
            self._forget(taker, version)

    def passes_on(self, address: str) -> bool:
        """Return whether a sampler passes weights on at this address."""
        return bool(address) and self._addresses[address] > 0

    # ---- versions

    def in_the_way(self, version: int) -> list[int] | None:
        """Return the versions to withdraw before a newer one can be kept; None: not yet, samplers
        fetch all that are kept."""
        assert not self.kept or version > self.kept[-1]
        if len(self.kept) < KEPT:
            return []
        return [v for v in self.kept if not self._is_fetched(v)][:1] or None

    def keep(self, version: int) -> None:
        """Take note that a version can be fetched."""
        self.kept.append(version)
        self._news = dict.fromkeys(self.takers)

    def drop(self, versions: Iterable[int]) -> None:
        """Take note that versions cannot be fetched any more."""
        for version in versions:
            self.kept.remove(version)
            self.holders.pop(version, None)
            self._passing.pop(version, None)

    def outdated(self) -> list[int]:
        """Return the versions that nobody fetches, and nobody will."""
        return [v for v in self.kept[:-1] if not self._is_fetched(v)]

    # ---- samplers

    def due(self, now_s: float, trainer: str) -> list[DueOffer]:
        """Return the offers to send now, and count them as under way.

        trainer: its address, the last source of every sampler.
        """
        if not self.kept:
            return []
        newest, offers = self.kept[-1], []
        for taker in tuple(self._news):
            if taker.ready and _is_news(newest, taker):
                if now_s < taker.due_s:
                    continue  # once more then
                offers.append(self._offer(taker, newest, now_s, trainer))
            del self._news[taker]
        return offers

    def sent(self, taker: Taker) -> None:
        """Take note that the session has taken in the last offer to a sampler."""
        taker.sending = False
        self._look(taker)

    def staged(self, taker: Taker, version: int) -> bool:
        """Take note that a sampler has a version; return whether it is news.

        Raises WeightsError for a version that it was not offered.
        """
        if taker.offered is None or version > taker.offered:
            raise WeightsError(
                f"{taker.name} says that it has version {version}, but was offered "
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
        """Take note that a sampler draws from a version. Raises WeightsError if it cannot.

        enter: lets it join with this version; returns False if that is too old.
        """
        if taker.staged is None or not (taker.live or 0) <= version <= taker.staged:
            raise WeightsError(
                f"{taker.name} says that it draws from version {version}, but has "
                f"{'nothing' if taker.staged is None else f'version {taker.staged}'}"
            )
        taker.live = version
        taker.late = not enter(version)
        taker.held_until_s = None if not taker.late else taker.held_until_s
        self._look(taker)

    def torn(self, taker: Taker, version: int, now_s: float) -> bool:
        """Take note that a transfer has failed; return whether it was under way."""
        if taker.fetching != version:
            return False
        self._fail(taker, now_s)
        return True

    def expired(self, now_s: float) -> list[Taker]:
        """Return the samplers whose transfers were not done in time; these count as failed."""
        passed = self._dues.passed(now_s, lambda t: t.due_s)
        late = [t for t in passed if t.fetching is not None]
        for taker in late:
            self._fail(taker, now_s)
        return late

    def unheld(self, now_s: float) -> list[Taker]:
        """Return the samplers that were held for long enough: the live version waits no more."""
        unheld = self._holds.passed(now_s, lambda t: t.held_until_s)
        for taker in unheld:
            taker.late, taker.held_until_s = False, None
        return unheld

    def next_s(self, now_s: float) -> float | None:
        """Return when something becomes due by itself; None: nothing does."""
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
        passing = self._passing.setdefault(version, [])
        sources = fetch_tree.sources_of_next(
            len(passing), lambda place: passing[place].address, self.fanout, trainer
        )
        self.holders.setdefault(version, []).append(taker)
        if taker.address:
            passing.append(taker)
        return DueOffer(taker=taker, version=version, sources=sources)

    def _fail(self, taker: Taker, now_s: float) -> None:
        self._stop(taker)
        self._set_due(taker, now_s + backoff_s(RETRY_S, taker.failures))
        taker.failures += 1
        if taker.held_until_s is not None:
            self._hold_until(taker, now_s)
        self._look(taker)

    def _stop(self, taker: Taker) -> None:
        """End the transfer to a sampler, which passes nothing of it on."""
        if taker.fetching is not None:
            self._forget(taker, taker.fetching)
        self._end(taker)

    def _forget(self, taker: Taker, version: int) -> None:
        """Stop naming a sampler as a source of this version."""
        for holders in (self.holders.get(version, []), self._passing.get(version, [])):
            if taker in holders:
                holders.remove(taker)

    def _end(self, taker: Taker) -> None:
        """Take note that no transfer to a sampler is under way."""
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
        """Have `due` look at a sampler that can fetch."""
        if taker.ready:
            self._news[taker] = None

    def _is_fetched(self, version: int) -> bool:
        return self._fetched[version] > 0


def _is_news(version: int, taker: Taker) -> bool:
    return taker.staged is None or taker.staged < version
