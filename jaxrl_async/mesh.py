"""Split devices into a trainer slice and sampler slices; a table for each role defines sharding."""

import functools
import logging
import math
import os
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from types import TracebackType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import mesh_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxrl_async.config import schema
from jaxrl_async.config.processes import mesh_devices_per_process
from jaxrl_async.errors import ConfigError, MeshError
from jaxrl_async.host import (
    CUDA_PLUGIN,
    has_nvidia,
    has_tpu,
    jax_plugins,
    unusable_gpu,
)

log = logging.getLogger(__name__)

AXES = ("data", "fsdp", "expert", "context", "tensor")
"""In order of communication, least first: only data crosses slices; tensor uses adjacent chips."""

Rules = Mapping[str, str | tuple[str, ...] | None]

TRAINER_RULES: dict[str, str | tuple[str, ...] | None] = {
    "layers": None,
    "vocab": "tensor",
    "embed": "fsdp",
    "heads": "tensor",
    "kv_heads": "tensor",
    "head_dim": None,
    "mlp": "tensor",
    "expert": "expert",
    "batch": ("data", "fsdp", "expert"),
    "length": "context",
    "tokens": ("context", "data", "fsdp", "expert"),
    "looked_up": ("context", "data", "expert"),
}
"""The trainer's sharding of each logical axis: weights over fsdp, expert and tensor.

tokens: rows and lengths flattened into one axis, in the order of model/layout.py; looked_up: the
same while the embedding's columns are sharded over fsdp."""

IN_SLICE_RULES: dict[str, str | tuple[str, ...] | None] = {
    name: tuple(a for a in axes if a != "data") if isinstance(axes, tuple) else axes
    for name, axes in TRAINER_RULES.items()
}
"""The trainer's rules inside `by_slice`, where each part of the axis data computes separately
(`by_slice`)."""

SAMPLER_RULES: dict[str, str | tuple[str, ...] | None] = {
    **TRAINER_RULES,
    "embed": None,
    "length": None,
    "tokens": None,
    "looked_up": None,
}
"""A sampler's sharding of each logical axis: weights and KV pages over tensor and expert.

Along the other axes of its mesh, devices repeat the same work."""


def skip_absent_accelerators() -> None:
    """Keep JAX from starting plugins on a host without accelerators: libtpu, which logs many
    errors, and the CUDA plugin, which logs its failure. Both may be installed only for their
    compiler.

    Has no effect if JAX_PLATFORMS names a platform, if TPU chips or NVIDIA's driver are present,
    or if there are other plugins. If the CUDA plugin is installed, the user may have wanted a
    GPU: a warning is logged once that the process uses the CPU, and what to do.
    """
    plugins = jax_plugins()
    others = any(not name.startswith(CUDA_PLUGIN) for name in plugins)
    cards = bool(plugins) and has_nvidia()
    chosen = getattr(jax.config, "jax_platforms", None) or "JAX_FORCE_TPU_INIT" in os.environ
    if others or cards or chosen or has_tpu():
        return
    jax.config.update("jax_platforms", "cpu")  # a second call returns above
    if problem := unusable_gpu(plugins):
        log.warning("%s. To do: %s.", *problem)


def reserve_collective_threads() -> None:
    """Make XLA start 32 threads on a CPU, unless PJRT_NPROC is set. Call it before JAX's first use.

    For programs on several CPU devices, whose collectives can hang with as many threads as cores.
    With more threads than cores everything is slower.
    """
    os.environ.setdefault("PJRT_NPROC", "32")


LEAST_CPU_DEVICES = 2
"""Minimum number of CPU devices that a process which starts JAX requests: a trainer and a sampler
need that many by default, and a later job of the process may train."""


def request_cpu_devices(count: int = LEAST_CPU_DEVICES) -> bool:
    """Make JAX's CPU backend show at least `count` devices; return False if it is already running.

    Has no effect if XLA_FLAGS sets a number.
    """
    if "xla_force_host_platform_device_count" in os.environ.get("XLA_FLAGS", ""):
        return True
    current: int = jax.config.jax_num_cpu_devices  # type: ignore[attr-defined]
    try:
        jax.config.update("jax_num_cpu_devices", max(count, current))
    except RuntimeError:
        return False
    return True


class Slices(NamedTuple):
    """The trainer's mesh and the meshes of the samplers in this process. If colocated, one sampler
    on
    the trainer's devices of this process."""

    trainer: Mesh
    samplers: tuple[Mesh, ...]
    colocated: bool

    @property
    def sampler(self) -> Mesh:
        """The first sampler's mesh."""
        return self.samplers[0]


def make_slices(section: schema.MeshSection, devices: Sequence[jax.Device] | None = None) -> Slices:
    """Give the trainer the first devices and the samplers the next (or the same) ones.

    With several processes, each gives its first devices to the trainer's mesh, which spans all
    processes; the samplers are in this process (if colocated, one sampler on the devices
    that this process gave). Samplers in separate processes have their own devices; all devices
    here are then the trainer's. Raises MeshError if there are too few devices, if they cannot be
    divided this way, or if the TPU compiler rejects a program over the devices of a slice.
    """
    devices = list(jax.devices() if devices is None else devices)
    if len(devices) < section.num_devices:
        raise MeshError(
            f"mesh needs {section.num_devices} devices ({_device_uses(section)}), but there are "
            f"{len(devices)}: {devices[0].platform}. Make the axes smaller or set "
            "mesh.colocated=true."
        )
    processes = sorted({d.process_index for d in devices})
    hosts = [[d for d in devices if d.process_index == i] for i in processes]
    _check_hosts(section, hosts)
    count, each = section.trainer.num_devices // len(hosts), section.sampler.num_devices
    alone = len(hosts) == 1
    first = 0 if section.colocated else count
    samplers = section.samplers // (1 if section.colocated else len(hosts))
    samplers = 0 if section.remote else samplers
    starts = range(first, first + samplers * each, each)
    here = next((h for h in hosts if h[0].process_index == jax.process_index()), hosts[0])
    trainer_devices = [d for host in hosts for d in host[:count]]
    in_place = section.colocated and not alone  # each device already has its part of the weights
    slices = Slices(
        make_mesh(section.trainer, trainer_devices, reorder=alone or not samplers),
        tuple(
            make_mesh(section.sampler, here[start : start + each], reorder=not in_place)
            for start in starts
        ),
        section.colocated,
    )
    if devices[0].platform == "tpu":
        check_collective(slices.trainer, "mesh.trainer")
        for mesh in slices.samplers:
            check_collective(mesh, "mesh.sampler")
    return slices


def _device_uses(section: schema.MeshSection) -> str:
    """Describe what the devices of this run's own process are used for."""
    trainer = f"trainer {section.trainer.num_devices}"
    if section.remote:
        return f"{trainer}; the samplers have their own"
    each = section.sampler.num_devices
    return f"{trainer}, sampler {section.samplers} x {each}, colocated {section.colocated}"


def _check_hosts(section: schema.MeshSection, hosts: Sequence[Sequence[jax.Device]]) -> None:
    """Raise MeshError if the slices cannot be cut from the devices of several processes."""
    try:
        needed = mesh_devices_per_process(section, len(hosts))
    except ConfigError as error:
        raise MeshError(str(error)) from None
    fewest = min(len(host) for host in hosts)
    if fewest < needed:
        raise MeshError(
            f"mesh needs {needed} devices in each of {len(hosts)} processes, and one has {fewest}. "
            "Make the axes smaller."
        )


def check_collective(mesh: Mesh, role: str) -> None:
    """Compile a sum over all devices of a mesh, since the TPU compiler rejects some parts of a
    slice.

    For instance half of each host's chips of a slice of several hosts, on v5e and v6e. Nothing is
    executed. Takes about 0.1 s.

    Args:
        mesh: A trainer's or a sampler's mesh.
        role: Its name in the configuration, for the error.

    Raises MeshError with what to do.
    """
    count = mesh.devices.size
    replicated = NamedSharding(mesh, PartitionSpec())
    each_a_row = NamedSharding(mesh, PartitionSpec(mesh.axis_names))
    rows = jax.ShapeDtypeStruct((count, 128), jnp.float32, sharding=each_a_row)
    try:
        jax.jit(lambda x: x.sum(), out_shardings=replicated).lower(rows).compile()
    except jax.errors.JaxRuntimeError as error:
        hosts = len({d.process_index for d in mesh.devices.flat})
        raise MeshError(
            f"the compiler rejects a sum over the {count} {mesh.devices.flat[0].device_kind} "
            f"devices of {role}, on {hosts} hosts: {str(error).splitlines()[0][:200]}. Programs "
            "must be able to run on this part of a TPU slice: give trainer and samplers "
            "separate, whole slices (mesh.samplers_in=external, mesh.trainer as large as its "
            "slice, and python -m jaxrl_async.sample on each sampler's slice), or use one host."
        ) from error


def make_mesh(
    axes: schema.AxesSection, devices: Sequence[jax.Device], *, reorder: bool = True
) -> Mesh:
    """Make a mesh of the devices in the order of `arranged`. Raises MeshError."""
    return Mesh(arranged(axes, devices, reorder=reorder), AXES)


def arranged(
    axes: schema.AxesSection, devices: Sequence[jax.Device], *, reorder: bool = True
) -> np.ndarray:
    """Arrange devices as [data, fsdp, expert, context, tensor]; their order changes only on TPU.

    Slices that are joined by a data center network (DCN) are split along data only: each slice is
    one block along that axis.

    Args:
        axes: Size of each axis.
        devices: As many as the product of the sizes.
        reorder: Let the axes follow each slice's torus. False keeps the given order, in which a
            process's devices are adjacent (its samplers take their weights from them).

    Raises MeshError if the slices cannot be split this way.
    """
    shape = tuple(getattr(axes, name) for name in AXES)
    if devices[0].platform != "tpu":
        return np.array(devices).reshape(shape)
    numbers = [getattr(device, "slice_index", 0) for device in devices]
    slices = [
        [d for d, n in zip(devices, numbers, strict=True) if n == m] for m in sorted(set(numbers))
    ]
    if len({len(one) for one in slices}) > 1 or axes.data % len(slices):
        raise MeshError(
            f"{len(devices)} devices are on {len(slices)} TPU slices, of "
            f"{', '.join(str(len(one)) for one in slices)} devices, and only the axis data may span"
            f" slices: it is {axes.data}. Make data a multiple of the number of slices, and use "
            "the same number of devices of each."
        )
    each = (axes.data // len(slices), *shape[1:])
    blocks = [_on_torus(one, each) if reorder else np.array(one).reshape(each) for one in slices]
    return np.concatenate(blocks)


def _on_torus(devices: Sequence[jax.Device], shape: tuple[int, ...]) -> np.ndarray:
    """Arrange one slice's devices to make neighbours on an axis neighbours on the torus.

    If they do not fill a box that can be divided this way, warn and keep their order.
    """
    if _is_box([(*d.coords, d.core_on_chip) for d in devices]):
        try:
            return mesh_utils.create_device_mesh(shape, devices, allow_split_physical_axes=True)
        except NotImplementedError as error:
            log.info("no assignment of the axes to the torus: %s", error)
    log.warning(
        "the axes %s of %d TPU devices do not follow the slice's torus: collectives may be slow. "
        "Give trainer and sampler sizes that divide it in boxes.",
        shape,
        len(devices),
    )
    return np.array(devices).reshape(shape)


def _is_box(coordinates: Sequence[tuple[int, ...]]) -> bool:
    sides = [max(along) - min(along) + 1 for along in zip(*coordinates, strict=True)]
    return math.prod(sides) == len(set(coordinates))


def local_part(mesh: Mesh) -> Mesh:
    """Return the mesh; or, if other processes own some of its devices, a mesh of this process's
    devices along fsdp, for programs that this process runs alone."""
    local = [d for d in mesh.devices.flat if d.process_index == jax.process_index()]
    if len(local) == mesh.size:
        return mesh
    return make_mesh(schema.AxesSection(fsdp=len(local)), local, reorder=False)


def num_shards(mesh: Mesh, rules: Rules, axis: str) -> int:
    """Return the number of shards into which the rules divide a logical axis on a mesh."""
    names = rules.get(axis) or ()
    return math.prod(mesh.shape[n] for n in ((names,) if isinstance(names, str) else names))


def batch_sharding(mesh: Mesh, rules: Rules = TRAINER_RULES) -> NamedSharding:
    """Return the sharding of arrays [rows, length, ...] that the mesh divides."""
    return NamedSharding(mesh, PartitionSpec(rules["batch"], rules["length"]))


def spec_for(
    shape: Sequence[int], axes: Sequence[str | None], mesh: Mesh, rules: Rules
) -> PartitionSpec:
    """Return an array's PartitionSpec; dimensions not divisible by their mesh axes stay whole."""
    used: set[str] = set()
    entries: list[Any] = []
    for size, axis in zip(shape, axes, strict=True):
        names = rules.get(axis) if axis else None
        names = (names,) if isinstance(names, str) else tuple(names or ())
        names = tuple(n for n in names if n in mesh.shape and mesh.shape[n] > 1 and n not in used)
        ways = int(np.prod([mesh.shape[n] for n in names])) if names else 1
        if names and size % ways == 0:
            used.update(names)
            entries.append(names[0] if len(names) == 1 else names)
        else:
            entries.append(None)
    return PartitionSpec(*entries)


def by_slice(function: Callable[..., object], mesh: Mesh, in_axes: Sequence[object]) -> Any:
    """Return a function that each part of the axis data runs on its own part of some arguments.

    The computation does not cross slices, so the sharding over the other axes is unchanged.
    Inside, the mesh has no axis data (`trainer_rules`, `placement`, `divided`). The results get a
    leading axis with one entry for each part.

    Args:
        function: the function to run.
        mesh: a trainer's mesh.
        in_axes: for each argument "data" if its first axis is divided; None: every part gets all.
    """

    def with_axis(*args: object) -> Any:
        return jax.tree.map(lambda x: x[None], function(*args))

    specs = tuple(PartitionSpec(*([axis] if axis else [])) for axis in in_axes)
    return jax.shard_map(
        with_axis,
        mesh=mesh,
        in_specs=specs,
        out_specs=PartitionSpec("data"),
        axis_names={"data"},
        check_vma=False,
    )


def is_in_slice() -> bool:
    """Return whether tracing happens inside `by_slice`."""
    return "data" in jax.sharding.get_abstract_mesh().manual_axes


def trainer_rules() -> Rules:
    """Return the trainer's sharding rules for the code that is being traced."""
    return IN_SLICE_RULES if is_in_slice() else TRAINER_RULES


def placement(mesh: Mesh, spec: PartitionSpec) -> Any:
    """Return a sharding on a trainer's mesh for the code that is being traced."""
    return spec if is_in_slice() else NamedSharding(mesh, spec)


def devices_here(mesh: Mesh) -> int:
    """Return the number of devices over which the traced code is divided."""
    return mesh.size // (mesh.shape["data"] if is_in_slice() else 1)


def divided(
    function: Callable[..., object], mesh: Mesh, in_specs: object, out_specs: object
) -> Any:
    """Return a function that each device, of the mesh or of its slice, runs on its own parts."""
    over: dict[str, Any] = {"mesh": mesh}
    if is_in_slice():
        over = {"axis_names": set(mesh.axis_names) - {"data"}}
    # a pallas_call does not say over which axes its result varies
    return jax.shard_map(function, in_specs=in_specs, out_specs=out_specs, check_vma=False, **over)


def shardings(table: object, mesh: Mesh, rules: Rules) -> Any:
    """Return a NamedSharding for each Weight of a weight table, in the same tree."""
    return jax.tree.map(
        lambda w: NamedSharding(mesh, spec_for(w.shape, w.axes, mesh, rules)),
        table,
        is_leaf=lambda w: hasattr(w, "axes"),
    )


HOST, DEVICE = "pinned_host", "device"
"""JAX's memory kinds of the host and the device."""


def in_memory(kind: str, tree: object) -> Any:
    """Move arrays, or their shardings, to the host's or the device's memory, sharded as before."""

    def move(x: jax.Array | NamedSharding) -> Any:
        if isinstance(x, NamedSharding):
            return x.with_memory_kind(kind)
        return jax.device_put(x, x.sharding.with_memory_kind(kind))

    return jax.tree.map(move, tree)


def shapes_on(tree: object, shardings: object) -> Any:
    """Return shapes with shardings for arrays or shapes, to lower programs without running them."""
    return jax.tree.map(
        lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), tree, shardings
    )


def spans_processes(mesh: Mesh | None) -> bool:
    """Return whether several processes own the mesh's devices; None means the default device."""
    return mesh is not None and len({d.process_index for d in mesh.devices.flat}) > 1


def put(tree: object, sharding: NamedSharding) -> Any:
    """Put host arrays on the devices of a sharding. Values that are not arrays yet are converted
    here, one at a time, to keep little in memory.

    If other processes own some of the devices, all processes must pass the same arrays.
    """
    tree = jax.tree.map(lambda x: x if isinstance(x, jax.Array) else np.asarray(x), tree)
    if sharding.is_fully_addressable:
        return jax.device_put(tree, sharding)

    def spread(x: np.ndarray | jax.Array) -> jax.Array:
        return jax.make_array_from_callback(x.shape, sharding, lambda index: x[index])

    return jax.tree.map(spread, tree)


def whole(array: jax.Array | np.ndarray) -> np.ndarray:
    """Copy an array to the host. If other processes hold parts of it, all processes must call
    this."""
    if isinstance(array, np.ndarray):
        return array
    if not (array.is_fully_addressable or array.is_fully_replicated):
        assert isinstance(array.sharding, NamedSharding), "arrays of several processes have a mesh"
        array = _replicated(array.sharding.mesh)(array)
    return np.asarray(array)


@functools.cache
def _replicated(mesh: Mesh) -> Any:
    return jax.jit(lambda x: x, out_shardings=NamedSharding(mesh, PartitionSpec()))


class DeviceLock:
    """A first-come, first-served lock for two threads that dispatch to the same devices."""

    def __init__(self) -> None:
        self._guard = threading.Lock()
        self._waiting: deque[threading.Event] = deque()
        self._held = False

    def __enter__(self) -> "DeviceLock":
        with self._guard:
            if not self._held:
                self._held = True
                return self
            released = threading.Event()
            self._waiting.append(released)
        released.wait()
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


class DeviceLocks:
    """Several locks that are acquired together, always in this order, and released in reverse."""

    def __init__(self, *locks: AbstractContextManager[object]) -> None:
        self._locks, self._held = locks, ExitStack()

    def __enter__(self) -> "DeviceLocks":
        with ExitStack() as stack:
            for lock in self._locks:
                stack.enter_context(lock)
            self._held = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._held.close()


class _NoDeviceLock:
    """A lock that does nothing, for devices that no other thread uses."""

    def __enter__(self) -> "_NoDeviceLock":
        return self

    def __exit__(self, *_: object) -> None:
        return None


NO_DEVICE_LOCK = _NoDeviceLock()

DeviceGuard = AbstractContextManager[object]
"""A DeviceLock, several of them, or NO_DEVICE_LOCK."""
