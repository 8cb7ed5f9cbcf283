"""Devices split into a trainer slice and a sampler slice, and what lies where on them: one table a
role."""

import threading
from collections import deque
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxrl_async.config import schema
from jaxrl_async.errors import MeshError

AXES = ("data", "fsdp", "tensor")

Rules = Mapping[str, str | tuple[str, ...] | None]

TRAINER_RULES: dict[str, str | tuple[str, ...] | None] = {
    "layers": None,
    "vocab": "tensor",
    "embed": "fsdp",
    "heads": "tensor",
    "kv_heads": "tensor",
    "head_dim": None,
    "mlp": "tensor",
    "batch": ("data", "fsdp"),
    "length": None,
}
"""Where each logical axis lies in the trainer: weights are shared over fsdp and tensor."""

SAMPLER_RULES: dict[str, str | tuple[str, ...] | None] = {
    **TRAINER_RULES,
    "embed": None,
    "batch": ("data", "fsdp"),
}
"""Where each logical axis lies in the sampler: weights over tensor only, slots over the rest."""


class Slices(NamedTuple):
    """The trainer's mesh and each sampler's; the same devices where colocated."""

    trainer: Mesh
    samplers: tuple[Mesh, ...]
    colocated: bool

    @property
    def sampler(self) -> Mesh:
        """The first sampler's."""
        return self.samplers[0]


def make_slices(section: schema.Mesh, devices: Sequence[jax.Device] | None = None) -> Slices:
    """Trainer on the first devices, sampler on the next (or the same). MeshError where there are
    too few."""
    devices = list(jax.devices() if devices is None else devices)
    if len(devices) < section.num_devices:
        raise MeshError(
            f"mesh needs {section.num_devices} devices (trainer {section.trainer.num_devices}, "
            "sampler "
            f"{section.samplers} x {section.sampler.num_devices}, colocated {section.colocated}), "
            "but there are "
            f"{len(devices)}: {devices[0].platform}. Make the axes smaller or set "
            "mesh.colocated=true."
        )
    count, each = section.trainer.num_devices, section.sampler.num_devices
    first = 0 if section.colocated else count
    starts = range(first, first + section.samplers * each, each)
    return Slices(
        _mesh(section.trainer, devices[:count]),
        tuple(_mesh(section.sampler, devices[start : start + each]) for start in starts),
        section.colocated,
    )


def _mesh(axes: schema.Axes, devices: Sequence[jax.Device]) -> Mesh:
    return Mesh(np.array(devices).reshape(axes.data, axes.fsdp, axes.tensor), AXES)


def spec_for(
    shape: Sequence[int], axes: Sequence[str | None], mesh: Mesh, rules: Rules
) -> PartitionSpec:
    """The PartitionSpec of an array; a dimension that its mesh axes do not divide is left whole."""
    used: set[str] = set()
    entries: list[Any] = []
    for size, axis in zip(shape, axes, strict=True):
        names = rules.get(axis) if axis else None
        wanted = (names,) if isinstance(names, str) else tuple(names or ())
        wanted = tuple(n for n in wanted if n in mesh.shape and mesh.shape[n] > 1 and n not in used)
        ways = int(np.prod([mesh.shape[n] for n in wanted])) if wanted else 1
        if wanted and size % ways == 0:
            used.update(wanted)
            entries.append(wanted[0] if len(wanted) == 1 else wanted)
        else:
            entries.append(None)
    return PartitionSpec(*entries)


def shardings(table: Any, mesh: Mesh, rules: Rules) -> Any:
    """A NamedSharding for each Weight of a weight table, in the same tree."""
    return jax.tree.map(
        lambda w: NamedSharding(mesh, spec_for(w.shape, w.axes, mesh, rules)),
        table,
        is_leaf=lambda w: hasattr(w, "axes"),
    )


class Turns:
    """A lock that serves in order of asking, for two threads that dispatch to the same devices."""

    def __init__(self) -> None:
        self._guard = threading.Lock()
        self._waiting: deque[threading.Event] = deque()
        self._held = False

    def __enter__(self) -> "Turns":
        with self._guard:
            if not self._held:
                self._held = True
                return self
            mine = threading.Event()
            self._waiting.append(mine)
        mine.wait()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        with self._guard:
            if self._waiting:
                self._waiting.popleft().set()  # handed over, still held
            else:
                self._held = False


class _NoTurns:
    """Nobody to take turns with."""

    def __enter__(self) -> "_NoTurns":
        return self

    def __exit__(self, *_: object) -> None:
        return None


NO_TURNS = _NoTurns()
