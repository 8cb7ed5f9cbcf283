"""N samplers behind one ports.Generate: requests go where there is room and where their prefix is.

Samplers know nothing of each other; each swaps weights on its own. All members of a group go to
one sampler, where they share a prefill. Requests of one call are dealt by a pure function of what
was dealt before and of who has answered, so equal calls to idle samplers are dealt equally.
"""

import asyncio
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from jaxrl_async.sampler.partial import branches
from jaxrl_async.types import Completion, Partial, Request

AFFINITY_TOKENS = 32
"""Leading tokens that say which sampler is likely to hold a request's prefix."""
AFFINITY_SLACK = 0.25
"""How much more loaded than the least loaded one that sampler may be, as a share of its places."""
REMEMBERED = 4096
"""Prefixes whose sampler is remembered."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """What the choice depends on, of one sampler."""

    in_flight: int  # requests dealt to it and not answered
    places: int  # requests that it holds at once

    @property
    def load(self) -> float:
        """In flight over places."""
        return self.in_flight / self.places


def choose(candidates: Sequence[Candidate], home: int | None, count: int = 1) -> int:
    """The sampler for `count` requests of one prefix: its home unless that is much busier.

    home: the sampler that had the prefix last; None: nobody. Ties go to the lowest number.
    """
    loads = [(c.in_flight + count) / c.places for c in candidates]
    least = min(range(len(loads)), key=loads.__getitem__)
    if home is not None and loads[home] <= loads[least] + AFFINITY_SLACK:
        return home
    return least


class Router:
    """Deals requests to samplers. Thread safe: submit from anywhere."""

    def __init__(
        self,
        samplers: Sequence[Any],
        recorded: Callable[[str], int | None] = lambda request_id: None,
    ) -> None:
        """recorded: in a replay, the number of the sampler for a request; None: choose."""
        assert samplers, "at least one sampler"
        self._recorded = recorded
        self.samplers = tuple(samplers)
        self._places = [s.engine.places for s in samplers]
        self._in_flight = [0] * len(samplers)
        self._homes: dict[bytes, int] = {}
        self._lock = threading.Lock()

    def start(self) -> None:
        """Start every sampler."""
        for sampler in self.samplers:
            sampler.start()

    def close(self) -> None:
        """Stop every sampler. Idempotent."""
        for sampler in self.samplers:
            sampler.close()

    @property
    def error(self) -> BaseException | None:
        """The first sampler's failure."""
        return next((s.error for s in self.samplers if s.error is not None), None)

    def stats(self) -> Any:
        """Counters of all samplers: sums, the largest pause and error, mean shares."""
        return add_stats([s.stats() for s in self.samplers])

    def submit_many(
        self, requests: Sequence[Request | Partial]
    ) -> "list[asyncio.Future[Completion]]":
        """ports.Generate: each sampler gets its share in one call."""
        return self._dealt(requests, lambda sampler, share: sampler.submit_many(share))

    async def submit(self, request: Request) -> Completion:
        """Complete one request."""
        return await self.submit_many([request])[0]

    def generate(self, requests: Sequence[Request]) -> list[Completion]:
        """Complete all requests, in order; blocks."""
        futures = self._dealt(requests, lambda sampler, share: sampler.start_many(share))
        return [f.result() for f in futures]

    @property
    def seed(self) -> int:
        """Of every sampler."""
        return int(self.samplers[0].seed)

    def progress(self) -> tuple[Partial, ...]:
        """As Sampler.progress, of all samplers."""
        return tuple(p for sampler in self.samplers for p in sampler.progress())

    def save(self, request_id: str, *, stop: bool = False, with_kv: bool = True) -> Partial:
        """As Sampler.save, wherever the request is. Raises RolloutError where it is nowhere."""
        for sampler in self.samplers[:-1]:
            if sampler.has(request_id):
                return sampler.save(request_id, stop=stop, with_kv=with_kv)
        return self.samplers[-1].save(request_id, stop=stop, with_kv=with_kv)

    def resume(self, partials: Sequence[Partial]) -> list[Completion]:
        """As Sampler.resume, on the least loaded one."""
        with self._lock:
            least = choose(self._candidates(), None, len(partials))
        return self.samplers[least].resume(partials)

    def fork(self, partial: Partial, count: int) -> list[Completion]:
        """As Sampler.fork: all branches on one sampler, where they share the prefix."""
        return self.resume(branches(partial, count))

    def _candidates(self) -> list[Candidate]:
        return [
            Candidate(in_flight=n, places=p)
            for n, p in zip(self._in_flight, self._places, strict=True)
        ]

    def _dealt(
        self,
        requests: Sequence[Request | Partial],
        submit: Callable[[Any, list[Request | Partial]], list[Any]],
    ) -> list[Any]:
        """Futures of all requests in order; groups (equal tokens, one after another) together."""
        with self._lock:
            chosen = self._deal(requests)
        futures: list[Any] = [None] * len(requests)
        for index, sampler in enumerate(self.samplers):
            mine = [i for i, c in enumerate(chosen) if c == index]
            if not mine:
                continue
            try:
                share = submit(sampler, [requests[i] for i in mine])
            except BaseException:
                self._answered(index, len(mine))
                raise
            for i, future in zip(mine, share, strict=True):
                futures[i] = future
                future.add_done_callback(lambda _, index=index: self._answered(index, 1))
        return futures

    def _deal(self, given: Sequence[Request | Partial]) -> list[int]:
        requests = [r.request if isinstance(r, Partial) else r for r in given]
        chosen: list[int] = []
        start = 0
        while start < len(requests):
            content = requests[start].token_ids.tobytes()
            end = start + 1
            while end < len(requests) and requests[end].token_ids.tobytes() == content:
                end += 1
            prefix = requests[start].token_ids[:AFFINITY_TOKENS].tobytes()
            recorded = self._recorded(requests[start].request_id)
            index = (
                choose(self._candidates(), self._homes.get(prefix), end - start)
                if recorded is None
                else recorded
            )
            self._in_flight[index] += end - start
            self._remember(prefix, index)
            chosen += [index] * (end - start)
            start = end
        return chosen

    def _remember(self, prefix: bytes, index: int) -> None:
        self._homes.pop(prefix, None)
        self._homes[prefix] = index
        if len(self._homes) > REMEMBERED:
            del self._homes[next(iter(self._homes))]

    def _answered(self, index: int, count: int) -> None:
        with self._lock:
            self._in_flight[index] -= count


LARGEST = ("swap_pause_s", "max_swap_pause_s", "probe_error", "max_probe_error")
"""Counters of which the largest says most."""


def add_stats(stats: Sequence[Any]) -> Any:
    """One reading for several samplers; times are means: shares of wall time stay shares."""
    if len(stats) == 1:
        return stats[0]
    first = type(stats[0])
    fields = {name: [getattr(s, name) for s in stats] for name in first.__dataclass_fields__}
    means = ("busy_s", "idle_s", "used_page_share")
    return first(
        **{
            name: max(v) if name in LARGEST else sum(v) / len(v) if name in means else sum(v)
            for name, v in fields.items()
        }
    )
