"""Weights from device to device between processes, with jax.experimental.transfer.

    sampler ──asks for a piece, over its guarded connection──> trainer: publishes it once
            <──────────────── a random number that fits one pull ──┘
            ──pulls by that number, its own device's memory──> jax's transfer server

JAX's server knows no secret: the numbers, which only a guarded connection learns, stand for it. It
has no timeouts that fire either; hence whoever waits looks, and breaks the connection when nothing
comes. The caller compares manifests first: JAX checks sizes only, and another layout of the same
size would be taken in silence.
"""

import importlib
import logging
import secrets
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime, timedelta
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import SingleDeviceSharding

from jaxrl_async.errors import WeightsError
from jaxrl_async.weights.manifest import Manifest
from jaxrl_async.weights.remote.boxes import Box, contains, inside
from jaxrl_async.weights.remote.piece_protocol import PeerError
from jaxrl_async.weights.remote.pieces import WeightPiece, plan_pieces
from jaxrl_async.weights.remote.tcp import PullSettings, ask_to_publish
from jaxrl_async.weights.remote.whereabouts import Whereabouts
from jaxrl_async.wire.address import Address, parse_address

log = logging.getLogger(__name__)

PUBLISHED_S = 60.0
"""A published piece that nobody pulls is let go after so long, seconds."""
POLL_S = 0.002
WHOLE = 1 << 62
"""Bytes of a piece: none is cut further than shards require."""

Shards = Mapping[tuple[int, Box], Any]
"""Single-device arrays by (array, box)."""


def start_transfer_server(host: str) -> Any:
    """Start JAX's server on any free port of an interface. Raises WeightsError."""
    try:
        module = importlib.import_module("jax.experimental.transfer")
        at = str(Address(socket.gethostbyname(host), 0))
        # without transport addresses the first pull crashes the process
        return module.start_transfer_server(jax.local_devices()[0].client, at, [at])
    except (ImportError, AttributeError, OSError, RuntimeError) as error:
        raise WeightsError(
            f"jax.experimental.transfer cannot serve at {host}: {error}. Set remote.transfer=tcp"
        ) from None


class DevicePublisher:
    """The trainer's side: shards on devices, published piece by piece when asked. Thread safe."""

    def __init__(self, host: str) -> None:
        self._server = start_transfer_server(host)
        self._versions: dict[int, Shards] = {}
        self._lock = threading.Lock()
        self.address = str(self._server.address())
        """HOST:PORT of JAX's server."""

    def add(self, version: int, shards: Shards) -> None:
        """Keep a version's shards, which must not change, until it is removed."""
        with self._lock:
            self._versions[version] = shards

    def remove(self, version: int) -> None:
        """Publish a version no more. Idempotent."""
        with self._lock:
            self._versions.pop(version, None)

    def publish(self, version: int, array: int, box: Box) -> int | None:
        """Publish a piece for one pull; return its number; None: it is not here."""
        with self._lock:
            shards = self._versions.get(version, {})
        for (number, held), data in shards.items():
            if number == array and len(held) == len(box) and contains(held, box):
                piece = data if held == box else data[inside(box, held)]
                uuid = secrets.randbits(62)
                until = datetime.now() + timedelta(seconds=PUBLISHED_S)
                self._server.await_pull(uuid, [piece], timeout=until)
                return uuid
        return None


class DevicePuller:
    """The sampler's side. Used by one thread."""

    def __init__(self, host: str, settings: PullSettings) -> None:
        self._server, self._settings = start_transfer_server(host), settings
        self._connections: dict[str, Any] = {}

    def pull(
        self,
        found: Whereabouts,
        manifest: Manifest,
        boxes: Sequence[Mapping[Box, Sequence[Any]]],
        stopped: Callable[[], str],
    ) -> dict[tuple[int, Box], list[Any]]:
        """Return every shard of this process on each of its devices.

        Args:
            found: Where the pieces are.
            manifest: Of all arrays, equal to the trainer's.
            boxes: For each array, its distinct boxes here and their devices.
            stopped: Says why to stop; "": go on.

        Raises WeightsError if a piece does not come.
        """
        targets = [(number, box) for number, held in enumerate(boxes) for box in held]
        pieces = plan_pieces(manifest, found.holders, targets, WHOLE)
        device_of = {(n, box): boxes[n][box][0] for n, box in targets}
        target_of = {piece: _target(piece, targets) for piece in pieces}
        arrays: dict[WeightPiece, Any] = {}
        for number, holder in enumerate(found.holders):
            asked = [piece for piece in pieces if piece.holder == number]
            if not asked:
                continue
            if not holder.device:
                raise PeerError("the trainer does not offer transfers from its devices")
            uuids = ask_to_publish(holder.address, found.version, asked, self._settings, stopped)
            connection = self._connection(holder.device)
            for piece, uuid in zip(asked, uuids, strict=True):
                wanted = jax.ShapeDtypeStruct(
                    [stop - start for start, stop in piece.box],
                    manifest.entries[piece.array][2],
                    sharding=SingleDeviceSharding(device_of[target_of[piece]]),
                )
                arrays[piece] = connection.pull(uuid, [wanted])[0]
            self._wait(holder.device, [arrays[piece] for piece in asked], stopped)
        placed: dict[tuple[int, Box], list[Any]] = {}
        for target in targets:
            own = [piece for piece in pieces if target_of[piece] == target]
            shard = _put_together(target[1], [(piece, arrays[piece]) for piece in own])
            others = boxes[target[0]][target[1]][1:]
            placed[target] = [shard, *(jax.device_put(shard, device) for device in others)]
        return placed

    def _connection(self, address: str) -> Any:
        if address not in self._connections:
            parse_address(address)
            self._connections[address] = self._server.connect(address)
        return self._connections[address]

    def _wait(self, address: str, arrays: Sequence[Any], stopped: Callable[[], str]) -> None:
        """Wait until all arrays are there; break the connection if nothing comes. Raises
        PeerError."""
        waiting, heard, reason = list(arrays), time.monotonic(), ""
        while waiting and not reason:
            left = [array for array in waiting if not array.is_ready()]
            if len(left) < len(waiting):
                heard = time.monotonic()
            elif time.monotonic() - heard > self._settings.silence_s:
                reason = f"nothing came for {self._settings.silence_s:g} s"
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


def _target(piece: WeightPiece, targets: Sequence[tuple[int, Box]]) -> tuple[int, Box]:
    return next(t for t in targets if t[0] == piece.array and contains(t[1], piece.box))


def _put_together(box: Box, pieces: Sequence[tuple[WeightPiece, Any]]) -> Any:
    """Join the pieces of one shard, on their device."""
    first = pieces[0][1]
    if len(pieces) == 1:
        return first
    shape = [stop - start for start, stop in box]
    whole = jnp.zeros(shape, first.dtype, device=first.sharding)
    for piece, data in pieces:
        starts = [a - c for (a, _), (c, _) in zip(piece.box, box, strict=True)]
        whole = jax.lax.dynamic_update_slice(whole, data, starts)
    return whole
