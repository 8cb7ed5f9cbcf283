"""Samplers of weights that never change, a few at a time, with one set of compiled programs.

lease(key) ──there?──yes──> a Sampler, for as long as the lease lasts
               │ no: the least recently used one takes no more leases, ends, and gives its place
               └──> load(key) on a thread of its own ──> a Sampler
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
"""How often a waiting lease looks whether its sampler is there, seconds."""


@dataclass(slots=True, kw_only=True)
class _Place:
    """One sampler of the pool, or one that is being loaded."""

    loading: "Future[Sampler]"
    leases: int = 0
    leaving: bool = False  # it takes no more leases: another key waits for its place


class FrozenPool:
    """Samplers by key. Any thread and any event loop may lease."""

    def __init__(self, setup: SamplerSetup, load: Callable[[int], Params], *, places: int) -> None:
        """Load nothing yet.

        Args:
            setup: of all samplers: programs, limits, seed.
            load: returns the parameters of a key on the setup's mesh; called on a thread.
            places: most samplers at once.
        """
        self._setup, self._load, self._most = setup, load, places
        self._places: OrderedDict[int, _Place] = OrderedDict()  # least recently used first
        self._waiting: dict[object, int] = {}  # keys of the leases that are waited for
        self._lock, self._closed = threading.Lock(), False
        self._loader = ThreadPoolExecutor(1, thread_name_prefix="opponents")
        self.loads = 0  # since the start

    @asynccontextmanager
    async def lease(self, key: int) -> AsyncIterator[Sampler]:
        """Lend the sampler of a key; waits until it is loaded. Raises Closed, and what `load`
        raises; no limit of time but its caller's."""
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
        """End all samplers; requests that are not done fail with Closed. Idempotent."""
        with self._lock:
            self._closed = True
            places, self._places = list(self._places.values()), OrderedDict()
        self._loader.shutdown()
        for place in places:
            if not place.loading.cancel() and place.loading.exception() is None:
                place.loading.result().close()

    def _taken(self, key: int) -> _Place | None:
        """Return the key's place with a lease on it; None: there is none yet."""
        with self._lock:
            if self._closed:
                raise Closed("the run's opponents are closed")
            place = self._places.get(key)
            if place is None:
                place = self._begun(key)
            elif place.leaving and all(k in self._places for k in list(self._waiting.values())):
                place.leaving = False  # whoever waited for its place has gone
            if place is None or place.leaving:
                return None
            self._places.move_to_end(key)
            place.leases += 1
            return place

    def _begun(self, key: int) -> _Place | None:
        """Begin to load a key; None: all places are taken, and the least recently used one makes
        room as soon as its leases have ended."""
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
        """Return the sampler of a key. free: the one in whose place it comes; None: a new place."""
        if free is not None:
            free.close()
            free = None  # its memory is needed
        params = self._load(key)
        with self._setup.settings.device_lock:
            prepared = self._setup.engine.prepare(params)
        log.info("snapshot %d of the policy plays", key)
        return Sampler.from_setup(self._setup, prepared, key, FIXED_WEIGHTS)


def _is_lost(loading: "Future[Sampler]") -> bool:
    """Return whether a sampler could not be loaded, or its thread has ended with an error."""
    return loading.exception() is not None or loading.result().error is not None
