"""The trainer's side of the transports: offers one process's shards through one or more of them."""

import logging
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from jaxrl_async.errors import WeightsError
from jaxrl_async.model.spec import Params
from jaxrl_async.remote.weights.assembly import Assembly, Holdings, OnDemand, Part, on_host
from jaxrl_async.remote.weights.device_transport import DevicePublisher
from jaxrl_async.remote.weights.file_transport import FolderFiles
from jaxrl_async.remote.weights.host_sums import host_sum, in_host_memory
from jaxrl_async.remote.weights.locations import HeldShard, Holder, offer_json
from jaxrl_async.remote.weights.piece_server import PieceServer
from jaxrl_async.remote.weights.shared_memory import SharedFiles, machine_boot_id
from jaxrl_async.weights.host_reshard import Box, distinct_shards
from jaxrl_async.weights.manifest import Manifest, Sums, manifest_of

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class OfferTransports:
    """The transports of this process's shards; None: not used."""

    server: PieceServer | None = None
    shared: SharedFiles | None = None
    files: FolderFiles | None = None
    publisher: DevicePublisher | None = None
    shared_is_optional: bool = True  # continue without shared memory if it is too small


class PieceOffering:
    """A protocols.Offering: serves this process's shards in pieces.

    The shards are copied to host memory first. If they are offered from device to device instead,
    their checksums are computed on the devices, and a host copy is made only for a sampler that
    uses TCP.
    """

    def __init__(self, holdings: Holdings, transports: OfferTransports) -> None:
        """Offer weights through `transports`; their server serves `holdings`."""
        self._holdings, self._transports = holdings, transports
        self._boot_id = machine_boot_id()
        self._lock = threading.Lock()
        self._closed = False

    @property
    def address(self) -> str:
        """HOST:PORT from which the pieces can be fetched; "": no server."""
        return self._transports.server.address if self._transports.server else ""

    @property
    def counts(self) -> dict[str, int]:
        """Counts of the TCP server by name: bytes, pieces, refused connections."""
        return self._transports.server.counts if self._transports.server else {}

    def offer(self, version: int, params: Params) -> Mapping[str, Any]:
        """Serve this process's shards; return their locations.

        The offers of a trainer on several processes are merged (locations.merged_offers).

        Args:
            version: Of the weights, 0 or higher.
            params: A private copy, on the trainer's devices.

        Raises WeightsError if there is not enough space.
        """
        with self._lock:
            if self._closed:
                raise WeightsError("the offering of weights is closed")
            self._holdings.remove(version)
            manifest = manifest_of(params)
            shards = distinct_shards(params)
            if self._transports.publisher is not None:
                holder = self._from_devices(version, manifest, params, shards)
            else:
                holder = self._from_host(version, manifest, shards)
        return offer_json(version, manifest, [holder])

    def _from_host(
        self, version: int, manifest: Manifest, shards: Sequence[tuple[int, Box, object]]
    ) -> Holder:
        parts, shared = self._host_parts(version, manifest, shards)
        held = tuple(
            HeldShard(
                array=p.array,
                box=p.box,
                checksum=host_sum(p.data, p.box, manifest.entries[p.array][1]),
            )
            for p in parts
        )
        if shared and self._transports.shared is not None:
            self._transports.shared.publish(version)
        folder = self._transports.files.write(version, parts) if self._transports.files else ""
        if self._transports.server is not None:
            self._holdings.add(version, Assembly.complete(manifest, parts))
        return Holder(
            shards=held, address=self.address, boot_id=self._boot_id, shared=shared, folder=folder
        )

    def _from_devices(
        self,
        version: int,
        manifest: Manifest,
        params: Params,
        shards: Sequence[tuple[int, Box, object]],
    ) -> Holder:
        publisher = self._transports.publisher
        assert publisher is not None, "checked by the caller"
        sums = Sums(params).of_shards()
        if sums is None:
            raise WeightsError("copies of one array differ between the trainer's devices")
        held = tuple(
            HeldShard(array=n, box=box, checksum=sums[n, tuple(start for start, _ in box)])
            for n, box, _ in shards
        )
        on_devices = {(array, box): data for array, box, data in shards}
        checksums = {(shard.array, shard.box): shard.checksum for shard in held}
        shapes = [shape for _, shape, _ in manifest.entries]
        publisher.add(version, on_devices, checksums, shapes)

        def host_copy() -> Assembly:
            log.info("copying version %d to the host: a sampler fetches it over TCP", version)
            parts, _ = self._host_parts(version, manifest, shards)
            return Assembly.complete(manifest, parts)

        self._holdings.add(version, OnDemand(host_copy))
        return Holder(
            shards=held,
            address=self.address,
            boot_id=self._boot_id,
            device=publisher.address,
            on_devices=True,
        )

    def compares(self, params: Params) -> bool:
        """See protocols.Offering."""
        return self._transports.publisher is not None or in_host_memory(params)

    def withdraw(self, version: int) -> None:
        """Release a version. Idempotent."""
        with self._lock:
            self._holdings.remove(version)
            if self._transports.shared is not None:
                self._transports.shared.withdraw(version)
            if self._transports.files is not None:
                self._transports.files.withdraw(version)
            if self._transports.publisher is not None:
                self._transports.publisher.remove(version)

    def close(self) -> None:
        """Release everything. Idempotent."""
        with self._lock:
            self._closed = True
            for version in self._holdings.versions:
                self._holdings.remove(version)
                if self._transports.publisher is not None:
                    self._transports.publisher.remove(version)
            if self._transports.shared is not None:
                self._transports.shared.close()
            if self._transports.files is not None:
                self._transports.files.close()
        if self._transports.server is not None:
            self._transports.server.close()

    def _host_parts(
        self, version: int, manifest: Manifest, shards: Sequence[tuple[int, Box, Any]]
    ) -> tuple[list[Part], str]:
        """Return the shards in host memory, and the path of their shared memory file, if any."""
        dtypes = [manifest.entries[array][2] for array, _, _ in shards]
        for _, _, data in shards:
            data.copy_to_host_async()
        shared = self._shared_file(version, [data.nbytes for _, _, data in shards])
        if shared is None:
            parts = [
                Part(array=array, box=box, data=on_host(data, dtype))
                for (array, box, data), dtype in zip(shards, dtypes, strict=True)
            ]
            return parts, ""
        file, offsets = shared
        parts = []
        for (array, box, data), dtype, offset in zip(shards, dtypes, offsets, strict=True):
            view = file.array(offset, box, dtype)
            np.copyto(view, on_host(data, dtype))
            parts.append(Part(array=array, box=box, data=view))
        return parts, str(file.path)

    def _shared_file(self, version: int, sizes: Sequence[int]) -> Any:
        """Take a shared memory file; None: continue without one, if allowed."""
        if self._transports.shared is None:
            return None
        self._transports.shared.withdraw(version)
        try:
            return self._transports.shared.write(version, sizes)
        except WeightsError as error:
            if not self._transports.shared_is_optional:
                raise
            log.warning("sending weights over TCP, not through shared memory: %s", error)
            return None
