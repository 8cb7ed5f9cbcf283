"""The devices of a run: requested from JAX, and locked if threads share them."""

import gc
import logging
import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import jax
from jax.extend.backend import clear_backends

from jaxrl_async.config.draft import read_draft
from jaxrl_async.config.processes import run_devices_per_process
from jaxrl_async.config.schema import Config, MeshSection, RewardSection
from jaxrl_async.errors import MeshError, in_a_line
from jaxrl_async.host import has_tpu
from jaxrl_async.later import Later
from jaxrl_async.mesh import (
    LEAST_CPU_DEVICES,
    NO_DEVICE_LOCK,
    DeviceGuard,
    DeviceLock,
    DeviceLocks,
    Slices,
    request_cpu_devices,
    reserve_collective_threads,
    skip_absent_accelerators,
)
from jaxrl_async.run.builders.program_cache import usable_folder, verify_compiled_programs
from jaxrl_async.run.lockstep import Lockstep

if TYPE_CHECKING:
    from jaxrl_async.run import pinning
else:
    pinning = Later("jaxrl_async.run.pinning")

MAX_CPU_DEVICES = 256
"""Maximum number of devices that a CPU emulates."""
CACHE_FOLDER = ".jax_cache"
"""JAX's persistent compilation cache, in the folder of the runs."""

log = logging.getLogger(__name__)


def claim_devices(config: Config) -> None:
    """Ask JAX's CPU backend, before its first use, for at least as many devices as the mesh needs:
    a later job of this process may need more (LEAST_CPU_DEVICES).

    A CPU backend that was started with too few is restarted if it holds no arrays. Without effect
    if an accelerator is the default backend, if XLA_FLAGS gives a number, or if they would be too
    many to emulate: make_slices reports that. Raises MeshError if arrays keep a backend that
    has too few.
    """
    skip_absent_accelerators()
    if config.mesh.samplers_in == "processes":
        leave_devices_to_samplers(config.mesh)
    if config.mesh.num_devices > MAX_CPU_DEVICES:
        return
    if max(config.mesh.trainer.num_devices, config.mesh.sampler.num_devices) > 1:
        reserve_collective_threads()
    processes = config.distributed.num_processes or 1
    needed = run_devices_per_process(config, processes)
    least = LEAST_CPU_DEVICES if processes == 1 else 1
    if not request_cpu_devices(max(needed, least)):  # a notebook, or an earlier job
        _restart_cpu(needed)


def with_dtype(config: Config, before: Path) -> Config:
    """Return the configuration with model.dtype chosen if it is null: the type of the resumed run,
    else by the devices, which are claimed. Raises MeshError as claim_devices.

    before: the resumed run's configuration.
    """
    if config.model.dtype is not None:
        return config
    if config.run.resume and before.is_file():
        section = read_draft(before).tree.get("model")
        if dtype := section.get("dtype") if isinstance(section, dict) else None:
            model = config.model.model_copy(update={"dtype": dtype})
            return config.model_copy(update={"model": model})
    rl = config.run.job == "rl"
    mesh = config.mesh if rl else config.mesh.without_samplers
    claim_devices(config.model_copy(update={"mesh": mesh}))
    device = jax.local_devices()[0]
    capability = getattr(device, "compute_capability", None)
    chosen = config.on_devices(device.platform, None if capability is None else str(capability))
    log.info("model.dtype=%s, on %s", chosen.model.dtype, device.device_kind)
    return chosen


def _restart_cpu(needed: int) -> None:
    """Restart JAX's CPU backend with so many devices if it has fewer. Raises MeshError if arrays
    are on it."""
    devices = jax.local_devices()
    if devices[0].platform != "cpu" or len(devices) >= needed or jax.process_count() > 1:
        return
    gc.collect()
    if live := jax.live_arrays():
        raise MeshError(
            f"the mesh needs {needed} devices, and JAX was started before with {len(devices)} on "
            f"the CPU, where {len(live)} arrays live, the largest of the shape "
            f"{max(live, key=lambda array: array.size).shape}. Put "
            f"jax.config.update('jax_num_cpu_devices', {needed}) before the first use of JAX, "
            "or set mesh.colocated=true: trainer and sampler then share one device."
        )
    log.info("JAX's CPU backend is restarted with %d devices", needed)
    clear_backends()
    request_cpu_devices(needed)


def leave_devices_to_samplers(mesh: MeshSection) -> None:
    """Have JAX see the trainer's accelerators alone, before its first use: the others belong to the
    processes that the run will start. Raises MeshError if a process cannot have so many."""
    if has_tpu() and "cpu" not in os.environ.get("JAX_PLATFORMS", ""):
        os.environ.update(pinning.chips_of_trainer(mesh))
    numbers = ",".join(str(n) for n in range(mesh.trainer.num_devices))
    try:
        jax.config.update("jax_cuda_visible_devices", numbers)  # without effect elsewhere
    except RuntimeError:
        log.warning("JAX was started before: the samplers may find their GPUs taken")


def keep_compiled_programs(folder: Path) -> None:
    """Turn on JAX's persistent compilation cache in this folder, which all runs share;
    JAX_COMPILATION_CACHE_DIR names another.

    Entries are found even if the folder is moved or copied: XLA's own caches, which are off, would
    make the folder's path a part of every program's key. If no folder can be used, the run compiles
    all programs again and logs that.
    """
    if "JAX_PERSISTENT_CACHE_ENABLE_XLA_CACHES" not in os.environ:
        jax.config.update("jax_persistent_cache_enable_xla_caches", "none")
    verify_compiled_programs()
    if os.environ.get("JAX_COMPILATION_CACHE_DIR"):
        return
    try:
        chosen = str(usable_folder(folder.resolve()))
    except (OSError, RuntimeError) as error:  # RuntimeError: a circle of links
        log.warning(
            "compiled programs are not kept, and the next run compiles them again: %s. Set "
            "JAX_COMPILATION_CACHE_DIR to a folder that can be written to.", in_a_line(error),
        )  # fmt: skip
        chosen = None
    jax.config.update("jax_compilation_cache_dir", chosen)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.1)


def compile_cache_folder() -> str:
    """Return the folder of JAX's persistent compilation cache; "" if the cache is off."""
    folder: str | None = jax.config.jax_compilation_cache_dir  # type: ignore[attr-defined]
    return folder or ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Locks:
    """Locks of threads that use the same devices; a lock with one user costs nothing."""

    trainer: DeviceGuard  # updates and publishing
    sampler: DeviceGuard  # decode blocks
    saving: DeviceGuard  # checkpoints: orbax compares names between processes, on all devices


def make_locks(
    reward: RewardSection, slices: Slices, lockstep: Lockstep, *, shares_sampler: bool = False
) -> Locks:
    """Return the locks for these slices. Trainer and samplers share one if they are colocated;
    trainer and reward model if both run collectives; the sampler and others on its devices, such
    as opponents and teachers, if shares_sampler.

    A process that holds one may wait for programs of the other processes, never for their locks. A
    thread other than the trainer's that holds a lock runs programs of this process alone, which
    end.
    """
    collective = reward.model is not None and slices.trainer.size > 1
    devices = DeviceLock() if slices.colocated or collective else NO_DEVICE_LOCK
    if lockstep.count == 1:
        sampler = devices if slices.colocated else NO_DEVICE_LOCK
        if shares_sampler and not slices.colocated and slices.sampler.size > 1:
            sampler = DeviceLock()
        return Locks(trainer=devices, sampler=sampler, saving=NO_DEVICE_LOCK)
    if slices.colocated:
        return Locks(trainer=devices, sampler=devices, saving=devices)
    sampler = DeviceLock()
    return Locks(trainer=devices, sampler=sampler, saving=DeviceLocks(devices, sampler))
