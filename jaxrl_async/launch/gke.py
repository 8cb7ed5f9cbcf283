"""python -m jaxrl_async.launch.gke VALUES.yaml: Kubernetes manifests of a run on TPU slices of GKE.

    values + configuration ──check──> ConfigMap (the resolved configuration)
                                      PersistentVolumeClaim (where runs.create_gib asks for one)
                                      JobSet: one Job for each slice, one pod for each host

If a pod's node is preempted (the pod saves and exits with code 75) or lost, a rule fails its Job,
and the JobSet restarts all pods without counting it: a run in lockstep cannot continue with some of
them. Any other failure counts towards max_restarts. Every start resumes the existing run
(run.resume_or_start). Pipe the text to `kubectl apply -f -`.
"""

import importlib
import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import Field, ValidationError, model_validator

from jaxrl_async.config.load import dump, load
from jaxrl_async.config.processes import run_devices_per_process
from jaxrl_async.config.schema import Config
from jaxrl_async.config.section import Positive, Section
from jaxrl_async.errors import ConfigError
from jaxrl_async.launch.distributed import PORT
from jaxrl_async.run.signals import PREEMPTED_CODE

SPARE_S = 20
"""Seconds added to checkpoint.grace_s until Kubernetes kills the pod."""
SPOT_GRACE_S = 15
"""Most time that kubelet leaves a pod on a spot node, whatever it asks for, seconds."""
CONFIG_FOLDER, RUNS_FOLDER = "/etc/jaxrl_async", "/runs"
JOB, CONTAINER = "slice", "run"
TPU_PORT = 8471
"""Port of libtpu between the hosts of a slice."""
NAME = r"^[a-z]([a-z0-9-]*[a-z0-9])?$"

# ---- slices


@dataclass(frozen=True, slots=True, kw_only=True)
class Generation:
    """A TPU generation in GKE's terms, and its slices."""

    accelerator: str  # value of the node label cloud.google.com/gke-tpu-accelerator
    machine: str  # machine type without its number of chips
    max_chips: int  # in a slice
    flat: bool  # topologies of two numbers, not three


GENERATIONS = {
    "v4": Generation(
        accelerator="tpu-v4-podslice", machine="ct4p-hightpu", max_chips=4096, flat=False
    ),
    "v5e": Generation(
        accelerator="tpu-v5-lite-podslice", machine="ct5lp-hightpu", max_chips=256, flat=True
    ),
    "v5p": Generation(
        accelerator="tpu-v5p-slice", machine="ct5p-hightpu", max_chips=6144, flat=False
    ),
    "v6e": Generation(
        accelerator="tpu-v6e-slice", machine="ct6e-standard", max_chips=256, flat=True
    ),
}
FLAT = ("1x1", "2x2", "2x4", "4x4", "4x8", "8x8", "8x16", "16x16")
"""Topologies of v5e and v6e."""
SMALL = ("2x2x1", "2x2x2", "2x2x4", "2x4x4")
"""Topologies of v4 and v5p whose numbers are not all multiples of 4."""
HOST_CHIPS = {"1x1": (1,), "2x2": (4,), "2x4": (8, 4)}
"""Chips per host, the default first; 4 for every other topology."""


class Tpu(Section):
    generation: Literal["v4", "v5e", "v5p", "v6e"]
    """Generation of the chips."""
    topology: str
    """Chips of a slice in each direction, such as 4x4 (v5e, v6e) or 2x2x4 (v4, v5p)."""
    slices: Positive = 1
    """Number of slices in the run, joined by the data-centre network."""
    chips_per_host: Positive | None = None
    """Chips per node; null: the default for the topology."""
    spot: bool = False
    """Use spot nodes, which are cheaper and may be preempted."""

    @property
    def chips(self) -> int:
        """Chips of one slice: the product of its topology."""
        return math.prod(int(n) for n in self.topology.split("x"))

    @property
    def host_chips(self) -> int:
        """Chips of one host."""
        return self.chips_per_host or HOST_CHIPS.get(self.topology, (4,))[0]

    @property
    def hosts(self) -> int:
        """Hosts of one slice."""
        return self.chips // self.host_chips

    @property
    def machine_type(self) -> str:
        """Machine type of the node pool."""
        return f"{GENERATIONS[self.generation].machine}-{self.host_chips}t"

    @model_validator(mode="after")
    def _exists(self) -> "Tpu":
        generation = GENERATIONS[self.generation]
        if not _is_topology(self.topology, generation):
            raise ValueError(
                f"tpu.topology={self.topology} is not a slice of {self.generation}; these are: "
                + (
                    f"{', '.join(FLAT)}."
                    if generation.flat
                    else f"{', '.join(SMALL)} and AxBxC with multiples of 4, A <= B <= C, up to "
                    f"{generation.max_chips} chips."
                )
            )
        possible = HOST_CHIPS.get(self.topology, (4,))
        if self.host_chips not in possible:
            raise ValueError(
                f"tpu.chips_per_host={self.host_chips}: hosts of a {self.topology} slice of "
                f"{self.generation} have {' or '.join(map(str, possible))} chips. Leave it out for "
                f"{possible[0]}."
            )
        if self.slices > 1 and self.hosts == 1:
            raise ValueError(
                f"tpu.slices={self.slices}: GKE joins only slices of several hosts, and "
                f"{self.topology} has one. Use a larger topology."
            )
        return self


def _is_topology(text: str, generation: Generation) -> bool:
    if generation.flat or text in SMALL:
        return text in (FLAT if generation.flat else SMALL)
    parts = text.split("x")
    if len(parts) != 3 or not all(p.isdigit() for p in parts):
        return False
    numbers = [int(p) for p in parts]
    in_cubes = all(n and n % 4 == 0 for n in numbers) and numbers == sorted(numbers)
    return in_cubes and math.prod(numbers) <= generation.max_chips


# ---- values


class Runs(Section):
    """Storage of the run folders, to which all hosts write."""

    bucket: str | None = None
    """Cloud Storage bucket, mounted with gcsfuse (best with a hierarchical namespace: a checkpoint
    is committed by renaming its folder); the service account must be allowed to write to it."""
    claim: str | None = Field(None, pattern=NAME)
    """PersistentVolumeClaim to which several nodes can write (ReadWriteMany)."""
    create_gib: Positive | None = None
    """Create the claim with this size, GiB; null: it exists."""
    storage_class: str | None = None
    """Storage class of a created claim; null: the cluster's default."""

    @model_validator(mode="after")
    def _one(self) -> "Runs":
        if (self.bucket is None) == (self.claim is None):
            raise ValueError("runs needs a bucket or a claim, and not both. Set one of them.")
        if self.claim is None and self.create_gib is not None:
            raise ValueError("runs.create_gib is the size of runs.claim, which is not set.")
        if self.create_gib is None and self.storage_class is not None:
            raise ValueError(
                "runs.storage_class is for a claim to create: also set runs.create_gib."
            )
        return self


class SecretKey(Section):
    name: str = Field(pattern=NAME)
    """Name of a Kubernetes Secret."""
    key: str
    """Key in it."""


class Values(Section):
    """What a run on GKE needs besides its configuration."""

    name: str = Field(pattern=NAME, max_length=40)
    """Name of the JobSet, and of the run."""
    namespace: str = Field("default", pattern=NAME)
    """Kubernetes namespace."""
    image: str = Field(min_length=1)
    """Image of this project (Dockerfile), with its tag or digest."""
    config: str
    """The run's configuration file, beside the values file or absolute."""
    overrides: tuple[str, ...] = ()
    """Overrides of the configuration, section.key=value each."""
    tpu: Tpu
    """The slices."""
    runs: Runs
    """Storage of the results."""
    queue: str | None = Field(None, pattern=NAME)
    """Kueue LocalQueue; null: not queued."""
    service_account: str | None = Field(None, pattern=NAME)
    """Kubernetes service account of the pods; null: the namespace's default."""
    secrets: dict[str, SecretKey] = Field(default_factory=dict)
    """Environment variables from secrets: HF_TOKEN: {name: our-secret, key: token}."""
    max_restarts: int = Field(3, ge=0)
    """Most restarts after failures; those after preemptions do not count."""
    run_as_user: int | None = Field(1000, ge=0)
    """User id of the pods' processes; null: the image's."""

    @model_validator(mode="after")
    def _bucket_needs_account(self) -> "Values":
        if self.runs.bucket is not None and self.service_account is None:
            raise ValueError(
                "runs.bucket needs service_account: a Kubernetes service account that may write to "
                "the bucket (Workload Identity)."
            )
        return self


def load_values(path: Path) -> Values:
    """Load the values from a YAML file. Raises ConfigError, which names every problem."""
    try:
        tree = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read: {error}. Give a YAML file.") from None
    except yaml.YAMLError as error:
        raise ConfigError(f"{path}: not valid YAML: {' '.join(str(error).split())}.") from None
    try:
        return Values.model_validate(tree)
    except ValidationError as error:
        problems = [_problem(e) for e in error.errors(include_url=False)]
        raise ConfigError(f"{path}: " + f"\n{path}: ".join(problems)) from None


def _problem(error: Mapping[str, Any]) -> str:
    *sections, name = [str(part) for part in error["loc"]] or [""]
    dotted = ".".join([*sections, name])
    if error["type"] == "extra_forbidden":
        near = get_close_matches(name, _keys_at(sections), n=1, cutoff=0.6)
        hint = f"did you mean {'.'.join([*sections, *near])}?" if near else "remove it."
        return f"{dotted} is not a value; {hint}"
    cause = error.get("ctx", {}).get("error")
    if error["type"] == "value_error" and cause is not None:
        return str(cause)
    return f"{dotted or 'the values'}: {error['msg']}."


def _keys_at(sections: Sequence[str]) -> list[str]:
    kind: Any = Values
    for name in sections:
        field = getattr(kind, "model_fields", {}).get(name)
        kind = field.annotation if field is not None else None
    return list(getattr(kind, "model_fields", {}))


# ---- manifests


def manifests(values: Values, config: Config) -> list[dict[str, Any]]:
    """Return the manifests in the order to apply; `config` is from run_config."""
    documents = [_config_map(values, config)]
    if values.runs.create_gib is not None:
        documents.append(_claim(values))
    return [*documents, _job_set(values, config)]


def run_config(values: Values, folder: Path) -> Config:
    """Load the configuration as the pods will run it, and check it against the slices.

    folder: the folder of the values file. Raises ConfigError.
    """
    fixed = [f"run.name={values.name}", f"run.dir={RUNS_FOLDER}", "run.resume_or_start=true"]
    config = load(folder / values.config, [*values.overrides, *fixed])
    hosts = values.tpu.slices * values.tpu.hosts
    try:
        needed = run_devices_per_process(config, hosts)
    except ConfigError as error:
        raise ConfigError(f"{values.config}: {error}") from None
    if needed > values.tpu.host_chips:
        raise ConfigError(
            f"{values.config}: mesh needs {needed} chips on each host, and hosts of "
            f"{values.tpu.machine_type} have {values.tpu.host_chips}. Make mesh smaller or the "
            "slice larger."
        )
    return config


def warnings(values: Values, config: Config) -> Iterator[str]:
    """Yield warnings of what is probably a mistake."""
    hosts = values.tpu.slices * values.tpu.hosts
    needed, there = hosts * run_devices_per_process(config, hosts), hosts * values.tpu.host_chips
    if needed < there:
        yield f"mesh uses {needed} of {there} chips; the others stand idle."
    if values.tpu.spot and grace_s(config) > SPOT_GRACE_S:
        yield (
            f"a pod on a spot node has {SPOT_GRACE_S} s at best to end, and the "
            f"run may take {grace_s(config)} s to save. Save more often (checkpoint.every): what "
            "is not saved is computed again."
        )


def grace_s(config: Config) -> int:
    """Return the seconds that the run may take to save after SIGTERM."""
    return math.ceil(config.checkpoint.grace_s)


def _meta(values: Values, name: str, **more: Any) -> dict[str, Any]:
    labels = {"app.kubernetes.io/name": "jaxrl-async", "app.kubernetes.io/instance": values.name}
    labels |= more.pop("labels", {})
    return {"name": name, "namespace": values.namespace, "labels": labels, **more}


def _config_map(values: Values, config: Config) -> dict[str, Any]:
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": _meta(values, f"{values.name}-config"),
        "data": {"config.yaml": dump(config)},
    }


def _claim(values: Values) -> dict[str, Any]:
    kind = {"storageClassName": values.runs.storage_class} if values.runs.storage_class else {}
    assert values.runs.claim is not None, "the schema asks for it"
    return {
        "apiVersion": "v1",
        "kind": "PersistentVolumeClaim",
        "metadata": _meta(values, values.runs.claim),
        "spec": {
            "accessModes": ["ReadWriteMany"],
            "resources": {"requests": {"storage": f"{values.runs.create_gib}Gi"}},
            **kind,
        },
    }


def _job_set(values: Values, config: Config) -> dict[str, Any]:
    queue = {"kueue.x-k8s.io/queue-name": values.queue} if values.queue else {}
    # One slice, one node pool: pods of a Job share its links, and no other pod may be there.
    exclusive = {"alpha.jobset.sigs.k8s.io/exclusive-topology": "cloud.google.com/gke-nodepool"}
    return {
        "apiVersion": "jobset.x-k8s.io/v1alpha2",
        "kind": "JobSet",
        "metadata": _meta(
            values,
            values.name,
            labels=queue,
            **({"annotations": exclusive} if values.tpu.hosts > 1 else {}),
        ),
        "spec": {
            "coordinator": {"replicatedJob": JOB, "jobIndex": 0, "podIndex": 0},
            "network": {"enableDNSHostnames": True, "publishNotReadyAddresses": True},
            "failurePolicy": {
                "maxRestarts": values.max_restarts,
                "restartStrategy": "BlockingRecreate",  # all pods are gone before any restarts
                "rules": [
                    {
                        "name": "preempted",
                        "action": "RestartJobSetAndIgnoreMaxRestarts",
                        "onJobFailureReasons": ["PodFailurePolicy"],
                    }
                ],
            },
            "replicatedJobs": [
                {
                    "name": JOB,
                    "replicas": values.tpu.slices,
                    "template": {"spec": _job(values, config)},
                }
            ],
        },
    }


def _job(values: Values, config: Config) -> dict[str, Any]:
    """Return the Job of one slice: it fails with its first pod; a rule recognises a preemption."""
    saved = {"containerName": CONTAINER, "operator": "In", "values": [PREEMPTED_CODE]}
    node_lost = [{"type": "DisruptionTarget", "status": "True"}]
    return {
        "completionMode": "Indexed",
        "parallelism": values.tpu.hosts,
        "completions": values.tpu.hosts,
        "backoffLimit": 0,
        "podFailurePolicy": {
            "rules": [
                {"action": "FailJob", "onExitCodes": saved},
                {"action": "FailJob", "onPodConditions": node_lost},
            ]
        },
        "template": {"metadata": {"annotations": _pod_notes(values)}, "spec": _pod(values, config)},
    }


def _pod_notes(values: Values) -> dict[str, str]:
    return {"gke-gcsfuse/volumes": "true"} if values.runs.bucket is not None else {}


def _pod(values: Values, config: Config) -> dict[str, Any]:
    tpu = values.tpu
    spot = "cloud.google.com/gke-spot"
    spec: dict[str, Any] = {
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": grace_s(config) + SPARE_S,
        "nodeSelector": {
            "cloud.google.com/gke-tpu-accelerator": GENERATIONS[tpu.generation].accelerator,
            "cloud.google.com/gke-tpu-topology": tpu.topology,
            **({spot: "true"} if tpu.spot else {}),
        },
        "containers": [_container(values)],
        "volumes": [
            {"name": "config", "configMap": {"name": f"{values.name}-config"}},
            {"name": "runs", **_storage(values.runs, values.run_as_user)},
        ],
    }
    if tpu.spot:
        spec["tolerations"] = [
            {"key": spot, "operator": "Equal", "value": "true", "effect": "NoSchedule"}
        ]
    if tpu.slices > 1:  # between slices the node's own network is faster than the pods'
        spec |= {"hostNetwork": True, "dnsPolicy": "ClusterFirstWithHostNet"}
    if values.service_account is not None:
        spec["serviceAccountName"] = values.service_account
    if values.run_as_user is not None:
        user = values.run_as_user
        spec["securityContext"] = {"runAsUser": user, "runAsGroup": user, "fsGroup": user}
    return spec


def _storage(runs: Runs, user: int | None) -> dict[str, Any]:
    if runs.bucket is None:
        return {"persistentVolumeClaim": {"claimName": runs.claim}}
    options = ["implicit-dirs", *([f"uid={user}", f"gid={user}"] if user is not None else [])]
    attributes = {"bucketName": runs.bucket, "mountOptions": ",".join(options)}
    return {"csi": {"driver": "gcsfuse.csi.storage.gke.io", "volumeAttributes": attributes}}


def _container(values: Values) -> dict[str, Any]:
    chips = {"google.com/tpu": values.tpu.host_chips}
    return {
        "name": CONTAINER,
        "image": values.image,
        "args": [f"{CONFIG_FOLDER}/config.yaml"],
        "env": list(_environment(values)),
        "ports": [{"containerPort": port, "protocol": "TCP"} for port in (TPU_PORT, PORT)],
        "resources": {"requests": chips, "limits": chips},
        "securityContext": {"allowPrivilegeEscalation": False},
        "volumeMounts": [
            {"name": "config", "mountPath": CONFIG_FOLDER, "readOnly": True},
            {"name": "runs", "mountPath": RUNS_FOLDER},
        ],
    }


def _environment(values: Values) -> Iterator[dict[str, Any]]:
    """Yield the variables that launch/distributed.py reads, and the secrets.

    Kubernetes itself sets JOB_COMPLETION_INDEX.
    """
    notes = {"JOBSET_COORDINATOR": "coordinator", "JOBSET_JOB_INDEX": "job-index"}
    for name, note in notes.items():
        path = f"metadata.annotations['jobset.sigs.k8s.io/{note}']"
        yield {"name": name, "valueFrom": {"fieldRef": {"fieldPath": path}}}
    yield {"name": "JOBSET_JOBS", "value": str(values.tpu.slices)}
    yield {"name": "JOBSET_PODS_PER_JOB", "value": str(values.tpu.hosts)}
    for name, secret in values.secrets.items():
        reference = {"name": secret.name, "key": secret.key}
        yield {"name": name, "valueFrom": {"secretKeyRef": reference}}


def as_yaml(values: Values, documents: Sequence[Mapping[str, Any]]) -> str:
    """Return the manifests as one YAML text, headed by the node pool that they need."""
    tpu = values.tpu
    pools = "1 node pool" if tpu.slices == 1 else f"{tpu.slices} node pools"
    head = (
        f"# {pools} of {tpu.hosts} x {tpu.machine_type}, topology {tpu.topology}"
        f"{', spot' if tpu.spot else ''}; made by python -m jaxrl_async.launch.gke\n"
    )
    return head + "---\n".join(
        yaml.dump(d, Dumper=_Dumper, sort_keys=False, width=100) for d in documents
    )


class _Dumper(yaml.SafeDumper):
    """Writes no aliases, and multi-line texts as blocks."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def _text(dumper: yaml.SafeDumper, text: str) -> yaml.Node:
    style = "|" if "\n" in text else None
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_Dumper.add_representer(str, _text)


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
        importlib.import_module("jaxrl_async.run.start").check_names(config)
    except ConfigError as error:
        print(f"config error: {error}", file=sys.stderr)
        return 2
    for warning in warnings(values, config):
        print(f"warning: {warning}", file=sys.stderr)
    print(as_yaml(values, manifests(values, config)), end="")
    return 0


if __name__ == "__main__":
    sys.exit(main())
