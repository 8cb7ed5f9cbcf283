"""Samplers with fixed weights, a few at a time, with one set of compiled programs.

lease(key) ──loaded?──yes──> a Sampler, until the lease ends
               │ no: the least recently used sampler takes no more leases, ends, and frees its slot
               └──> load(key) on a separate thread ──> a Sampler
"""

import asyncio
import logging
import threading
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass

from jaxrl_async.errors import Closed
from jaxrl_async.model.spec import Params
from jaxrl_async.ports.weights import FIXED_WEIGHTS
from jaxrl_async.sampler.sampler import Sampler
from jaxrl_async.sampler.setup import SamplerSetup

log = logging.getLogger(__name__)

LOOK_S = 0.005
"""Interval at which a waiting lease checks whether its sampler is loaded, seconds."""


@dataclass(slots=True, kw_only=True)
class _Place:
    """One sampler of the pool, or one that is being loaded."""

    loading: "Future[Sampler]"
    leases: int = 0
    leaving: bool = False  # accepts no more leases: another key waits for its slot


class FrozenPool:
    """Samplers by key. May be leased from any thread and any event loop."""

    def __init__(self, setup: SamplerSetup, load: Callable[[int], Params], *, places: int) -> None:
        """Load nothing yet.

        Args:
            setup: shared by all samplers: programs, limits, seed.
            load: returns the parameters of a key on the setup's mesh; called on a thread.
            places: maximum number of samplers at the same time.
        """
        self._setup, self._load, self._most = setup, load, places
        self._places: OrderedDict[int, _Place] = OrderedDict()  # least recently used first
        self._waiting: dict[object, int] = {}  # keys that leases are waiting for
        self._lock, self._closed = threading.Lock(), False
        self._loader = ThreadPoolExecutor(1, thread_name_prefix="opponents")
        self.loads = 0  # since the start

    @asynccontextmanager
    async def lease(self, key: int) -> AsyncIterator[Sampler]:
        """Lend the sampler of a key; waits until it is loaded. Raises Closed and errors of `load`.
        Has no timeout of its own: the caller sets one."""
        place, ticket = self._taken(key), object()
        try:
            while place is None:
                self._waiting[ticket] = key
                await asyncio.sleep(LOOK_S)
                place = self._taken(key)
        finally:
            self._waiting.pop(ticket, None)
        try:
            while not place.loading.done():
                await asyncio.sleep(LOOK_S)
            yield place.loading.result()
        finally:
            with self._lock:
                place.leases -= 1
                if place.loading.done() and _is_lost(place.loading):
                    self._remove(key, place)  # the next lease loads it again

    def close(self) -> None:
        """Close all samplers; unfinished requests fail with Closed. Idempotent."""
        with self._lock:
            self._closed = True
            places, self._places = list(self._places.values()), OrderedDict()
        self._loader.shutdown()
        for place in places:
            if not place.loading.cancel() and place.loading.exception() is None:
                place.loading.result().close()

    def _taken(self, key: int) -> _Place | None:
        """Return the key's place with a lease on it; None: not available yet."""
        with self._lock:
            if self._closed:
                raise Closed("the run's opponents are closed")
            place = self._places.get(key)
            if place is None:
                place = self._begun(key)
            elif place.leaving and all(k in self._places for k in list(self._waiting.values())):
                place.leaving = False  # the lease that waited for this slot is gone
            if place is None or place.leaving:
                return None
            self._places.move_to_end(key)
            place.leases += 1
            return place

    def _begun(self, key: int) -> _Place | None:
        """Start loading a key; None: all slots are taken. The least recently used sampler then
        frees its slot as soon as its leases have ended."""
        free: Sampler | None = None
        if len(self._places) >= self._most:
            if not any(place.leaving for place in self._places.values()):
                next(iter(self._places.values())).leaving = True
            leaving = [(k, p) for k, p in self._places.items() if p.leaving]
            other, old = leaving[0]
            if old.leases or not old.loading.done():
                return None
            self._remove(other, old)
            free = None if old.loading.exception() else old.loading.result()
        place = _Place(loading=self._loader.submit(self._loaded, key, free))
        self._places[key] = place
        self.loads += 1
        return place

    def _remove(self, key: int, place: _Place) -> None:
        if self._places.get(key) is place:
            del self._places[key]

    def _loaded(self, key: int, free: Sampler | None) -> Sampler:
        """Return the sampler of a key. free: the sampler that it replaces; None: a new slot."""
        if free is not None:
            free.close()
            free = None  # its memory is needed
        params = self._load(key)
        with self._setup.settings.device_lock:
            prepared = self._setup.engine.prepare(params)
        log.info("loaded snapshot %d of the policy as an opponent", key)
        return Sampler.from_setup(self._setup, prepared, key, FIXED_WEIGHTS)


def _is_lost(loading: "Future[Sampler]") -> bool:
    """Return whether a sampler failed to load, or its thread has ended with an error."""
    return loading.exception() is not None or loading.result().error is not None
