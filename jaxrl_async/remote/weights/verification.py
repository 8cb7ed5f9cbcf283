"""Fetches offered weights and verifies their checksums."""

import threading
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import jax
import numpy as np

from jaxrl_async.errors import WeightsError
from jaxrl_async.model.spec import Params
from jaxrl_async.remote.weights.host_sums import host_sum
from jaxrl_async.remote.weights.locations import read_locations
from jaxrl_async.remote.weights.protocols import Fetched, Fetching
from jaxrl_async.weights.manifest import Sums, compare, manifest_of


def fetch_verified(
    fetching: Fetching,
    version: int,
    where: Mapping[str, Any],
    sources: Sequence[str],
    abort: threading.Event,
) -> Fetched:
    """Fetch offered weights, and compare all arrays with the trainer's on their devices, if the
    transport has not done this; see protocols.Fetching.

    This is not possible if other processes of the sampler hold parts of them: the transport then
    has compared every piece before it was copied to its device.
    """
    fetched = fetching.fetch(version, where, sources, abort)
    whole = all(x.is_fully_addressable for x in jax.tree.leaves(fetched.params))
    if fetched.compared or where.get("sums") is None or not whole:
        return fetched
    _compare_sums(fetched.params, where["sums"])
    return replace(fetched, compared=True)


def _compare_sums(params: Params, sent: Sequence[int]) -> None:
    """Raise WeightsError unless all arrays have the trainer's checksums."""
    received = Sums(params).read()
    if received is None:
        raise WeightsError("copies of one array differ between devices")
    names = [name for name, _, _ in manifest_of(params).entries]
    expected = np.asarray(sent, np.uint32)
    if expected.shape != received.shape:
        raise WeightsError(f"got {expected.size} checksums for {received.size} arrays")
    wrong = [n for n, a, b in zip(names, expected, received, strict=True) if a != b]
    if wrong:
        raise WeightsError(
            f"{len(wrong)} of {len(names)} arrays differ from the trainer's, first {wrong[0]!r}"
        )


def compare_with_offer(params: Params, where: Mapping[str, object]) -> None:
    """Raise WeightsError unless arrays from another source, complete in this process, equal the
    offered ones."""
    offer, own = read_locations(where), manifest_of(params)
    compare(offer.manifest, own)
    if offer.on_devices:
        received = Sums(params).read()
        sums = [] if received is None else received.tolist()
    else:
        boxes = [tuple((0, size) for size in shape) for _, shape, _ in own.entries]
        sums = [
            host_sum(np.asarray(array), box, shape)
            for array, box, (_, shape, _) in zip(
                jax.tree.leaves(params), boxes, own.entries, strict=True
            )
        ]
    for (name, _, _), sent, here in zip(own.entries, offer.sums, sums, strict=True):
        if here != sent:
            raise WeightsError(f"{name!r} differs from the trainer's")
