"""Which devices and cores of a machine each of a run's processes takes: pure.

    devices  0 .. trainer   the trainer's       cores   the last ones that are left: the trainer's
             next each      sampler 0's                 an equal share: each sampler's
             next each      sampler 1's

A TPU chip or a GPU belongs to one process: the others must not see it. On a CPU each process makes
its own devices, and a sampler keeps to its cores, so that it does not take turns with the trainer.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from jaxrl_async.config.schema import MeshSection
from jaxrl_async.errors import MeshError

CHIP_BOUNDS = {1: "1,1,1", 2: "1,2,1", 4: "2,2,1", 8: "2,4,1"}
"""Shape of so many chips of one TPU host, as libtpu wants it."""
CONTROLLER_PORT = 8476
"""Port of libtpu's own controller in the first process; each next process takes the next."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """What one process of a machine sees."""

    environment: Mapping[str, str]  # to be set before JAX starts
    cores: tuple[int, ...] = ()  # to keep to; (): any


def place_of_trainer(mesh: MeshSection, platform: str) -> Place:
    """Return what the trainer sees of this machine. Raises MeshError."""
    return Place(environment=_visible(platform, 0, mesh.trainer.num_devices, "mesh.trainer", 0))


def place_of_sampler(mesh: MeshSection, platform: str, index: int, cores: Sequence[int]) -> Place:
    """Return what one sampler sees of this machine.

    Args:
        mesh: the slices of all.
        platform: "cpu", "gpu" or "tpu".
        index: number of the sampler, from 0.
        cores: all that this machine lends.

    Raises MeshError if no process can have so many chips.
    """
    each = mesh.sampler.num_devices
    first = mesh.trainer.num_devices + index * each
    return Place(
        environment=_visible(platform, first, each, "mesh.sampler", index + 1),
        cores=_share(cores, index, mesh.samplers) if platform == "cpu" else (),
    )


def _share(cores: Sequence[int], index: int, samplers: int) -> tuple[int, ...]:
    """Return a sampler's cores: an equal share beside the trainer's; one of them where there are
    fewer cores than processes."""
    each = len(cores) // (samplers + 1)
    if each:
        return tuple(cores[index * each : (index + 1) * each])
    return (cores[index % len(cores)],)


def _visible(platform: str, first: int, count: int, setting: str, process: int) -> dict[str, str]:
    chips = ",".join(str(chip) for chip in range(first, first + count))
    if platform == "cpu":
        return {"JAX_PLATFORMS": "cpu"}
    if platform == "gpu":
        return {"CUDA_VISIBLE_DEVICES": chips}
    if count not in CHIP_BOUNDS:
        raise MeshError(
            f"{setting} has {count} devices, and a process takes 1, 2, 4 or 8 chips of a TPU host. "
            "Change its axes, or set mesh.samplers_in=threads."
        )
    port = str(CONTROLLER_PORT + process)
    return {
        "TPU_VISIBLE_CHIPS": chips,
        "TPU_VISIBLE_DEVICES": chips,  # the older name
        "TPU_CHIPS_PER_PROCESS_BOUNDS": CHIP_BOUNDS[count],
        "TPU_PROCESS_BOUNDS": "1,1,1",
        "TPU_MESH_CONTROLLER_ADDRESS": f"localhost:{port}",
        "TPU_MESH_CONTROLLER_PORT": port,
    }
