"""Kubernetes manifests from a run's values: a JobSet of the trainer, and one of each sampler.

    NAME             one pod for each host; the first one listens for samplers at a fixed DNS name
    NAME-sampler-I   one slice, a separate JAX world, that joins the trainer

A JobSet's number of Jobs cannot be changed, and its queue admits it as a whole. Samplers join,
leave and are preempted individually, so each is a separate JobSet.

What restarts, depending on what fails:

    a pod of a sampler         its Job creates another, without limit; the trainer continues with
                               the others
    a trainer of one host      its Job creates another pod; samplers wait for it and join again
    a trainer of more hosts    the JobSet restarts its pods together; samplers wait and join again

A preemption (exit code 75, or a lost node) never counts towards max_restarts. A sampler ends with
the run, or when it has waited samplers.wait_s for its trainer (exit code 69).
"""

import math
from collections.abc import Iterator, Mapping
from typing import Any

from jaxrl_async.config.load import dump
from jaxrl_async.config.schema import Config
from jaxrl_async.config.section import MAX_WHOLE
from jaxrl_async.launch.gke_slices import GENERATIONS
from jaxrl_async.launch.gke_values import Role, Runs, SecretKey, Values
from jaxrl_async.metrics.health import HEALTH_VARIABLE, PATH
from jaxrl_async.remote.wire.secret import SECRET_VARIABLE
from jaxrl_async.run.distributed import PORT
from jaxrl_async.run.signals import NO_TRAINER_CODE, PREEMPTED_CODE

SPARE_S = 20
"""Seconds added to checkpoint.grace_s until Kubernetes kills the pod."""
LEAVE_S = 30
"""Seconds that a sampler has to hand its requests back."""
CONFIG_FOLDER, RUNS_FOLDER = "/etc/jaxrl_async", "/runs"
TRAINER, SAMPLER, CONTAINER = "trainer", "sampler", "run"
ROLE = "jaxrl-async/role"
"""Label of a JobSet: trainer or sampler."""
TPU_PORT = 8471
"""Port of libtpu between the hosts of a slice."""
JOIN_PORT = 8483
"""Port at which samplers join the trainer."""
DATA_PORT = 8484
"""Port at which the trainer sends weights, and samplers forward them."""
METRICS_PORT = 8485
"""Port at which the trainer's first host serves its metrics to Prometheus."""
HEALTH_PORT = 8486
"""Port of each pod's health endpoint (metrics/health.py)."""
START_S, HANG_S = 1800, 300
"""Timeout of a pod's first answer, and of later ones, seconds."""
CACHE_VARIABLE = "JAX_COMPILATION_CACHE_DIR"
SAMPLER_CACHE = f"{RUNS_FOLDER}/.jax_cache_of_samplers"
"""Compiled programs of all samplers. A trainer keeps its programs next to the runs."""
KEPT_S = 600
"""Seconds for which a finished JobSet of a sampler is kept."""
SPOT, FLEX, QUEUED = (f"cloud.google.com/gke-{kind}" for kind in ("spot", "flex-start", "queued"))
NODES = {"spot": SPOT, "flex_start": FLEX, "queued": QUEUED}
"""Label and taint of the nodes of each capacity."""


def host_name(values: Values, job: str, index: int | str) -> str:
    """Return the DNS name that JobSet gives to the first pod of a trainer's Job."""
    return f"{values.name}-{job}-{index}-0.{values.name}"


def manifests(values: Values, config: Config) -> list[dict[str, Any]]:
    """Return the manifests in the order to apply; `config` is from gke.run_config."""
    documents = [_config_map(values, config)]
    if values.runs.create_gib is not None:
        documents.append(_claim(values))
    documents += [_metrics_service(values), *([_monitoring(values)] if values.monitoring else [])]
    count = 0 if values.samplers is None else values.samplers.replicas
    return [*documents, _trainer_set(values, config), *(
        sampler_set(values, config, index) for index in range(count)
    )]  # fmt: skip


def sampler_name(values: Values, index: int | str) -> str:
    """Return the name of a sampler's JobSet."""
    return f"{values.name}-{SAMPLER}-{index}"


def grace_s(config: Config) -> int:
    """Return the time that the run has to save after SIGTERM, seconds."""
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


def _first_trainer(values: Values) -> dict[str, str]:
    """Return the labels of the pod that serves the metrics."""
    return {
        "jobset.sigs.k8s.io/jobset-name": values.name,
        "jobset.sigs.k8s.io/replicatedjob-name": TRAINER,
        "jobset.sigs.k8s.io/job-index": "0",
        "batch.kubernetes.io/job-completion-index": "0",
    }


def _metrics_service(values: Values) -> dict[str, Any]:
    """Return the Service at which launch/gke_scale.py, and any Prometheus, finds the metrics."""
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": _meta(values, f"{values.name}-metrics"),
        "spec": {
            "selector": _first_trainer(values),
            "ports": [{"name": "metrics", "port": METRICS_PORT, "targetPort": METRICS_PORT}],
        },
    }


def _monitoring(values: Values) -> dict[str, Any]:
    return {
        "apiVersion": "monitoring.googleapis.com/v1",
        "kind": "PodMonitoring",
        "metadata": _meta(values, values.name),
        "spec": {
            "selector": {"matchLabels": _first_trainer(values)},
            "endpoints": [{"port": METRICS_PORT, "interval": "30s"}],
        },
    }


# ---- the JobSets


def _job_set(
    values: Values, role: Role, name: str, labels: Mapping[str, str], spec: Mapping[str, object]
) -> dict[str, Any]:
    """Return a JobSet of one role, in its queue."""
    queue = values.queue_of(role)
    lease = {"provreq.kueue.x-k8s.io/maxRunDurationSeconds": str(values.max_run_s)}
    leased = role.capacity == "queued" and values.max_run_s is not None
    return {
        "apiVersion": "jobset.x-k8s.io/v1alpha2",
        "kind": "JobSet",
        "metadata": _meta(
            values,
            name,
            labels={**labels, **({"kueue.x-k8s.io/queue-name": queue} if queue else {})},
            **({"annotations": lease} if leased else {}),
        ),
        "spec": {
            "network": {"enableDNSHostnames": True, "publishNotReadyAddresses": True},
            **spec,
        },
    }


def _trainer_set(values: Values, config: Config) -> dict[str, Any]:
    trainer = values.trainer
    template = _job(values, trainer, _trainer_container(values), grace_s(config) + SPARE_S)
    if _has_one_pod(trainer):
        template["spec"] |= _restarted_by_its_job(values.max_restarts)
    else:  # its Job fails with its first pod, for the JobSet's rules
        template["spec"] |= {"backoffLimit": 0, "podFailurePolicy": _preemption("FailJob")}
    spec = {
        "coordinator": {"replicatedJob": TRAINER, "jobIndex": 0, "podIndex": 0},
        "failurePolicy": {
            "maxRestarts": values.max_restarts,
            "restartStrategy": "BlockingRecreate",  # all pods are gone before any restarts
            "rules": list(_rules(values)),
        },
        "replicatedJobs": [{"name": TRAINER, "replicas": trainer.tpu.slices, "template": template}],
    }
    return _job_set(values, trainer, values.name, {ROLE: TRAINER}, spec)


def sampler_set(values: Values, config: Config, index: int) -> dict[str, Any]:
    """Return the JobSet of one sampler."""
    role = values.samplers
    assert role is not None, "there are samplers"
    template = _job(values, role, _sampler_container(values, role, index), LEAVE_S)
    template["spec"] |= _restarted_by_its_job(MAX_WHOLE)
    codes = {"containerName": CONTAINER, "operator": "In", "values": [NO_TRAINER_CODE]}
    released = {"action": "FailJob", "onExitCodes": codes}  # no trainer has answered
    template["spec"]["podFailurePolicy"]["rules"].insert(0, released)
    spec = {
        "ttlSecondsAfterFinished": KEPT_S,
        "replicatedJobs": [{"name": SAMPLER, "replicas": 1, "template": template}],
    }
    return _job_set(values, role, sampler_name(values, index), {ROLE: SAMPLER}, spec)


def _rules(values: Values) -> Iterator[dict[str, Any]]:
    """Yield the JobSet's rules for a failed Job of the trainer."""
    of_trainer = {"targetReplicatedJobs": [TRAINER]}
    if _has_one_pod(values.trainer):  # its Job has already restarted max_restarts times
        yield {"name": "trainer_failed", "action": "FailJobSet", **of_trainer}
        return
    preempted = {"onJobFailureReasons": ["PodFailurePolicy"]}
    action = "RestartJobSetAndIgnoreMaxRestarts"
    yield {"name": "trainer_preempted", "action": action, **preempted, **of_trainer}
    yield {"name": "trainer_failed", "action": "RestartJobSet", **of_trainer}


def _has_one_pod(role: Role) -> bool:
    """Return whether each of a role's pods is a separate world, which can restart alone."""
    return role.tpu.hosts * role.tpu.slices == 1


def _job(
    values: Values, role: Role, container: Mapping[str, object], ends_in_s: int
) -> dict[str, Any]:
    """Return the Job of one slice: an indexed pod for each host, with this time to end, seconds."""
    pod = {**_pod(values, role, container), "terminationGracePeriodSeconds": ends_in_s}
    # One slice, one node pool: a Job's pods share its links, and other pods are excluded.
    exclusive = {"alpha.jobset.sigs.k8s.io/exclusive-topology": "cloud.google.com/gke-nodepool"}
    about: dict[str, Any] = {key: value for key, value in (
        ("labels", dict(role.labels)), ("annotations", _annotations(values, role))
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
    """Return a pod failure policy: the action for a pod that saved and ended, or was lost."""
    saved = {"containerName": CONTAINER, "operator": "In", "values": [PREEMPTED_CODE]}
    node_lost = [{"type": "DisruptionTarget", "status": "True"}]
    return {
        "rules": [
            {"action": action, "onExitCodes": saved},
            {"action": action, "onPodConditions": node_lost},
        ]
    }


def _restarted_by_its_job(most: int) -> dict[str, Any]:
    """Return the fields of a Job that replaces failed pods, at most `most` times."""
    return {"backoffLimit": most, "podFailurePolicy": _preemption("Ignore")}


# ---- the pods


def _annotations(values: Values, role: Role) -> dict[str, str]:
    runs = values.runs
    mounted = {
        "gke-gcsfuse/volumes": "true",
        "gke-gcsfuse/cpu-limit": runs.sidecar_cpu,
        "gke-gcsfuse/memory-limit": runs.sidecar_memory,
        "gke-gcsfuse/ephemeral-storage-limit": runs.sidecar_storage,
    }
    return {**(mounted if runs.bucket is not None else {}), **role.annotations}


def _pod(values: Values, role: Role, container: Mapping[str, object]) -> dict[str, Any]:
    """Return a pod of a role."""
    spec: dict[str, Any] = {
        "restartPolicy": "Never",
        "nodeSelector": _selector(role),
        "containers": [container],
    }
    volumes = [{"name": v.name, **v.source} for v in role.volumes]
    volumes.append({"name": "shm", "emptyDir": {"medium": "Memory"}})  # 64 MB without it
    if role is values.trainer:
        volumes.append({"name": "config", "configMap": {"name": f"{values.name}-config"}})
    volumes.append({"name": "runs", **_storage(values.runs, values.run_as_user)})
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
    for toleration in role.tolerations:
        yield toleration.model_dump(exclude_none=True)


def _storage(runs: Runs, user: int | None) -> dict[str, Any]:
    if runs.bucket is None:
        return {"persistentVolumeClaim": {"claimName": runs.claim}}
    options = ["implicit-dirs", f"rename-dir-limit={runs.rename_dir_limit}"]
    options += [f"uid={user}", f"gid={user}"] if user is not None else []
    attributes = {"bucketName": runs.bucket, "mountOptions": ",".join(options)}
    return {"csi": {"driver": "gcsfuse.csi.storage.gke.io", "volumeAttributes": attributes}}


def _container(role: Role, env: Iterator[Mapping[str, object]]) -> dict[str, Any]:
    """Return the part that the containers of both roles share."""
    chips: Mapping[str, Any] = {"google.com/tpu": role.tpu.host_chips, **role.resources}
    health = {"httpGet": {"path": PATH, "port": HEALTH_PORT}, "timeoutSeconds": 10}
    mounts: list[dict[str, Any]] = [
        {"name": v.name, "mountPath": v.mount_path, **({"readOnly": True} if v.read_only else {})}
        for v in role.volumes
    ]
    mounts.append({"name": "shm", "mountPath": "/dev/shm"})
    mounts.append({"name": "runs", "mountPath": RUNS_FOLDER})
    return {
        "name": CONTAINER,
        "env": [
            *env,
            {"name": HEALTH_VARIABLE, "value": f"0.0.0.0:{HEALTH_PORT}"},
            *({"name": name, "value": text} for name, text in role.env.items()),
        ],
        "resources": {"requests": {**role.tpu.host_requests, **chips}, "limits": dict(chips)},
        "startupProbe": {**health, "periodSeconds": 10, "failureThreshold": START_S // 10},
        "livenessProbe": {**health, "periodSeconds": 30, "failureThreshold": HANG_S // 30},
        "securityContext": {"allowPrivilegeEscalation": False},
        "volumeMounts": mounts,
    }


def _trainer_container(values: Values) -> dict[str, Any]:
    container = _container(values.trainer, _trainer_environment(values))
    config = {"name": "config", "mountPath": CONFIG_FOLDER, "readOnly": True}
    ports = [TPU_PORT, PORT, METRICS_PORT, HEALTH_PORT]
    ports += [JOIN_PORT, DATA_PORT] if values.samplers else []
    return {
        **container,
        "image": values.image,
        "args": [f"{CONFIG_FOLDER}/config.yaml"],
        "ports": [{"containerPort": port, "protocol": "TCP"} for port in ports],
        "volumeMounts": [config, *container["volumeMounts"]],
    }


def _sampler_container(values: Values, role: Role, index: int) -> dict[str, Any]:
    assert values.samplers is not None, "there are samplers"
    trainer = f"{host_name(values, TRAINER, 0)}:{JOIN_PORT}"
    return {
        **_container(role, _sampler_environment(values, role, index)),
        "image": values.image,
        "command": ["python", "-m", "jaxrl_async.sample"],
        "args": ["--join", trainer, "--wait", str(values.samplers.wait_s)],
        "ports": [
            {"containerPort": port, "protocol": "TCP"}
            for port in (TPU_PORT, PORT, DATA_PORT, HEALTH_PORT)
        ],
    }


def _trainer_environment(values: Values) -> Iterator[dict[str, Any]]:
    """Yield the variables that run/distributed.py reads, and the secrets.

    Kubernetes itself sets JOB_COMPLETION_INDEX.
    """
    yield _from_annotation("JOBSET_COORDINATOR", "coordinator")
    yield _from_annotation("JOBSET_JOB_INDEX", "job-index")
    yield {"name": "JOBSET_JOBS", "value": str(values.trainer.tpu.slices)}
    yield {"name": "JOBSET_PODS_PER_JOB", "value": str(values.trainer.tpu.hosts)}
    yield from _join_secret(values)
    for name, secret in values.secrets.items():
        yield _from_secret(name, secret)


def _sampler_environment(values: Values, role: Role, index: int) -> Iterator[dict[str, Any]]:
    """Yield the variables of a sampler, and the cache of all samplers' compiled programs.

    GKE may treat Jobs on TPUs as slices of one world (MEGASCALE_*); these are not.
    """
    name = sampler_name(values, index)
    first = f"{name}-{SAMPLER}-0-0.{name}"  # DNS name of its first pod
    own = {
        "JOBSET_COORDINATOR": first,
        "JOBSET_JOB_INDEX": "0",
        "JOBSET_JOBS": "1",
        "JOBSET_PODS_PER_JOB": str(role.tpu.hosts),
        "MEGASCALE_COORDINATOR_ADDRESS": first,
        "MEGASCALE_NUM_SLICES": "1",
        "MEGASCALE_SLICE_ID": "0",
        CACHE_VARIABLE: SAMPLER_CACHE,
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0.1",
    }
    for name, value in own.items():
        if name not in role.env:
            yield {"name": name, "value": value}
    yield from _join_secret(values)


def _from_annotation(name: str, annotation: str) -> dict[str, Any]:
    path = f"metadata.annotations['jobset.sigs.k8s.io/{annotation}']"
    return {"name": name, "valueFrom": {"fieldRef": {"fieldPath": path}}}


def _from_secret(name: str, secret: SecretKey) -> dict[str, Any]:
    reference = {"name": secret.name, "key": secret.key}
    return {"name": name, "valueFrom": {"secretKeyRef": reference}}


def _join_secret(values: Values) -> Iterator[dict[str, Any]]:
    if values.join_secret is not None:
        yield _from_secret(SECRET_VARIABLE, values.join_secret)
