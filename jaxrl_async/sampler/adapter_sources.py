"""The sources of new weights of one sampler's adapters, by name.

    source of NAME ──poll──> AdapterChange ──made between two blocks──> live(version)

Each adapter is swapped separately: the requests of the others are not affected.
"""

import logging
from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from threading import Event
from typing import Any, Protocol

from jaxrl_async.errors import Closed
from jaxrl_async.model.spec import Params
from jaxrl_async.ports.weights import WeightSource
from jaxrl_async.sampler.batch.adapter_slots import AdapterSlots, LoadedAdapter
from jaxrl_async.sampler.device.engine import Engine
from jaxrl_async.sampler.device.program_arguments import EngineWeights

log = logging.getLogger(__name__)


@dataclass(slots=True, kw_only=True, eq=False)
class AdapterChange:
    """One adapter to load, to swap or to unload."""

    name: str
    params: Params | None  # of adapter_stack.fitted_adapter; None: unload
    version: int | None = None  # None: the next one
    probe_logprobs: Any = None  # the trainer's, on the sampler's probe; None: no check
    compared: bool = False  # see types.VersionedParams
    done: "Future[LoadedAdapter | None]" = field(default_factory=Future)


class StagesChanges(Protocol):
    """Queues changes to make between two blocks."""

    def stage(self, change: AdapterChange) -> None:
        """Queue a change."""


@dataclass(slots=True, kw_only=True)
class AdapterSources:
    """The sources by name. Used by the sampler's thread; `leave` and `attach` by any thread."""

    by_name: Mapping[str, WeightSource] = field(default_factory=dict)  # replaced as a whole
    staged: set[str] = field(default_factory=set)  # names whose update is not swapped in yet
    error: BaseException | None = None  # of an update that could not be used
    wake: Event = field(default_factory=Event)  # a placeholder before `attach`

    def add(self, name: str, source: WeightSource) -> None:
        """Add the source of a loaded adapter."""
        self.by_name = {**self.by_name, name: source}
        source.attach(self.wake)

    def attach(self, wake: Event) -> None:
        """Set this event whenever new weights arrive, also from sources that are added later."""
        self.wake = wake
        for source in self.by_name.values():
            source.attach(wake)

    def poll(self, changes: StagesChanges, *, wait: bool) -> None:
        """Stage new versions that have arrived, at most one of each adapter at a time.

        wait: an idle sampler, which finishes transfers first. Raises WeightsError.
        """
        for name, source in self.by_name.items():
            update = None if name in self.staged else source.poll(wait=wait)
            if update is None:
                continue
            change = AdapterChange(
                name=name,
                params=update.params,
                version=update.version,
                probe_logprobs=update.probe_logprobs,
                compared=update.compared,
            )
            self.staged.add(name)
            change.done.add_done_callback(self._record_done(name, source))
            changes.stage(change)

    def check(self) -> None:
        """Raise the error that made an update unusable: an adapter that cannot follow its run ends
        the sampler, as weights that fail the probe do."""
        if self.error is not None:
            raise self.error

    def leave(self) -> None:
        """Leave all sources: no update waits for this sampler any more. Idempotent."""
        for source in self.by_name.values():
            source.leave()

    def rejoined(self) -> "AdapterSources":
        """Return the sources of the successor of this sampler, which has left. A run that has ended
        has no source any more."""
        sources: dict[str, WeightSource] = {}
        for name, source in self.by_name.items():
            try:
                sources[name] = source.rejoin()
            except Closed:
                log.debug("adapter %r is no longer followed: its run has ended", name)
        return AdapterSources(by_name=sources)

    def renewed(self, engine: Engine, slots: AdapterSlots, weights: Any) -> EngineWeights:
        """Return the weights of a new sampler, with the newest version of each adapter. Waits for
        weights in transfer."""
        renewed: EngineWeights = weights
        for name, source in self.by_name.items():
            update = source.poll(wait=True)
            if update is not None:
                slot = slots.slot_for(name)
                renewed = engine.load_adapter(renewed, update.params, slot)
                slots.put(LoadedAdapter(name=name, version=update.version, slot=slot))
                source.live(update.version)
        return renewed

    def _record_done(self, name: str, source: WeightSource) -> Any:
        """Return a callback that records whether a change was made."""

        def record(done: "Future[LoadedAdapter | None]") -> None:
            self.staged.discard(name)
            error = done.exception()
            if error is not None:
                self.error = error
                return
            loaded = done.result()
            assert loaded is not None
            source.live(loaded.version)

        return record
