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
from jaxrl_async.remote.weights.locations import Locations, read_locations
from jaxrl_async.remote.weights.piece_server import PieceServer
from jaxrl_async.remote.weights.pieces import WeightPiece, plan_pieces
from jaxrl_async.remote.weights.protocols import BASE, Fetched
from jaxrl_async.remote.weights.shared_memory import SharedReader, machine_boot_id
from jaxrl_async.remote.weights.tcp_transport import PullSettings, pull_all
from jaxrl_async.remote.weights.transport_trial import DEVICE, TCP, TransportTrial
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
class FetchTransports:
    """The transports that may be used."""

    shared: bool = True  # through shared memory, from processes on this machine
    folder: str | None = None  # remote.folder, to read files from; None: not used
    tcp: PullSettings | None = field(default_factory=PullSettings)  # None: no TCP
    puller: DevicePuller | None = None  # tried first
    trial: TransportTrial | None = None  # chooses between puller and TCP; None: puller
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
        transports: FetchTransports,
        holdings: Holdings,
        server: PieceServer | None,
        *,
        spare: int = 2,
    ) -> None:
        """Prepare for weights of one layout.

        Args:
            target: The sampler's arrays as jax.ShapeDtypeStruct with shardings.
            transports: How to fetch.
            holdings: The versions that `server` relays.
            server: Relays fetched weights; None: they are not relayed.
            spare: Blocks of host memory that are kept for the next version, see BufferPool.
        """
        self._manifest, self._transports = manifest_of(target), transports
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
        self._files = FolderReader(transports.folder) if transports.folder is not None else None
        self._boot_id = machine_boot_id()
        self._unfinished: tuple[Locations, Assembly] | None = None
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
        offer = read_locations(where)
        if offer.version != version:
            raise WeightsError(f"the offer of version {version} describes version {offer.version}")
        compare(offer.manifest, self._manifest)
        stopped, before = self._stop_reason(abort), self._fallbacks
        puller, trial = self._transports.puller, self._transports.trial
        if trial is not None and not (offer.holders and all(h.device for h in offer.holders)):
            puller = trial = None  # not offered by the trainer
        if puller is not None and (trial is None or trial.next == DEVICE):
            pulled = self._from_devices(puller, trial, offer, abort)
            if pulled is not None:
                return pulled
        began_s, resumes = time.monotonic(), self._unfinished is not None
        assembly = self._assembly(offer)
        self._holdings.add(version, assembly)
        try:
            received = self._fill(assembly, offer, sources, stopped)
        except BaseException:
            self._unfinished = (offer, assembly)
            assembly.give_up()
            raise
        self._unfinished = None
        self._keep(version)
        source = received.most_common(1)[0][0] if received else ""
        params = self._arrays(self._on_devices(assembly))
        compared = _compare_sums(params, offer)
        if trial is not None and not resumes:
            trial.record(TCP, self._num_bytes, time.monotonic() - began_s)
        return Fetched(
            params=params,
            num_bytes=received.total(),
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
        trial = None if self._transports.trial is None else TransportTrial()
        transports = replace(self._transports, trial=trial)
        return PieceFetching(target, transports, self._holdings, self._server, spare=0)

    def close(self) -> None:
        """Stop relaying, and release everything. Idempotent."""
        self._closed.set()
        if self._server is not None:
            self._server.close()
        for version in self._holdings.versions:
            self._holdings.remove(version)
        self._unfinished = None
        self._reader.close()

    def _assembly(self, offer: Locations) -> Assembly:
        """Return the arrays to fill: from an earlier attempt for the same weights, or new ones."""
        if self._unfinished is not None:
            before, assembly = self._unfinished
            shards = [[holder.shards for holder in w.holders] for w in (before, offer)]
            if before.version == offer.version and shards[0] == shards[1]:
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
        offer: Locations,
        sources: Sequence[str],
        stopped: Callable[[], str],
    ) -> Counter[str]:
        """Fetch every piece, and refetch corrupted arrays; return the bytes by source."""
        pieces = plan_pieces(self._manifest, offer.holders, assembly.targets)
        received = self._from_files(assembly, offer, pieces, stopped)
        received += self._over_tcp(assembly, offer, pieces, sources, stopped)
        for _ in range(MOST_REPEATS):
            wrong = [] if offer.on_devices else assembly.wrong_arrays(offer.sums)
            if not wrong:  # on_devices: each piece's checksum was compared
                return received
            self.counts["torn_arrays"] += len(wrong)
            log.warning(
                "version %d: %d arrays arrived corrupted, first %r; fetching them again from the "
                "trainer",
                offer.version,
                len(wrong),
                self._manifest.entries[wrong[0]][0],
            )
            assembly.forget(wrong)
            if self._transports.tcp is None:
                received += self._from_files(assembly, offer, pieces, stopped)
            received += self._over_tcp(assembly, offer, pieces, (), stopped)
        wrong = assembly.wrong_arrays(offer.sums)
        if wrong:
            assembly.forget(wrong)
            raise WeightsError(
                f"version {offer.version}: {len(wrong)} of {len(self._manifest.entries)} arrays "
                f"differ from the trainer's after {MOST_REPEATS} repeats, first "
                f"{self._manifest.entries[wrong[0]][0]!r}"
            )
        return received

    def _from_files(
        self,
        assembly: Assembly,
        offer: Locations,
        pieces: Sequence[WeightPiece],
        stopped: Callable[[], str],
    ) -> Counter[str]:
        """Copy the pieces that are in local shared memory or in remote.folder. A failure is logged
        and TCP continues; raises WeightsError if TCP is not allowed."""
        received = Counter[str]()
        for number, holder in enumerate(offer.holders):
            missing = assembly.missing([p for p in pieces if p.holder == number])
            same_machine = bool(self._boot_id) and holder.boot_id == self._boot_id
            try:
                if self._transports.shared and holder.shared and same_machine:
                    received[holder.shared] += self._reader.copy(
                        assembly, offer.version, self._manifest, holder, missing, stopped
                    )
                elif self._files is not None and holder.folder:
                    received[holder.folder] += self._files.copy(
                        assembly, self._manifest, holder, missing, stopped
                    )
            except WeightsError as error:
                if self._transports.tcp is None:
                    raise
                self.counts["without_shared_memory"] += 1
                log.warning("weights of version %d: %s", offer.version, error)
        return received

    def _over_tcp(
        self,
        assembly: Assembly,
        offer: Locations,
        pieces: Sequence[WeightPiece],
        sources: Sequence[str],
        stopped: Callable[[], str],
    ) -> Counter[str]:
        """Pull the missing pieces. Raises WeightsError if no source has them."""
        missing = assembly.missing(pieces)
        if not missing:
            return Counter()
        tcp = self._transports.tcp
        if tcp is None:
            reason = stopped() or (
                "it is neither in this machine's shared memory nor in remote.folder, and "
                "remote.transfer allows no other transport. Set remote.transfer=auto"
            )
            raise WeightsError(f"version {offer.version} was not fetched: {reason}")
        holders = [holder.address for holder in offer.holders]
        return pull_all(assembly, offer.version, missing, sources, holders, tcp, stopped)

    def _stop_reason(self, abort: threading.Event, share: float = 1.0) -> Callable[[], str]:
        """Return a function that gives the reason to stop, or "". share: fraction of the time for a
        version."""
        limit_s = self._transports.timeout_s
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
        trial: TransportTrial | None,
        offer: Locations,
        abort: threading.Event,
    ) -> Fetched | None:
        """Pull a version from device to device, and compare its checksums there. Returns None if it
        failed or timed out; TCP is next. The version is copied to the host only if another sampler
        requests it here. Raises WeightsError if stopped for another reason than the timeout."""
        began_s, limit_s = time.monotonic(), DEVICE_SHARE * self._transports.timeout_s
        stopped = self._stop_reason(abort, DEVICE_SHARE)
        try:
            params = self._arrays(puller.pull(offer, self._manifest, self._boxes, stopped))
        except Exception as error:  # including JAX's: unsupported transport, out of memory
            late = time.monotonic() - began_s > limit_s
            if not late and (reason := stopped()):
                raise WeightsError(f"version {offer.version} was not fetched: {reason}") from error
            if trial is not None:
                trial.failed(DEVICE)
            self.counts["without_device"] += 1
            log.warning(
                "transfer of weights of version %d from device to device failed: %s; fetching "
                "them over TCP",
                offer.version,
                error,
            )
            return None
        if trial is not None:
            trial.record(DEVICE, self._num_bytes, time.monotonic() - began_s)
        self._unfinished = None
        # weak: devices have room for two sets of weights, and the sampler decides which
        leaves = [weakref.ref(leaf) for leaf in jax.tree.leaves(params)]
        self._holdings.add(offer.version, OnDemand(partial(self._host_copy, leaves)))
        self._keep(offer.version)
        return Fetched(
            params=params,
            num_bytes=self._num_bytes,
            source=offer.holders[0].address,
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
        on_devices: dict[tuple[int, Box], list[Any]] = {}
        for target, array in zip(targets, jax.device_put(shards, devices), strict=True):
            on_devices.setdefault(target, []).append(array)
        return on_devices

    def _arrays(self, on_devices: Mapping[tuple[int, Box], Sequence[Any]]) -> Params:
        """Create the sampler's arrays from the shards on their devices."""
        arrays = []
        for number, (shape, _, sharding) in enumerate(self._leaves):
            own = [array for box in self._boxes[number] for array in on_devices[number, box]]
            arrays.append(jax.make_array_from_single_device_arrays(shape, sharding, own))
        params = jax.tree.unflatten(self._structure, jax.block_until_ready(arrays))
        return params


def _compare_sums(params: Params, offer: Locations) -> bool:
    """Return True if whole arrays were compared with the trainer's on their devices. Raises
    WeightsError if they differ."""
    if not offer.on_devices:
        return in_host_memory(params)
    if not all(array.is_fully_addressable for array in jax.tree.leaves(params)):
        return False
    sums = Sums(params).read()
    if sums is None or sums.tolist() != list(offer.sums):
        raise WeightsError(f"version {offer.version} differs from the trainer's arrays")
    return True
