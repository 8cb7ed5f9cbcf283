"""Weights from the trainer's mesh to the sampler's in one process, device to device, in two steps.

    trainer's sharding ──A: jitted cast and reshard──> same-index shards ──B: device_put──> sampler

The reshard runs inside the larger of the two slices, so that B only moves whole shards between
devices: after B where the sampler's slice is the larger one (`grows`). A plain device_put between
different shardings would go through the host and wait for the step that makes the weights.

Two threads must not dispatch collective programs to the same devices at once. So `start` dispatches
to the trainer's devices, on its thread, and `finish` to the sampler's, on that one's: the channel
calls it in poll. Calling the push does both, for a sampler that does not run yet.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding

from jaxrl_async.errors import MeshError
from jaxrl_async.mesh import shapes_on

Tree = Any


class Push:
    """Compiled transfer for one tree of weights: never blocks on compute, never uses the host.

    grows: whether the sampler's slice is the larger one, so that `finish` has work to do.
    stays: whether trainer and sampler share their devices, so that nothing is moved.
    """

    def __init__(
        self,
        source: Tree,
        target: Tree,
        *,
        dtype: Any = None,
        convert: Callable[[Tree], Tree] | None = None,
    ) -> None:
        """source, target: trees of NamedSharding of what is sent, all on one mesh each.

        dtype: of floating-point weights in the sampler; null keeps each array's. convert: makes
        what is sent of the weights instead, all new arrays, inside the compiled cast. Raises
        MeshError where the larger slice is no multiple of the smaller, or they share only some
        devices.
        """
        self._dtype, self._convert = dtype, convert
        source_mesh, target_mesh = _mesh_of(source), _mesh_of(target)
        trainer, sampler = list(source_mesh.devices.flat), list(target_mesh.devices.flat)
        self.stays = set(trainer) == set(sampler)
        self.grows = len(sampler) > len(trainer)
        if not self.stays:
            _check(trainer, sampler)
        if self.stays:
            self._cast = jax.jit(self._copy, out_shardings=target)
        elif self.grows:
            bridge = _arranged(sampler, len(sampler) // len(trainer), source_mesh)
            self._cast = jax.jit(self._copy, out_shardings=source)
            self._across = _on(bridge, source)
            self._reshard = jax.jit(lambda moved: moved, out_shardings=target)
        else:
            bridge = _arranged(trainer, len(trainer) // len(sampler), target_mesh)
            self._cast = jax.jit(self._copy, out_shardings=_on(bridge, target))
            self._across = target

    def __call__(self, params: Tree) -> Tree:
        """The same weights on the sampler's mesh; returns before they are there."""
        return self.finish(self.start(params))

    def start(self, params: Tree) -> Tree:
        """The trainer's part: params may be donated right after. Returns what `finish` takes."""
        return self.move(self.cast(params))

    def cast(self, params: Tree) -> Tree:
        """A private copy on the trainer's devices, in the sampler's types, in shards that `move`
        need not cut."""
        return self._cast(params)

    def lower(self, params: Tree) -> dict[str, Any]:
        """What a push compiles, for shapes alone (jax.ShapeDtypeStruct with shardings): cast, and
        reshard where the sampler's slice is the larger one. Nothing runs."""
        cast = self._cast.lower(params)
        if not self.grows:
            return {"cast": cast}
        moved = shapes_on(cast.out_info, self._across)
        return {"cast": cast, "reshard": self._reshard.lower(moved)}

    def move(self, cast: Tree) -> Tree:
        """Its shards to the sampler's devices; no program runs, so any thread may do it, and do it
        again."""
        return cast if self.stays else _move(cast, self._across)

    def finish(self, moved: Tree) -> Tree:
        """The sampler's part: nothing, but where its slice is the larger one."""
        return self._reshard(moved) if self.grows else moved

    def _copy(self, params: Tree) -> Tree:
        """A private copy, cast: the source may be donated to the next step at once."""
        if self._convert is not None:
            return self._convert(params)
        return jax.tree.map(lambda p: jnp.array(p, self._dtype_of(p), copy=True), params)

    def _dtype_of(self, leaf: jax.Array) -> Any:
        floating = jnp.issubdtype(leaf.dtype, jnp.floating)
        return self._dtype if self._dtype is not None and floating else leaf.dtype


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
    shape = (copies, *like.devices.shape)
    return Mesh(np.array(devices).reshape(shape), ("copies", *like.axis_names))


def _on(mesh: Mesh, shardings: Tree) -> Tree:
    """The same partition specs on another mesh."""
    return jax.tree.map(lambda s: NamedSharding(mesh, s.spec), shardings)


def _hashable(index: tuple[slice, ...]) -> tuple[tuple[int | None, int | None], ...]:
    return tuple((s.start, s.stop) for s in index)


def _mesh_of(tree: Tree) -> Mesh:
    mesh: Mesh = jax.tree.leaves(tree)[0].mesh
    return mesh


def _check(trainer: Sequence[jax.Device], sampler: Sequence[jax.Device]) -> None:
    """Raise MeshError where weights cannot go from the first devices to the second."""
    if set(trainer) & set(sampler):
        raise MeshError(
            "trainer and sampler share some devices, but not all. Give them disjoint slices, or "
            "set mesh.colocated=true with equal sizes."
        )
    fewer, more = sorted((len(trainer), len(sampler)))
    if more % fewer:
        raise MeshError(
            f"weights cannot go from {len(trainer)} trainer devices to {len(sampler)} sampler "
            "devices: the larger slice must be a multiple of the smaller one. Change mesh.trainer "
            "or mesh.sampler."
        )
