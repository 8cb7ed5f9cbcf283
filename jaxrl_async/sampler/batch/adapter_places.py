"""The adapters of a sampler, with their places and versions. Pure host code.

A name and a version identify weights for the lifetime of the sampler: a version of a name is never
used twice, even after an unload. KV is therefore shared by name and version (`PlacedAdapter.salt`).
"""

from collections.abc import Mapping
from dataclasses import dataclass

from jaxrl_async.errors import ConfigError, RolloutError
from jaxrl_async.types import Request


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacedAdapter:
    """The adapter that a request uses, on top of the base weights."""

    name: str = ""  # empty: only the base
    version: int = 0
    place: int = 0  # from 1; 0: only the base

    @property
    def salt(self) -> bytes:
        """The prefix of its KV pages' names; empty for the base."""
        return f"{self.name}\0{self.version}".encode() if self.name else b""


class AdapterPlaces:
    """The adapters in their places. Changed only by the sampler's thread; any thread may read
    `loaded`, which is replaced as a whole."""

    def __init__(self, count: int = 0) -> None:
        """count: of places; 0: no adapters."""
        self.count = count
        self.loaded: Mapping[str, PlacedAdapter] = {}
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

    def find(self, name: str, where: str) -> PlacedAdapter:
        """Return a loaded adapter. Raises RolloutError, which lists them, for another name."""
        found = self.loaded.get(name)
        if found is None:
            names = ", ".join(sorted(self.loaded)) or "none"
            raise RolloutError(
                f"{where}: adapter {name!r} is not loaded here; loaded are: {names}. Name one of "
                "them, or load it first (Sampler.adapters.load)."
            )
        return found

    def next_version(self, name: str, wanted: int | None) -> int:
        """Return the version that new weights of this name get. wanted: None for the next one.
        Raises ConfigError if it is not newer than the last one."""
        last = self._last.get(name)
        if wanted is None:
            return 0 if last is None else last + 1
        if last is not None and wanted <= last:
            raise ConfigError(
                f"adapter {name!r}: version {wanted} is not newer than version {last}, which was "
                "loaded before. Give a higher one, or none."
            )
        return wanted

    def place_for(self, name: str) -> int:
        """Return the place that an adapter of this name has or would get. Raises ConfigError if no
        place is free."""
        if name in self.loaded:
            return self.loaded[name].place
        taken = {one.place for one in self.loaded.values()}
        free = next((p for p in range(1, self.count + 1) if p not in taken), None)
        if free is None:
            raise ConfigError(
                f"adapter {name!r}: all {self.count} places are taken, by "
                f"{', '.join(sorted(self.loaded))}. Unload one, or start with more places "
                "(AdapterRoom.places, --max-loras)."
            )
        return free

    def put(self, adapter: PlacedAdapter) -> None:
        """Record an adapter in its place."""
        self._last[adapter.name] = adapter.version
        self.loaded = {**self.loaded, adapter.name: adapter}

    def take_out(self, name: str) -> None:
        """Free an adapter's place."""
        self.loaded = {n: one for n, one in self.loaded.items() if n != name}
        self.leaving -= {name}

    def leave(self, name: str, *, leaving: bool) -> None:
        """Stop or resume taking new requests for an adapter."""
        self.leaving = self.leaving | {name} if leaving else self.leaving - {name}


class WeightsInUse:
    """The weights that each request of a batch uses. Changed only by the sampler's thread."""

    def __init__(self, adapters: AdapterPlaces) -> None:
        """Begin with version 0 of the base."""
        self.base, self.adapters = PlacedAdapter(), adapters

    def of(self, request: Request) -> PlacedAdapter:
        """Return the weights of a request. Raises RolloutError if its adapter is not loaded."""
        if not request.adapter:
            return self.base
        return self.adapters.find(request.adapter, f"request {request.request_id!r}")

    def version_of(self, adapter: str) -> int:
        """Return the version of a loaded adapter; for an empty name, the base's."""
        return self.adapters.loaded[adapter].version if adapter else self.base.version
