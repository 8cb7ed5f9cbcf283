"""Transfer weights from device to device between processes, with jax.experimental.transfer.

    sampler ──names its pieces, over an authenticated connection──> trainer: publishes all once
            <────── a random number that fits one pull, and each piece's checksum ───┘
            ──pulls by that number into its own devices' memory──> jax's transfer server
            ──checksums on its devices──> equal? ──> assembled there

No byte passes through host memory on either side, unless JAX's transport needs it. A shard that a
sampler needs as a whole is published unchanged; others are cut on the trainer's devices, once for
all samplers that fetch the same part at the same time.

JAX's server does not authenticate: random numbers, which are sent only over an authenticated
connection, replace the secret. It also has no working timeouts, so the waiting side polls and
breaks the connection when nothing arrives. The caller compares manifests first: JAX checks only
sizes, and would accept a different layout of the same size silently.
"""

import importlib
import logging
import secrets
import socket
import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime, timedelta
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import SingleDeviceSharding

from jaxrl_async.errors import WeightsError
from jaxrl_async.remote.weights.locations import Locations
from jaxrl_async.remote.weights.piece_protocol import PeerError
from jaxrl_async.remote.weights.pieces import WeightPiece, plan_pieces
from jaxrl_async.remote.weights.tcp_transport import PullSettings, ask_to_publish
from jaxrl_async.remote.wire.address import Address, parse_address
from jaxrl_async.weights.host_reshard import Box, contains, inside
from jaxrl_async.weights.manifest import Manifest, PartSums

log = logging.getLogger(__name__)

PUBLISHED_S = 60.0
"""Time after which a published piece that is not pulled is released, seconds."""
POLL_S = 0.002
WHOLE = 1 << 62
"""Piece size in bytes, effectively unlimited: pieces are cut only at shard boundaries."""

Shards = Mapping[tuple[int, Box], Any]
"""Single-device arrays by (array, box)."""
Shapes = Sequence[tuple[int, ...]]
"""Shapes of all whole arrays."""


def start_transfer_server(host: str) -> Any:
    """Start JAX's transfer server on a free port of an interface. Raises WeightsError."""
    try:
        module = importlib.import_module("jax.experimental.transfer")
        address = str(Address(socket.gethostbyname(host), 0))
        # without transport addresses the first pull crashes the process
        return module.start_transfer_server(jax.local_devices()[0].client, address, [address])
    except (ImportError, AttributeError, OSError, RuntimeError) as error:
        raise WeightsError(
            f"jax.experimental.transfer cannot serve at {host}: {error}. Set remote.transfer=tcp"
        ) from None


class DevicePublisher:
    """The trainer's side: shards on devices, published on request. Thread-safe."""

    def __init__(self, host: str) -> None:
        self._server = start_transfer_server(host)
        self._versions: dict[int, _Published] = {}
        self._lock = threading.Lock()
        self.address = str(self._server.address())
        """HOST:PORT of JAX's server."""

    def add(
        self,
        version: int,
        shards: Shards,
        sums: Mapping[tuple[int, Box], int],
        shapes: Shapes,
    ) -> None:
        """Keep a version's shards, which must not change, until it is removed.

        sums: their checksums (weights.manifest).
        shapes: of all whole arrays.
        """
        with self._lock:
            self._versions[version] = _Published(shards, sums, shapes)

    def remove(self, version: int) -> None:
        """Stop publishing a version. Idempotent."""
        with self._lock:
            self._versions.pop(version, None)

    def publish(
        self, version: int, pieces: Sequence[tuple[int, Box]]
    ) -> tuple[int, list[int]] | None:
        """Publish pieces, as (array, box), for one pull. Returns the pull's number and the pieces'
        checksums, in order; None: some pieces are not here. Waits for the devices."""
        with self._lock:
            published = self._versions.get(version)
        cut = published and published.cut(pieces)
        if not cut:
            return None
        arrays, checksums = cut
        number = secrets.randbits(62)
        until = datetime.now() + timedelta(seconds=PUBLISHED_S)
        self._server.await_pull(number, arrays, timeout=until)
        return number, checksums


class _Published:
    """One version's shards, and the parts of them that are being pulled. Thread-safe."""

    def __init__(self, shards: Shards, sums: Mapping[tuple[int, Box], int], shapes: Shapes) -> None:
        self._shards: dict[int, dict[Box, Any]] = {}
        for (array, box), data in shards.items():
            self._shards.setdefault(array, {})[box] = data
        self._sums, self._shapes, self._lock = dict(sums), shapes, threading.Lock()
        self._parts = weakref.WeakValueDictionary[tuple[int, Box], Any]()

    def cut(self, pieces: Sequence[tuple[int, Box]]) -> tuple[list[Any], list[int]] | None:
        """Return pieces on their devices, and their checksums; None: some are not here. Waits for
        the devices if a checksum is not known yet."""
        with self._lock:
            arrays = [self._part(array, box) for array, box in pieces]
            if any(array is None for array in arrays):
                return None
            new = [n for n, piece in enumerate(pieces) if piece not in self._sums]
            sums = PartSums(
                [
                    (arrays[n], [start for start, _ in pieces[n][1]], self._shapes[pieces[n][0]])
                    for n in new
                ]
            )
            self._sums |= zip((pieces[n] for n in new), sums.read(), strict=True)
            return arrays, [self._sums[piece] for piece in pieces]

    def _part(self, array: int, box: Box) -> Any:
        held = self._shards.get(array, {})
        if box in held:
            return held[box]
        part = self._parts.get((array, box))
        if part is None:
            whole = next((h for h in held if len(h) == len(box) and contains(h, box)), None)
            if whole is not None:
                part = self._parts[array, box] = held[whole][inside(box, whole)]
        return part


class DevicePuller:
    """The sampler's side. Used by one thread."""

    def __init__(self, host: str, settings: PullSettings) -> None:
        self._server, self._settings = start_transfer_server(host), settings
        self._connections: dict[str, Any] = {}

    def pull(
        self,
        offer: Locations,
        manifest: Manifest,
        boxes: Sequence[Mapping[Box, Sequence[Any]]],
        stopped: Callable[[], str],
    ) -> dict[tuple[int, Box], list[Any]]:
        """Return every shard of this process on each of its devices, with checksums compared there.

        Args:
            offer: Locations of the pieces.
            manifest: Of all arrays, equal to the trainer's.
            boxes: For each array, its distinct boxes in this process and their devices.
            stopped: Returns the reason to stop; "": continue.

        Raises WeightsError if a piece does not arrive, or arrives corrupted.
        """
        targets = [(number, box) for number, held in enumerate(boxes) for box in held]
        pieces = plan_pieces(manifest, offer.holders, targets, WHOLE)
        target_of = {
            p: next(t for t in targets if t[0] == p.array and contains(t[1], p.box)) for p in pieces
        }
        arrays: dict[WeightPiece, Any] = {}
        for number, holder in enumerate(offer.holders):
            requested = [piece for piece in pieces if piece.holder == number]
            if not requested:
                continue
            if not holder.device:
                raise PeerError("the trainer does not offer transfers from its devices")
            uuid, sums = ask_to_publish(
                holder.address, offer.version, requested, self._settings, stopped
            )
            shapes = [
                jax.ShapeDtypeStruct(
                    [stop - start for start, stop in piece.box],
                    manifest.entries[piece.array][2],
                    sharding=SingleDeviceSharding(boxes[piece.array][target_of[piece][1]][0]),
                )
                for piece in requested
            ]
            pulled = self._connection(holder.device).pull(uuid, shapes)
            self._wait(holder.device, pulled, stopped)
            _compare(requested, pulled, sums, manifest)
            arrays |= zip(requested, pulled, strict=True)
            del pulled  # assembling frees pieces: devices have room for two sets only
        own: dict[tuple[int, Box], list[tuple[WeightPiece, Any]]] = {t: [] for t in targets}
        for piece in pieces:
            own[target_of[piece]].append((piece, arrays.pop(piece)))
        shards: dict[tuple[int, Box], list[Any]] = {}
        for target in targets:
            shard = _assemble(target[1], own.pop(target))
            others = boxes[target[0]][target[1]][1:]
            shards[target] = [shard, *(jax.device_put(shard, device) for device in others)]
        return shards

    def _connection(self, address: str) -> Any:
        if address not in self._connections:
            parse_address(address)
            self._connections[address] = self._server.connect(address)
        return self._connections[address]

    def _wait(self, address: str, arrays: Sequence[Any], stopped: Callable[[], str]) -> None:
        """Wait until all arrays have arrived; break the connection if nothing arrives. Raises
        PeerError."""
        waiting, last_arrival, reason = list(arrays), time.monotonic(), ""
        while waiting and not reason:
            left = [array for array in waiting if not array.is_ready()]
            if len(left) < len(waiting):
                last_arrival = time.monotonic()
            elif time.monotonic() - last_arrival > self._settings.silence_s:
                reason = f"nothing arrived for {self._settings.silence_s:g} s"
            waiting, reason = left, stopped() or reason
            time.sleep(POLL_S if waiting else 0)
        if reason:
            self._connections.pop(address)._poison_connection()
            raise PeerError(f"{address}: {reason}")
        try:
            jax.block_until_ready(arrays)
        except jax.errors.JaxRuntimeError as error:
            self._connections.pop(address, None)
            raise PeerError(f"{address}: {error}") from None


def _compare(
    pieces: Sequence[WeightPiece], arrays: Sequence[Any], sent: Sequence[int], manifest: Manifest
) -> None:
    """Raise WeightsError if a piece's checksum, computed on its device here, differs from the sent
    one."""
    parts = [
        (data, [start for start, _ in piece.box], manifest.entries[piece.array][1])
        for piece, data in zip(pieces, arrays, strict=True)
    ]
    computed = PartSums(parts).read()
    wrong = [p for p, a, b in zip(pieces, computed, sent, strict=True) if a != b]
    if wrong:
        raise WeightsError(
            f"{len(wrong)} of {len(pieces)} pieces arrived corrupted, first of "
            f"{manifest.entries[wrong[0].array][0]!r}"
        )


def _assemble(box: Box, pieces: Sequence[tuple[WeightPiece, object]]) -> Any:
    """Join the pieces of one shard, on their device."""
    if len(pieces) == 1:
        return pieces[0][1]
    shape = tuple(stop - start for start, stop in box)
    starts = tuple(
        tuple(a - c for (a, _), (c, _) in zip(piece.box, box, strict=True)) for piece, _ in pieces
    )
    return _joined([data for _, data in pieces], shape, starts)


@partial(jax.jit, static_argnums=(1, 2))
def _joined(
    pieces: Sequence[Any], shape: tuple[int, ...], starts: tuple[tuple[int, ...], ...]
) -> Any:
    """Return an array of this shape with the pieces at these positions, in one program that writes
    each byte once."""
    whole = jnp.zeros(shape, pieces[0].dtype)
    for data, start in zip(pieces, starts, strict=True):
        whole = jax.lax.dynamic_update_slice(whole, data, start)
    return whole
