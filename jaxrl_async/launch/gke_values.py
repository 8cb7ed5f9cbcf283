"""The values file of a run on GKE: its two roles, each on separate slices, and its storage."""

from collections.abc import Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import Field, ValidationError, model_validator

from jaxrl_async.config.section import Count, Positive, Section
from jaxrl_async.config.setting_fields import all_paths
from jaxrl_async.errors import ConfigError
from jaxrl_async.launch.gke_slices import Tpu
from jaxrl_async.metrics.health import HEALTH_VARIABLE
from jaxrl_async.remote.wire.secret import SECRET_VARIABLE

NAME = r"^[a-z]([a-z0-9-]*[a-z0-9])?$"
MANAGED_ENV = ("JOBSET_", "MEGASCALE_", "TPU_", SECRET_VARIABLE, HEALTH_VARIABLE)
"""Variables that the manifests or GKE set: names or prefixes."""
MAX_NAME = 63
"""Maximum length of a pod's host name."""
RESERVED = ("config", "shm", "runs")
"""Names of the manifests' own volumes."""


class Toleration(Section):
    key: str
    """Key of the taint."""
    operator: Literal["Exists", "Equal"] = "Exists"
    """Equal: only taints with this value."""
    value: str | None = None
    """Value of the taint, for Equal."""
    effect: Literal["NoSchedule", "PreferNoSchedule", "NoExecute"] | None = None
    """Effect of the taint; null: any."""


class Volume(Section):
    name: str = Field(pattern=NAME)
    """Name of the volume."""
    mount_path: str = Field(pattern=r"^/")
    """Folder in the container."""
    read_only: bool = False
    """Mount it read-only."""
    source: dict[str, Any] = Field(min_length=1, max_length=1)
    """A Kubernetes volume source: {emptyDir: {medium: Memory}}, {persistentVolumeClaim:
    {claimName: data}}."""


class Role(Section):
    """Values that the trainer and the samplers share."""

    tpu: Tpu
    """The slices."""
    capacity: Literal["on_demand", "spot", "reserved", "flex_start", "queued"] = "on_demand"
    """How the nodes are provisioned. flex_start: provided when available, for at most seven days;
    queued: the same, with all nodes provided together by queued provisioning (needs queue, a Kueue
    LocalQueue)."""
    reservation: str | None = None
    """Name of the reservation, for capacity=reserved."""
    env: dict[str, str] = Field(default_factory=dict)
    """Additional environment variables."""
    resources: dict[str, str] = Field(default_factory=dict)
    """Resources that a container requests in addition to its chips, and its limits: {cpu: "90",
    memory: 350Gi}. Without cpu or memory it requests a part of its host's, without a limit."""
    labels: dict[str, str] = Field(default_factory=dict)
    """Additional labels of the pods."""
    annotations: dict[str, str] = Field(default_factory=dict)
    """Additional annotations of the pods."""
    node_selector: dict[str, str] = Field(default_factory=dict)
    """Additional labels that the nodes must have."""
    tolerations: tuple[Toleration, ...] = ()
    """Additional taints that the pods tolerate."""
    volumes: tuple[Volume, ...] = ()
    """Additional volumes."""

    @model_validator(mode="after")
    def _check_role(self) -> "Role":
        if (self.capacity == "reserved") != (self.reservation is not None):
            raise ValueError(
                "reservation is the name of the reservation for capacity=reserved: set both, or "
                "neither."
            )
        if "google.com/tpu" in self.resources:
            raise ValueError("resources: the chips come from tpu. Remove google.com/tpu.")
        taken = sorted(n for n in self.env if n.startswith(MANAGED_ENV))
        if taken:
            raise ValueError(f"env: {', '.join(taken)} is set by the manifests. Remove it.")
        names = [v.name for v in self.volumes]
        if len({*names, *RESERVED}) < len(names) + len(RESERVED):
            raise ValueError(
                f"volumes: two have one name ({', '.join(RESERVED)} are taken). Rename one."
            )
        return self


class SamplerRole(Role):
    replicas: Count = 1
    """Number of samplers. Each has a separate slice and JobSet, and is a separate workload of the
    queue."""
    least: Count = 1
    """Minimum number of samplers for launch/gke_scale.py."""
    most: Count | None = None
    """Maximum number of samplers for launch/gke_scale.py; null: replicas."""
    queue: str | None = Field(None, pattern=NAME)
    """Kueue LocalQueue of the samplers; null: the trainer's."""
    wait_s: Positive = 3600
    """Maximum time for which a sampler waits for its trainer, seconds; then its nodes are
    released."""
    capacity: Literal["on_demand", "spot", "reserved", "flex_start", "queued"] = "spot"
    """As for the trainer. A preempted sampler loses no work: others continue its requests."""

    @model_validator(mode="after")
    def _check_samplers(self) -> "SamplerRole":
        if self.tpu.slices > 1:
            raise ValueError(
                f"samplers.tpu.slices={self.tpu.slices}: a sampler is on one slice. Set "
                "samplers.replicas instead."
            )
        if not self.least <= self.replicas <= (self.most or self.replicas):
            raise ValueError(
                f"samplers.replicas={self.replicas} must lie between samplers.least ({self.least}) "
                f"and samplers.most ({self.most})."
            )
        return self


class Runs(Section):
    """Storage of the run folders, to which all hosts of the trainer write."""

    bucket: str | None = None
    """Cloud Storage bucket, mounted with gcsfuse (best with a hierarchical namespace: a checkpoint
    is committed by renaming its folder); the service account must be allowed to write to it."""
    rename_dir_limit: Positive = 100_000
    """Maximum files of a folder that gcsfuse renames in a bucket without a hierarchical
    namespace."""
    sidecar_cpu: str = "0"
    """CPU limit of gcsfuse's sidecar; 0: no limit, which Autopilot does not allow."""
    sidecar_memory: str = "0"
    """Memory limit of the sidecar, such as 16Gi; 0: no limit."""
    sidecar_storage: str = "0"
    """Limit of the node's storage for the sidecar, which holds a file until it is uploaded: more
    than a host's largest file of a checkpoint; 0: no limit."""
    claim: str | None = Field(None, pattern=NAME)
    """PersistentVolumeClaim that several nodes can write to (ReadWriteMany)."""
    create_gib: Positive | None = None
    """Create the claim with this size, GiB; null: it exists."""
    storage_class: str | None = None
    """Storage class of a created claim; null: the cluster's default."""

    @model_validator(mode="after")
    def _check_storage(self) -> "Runs":
        if (self.bucket is None) == (self.claim is None):
            raise ValueError("runs needs a bucket or a claim, but not both. Set one of them.")
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
    """Key in the Secret."""


class Values(Section):
    """Values of a run on GKE, in addition to its configuration."""

    name: str = Field(pattern=NAME, max_length=40)
    """Name of the JobSet, and of the run."""
    namespace: str = Field("default", pattern=NAME)
    """Kubernetes namespace."""
    image: str = Field(min_length=1)
    """Image of this project (Dockerfile), with its tag or digest."""
    config: str
    """The run's configuration file, relative to the values file or absolute."""
    overrides: tuple[str, ...] = ()
    """Overrides of the configuration, section.key=value each."""
    trainer: Role
    """The trainer's slices."""
    samplers: SamplerRole | None = None
    """The samplers' slices; null: samplers in threads on the trainer's hosts."""
    join_secret: SecretKey | None = None
    """The secret with which samplers and trainer authenticate each other; needed with samplers."""
    runs: Runs
    """Storage of the results."""
    queue: str | None = Field(None, pattern=NAME)
    """Kueue LocalQueue; null: not queued."""
    max_run_s: Positive | None = None
    """Maximum time for which queued provisioning provides the nodes, seconds; null: seven days."""
    monitoring: bool = True
    """Create a PodMonitoring, with which Google's managed Prometheus reads the trainer's metrics;
    false
    for a cluster without it."""
    service_account: str | None = Field(None, pattern=NAME)
    """Kubernetes service account of the pods; null: the namespace's default."""
    secrets: dict[str, SecretKey] = Field(default_factory=dict)
    """Environment variables of the trainer from secrets: HF_TOKEN: {name: our-secret, key:
    token}."""
    max_restarts: int = Field(3, ge=0)
    """Maximum restarts after failures of the trainer. Restarts after preemptions, and restarts of
    samplers, do not count."""
    run_as_user: int | None = Field(1000, ge=0)
    """User id of the pods' processes; null: the image's."""

    @property
    def roles(self) -> tuple[Role, ...]:
        """The trainer, and the samplers if they have separate slices."""
        return (self.trainer,) if self.samplers is None else (self.trainer, self.samplers)

    def queue_of(self, role: Role) -> str | None:
        """Return a role's LocalQueue; None if it is not queued."""
        return (role.queue if isinstance(role, SamplerRole) else None) or self.queue

    @model_validator(mode="after")
    def _check_values(self) -> "Values":
        if self.runs.bucket is not None and self.service_account is None:
            raise ValueError(
                "runs.bucket needs service_account: a Kubernetes service account that may write to "
                "the bucket (Workload Identity)."
            )
        if (self.samplers is None) != (self.join_secret is None):
            raise ValueError(
                "samplers join with a secret: set samplers and join_secret, or neither. To create "
                f"one: kubectl create secret generic {self.name}-join --from-literal=secret="
                '"$(openssl rand -hex 32)", then join_secret: {name: '
                f"{self.name}-join, key: secret}}."
            )
        if self.samplers is not None:
            role = self.samplers
            numbers = (role.most or role.replicas) - 1, role.tpu.hosts - 1
            longest = "{}-sampler-{}-sampler-0-{}-12345".format(self.name, *numbers)  # of a pod
            if (over := len(longest) - MAX_NAME) > 0:
                raise ValueError(
                    f"name is too long, by {over}: the pods of its samplers would have names of "
                    f"more than {MAX_NAME} characters, which Kubernetes does not accept. "
                    "Shorten it."
                )
        queued = [role for role in self.roles if role.capacity == "queued"]
        if any(self.queue_of(role) is None for role in queued):
            raise ValueError("capacity=queued needs queue: a Kueue LocalQueue. Set it.")
        if self.max_run_s is not None and not queued:
            raise ValueError("max_run_s is for capacity=queued. Remove it.")
        return self


def load_values(path: Path) -> Values:
    """Load the values from a YAML file. Raises ConfigError with every problem."""
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
        keys = [path[-1] for path, _ in all_paths(Values, ()) if path[:-1] == tuple(sections)]
        near = get_close_matches(name, keys, n=1)
        hint = f"did you mean {'.'.join([*sections, *near])}?" if near else "remove it."
        if dotted == "tpu":
            hint = "slices belong to a role: trainer.tpu and samplers.tpu."
        return f"{dotted} is not a value; {hint}"
    cause = error.get("ctx", {}).get("error")
    if error["type"] == "value_error" and cause is not None:
        return f"{sections[0]}: {cause}" if sections else str(cause)
    return f"{dotted or 'the values'}: {error['msg']}."
