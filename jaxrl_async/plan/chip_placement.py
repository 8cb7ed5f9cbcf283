"""Place a run's roles on chips, as the run itself divides them; the slices are only described.

mesh.samplers_in=external   a slice for the trainer, and one, of any generation, per sampler
processes                    the devices of one host: the trainer's, then each sampler's
threads                      the same, or an equal part of each host of a slice
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any

from jax.experimental import topologies

from jaxrl_async.config import schema
from jaxrl_async.errors import ConfigError, MeshError
from jaxrl_async.mesh import Slices, make_mesh, make_slices
from jaxrl_async.plan.chips import Chip, Slice, parse_slice
from jaxrl_async.plan.cuda import card_devices

EIGHT = (2, 4)
"""Shape of the only host with more than four chips, for the generations with flat slices."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """The slices that a run is planned for: the trainer's, and each sampler's."""

    trainer: Slice
    sampler: Slice
    num_samplers: int
    slices: Slices  # meshes of described devices


def place_on_chips(
    config: schema.Config, trainer: Slice, samplers: tuple[Chip, int] | None
) -> Placement:
    """Return the meshes of the configuration, on slices of devices that are only described.

    Args:
        config: The run.
        trainer: The trainer's slice; with mesh.samplers_in=threads or processes, the slice that
            trainer and samplers divide.
        samplers: Kind and number of the chips of all samplers together, each on a separate slice;
            None unless mesh.samplers_in=external.

    Raises ConfigError if the meshes do not fit their slices, MeshError if the compiler rejects a
    program on one of them.
    """
    if config.mesh.samplers_in != "external":
        return _divided(config.mesh, trainer, samplers)
    assert samplers is not None, "slices of their own have a topology"
    return _separate(config.mesh, trainer, *samplers)


# ---- separate slices


def _separate(section: schema.MeshSection, trainer: Slice, chip: Chip, chips: int) -> Placement:
    """Give each role whole slices, on which programs run on any generation."""
    devices = section.trainer.num_devices
    if devices != trainer.num_devices:
        raise ConfigError(
            f"mesh.trainer has {devices} devices, and the trainer's topology {trainer.name} has "
            f"{trainer.num_devices}: a program runs on a whole slice. Change the axes (data * fsdp "
            f"* expert * context * tensor = {trainer.num_devices}) or --topology."
        )
    each, count = section.sampler.num_devices, section.samplers
    if each * count != chips * chip.devices:
        raise ConfigError(
            f"mesh.samplers ({count}) of mesh.sampler ({each} devices) are {each * count} devices, "
            f"and --sampler-topology {chip.generation}-{chips} has {chips * chip.devices}. Set "
            f"mesh.samplers={max(1, chips * chip.devices // each)} or change the topology."
        )
    sampler = _slice_of_sampler(chip, each)
    return Placement(
        trainer=trainer,
        sampler=sampler,
        num_samplers=count,
        slices=Slices(
            make_mesh(section.trainer, devices_of(trainer)),
            (make_mesh(section.sampler, devices_of(sampler)),),
            False,
        ),
    )


def _slice_of_sampler(chip: Chip, devices: int) -> Slice:
    size = f"mesh.sampler has {devices} devices (data * fsdp * expert * context * tensor)"
    if devices % chip.devices:
        raise ConfigError(
            f"{size}, and a {chip.generation} chip is {chip.devices}: give mesh.sampler a multiple."
        )
    try:
        return parse_slice(f"{chip.generation}-{devices // chip.devices}")
    except ConfigError as error:
        raise ConfigError(f"{size}, and each sampler is a separate slice: {error}") from error


# ---- one host or one slice for all roles


def _divided(
    section: schema.MeshSection, where: Slice, samplers: tuple[Chip, int] | None
) -> Placement:
    """Divide the devices of a host, or of a slice of several hosts, as the run does."""
    how = f"mesh.samplers_in={section.samplers_in}"
    if samplers is not None:
        raise ConfigError(
            f"--sampler-topology is for samplers on separate slices, and with {how} they are "
            f"on the trainer's ({where.name}). Leave it out, or set mesh.samplers_in=external."
        )
    devices = devices_of(where)
    hosts = len({device.process_index for device in devices})
    if section.samplers_in == "processes" and hosts > 1:
        raise ConfigError(
            f"{how} divides the {where.chip.word}s of one host, and {where.name} "
            f"({where.topology}) has {hosts} hosts. Take a topology of one host (v5e-8, v6e-8, "
            "v5p-4, h100-8), or give the samplers separate slices (mesh.samplers_in=external, "
            "--sampler-topology)."
        )
    try:
        slices = make_slices(section.model_copy(update={"samplers_in": "threads"}), devices)
    except MeshError as error:
        raise ConfigError(
            f"{error} That is on {where.name} ({where.topology}), which --topology names: with "
            f"{how} trainer and samplers divide it. For separate slices set "
            "mesh.samplers_in=external."
        ) from error
    return Placement(
        trainer=_part(where, list(slices.trainer.devices.flat)),
        sampler=_part(where, list(slices.sampler.devices.flat)),
        num_samplers=section.samplers,
        slices=slices,
    )


def _part(where: Slice, devices: Sequence[Any]) -> Slice:
    """Return the part of a slice that consists of these devices."""
    if len(devices) == where.num_devices:
        return where
    numbers = ",".join(str(n) for n in sorted(device.id for device in devices))
    part = f"{where.topology}[{numbers}]"
    if where.chip.is_card:
        hosts = len({device.process_index for device in devices})
        return Slice(chip=where.chip, shape=(hosts, len(devices) // hosts), part=part)
    chips = -(-len(devices) // where.chip.devices)
    shape = [1] * where.chip.torus_dims
    while prod(shape) < chips:
        shape[shape.index(min(shape))] *= 2
    if prod(shape) != chips:
        shape = [*[1] * (where.chip.torus_dims - 1), chips]
    return Slice(chip=where.chip, shape=tuple(shape), part=part)


# ---- devices


def devices_of(where: Slice) -> list[Any]:
    """Return the devices of a slice as libtpu's compiler, or the CUDA plugin, describes them.
    Raises ConfigError.

    Eight chips of v5e and v6e are one host. For a single chip, part of the smallest host is used.
    """
    if where.count > 1 and prod(where.shape) == 1:
        raise ConfigError(
            f"{where.name}: the compiler describes several slices of a host or more, so each "
            "needs 4 chips at least."
        )
    if where.chip.is_card:
        return card_devices(where)
    if where.num_chips == 1:
        return devices_of(parse_slice(f"{where.chip.generation}-4"))[: where.num_devices]
    options: dict[str, Any] = {"chip_config_name": "megacore"} if where.chip.megacore else {}
    if where.shape == EIGHT:
        options["chips_per_host_bounds"] = (*EIGHT, 1)
    if where.count > 1:
        options["num_slices"] = where.count
    try:
        topology = topologies.get_topology_desc(
            platform="tpu", topology_name=replace(where, count=1).topology, **options
        )
    except Exception as error:  # the plugin has no exception types for this
        raise ConfigError(
            f"libtpu does not know the topology {where.topology} ({where.name}): "
            f"{str(error).splitlines()[0]}. Choose another shape, such as v5e-8 or v5p:4x4x4."
        ) from error
    return list(topology.devices)
