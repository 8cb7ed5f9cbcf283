"""How many devices each of several processes needs, and what they cannot do together."""

from jaxrl_async.config.schema import Config, MeshSection
from jaxrl_async.errors import ConfigError


def run_devices_per_process(config: Config, count: int) -> int:
    """Return how many devices each of `count` processes needs for run.job.

    Raises ConfigError if so many processes cannot make this run.
    """
    if config.run.job != "rl":
        return mesh_devices_per_process(config.mesh.without_samplers, count)
    if count > 1 and config.mesh.samplers_in == "processes":
        raise ConfigError(
            f"mesh.samplers_in=processes starts samplers on one machine, and this run has {count} "
            "processes. Set mesh.samplers_in=elsewhere, and start the samplers on their own hosts."
        )
    if count == 1 or config.mesh.remote:  # the first process alone has rollouts and scorers
        return mesh_devices_per_process(config.mesh, count)
    unsupported = {
        "reward.model": (config.reward.model is not None, "leave it null"),
        "data.curriculum": (config.data.curriculum != "none", "set data.curriculum=none"),
        "mesh.colocated": (config.mesh.colocated, "set mesh.colocated=false"),
    }
    for key, (is_set, remedy) in unsupported.items():
        if is_set:
            raise ConfigError(
                f"{key} does not work with samplers in the threads of several processes, and this "
                f"run has {count}: {remedy}, run on one host, or give the samplers slices of their "
                "own (mesh.samplers_in=elsewhere)."
            )
    if config.algorithm.groups_per_step % count:
        raise ConfigError(
            f"algorithm.groups_per_step ({config.algorithm.groups_per_step}) must be a multiple of "
            f"the number of processes ({count}): each plays an equal part. Change it."
        )
    return mesh_devices_per_process(config.mesh, count)


def mesh_devices_per_process(mesh: MeshSection, count: int) -> int:
    """Return how many devices each of `count` processes needs for the slices.

    Raises ConfigError unless they take equal parts: the same number of trainer devices and of
    samplers (colocated: no samplers of their own; remote: none here).
    """
    if count == 1:
        return mesh.num_devices
    trainer, each = mesh.trainer.num_devices, mesh.sampler.num_devices
    samplers = 0 if mesh.colocated or mesh.remote else mesh.samplers
    if trainer % count or samplers % count:
        raise ConfigError(
            f"mesh.trainer ({trainer} devices) and mesh.samplers ({samplers}) must be multiples of "
            f"the number of processes ({count}): all give the same number of devices to the "
            "trainer and run the same number of samplers. Change them."
        )
    if samplers and (trainer // count) % each:
        raise ConfigError(
            f"mesh.sampler ({each} devices) must divide the trainer's devices of one process "
            f"({trainer // count}), so that the weights need not leave it. Make mesh.sampler "
            "smaller and mesh.samplers more."
        )
    return (trainer + samplers * each) // count
