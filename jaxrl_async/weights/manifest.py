"""The manifest of a set of weights, compared before any transfer."""

import hashlib
import math
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from jaxrl_async.errors import WeightsError


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """Name, shape and dtype of every array, in tree order."""

    entries: tuple[tuple[str, tuple[int, ...], str], ...]

    @property
    def num_bytes(self) -> int:
        """Size of one copy, bytes."""
        return sum(math.prod(shape) * np.dtype(dtype).itemsize for _, shape, dtype in self.entries)

    @property
    def layout_hash(self) -> str:
        """Hex digest of all entries in order; equal digests mean equal manifests."""
        return hashlib.sha256(repr(self.entries).encode()).hexdigest()[:16]


def manifest_of(params: Any) -> Manifest:
    """Return the manifest of a tree of arrays (or ShapeDtypeStructs); move no data."""
    leaves = jax.tree_util.tree_leaves_with_path(params)
    return Manifest(
        entries=tuple(
            (jax.tree_util.keystr(path, simple=True, separator="/"), tuple(x.shape), str(x.dtype))
            for path, x in leaves
        )
    )


def compare(published: Manifest, expected: Manifest) -> None:
    """Raise WeightsError with the name of the first array that differs, if any."""
    if published == expected:
        return
    sent, wanted = ({n: (s, d) for n, s, d in m.entries} for m in (published, expected))
    for name in sorted(sent.keys() | wanted.keys()):
        if sent.get(name) != wanted.get(name):
            raise WeightsError(
                f"weights {name!r}: published {_described(sent.get(name))}; the sampler expects "
                f"{_described(wanted.get(name))}. Trainer and sampler were built from different "
                "models: use one model section for both."
            )
    names = zip(published.entries, expected.entries, strict=True)
    first = next(a[0] for a, b in names if a[0] != b[0])
    raise WeightsError(
        f"weights {first!r}: the arrays are the expected ones, but in another order (layout "
        f"{published.layout_hash} instead of {expected.layout_hash}). Publish the tree that the "
        "sampler was built with."
    )


def _described(entry: tuple[tuple[int, ...], str] | None) -> str:
    return "nothing" if entry is None else f"{entry[1]}{list(entry[0])}"
