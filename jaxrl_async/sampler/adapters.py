"""Adapters of a sampler, loaded, swapped and unloaded by name while it decodes.

    caller ──load, unload──> AdapterChange ──between two blocks──> slots, stack ──> caller

A change of an adapter affects only the requests that name it, as sampler.on_new_weights says for
new weights. An adapter is unloaded once the last request that names it is done, and takes no new
requests meanwhile: without it, running requests could not finish.
"""

import logging
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jaxrl_async.errors import ConfigError, JaxrlError, RolloutError
from jaxrl_async.later import Later
from jaxrl_async.mesh import DeviceGuard
from jaxrl_async.model.adapter_stack import AdapterRoom, fitted_adapter
from jaxrl_async.model.lora import Lora
from jaxrl_async.model.policy import Policy
from jaxrl_async.model.spec import ModelSpec, Params
from jaxrl_async.ports.weights import WeightSource
from jaxrl_async.sampler.adapter_sources import AdapterChange, AdapterSources
from jaxrl_async.sampler.batch.adapter_slots import AdapterSlots, LoadedAdapter
from jaxrl_async.sampler.batch.batch import Batch
from jaxrl_async.sampler.batch.new_weights import drop_adapter, new_adapter, restart, under_way
from jaxrl_async.sampler.device.engine import Engine
from jaxrl_async.sampler.requests import Inbox
from jaxrl_async.sampler.swap import SwapCheck, SwappedWeights, remake
from jaxrl_async.types import VersionedParams

if TYPE_CHECKING:
    from jaxrl_async.model import peft
else:
    peft = Later("jaxrl_async.model.peft")

log = logging.getLogger(__name__)

CHANGE_S = 60.0
"""Maximum wait for a change of an adapter, seconds."""
MAX_NAME = 256
"""Maximum length of an adapter's name, characters."""
MAX_VERSION = 2**31 - 2
"""Maximum version that a caller may give an adapter; tokens' versions are int32."""


class AdapterChanges:
    """Requested changes that are not made yet. Used by the sampler's thread."""

    def __init__(
        self,
        engine: Engine,
        check: SwapCheck,
        slots: AdapterSlots,
        *,
        mode: str,
        device_lock: DeviceGuard,
    ) -> None:
        """mode: sampler.on_new_weights."""
        self._engine, self._check, self._slots = engine, check, slots
        self._mode, self._device_lock = mode, device_lock
        self._staged: list[AdapterChange] = []
        self.probe_error = 0.0  # of the last adapter compared on the probe, nats

    @property
    def waiting(self) -> bool:
        """Whether a change is pending."""
        return bool(self._staged)

    @property
    def held(self) -> frozenset[str]:
        """Adapters whose new weights wait until their running requests are done."""
        first = {change.name: change for change in reversed(self._staged)}
        return frozenset(
            name
            for name, change in first.items()
            if change.params is not None and name in self._slots.loaded
        )

    def stage(self, change: AdapterChange) -> None:
        """Queue a change."""
        if change.params is None and change.name in self._slots.loaded:
            self._slots.leave(change.name, leaving=True)
        self._staged.append(change)

    def checked_probe(self, name: str, logprobs: object) -> Any:
        """Return the trainer's log-probs on the probe, or None if not given. From any thread.
        Raises ConfigError if they do not fit the probe."""
        return None if logprobs is None else self._check.checked(f"adapter {name!r}", logprobs)

    def withdraw(self, change: AdapterChange) -> None:
        """Drop a change that was not made."""
        if change in self._staged:
            self._staged.remove(change)
            self._drop(change)

    def make(self, batch: Batch, weights: SwappedWeights, queued: Collection[str]) -> int:
        """Make the changes that running requests allow; return how many adapters were swapped.

        Args:
            batch: of the sampler.
            weights: in use.
            queued: adapters of submitted requests that are not in the batch yet.
        """
        blocked: set[str] = set()  # changes of one adapter are made in order
        swaps = 0
        for change in list(self._staged):
            if change.name in blocked or not self._is_possible(change, batch, queued):
                blocked.add(change.name)
                continue
            self._staged.remove(change)
            if change.done.set_running_or_notify_cancel():
                swaps += self._finish(change, batch, weights)
            else:
                self._drop(change)
        return swaps

    def fail(self, error: BaseException) -> None:
        """Fail all changes with this error."""
        staged, self._staged = self._staged, []
        for change in staged:
            self._drop(change)
            if change.done.set_running_or_notify_cancel():
                change.done.set_exception(error)

    def _is_possible(self, change: AdapterChange, batch: Batch, queued: Collection[str]) -> bool:
        """Return whether the requests that name the adapter allow the change now."""
        if change.name not in self._slots.loaded:
            return True
        if change.params is not None:
            return self._mode != "drain" or not under_way(batch, change.name)
        live = (*batch.admitted.values(), *batch.queue)
        return change.name not in queued and all(s.request.adapter != change.name for s in live)

    def _drop(self, change: AdapterChange) -> None:
        """Drop a change whose caller cancelled it. The adapter takes requests again unless another
        change will unload it."""
        others = (c for c in self._staged if c.name == change.name and c.params is None)
        if change.params is None and next(others, None) is None:
            self._slots.leave(change.name, leaving=False)

    def _finish(self, change: AdapterChange, batch: Batch, weights: SwappedWeights) -> int:
        """Make a change and answer its caller; return the number of swapped adapters, 0 or 1."""
        swapped = change.params is not None and change.name in self._slots.loaded
        try:
            new = self._make(change, batch, weights)
        except JaxrlError as error:  # refused: nothing has changed
            change.done.set_exception(error)
            return 0
        except BaseException as error:
            change.done.set_exception(error)
            raise
        change.done.set_result(new)
        return int(swapped)

    def _make(
        self, change: AdapterChange, batch: Batch, weights: SwappedWeights
    ) -> LoadedAdapter | None:
        name, params, slots = change.name, change.params, self._slots
        if params is None:
            slots.find(name, "unload")
            drop_adapter(batch, name)
            log.info("adapter %r was unloaded", name)
            return None
        new = LoadedAdapter(
            name=name,
            version=slots.next_version(name, change.version),
            slot=slots.slot_for(name),
        )
        if change.probe_logprobs is not None:
            update = VersionedParams(
                version=new.version,
                params=params,
                probe_logprobs=change.probe_logprobs,
                compared=change.compared,
            )
            adapted = self._engine.prepare(params, weights.prepared)
            self.probe_error = self._check.error_of(
                update, lambda ids: self._engine.probe(adapted, ids)
            )
        was_loaded = name in slots.loaded
        with self._device_lock:
            weights.prepared = self._engine.load_adapter(weights.prepared, params, new.slot)
        new_adapter(batch, new)
        if was_loaded and self._mode == "recompute":
            remake(batch, weights.prepared, self._device_lock, name)
        elif was_loaded and self._mode == "restart":
            restart(batch, name)
        log.info("adapter %r of version %d is loaded (place %d)", name, new.version, new.slot)
        return new


class SamplerAdapters:
    """The adapters of one sampler; from any thread."""

    def __init__(
        self,
        spec: ModelSpec,
        room: AdapterRoom | None,
        slots: AdapterSlots,
        inbox: Inbox,
        changes: AdapterChanges,
        sources: AdapterSources,
    ) -> None:
        self._spec, self._room, self._slots = spec, room, slots
        self._inbox, self._changes, self._sources = inbox, changes, sources

    def loaded(self) -> Mapping[str, int]:
        """Return the versions, by name, of the adapters that requests may name."""
        leaving = self._slots.leaving
        return {n: one.version for n, one in self._slots.loaded.items() if n not in leaving}

    def load(
        self,
        name: str,
        adapter: str | Path | Policy | tuple[Lora, Params],
        *,
        version: int | None = None,
        probe_logprobs: object = None,
        timeout_s: float = CHANGE_S,
    ) -> int:
        """Load an adapter between two decode blocks, or swap a loaded one for a newer version;
        return its version. Blocks; other requests decode meanwhile.

        Args:
            name: that requests give as `adapter`.
            adapter: directory that PEFT wrote; a Policy with an adapter; or its Lora and weights.
            version: of its tokens; None: the last version of this name plus 1, starting at 0.
            probe_logprobs: the trainer's on SamplerSettings.probe; None: no check.
            timeout_s: maximum wait for requests that use the previous version (drain).

        Raises ConfigError and CheckpointError for an adapter that does not fit, WeightsError for
        one that fails the probe, Closed, and TimeoutError; nothing has changed then.
        """
        _check_name(name)
        _check_version(name, version)
        room = self._checked_room()
        if isinstance(adapter, str | Path):
            lora, params = peft.load_peft(adapter, self._spec)
        elif isinstance(adapter, Policy):
            if adapter.lora is None:
                raise ConfigError(f"adapter {name!r}: this policy has no adapter.")
            lora, params = adapter.lora, adapter.adapter
        else:
            lora, params = adapter
        fitted = fitted_adapter(self._spec, room, name, lora, params)
        change = AdapterChange(
            name=name,
            params=fitted,
            version=version,
            probe_logprobs=self._changes.checked_probe(name, probe_logprobs),
        )
        done = self._change(change, timeout_s)
        assert done is not None
        return done.version

    def follow(self, name: str, params: Params, version: int, source: WeightSource) -> None:
        """Load an adapter in the form that samplers receive, and swap it for the later versions of
        its source. Blocks.

        Args:
            name: that requests give as `adapter`.
            params: on this sampler's mesh, with the rank and the matrices of its slots; B is
                multiplied by the scale.
            version: of its tokens.
            source: of its later versions, in the same form.

        Raises as `load`; nothing has changed then.
        """
        _check_name(name)
        _check_version(name, version)
        self._checked_room()
        self._change(AdapterChange(name=name, params=params, version=version), CHANGE_S)
        self._inbox.run(lambda: self._sources.add(name, source))

    def unload(self, name: str, *, timeout_s: float = CHANGE_S) -> None:
        """Free an adapter's slot once its last request is done; it takes no new requests from now
        on. Blocks; other requests decode meanwhile.

        Raises RolloutError for an adapter that is not loaded, Closed, and TimeoutError: it stays
        loaded then, and takes requests again.
        """
        self._checked_room()
        self._slots.find(name, "unload")
        self._change(AdapterChange(name=name, params=None), timeout_s)

    def _checked_room(self) -> AdapterRoom:
        if self._room is None:
            raise ConfigError(
                "this sampler has no places for adapters. Start it with some: Sampler(policy, "
                "settings=SamplerSettings(adapters=AdapterRoom(places=...)))."
            )
        return self._room

    def _change(self, change: AdapterChange, timeout_s: float) -> LoadedAdapter | None:
        self._inbox.run(lambda: self._changes.stage(change))
        try:
            return change.done.result(timeout_s)
        except TimeoutError:
            if not change.done.cancel():  # it is being made now
                return self._wait_longer(change, timeout_s)
            self._inbox.run(lambda: self._changes.withdraw(change))
            raise TimeoutError(
                f"adapter {change.name!r}: its requests were not done within {timeout_s:.0f} s; "
                "nothing has changed. Cancel them, or wait longer."
            ) from None

    @staticmethod
    def _wait_longer(change: AdapterChange, timeout_s: float) -> LoadedAdapter | None:
        """Wait for a change that the sampler's thread has started."""
        try:
            return change.done.result(timeout_s)
        except TimeoutError:
            raise TimeoutError(
                f"adapter {change.name!r}: the sampler started to change it and did not finish "
                f"within {timeout_s:.0f} s: its device may hang. Read `loaded` before continuing."
            ) from None


def _check_version(name: str, version: object) -> None:
    """Raise ConfigError unless tokens may have this version."""
    if version is not None and (type(version) is not int or not 0 <= version <= MAX_VERSION):
        raise ConfigError(
            f"adapter {name!r}: version must be a whole number from 0 to {MAX_VERSION}, or None "
            f"for the next one, not {version!r:.80}."
        )


def _check_name(name: object) -> None:
    """Raise RolloutError unless an adapter may have this name."""
    if not isinstance(name, str) or not name or len(name) > MAX_NAME or not name.isprintable():
        raise RolloutError(
            f"an adapter's name must be 1 to {MAX_NAME} printable characters, not {name!r:.80}."
        )
