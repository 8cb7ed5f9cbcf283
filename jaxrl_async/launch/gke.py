"""python -m jaxrl_async.launch.gke VALUES.yaml: Kubernetes manifests of a run on TPU slices of GKE.

    values + configuration ──check──> ConfigMap (the resolved configuration)
                                      PersistentVolumeClaim (if runs.create_gib is set)
                                      Service, PodMonitoring: the trainer's metrics
                                      JobSets: the trainer's, and one of each sampler

launch/gke_values.py defines all values; launch/gke_manifests.py describes what restarts after a
failure. Every start resumes the existing run (run.resume_or_start). Pipe the output to
`kubectl apply -f -`.
"""

import importlib
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import yaml

from jaxrl_async.config.load import RESTARTED, load
from jaxrl_async.config.processes import run_devices_per_process
from jaxrl_async.config.schema import Config
from jaxrl_async.errors import ConfigError
from jaxrl_async.launch.gke_manifests import (
    DATA_PORT,
    JOIN_PORT,
    METRICS_PORT,
    RUNS_FOLDER,
    TRAINER,
    grace_s,
    host_name,
    manifests,
)
from jaxrl_async.launch.gke_slices import GENERATIONS, Tpu
from jaxrl_async.launch.gke_values import Role, SamplerRole, Values, load_values

SPOT_GRACE_S = 15
"""Maximum time that kubelet gives a pod on a spot node to end, regardless of its request,
seconds."""


def run_config(values: Values, folder: Path) -> Config:
    """Load the configuration in the form that the pods run, and check it against the slices.

    folder: the folder of the values file. Raises ConfigError.
    """
    fixed = [f"run.name={values.name}", f"run.dir={RUNS_FOLDER}", *RESTARTED]
    fixed.append(f"metrics.prometheus=0.0.0.0:{METRICS_PORT}")
    if values.samplers is not None:
        fixed += [
            "mesh.samplers_in=external",
            f"mesh.samplers={values.samplers.replicas}",
            f"remote.listen=0.0.0.0:{JOIN_PORT}",
            f"remote.data_port={DATA_PORT}",
            f"remote.advertise={host_name(values, TRAINER, 0)}",
        ]
    config = load(folder / values.config, [*values.overrides, *fixed])
    if values.samplers is None and config.mesh.remote:
        raise ConfigError(
            f"{values.config}: mesh.samplers_in={config.mesh.samplers_in}, and {values.name} has no"
            " samplers. Set samplers (their slices), or mesh.samplers_in=threads."
        )
    _check_trainer(values, config)
    if values.samplers is not None:
        _check_sampler(values, values.samplers, config)
    return config


def _check_trainer(values: Values, config: Config) -> None:
    tpu = values.trainer.tpu
    hosts = tpu.slices * tpu.hosts
    try:
        needed = run_devices_per_process(config, hosts)
    except ConfigError as error:
        raise ConfigError(f"{values.config}: {error}") from None
    if needed > tpu.host_devices:
        raise ConfigError(
            f"{values.config}: mesh needs {needed} devices on each host, and hosts of "
            f"{tpu.machine_type} have {tpu.host_devices}. Make mesh smaller or the slice larger."
        )
    samples_here = config.run.job == "rl" and not config.mesh.remote
    in_parts = needed < tpu.host_devices or samples_here
    if in_parts and hosts > 1 and not GENERATIONS[tpu.generation].divisible:
        raise ConfigError(
            f"{values.config}: the compiler does not support programs on a part of each host's "
            f"chips of a {tpu.generation} slice of {tpu.hosts} hosts, nor on each host alone (a "
            f"sampler with mesh.colocated). Give the samplers separate slices "
            f"(samplers), and the trainer all {hosts * tpu.host_devices} devices of its slices "
            "(axes of mesh.trainer), or use one host."
        )


def _check_sampler(values: Values, role: SamplerRole, config: Config) -> None:
    tpu, needed = role.tpu, config.mesh.sampler.num_devices
    size = tpu.hosts * tpu.host_devices
    if needed > size or (needed < size and tpu.hosts > 1):
        raise ConfigError(
            f"{values.config}: mesh.sampler has {needed} devices, and a sampler's slice "
            f"{tpu.topology} of {tpu.generation} has {size}. Set mesh.sampler.tensor={size} (its "
            "axes multiply to the devices of one slice), or change samplers.tpu."
        )


def warnings(values: Values, config: Config) -> Iterator[str]:
    """Yield warnings about probable mistakes."""
    tpu = values.trainer.tpu
    hosts = tpu.slices * tpu.hosts
    needed, size = hosts * run_devices_per_process(config, hosts), hosts * tpu.host_devices
    if needed < size:
        yield f"mesh uses {needed} of {size} devices; the others are idle."
    if values.samplers is not None:
        used, has = config.mesh.sampler.num_devices, values.samplers.tpu.host_devices
        if values.samplers.tpu.hosts == 1 and used < has:
            yield f"mesh.sampler uses {used} of {has} devices of each sampler's slice."
    if values.trainer.capacity == "spot" and grace_s(config) > SPOT_GRACE_S:
        yield (
            f"a pod on a spot node has at most {SPOT_GRACE_S} s to end, and the "
            f"run may take {grace_s(config)} s to save. Save more often (checkpoint.every): "
            "unsaved work is computed again."
        )


def as_yaml(values: Values, documents: Sequence[Mapping[str, object]]) -> str:
    """Return the manifests as one YAML text, headed by the node pools that they need."""
    head = [_pools("trainer", values.trainer, values.trainer.tpu.slices)]
    if values.samplers is not None:
        head.append(_pools("samplers", values.samplers, values.samplers.replicas))
    head.append("# made by python -m jaxrl_async.launch.gke")
    return "\n".join(head) + "\n" + "---\n".join(
        yaml.dump(d, Dumper=_Dumper, sort_keys=False, width=100) for d in documents
    )  # fmt: skip


def _pools(name: str, role: Role, count: int) -> str:
    """Return the line about a role's node pools; slices of one host share a pool."""
    tpu: Tpu = role.tpu
    pools = "1 node pool" if count == 1 or tpu.hosts == 1 else f"{count} node pools"
    nodes = count if tpu.hosts == 1 else tpu.hosts
    kind = "" if role.capacity == "on_demand" else f", {role.capacity.replace('_', ' ')}"
    return f"# {name}: {pools} of {nodes} x {tpu.machine_type}, topology {tpu.topology}{kind}"


class _Dumper(yaml.SafeDumper):
    """Writes no aliases, and multi-line texts as blocks."""

    def ignore_aliases(self, data: object) -> bool:
        return True


def _represent_text(dumper: yaml.SafeDumper, text: str) -> yaml.Node:
    style = "|" if "\n" in text else None
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_Dumper.add_representer(str, _represent_text)


def main(argv: Sequence[str] | None = None) -> int:
    """Print the manifests of a values file and return the exit code."""
    args = list(sys.argv[1:] if argv is None else argv)
    if len(args) != 1 or args[0].startswith("-"):
        print("usage: python -m jaxrl_async.launch.gke VALUES.yaml", file=sys.stderr)
        return 2
    path = Path(args[0])
    try:
        values = load_values(path)
        config = run_config(values, path.parent)
        importlib.import_module("jaxrl_async.run.start_checks").check_names(config)
    except ConfigError as error:
        print(f"config error: {error}", file=sys.stderr)
        return 2
    for warning in warnings(values, config):
        print(f"warning: {warning}", file=sys.stderr)
    print(as_yaml(values, manifests(values, config)), end="")
    return 0


if __name__ == "__main__":
    sys.exit(main())
