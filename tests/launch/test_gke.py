"""Manifests for GKE: what the published schemas allow, and what they must say."""

import json
from pathlib import Path

import kubernetes_validate
import pytest
import yaml
from kubeflow_trainer_api.models.jobset_v1alpha2_job_set import JobsetV1alpha2JobSet
from pydantic import ValidationError

from jaxrl_async.config.load import load
from jaxrl_async.errors import ConfigError
from jaxrl_async.launch import gke
from jaxrl_async.launch.distributed import from_jobset

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "tpu_scripts" / "gke_values.yaml"
KUBERNETES = "1.33"

ONE_HOST = {
    "name": "one",
    "image": "us-docker.pkg.dev/ours/images/jaxrl_async:1",
    "config": str(ROOT / "configs/addition.yaml"),
    "overrides": ["mesh.trainer.fsdp=4", "mesh.sampler.tensor=4"],
    "tpu": {"generation": "v5e", "topology": "2x4"},
    "runs": {"claim": "runs"},
}
HOSTS = {
    **ONE_HOST,
    "name": "hosts",
    "overrides": ["mesh.trainer.fsdp=8", "mesh.sampler.tensor=2", "mesh.samplers=4"],
    "tpu": {"generation": "v6e", "topology": "4x4", "spot": True},
    "runs": {"bucket": "ours"},
    "service_account": "trainer",
    "queue": "tpus",
    "secrets": {"HF_TOKEN": {"name": "hugging-face", "key": "token"}},
}
SLICES = {
    **ONE_HOST,
    "name": "slices",
    "overrides": ["mesh.trainer.fsdp=8", "mesh.sampler.tensor=2", "mesh.samplers=4"],
    "tpu": {"generation": "v5p", "topology": "2x2x2", "slices": 2},
    "runs": {"claim": "new-runs", "create_gib": 500, "storage_class": "filestore-rwx"},
    "run_as_user": None,
}
ALL = [ONE_HOST, HOSTS, SLICES]


def made(tree):
    """The manifests of a tree of values, as kubectl reads them."""
    values = gke.Values.model_validate(tree)
    config = gke.run_config(values, ROOT)
    return list(yaml.safe_load_all(gke.as_yaml(values, gke.manifests(values, config))))


def job_set(tree):
    return next(d for d in made(tree) if d["kind"] == "JobSet")


def pod(tree):
    return job_of(job_set(tree))["template"]["spec"]


def job_of(document):
    return document["spec"]["replicatedJobs"][0]["template"]["spec"]


def check(document):
    """Raise where the published schemas do not know the document, or something in it."""
    if document["kind"] != "JobSet":
        kubernetes_validate.validate(document, KUBERNETES, strict=True)
        return
    known = JobsetV1alpha2JobSet.from_dict(document)
    assert json.loads(known.to_json()) == document, "the model drops what it does not know"
    for replicated in document["spec"]["replicatedJobs"]:
        job = {"apiVersion": "batch/v1", "kind": "Job", "metadata": {}, **replicated["template"]}
        kubernetes_validate.validate(job, KUBERNETES, strict=True)


@pytest.mark.parametrize("tree", ALL, ids=lambda t: t["name"])
def test_manifests_are_what_the_published_schemas_allow(tree):
    documents = made(tree)
    assert [d["kind"] for d in documents if d["kind"] != "PersistentVolumeClaim"] == [
        "ConfigMap",
        "JobSet",
    ]
    for document in documents:
        check(document)


@pytest.mark.parametrize(
    "spoil",
    [
        lambda d: d["spec"].update(failurePolicies={}),
        lambda d: d["spec"]["failurePolicy"]["rules"][0].pop("action"),
        lambda d: d["spec"]["failurePolicy"].update(maxRestarts="3"),
        lambda d: d["spec"]["replicatedJobs"][0].pop("name"),
        lambda d: job_of(d).update(paralelism=2),
        lambda d: job_of(d)["podFailurePolicy"]["rules"][0]["onExitCodes"].pop("operator"),
        lambda d: job_of(d)["template"]["spec"]["containers"][0].update(arg=["x"]),
        lambda d: job_of(d)["template"]["spec"].update(terminationGracePeriodSeconds="long"),
    ],
)
def test_the_check_of_manifests_can_fail(spoil):
    document = job_set(HOSTS)
    check(document)
    spoil(document)
    with pytest.raises(
        (AssertionError, ValidationError, kubernetes_validate.ValidationError, ValueError)
    ):
        check(document)


def test_the_example_beside_the_scripts_is_valid(capsys):
    assert gke.main([str(EXAMPLE)]) == 0
    out, err = capsys.readouterr()
    for document in yaml.safe_load_all(out):
        check(document)
    assert out.startswith("# 1 node pool of 4 x ct6e-standard-4t, topology 4x4, spot;")
    assert "spot node has 15 s" in err


@pytest.mark.parametrize(
    ("tree", "jobs", "pods", "chips"),
    [(ONE_HOST, 1, 1, 8), (HOSTS, 1, 4, 4), (SLICES, 2, 2, 4)],
    ids=lambda x: x["name"] if isinstance(x, dict) else str(x),
)
def test_there_is_a_job_for_each_slice_and_a_pod_for_each_host(tree, jobs, pods, chips):
    document = job_set(tree)
    assert document["spec"]["replicatedJobs"][0]["replicas"] == jobs
    job = job_of(document)
    assert (job["parallelism"], job["completions"]) == (pods, pods)
    resources = job["template"]["spec"]["containers"][0]["resources"]
    assert resources["limits"] == resources["requests"] == {"google.com/tpu": chips}


@pytest.mark.parametrize("tree", ALL, ids=lambda t: t["name"])
def test_every_pod_finds_a_number_of_its_own(tree):
    document = job_set(tree)
    env = {e["name"]: e for e in pod(tree)["containers"][0]["env"]}
    assert "jobset.sigs.k8s.io/coordinator" in json.dumps(env["JOBSET_COORDINATOR"])
    jobs = document["spec"]["replicatedJobs"][0]["replicas"]
    pods = job_of(document)["parallelism"]
    given = {name: e["value"] for name, e in env.items() if "value" in e}
    places = [
        from_jobset(
            {
                **given,
                "JOBSET_COORDINATOR": "slices-slice-0-0.slices",
                "JOBSET_JOB_INDEX": str(job),
                "JOB_COMPLETION_INDEX": str(index),
            }
        )
        for job in range(jobs)
        for index in range(pods)
    ]
    assert [p.process_id for p in places] == list(range(jobs * pods))
    assert {p.num_processes for p in places} == {jobs * pods}


def test_a_preemption_restarts_all_pods_and_does_not_count():
    document = job_set(HOSTS)
    job, policy = job_of(document), document["spec"]["failurePolicy"]
    by_rule = [rule for rule in job["podFailurePolicy"]["rules"] if rule["action"] == "FailJob"]
    assert [75] in [r["onExitCodes"]["values"] for r in by_rule if "onExitCodes" in r]
    assert any("onPodConditions" in rule for rule in by_rule)
    (rule,) = policy["rules"]
    assert rule["onJobFailureReasons"] == ["PodFailurePolicy"]
    assert rule["action"] == "RestartJobSetAndIgnoreMaxRestarts"
    assert job["backoffLimit"] == 0 and policy["maxRestarts"] == 3
    assert job["template"]["spec"]["restartPolicy"] == "Never", "podFailurePolicy asks for it"


def test_a_pod_is_given_longer_than_the_run_needs_to_save():
    values = gke.Values.model_validate(HOSTS)
    needed = gke.grace_s(gke.run_config(values, ROOT))
    assert pod(HOSTS)["terminationGracePeriodSeconds"] > needed > 0


def test_the_configuration_is_checked_resolved_and_mounted(tmp_path):
    config_map = next(d for d in made(HOSTS) if d["kind"] == "ConfigMap")
    file = tmp_path / "config.yaml"
    file.write_text(config_map["data"]["config.yaml"])
    config = load(file)
    assert config.mesh.samplers == 4 and config.run.dir == "/runs" and config.run.resume_or_start
    (container,) = pod(HOSTS)["containers"]
    mounts = {m["mountPath"]: m["name"] for m in container["volumeMounts"]}
    volumes = {v["name"]: v for v in pod(HOSTS)["volumes"]}
    assert container["args"] == ["/etc/jaxrl_async/config.yaml"]
    assert (
        volumes[mounts["/etc/jaxrl_async"]]["configMap"]["name"] == config_map["metadata"]["name"]
    )


def test_runs_lie_in_a_bucket_or_a_claim():
    bucket = next(v for v in pod(HOSTS)["volumes"] if v["name"] == "runs")
    assert bucket["csi"]["volumeAttributes"]["bucketName"] == "ours"
    notes = job_of(job_set(HOSTS))["template"]["metadata"]["annotations"]
    assert notes["gke-gcsfuse/volumes"] == "true"
    claim = next(v for v in pod(SLICES)["volumes"] if v["name"] == "runs")
    assert claim["persistentVolumeClaim"]["claimName"] == "new-runs"
    made_claim = next(d for d in made(SLICES) if d["kind"] == "PersistentVolumeClaim")
    assert made_claim["spec"]["accessModes"] == ["ReadWriteMany"]


def test_kueue_spot_and_slices_are_said_where_they_are_asked_for():
    hosts, one = job_set(HOSTS), job_set(ONE_HOST)
    assert hosts["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] == "tpus"
    assert "kueue.x-k8s.io/queue-name" not in one["metadata"]["labels"]
    assert pod(HOSTS)["nodeSelector"]["cloud.google.com/gke-spot"] == "true"
    assert pod(HOSTS)["tolerations"] and "tolerations" not in pod(ONE_HOST)
    assert "annotations" in hosts["metadata"] and "annotations" not in one["metadata"]
    assert pod(SLICES)["hostNetwork"] and "hostNetwork" not in pod(HOSTS)


def test_secrets_are_only_referred_to():
    token = next(e for e in pod(HOSTS)["containers"][0]["env"] if e["name"] == "HF_TOKEN")
    assert token == {
        "name": "HF_TOKEN",
        "valueFrom": {"secretKeyRef": {"name": "hugging-face", "key": "token"}},
    }


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
    ],
)
def test_a_topology_says_how_many_hosts_and_which(generation, topology, chips, hosts, machine):
    tpu = gke.Tpu(generation=generation, topology=topology)
    assert (tpu.chips, tpu.hosts, tpu.machine_type) == (chips, hosts, machine)


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"tpu": {"generation": "v6e", "topology": "4x5"}}, "not a slice of v6e"),
        ({"tpu": {"generation": "v5p", "topology": "4x4"}}, "not a slice of v5p"),
        ({"tpu": {"generation": "v5p", "topology": "8x4x4"}}, "A <= B <= C"),
        ({"tpu": {"generation": "v4", "topology": "16x16x32"}}, "up to 4096 chips"),
        (
            {"tpu": {"generation": "v6e", "topology": "4x4", "chips_per_host": 8}},
            "hosts of a 4x4 slice of v6e have 4 chips",
        ),
        ({"tpu": {"generation": "v5e", "topology": "2x4", "slices": 2}}, "use a larger topology"),
        ({"tpu": {"generation": "v7", "topology": "4x4"}}, "tpu.generation"),
        ({"tpu": {"generation": "v6e", "topolgy": "4x4"}}, "did you mean tpu.topology?"),
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
            {"tpu": {"generation": "v6e", "topology": "4x4"}},
            "multiples of the number of processes (4)",
        ),
    ],
)
def test_what_cannot_run_is_refused_with_the_way_out(tmp_path, capsys, change, told):
    file = tmp_path / "values.yaml"
    file.write_text(yaml.safe_dump({**ONE_HOST, **change}))
    assert gke.main([str(file)]) == 2
    out, err = capsys.readouterr()
    assert told.lower() in err.lower() and out == ""


def test_chips_that_stand_idle_are_told():
    values = gke.Values.model_validate({**ONE_HOST, "overrides": []})
    (told,) = gke.warnings(values, gke.run_config(values, ROOT))
    assert "2 of 8 chips" in told


def test_a_run_in_several_processes_is_checked_before_it_is_sent():
    values = gke.Values.model_validate(
        {**HOSTS, "overrides": [*HOSTS["overrides"], "data.curriculum=hard_first"]}
    )
    with pytest.raises(ConfigError, match=r"data\.curriculum works in one process only"):
        gke.run_config(values, ROOT)


def test_a_wrong_name_of_a_function_makes_no_manifest(tmp_path, capsys):
    tree = {**ONE_HOST, "overrides": [*ONE_HOST["overrides"], "algorithm.loss=ppo_clp"]}
    values = tmp_path / "values.yaml"
    values.write_text(yaml.safe_dump(tree), encoding="utf-8")
    assert gke.main([str(values)]) == 2
    told = capsys.readouterr()
    assert not told.out and "did you mean 'ppo_clip'" in told.err
