"""Which waiting requests get a slot, and the pages that they begin with. Pure host code."""

import itertools
from collections.abc import Callable, Sequence

from jaxrl_async.sampler.batch.adapter_places import PlacedAdapter
from jaxrl_async.sampler.batch.concurrency import LOW, Limit, SamplerLoad, adjusted_limit
from jaxrl_async.sampler.batch.kv_cache import KvCache
from jaxrl_async.sampler.batch.sequence import LiveRequest, Prefilling
from jaxrl_async.sampler.batch.waiting import WaitingQueue

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
