"""The adapters of a sampler, with their slots and versions. Pure host code.

A name and a version identify weights for the lifetime of the sampler: a version of a name is never
used twice, even after an unload. KV is therefore shared by name and version (`LoadedAdapter.salt`).
"""

from collections.abc import Mapping
from dataclasses import dataclass

from jaxrl_async.errors import ConfigError, RolloutError
from jaxrl_async.types import Request


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedAdapter:
    """The adapter that a request uses, on top of the base weights."""

    name: str = ""  # empty: only the base
    version: int = 0
    slot: int = 0  # from 1; 0: only the base

    @property
    def salt(self) -> bytes:
        """The prefix of its KV pages' names; empty for the base."""
        return f"{self.name}\0{self.version}".encode() if self.name else b""


class AdapterSlots:
    """The adapters in their slots. Changed only by the sampler's thread; any thread may read
    `loaded`, which is replaced as a whole."""

    def __init__(self, count: int = 0) -> None:
        """count: of slots; 0: no adapters."""
        self.count = count
        self.loaded: Mapping[str, LoadedAdapter] = {}
        self.leaving: frozenset[str] = frozenset()  # take no new requests
        self._last: dict[str, int] = {}  # newest version of each name so far

    def check(self, name: str, where: str) -> None:
        """Raise RolloutError unless new requests may name this adapter. From any thread.

        where: begins the message.
        """
        if not name:
            return
        if not self.count:
            raise RolloutError(
                f"{where}: adapter {name!r}: this sampler has no places for adapters. Leave "
                "`adapter` out, or start it with some: Sampler(policy, settings=SamplerSettings("
                "adapters=AdapterRoom(places=...)))."
            )
        if name in self.leaving:
            raise RolloutError(f"{where}: adapter {name!r} is being unloaded. Name another.")
        self.find(name, where)

    def find(self, name: str, where: str) -> LoadedAdapter:
        """Return a loaded adapter. Raises RolloutError, which lists them, for another name."""
        found = self.loaded.get(name)
        if found is None:
            names = ", ".join(sorted(self.loaded)) or "none"
            raise RolloutError(
                f"{where}: adapter {name!r} is not loaded here; loaded are: {names}. Name one of "
                "them, or load it first (Sampler.adapters.load)."
            )
        return found

    def next_version(self, name: str, given: int | None) -> int:
        """Return the version that new weights of this name get. given: None for the next one.
        Raises ConfigError if it is not newer than the last one."""
        last = self._last.get(name)
        if given is None:
            return 0 if last is None else last + 1
        if last is not None and given <= last:
            raise ConfigError(
                f"adapter {name!r}: version {given} is not newer than version {last}, which was "
                "loaded before. Give a higher one, or none."
            )
        return given

    def slot_for(self, name: str) -> int:
        """Return the slot that an adapter of this name has or would get. Raises ConfigError if no
        slot is free."""
        if name in self.loaded:
            return self.loaded[name].slot
        taken = {one.slot for one in self.loaded.values()}
        free = next((i for i in range(1, self.count + 1) if i not in taken), None)
        if free is None:
            raise ConfigError(
                f"adapter {name!r}: all {self.count} places are taken, by "
                f"{', '.join(sorted(self.loaded))}. Unload one, or start with more places "
                "(AdapterRoom.places, --max-loras)."
            )
        return free

    def put(self, adapter: LoadedAdapter) -> None:
        """Record an adapter in its slot."""
        self._last[adapter.name] = adapter.version
        self.loaded = {**self.loaded, adapter.name: adapter}

    def take_out(self, name: str) -> None:
        """Free an adapter's slot."""
        self.loaded = {n: one for n, one in self.loaded.items() if n != name}
        self.leaving -= {name}

    def leave(self, name: str, *, leaving: bool) -> None:
        """Stop or resume taking new requests for an adapter."""
        self.leaving = self.leaving | {name} if leaving else self.leaving - {name}


class WeightsInUse:
    """The weights that each request of a batch uses. Changed only by the sampler's thread."""

    def __init__(self, adapters: AdapterSlots) -> None:
        """Begin with version 0 of the base."""
        self.base, self.adapters = LoadedAdapter(), adapters

    def of(self, request: Request) -> LoadedAdapter:
        """Return the weights of a request. Raises RolloutError if its adapter is not loaded."""
        if not request.adapter:
            return self.base
        return self.adapters.find(request.adapter, f"request {request.request_id!r}")

    def version_of(self, adapter: str) -> int:
        """Return the version of a loaded adapter; for an empty name, the base's."""
        return self.adapters.loaded[adapter].version if adapter else self.base.version
