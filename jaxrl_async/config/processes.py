"""The number of devices per process, and settings that several processes do not support."""

from jaxrl_async.config.schema import Config, MeshSection
from jaxrl_async.errors import ConfigError


def run_devices_per_process(config: Config, count: int) -> int:
    """Return the number of devices that each of `count` processes needs for run.job.

    Raises ConfigError if this number of processes cannot make the run.
    """
    if config.run.job != "rl":
        return mesh_devices_per_process(config.mesh.without_samplers, count)
    if count > 1 and config.mesh.samplers_in == "processes":
        raise ConfigError(
            f"mesh.samplers_in=processes starts samplers on one machine, and this run has {count} "
            "processes. Set mesh.samplers_in=external, and start the samplers on their own hosts."
        )
    if count > 1 and config.run.replay_schedule is not None:
        raise ConfigError(
            f"run.replay_schedule repeats the events of one process's threads, and this run has "
            f"{count} processes. Run it on one host; at staleness.max_staleness=0 several "
            "processes train the same without it."
        )
    if count == 1 or config.mesh.remote:  # the first process alone has rollouts and scorers
        return mesh_devices_per_process(config.mesh, count)
    if config.algorithm.groups_per_step % count:
        raise ConfigError(
            f"algorithm.groups_per_step ({config.algorithm.groups_per_step}) must be a multiple of "
            f"the number of processes ({count}): each plays an equal part. Change it."
        )
    return mesh_devices_per_process(config.mesh, count)


def mesh_devices_per_process(mesh: MeshSection, count: int) -> int:
    """Return the number of devices that each of `count` processes needs for the slices.

    Raises ConfigError unless they take equal parts: the same number of trainer devices and of
    samplers (colocated: one sampler on all trainer devices of each; remote: none here).
    """
    trainer, each = mesh.trainer.num_devices, mesh.sampler.num_devices
    samplers = 0 if mesh.colocated or mesh.remote else mesh.samplers
    if mesh.colocated and each * count != trainer:
        raise ConfigError(
            f"mesh.colocated puts one sampler on all trainer devices of each process: mesh.trainer "
            f"has {trainer} devices on {count} process{'' if count == 1 else 'es'}, and "
            f"mesh.sampler {each}. Give mesh.trainer {count} times the devices of mesh.sampler, or "
            "set mesh.colocated=false."
        )
    if count == 1:
        return mesh.num_devices
    if trainer % count or samplers % count:
        raise ConfigError(
            f"mesh.trainer ({trainer} devices) and mesh.samplers ({samplers}) must be multiples of "
            f"the number of processes ({count}): all give the same number of devices to the "
            "trainer and run the same number of samplers. Change them."
        )
    if samplers and (trainer // count) % each:
        raise ConfigError(
            f"mesh.sampler ({each} devices) must divide the trainer's devices of one process "
            f"({trainer // count}), to transfer weights within a process. Use a smaller "
            "mesh.sampler and more mesh.samplers."
        )
    return (trainer + samplers * each) // count
