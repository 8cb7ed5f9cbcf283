"""Kubernetes manifests from a run's values: a JobSet of two replicated Jobs, trainer and sampler.

    trainer   one pod for each host; the first one listens for samplers at a fixed DNS name
    sampler   one Job for each slice, each a JAX world of its own, that joins the trainer

What restarts what, by what fails:

    a pod of a sampler         its Job makes another, without end; the trainer goes on with the rest
    a trainer of one host      its Job makes another pod; samplers wait for it and join again
    a trainer of more hosts    its pods restart together: by the JobSet, samplers as well; alone if
                               the cluster has JobSet's feature gate RestartJob (restart_job)

A preemption (exit code 75, or a lost node) never counts towards max_restarts.
"""

import math
from collections.abc import Iterator, Mapping
from typing import Any

from jaxrl_async.config.load import dump
from jaxrl_async.config.schema import Config
from jaxrl_async.config.section import MAX_WHOLE
from jaxrl_async.launch.distributed import PORT
from jaxrl_async.launch.gke_slices import GENERATIONS
from jaxrl_async.launch.gke_values import Role, Runs, SecretKey, Values
from jaxrl_async.run.signals import PREEMPTED_CODE
from jaxrl_async.wire.secret import SECRET_VARIABLE

SPARE_S = 20
"""Seconds added to checkpoint.grace_s until Kubernetes kills the pod."""
LEAVE_S = 30
"""Seconds that a sampler has to hand its requests back."""
CONFIG_FOLDER, RUNS_FOLDER = "/etc/jaxrl_async", "/runs"
TRAINER, SAMPLER, CONTAINER = "trainer", "sampler", "run"
TPU_PORT = 8471
"""Port of libtpu between the hosts of a slice."""
JOIN_PORT = 8483
"""Port at which the trainer waits for samplers."""
DATA_PORT = 8484
"""Port at which the trainer hands out weights, and samplers pass them on."""
SPOT, FLEX, QUEUED = (f"cloud.google.com/gke-{kind}" for kind in ("spot", "flex-start", "queued"))
NODES = {"spot": SPOT, "flex_start": FLEX, "queued": QUEUED}
"""Label and taint of the nodes of each capacity."""


def host_name(values: Values, job: str, index: int | str) -> str:
    """Return the DNS name of the first pod of a Job, as JobSet makes it."""
    return f"{values.name}-{job}-{index}-0.{values.name}"


def manifests(values: Values, config: Config) -> list[dict[str, Any]]:
    """Return the manifests in the order to apply; `config` is from gke.run_config."""
    documents = [_config_map(values, config)]
    if values.runs.create_gib is not None:
        documents.append(_claim(values))
    return [*documents, _job_set(values, config)]


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


# ---- the JobSet


def _job_set(values: Values, config: Config) -> dict[str, Any]:
    queue = {"kueue.x-k8s.io/queue-name": values.queue} if values.queue else {}
    lease = {"provreq.kueue.x-k8s.io/maxRunDurationSeconds": str(values.max_run_s)}
    return {
        "apiVersion": "jobset.x-k8s.io/v1alpha2",
        "kind": "JobSet",
        "metadata": _meta(
            values,
            values.name,
            labels=queue,
            **({"annotations": lease} if values.max_run_s is not None else {}),
        ),
        "spec": {
            "coordinator": {"replicatedJob": TRAINER, "jobIndex": 0, "podIndex": 0},
            "network": {"enableDNSHostnames": True, "publishNotReadyAddresses": True},
            # The run is done when the trainer is; samplers that still run are removed.
            "successPolicy": {"operator": "All", "targetReplicatedJobs": [TRAINER]},
            "failurePolicy": {
                "maxRestarts": values.max_restarts,
                "restartStrategy": "BlockingRecreate",  # all pods are gone before any restarts
                "rules": list(_rules(values)),
            },
            "replicatedJobs": list(_replicated(values, config)),
        },
    }


def _rules(values: Values) -> Iterator[dict[str, Any]]:
    """Yield what the JobSet does when the trainer's Job has failed; a sampler's never does."""
    ours = {"targetReplicatedJobs": [TRAINER]}
    if _is_alone(values.trainer):  # its Job has made max_restarts further pods
        yield {"name": "trainer_failed", "action": "FailJobSet", **ours}
        return
    # The Jobs of several slices are one JAX world: one of them cannot restart alone.
    restart = "RestartJob" if values.restart_job and values.trainer.tpu.slices == 1 else (
        "RestartJobSet"
    )  # fmt: skip
    preempted = {"onJobFailureReasons": ["PodFailurePolicy"]}
    action = f"{restart}AndIgnoreMaxRestarts"
    yield {"name": "trainer_preempted", "action": action, **preempted, **ours}
    yield {"name": "trainer_failed", "action": restart, **ours}


def _is_alone(role: Role) -> bool:
    """Return whether a role's pods are worlds of their own, so that each can restart alone."""
    return role.tpu.hosts * role.tpu.slices == 1


def _replicated(values: Values, config: Config) -> Iterator[dict[str, Any]]:
    """Yield the two replicated Jobs."""
    trainer, samplers = values.trainer, values.samplers
    pod = _pod(values, trainer, _trainer_container(values), runs=True)
    pod["terminationGracePeriodSeconds"] = grace_s(config) + SPARE_S
    template = _job(trainer, _notes(values, trainer, runs=True), pod)
    if _is_alone(trainer):
        template["spec"] |= _restarted_by_its_job(values.max_restarts)
    else:
        template["spec"] |= _restarted_as_a_whole()
    yield {"name": TRAINER, "replicas": trainer.tpu.slices, "template": template}
    if samplers is not None:
        runs = config.remote.transfer == "folder"
        pod = _pod(values, samplers, _sampler_container(values, samplers, runs=runs), runs=runs)
        pod["terminationGracePeriodSeconds"] = LEAVE_S
        template = _job(samplers, _notes(values, samplers, runs=runs), pod)
        template["spec"] |= _restarted_by_its_job(MAX_WHOLE)
        yield {"name": SAMPLER, "replicas": samplers.replicas, "template": template}


def _job(role: Role, notes: dict[str, str], pod: dict[str, Any]) -> dict[str, Any]:
    """Return the Job of one slice: an indexed pod for each host."""
    # One slice, one node pool: pods of a Job share its links, and no other pod may be there.
    exclusive = {"alpha.jobset.sigs.k8s.io/exclusive-topology": "cloud.google.com/gke-nodepool"}
    about: dict[str, Any] = {key: value for key, value in (
        ("labels", dict(role.labels)), ("annotations", notes)
    ) if value}  # fmt: skip
    return {
        **({"metadata": {"annotations": exclusive}} if role.tpu.hosts > 1 else {}),
        "spec": {
            "completionMode": "Indexed",
            "parallelism": role.tpu.hosts,
            "completions": role.tpu.hosts,
            "template": {**({"metadata": about} if about else {}), "spec": pod},
        },
    }


def _preemption(action: str) -> dict[str, Any]:
    """Return a pod failure policy: what to do with a pod that saved and ended, or was lost."""
    saved = {"containerName": CONTAINER, "operator": "In", "values": [PREEMPTED_CODE]}
    node_lost = [{"type": "DisruptionTarget", "status": "True"}]
    return {
        "rules": [
            {"action": action, "onExitCodes": saved},
            {"action": action, "onPodConditions": node_lost},
        ]
    }


def _restarted_by_its_job(most: int) -> dict[str, Any]:
    """Return the fields of a Job that replaces a pod by itself, `most` times after failures."""
    return {"backoffLimit": most, "podFailurePolicy": _preemption("Ignore")}


def _restarted_as_a_whole() -> dict[str, Any]:
    """Return the fields of a Job that fails with its first pod, for the JobSet's rules."""
    return {"backoffLimit": 0, "podFailurePolicy": _preemption("FailJob")}


# ---- the pods


def _notes(values: Values, role: Role, *, runs: bool) -> dict[str, str]:
    mounted = {"gke-gcsfuse/volumes": "true"} if runs and values.runs.bucket is not None else {}
    return {**mounted, **role.annotations}


def _pod(values: Values, role: Role, container: dict[str, Any], *, runs: bool) -> dict[str, Any]:
    """Return a pod of a role. runs: whether it mounts the storage of the run folders."""
    spec: dict[str, Any] = {
        "restartPolicy": "Never",
        "nodeSelector": _selector(role),
        "containers": [container],
    }
    volumes = [{"name": v.name, **v.source} for v in role.volumes]
    if role is values.trainer:
        volumes.append({"name": "config", "configMap": {"name": f"{values.name}-config"}})
    if runs:
        volumes.append({"name": "runs", **_storage(values.runs, values.run_as_user)})
    if volumes:
        spec["volumes"] = volumes
    if tolerations := list(_tolerations(role)):
        spec["tolerations"] = tolerations
    if role.tpu.slices > 1:  # between slices the node's own network is faster than the pods'
        spec |= {"hostNetwork": True, "dnsPolicy": "ClusterFirstWithHostNet"}
    if values.service_account is not None:
        spec["serviceAccountName"] = values.service_account
    if values.run_as_user is not None:
        user = values.run_as_user
        spec["securityContext"] = {"runAsUser": user, "runAsGroup": user, "fsGroup": user}
    return spec


def _selector(role: Role) -> dict[str, str]:
    selector = {
        "cloud.google.com/gke-tpu-accelerator": GENERATIONS[role.tpu.generation].accelerator,
        "cloud.google.com/gke-tpu-topology": role.tpu.topology,
    }
    if role.capacity in NODES:
        selector[NODES[role.capacity]] = "true"
    if role.reservation is not None:
        selector["cloud.google.com/reservation-name"] = role.reservation
    return {**selector, **role.node_selector}


def _tolerations(role: Role) -> Iterator[dict[str, str]]:
    if role.capacity in NODES:
        label = NODES[role.capacity]
        yield {"key": label, "operator": "Equal", "value": "true", "effect": "NoSchedule"}
    for one in role.tolerations:
        yield one.model_dump(exclude_none=True)


def _storage(runs: Runs, user: int | None) -> dict[str, Any]:
    if runs.bucket is None:
        return {"persistentVolumeClaim": {"claimName": runs.claim}}
    options = ["implicit-dirs", f"rename-dir-limit={runs.rename_dir_limit}"]
    options += [f"uid={user}", f"gid={user}"] if user is not None else []
    attributes = {"bucketName": runs.bucket, "mountOptions": ",".join(options)}
    return {"csi": {"driver": "gcsfuse.csi.storage.gke.io", "volumeAttributes": attributes}}


def _container(role: Role, env: Iterator[dict[str, Any]], *, runs: bool) -> dict[str, Any]:
    """Return what both roles' containers have."""
    chips: Mapping[str, Any] = {"google.com/tpu": role.tpu.host_chips, **role.resources}
    mounts: list[dict[str, Any]] = [
        {"name": v.name, "mountPath": v.mount_path, **({"readOnly": True} if v.read_only else {})}
        for v in role.volumes
    ]
    if runs:
        mounts.append({"name": "runs", "mountPath": RUNS_FOLDER})
    return {
        "name": CONTAINER,
        "env": [*env, *({"name": name, "value": text} for name, text in role.env.items())],
        "resources": {"requests": dict(chips), "limits": dict(chips)},
        "securityContext": {"allowPrivilegeEscalation": False},
        **({"volumeMounts": mounts} if mounts else {}),
    }


def _trainer_container(values: Values) -> dict[str, Any]:
    container = _container(values.trainer, _trainer_environment(values), runs=True)
    config = {"name": "config", "mountPath": CONFIG_FOLDER, "readOnly": True}
    ports = [TPU_PORT, PORT, *([JOIN_PORT, DATA_PORT] if values.samplers else [])]
    return {
        **container,
        "image": values.image,
        "args": [f"{CONFIG_FOLDER}/config.yaml"],
        "ports": [{"containerPort": port, "protocol": "TCP"} for port in ports],
        "volumeMounts": [config, *container["volumeMounts"]],
    }


def _sampler_container(values: Values, role: Role, *, runs: bool) -> dict[str, Any]:
    return {
        **_container(role, _sampler_environment(values), runs=runs),
        "image": values.image,
        "command": ["python", "-m", "jaxrl_async.sample"],
        "args": ["--join", f"{host_name(values, TRAINER, 0)}:{JOIN_PORT}"],
        "ports": [
            {"containerPort": port, "protocol": "TCP"} for port in (TPU_PORT, PORT, DATA_PORT)
        ],
    }


def _trainer_environment(values: Values) -> Iterator[dict[str, Any]]:
    """Yield the variables that launch/distributed.py reads, and the secrets.

    Kubernetes itself sets JOB_COMPLETION_INDEX.
    """
    yield _from_note("JOBSET_COORDINATOR", "coordinator")
    yield _from_note("JOBSET_JOB_INDEX", "job-index")
    yield {"name": "JOBSET_JOBS", "value": str(values.trainer.tpu.slices)}
    yield {"name": "JOBSET_PODS_PER_JOB", "value": str(values.trainer.tpu.hosts)}
    yield from _join_secret(values)
    for name, secret in values.secrets.items():
        yield _from_secret(name, secret)


def _sampler_environment(values: Values) -> Iterator[dict[str, Any]]:
    """Yield the same for a sampler: its Job is a world of its own, whose first pod coordinates.

    GKE takes replicas of a Job on TPUs for slices of one world (MEGASCALE_*); these are not.
    """
    assert values.samplers is not None, "there are samplers"
    first = host_name(values, SAMPLER, "$(SLICE_INDEX)")
    yield _from_note("SLICE_INDEX", "job-index")
    own = {
        "JOBSET_COORDINATOR": first,
        "JOBSET_JOB_INDEX": "0",
        "JOBSET_JOBS": "1",
        "JOBSET_PODS_PER_JOB": str(values.samplers.tpu.hosts),
        "MEGASCALE_COORDINATOR_ADDRESS": first,
        "MEGASCALE_NUM_SLICES": "1",
        "MEGASCALE_SLICE_ID": "0",
    }
    for name, value in own.items():
        yield {"name": name, "value": value}
    yield from _join_secret(values)


def _from_note(name: str, note: str) -> dict[str, Any]:
    path = f"metadata.annotations['jobset.sigs.k8s.io/{note}']"
    return {"name": name, "valueFrom": {"fieldRef": {"fieldPath": path}}}


def _from_secret(name: str, secret: SecretKey) -> dict[str, Any]:
    reference = {"name": secret.name, "key": secret.key}
    return {"name": name, "valueFrom": {"secretKeyRef": reference}}


def _join_secret(values: Values) -> Iterator[dict[str, Any]]:
    if values.join_secret is not None:
        yield _from_secret(SECRET_VARIABLE, values.join_secret)
