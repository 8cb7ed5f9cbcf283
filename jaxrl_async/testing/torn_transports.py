"""A weight transport within one process, which a test can corrupt, stop and inspect."""

import threading
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np

from jaxrl_async.errors import WeightsError
from jaxrl_async.model.spec import Params
from jaxrl_async.remote.weights.protocols import Fetched
from jaxrl_async.weights.manifest import manifest_of


class MemoryOffering:
    """A remote.weights.protocols.Offering: a dict of host copies."""

    def __init__(self, address: str = "trainer:1") -> None:
        self._address = address
        self.offered: dict[int, Params] = {}
        self.most_offered = 0  # versions at the same time
        self.failures = 0  # number of next offers that raise
        self.closed = False
        self.lock = threading.Lock()

    @property
    def address(self) -> str:
        """See Offering."""
        return self._address

    def offer(self, version: int, params: Params) -> Mapping[str, Any]:
        """See Offering."""
        copy = jax.tree.map(np.array, params)
        with self.lock:
            if self.failures:
                self.failures -= 1
                raise OSError("no room")
            assert version not in self.offered
            self.offered[version] = copy
            self.most_offered = max(self.most_offered, len(self.offered))
        return {"version": version, "layout": manifest_of(params).layout_hash}

    def compares(self, params: Params) -> bool:
        """See Offering: never compares."""
        return False

    def withdraw(self, version: int) -> None:
        """See Offering."""
        with self.lock:
            self.offered.pop(version, None)

    def close(self) -> None:
        """See Offering."""
        self.closed = True
        self.offered.clear()


class MemoryFetching:
    """A remote.weights.protocols.Fetching from a MemoryOffering or other MemoryFetchings."""

    def __init__(self, peers: dict[str, Any], address: str = "", layout: str = "") -> None:
        """Fetch from `peers` (address -> MemoryOffering or MemoryFetching), and join them.

        layout: the only layout that is fetched; "": any.
        """
        self._peers, self._address, self._layout = peers, address, layout
        self.offered: dict[int, Params] = {}
        self.torn = 0  # number of next transfers that are corrupted
        self.broken = 0  # number of next transfers that raise
        self.go = threading.Event()  # clear it to pause transfers
        self.go.set()
        self.fetched: list[tuple[int, str]] = []  # (version, source)
        self.sources: list[tuple[str, ...]] = []  # of each fetch
        if address:
            peers[address] = self

    @property
    def address(self) -> str:
        """See Fetching."""
        return self._address

    def fetch(
        self, version: int, where: Mapping[str, Any], sources: Sequence[str], abort: threading.Event
    ) -> Fetched:
        """See Fetching."""
        assert where["version"] == version
        if self._layout and where["layout"] != self._layout:
            raise WeightsError(f"weights of layout {where['layout']}")
        self.sources.append(tuple(sources))
        while not self.go.wait(0.001):
            if abort.is_set():
                raise WeightsError("aborted")
        if self.broken:
            self.broken -= 1
            raise WeightsError("the line is broken")
        source = next((s for s in sources if version in self._peers[s].offered), None)
        if source is None:
            raise WeightsError(f"no source has version {version}")
        params = self._peers[source].offered[version]
        if self.torn:
            self.torn -= 1
            params = jax.tree.map(lambda x: x + 1, params)
        if self._address:
            self.offered = {version: params}
        self.fetched.append((version, source))
        num_bytes = sum(x.nbytes for x in jax.tree.leaves(params))
        return Fetched(
            params=jax.tree.map(jax.numpy.asarray, params), num_bytes=num_bytes, source=source
        )

    def close(self) -> None:
        """See Fetching."""
        self._peers.pop(self._address, None)
        self.go.set()
