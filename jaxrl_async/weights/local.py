"""Transfer weights from the trainer's to the sampler's mesh in one process, from device to device,
in two steps.

    trainer's sharding ──A: jitted cast and reshard──> same-index shards ──B: device_put──> sampler

The reshard runs inside the larger of the two slices, so B only moves whole shards between devices;
if the sampler's slice is the larger one, it runs after B. A plain device_put between different
shardings would go through the host and wait for the step that computes the weights. CPU devices of
one process have no links, and their memory is host memory (`reshards_on_host`). A then makes a
private copy in the source's shards, B is skipped, and `finish` assembles the sampler's shards in
host memory (weights.host_reshard) when the copy is complete.

A colocated sampler needs only A, after which each device has its shard. Weights that A would only
copy are moved directly: a program that they are donated to waits until they have been read. If the
trainer's slice spans processes, A makes one copy in each of them, in the sampler's shards.

Two threads must not dispatch collective programs to the same devices concurrently. So `cast`
dispatches to the trainer's devices on the trainer's thread, and `finish` to the sampler's devices
on the sampler's thread, in the channel's poll. Calling the push runs all steps, for a sampler that
does not run yet.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.typing import DTypeLike

from jaxrl_async.errors import MeshError
from jaxrl_async.mesh import shapes_on
from jaxrl_async.model.spec import Params
from jaxrl_async.weights.host_reshard import HostReshard


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversion:
    """The conversion of the trainer's weights for the samplers. All arrays are new."""

    dtype: DTypeLike | None = None  # of floating-point weights; None: unchanged
    convert: Callable[[Params], Params] | None = None  # replaces the cast

    def copied(self, params: Params) -> Params:
        """Copy and cast, inside a compiled program; the source may be donated immediately
        afterwards."""
        if self.convert is not None:
            return self.convert(params)
        return jax.tree.map(lambda p: jnp.array(p, self._dtype_of(p), copy=True), params)

    def keeps(self, params: Params) -> bool:
        """Return True if `copied` only copies, and changes nothing."""
        leaves = jax.tree.leaves(params)
        return self.convert is None and all(leaf.dtype == self._dtype_of(leaf) for leaf in leaves)

    def _dtype_of(self, leaf: jax.Array) -> Any:
        floating = jnp.issubdtype(leaf.dtype, jnp.floating)
        return self.dtype if self.dtype is not None and floating else leaf.dtype


class PrivateCopy:
    """The compiled copy for samplers in separate processes, in the trainer's shardings."""

    def __init__(self, shardings: object, conversion: Conversion) -> None:
        """Create the copy. shardings: pytree of the trainer's shardings for the conversion's
        result."""
        self._copy = jax.jit(conversion.copied, out_shardings=shardings)

    def __call__(self, params: Params) -> Params:
        """Dispatch the copy and return it. params may be donated immediately afterwards."""
        copied: Params = self._copy(params)
        return copied


Shardings = Any
"""A pytree of NamedSharding, all on one mesh."""


class Push:
    """A weights.delivery.Link: the compiled transfer of one tree of weights.

    On the trainer's thread it never blocks on computation and never uses the host.

    Attributes:
        crosses: True if weights move to other devices; False for a colocated sampler.
    """

    def __init__(
        self,
        source: Shardings,
        target: Shardings,
        *,
        dtype: DTypeLike | None = None,
        convert: Callable[[Params], Params] | None = None,
        on_host: bool | None = None,
    ) -> None:
        """Plan the transfer.

        Args:
            source: The trainer's shardings of the sent weights.
            target: The sampler's shardings.
            dtype: Of floating-point weights in the sampler. None: unchanged.
            convert: Replaces the cast: computes the sent arrays, all new, from the weights inside
                the same compiled program.
            on_host: True to assemble shards in host memory if the shardings differ. None: as
                `reshards_on_host`.

        Raises MeshError if the larger slice is not a multiple of the smaller one, or if they share
        some, but not all, of the trainer's devices in this process.
        """
        self._conversion = Conversion(dtype=dtype, convert=convert)
        copied = self._conversion.copied
        source_mesh, target_mesh = _mesh_of(source), _mesh_of(target)
        trainer, sampler = list(source_mesh.devices.flat), list(target_mesh.devices.flat)
        local_devices = {d for d in trainer if d.process_index == jax.process_index()}
        self.crosses = set(sampler) not in (set(trainer), local_devices)
        grows = len(sampler) > len(trainer)
        self._across: Shardings | None = None  # of the result of `move`; None: unchanged
        self._plan: _Plan | None = None  # of `move`, created on first use
        self._shards: Shardings = target  # of the result of `cast`
        self._reshard: Any = None  # applied by `finish`
        if self.crosses:
            _check(trainer, sampler)
        if grows:
            bridge = _tiled_mesh(sampler, len(sampler) // len(trainer), source_mesh)
            self._shards, self._across = source, _on_mesh(bridge, source)
            self._reshard = jax.jit(lambda moved: moved, out_shardings=target)
        elif set(trainer) != set(sampler):
            bridge = _tiled_mesh(trainer, len(trainer) // len(sampler), target_mesh)
            self._shards, self._across = _on_mesh(bridge, target), target
        if on_host is None:
            on_host = reshards_on_host(trainer + sampler)
        self._on_host = on_host and self.crosses and (grows or not _same(source, self._shards))
        if self._on_host:
            self._shards, self._across, self._reshard = source, None, HostReshard(target)
        self._cast = jax.jit(copied, out_shardings=self._shards)

    def __call__(self, params: Params) -> Params:
        """Send the weights to the sampler's mesh; return before they arrive, unless they are
        assembled in host memory."""
        return self.finish(self.move(params if self.is_cast(params) else self.cast(params)))

    def is_cast(self, params: Params) -> bool:
        """Return True if each device already has the shards that `move` reads from it, in the
        sampler's dtypes, so `cast` would only copy."""
        return self.crosses and not self._on_host and self._is_copy(params)

    def cast(self, params: Params) -> Params:
        """Make a private copy on the trainer's devices, in the sampler's dtypes and in shards that
        `move` need not cut. params may be donated immediately afterwards."""
        if self._on_host and self._is_copy(params):
            # between CPU devices, faster than a program's copy, and one dispatch
            return jax.device_put(params, self._shards, may_alias=False)
        return self._cast(params)

    def _is_copy(self, params: Params) -> bool:
        """Return True if `cast` would change neither dtypes nor shards."""
        if not self._conversion.keeps(params):
            return False
        pairs = zip(jax.tree.leaves(params), jax.tree.leaves(self._shards), strict=True)
        return all(
            isinstance(leaf, jax.Array) and leaf.sharding.is_equivalent_to(shards, leaf.ndim)
            for leaf, shards in pairs
        )

    def lower(self, params: Params) -> dict[str, Any]:
        """Lower the programs of a push without running them: `cast`, and `reshard` if the sampler's
        slice is the larger one and the reshard is a program. params: jax.ShapeDtypeStructs with
        shardings.
        """
        cast = self._cast.lower(params)
        if self._reshard is None or self._on_host:
            return {"cast": cast}
        moved = shapes_on(cast.out_info, self._across)
        return {"cast": cast, "reshard": self._reshard.lower(moved)}

    def move(self, cast: Params) -> Params:
        """Copy the shards to the sampler's devices. No program runs, so any thread may call and
        repeat it."""
        if self._across is None:
            return cast
        if self._plan is None:
            self._plan = _plan_of(cast, self._across)
        return _move(cast, self._across, self._plan)

    def finish(self, moved: Params) -> Params:
        """Reshard, if the sampler's side must do it, in a program on its devices or in host memory.
        The latter waits for the private copy."""
        return moved if self._reshard is None else self._reshard(moved)


def reshards_on_host(devices: Sequence[jax.Device]) -> bool:
    """Return True if resharding in host memory is faster: between CPU devices of this process
    (benchmarks/results/weight_transfer.json).

    Accelerators have links for collectives, and a process can read only its own devices' shards.
    """
    return all(d.platform == "cpu" and d.process_index == jax.process_index() for d in devices)


class _Plan(NamedTuple):
    """The destination of each shard. Computed once, since it takes longer than the transfer's
    dispatch."""

    shards: tuple[tuple[int, ...], ...]  # of each array, indices among its addressable shards
    devices: tuple[jax.Device, ...]  # their destinations, of all arrays in order


def _plan_of(params: Params, target: Shardings) -> _Plan:
    """Plan the copies of same-index shards to the target's devices; shards already there stay."""
    shards, devices = list[tuple[int, ...]](), list[jax.Device]()
    for leaf, sharding in zip(jax.tree.leaves(params), jax.tree.leaves(target), strict=True):
        by_index: dict[Any, dict[jax.Device, int]] = {}
        for number, shard in enumerate(leaf.addressable_shards):
            by_index.setdefault(_index_key(shard.index), {})[shard.device] = number
        targets = sharding.addressable_devices_indices_map(leaf.shape)
        copies = [(device, by_index[_index_key(index)]) for device, index in targets.items()]
        shards.append(tuple(c.get(device, next(iter(c.values()))) for device, c in copies))
        devices += targets
    return _Plan(tuple(shards), tuple(devices))


def _move(params: Params, target: Shardings, plan: _Plan) -> Params:
    """Copy all shards as planned, in one device_put."""
    leaves, structure = jax.tree.flatten(params)
    chosen = zip(leaves, plan.shards, strict=True)
    moved = iter(
        jax.device_put(
            [leaf.addressable_data(index) for leaf, indices in chosen for index in indices],
            list(plan.devices),
        )
    )
    arrays = [
        jax.make_array_from_single_device_arrays(leaf.shape, to, [next(moved) for _ in indices])
        for leaf, to, indices in zip(leaves, jax.tree.leaves(target), plan.shards, strict=True)
    ]
    return jax.tree.unflatten(structure, arrays)


def _tiled_mesh(devices: Sequence[jax.Device], copies: int, like: Mesh) -> Mesh:
    """Return a mesh of `copies` times the shape of `like` on these devices."""
    shape = (copies, *like.devices.shape)
    return Mesh(np.array(devices).reshape(shape), ("copies", *like.axis_names))


def _on_mesh(mesh: Mesh, shardings: Shardings) -> Shardings:
    """Return the same partition specs on another mesh."""
    return jax.tree.map(lambda s: NamedSharding(mesh, s.spec), shardings)


def _same(one: Shardings, other: Shardings) -> bool:
    """Return True if both place the same shards on the same devices."""
    pairs = zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True)
    return all(a.is_equivalent_to(b, max(len(a.spec), len(b.spec))) for a, b in pairs)


def _index_key(index: tuple[slice, ...]) -> tuple[tuple[int | None, int | None], ...]:
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
            f"weights cannot move from {len(trainer)} trainer devices to {len(sampler)} sampler "
            "devices: the larger slice must be a multiple of the smaller one. Change mesh.trainer "
            "or mesh.sampler."
        )
