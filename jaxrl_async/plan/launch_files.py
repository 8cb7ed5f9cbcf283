"""Write the files that launch a plan's best split: a configuration, and a values file for GKE."""

import logging
import re
from pathlib import Path
from typing import Any

import yaml

from jaxrl_async.config import schema
from jaxrl_async.config.load import dump, load
from jaxrl_async.errors import ConfigError, MeshError
from jaxrl_async.host import gpu_memory
from jaxrl_async.launch.gke import run_config
from jaxrl_async.launch.gke_values import load_values
from jaxrl_async.plan.chips import Slice, memory_share, parse_slice
from jaxrl_async.plan.pipeline import Histogram
from jaxrl_async.plan.plan import Plan, at_split, plan_run

log = logging.getLogger(__name__)

CONFIG_FILE, VALUES_FILE = "config.yaml", "values.yaml"
PORT = 7077
"""Port of the trainer in the printed commands."""
IMAGE = "us-docker.pkg.dev/PROJECT/REPOSITORY/jaxrl_async:TAG"


def best_that_fits(
    config: schema.Config, plan: Plan, topology: Slice, lengths: Histogram
) -> tuple[schema.Config, Plan]:
    """Return the fastest split of a plan's chips that fits when it is planned.

    Splits are first compared by their simulated rates, which assume that a chip's speed stays the
    same; then their programs are compiled. If trainer and samplers divide a slice, the configured
    split is used.

    Args:
        config, plan: The run and its plan, which fits.
        topology: The trainer's slice, or the slice that the roles divide.
        lengths: Of answers, tokens.
    """
    whole, now = plan.together, plan.trainer.where.num_chips
    assert whole is not None, "it fits"
    if config.mesh.samplers_in != "external":
        return config, plan
    rates = {s: at_split(whole.pipeline, now, s).trained_tokens_per_s for s in whole.splits}
    for split in sorted(rates, key=lambda s: -rates[s]):
        if split.trainer_chips == now and split.samplers == plan.num_samplers:
            break
        chip = topology.chip
        try:
            other = split_config(config, split.trainer_chips, now, split.samplers)
            slice_ = parse_slice(f"{chip.generation}-{split.trainer_chips}")
            best = plan_run(other, slice_, (plan.sampler.where.chip, split.sampler_chips), lengths)
        except (ConfigError, MeshError) as error:
            log.info("%d + %d: %s", split.trainer_chips, split.sampler_chips, error)
            continue
        if best.fits:
            return other, best
        log.info("%d + %d does not fit", split.trainer_chips, split.sampler_chips)
    return config, plan


def split_config(
    config: schema.Config, trainer_chips: int, now: int, samplers: int
) -> schema.Config:
    """Return the configuration with another split of the chips.

    The trainer's axis fsdp, or data, is scaled with its chips; the samplers keep their size and
    change in number.

    Args:
        config: The run.
        trainer_chips, now: The trainer's new number of chips, and the configured one.
        samplers: Their number.

    Raises ConfigError if neither axis can be divided this way.
    """
    axes = config.mesh.trainer
    for name in ("fsdp", "data"):
        size = getattr(axes, name) * trainer_chips
        if not size % now:
            mesh = config.mesh.model_copy(
                update={
                    "trainer": axes.model_copy(update={name: size // now}),
                    "samplers": samplers,
                }
            )
            return config.model_copy(update={"mesh": mesh})
    raise ConfigError(
        f"mesh.trainer cannot be made for {trainer_chips} chips in place of {now}: neither fsdp "
        f"({axes.fsdp}) nor data ({axes.data}) divides evenly. Change its axes by hand, and "
        "plan that."
    )


def write_launch_files(folder: Path, config: schema.Config, plan: Plan) -> list[str]:
    """Write a plan's files, check that the launchers accept them, and return the commands.

    Raises ConfigError if they do not, or GKE has no such slice; OSError if writing fails.
    """
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / CONFIG_FILE
    file.write_text(dump(config), encoding="utf-8")
    load(file)
    if config.mesh.samplers_in != "external":
        devices = config.mesh.trainer.num_devices
        share = f"{_share()} " if plan.trainer.where.chip.is_card else ""
        more = config.mesh.samplers * config.mesh.sampler.num_devices
        host = plan.trainer.where.topology.partition("[")[0]
        return [
            f"# {devices} devices train and {more} sample, on {host}",
            f"{share}python -m jaxrl_async.train {file}",
        ]
    if plan.trainer.where.chip.is_card:
        return _commands_of_cards(file, plan)
    values = folder / VALUES_FILE
    tree = _values(config, plan)
    values.write_text(yaml.safe_dump(tree, sort_keys=False, width=100), encoding="utf-8")
    run_config(load_values(values), folder)
    return [
        f"# on GKE, once PROJECT, REPOSITORY, TAG and BUCKET in {values} are filled in:",
        f"kubectl create secret generic {tree['join_secret']['name']} "
        '--from-literal=secret="$(openssl rand -hex 32)"',
        f"python -m jaxrl_async.launch.gke {values} | kubectl apply -f -",
        "# or, with one JAXRL_ASYNC_SECRET on all machines: on each host of the trainer's slice "
        f"({plan.trainer.where.topology}),",
        f"python -m jaxrl_async.train {file} remote.listen=0.0.0.0:{PORT}",
        f"# and on each host of the slices of {plan.num_samplers} samplers "
        f"({plan.sampler.where.topology})",
        f"python -m jaxrl_async.sample --join TRAINER:{PORT}",
    ]


def _share() -> str:
    """Return the variable that sets JAX's memory share to the one in the plan."""
    return f"{gpu_memory().variable}={memory_share():g}"


def _commands_of_cards(file: Path, plan: Plan) -> list[str]:
    """Return the commands for hosts with NVIDIA cards; the manifests for GKE are for TPUs only."""
    share = _share()
    return [
        "# with one JAXRL_ASYNC_SECRET on all machines: on each host of the trainer's cards "
        f"({plan.trainer.where.topology}),",
        f"{share} python -m jaxrl_async.train {file} remote.listen=0.0.0.0:{PORT}",
        f"# and {plan.num_samplers} times, each with separate cards (CUDA_VISIBLE_DEVICES; "
        f"{plan.sampler.where.topology})",
        f"{share} python -m jaxrl_async.sample --join TRAINER:{PORT}",
    ]


def _values(config: schema.Config, plan: Plan) -> dict[str, Any]:
    """Return the values file's tree; placeholders in capitals must be filled in."""
    name = re.sub(r"[^a-z0-9]+", "-", config.run.name.lower()).strip("-")[:40].rstrip("-")
    name = name if name[:1].isalpha() else f"run-{name}"[:40].rstrip("-")
    return {
        "name": name,
        "image": IMAGE,
        "config": CONFIG_FILE,
        "trainer": {"tpu": _tpu(plan.trainer.where)},
        "samplers": {"replicas": plan.num_samplers, "tpu": _tpu(plan.sampler.where)},
        "join_secret": {"name": f"{name}-join", "key": "secret"},
        "runs": {"bucket": "BUCKET"},
        "service_account": "jaxrl-async",
    }


def _tpu(where: Slice) -> dict[str, str]:
    return {
        "generation": where.chip.generation,
        "topology": "x".join(str(side) for side in where.shape),
    }
