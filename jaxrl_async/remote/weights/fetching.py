"""The sampler's side of the transports: assembles pieces into arrays, verifies and relays them.

where ──plan──> pieces ──shared memory, folder, TCP──> assembly ──every array's checksum──> devices
                                                          └──> piece server ──> other samplers
"""

import logging
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import jax
import numpy as np

from jaxrl_async.errors import WeightsError
from jaxrl_async.model.spec import Params
from jaxrl_async.remote.weights.assembly import (
    Assembly,
    Holdings,
    OnDemand,
    Part,
    on_host,
)
from jaxrl_async.remote.weights.device_transport import DevicePuller
from jaxrl_async.remote.weights.file_transport import FolderReader
from jaxrl_async.remote.weights.host_sums import in_host_memory
from jaxrl_async.remote.weights.locations import Whereabouts, read_whereabouts
from jaxrl_async.remote.weights.piece_server import PieceServer
from jaxrl_async.remote.weights.pieces import WeightPiece, plan_pieces
from jaxrl_async.remote.weights.protocols import BASE, Fetched
from jaxrl_async.remote.weights.shared_memory import SharedReader, machine_boot_id
from jaxrl_async.remote.weights.tcp_transport import PullSettings, pull_all
from jaxrl_async.remote.weights.transport_trial import DEVICE, TCP, FasterWay
from jaxrl_async.weights.host_reshard import (
    Box,
    BufferPool,
    boxes_here,
    distinct_shards,
    raw_dtype,
    volume,
)
from jaxrl_async.weights.manifest import Sums, compare, manifest_of

log = logging.getLogger(__name__)

MOST_REPEATS = 2
"""Number of times that corrupted arrays are fetched again from the trainer before it is an
error."""
DEVICE_SHARE = 0.5
"""Fraction of remote.transfer_timeout_s for a transfer from device to device; TCP gets the rest."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FetchWays:
    """The transports that may be used."""

    shared: bool = True  # through shared memory, from processes on this machine
    folder: str | None = None  # remote.folder, to read files from; None: not used
    tcp: PullSettings | None = field(default_factory=PullSettings)  # None: no TCP
    puller: DevicePuller | None = None  # tried first
    trial: FasterWay | None = None  # chooses between puller and TCP; None: puller
    timeout_s: float = 300.0  # maximum time for one version, seconds


class PieceFetching:
    """A protocols.Fetching. `fetch` is called by one thread at a time.

    Attributes:
        counts: Numbers of refetched arrays, resumed versions, host copies and fallbacks between
            transports, by name; for logs.
    """

    def __init__(
        self,
        target: Params,
        ways: FetchWays,
        holdings: Holdings,
        server: PieceServer | None,
        *,
        spare: int = 2,
    ) -> None:
        """Prepare for weights of one layout.

        Args:
            target: The sampler's arrays as jax.ShapeDtypeStruct with shardings.
            ways: How to fetch.
            holdings: The versions that `server` relays.
            server: Relays fetched weights; None: they are not relayed.
            spare: Blocks of host memory that are kept for the next version, see BufferPool.
        """
        self._manifest, self._ways = manifest_of(target), ways
        leaves, self._structure = jax.tree.flatten(target)
        self._leaves = [(tuple(leaf.shape), leaf.dtype, leaf.sharding) for leaf in leaves]
        self._boxes = [boxes_here(sharding, shape) for shape, _, sharding in self._leaves]
        self._num_bytes = sum(
            volume(box) * np.dtype(dtype).itemsize
            for (_, dtype, _), boxes in zip(self._leaves, self._boxes, strict=True)
            for box in boxes
        )
        self._holdings, self._server = holdings, server
        self._pool, self._reader = BufferPool(spare), SharedReader()
        self._files = FolderReader(ways.folder) if ways.folder is not None else None
        self._boot_id = machine_boot_id()
        self._unfinished: tuple[Whereabouts, Assembly] | None = None
        self._closed = threading.Event()
        self.counts = Counter[str]()

    @property
    def address(self) -> str:
        """HOST:PORT at which weights are relayed; "": they are not."""
        return self._server.address if self._server is not None else ""

    def fetch(
        self,
        version: int,
        where: Mapping[str, object],
        sources: Sequence[str],
        abort: threading.Event,
    ) -> Fetched:
        """Fetch this process's part of a version; see protocols.Fetching."""
        found = read_whereabouts(where)
        if found.version != version:
            raise WeightsError(f"the offer of version {version} describes version {found.version}")
        compare(found.manifest, self._manifest)
        stopped, before = self._stop_reason(abort), self._fallbacks
        puller, trial = self._ways.puller, self._ways.trial
        if trial is not None and not (found.holders and all(h.device for h in found.holders)):
            puller = trial = None  # not offered by the trainer
        if puller is not None and (trial is None or trial.next == DEVICE):
            pulled = self._from_devices(puller, trial, found, abort)
            if pulled is not None:
                return pulled
        began_s, resumes = time.monotonic(), self._unfinished is not None
        assembly = self._assembly(found)
        self._holdings.add(version, assembly)
        try:
            came = self._fill(assembly, found, sources, stopped)
        except BaseException:
            self._unfinished = (found, assembly)
            assembly.give_up()
            raise
        self._unfinished = None
        self._keep(version)
        source = came.most_common(1)[0][0] if came else ""
        params = self._arrays(self._on_devices(assembly))
        compared = _are_the_trainers(params, found)
        if trial is not None and not resumes:
            trial.took(TCP, self._num_bytes, time.monotonic() - began_s)
        return Fetched(
            params=params,
            num_bytes=came.total(),
            source=source,
            compared=compared,
            fallbacks=self._fallbacks - before,
        )

    @property
    def _fallbacks(self) -> int:
        return self.counts["without_device"] + self.counts["without_shared_memory"]

    def _keep(self, version: int) -> None:
        """Relay a fetched version instead of older ones. The base is kept only if it can be
        relayed, since it takes host memory."""
        if version != BASE:
            self._holdings.keep(version)
        elif self._server is None:
            self._holdings.remove(version)

    def for_base(self, target: Params) -> "PieceFetching":
        """See protocols.Fetching. Only versions are used to measure the faster transport: the base
        is fetched once, and may be a thousand times as large as an adapter."""
        ways = self._ways if self._ways.trial is None else replace(self._ways, trial=FasterWay())
        return PieceFetching(target, ways, self._holdings, self._server, spare=0)

    def close(self) -> None:
        """Stop relaying, and release everything. Idempotent."""
        self._closed.set()
        if self._server is not None:
            self._server.close()
        for version in self._holdings.versions:
            self._holdings.remove(version)
        self._unfinished = None
        self._reader.close()

    def _assembly(self, found: Whereabouts) -> Assembly:
        """Return the arrays to fill: from an earlier attempt for the same weights, or new ones."""
        if self._unfinished is not None:
            before, assembly = self._unfinished
            shards = [[holder.shards for holder in w.holders] for w in (before, found)]
            if before.version == found.version and shards[0] == shards[1]:
                self.counts["resumed"] += 1
                assembly.resume()
                return assembly
            self._holdings.remove(before.version)
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
        """Fetch every piece, and refetch corrupted arrays; return the bytes by source."""
        pieces = plan_pieces(self._manifest, found.holders, assembly.targets)
        came = self._from_files(assembly, found, pieces, stopped)
        came += self._over_tcp(assembly, found, pieces, sources, stopped)
        for _ in range(MOST_REPEATS):
            wrong = [] if found.on_devices else assembly.wrong_arrays(found.sums)
            if not wrong:  # on_devices: each piece's checksum was compared
                return came
            self.counts["torn_arrays"] += len(wrong)
            log.warning(
                "version %d: %d arrays arrived corrupted, first %r; fetching them again from the "
                "trainer",
                found.version,
                len(wrong),
                self._manifest.entries[wrong[0]][0],
            )
            assembly.forget(wrong)
            if self._ways.tcp is None:
                came += self._from_files(assembly, found, pieces, stopped)
            came += self._over_tcp(assembly, found, pieces, (), stopped)
        wrong = assembly.wrong_arrays(found.sums)
        if wrong:
            assembly.forget(wrong)
            raise WeightsError(
                f"version {found.version}: {len(wrong)} of {len(self._manifest.entries)} arrays "
                f"differ from the trainer's after {MOST_REPEATS} repeats, first "
                f"{self._manifest.entries[wrong[0]][0]!r}"
            )
        return came

    def _from_files(
        self,
        assembly: Assembly,
        found: Whereabouts,
        pieces: Sequence[WeightPiece],
        stopped: Callable[[], str],
    ) -> Counter[str]:
        """Copy the pieces that are in local shared memory or in remote.folder. A failure is logged
        and TCP continues; raises WeightsError if TCP is not allowed."""
        came = Counter[str]()
        for number, holder in enumerate(found.holders):
            wanted = assembly.missing([p for p in pieces if p.holder == number])
            same_machine = bool(self._boot_id) and holder.boot_id == self._boot_id
            try:
                if self._ways.shared and holder.shared and same_machine:
                    came[holder.shared] += self._reader.copy(
                        assembly, found.version, self._manifest, holder, wanted, stopped
                    )
                elif self._files is not None and holder.folder:
                    came[holder.folder] += self._files.copy(
                        assembly, self._manifest, holder, wanted, stopped
                    )
            except WeightsError as error:
                if self._ways.tcp is None:
                    raise
                self.counts["without_shared_memory"] += 1
                log.warning("weights of version %d: %s", found.version, error)
        return came

    def _over_tcp(
        self,
        assembly: Assembly,
        found: Whereabouts,
        pieces: Sequence[WeightPiece],
        sources: Sequence[str],
        stopped: Callable[[], str],
    ) -> Counter[str]:
        """Pull the missing pieces. Raises WeightsError if no source has them."""
        missing = assembly.missing(pieces)
        if not missing:
            return Counter()
        if self._ways.tcp is None:
            reason = stopped() or (
                "it is neither in this machine's shared memory nor in remote.folder, and "
                "remote.transfer allows no other transport. Set remote.transfer=auto"
            )
            raise WeightsError(f"version {found.version} was not fetched: {reason}")
        holders = [holder.address for holder in found.holders]
        return pull_all(assembly, found.version, missing, sources, holders, self._ways.tcp, stopped)

    def _stop_reason(self, abort: threading.Event, share: float = 1.0) -> Callable[[], str]:
        """Return a function that gives the reason to stop, or "". share: fraction of the time for a
        version."""
        limit_s = self._ways.timeout_s
        deadline = time.monotonic() + share * limit_s
        limit = (
            f"{share:g} of remote.transfer_timeout_s" if share < 1 else "remote.transfer_timeout_s"
        )

        def stopped() -> str:
            if self._closed.is_set():
                return "the sampler stops"
            if abort.is_set():
                return "it was aborted"
            if time.monotonic() > deadline:
                return f"it took longer than {limit} ({limit_s:g} s)"
            return ""

        return stopped

    def _from_devices(
        self,
        puller: DevicePuller,
        trial: FasterWay | None,
        found: Whereabouts,
        abort: threading.Event,
    ) -> Fetched | None:
        """Pull a version from device to device, and compare its checksums there. Returns None if it
        failed or timed out; TCP is next. The version is copied to the host only if another sampler
        requests it here. Raises WeightsError if stopped for another reason than the timeout."""
        began_s, limit_s = time.monotonic(), DEVICE_SHARE * self._ways.timeout_s
        stopped = self._stop_reason(abort, DEVICE_SHARE)
        try:
            params = self._arrays(puller.pull(found, self._manifest, self._boxes, stopped))
        except Exception as error:  # including JAX's: unsupported transport, out of memory
            late = time.monotonic() - began_s > limit_s
            if not late and (reason := stopped()):
                raise WeightsError(f"version {found.version} was not fetched: {reason}") from error
            if trial is not None:
                trial.failed(DEVICE)
            self.counts["without_device"] += 1
            log.warning(
                "transfer of weights of version %d from device to device failed: %s; fetching "
                "them over TCP",
                found.version,
                error,
            )
            return None
        if trial is not None:
            trial.took(DEVICE, self._num_bytes, time.monotonic() - began_s)
        self._unfinished = None
        # weak: devices have room for two sets of weights, and the sampler decides which
        leaves = [weakref.ref(leaf) for leaf in jax.tree.leaves(params)]
        self._holdings.add(found.version, OnDemand(partial(self._host_copy, leaves)))
        self._keep(found.version)
        return Fetched(
            params=params,
            num_bytes=self._num_bytes,
            source=found.holders[0].address,
            compared=True,
        )

    def _host_copy(self, leaves: Sequence[weakref.ReferenceType[Any]]) -> Assembly | None:
        """Copy a version from the devices to relay it; None: the sampler has released it."""
        arrays = [leaf() for leaf in leaves]
        if any(array is None for array in arrays):
            return None
        self.counts["host_copies"] += 1
        dtypes = [dtype for _, _, dtype in self._manifest.entries]
        parts = [
            Part(array=number, box=box, data=on_host(data, dtypes[number]))
            for number, box, data in distinct_shards(arrays)
        ]
        return Assembly.complete(self._manifest, parts)

    def _on_devices(self, assembly: Assembly) -> dict[tuple[int, Box], list[Any]]:
        """Put the shards on their devices; CPU arrays use the same memory."""
        shards, devices, targets = [], [], []
        for number, (_, dtype, _) in enumerate(self._leaves):
            for box, holders in self._boxes[number].items():
                data = assembly.part(number, box).data.view(np.dtype(dtype))
                for device in holders:
                    targets.append((number, box))
                    shards.append(data)
                    devices.append(device)
        placed: dict[tuple[int, Box], list[Any]] = {}
        for target, array in zip(targets, jax.device_put(shards, devices), strict=True):
            placed.setdefault(target, []).append(array)
        return placed

    def _arrays(self, placed: Mapping[tuple[int, Box], Sequence[Any]]) -> Params:
        """Create the sampler's arrays from the shards on their devices."""
        arrays = []
        for number, (shape, _, sharding) in enumerate(self._leaves):
            own = [array for box in self._boxes[number] for array in placed[number, box]]
            arrays.append(jax.make_array_from_single_device_arrays(shape, sharding, own))
        params = jax.tree.unflatten(self._structure, jax.block_until_ready(arrays))
        return params


def _are_the_trainers(params: Params, found: Whereabouts) -> bool:
    """Return True if whole arrays were compared with the trainer's in their final place. Raises
    WeightsError if they differ."""
    if not found.on_devices:
        return in_host_memory(params)
    if not all(array.is_fully_addressable for array in jax.tree.leaves(params)):
        return False
    sums = Sums(params).read()
    if sums is None or sums.tolist() != list(found.sums):
        raise WeightsError(f"version {found.version} differs from the trainer's arrays")
    return True
