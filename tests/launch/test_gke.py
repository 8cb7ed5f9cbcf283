"""Manifests for GKE: what the published schemas allow, and what they must say."""

import json
import re
from pathlib import Path

import kubernetes_validate
import pytest
import yaml
from kubeflow_trainer_api.models.jobset_v1alpha2_failure_policy_rule import (
    JobsetV1alpha2FailurePolicyRule,
)
from kubeflow_trainer_api.models.jobset_v1alpha2_job_set import JobsetV1alpha2JobSet
from pydantic import ValidationError

from jaxrl_async.config.load import load
from jaxrl_async.config.schema import DistributedSection
from jaxrl_async.launch import gke
from jaxrl_async.launch.gke_manifests import grace_s, manifests
from jaxrl_async.launch.gke_slices import Tpu
from jaxrl_async.launch.gke_values import Values, load_values
from jaxrl_async.run.distributed import find, from_jobset
from jaxrl_async.run.folder import settled

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "tpu_scripts" / "gke_values.yaml"
KUBERNETES = "1.33"

ONE_HOST = {
    "name": "one",
    "image": "us-docker.pkg.dev/ours/images/jaxrl_async:1",
    "config": str(ROOT / "configs/addition.yaml"),
    "overrides": ["mesh.trainer.fsdp=4", "mesh.sampler.tensor=4"],
    "trainer": {"tpu": {"generation": "v5e", "topology": "2x4"}},
    "runs": {"claim": "runs"},
}
ROLES = {
    **ONE_HOST,
    "name": "roles",
    "overrides": ["mesh.trainer.fsdp=16", "mesh.sampler.tensor=8"],
    "trainer": {"tpu": {"generation": "v6e", "topology": "4x4"}},
    "samplers": {"replicas": 3, "tpu": {"generation": "tpu7x", "topology": "2x2x1"}},
    "join_secret": {"name": "roles-join", "key": "secret"},
    "runs": {"bucket": "ours", "rename_dir_limit": 5000},
    "service_account": "trainer",
    "queue": "tpus",
    "secrets": {"HF_TOKEN": {"name": "hugging-face", "key": "token"}},
}
SLICES = {
    **ONE_HOST,
    "name": "slices",
    "overrides": ["mesh.trainer.fsdp=8", "mesh.sampler.tensor=2", "mesh.samplers=4"],
    "trainer": {"tpu": {"generation": "v5p", "topology": "2x2x2", "slices": 2}},
    "runs": {"claim": "new-runs", "create_gib": 500, "storage_class": "filestore-rwx"},
    "run_as_user": None,
}
EXTRAS = {
    "reservation": "ours",
    "capacity": "reserved",
    "env": {"JAX_COMPILATION_CACHE_DIR": "/cache"},
    "resources": {"cpu": "90", "memory": "350Gi"},
    "labels": {"team": "rl"},
    "annotations": {"note": "ours"},
    "node_selector": {"pool": "a"},
    "tolerations": [{"key": "dedicated", "operator": "Equal", "value": "rl"}],
    "volumes": [
        {"name": "cache", "mount_path": "/cache", "source": {"emptyDir": {}}},
        {
            "name": "data",
            "mount_path": "/data",
            "read_only": True,
            "source": {"persistentVolumeClaim": {"claimName": "data", "readOnly": True}},
        },
    ],
}
RICH = {
    **ROLES,
    "name": "rich",
    "overrides": [
        "mesh.trainer.fsdp=4",
        "mesh.sampler.tensor=16",
        "remote.transfer=folder",
        "remote.folder=/runs/weights",
    ],
    "trainer": {"tpu": {"generation": "v5p", "topology": "2x2x1"}, **EXTRAS},
    "samplers": {
        "replicas": 2,
        "capacity": "queued",
        "tpu": {"generation": "v5e", "topology": "4x4"},
    },
    "max_run_s": 3600,
}
ALL = [ONE_HOST, ROLES, SLICES, RICH]


def made(tree):
    """The manifests of a tree of values, as kubectl reads them."""
    values = Values.model_validate(tree)
    config = gke.run_config(values, ROOT)
    return list(yaml.safe_load_all(gke.as_yaml(values, manifests(values, config))))


def job_sets(tree, role="trainer"):
    sets = [d for d in made(tree) if d["kind"] == "JobSet"]
    return [d for d in sets if d["metadata"]["labels"]["jaxrl-async/role"] == role]


def job_set(tree, role="trainer"):
    return job_sets(tree, role)[0]


def replicated(document, role="trainer"):
    (found,) = document["spec"]["replicatedJobs"]
    assert found["name"] == role
    return found


def job_of(document, role="trainer"):
    return replicated(document, role)["template"]["spec"]


def pod(tree, role="trainer"):
    return job_of(job_set(tree, role), role)["template"]["spec"]


def container(tree, role="trainer"):
    (one,) = pod(tree, role)["containers"]
    return one


def env_of(tree, role="trainer"):
    return {e["name"]: e for e in container(tree, role)["env"]}


def check(document):
    """Raise where the published schemas do not know the document, or something in it."""
    if document["kind"] == "PodMonitoring":  # its schema is Google's: what its reference shows
        assert document["apiVersion"] == "monitoring.googleapis.com/v1"
        assert set(document["spec"]) == {"selector", "endpoints"}
        assert set(document["spec"]["selector"]) == {"matchLabels"}
        assert all(set(e) == {"port", "interval"} for e in document["spec"]["endpoints"])
        return
    if document["kind"] != "JobSet":
        kubernetes_validate.validate(document, KUBERNETES, strict=True)
        return
    known = JobsetV1alpha2JobSet.from_dict(document)
    assert json.loads(known.to_json()) == document, "the model drops what it does not know"
    for rule in document["spec"].get("failurePolicy", {}).get("rules", []):
        described = JobsetV1alpha2FailurePolicyRule.model_fields["action"].description
        assert rule["action"] in re.findall(r"\w+", described.partition("Valid values are")[2])
    for one in document["spec"]["replicatedJobs"]:
        job = {"apiVersion": "batch/v1", "kind": "Job", "metadata": {}, **one["template"]}
        kubernetes_validate.validate(job, KUBERNETES, strict=True)


@pytest.mark.full
@pytest.mark.parametrize("tree", ALL, ids=lambda t: t["name"])
def test_manifests_are_what_the_published_schemas_allow(tree):
    documents = made(tree)
    samplers = tree.get("samplers", {"replicas": 0})["replicas"]
    assert [d["kind"] for d in documents if d["kind"] != "PersistentVolumeClaim"] == [
        "ConfigMap",
        "Service",
        "PodMonitoring",
        "JobSet",
        *["JobSet"] * samplers,
    ]
    names = [(d["kind"], d["metadata"]["name"]) for d in documents]
    assert len(set(names)) == len(names)
    for document in documents:
        check(document)


@pytest.mark.full
@pytest.mark.parametrize(
    "spoil",
    [
        lambda d: d["spec"].update(failurePolicies={}),
        lambda d: d["spec"]["failurePolicy"]["rules"][0].pop("action"),
        lambda d: d["spec"]["failurePolicy"]["rules"][0].update(action="RestartSampler"),
        lambda d: d["spec"]["failurePolicy"].update(maxRestarts="3"),
        lambda d: d["spec"]["replicatedJobs"][0].pop("name"),
        lambda d: job_of(d).update(paralelism=2),
        lambda d: job_of(d)["podFailurePolicy"]["rules"][0]["onExitCodes"].pop("operator"),
        lambda d: job_of(d)["template"]["spec"]["containers"][0].update(arg=["x"]),
        lambda d: job_of(d)["template"]["spec"].update(terminationGracePeriodSeconds="long"),
        lambda d: job_of(d)["template"]["spec"].update(tolerations=["all"]),
        lambda d: job_of(d)["template"]["spec"]["containers"][0]["livenessProbe"].update(path="/"),
    ],
)
def test_the_check_of_manifests_can_fail(spoil):
    document = job_set(ROLES)
    check(document)
    spoil(document)
    with pytest.raises(
        (AssertionError, ValidationError, kubernetes_validate.ValidationError, ValueError)
    ):
        check(document)


def test_the_example_next_to_the_scripts_is_valid(capsys):
    assert gke.main([str(EXAMPLE)]) == 0
    out, err = capsys.readouterr()
    for document in yaml.safe_load_all(out):
        check(document)
    assert out.splitlines()[:2] == [
        "# trainer: 1 node pool of 4 x ct6e-standard-4t, topology 4x4",
        "# samplers: 1 node pool of 4 x ct5lp-hightpu-4t, topology 2x2, spot",
    ]
    assert err == ""


@pytest.mark.full
@pytest.mark.parametrize(
    ("tree", "role", "jobs", "pods", "chips"),
    [
        (ONE_HOST, "trainer", 1, 1, 8),
        (ROLES, "trainer", 1, 4, 4),
        (ROLES, "sampler", 3, 1, 4),
        (SLICES, "trainer", 2, 2, 4),
        (RICH, "sampler", 2, 4, 4),
    ],
    ids=lambda x: x["name"] if isinstance(x, dict) else str(x),
)
def test_there_is_a_job_for_each_slice_and_a_pod_for_each_host(tree, role, jobs, pods, chips):
    sets = job_sets(tree, role)
    assert sum(replicated(one, role)["replicas"] for one in sets) == jobs
    job = job_of(sets[0], role)
    assert (job["parallelism"], job["completions"]) == (pods, pods)
    resources = container(tree, role)["resources"]
    assert resources["limits"]["google.com/tpu"] == chips
    assert resources["requests"] | resources["limits"] == resources["requests"]
    assert {"cpu", "memory"} <= set(resources["requests"])


def test_a_pod_requests_a_part_of_its_host_and_what_a_role_says_goes_before():
    ours, theirs = (container(RICH, role)["resources"] for role in ("trainer", "sampler"))
    assert ours["requests"]["cpu"] == ours["limits"]["cpu"] == "90"
    assert theirs["requests"] == {"google.com/tpu": 4, "cpu": "56", "memory": "134G"}
    assert theirs["limits"] == {"google.com/tpu": 4}, "of a host of 112 processors and 192 GB"


def worlds(tree, role, fields, jobs, pods):
    """Each pod's rank and world, from its environment as Kubernetes fills it in."""
    found = []
    for job in range(jobs):
        notes = {"coordinator": fields["coordinator"], "job-index": str(job)}
        env = {}
        for name, entry in env_of(tree, role).items():
            if "value" in entry:
                env[name] = entry["value"].replace("$(SLICE_INDEX)", env.get("SLICE_INDEX", ""))
            elif "fieldRef" in entry["valueFrom"]:
                note = entry["valueFrom"]["fieldRef"]["fieldPath"].partition("k8s.io/")[2][:-2]
                env[name] = notes[note]
        tpu = {"TPU_WORKER_HOSTNAMES": ",".join("abcdefgh"[:pods])}
        for index in range(pods):
            one = {**tpu, **env, "JOB_COMPLETION_INDEX": str(index), "TPU_WORKER_ID": str(index)}
            found.append(find(DistributedSection(), one, {}.get))
    return found


@pytest.mark.parametrize("tree", [ONE_HOST, ROLES], ids=lambda t: t["name"])
def test_every_pod_of_the_trainer_finds_a_number_of_its_own(tree):
    document = job_set(tree)
    jobs, pods = replicated(document)["replicas"], job_of(document)["parallelism"]
    at = {"coordinator": f"{tree['name']}-trainer-0-0.{tree['name']}"}
    found = worlds(tree, "trainer", at, jobs, pods)
    assert [p.process_id for p in found] == list(range(jobs * pods))
    assert {p.num_processes for p in found} == {jobs * pods}


def test_the_slices_of_a_trainer_are_one_world():
    given = {name: e["value"] for name, e in env_of(SLICES).items() if "value" in e}
    found = [
        from_jobset(
            {
                **given,
                "JOBSET_COORDINATOR": "slices-trainer-0-0.slices",
                "JOBSET_JOB_INDEX": str(job),
                "JOB_COMPLETION_INDEX": str(index),
            }
        )
        for job in range(2)
        for index in range(2)
    ]
    assert [(p.process_id, p.num_processes) for p in found] == [(n, 4) for n in range(4)]


def test_each_samplers_slice_is_a_world_of_its_own():
    found = worlds(RICH, "sampler", {"coordinator": ""}, jobs=1, pods=4)
    assert [p.process_id for p in found] == [0, 1, 2, 3]
    assert {p.coordinator for p in found} == {
        "rich-sampler-0-sampler-0-0.rich-sampler-0:8482"
    }  # JOBSET-REPLICATEDJOB-JOB-POD.JOBSET, as JobSet names hosts
    first = [
        next(e["value"] for e in job_of(one, "sampler")["template"]["spec"]["containers"][0]["env"]
             if e["name"] == "JOBSET_COORDINATOR")
        for one in job_sets(RICH, "sampler")
    ]  # fmt: skip
    assert len(set(first)) == 2


def test_each_sampler_is_a_workload_of_its_own_in_the_samplers_queue():
    key = "kueue.x-k8s.io/queue-name"
    tree = {**ROLES, "samplers": {**ROLES["samplers"], "queue": "spot-samplers"}}
    assert job_set(tree)["metadata"]["labels"][key] == "tpus"
    sets = job_sets(tree, "sampler")
    assert [d["metadata"]["name"] for d in sets] == [f"roles-sampler-{i}" for i in range(3)]
    assert {d["metadata"]["labels"][key] for d in sets} == {"spot-samplers"}
    assert {d["metadata"]["labels"][key] for d in job_sets(ROLES, "sampler")} == {"tpus"}
    alone = {k: v for k, v in tree.items() if k != "queue"}
    assert key not in job_set(alone)["metadata"]["labels"]
    assert key in job_set(alone, "sampler")["metadata"]["labels"]
    others = [
        json.loads(json.dumps(d).replace(f"roles-sampler-{i}", "X")) for i, d in enumerate(sets)
    ]
    assert others[0] == others[1] == others[2], "they differ in their number alone"


def test_samplers_keep_their_compiled_programs_for_the_next():
    env, mounts = env_of(ROLES, "sampler"), container(ROLES, "sampler")["volumeMounts"]
    cache = env["JAX_COMPILATION_CACHE_DIR"]["value"]
    assert any(m["mountPath"] == "/runs" for m in mounts) and cache.startswith("/runs/.jax_cache")
    own = {**ROLES["samplers"], "env": {"JAX_COMPILATION_CACHE_DIR": "gs://ours/programs"}}
    given = [
        e["value"] for e in container({**ROLES, "samplers": own}, "sampler")["env"]
        if e["name"] == "JAX_COMPILATION_CACHE_DIR"
    ]  # fmt: skip
    assert given == ["gs://ours/programs"]


@pytest.mark.full
@pytest.mark.parametrize("role", ["trainer", "sampler"])
def test_each_pod_is_asked_whether_it_works_and_has_shared_memory(role):
    one, volumes = container(ROLES, role), {v["name"]: v for v in pod(ROLES, role)["volumes"]}
    host, _, port = env_of(ROLES, role)["JAXRL_ASYNC_HEALTH"]["value"].rpartition(":")
    assert host == "0.0.0.0" and {"containerPort": int(port), "protocol": "TCP"} in one["ports"]
    for probe in ("startupProbe", "livenessProbe"):
        assert one[probe]["httpGet"] == {"path": "/healthz", "port": int(port)}
    start = one["startupProbe"]
    assert start["periodSeconds"] * start["failureThreshold"] >= 1800, "it compiles"
    assert volumes["shm"]["emptyDir"] == {"medium": "Memory"}
    assert {"name": "shm", "mountPath": "/dev/shm"} in one["volumeMounts"]


def test_the_metrics_of_the_trainers_first_host_have_a_port_a_name_and_a_monitoring(tmp_path):
    documents = made(ROLES)
    by_kind = {d["kind"]: d for d in documents}
    file = tmp_path / "config.yaml"
    file.write_text(by_kind["ConfigMap"]["data"]["config.yaml"])
    port = int(load(file).metrics.prometheus.rpartition(":")[2])
    assert {"containerPort": port, "protocol": "TCP"} in container(ROLES)["ports"]
    (served,) = by_kind["Service"]["spec"]["ports"]
    assert served["port"] == served["targetPort"] == port
    (endpoint,) = by_kind["PodMonitoring"]["spec"]["endpoints"]
    assert endpoint["port"] == port
    chosen = by_kind["Service"]["spec"]["selector"]
    assert by_kind["PodMonitoring"]["spec"]["selector"]["matchLabels"] == chosen
    assert chosen["jobset.sigs.k8s.io/jobset-name"] == "roles"
    assert chosen["jobset.sigs.k8s.io/replicatedjob-name"] == "trainer"
    without = {d["kind"] for d in made({**ROLES, "monitoring": False})}
    assert "PodMonitoring" not in without and "Service" in without


def test_samplers_join_where_the_trainer_listens(tmp_path):
    config_map = next(d for d in made(ROLES) if d["kind"] == "ConfigMap")
    file = tmp_path / "config.yaml"
    file.write_text(config_map["data"]["config.yaml"])
    config = load(file)
    assert config.mesh.samplers_in == "external"
    assert config.remote.listen == "0.0.0.0:8483"
    sampler, trainer = container(ROLES, "sampler"), container(ROLES)
    assert sampler["command"] == ["python", "-m", "jaxrl_async.sample"]
    assert sampler["args"] == ["--join", "roles-trainer-0-0.roles:8483", "--wait", "3600"]
    assert config.remote.advertise == "roles-trainer-0-0.roles"
    assert {"containerPort": 8483, "protocol": "TCP"} in trainer["ports"]
    assert config.remote.data_port == 8484
    for one in (trainer, sampler):
        assert {"containerPort": 8484, "protocol": "TCP"} in one["ports"]
    secrets = [env_of(ROLES, role)["JAXRL_ASYNC_SECRET"] for role in ("trainer", "sampler")]
    (secret,) = {json.dumps(s) for s in secrets}
    assert "value" not in json.loads(secret)
    assert json.loads(secret)["valueFrom"]["secretKeyRef"]["name"] == "roles-join"


# ---- what restarts after what

PREEMPTIONS = {"onExitCodes", "onPodConditions"}


def actions(job, without=()):
    """Action of the pod failure policy on each sign of a preemption."""
    rules = [rule for rule in job["podFailurePolicy"]["rules"] if rule not in without]
    codes = [rule["onExitCodes"]["values"] for rule in rules if "onExitCodes" in rule]
    assert codes == [[75]]
    return {kind: rule["action"] for rule in rules for kind in PREEMPTIONS & set(rule)}


@pytest.mark.parametrize("tree", [ROLES, RICH], ids=lambda t: t["name"])
def test_a_sampler_comes_back_alone_unless_there_is_no_trainer(tree):
    job = job_of(job_set(tree, "sampler"), "sampler")
    alone = {
        "action": "FailJob",
        "onExitCodes": {"containerName": "run", "operator": "In", "values": [69]},
    }
    assert job["podFailurePolicy"]["rules"][0] == alone
    ignored = actions(job, without=[alone])
    assert ignored == dict.fromkeys(PREEMPTIONS, "Ignore"), "the Job makes another pod"
    assert job["backoffLimit"] == 2**31 - 1, "and never fails otherwise"
    for rule in job_set(tree)["spec"]["failurePolicy"]["rules"]:
        assert rule["targetReplicatedJobs"] == ["trainer"]


@pytest.mark.parametrize("tree", [ONE_HOST, RICH], ids=lambda t: t["name"])
def test_a_trainer_of_one_host_is_restarted_by_its_job(tree):
    document = job_set(tree)
    assert actions(job_of(document)) == dict.fromkeys(PREEMPTIONS, "Ignore")
    assert job_of(document)["backoffLimit"] == 3
    (rule,) = document["spec"]["failurePolicy"]["rules"]
    assert rule["action"] == "FailJobSet"


@pytest.mark.parametrize("tree", [ROLES, SLICES], ids=lambda t: t["name"])
def test_a_trainer_of_several_hosts_restarts_with_all_its_pods_and_no_sampler(tree):
    document, restart = job_set(tree), "RestartJobSet"
    check(document)
    assert [r["name"] for r in document["spec"]["replicatedJobs"]] == ["trainer"]
    job, policy = job_of(document), document["spec"]["failurePolicy"]
    assert actions(job) == dict.fromkeys(PREEMPTIONS, "FailJob")
    assert job["backoffLimit"] == 0 and policy["maxRestarts"] == 3
    preempted, failed = policy["rules"]
    assert preempted["onJobFailureReasons"] == ["PodFailurePolicy"]
    assert preempted["action"] == f"{restart}AndIgnoreMaxRestarts"
    assert failed["action"] == restart and "onJobFailureReasons" not in failed


def test_a_pod_is_given_longer_than_the_run_needs_to_save():
    values = Values.model_validate(ROLES)
    needed = grace_s(gke.run_config(values, ROOT))
    assert pod(ROLES)["terminationGracePeriodSeconds"] > needed > 0
    assert pod(ROLES)["restartPolicy"] == "Never", "podFailurePolicy asks for it"


def test_the_configuration_is_checked_resolved_and_mounted(tmp_path):
    config_map = next(d for d in made(ROLES) if d["kind"] == "ConfigMap")
    file = tmp_path / "config.yaml"
    file.write_text(config_map["data"]["config.yaml"])
    config = load(file)
    assert config.mesh.samplers == 3 and config.run.dir == "/runs" and config.run.resume_or_start
    one = container(ROLES)
    mounts = {m["mountPath"]: m["name"] for m in one["volumeMounts"]}
    volumes = {v["name"]: v for v in pod(ROLES)["volumes"]}
    assert one["args"] == ["/etc/jaxrl_async/config.yaml"]
    assert (
        volumes[mounts["/etc/jaxrl_async"]]["configMap"]["name"] == config_map["metadata"]["name"]
    )


def test_runs_lie_in_a_bucket_or_a_claim():
    bucket = next(v for v in pod(ROLES)["volumes"] if v["name"] == "runs")
    attributes = bucket["csi"]["volumeAttributes"]
    assert attributes["bucketName"] == "ours"
    assert "rename-dir-limit=5000" in attributes["mountOptions"].split(",")
    notes = job_of(job_set(ROLES))["template"]["metadata"]["annotations"]
    assert notes == {
        "gke-gcsfuse/volumes": "true",
        "gke-gcsfuse/cpu-limit": "0",
        "gke-gcsfuse/memory-limit": "0",
        "gke-gcsfuse/ephemeral-storage-limit": "0",
    }
    limited = {**ROLES, "runs": {"bucket": "ours", "sidecar_storage": "200Gi"}}
    notes = job_of(job_set(limited, "sampler"), "sampler")["template"]["metadata"]["annotations"]
    assert notes["gke-gcsfuse/ephemeral-storage-limit"] == "200Gi"
    claim = next(v for v in pod(SLICES)["volumes"] if v["name"] == "runs")
    assert claim["persistentVolumeClaim"]["claimName"] == "new-runs"
    made_claim = next(d for d in made(SLICES) if d["kind"] == "PersistentVolumeClaim")
    assert made_claim["spec"]["resources"]["requests"]["storage"] == "500Gi"


def test_samplers_that_fetch_weights_from_a_folder_mount_it():
    mounts = {m["mountPath"] for m in container(RICH, "sampler")["volumeMounts"]}
    assert mounts == {"/dev/shm", "/runs"}


@pytest.mark.full
@pytest.mark.parametrize(
    ("role", "capacity", "label", "tolerated"),
    [
        ("trainer", "on_demand", None, False),
        ("trainer", "spot", "cloud.google.com/gke-spot", True),
        ("trainer", "flex_start", "cloud.google.com/gke-flex-start", True),
        ("samplers", "queued", "cloud.google.com/gke-queued", True),
        ("samplers", "reserved", "cloud.google.com/reservation-name", False),
    ],
)
def test_nodes_are_of_the_capacity_asked_for(role, capacity, label, tolerated):
    reservation = {"reservation": "ours"} if capacity == "reserved" else {}
    tree = {**ROLES, role: {**ROLES[role], "capacity": capacity, **reservation}}
    check(job_set(tree, role.removesuffix("s")))
    spec = pod(tree, role.removesuffix("s"))
    wanted = {k: v for k, v in spec["nodeSelector"].items() if "tpu" not in k}
    assert wanted == ({label: "ours" if reservation else "true"} if label else {})
    assert [t["key"] for t in spec.get("tolerations", [])] == ([label] if tolerated else [])


def test_samplers_are_on_spot_nodes_and_the_trainer_on_demand_by_default():
    assert "cloud.google.com/gke-spot" in pod(ROLES, "sampler")["nodeSelector"]
    assert "cloud.google.com/gke-spot" not in pod(ROLES)["nodeSelector"]


def test_what_a_role_asks_for_besides_is_in_its_pods_alone():
    spec, one = pod(RICH), container(RICH)
    template = job_of(job_set(RICH))["template"]["metadata"]
    assert {"name": "JAX_COMPILATION_CACHE_DIR", "value": "/cache"} in one["env"]
    assert one["resources"]["requests"]["memory"] == "350Gi"
    assert template["labels"] == {"team": "rl"} and template["annotations"]["note"] == "ours"
    assert spec["nodeSelector"]["pool"] == "a"
    assert spec["nodeSelector"]["cloud.google.com/reservation-name"] == "ours"
    assert {"key": "dedicated", "operator": "Equal", "value": "rl"} in spec["tolerations"]
    mounts = {m["mountPath"]: m.get("readOnly", False) for m in one["volumeMounts"]}
    assert (mounts["/cache"], mounts["/data"]) == (False, True)
    other = json.dumps(job_set(RICH, "sampler"))
    for word in ('"/cache"', "350Gi", "dedicated", "reservation-name"):
        assert word not in other


def test_queued_nodes_are_leased_for_a_time():
    notes = job_set(RICH, "sampler")["metadata"]["annotations"]
    assert notes == {"provreq.kueue.x-k8s.io/maxRunDurationSeconds": "3600"}
    assert "annotations" not in job_set(RICH)["metadata"], "the trainer's nodes are reserved"


def test_the_pods_of_a_slice_share_a_node_pool_and_those_of_one_host_need_none():
    key = "alpha.jobset.sigs.k8s.io/exclusive-topology"
    trainer, sampler = (
        replicated(job_set(ROLES, r), r)["template"] for r in ("trainer", "sampler")
    )
    assert trainer["metadata"]["annotations"] == {key: "cloud.google.com/gke-nodepool"}
    assert "metadata" not in sampler
    assert pod(SLICES)["hostNetwork"] and "hostNetwork" not in pod(ROLES)


def test_secrets_are_only_referred_to():
    assert env_of(ROLES)["HF_TOKEN"] == {
        "name": "HF_TOKEN",
        "valueFrom": {"secretKeyRef": {"name": "hugging-face", "key": "token"}},
    }
    assert "HF_TOKEN" not in env_of(ROLES, "sampler")


@pytest.mark.parametrize(
    ("generation", "topology", "chips", "hosts", "machine"),
    [
        ("v4", "2x2x1", 4, 1, "ct4p-hightpu-4t"),
        ("v4", "4x4x4", 64, 16, "ct4p-hightpu-4t"),
        ("v5e", "1x1", 1, 1, "ct5lp-hightpu-1t"),
        ("v5e", "2x4", 8, 1, "ct5lp-hightpu-8t"),
        ("v5e", "16x16", 256, 64, "ct5lp-hightpu-4t"),
        ("v5p", "4x8x8", 256, 64, "ct5p-hightpu-4t"),
        ("v6e", "4x8", 32, 8, "ct6e-standard-4t"),
        ("tpu7x", "2x2x2", 8, 2, "tpu7x-standard-4t"),
    ],
)
def test_a_topology_says_how_many_hosts_and_which(generation, topology, chips, hosts, machine):
    tpu = Tpu(generation=generation, topology=topology)
    assert (tpu.chips, tpu.hosts, tpu.machine_type) == (chips, hosts, machine)


SAMPLERS = {"tpu": {"generation": "v6e", "topology": "2x2"}}


def tpu(**fields):
    """A trainer on these slices."""
    return {"trainer": {"tpu": fields}}


def role(**fields):
    """ONE_HOST's trainer with more values."""
    return {"trainer": {**ONE_HOST["trainer"], **fields}}


def samplers(**fields):
    """Samplers and their secret."""
    return {"samplers": {**SAMPLERS, **fields}, "join_secret": {"name": "a", "key": "b"}}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (tpu(generation="v6e", topology="4x5"), "not a slice of v6e"),
        (tpu(generation="v5p", topology="4x4"), "not a slice of v5p"),
        (tpu(generation="v5p", topology="8x4x4"), "A <= B <= C"),
        (tpu(generation="v4", topology="16x16x32"), "up to 4096 chips"),
        (
            tpu(generation="v6e", topology="4x4", chips_per_host=8),
            "hosts of a 4x4 slice of v6e have 4 chips",
        ),
        (tpu(generation="v5e", topology="2x4", slices=2), "use a larger topology"),
        (tpu(generation="v7", topology="4x4"), "trainer.tpu.generation"),
        (tpu(generation="v6e", topolgy="4x4"), "did you mean trainer.tpu.topology?"),
        ({"tpu": {"generation": "v6e"}}, "trainer.tpu and samplers.tpu"),
        ({"imagee": "x"}, "did you mean image?"),
        ({"name": "Upper"}, "name"),
        ({"runs": {}}, "a bucket or a claim"),
        ({"runs": {"claim": "a", "bucket": "b"}}, "a bucket or a claim"),
        ({"runs": {"claim": "a", "storage_class": "b"}}, "set runs.create_gib"),
        ({"runs": {"bucket": "b"}}, "needs service_account"),
        ({"config": "configs/nothing.yaml"}, "nothing.yaml"),
        ({"overrides": ["mesh.samplerz=2"]}, "did you mean mesh.sampler?"),
        ({"overrides": ["mesh.trainer.fsdp=8"]}, "hosts of ct5lp-hightpu-8t have 8"),
        (
            tpu(generation="v6e", topology="4x4"),
            "multiples of the number of processes (4)",
        ),
        (
            {
                **tpu(generation="v6e", topology="4x4"),
                "overrides": ["mesh.trainer.fsdp=8", "mesh.sampler.tensor=2", "mesh.samplers=4"],
            },
            "give the samplers separate slices (samplers)",
        ),
        (
            {
                **tpu(generation="v6e", topology="4x4"),
                "overrides": [
                    "mesh.trainer.fsdp=16",
                    "mesh.sampler.tensor=4",
                    "mesh.colocated=true",
                ],
            },
            "nor on each host alone (a sampler with mesh.colocated)",
        ),
        ({"overrides": ["mesh.samplers_in=processes"]}, "set samplers (their slices)"),
        (role(capacity="reserved"), "set both"),
        (role(reservation="ours"), "set both"),
        (role(capacity="queued"), "a Kueue LocalQueue"),
        (role(env={"JOBSET_JOBS": "2"}), "JOBSET_JOBS is set by the manifests"),
        (role(resources={"google.com/tpu": "4"}), "the chips come from tpu"),
        (
            role(volumes=[{"name": "runs", "mount_path": "/x", "source": {"emptyDir": {}}}]),
            "runs are taken",  # as are config and shm
        ),
        (role(volumes=[{"name": "a", "mount_path": "/x", "source": {}}]), "volumes.0.source"),
        (role(label={}), "did you mean trainer.labels?"),
        ({"max_run_s": 60}, "max_run_s is for capacity=queued"),
        ({"samplers": SAMPLERS}, "kubectl create secret generic one-join"),
        ({"join_secret": {"name": "a", "key": "b"}}, "set samplers and join_secret, or neither"),
        (samplers(replicas=0), "samplers.replicas"),
        ({"name": "a" * 36, **samplers(replicas=2)}, "name is too long, by 1"),
        (samplers(replicas=2, least=3), "between samplers.least (3)"),
        (samplers(replicas=4, most=3), "and samplers.most (3)"),
        ({"restart_job": True}, "restart_job is not a value"),
        (
            samplers(tpu={"generation": "v5p", "topology": "2x2x2", "slices": 2}),
            "set samplers.replicas instead",
        ),
        (samplers(tpu={"generation": "v6e", "topology": "4x4"}), "set mesh.sampler.tensor=16"),
        (
            {**samplers(), "overrides": ["mesh.trainer.fsdp=4", "mesh.sampler.tensor=8"]},
            "set mesh.sampler.tensor=4",
        ),
    ],
)
def test_what_cannot_run_is_refused_with_the_way_out(tmp_path, capsys, change, message):
    file = tmp_path / "values.yaml"
    file.write_text(yaml.safe_dump({**ONE_HOST, **change}))
    assert gke.main([str(file)]) == 2
    out, err = capsys.readouterr()
    assert message.lower() in err.lower() and out == ""


@pytest.mark.parametrize("generation", ["v4", "v5p", "tpu7x"])
def test_samplers_in_threads_take_a_part_of_each_host_where_the_compiler_lets_them(generation):
    devices = 2 if generation == "tpu7x" else 1
    axes = [f"mesh.trainer.fsdp={4 * devices}", f"mesh.sampler.tensor={2 * devices}"]
    tree = {
        **ONE_HOST,
        **tpu(generation=generation, topology="2x2x2"),
        "overrides": [*axes, "mesh.samplers=2"],
    }
    values = Values.model_validate(tree)
    assert list(gke.warnings(values, gke.run_config(values, ROOT))) == []


def test_a_warning_names_idle_chips():
    values = Values.model_validate({**ONE_HOST, "overrides": []})
    (message,) = gke.warnings(values, gke.run_config(values, ROOT))
    assert "2 of 8 devices" in message
    values = Values.model_validate({**ONE_HOST, **samplers(), "overrides": ["mesh.trainer.fsdp=8"]})
    (message,) = gke.warnings(values, gke.run_config(values, ROOT))
    assert "mesh.sampler uses 1 of 4 devices" in message


def test_a_warning_names_the_short_grace_of_spot_nodes():
    values = Values.model_validate({**ONE_HOST, **role(capacity="spot")})
    (message,) = gke.warnings(values, gke.run_config(values, ROOT))
    assert "spot node has at most 15 s" in message


def test_a_wrong_name_of_a_function_makes_no_manifest(tmp_path, capsys):
    tree = {**ONE_HOST, "overrides": [*ONE_HOST["overrides"], "algorithm.loss=ppo_clp"]}
    values = tmp_path / "values.yaml"
    values.write_text(yaml.safe_dump(tree), encoding="utf-8")
    assert gke.main([str(values)]) == 2
    message = capsys.readouterr()
    assert not message.out and "did you mean 'ppo_clip'" in message.err


def test_a_pod_that_starts_again_may_resume_what_the_example_would_replace():
    """configs/addition.yaml replaces an old run; a pod that was preempted must not."""
    config = gke.run_config(
        load_values(ROOT / "tpu_scripts" / "gke_values.yaml"), ROOT / "tpu_scripts"
    )
    assert config.run.resume_or_start and not config.run.overwrite
    assert settled(config.run).resume is False, "and the check at the start lets it begin"
