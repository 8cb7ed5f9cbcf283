"""Fetches offered weights and verifies them: their layout before, their checksums after."""

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from jaxrl_async.errors import WeightsError
from jaxrl_async.model.spec import Params
from jaxrl_async.remote.weights.host_sums import host_sum
from jaxrl_async.remote.weights.locations import read_whereabouts
from jaxrl_async.remote.weights.protocols import Fetched, Fetching
from jaxrl_async.weights.manifest import Sums, compare, manifest_of


@dataclass(frozen=True, slots=True, kw_only=True)
class SoundFetching:
    """A transport whose weights are compared with the trainer's."""

    fetching: Fetching
    layout_hash: str  # of the weights that the sampler was built for (Manifest.layout_hash)

    def fetch(
        self, version: int, where: Mapping[str, Any], sources: Sequence[str], abort: threading.Event
    ) -> Fetched:
        """See protocols.Fetching. Also raises WeightsError for a different layout."""
        if where.get("layout") != self.layout_hash:
            raise WeightsError(
                f"the trainer offers weights of layout {where.get('layout')}, but this sampler was "
                f"built for {self.layout_hash}: use one version of the package and one model "
                "section for both"
            )
        fetched = self.fetching.fetch(version, where, sources, abort)
        if not fetched.compared and self.compares(fetched, where):
            self._compare_sums(fetched.params, where["sums"])
        return fetched

    @staticmethod
    def compares(fetched: Fetched, where: Mapping[str, object]) -> bool:
        """Return True if all arrays are compared with the trainer's in their final place. This is
        not possible if other processes of the sampler hold parts of them: the transport then has
        compared every piece before it was copied to its device."""
        whole = all(x.is_fully_addressable for x in jax.tree.leaves(fetched.params))
        return fetched.compared or (where.get("sums") is not None and whole)

    def _compare_sums(self, params: Params, sent: Sequence[int]) -> None:
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
    found, own = read_whereabouts(where), manifest_of(params)
    compare(found.manifest, own)
    if found.on_devices:
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
    for (name, _, _), sent, here in zip(own.entries, found.sums, sums, strict=True):
        if here != sent:
            raise WeightsError(f"{name!r} differs from the trainer's")
