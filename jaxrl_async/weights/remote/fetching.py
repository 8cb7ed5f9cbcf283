"""The sampler's side of the transports: pieces into arrays, checked, and passed on.

where ──plan──> pieces ──shared memory, folder, TCP──> assembly ──every array's checksum──> devices
                                                          └──> piece server ──> other samplers
"""

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np

from jaxrl_async.errors import WeightsError
from jaxrl_async.model.spec import Params
from jaxrl_async.weights.manifest import compare, manifest_of
from jaxrl_async.weights.remote.assembly import Assembly, Holdings, Part, raw_dtype
from jaxrl_async.weights.remote.boxes import boxes_here
from jaxrl_async.weights.remote.buffers import BufferPool
from jaxrl_async.weights.remote.piece_server import PieceServer
from jaxrl_async.weights.remote.pieces import Piece, plan_pieces
from jaxrl_async.weights.remote.shared_memory import SharedReader, machine_boot_id
from jaxrl_async.weights.remote.tcp import PullSettings, SourceList, pull_all
from jaxrl_async.weights.remote.whereabouts import Whereabouts, read_whereabouts

log = logging.getLogger(__name__)

MOST_REPEATS = 2
"""How often arrays that arrived torn are fetched anew, from the trainer, before it is an error."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FetchedParams:
    """A seams.Fetched."""

    params: Params
    num_bytes: int
    source: str


@dataclass(frozen=True, slots=True, kw_only=True)
class FetchWays:
    """How pieces may be fetched."""

    shared: bool = True  # through shared memory, from processes on this machine
    tcp: PullSettings | None = field(default_factory=PullSettings)  # None: not over TCP
    timeout_s: float = 300.0  # longest time for one version, seconds


class PieceFetching:
    """A seams.Fetching. `fetch` is called by one thread at a time.

    Attributes:
        counts: Arrays and versions that were fetched anew, and falls from one way to the next, by
            name; for logs.
    """

    def __init__(
        self, target: Params, ways: FetchWays, holdings: Holdings, server: PieceServer | None
    ) -> None:
        """Prepare for weights of one layout.

        Args:
            target: The sampler's arrays as jax.ShapeDtypeStruct with shardings.
            ways: How to fetch.
            holdings: What `server` passes on.
            server: Passes on what was fetched; None: it is not passed on.
        """
        self._manifest, self._ways = manifest_of(target), ways
        leaves, self._structure = jax.tree.flatten(target)
        self._leaves = [(tuple(leaf.shape), leaf.dtype, leaf.sharding) for leaf in leaves]
        self._boxes = [boxes_here(sharding, shape) for shape, _, sharding in self._leaves]
        self._holdings, self._server = holdings, server
        self._pool, self._reader = BufferPool(), SharedReader()
        self._boot_id = machine_boot_id()
        self._unfinished: tuple[Whereabouts, Assembly] | None = None
        self._closed = threading.Event()
        self.counts = Counter[str]()

    @property
    def address(self) -> str:
        """HOST:PORT at which weights are passed on; "": they are not."""
        return self._server.address if self._server is not None else ""

    def fetch(
        self, version: int, where: Mapping[str, Any], sources: Sequence[str], abort: threading.Event
    ) -> FetchedParams:
        """Fetch this process's part of a version; see seams.Fetching."""
        found = read_whereabouts(where)
        if found.version != version:
            raise WeightsError(f"the offer of version {version} says where {found.version} is")
        compare(found.manifest, self._manifest)
        assembly = self._assembly(found)
        self._holdings.add(version, assembly)
        stopped = self._stop_reason(abort)
        try:
            came = self._fill(assembly, found, sources, stopped)
        except BaseException:
            self._unfinished = (found, assembly)
            assembly.give_up()
            raise
        self._unfinished = None
        self._holdings.keep(version)
        source = came.most_common(1)[0][0] if came else ""
        return FetchedParams(
            params=self._on_devices(assembly), num_bytes=came.total(), source=source
        )

    def close(self) -> None:
        """Stop passing on, and let go of everything. Idempotent."""
        self._closed.set()
        if self._server is not None:
            self._server.close()
        for version in self._holdings.versions:
            self._holdings.remove(version)
        self._unfinished = None
        self._reader.close()

    def _assembly(self, found: Whereabouts) -> Assembly:
        """Return the arrays to fill: those of an earlier try of the same weights, or new ones."""
        if self._unfinished is not None and self._unfinished[0].sums == found.sums:
            before, assembly = self._unfinished
            if before.version == found.version:
                self.counts["resumed"] += 1
                assembly.resume()
                return assembly
        self._unfinished = None
        parts = [
            Part(array=number, box=box, data=self._empty(box, dtype))
            for number, ((_, _, dtype), boxes) in enumerate(
                zip(self._manifest.entries, self._boxes, strict=True)
            )
            for box in boxes
        ]
        return Assembly(self._manifest, parts)

    def _empty(self, box: Any, dtype: str) -> Any:
        return self._pool.take(tuple(stop - start for start, stop in box), raw_dtype(dtype))

    def _fill(
        self,
        assembly: Assembly,
        found: Whereabouts,
        sources: Sequence[str],
        stopped: Callable[[], str],
    ) -> Counter[str]:
        """Fetch every piece, and arrays that arrive torn again; return the bytes by source."""
        pieces = plan_pieces(self._manifest, found.holders, assembly.targets)
        came = self._from_shared_memory(assembly, found, pieces, stopped)
        came += self._over_tcp(assembly, found, pieces, sources, stopped)
        for _ in range(MOST_REPEATS):
            wrong = assembly.wrong_arrays(found.sums)
            if not wrong:
                return came
            self.counts["torn_arrays"] += len(wrong)
            log.warning(
                "version %d: %d arrays arrived torn, first %r; they are fetched from the trainer "
                "again",
                found.version,
                len(wrong),
                self._manifest.entries[wrong[0]][0],
            )
            assembly.forget(wrong)
            came += self._over_tcp(assembly, found, pieces, (), stopped)
        wrong = assembly.wrong_arrays(found.sums)
        if wrong:
            assembly.forget(wrong)
            raise WeightsError(
                f"version {found.version}: {len(wrong)} of {len(self._manifest.entries)} arrays "
                f"differ from what was sent after {MOST_REPEATS} repeats, first "
                f"{self._manifest.entries[wrong[0]][0]!r}"
            )
        return came

    def _from_shared_memory(
        self,
        assembly: Assembly,
        found: Whereabouts,
        pieces: Sequence[Piece],
        stopped: Callable[[], str],
    ) -> Counter[str]:
        """Copy what processes on this machine have; log what fails, TCP goes on from there."""
        came = Counter[str]()
        if not self._ways.shared:
            return came
        for number, holder in enumerate(found.holders):
            if not holder.shared or not self._boot_id or holder.boot_id != self._boot_id:
                continue
            wanted = assembly.missing([p for p in pieces if p.holder == number])
            try:
                came[f"{holder.shared}"] += self._reader.copy(
                    assembly, found.version, self._manifest, holder, wanted, stopped
                )
            except WeightsError as error:
                self.counts["without_shared_memory"] += 1
                log.warning("weights of version %d: %s", found.version, error)
                if self._ways.tcp is None:
                    raise
        return came

    def _over_tcp(
        self,
        assembly: Assembly,
        found: Whereabouts,
        pieces: Sequence[Piece],
        sources: Sequence[str],
        stopped: Callable[[], str],
    ) -> Counter[str]:
        """Pull what is missing. Raises WeightsError if it comes from nowhere."""
        missing = assembly.missing(pieces)
        if not missing:
            return Counter()
        if self._ways.tcp is None:
            reason = stopped() or (
                "shared memory of the trainer's machine does not have it, and remote.transfer "
                "allows nothing else: set remote.transfer=auto"
            )
            raise WeightsError(f"version {found.version} was not fetched: {reason}")
        order = SourceList(sources, [holder.address for holder in found.holders])
        return pull_all(assembly, found.version, missing, order, self._ways.tcp, stopped)

    def _stop_reason(self, abort: threading.Event) -> Callable[[], str]:
        limit_s = self._ways.timeout_s
        deadline = time.monotonic() + limit_s

        def stopped() -> str:
            if self._closed.is_set():
                return "the sampler stops"
            if abort.is_set():
                return "it was aborted"
            if time.monotonic() > deadline:
                return f"it took longer than remote.transfer_timeout_s ({limit_s:g} s)"
            return ""

        return stopped

    def _on_devices(self, assembly: Assembly) -> Params:
        """Put the shards on their devices; on a CPU their memory becomes the arrays'."""
        shards, devices = [], []
        for number, (_, dtype, _) in enumerate(self._leaves):
            for box, holders in self._boxes[number].items():
                data = assembly.part(number, box).data.view(np.dtype(dtype))
                for device in holders:
                    shards.append(data)
                    devices.append(device)
        placed = iter(jax.device_put(shards, devices))
        arrays = []
        for (shape, _, sharding), boxes in zip(self._leaves, self._boxes, strict=True):
            count = sum(len(holders) for holders in boxes.values())
            own = [next(placed) for _ in range(count)]
            arrays.append(jax.make_array_from_single_device_arrays(shape, sharding, own))
        params = jax.tree.unflatten(self._structure, jax.block_until_ready(arrays))
        return params
