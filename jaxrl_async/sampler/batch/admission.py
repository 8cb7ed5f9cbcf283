"""Which waiting requests get a slot, and the pages that they begin with. Pure host code."""

import itertools
from collections import deque

from jaxrl_async.sampler.batch.concurrency import Limit, SamplerLoad, adjusted_limit
from jaxrl_async.sampler.batch.kv_pool import KvPool
from jaxrl_async.sampler.batch.sequence import LiveRequest, Prefilling


class Admission:
    """The queue, and how many of its requests may be in flight. Changed by the sampler's thread
    alone."""

    def __init__(self, pool: KvPool, total_slots: int) -> None:
        self.queue: deque[LiveRequest] = deque()
        self.limit = Limit(value=total_slots, least=1, most=total_slots)
        self._pool = pool
        self._orders = itertools.count()
        self._preempted_seen = 0

    def begun(self, version: int) -> list[LiveRequest]:
        """Return the waiting requests whose last saved token was drawn by `version`."""
        return [
            live
            for live in self.queue
            if live.partial is not None and version in live.partial.versions[-1:]
        ]

    def place(
        self,
        live: LiveRequest,
        slot_index: int,
        leaders: dict[bytes, Prefilling],
        *,
        version: int,
        spare: int,
    ) -> Prefilling | None:
        """Take a request out of the queue with pages for its tokens; None if there are too few.

        Args:
            live: a request of the queue.
            slot_index: the free slot that it gets.
            leaders: requests being prefilled, by content: the request follows one with the same
                tokens and shares its pages, or becomes a leader itself.
            version: of the weights that will compute its KV.
            spare: pages that must stay free.
        """
        token_ids = live.known_tokens
        content, prefilled = token_ids.tobytes(), 0
        leader = leaders.get(content)
        if leader is not None:
            pages = self._pool.share(leader.pages, len(token_ids), spare=spare)
        else:
            pages, prefilled = self._pool.take_for_prompt(token_ids, spare=spare)
        if pages is None:
            return None
        prefilling = Prefilling(
            live=live,
            slot_index=slot_index,
            order=next(self._orders),
            token_ids=token_ids,
            pages=pages,
            prefilled=prefilled,
            kv_version=version,
        )
        if leader is not None:
            leader.followers.append(prefilling)
        leaders.setdefault(content, prefilling)
        self.queue.remove(live)
        return prefilling

    def adjust(self, in_flight: int, preempted: int) -> None:
        """Allow fewer requests in flight if pages ran out, more if there are plenty.

        preempted: requests preempted since the start.
        """
        load = SamplerLoad(
            running=in_flight,
            waiting=len(self.queue),
            used_share=self._pool.used_share,
            preempted=preempted - self._preempted_seen,
        )
        self._preempted_seen = preempted
        self.limit = adjusted_limit(self.limit, load)
