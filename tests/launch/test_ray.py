"""A run on a local Ray cluster, with stand-ins for trainer and sampler: kills, scaling, the end."""

import importlib
import os
import signal
import threading
import time
from pathlib import Path

import pytest

from jaxrl_async.launch.hardware import parse_hardware
from jaxrl_async.launch.ray import RayPrograms, fleet_plan, ray_config, run_fleet
from jaxrl_async.launch.ray_cluster import RayCluster

ray = pytest.importorskip("ray", reason="needs ray: pip install 'jaxrl_async[ray]'")
Cluster = importlib.import_module("ray.cluster_utils").Cluster
pytestmark = [pytest.mark.exhaustive, pytest.mark.filterwarnings("default")]

ROOT = Path(__file__).parents[2]
STAND_IN = str(Path(__file__).parent / "ray_standin.py")


@pytest.fixture(scope="module")
def cluster():
    os.environ["PYTHONPATH"] = f"{ROOT}:{os.environ.get('PYTHONPATH', '')}"
    os.environ["TPU_NAME"] = "a"
    nodes = Cluster(initialize_head=True, head_node_args={"num_cpus": 8, "num_gpus": 4})
    for number in range(2):  # a slice of two hosts, as Ray describes one
        labels = {
            "ray.io/tpu-slice-name": "a",
            "ray.io/tpu-worker-id": str(number),
            "ray.io/tpu-pod-type": "v5p-16",
            "ray.io/tpu-topology": "2x2x2",
            "ray.io/accelerator-type": "TPU-V5P",
        }
        head = {} if number else {"TPU-v5p-16-head": 1}
        nodes.add_node(num_cpus=1, resources={"TPU": 4, **head}, labels=labels)
    yield RayCluster(nodes.address, "")
    ray.shutdown()
    nodes.shutdown()
    del os.environ["TPU_NAME"]


class Events:
    """What the stand-ins have written."""

    def __init__(self, folder):
        self.file = folder / "events"

    def all(self, kind=""):
        text = self.file.read_text() if self.file.exists() else ""
        return [line.split()[1] for line in text.splitlines() if line.startswith(kind)]

    def wait(self, kind, count, timeout_s=25):
        end = time.monotonic() + timeout_s
        while len(self.all(kind)) < count:
            assert time.monotonic() < end, (kind, count, self.file.read_text())
            time.sleep(0.1)
        return self.all(kind)


def running(pid):
    try:
        os.kill(int(pid), 0)
    except ProcessLookupError:
        return False
    return "zombie" not in Path(f"/proc/{pid}/status").read_text()


def run(cluster, tmp_path, do, *, steps, bounds=(1, 1), trainer="cpu:1", sampler="cpu:1"):
    """Run stand-ins while `do(events)` happens on another thread; return code and events."""
    cluster._folder = str(tmp_path)
    overrides = [f"run.dir={tmp_path}", "run.name=a", f"run.steps={steps}"]
    config = ray_config(str(ROOT / "configs/addition.yaml"), overrides, bounds[0])
    plan = fleet_plan(
        config,
        (parse_hardware(trainer), parse_hardware(sampler)),
        bounds,
        secret="s3cret",
        programs=RayPrograms(train=(STAND_IN, "train", "{config}"), sample=(STAND_IN, "sample")),
    )
    events, failures, over = Events(tmp_path / "a"), [], threading.Event()

    def act():
        try:
            do(events)
        except BaseException as error:
            failures.append(error)
            if not over.is_set():
                os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=act, daemon=True)
    thread.start()
    code = run_fleet(plan, cluster, tick_s=0.2)
    over.set()
    thread.join(30)
    assert not failures, failures
    pids = {*events.all("join"), *events.all("train")}
    end = time.monotonic() + 10
    while any(map(running, pids)) and time.monotonic() < end:
        time.sleep(0.1)
    assert not [p for p in pids if running(p)], "nothing is left"
    return code, events


def test_a_killed_sampler_comes_back_and_a_second_is_added_and_removed(cluster, tmp_path, capfd):
    """The trainer waits with one; then it is slow, and needs no second."""

    def do(events):
        (first,) = events.wait("join", 1)
        os.kill(int(first), signal.SIGKILL)
        events.wait("join", 3)  # the same again, and another since the trainer waits
        (tmp_path / "a" / "slow").touch()
        events.wait("leave", 1)

    code, events = run(cluster, tmp_path, do, steps=200, bounds=(1, 2))
    assert code == 0 and len(events.all("lost")) >= 1
    assert len(events.all("train")) == 1, "the trainer went on"
    assert len(set(events.all("join"))) == 3
    output = capfd.readouterr().err
    assert "sampler 0: ended with code 137; restarts in 2 s" in output
    assert "samplers: 1 -> 2 (the trainer waits 50% of the time, samplers idle 0%)" in output
    assert "samplers: 2 -> 1 (the trainer waits 0% of the time, samplers idle 75%)" in output
    assert "samplers: 2 -> 3" not in output


def test_a_killed_trainer_resumes_and_its_samplers_join_again(cluster, tmp_path):
    def do(events):
        (trainer,) = events.wait("train", 1)
        events.wait("join", 2)
        os.kill(int(trainer), signal.SIGKILL)
        events.wait("join", 4)

    code, events = run(cluster, tmp_path, do, steps=60, bounds=(2, 2))
    assert code == 0 and events.all("end") == ["60"]
    assert len(set(events.all("join"))) == 2, "the same processes"


def test_actors_that_are_lost_take_their_processes_along_and_are_replaced(cluster, tmp_path):
    def do(events):
        (first,) = events.wait("join", 1)
        parent = int(Path(f"/proc/{first}/stat").read_text().split()[3])
        assert b"RayHost" in Path(f"/proc/{parent}/cmdline").read_bytes()
        os.kill(parent, signal.SIGKILL)
        events.wait("join", 2)
        assert not running(first)

    code, events = run(cluster, tmp_path, do, steps=60)
    assert code == 0 and len(events.all("join")) == 2


def test_groups_of_several_hosts_ask_for_as_many(cluster, tmp_path):
    """There is one host, so that a second is not to be had: nothing starts, and it can be ended."""

    def do(events):
        time.sleep(3)
        assert not events.all()
        os.kill(os.getpid(), signal.SIGINT)

    code, _ = run(cluster, tmp_path, do, steps=60, trainer="gpu:1x2")
    assert code == 0


def test_a_slice_is_taken_whole_and_waited_for(cluster, tmp_path):
    """Both hosts of the slice run the trainer's command; a sampler on a slice finds none free."""

    def do(events):
        events.wait("train", 2)
        time.sleep(5)
        assert not events.all("join")
        os.kill(os.getpid(), signal.SIGTERM)

    hardware = {"trainer": "tpu:v5p:2x2x2", "sampler": "tpu:v5p:2x2x2"}
    code, events = run(cluster, tmp_path, do, steps=60, **hardware)
    assert code == 75 and len(set(events.all("train"))) == 2


@pytest.mark.parametrize(("number", "expected"), [(signal.SIGINT, 75), (signal.SIGTERM, 75)])
def test_ctrl_c_lets_the_trainer_save_and_ends_all(cluster, tmp_path, number, expected):
    def do(events):
        events.wait("join", 1)
        os.kill(os.getpid(), number)

    code, events = run(cluster, tmp_path, do, steps=10_000)
    assert code == expected and len(events.all("end")) == 1
