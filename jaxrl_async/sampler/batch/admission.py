"""The waiting requests, and which of them get a slot and pages. Pure host code.

    put_back ──> [ front: had a slot, or has tokens ]  [ the others, by priority ] ──> head
    add ──────────────────────────────────────────────────^

Lower priorities go first, as in vLLM's scheduler; equal priorities in the order of arrival. At most
`overtakes` admissions in a row pass the request that has waited longest; then it is next, at any
priority. A request behind n older ones is therefore admitted among the next
(n + 1) * (overtakes + 1), and none starves. The count is of admissions, not of time: the same
requests in the same order are always admitted in the same order.
"""

import itertools
from bisect import bisect_left, insort
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Generic, Protocol, TypeVar

from jaxrl_async.sampler.batch.adapter_slots import LoadedAdapter
from jaxrl_async.sampler.batch.kv_cache import KvCache
from jaxrl_async.sampler.batch.prompt_scores import PromptScores, scores_for
from jaxrl_async.sampler.batch.sequence import LiveRequest, Prefilling
from jaxrl_async.types import IntArray, LogprobRequest, Request

OVERTAKES = 64
"""Maximum admissions in a row that pass the longest-waiting request."""


class Queued(Protocol):
    """An entry of the queue that waits for a request's answer; compared by identity."""

    @property
    def request(self) -> Request:
        """The request."""


A = TypeVar("A", bound=Queued)
Entry = tuple[tuple[int, int], int, A]
"""Priority, number in the order of arrival, and the waiting entry."""


class WaitingQueue(Generic[A]):
    """The waiting entries. Owned by one thread, or guarded by its owner's lock."""

    def __init__(self, overtakes: int = OVERTAKES) -> None:
        """overtakes: maximum admissions in a row that pass the longest-waiting entry; 0: priorities
        have no effect."""
        self._overtakes = overtakes
        self._front: deque[A] = deque()
        self._others: list[Entry[A]] = []  # sorted
        self._entries: OrderedDict[A, Entry[A]] = OrderedDict()  # of the others, by arrival
        self._numbers = itertools.count()
        self._passed_in_a_row = 0  # admissions past the longest-waiting entry

    def __len__(self) -> int:
        return len(self._front) + len(self._others)

    def __iter__(self) -> Iterator[A]:
        """Iterate over the front, and then over the others by priority."""
        return itertools.chain(list(self._front), [entry[2] for entry in self._others])

    def __contains__(self, one: object) -> bool:
        return one in self._entries or one in self._front

    def add(self, incoming: Iterable[A]) -> None:
        """Add entries, in the order of their arrival."""
        for one in incoming:
            entry = (one.request.priority, next(self._numbers), one)
            insort(self._others, entry)
            self._entries[one] = entry

    def put_back(self, entries: Sequence[A], *, behind: int = 0) -> None:
        """Put entries that had been admitted before in front of all others, in this order.

        behind: number of entries at the front that stay before them.
        """
        before = [self._front.popleft() for _ in range(behind)]
        self._front.extendleft(reversed([*before, *entries]))

    def front(self) -> tuple[A, ...]:
        """Return the entries at the front, which precede all priorities."""
        return tuple(self._front)

    def head(self) -> A | None:
        """Return the next entry; None if the queue is empty."""
        if self._front:
            return self._front[0]
        if not self._others:
            return None
        if self._passed_in_a_row >= self._overtakes:
            return self._oldest()
        return self._others[0][2]

    def admit(self, one: A) -> None:
        """Remove an entry that is admitted."""
        if one in self._entries:
            passes = one is not self._oldest()
            self._passed_in_a_row = self._passed_in_a_row + 1 if passes else 0
        self.remove(one)

    def remove(self, one: A) -> None:
        """Remove an entry without admitting it. Raises ValueError if it is not in the queue."""
        entry = self._entries.pop(one, None)
        if entry is None:
            self._front.remove(one)
        else:
            del self._others[bisect_left(self._others, entry)]

    def clear(self) -> None:
        """Remove all entries."""
        self._front.clear()
        self._others.clear()
        self._entries.clear()

    def _oldest(self) -> A:
        """Return the longest-waiting entry of the others, which are not empty."""
        return next(iter(self._entries))


class RequestQueue(WaitingQueue[LiveRequest]):
    """The waiting requests of a sampler. Requests that only score wait in a separate queue, since
    they need no slot."""

    def __init__(self, *, separate: bool) -> None:
        """separate: False puts requests that only score among the others."""
        super().__init__()
        self.scores: WaitingQueue[LiveRequest] = WaitingQueue()
        self._separate = separate

    def is_separate(self, live: LiveRequest) -> bool:
        """Return whether a request waits among the scores."""
        return self._separate and live.only_scores

    def __len__(self) -> int:
        return super().__len__() + len(self.scores)

    def __iter__(self) -> Iterator[LiveRequest]:
        """Iterate over the requests that need a slot, and then over the others."""
        return itertools.chain(super().__iter__(), self.scores)

    def __contains__(self, one: object) -> bool:
        return super().__contains__(one) or one in self.scores

    def add(self, incoming: Iterable[LiveRequest]) -> None:
        """See WaitingQueue."""
        incoming = list(incoming)
        super().add(live for live in incoming if not self.is_separate(live))
        self.scores.add(live for live in incoming if self.is_separate(live))

    def put_back(self, entries: Sequence[LiveRequest], *, behind: int = 0) -> None:
        """See WaitingQueue. behind: of the ones that need a slot."""
        super().put_back([live for live in entries if not self.is_separate(live)], behind=behind)
        self.scores.put_back([live for live in entries if self.is_separate(live)])

    def admit(self, one: LiveRequest) -> None:
        """See WaitingQueue."""
        self.scores.admit(one) if self.is_separate(one) else super().admit(one)

    def remove(self, one: LiveRequest) -> None:
        """See WaitingQueue."""
        self.scores.remove(one) if self.is_separate(one) else super().remove(one)

    def clear(self) -> None:
        """See WaitingQueue."""
        super().clear()
        self.scores.clear()


HIGH = 0.9
"""Share of the pages in use above which the limit falls."""
LOW = 0.6
"""Share of the pages in use below which the limit may rise."""
DECREASE = 0.8
"""Factor of the limit when pages ran out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limit:
    """The number of requests that may hold a slot."""

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
    used_share: float  # of the KV pages, without pages that can be evicted
    preempted: int  # requests that had to give up their pages


def adjusted_limit(limit: Limit, load: SamplerLoad) -> Limit:
    """Return the limit + 1 if it binds and use is below LOW, x 0.8 if pages ran out or nearly did.

    Chiu and Jain 1989 (Computer Networks 17), eq. 2 with a_I = 1 and b_D = 0.8.
    """
    if load.preempted or load.used_share > HIGH:
        return replace(limit, value=max(float(limit.least), limit.value * DECREASE))
    if load.waiting and load.running >= limit.requests and load.used_share < LOW:
        return replace(limit, value=min(float(limit.most), limit.value + 1))
    return limit


Content = tuple[bytes, bytes, tuple[LogprobRequest, int] | None]
"""The salt of a request's adapter, its tokens, and the log-probs that it wants of its prompt with
the prompt's length (sampled tokens may follow): requests with equal content share a prefill."""


def content_of(salt: bytes, token_ids: IntArray, scores: PromptScores | None) -> Content:
    """Return the content of a request."""
    logprobs = None if scores is None else (scores.request, scores.tokens)
    return salt, token_ids.tobytes(), logprobs


class Admission:
    """The queue, and the limit of requests in flight. Changed only by the sampler's thread."""

    def __init__(self, cache: KvCache, total_slots: int, *, separate: bool = True) -> None:
        """separate: requests that only score need no slot."""
        self.queue = RequestQueue(separate=separate)
        self.limit = Limit(value=total_slots, least=1, most=total_slots)
        self._cache = cache
        self._orders = itertools.count()
        self._preempted_seen = 0

    def enqueue(self, incoming: Sequence[LiveRequest]) -> None:
        """Add requests to the queue. Requests with tokens of another sampler go before all without
        tokens: they are older, and their group waits for its last member."""
        ahead = sum(1 for _ in itertools.takewhile(lambda x: x.has_tokens, self.queue.front()))
        self.queue.put_back([live for live in incoming if live.has_tokens], behind=ahead)
        self.queue.add(live for live in incoming if not live.has_tokens)

    def begun(self, adapter: str, version: int) -> list[LiveRequest]:
        """Return the waiting requests of an adapter whose last saved token is of this version."""
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
        """Return a function that returns the next request to admit, or None.

        Args:
            held: adapters whose requests wait, except requests that have begun.
            version_of: returns the current version of an adapter.
        """
        if not held:
            return self.queue.head
        queue = [live for live in self.queue if not self.queue.is_separate(live)]
        begun = {name: self.begun(name, version_of(name)) for name in held}
        allowed = [
            live
            for live in queue
            if live.request.adapter not in held or live in begun[live.request.adapter]
        ]
        return partial(next, iter(allowed), None)

    def next_score(self, held: frozenset[str]) -> LiveRequest | None:
        """Return the next request that only scores, or None. held: see `order`."""
        if not held:
            return self.queue.scores.head()
        allowed = (live for live in self.queue.scores if live.request.adapter not in held)
        return next(allowed, None)

    def admit(
        self,
        live: LiveRequest,
        slot_index: int,
        leaders: dict[Content, Prefilling],
        *,
        weights: LoadedAdapter,
        spare: int,
    ) -> Prefilling | None:
        """Take a request out of the queue with pages for its tokens; None if there are too few.

        Args:
            live: a request of the queue.
            slot_index: the free slot that it gets.
            leaders: requests being prefilled, by content. The request follows the leader with the
                same tokens and will share its pages, or becomes a leader.
            weights: that will compute its KV.
            spare: pages that must stay free.
        """
        token_ids = live.known_tokens
        scores, prefilled = scores_for(live.request, live.partial, weights.version), 0
        content = content_of(weights.salt, token_ids, scores)
        leader = leaders.get(content)
        if leader is not None:
            table = self._cache.allocate_follower(len(token_ids), spare=spare)
        else:
            reusable = None if scores is None else max(scores.request.start, 1)
            table, prefilled = self._cache.allocate(
                token_ids, spare=spare, salt=weights.salt, reusable=reusable
            )
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
            adapter_slot=weights.slot,
            scores=scores,
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
        """Return the share of the pages in use; above LOW, without pages that can be evicted. Below
        LOW these would not change the decision, and counting them is slow."""
        share = self._cache.pages.used_share
        return share - self._cache.evictable_share if share > LOW else share
