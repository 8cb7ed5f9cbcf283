"""Assign the devices and cores of a machine to a run's processes: pure.

    devices  0 .. trainer   the trainer's       cores   the remaining last ones: the trainer's
             next each      sampler 0's                 an equal share: each sampler's
             next each      sampler 1's

A TPU chip or a GPU belongs to one process: the others must not see it. On a CPU each process makes
its own devices, and a sampler is pinned to its cores, to not compete with the trainer.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from jaxrl_async.config.schema import MeshSection
from jaxrl_async.errors import MeshError

CHIP_BOUNDS = {1: "1,1,1", 2: "1,2,1", 4: "2,2,1", 8: "2,4,1"}
"""Shape of this number of chips of one TPU host, as libtpu expects it."""
CONTROLLER_PORT = 8476
"""Port of libtpu's controller in the first process; each further process takes the next port."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessPlacement:
    """Devices and cores of one process of a machine."""

    environment: Mapping[str, str]  # to be set before JAX starts
    cores: tuple[int, ...] = ()  # to be pinned to; (): no pinning


def chips_of_trainer(mesh: MeshSection) -> dict[str, str]:
    """Return the environment in which libtpu gives the trainer its chips of this host. Raises
    MeshError if a process cannot have that number of chips."""
    count = mesh.trainer.num_devices
    return _chips([str(chip) for chip in range(count)], "mesh.trainer", 0)


def devices_of_sampler(
    mesh: MeshSection,
    platform: str,
    index: int,
    *,
    cores: Sequence[int],
    gpus: Sequence[str] | None = None,
) -> ProcessPlacement:
    """Return the devices and cores of one sampler on this machine.

    Args:
        mesh: all slices.
        platform: "cpu", "gpu" or "tpu".
        index: number of the sampler, from 0.
        cores: all cores that this process may use.
        gpus: GPUs in CUDA_VISIBLE_DEVICES; None: all, by number.

    Raises MeshError if a process cannot have that number of chips, or if there are too few GPUs.
    """
    each = mesh.sampler.num_devices
    first = mesh.trainer.num_devices + index * each
    numbers = range(first, first + each)
    if platform == "cpu":
        own = {"JAX_PLATFORMS": "cpu"}
        return ProcessPlacement(environment=own, cores=_share(cores, index, mesh.samplers))
    if platform == "tpu":
        return ProcessPlacement(
            environment=_chips([str(n) for n in numbers], "mesh.sampler", index + 1)
        )
    if gpus is not None and first + each > len(gpus):
        raise MeshError(
            f"sampler {index} needs {each} GPUs after the first {first}, and CUDA_VISIBLE_DEVICES "
            f"has {len(gpus)}. Lower mesh.samplers or the axes of the slices."
        )
    names = [str(n) if gpus is None else gpus[n] for n in numbers]
    return ProcessPlacement(environment={"CUDA_VISIBLE_DEVICES": ",".join(names)})


def _share(cores: Sequence[int], index: int, samplers: int) -> tuple[int, ...]:
    """Return a sampler's cores: a share as large as the trainer's; one core if there are fewer
    cores than processes."""
    each = len(cores) // (samplers + 1)
    if each:
        return tuple(cores[index * each : (index + 1) * each])
    return (cores[index % len(cores)],)


def _chips(numbers: Sequence[str], setting: str, process: int) -> dict[str, str]:
    """Return libtpu's environment for some chips of a host."""
    if len(numbers) not in CHIP_BOUNDS:
        raise MeshError(
            f"{setting} has {len(numbers)} devices, and a process takes 1, 2, 4 or 8 chips of a "
            "TPU host. Change its axes, or set mesh.samplers_in=threads."
        )
    chips, port = ",".join(numbers), str(CONTROLLER_PORT + process)
    return {
        "TPU_VISIBLE_CHIPS": chips,
        "TPU_VISIBLE_DEVICES": chips,  # the older name
        "TPU_CHIPS_PER_PROCESS_BOUNDS": CHIP_BOUNDS[len(numbers)],
        "TPU_PROCESS_BOUNDS": "1,1,1",
        "TPU_MESH_CONTROLLER_ADDRESS": f"localhost:{port}",
        "TPU_MESH_CONTROLLER_PORT": port,
    }
