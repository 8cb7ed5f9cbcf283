"""Weights from the trainer's mesh to the sampler's in one process, device to device, in two steps.

    trainer's sharding ──A: jitted cast and reshard──> shards like the sampler's ──B: device_put──>
    sampler

A runs inside the larger of the two slices, so that B only moves whole shards between devices. A
plain
device_put between different shardings would go through the host and wait for the step that makes
the weights.
"""

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding

from jaxrl_async.errors import MeshError

Tree = Any


class Push:
    """Compiled transfer for one tree of weights. Called on the trainer's thread; never blocks on
    compute."""

    def __init__(self, source: Tree, target: Tree, *, dtype: Any = None) -> None:
        """source, target: trees of NamedSharding, all on one mesh each. dtype: null keeps each
        array's."""
        self._dtype = dtype
        source_mesh, target_mesh = _mesh_of(source), _mesh_of(target)
        source_devices, target_devices = (
            list(source_mesh.devices.flat),
            list(target_mesh.devices.flat),
        )
        self._stays = set(source_devices) == set(target_devices)
        self._grows = len(target_devices) > len(source_devices)
        if self._stays:
            self._cast = jax.jit(self._copy, out_shardings=target)
            return
        if set(source_devices) & set(target_devices):
            raise MeshError(
                "trainer and sampler share some devices, but not all. Give them disjoint slices, "
                "or set "
                "mesh.colocated=true with equal sizes."
            )
        self._reshard = jax.jit(lambda p: p, out_shardings=target)
        if self._grows:
            copies, rest = divmod(len(target_devices), len(source_devices))
            if rest:
                raise MeshError(_uneven(len(source_devices), len(target_devices)))
            bridge = _arranged(target_devices, copies, source_mesh)
            self._cast = jax.jit(self._copy, out_shardings=source)
            self._across = jax.tree.map(lambda s: NamedSharding(bridge, s.spec), source)
            return
        if len(source_devices) % len(target_devices):
            raise MeshError(_uneven(len(source_devices), len(target_devices)))
        bridge = _arranged(source_devices, len(source_devices) // len(target_devices), target_mesh)
        self._across = target
        self._cast = jax.jit(
            self._copy, out_shardings=jax.tree.map(lambda s: NamedSharding(bridge, s.spec), target)
        )

    def _copy(self, params: Tree) -> Tree:
        """A private copy, cast: the source may be donated to the next step at once."""
        return jax.tree.map(lambda p: jax.numpy.array(p, self._dtype or p.dtype, copy=True), params)

    def __call__(self, params: Tree) -> Tree:
        """The same weights on the sampler's mesh; returns before they are there."""
        cast = self._cast(params)
        if self._stays:
            return cast
        moved = _move(cast, self._across)
        return self._reshard(moved) if self._grows else moved


def _move(params: Tree, target: Tree) -> Tree:
    """Same-index shards to the target's devices, all leaves in one device_put."""
    leaves, structure = jax.tree.flatten(params)
    goals = jax.tree.leaves(target)
    shards, devices, counts = [], [], []
    for leaf, goal in zip(leaves, goals, strict=True):
        by_index: dict[Any, Any] = {}
        for shard in leaf.addressable_shards:
            by_index.setdefault(_hashable(shard.index), shard.data)
        wanted = goal.addressable_devices_indices_map(leaf.shape)
        for device, index in wanted.items():
            shards.append(by_index[_hashable(index)])
            devices.append(device)
        counts.append(len(wanted))
    moved = iter(jax.device_put(shards, devices))
    arrays = [
        jax.make_array_from_single_device_arrays(leaf.shape, goal, [next(moved) for _ in range(n)])
        for leaf, goal, n in zip(leaves, goals, counts, strict=True)
    ]
    return jax.tree.unflatten(structure, arrays)


def _arranged(devices: Sequence[jax.Device], copies: int, like: Mesh) -> Mesh:
    """`copies` meshes of the shape of `like`, over these devices."""
    return Mesh(
        np.array(devices).reshape(copies, *like.devices.shape), ("copies", *like.axis_names)
    )


def _hashable(index: tuple[slice, ...]) -> tuple[tuple[int | None, int | None], ...]:
    return tuple((s.start, s.stop) for s in index)


def _mesh_of(tree: Tree) -> Mesh:
    mesh: Mesh = jax.tree.leaves(tree)[0].mesh
    return mesh


def _uneven(trainer: int, sampler: int) -> str:
    return (
        f"weights cannot go from {trainer} trainer devices to {sampler} sampler devices: the "
        "larger slice "
        "must be a multiple of the smaller one. Change mesh.trainer or mesh.sampler."
    )
