"""Locations of one version's pieces: the offers of the trainer's processes, as plain JSON.

    {"arrays": [[name, shape, dtype]], "holders": [{"shards": [[array, box, checksum]], ways...}]}

A trainer on several processes has one holder per process; `merged_offers` combines their offers.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from jaxrl_async.errors import WeightsError
from jaxrl_async.remote.weights.host_sums import MODULUS
from jaxrl_async.weights.host_reshard import Box, volume
from jaxrl_async.weights.manifest import Manifest

MOST_AXES = 16
TRANSPORT_FIELDS = ("address", "boot_id", "shared", "device", "folder")
"""Fields of a Holder that say where its shards are."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldShard:
    """One part of an array that a process holds."""

    array: int  # number in the manifest
    box: Box
    checksum: int  # host_sums.host_sum; with `on_devices` manifest.PartSums


@dataclass(frozen=True, slots=True, kw_only=True)
class Holder:
    """One of the trainer's processes, its distinct shards, and the transports for them."""

    shards: tuple[HeldShard, ...]
    address: str = ""  # of its piece server, HOST:PORT
    boot_id: str = ""  # of its machine
    shared: str = ""  # path of the shared memory file; "": none
    device: str = ""  # address of its jax.experimental.transfer server; "": none
    folder: str = ""  # path of this version's file in remote.folder; "": none
    on_devices: bool = False  # checksums computed on its devices, not in host memory


@dataclass(frozen=True, slots=True, kw_only=True)
class Locations:
    """All holders of one version of the weights."""

    version: int
    manifest: Manifest
    holders: tuple[Holder, ...]
    sums: tuple[int, ...]  # each whole array's checksum

    @property
    def on_devices(self) -> bool:
        """True if the checksums are by weights.manifest, of arrays on devices."""
        return all(holder.on_devices for holder in self.holders)


def offer_json(version: int, manifest: Manifest, holders: Sequence[Holder]) -> dict[str, Any]:
    """Return the offer of some or all holders as JSON."""
    return {
        "version": version,
        "arrays": [[name, list(shape), dtype] for name, shape, dtype in manifest.entries],
        "holders": [_holder_json(holder) for holder in holders],
    }


def locations_of(version: int, manifest: Manifest, holders: Sequence[Holder]) -> Locations:
    """Check that the holders together have every array, and sum up their checksums.

    Raises WeightsError if parts are missing, or if two holders' copies of one shard differ.
    """
    shards: dict[tuple[int, Box], int] = {}
    if len({holder.on_devices for holder in holders}) > 1:
        raise WeightsError(
            f"version {version}: some of the trainer's processes computed checksums on their "
            "devices, others in host memory. All of them need the same kind of devices."
        )
    modulus = 2**32 if any(holder.on_devices for holder in holders) else MODULUS
    for holder in holders:
        for shard in holder.shards:
            if shards.setdefault((shard.array, shard.box), shard.checksum) != shard.checksum:
                raise WeightsError(
                    f"version {version}: the trainer's copies of {manifest.entries[shard.array][0]}"
                    f"{list(shard.box)} differ between its processes"
                )
    sums, sizes = [0] * len(manifest.entries), [0] * len(manifest.entries)
    for (array, box), checksum in shards.items():
        sums[array] = (sums[array] + checksum) % modulus
        sizes[array] += volume(box)
    for size, (name, shape, _) in zip(sizes, manifest.entries, strict=True):
        if size != volume(tuple((0, n) for n in shape)):
            raise WeightsError(
                f"version {version}: the trainer's processes offer {size} elements of {name} "
                f"{list(shape)}. Every process of the trainer must offer its part."
            )
    return Locations(version=version, manifest=manifest, holders=tuple(holders), sums=tuple(sums))


def merged_offers(offers: Sequence[Mapping[str, object]]) -> dict[str, Any]:
    """Merge the offers of the trainer's processes (each returned by Offering.offer).

    Raises WeightsError if they offer different weights.
    """
    parsed = [read_offer(offer) for offer in offers]
    first = parsed[0]
    for other in parsed[1:]:
        if (other[0], other[1]) != (first[0], first[1]):
            raise WeightsError("the trainer's processes offer different weights or versions")
    holders = [holder for _, _, held in parsed for holder in held]
    locations_of(first[0], first[1], holders)
    return offer_json(first[0], first[1], holders)


def read_locations(offer: Mapping[str, object]) -> Locations:
    """Parse the offer of all holders. Raises WeightsError if it is malformed or incomplete."""
    return locations_of(*read_offer(offer))


def read_offer(offer: Mapping[str, Any]) -> tuple[int, Manifest, tuple[Holder, ...]]:
    """Parse the offer of one or more holders. Raises WeightsError if it is malformed."""
    try:
        entries = tuple((str(n), tuple(map(int, s)), str(d)) for n, s, d in offer["arrays"])
        for _, shape, dtype in entries:
            np.dtype(dtype)
            if len(shape) > MOST_AXES or any(n < 0 for n in shape):
                raise ValueError(f"shape {list(shape)}")
        holders = tuple(_holder(holder, entries) for holder in offer["holders"])
        return int(offer["version"]), Manifest(entries=entries), holders
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        raise WeightsError(
            f"an offer of weights cannot be read: {type(error).__name__}: {error}. Trainer and "
            "samplers must run the same version of jaxrl_async."
        ) from None


def _holder_json(holder: Holder) -> dict[str, Any]:
    shards = [[s.array, [list(b) for b in s.box], s.checksum] for s in holder.shards]
    transports = {name: getattr(holder, name) for name in TRANSPORT_FIELDS}
    return {"shards": shards, **transports, "on_devices": holder.on_devices}


def _holder(
    holder: Mapping[str, Any], entries: Sequence[tuple[str, tuple[int, ...], str]]
) -> Holder:
    shards = []
    for array, box, checksum in holder["shards"]:
        ranges = tuple((int(start), int(stop)) for start, stop in box)
        shape = entries[array][1]
        if array < 0 or len(ranges) != len(shape):
            raise ValueError(f"shard {array} {list(ranges)}")
        if any(not 0 <= a <= b <= n for (a, b), n in zip(ranges, shape, strict=True)):
            raise ValueError(f"shard {array} {list(ranges)} of {list(shape)}")
        shards.append(HeldShard(array=int(array), box=ranges, checksum=int(checksum) % MODULUS))
    transports = {name: str(holder[name]) for name in TRANSPORT_FIELDS}
    return Holder(shards=tuple(shards), on_devices=bool(holder["on_devices"]), **transports)
