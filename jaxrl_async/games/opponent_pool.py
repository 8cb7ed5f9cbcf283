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

POLL_S = 0.005
"""Interval at which a waiting lease checks whether its sampler is loaded, seconds."""


@dataclass(slots=True, kw_only=True)
class _Entry:
    """One sampler of the pool, or one that is being loaded."""

    loading: "Future[Sampler]"
    leases: int = 0
    leaving: bool = False  # accepts no more leases: another key waits for its slot


class FrozenPool:
    """Samplers by key. May be leased from any thread and any event loop."""

    def __init__(self, setup: SamplerSetup, load: Callable[[int], Params], *, most: int) -> None:
        """Load nothing yet.

        Args:
            setup: shared by all samplers: programs, limits, seed.
            load: returns the parameters of a key on the setup's mesh; called on a thread.
            most: maximum number of samplers at the same time.
        """
        self._setup, self._load, self._most = setup, load, most
        self._entries: OrderedDict[int, _Entry] = OrderedDict()  # least recently used first
        self._waiting: dict[object, int] = {}  # keys that leases are waiting for
        self._lock, self._closed = threading.Lock(), False
        self._loader = ThreadPoolExecutor(1, thread_name_prefix="opponents")
        self.loads = 0  # since the start

    @asynccontextmanager
    async def lease(self, key: int) -> AsyncIterator[Sampler]:
        """Lease the sampler of a key; waits until it is loaded. Raises Closed and errors of `load`.
        Has no timeout of its own: the caller sets one."""
        entry, ticket = self._take(key), object()
        try:
            while entry is None:
                self._waiting[ticket] = key
                await asyncio.sleep(POLL_S)
                entry = self._take(key)
        finally:
            self._waiting.pop(ticket, None)
        try:
            while not entry.loading.done():
                await asyncio.sleep(POLL_S)
            yield entry.loading.result()
        finally:
            with self._lock:
                entry.leases -= 1
                if entry.loading.done() and _is_lost(entry.loading):
                    self._remove(key, entry)  # the next lease loads it again

    def close(self) -> None:
        """Close all samplers; unfinished requests fail with Closed. Idempotent."""
        with self._lock:
            self._closed = True
            entries, self._entries = list(self._entries.values()), OrderedDict()
        self._loader.shutdown()
        for entry in entries:
            if not entry.loading.cancel() and entry.loading.exception() is None:
                entry.loading.result().close()

    def _take(self, key: int) -> _Entry | None:
        """Return the key's entry with a lease on it; None: not available yet."""
        with self._lock:
            if self._closed:
                raise Closed("the run's opponents are closed")
            entry = self._entries.get(key)
            if entry is None:
                entry = self._begin_loading(key)
            elif entry.leaving and all(k in self._entries for k in list(self._waiting.values())):
                entry.leaving = False  # the lease that waited for this slot is gone
            if entry is None or entry.leaving:
                return None
            self._entries.move_to_end(key)
            entry.leases += 1
            return entry

    def _begin_loading(self, key: int) -> _Entry | None:
        """Start loading a key; None: all slots are taken. The least recently used sampler then
        frees its slot as soon as its leases have ended."""
        free: Sampler | None = None
        if len(self._entries) >= self._most:
            if not any(entry.leaving for entry in self._entries.values()):
                next(iter(self._entries.values())).leaving = True
            leaving = [(k, p) for k, p in self._entries.items() if p.leaving]
            other, old = leaving[0]
            if old.leases or not old.loading.done():
                return None
            self._remove(other, old)
            free = None if old.loading.exception() else old.loading.result()
        entry = _Entry(loading=self._loader.submit(self._load_sampler, key, free))
        self._entries[key] = entry
        self.loads += 1
        return entry

    def _remove(self, key: int, entry: _Entry) -> None:
        if self._entries.get(key) is entry:
            del self._entries[key]

    def _load_sampler(self, key: int, free: Sampler | None) -> Sampler:
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
