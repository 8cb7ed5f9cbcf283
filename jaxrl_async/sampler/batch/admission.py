"""The waiting requests, and which of them get a slot and pages. Pure host code.

    put_back ──> [ in front: had a place, or has drawn ]  [ the others, by priority ] ──> head
    add ─────────────────────────────────────────────────────^

Lower priorities go first, as in vLLM's scheduler; equal ones in the order of arrival. Whoever has
waited longest is overtaken by at most `overtakes` admissions in a row and is then next, whatever
its priority: so each request that waits behind n older ones is admitted among the next
(n + 1) * (overtakes + 1), and none starves. This counts admissions and not time: the same requests
in the same order are always admitted in the same order.
"""

import itertools
from bisect import bisect_left, insort
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Generic, Protocol, TypeVar

from jaxrl_async.sampler.batch.adapter_places import PlacedAdapter
from jaxrl_async.sampler.batch.kv_cache import KvCache
from jaxrl_async.sampler.batch.sequence import LiveRequest, Prefilling
from jaxrl_async.types import Request

OVERTAKES = 64
"""Most admissions in a row that overtake the one that has waited longest."""


class Asks(Protocol):
    """Whatever waits for a request's answer; told apart by identity."""

    @property
    def request(self) -> Request:
        """The request."""
        ...


A = TypeVar("A", bound=Asks)
Entry = tuple[tuple[int, int], int, A]
"""Priority, number in the order of arrival, and who waits."""


class WaitingQueue(Generic[A]):
    """Those that wait. Owned by one thread, or guarded by its owner's lock."""

    def __init__(self, overtakes: int = OVERTAKES) -> None:
        """overtakes: most admissions in a row past the one that has waited longest; 0: priorities
        have no effect."""
        self._most = overtakes
        self._front: deque[A] = deque()
        self._others: list[Entry[A]] = []  # sorted
        self._where: OrderedDict[A, Entry[A]] = OrderedDict()  # of the others, by arrival
        self._numbers = itertools.count()
        self._in_a_row = 0  # admissions past the one that has waited longest

    def __len__(self) -> int:
        return len(self._front) + len(self._others)

    def __iter__(self) -> Iterator[A]:
        """Iterate over those in front, and then over the others by priority."""
        return itertools.chain(list(self._front), [entry[2] for entry in self._others])

    def __contains__(self, one: object) -> bool:
        return one in self._where or one in self._front

    def add(self, incoming: Iterable[A]) -> None:
        """Have these wait, in the order of their arrival."""
        for one in incoming:
            entry = (one.request.priority, next(self._numbers), one)
            insort(self._others, entry)
            self._where[one] = entry

    def put_back(self, those: Sequence[A], *, behind: int = 0) -> None:
        """Put these in front of all others, in this order: they have had their turn.

        behind: how many of those in front stay before them.
        """
        before = [self._front.popleft() for _ in range(behind)]
        self._front.extendleft(reversed([*before, *those]))

    def front(self) -> tuple[A, ...]:
        """Return those in front, whatever the others' priorities."""
        return tuple(self._front)

    def head(self) -> A | None:
        """Return who is next; None: nobody waits."""
        if self._front:
            return self._front[0]
        if not self._others:
            return None
        if self._in_a_row >= self._most:
            return self._oldest()
        return self._others[0][2]

    def admit(self, one: A) -> None:
        """Remove one that has got what it waited for."""
        if one in self._where:
            passes = one is not self._oldest()
            self._in_a_row = self._in_a_row + 1 if passes else 0
        self.remove(one)

    def remove(self, one: A) -> None:
        """Remove one that waits no longer. Raises ValueError if it did not wait."""
        entry = self._where.pop(one, None)
        if entry is None:
            self._front.remove(one)
        else:
            del self._others[bisect_left(self._others, entry)]

    def clear(self) -> None:
        """Remove all."""
        self._front.clear()
        self._others.clear()
        self._where.clear()

    def _oldest(self) -> A:
        """Return the one of the others that has waited longest; there is one."""
        return next(iter(self._where))


HIGH = 0.9
"""Share of the pages in use above which the limit falls."""
LOW = 0.6
"""Share of the pages in use below which the limit may rise."""
DECREASE = 0.8
"""Factor of the limit when pages ran out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limit:
    """How many requests may hold a slot."""

    value: float
    least: int
    most: int

    @property
    def requests(self) -> int:
        """The limit as a whole number."""
        return int(self.value)


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplerLoad:
    """The load of a sampler since the limit was last adjusted."""

    running: int  # requests with a slot
    waiting: int  # requests without a slot
    used_share: float  # of the KV pages, by requests; pages that can be evicted are not counted
    preempted: int  # requests that had to give up their pages


def adjusted_limit(limit: Limit, load: SamplerLoad) -> Limit:
    """Return the limit + 1 while it binds and pages are plenty, x 0.8 if they run out or nearly do.

    Chiu and Jain 1989 (Computer Networks 17), eq. 2 with a_I = 1 and b_D = 0.8.
    """
    if load.preempted or load.used_share > HIGH:
        return replace(limit, value=max(float(limit.least), limit.value * DECREASE))
    if load.waiting and load.running >= limit.requests and load.used_share < LOW:
        return replace(limit, value=min(float(limit.most), limit.value + 1))
    return limit


Content = tuple[bytes, bytes]
"""The salt of a request's adapter, and its tokens: requests of equal content share a prefill."""


class Admission:
    """The queue, and how many of its requests may be in flight. Changed by the sampler's thread
    alone."""

    def __init__(self, cache: KvCache, total_slots: int) -> None:
        self.queue: WaitingQueue[LiveRequest] = WaitingQueue()
        self.limit = Limit(value=total_slots, least=1, most=total_slots)
        self._cache = cache
        self._orders = itertools.count()
        self._preempted_seen = 0

    def enqueue(self, incoming: Sequence[LiveRequest]) -> None:
        """Have requests wait, those that have drawn tokens elsewhere before all that have drawn
        none: they were asked for longer ago, and whoever asked waits for the last of a group."""
        ahead = sum(1 for _ in itertools.takewhile(lambda x: x.has_drawn, self.queue.front()))
        self.queue.put_back([live for live in incoming if live.has_drawn], behind=ahead)
        self.queue.add(live for live in incoming if not live.has_drawn)

    def begun(self, adapter: str, version: int) -> list[LiveRequest]:
        """Return the waiting requests of an adapter whose last saved token was drawn by its
        `version`."""
        return [
            live
            for live in self.queue
            if live.request.adapter == adapter
            and live.partial is not None
            and version in live.partial.versions[-1:]
        ]

    def order(
        self, held: frozenset[str], version_of: Callable[[str], int]
    ) -> Callable[[], LiveRequest | None]:
        """Return what gives the next to be admitted; None: nobody.

        Args:
            held: adapters whose requests have to wait, unless they have begun.
            version_of: the current version of an adapter.
        """
        if not held:
            return self.queue.head
        begun = {name: self.begun(name, version_of(name)) for name in held}
        allowed = [
            live
            for live in self.queue
            if live.request.adapter not in held or live in begun[live.request.adapter]
        ]
        left = iter(allowed)

        def following() -> LiveRequest | None:
            return next(left, None)

        return following

    def place(
        self,
        live: LiveRequest,
        slot_index: int,
        leaders: dict[Content, Prefilling],
        *,
        weights: PlacedAdapter,
        spare: int,
    ) -> Prefilling | None:
        """Take a request out of the queue with pages for its tokens; None if there are too few.

        Args:
            live: a request of the queue.
            slot_index: the free slot that it gets.
            leaders: requests being prefilled, by content: the request follows one with the same
                tokens and will share its pages, or becomes a leader itself.
            weights: that will compute its KV.
            spare: pages that must stay free.
        """
        token_ids = live.known_tokens
        content, prefilled = (weights.salt, token_ids.tobytes()), 0
        leader = leaders.get(content)
        if leader is not None:
            table = self._cache.allocate_follower(len(token_ids), spare=spare)
        else:
            table, prefilled = self._cache.allocate(token_ids, spare=spare, salt=weights.salt)
        if table is None:
            return None
        prefilling = Prefilling(
            live=live,
            slot_index=slot_index,
            order=next(self._orders),
            token_ids=token_ids,
            table=table,
            prefilled=prefilled,
            kv_version=weights.version,
            place=weights.place,
        )
        if leader is not None:
            leader.followers.append(prefilling)
        leaders.setdefault(content, prefilling)
        self.queue.admit(live)
        return prefilling

    def adjust(self, in_flight: int, preempted: int) -> None:
        """Allow fewer requests in flight if pages ran out, more if there are plenty.

        preempted: requests preempted since the start.
        """
        load = SamplerLoad(
            running=in_flight,
            waiting=len(self.queue),
            used_share=self._used_share(),
            preempted=preempted - self._preempted_seen,
        )
        self._preempted_seen = preempted
        self.limit = adjusted_limit(self.limit, load)

    def _used_share(self) -> float:
        """Return the share of the pages in use; above LOW, without those that can be evicted: only
        there it matters, and they are many to count."""
        share = self._cache.pages.used_share
        return share - self._cache.evictable_share if share > LOW else share
