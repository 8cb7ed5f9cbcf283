"""Experts that files hold in one tensor per layer, read one by one.

Qwen3.5 is published in this form, and transformers keeps experts in it in memory: gate_up_proj
[E, 2 F, D], with an expert's gate in its first F rows and its up in the others, and down_proj
[E, D, F].
"""

import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from jaxrl_async.model.tensorfile import Stored

ONE = re.compile(r"(.+\.experts)\.(\d+)\.(gate|up|down)_proj\.weight")
"""The name of one expert's matrix."""
PARTS = {"gate": ("gate_up_proj", 0, 2), "up": ("gate_up_proj", 1, 2), "down": ("down_proj", 0, 1)}
"""An expert's matrix: the tensor with all experts, the index of its part of the rows, the number
of parts."""


class ExpertLocation(NamedTuple):
    """The position of one expert's matrix."""

    tensor: str  # name of the tensor with all experts
    expert: int
    part: int
    parts: int


@dataclass(frozen=True, slots=True)
class OneExpert:
    """One expert's matrix [rows, columns] in a tensor with all experts, in an open file."""

    file: Any
    name: str  # in the file
    location: ExpertLocation

    def get_tensor(self, name: str) -> np.ndarray:
        """Return the matrix; other experts are not read."""
        _, rows, _ = self.file.get_slice(self.name).get_shape()
        size = rows // self.location.parts
        own = slice(self.location.part * size, (self.location.part + 1) * size)
        expert = self.location.expert
        return np.asarray(self.file.get_slice(self.name)[expert : expert + 1, own])[0]


def locations(wanted: Iterable[str], stored: Mapping[str, Stored]) -> dict[str, ExpertLocation]:
    """Return the positions of the wanted matrices that files hold joined, by their names in files
    that hold experts one by one."""
    found: dict[str, dict[str, ExpertLocation]] = {}
    for name in wanted:
        if name not in stored and (match := ONE.fullmatch(name)):
            before, expert, kind = match.groups()
            tensor, part, parts = PARTS[kind]
            location = ExpertLocation(f"{before}.{tensor}", int(expert), part, parts)
            found.setdefault(location.tensor, {})[name] = location
    return {
        name: location
        for tensor, each in found.items()
        if _holds(stored.get(tensor), each.values())
        for name, location in each.items()
    }


def _holds(stored: Stored | None, wanted: Collection[ExpertLocation]) -> bool:
    """Return whether a tensor holds exactly these experts."""
    experts = {location.expert for location in wanted}
    parts = next(iter(wanted)).parts
    return (
        stored is not None
        and len(stored.shape) == 3
        and experts == set(range(stored.shape[0]))
        and stored.shape[1] % parts == 0
    )


def one_of(stored: Stored, location: ExpertLocation) -> Stored:
    """Return one expert's matrix in the tensor with all experts, with the whole tensor's bytes."""
    _, rows, columns = stored.shape
    shape = (rows // location.parts, columns)
    return Stored(dtype=stored.dtype, shape=shape, begin=stored.begin, end=stored.end)
