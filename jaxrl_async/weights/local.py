"""Weights from the trainer's mesh to the sampler's in one process, device to device, in two steps.

    trainer's sharding ──A: jitted cast and reshard──> same-index shards ──B: device_put──> sampler

The reshard runs inside the larger of the two slices, so that B only moves whole shards between
devices; if the sampler's slice is the larger one, it runs after B. A plain device_put between
different shardings would go through the host and wait for the step that makes the weights. CPU
devices of one process have no links, and the host's memory is theirs (`reshards_on_host`): A then
makes a private copy as the shards are, B is left out, and `finish` puts the sampler's shards
together in host memory (weights.host_reshard) once the copy is there.

A colocated sampler needs A alone: each device then has its shard. Weights that A would only copy
are moved as they are: a program that they are donated to waits until they have been read. Where the
trainer's slice spans processes, A makes one copy in each of them, in the sampler's shards.

Two threads must not dispatch collective programs to the same devices at once. Hence `cast`
dispatches to the trainer's devices, on the trainer's thread, and `finish` to the sampler's devices,
on the sampler's thread, in the channel's poll. Calling the push runs all steps, for a sampler that
does not run yet.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding

from jaxrl_async.errors import MeshError
from jaxrl_async.mesh import shapes_on
from jaxrl_async.model.spec import Params
from jaxrl_async.weights.conversion import Conversion
from jaxrl_async.weights.host_reshard import HostReshard

Shardings = Any
"""A pytree of NamedSharding, all on one mesh."""


class Push:
    """A weights.link.Link: the compiled transfer of one tree of weights.

    On the trainer's thread it never blocks on compute and never uses the host.

    Attributes:
        crosses: Whether weights move to other devices; False for a colocated sampler.
    """

    def __init__(
        self,
        source: Shardings,
        target: Shardings,
        *,
        dtype: Any = None,
        convert: Callable[[Params], Params] | None = None,
        on_host: bool | None = None,
    ) -> None:
        """Plan the transfer.

        Args:
            source: The trainer's shardings of what is sent.
            target: The sampler's.
            dtype: Of floating-point weights in the sampler. None: as they are.
            convert: Replaces the cast: makes what is sent from the weights, all new arrays, inside
                the same compiled program.
            on_host: Whether shards that differ are put together in host memory. None: where
                `reshards_on_host`.

        Raises MeshError if the larger slice is no multiple of the smaller one, or if they share
        some devices but not all that the trainer has in this process.
        """
        self._conversion = Conversion(dtype=dtype, convert=convert)
        copied = self._conversion.copied
        source_mesh, target_mesh = _mesh_of(source), _mesh_of(target)
        trainer, sampler = list(source_mesh.devices.flat), list(target_mesh.devices.flat)
        here = {d for d in trainer if d.process_index == jax.process_index()}
        self.crosses = set(sampler) not in (set(trainer), here)
        grows = len(sampler) > len(trainer)
        self._across: Shardings | None = None  # of what `move` returns; None: what it was given
        self._plan: _Plan | None = None  # of `move`, made when it is first asked
        self._shards: Shardings = target  # of what `cast` returns
        self._reshard: Any = None  # what `finish` does
        if self.crosses:
            _check(trainer, sampler)
        if grows:
            bridge = _arranged(sampler, len(sampler) // len(trainer), source_mesh)
            self._shards, self._across = source, _on(bridge, source)
            self._reshard = jax.jit(lambda moved: moved, out_shardings=target)
        elif set(trainer) != set(sampler):
            bridge = _arranged(trainer, len(trainer) // len(sampler), target_mesh)
            self._shards, self._across = _on(bridge, target), target
        if on_host is None:
            on_host = reshards_on_host(trainer + sampler)
        self._on_host = on_host and self.crosses and (grows or not _same(source, self._shards))
        if self._on_host:
            self._shards, self._across, self._reshard = source, None, HostReshard(target)
        self._cast = jax.jit(copied, out_shardings=self._shards)

    def __call__(self, params: Params) -> Params:
        """Send the weights to the sampler's mesh; return before they are there, unless they are
        put together in host memory."""
        return self.finish(self.move(params if self.is_cast(params) else self.cast(params)))

    def is_cast(self, params: Params) -> bool:
        """Return whether each device has the shards that `move` takes of it to another one, in the
        sampler's dtypes: then nothing but a copy is left for `cast`."""
        return self.crosses and not self._on_host and self._is_copy(params)

    def cast(self, params: Params) -> Params:
        """Make a private copy on the trainer's devices, in the sampler's dtypes and in shards that
        `move` need not cut. params may be donated right after."""
        if self._on_host and self._is_copy(params):
            # between a CPU's devices, quicker than a program's copy, and dispatched at once
            return jax.device_put(params, self._shards, may_alias=False)
        return self._cast(params)

    def _is_copy(self, params: Params) -> bool:
        """Return whether `cast` would change neither type nor shards."""
        if not self._conversion.keeps(params):
            return False
        pairs = zip(jax.tree.leaves(params), jax.tree.leaves(self._shards), strict=True)
        return all(
            isinstance(leaf, jax.Array) and leaf.sharding.is_equivalent_to(shards, leaf.ndim)
            for leaf, shards in pairs
        )

    def lower(self, params: Params) -> dict[str, Any]:
        """Lower the programs of a push without running any: `cast`, and `reshard` if the sampler's
        slice is the larger one and it is a program. params: jax.ShapeDtypeStructs with shardings.
        """
        cast = self._cast.lower(params)
        if self._reshard is None or self._on_host:
            return {"cast": cast}
        moved = shapes_on(cast.out_info, self._across)
        return {"cast": cast, "reshard": self._reshard.lower(moved)}

    def move(self, cast: Params) -> Params:
        """Copy the shards to the sampler's devices. No program runs, so any thread may do it, and
        repeat it."""
        if self._across is None:
            return cast
        if self._plan is None:
            self._plan = _plan_of(cast, self._across)
        return _move(cast, self._across, self._plan)

    def finish(self, moved: Params) -> Params:
        """Reshard, if that was left to the sampler's side: in a program on its devices, or in host
        memory. The latter waits until the private copy is made."""
        return moved if self._reshard is None else self._reshard(moved)


def reshards_on_host(devices: Sequence[jax.Device]) -> bool:
    """Return whether the host's memory is the quicker way from shards to other shards: between CPU
    devices of this process (docs/benchmarks.md, "Weights from mesh to mesh").

    Accelerators have links for collectives, and a process reads its own devices' shards alone.
    """
    return all(d.platform == "cpu" and d.process_index == jax.process_index() for d in devices)


class _Plan(NamedTuple):
    """Which shards go where: made once, since it takes longer than the transfer's dispatch."""

    shards: tuple[tuple[int, ...], ...]  # of each array, the place among its addressable shards
    devices: tuple[jax.Device, ...]  # where they go, of all arrays one after the other


def _plan_of(params: Params, target: Shardings) -> _Plan:
    """Plan to copy same-index shards to the target's devices; those that are there already stay."""
    shards, devices = list[tuple[int, ...]](), list[jax.Device]()
    for leaf, goal in zip(jax.tree.leaves(params), jax.tree.leaves(target), strict=True):
        by_index: dict[Any, dict[jax.Device, int]] = {}
        for place, shard in enumerate(leaf.addressable_shards):
            by_index.setdefault(_hashable(shard.index), {})[shard.device] = place
        wanted = goal.addressable_devices_indices_map(leaf.shape)
        copies = [(device, by_index[_hashable(index)]) for device, index in wanted.items()]
        shards.append(tuple(c.get(device, next(iter(c.values()))) for device, c in copies))
        devices += wanted
    return _Plan(tuple(shards), tuple(devices))


def _move(params: Params, target: Shardings, plan: _Plan) -> Params:
    """Copy all shards as planned, in one device_put."""
    leaves, structure = jax.tree.flatten(params)
    chosen = zip(leaves, plan.shards, strict=True)
    moved = iter(
        jax.device_put(
            [leaf.addressable_data(place) for leaf, places in chosen for place in places],
            list(plan.devices),
        )
    )
    arrays = [
        jax.make_array_from_single_device_arrays(leaf.shape, goal, [next(moved) for _ in places])
        for leaf, goal, places in zip(leaves, jax.tree.leaves(target), plan.shards, strict=True)
    ]
    return jax.tree.unflatten(structure, arrays)


def _arranged(devices: Sequence[jax.Device], copies: int, like: Mesh) -> Mesh:
    """Lay `copies` meshes of the shape of `like` over these devices."""
    shape = (copies, *like.devices.shape)
    return Mesh(np.array(devices).reshape(shape), ("copies", *like.axis_names))


def _on(mesh: Mesh, shardings: Shardings) -> Shardings:
    """Return the same partition specs on another mesh."""
    return jax.tree.map(lambda s: NamedSharding(mesh, s.spec), shardings)


def _same(one: Shardings, other: Shardings) -> bool:
    """Return whether both lay the same shards on the same devices."""
    pairs = zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True)
    return all(a.is_equivalent_to(b, max(len(a.spec), len(b.spec))) for a, b in pairs)


def _hashable(index: tuple[slice, ...]) -> tuple[tuple[int | None, int | None], ...]:
    return tuple((s.start, s.stop) for s in index)


def _mesh_of(shardings: Shardings) -> Mesh:
    mesh: Mesh = jax.tree.leaves(shardings)[0].mesh
    return mesh


def _check(trainer: Sequence[jax.Device], sampler: Sequence[jax.Device]) -> None:
    """Raise MeshError if weights cannot move from the first devices to the second."""
    if set(trainer) & set(sampler):
        raise MeshError(
            "trainer and sampler share some devices, but not all. Give them disjoint slices, or "
            "set mesh.colocated=true with equal sizes in each process."
        )
    fewer, more = sorted((len(trainer), len(sampler)))
    if more % fewer:
        raise MeshError(
            f"weights cannot go from {len(trainer)} trainer devices to {len(sampler)} sampler "
            "devices: the larger slice must be a multiple of the smaller one. Change mesh.trainer "
            "or mesh.sampler."
        )
