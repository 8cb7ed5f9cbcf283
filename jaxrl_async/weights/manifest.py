"""What a set of weights consists of: compared before any byte moves."""

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
        return sum(
            int(np.prod(shape)) * np.dtype(dtype).itemsize for _, shape, dtype in self.entries
        )


def manifest_of(params: Any) -> Manifest:
    """The manifest of a tree of arrays (or ShapeDtypeStructs); moves no data."""
    leaves = jax.tree_util.tree_leaves_with_path(params)
    return Manifest(
        entries=tuple(
            (jax.tree_util.keystr(path, simple=True, separator="/"), tuple(x.shape), str(x.dtype))
            for path, x in leaves
        )
    )


def compare(published: Manifest, expected: Manifest) -> None:
    """Raise WeightsError that names the first array in which they differ."""
    ours, theirs = (dict((n, (s, d)) for n, s, d in m.entries) for m in (published, expected))
    for name in sorted(ours.keys() | theirs.keys()):
        if ours.get(name) != theirs.get(name):
            raise WeightsError(
                f"weights {name!r}: published {_tell(ours.get(name))}, the sampler expects "
                f"{_tell(theirs.get(name))}. Trainer and sampler were built from different models: "
                "use one model section for both."
            )


def _tell(entry: tuple[tuple[int, ...], str] | None) -> str:
    return "nothing" if entry is None else f"{entry[1]}{list(entry[0])}"
