"""Samplers on GKE follow the trainer's need: kubectl's part is played by a cluster in memory."""

import json
import math

import pytest
import yaml

from jaxrl_async.launch import gke_scale
from jaxrl_async.launch.gke_scale import step_of
from jaxrl_async.metrics.prometheus import gauge_name

TEST = {
    "name": "run",
    "image": "image:1",
    "overrides": ["mesh.trainer.fsdp=4", "mesh.sampler.tensor=4"],
    "trainer": {"tpu": {"generation": "v6e", "topology": "2x2"}},
    "samplers": {
        "replicas": 2, "least": 1, "most": 5, "queue": "spot",
        "tpu": {"generation": "v6e", "topology": "2x2"},
    },
    "join_secret": {"name": "a", "key": "b"},
    "runs": {"claim": "runs"},
}  # fmt: skip


class Cluster:
    """JobSets, and a trainer whose step needs so much of the samplers."""

    def __init__(self, samplers: int, needed: float) -> None:
        self.sets = {"run": self.made("run", "trainer")}
        for i in range(samplers):
            self.sets[f"run-sampler-{i}"] = self.made(f"run-sampler-{i}", "sampler")
        self.needed, self.step, self.pending, self.looks = needed, 0, set(), 0
        self.down = False

    @staticmethod
    def made(name: str, role: str) -> dict:
        labels = {"app.kubernetes.io/instance": "run", "jaxrl-async/role": role}
        return {"metadata": {"name": name, "labels": labels}, "status": {}}

    @property
    def samplers(self) -> list[str]:
        return sorted(name for name in self.sets if name != "run")

    def metrics(self) -> str:
        living = len([name for name in self.samplers if name not in self.pending])
        self.step += 1
        busy_s = 3.0 * self.needed / max(living, 1e-9)  # a step takes the slower of the two
        step_s = max(3.0, busy_s)
        values = {
            "time/step_s": step_s,
            "time/wait_data_s": step_s - 3.0,
            "sampler/idle_share": 1 - min(1.0, busy_s / step_s),
            "sampler/living": living,
        }
        lines = [f'{gauge_name(key)}{{run="run"}} {value}' for key, value in values.items()]
        return (
            "# HELP jaxrl_step Updates.\n"
            + f'jaxrl_step{{run="run"}} {self.step}.0\n'
            + "\n".join(lines)
        )

    def __call__(self, arguments, text: str) -> str:
        self.looks += 1
        if self.down:
            raise OSError("connection refused")
        if arguments[:2] == ["get", "--raw"]:
            assert arguments[2].endswith("/services/run-metrics:8485/proxy/metrics")
            return self.metrics()
        if arguments[0] == "get":
            return json.dumps({"items": list(self.sets.values())})
        if arguments[0] == "apply":
            document = yaml.safe_load(text)
            assert document["kind"] == "JobSet" and document["metadata"]["name"] not in self.sets
            assert document["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] == "spot"
            self.sets[document["metadata"]["name"]] = {**document, "status": {}}
        elif arguments[:2] == ["delete", "jobset"]:
            del self.sets[arguments[2]]
        else:
            raise AssertionError(arguments)
        return ""


@pytest.fixture
def drive(tmp_path):
    """Scale a cluster for so many looks; then its trainer ends."""
    file = tmp_path / "values.yaml"

    def run(cluster: Cluster, looks: int, **changes) -> int:
        config = str(gke_scale.Path(__file__).parents[2] / "configs" / "addition.yaml")
        file.write_text(yaml.safe_dump({**TEST, "config": config, **changes}))
        left = [looks]

        def sleep(_: float) -> None:
            left[0] -= 1
            if left[0] <= 0:
                cluster.down = False
                cluster.sets["run"]["status"]["terminalState"] = "Completed"

        return gke_scale.main([str(file)], kubectl=cluster, sleep=sleep)

    return run


def test_samplers_are_added_while_the_trainer_waits_up_to_the_most(drive):
    cluster = Cluster(2, needed=4)
    assert drive(cluster, 60) == 0
    assert cluster.samplers == [f"run-sampler-{i}" for i in range(4)]
    cluster = Cluster(2, needed=40)
    assert drive(cluster, 60) == 0
    assert cluster.samplers == [f"run-sampler-{i}" for i in range(5)], "samplers.most"


def test_samplers_that_idle_are_removed_one_by_one_the_highest_number_first(drive):
    cluster = Cluster(5, needed=1.8)
    assert drive(cluster, 120) == 0
    assert cluster.samplers == ["run-sampler-0", "run-sampler-1"]
    cluster = Cluster(4, needed=0.1)
    assert drive(cluster, 120) == 0
    assert cluster.samplers == ["run-sampler-0"], "samplers.least"


def test_numbers_are_taken_up_again_and_what_waits_in_the_queue_is_not_doubled(drive):
    cluster = Cluster(3, needed=4)
    del cluster.sets["run-sampler-0"]  # preempted for good
    assert drive(cluster, 30) == 0
    assert cluster.samplers == [f"run-sampler-{i}" for i in range(4)]
    cluster = Cluster(2, needed=40)
    cluster.pending = {"run-sampler-2", "run-sampler-3", "run-sampler-4"}
    assert drive(cluster, 60) == 0
    assert len(cluster.samplers) == 4, "twice as many at once, and no more until those draw"


def test_a_cluster_that_does_not_answer_is_asked_again(drive, capsys):
    cluster = Cluster(2, needed=4)
    cluster.down = True
    assert drive(cluster, 3) == 0
    assert capsys.readouterr().out.count("does not answer") == 1


def test_a_run_without_samplers_is_refused(drive, capsys):
    assert drive(Cluster(0, needed=1), 1, samplers=None, join_secret=None) == 2
    assert "no samplers to scale" in capsys.readouterr().err


def test_metrics_of_no_step_or_of_other_things_count_as_none():
    assert step_of("") is None
    assert step_of('jaxrl_step{run="a"} 3.0\n') is None
    whole = Cluster(1, needed=1).metrics()
    assert step_of(whole)[0] == 1
    assert math.isclose(step_of(whole)[1]["time/step_s"], 3.0)
