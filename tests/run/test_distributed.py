"""Who this process is among several: every source, what contradicts, and what is refused."""

import json
import os
import socket
import subprocess
import sys

import pytest

from jaxrl_async.config.processes import run_devices_per_process
from jaxrl_async.config.schema import Config, DistributedSection
from jaxrl_async.errors import ConfigError
from jaxrl_async.run import distributed
from jaxrl_async.run.distributed import find, from_settings, from_tpu, join_processes

HERE = DistributedSection(coordinator="head:1234", num_processes=4, process_id=3)
JAX = {
    "JAX_COORDINATOR_ADDRESS": "head:99",
    "JAX_NUM_PROCESSES": "2",
    "JAX_PROCESS_ID": "1",
}
JOBSET = {
    "JOBSET_COORDINATOR": "run-slice-0-0.run",
    "JOBSET_JOBS": "2",
    "JOBSET_PODS_PER_JOB": "4",
    "JOBSET_JOB_INDEX": "1",
    "JOB_COMPLETION_INDEX": "2",
}
POD = {"TPU_WORKER_HOSTNAMES": "a,b,c,d", "TPU_WORKER_ID": "2"}
SLICES = {
    **POD,
    "MEGASCALE_NUM_SLICES": "2",
    "MEGASCALE_SLICE_ID": "1",
    "MEGASCALE_COORDINATOR_ADDRESS": "first:8080",
}
VM = {
    "worker-network-endpoints": "unknown:8470:10.0.0.5,unknown:8470:10.0.0.6",
    "agent-worker-number": "1",
    "tpu-env": "ACCELERATOR_TYPE: 'v5litepod-8'\nWORKER_ID: '1'",
}


def rank_of(section=None, env=None, vm=None):
    """(process, of how many, coordinator) or None."""
    rank = find(section or DistributedSection(), env or {}, (vm or {}).get)
    return rank and (rank.process_id, rank.num_processes, rank.coordinator)


@pytest.mark.parametrize(
    ("section", "env", "vm", "expected"),
    [
        (None, {}, {}, None),
        (HERE, {}, {}, (3, 4, "head:1234")),
        (None, JAX, {}, (1, 2, "head:99")),
        (None, JOBSET, {}, (6, 8, "run-slice-0-0.run:8482")),
        (None, POD, {}, (2, 4, "a:8482")),
        (None, SLICES, {}, (6, 8, "first:8482")),
        (None, JOBSET | SLICES, {}, (6, 8, "run-slice-0-0.run:8482")),
        (None, {}, VM, (1, 2, "10.0.0.5:8482")),
        (None, {"TPU_WORKER_HOSTNAMES": "localhost"}, {}, (0, 1, "localhost:8482")),
        (DistributedSection(detect=False), SLICES | JAX, VM, None),
    ],
)
def test_the_first_source_that_speaks_says_who_this_is(section, env, vm, expected):
    assert rank_of(section, env, vm) == expected


def test_slices_of_tpu_vms_are_read_from_their_metadata():
    slices = {k: v for k, v in SLICES.items() if k.startswith("MEGASCALE")}
    lines = "".join(f"{key}: '{value}'\n" for key, value in slices.items())
    assert rank_of(vm=VM | {"tpu-env": lines}) == (3, 4, "first:8482")


def test_the_metadata_server_is_left_alone_where_it_must_be():
    def fail(name):
        raise AssertionError(name)

    assert find(DistributedSection(), {"TPU_SKIP_MDS_QUERY": "1"}, fail) is None
    assert find(DistributedSection(), POD, fail).num_processes == 4


@pytest.mark.parametrize(
    ("section", "env", "message"),
    [
        (
            DistributedSection(coordinator="a:1"),
            {},
            "distributed.num_processes and distributed.process_id",
        ),
        (DistributedSection(num_processes=2, process_id=0), {}, "but not distributed.coordinator"),
        (
            DistributedSection(coordinator="a:1", num_processes=2, process_id=2),
            {},
            "process 2 is not one of 2",
        ),
        (None, {"JAX_PROCESS_ID": "0"}, "JAX_COORDINATOR_ADDRESS and JAX_NUM_PROCESSES"),
        (None, JAX | {"JAX_COORDINATOR_ADDRESS": "head"}, "no port"),
        (None, JAX | {"JAX_NUM_PROCESSES": "two"}, "JAX_NUM_PROCESSES='two'"),
        (None, {k: v for k, v in JOBSET.items() if k != "JOBSET_JOBS"}, "but not JOBSET_JOBS"),
        (None, {"TPU_WORKER_HOSTNAMES": "a,b"}, "but TPU_WORKER_ID, the index"),
        (None, POD | {"MEGASCALE_NUM_SLICES": "2"}, "not all of MEGASCALE_NUM_SLICES"),
        (HERE, SLICES, "process 3 of 4, and the environment of a TPU pod"),
        (None, JOBSET | POD, "says process 2 of 4"),
        (HERE, JAX, "detect=false"),
    ],
)
def test_partial_and_contradictory_settings_are_refused(section, env, message):
    with pytest.raises(ConfigError, match=r"\.$") as error:
        rank_of(section, env)
    assert message in str(error.value)


def test_one_process_starts_nothing():
    config = Config(
        distributed=DistributedSection(coordinator="a:1", num_processes=1, process_id=0)
    )
    assert join_processes(config) is config


def test_a_run_that_several_processes_cannot_make_is_refused_before_they_meet():
    config = Config(distributed=HERE)
    with pytest.raises(ConfigError, match=r"process 3 of 4.*groups_per_step|mesh\.trainer"):
        join_processes(config)


@pytest.mark.parametrize(
    ("settings", "rank_of"),
    [
        ({"mesh": {"samplers_in": "processes"}}, "starts samplers on one machine"),
        ({"run": {"replay_schedule": "x"}}, "the events of one process's threads"),
        ({"algorithm": {"groups_per_step": 6}}, r"groups_per_step \(6\) must be a multiple"),
        ({"mesh": {"colocated": True}}, "has 1 devices on 4 processes, and mesh.sampler 1"),
        ({"mesh": {"trainer": {"fsdp": 4}}}, "must be multiples of"),
    ],
)
def test_what_four_processes_cannot_do_is_refused(settings, rank_of):
    with pytest.raises(ConfigError, match=rank_of):
        run_devices_per_process(Config.model_validate(settings), 4)


def test_what_only_slices_of_their_own_could_do_four_processes_do():
    shared = {
        "mesh": {"trainer": {"fsdp": 8}, "sampler": {"tensor": 2}, "colocated": True},
        "reward": {"model": "judge"},
        "data": {"curriculum": "hard_first"},
    }
    assert run_devices_per_process(Config.model_validate(shared), 4) == 2
    apart = {**shared, "mesh": {"trainer": {"fsdp": 8}, "samplers": 8}}
    assert run_devices_per_process(Config.model_validate(apart), 4) == 4


def test_several_hosts_of_a_slice_have_numbers_from_0():
    ranks = [from_tpu((POD | {"TPU_WORKER_ID": str(i)}).get, "here") for i in range(4)]
    assert [p.process_id for p in ranks] == [0, 1, 2, 3]


def command(*words, **env):
    return subprocess.run(
        [sys.executable, "-m", *words],
        env={**os.environ, **env},
        capture_output=True,
        text=True,
        timeout=300,
    )


@pytest.mark.full
def test_the_number_of_processes_can_be_asked_for():
    assert command("jaxrl_async.run.distributed", **SLICES).stdout == "8\n"
    wrong = command("jaxrl_async.run.distributed", TPU_WORKER_HOSTNAMES="a,b")
    assert wrong.returncode == 2 and "TPU_WORKER_ID" in wrong.stderr


@pytest.mark.full
def test_a_coordinator_that_does_not_listen_is_reported_with_its_address(tmp_path):
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    file = tmp_path / "config.yaml"
    settings = {
        "distributed": {
            "coordinator": f"localhost:{port}",
            "num_processes": 2,
            "process_id": 1,
            "wait_s": 1,
        },
        "mesh": {"samplers": 2, "trainer": {"fsdp": 2}},
    }
    file.write_text(json.dumps(settings))
    done = command("jaxrl_async.train", str(file))
    assert done.returncode == 1, done.stderr
    assert "MeshError: process 1 of 2, found in the configuration: no answer" in done.stderr
    assert f"localhost:{port} within distributed.wait_s (1 s)" in done.stderr


def test_a_coordinator_with_an_ipv6_address_is_reached():
    try:
        listener = socket.create_server(("::1", 0), family=socket.AF_INET6)
    except OSError:
        pytest.skip("needs IPv6 on the loopback")
    with listener:
        section = DistributedSection(
            coordinator=f"[::1]:{listener.getsockname()[1]}", num_processes=2, process_id=1
        )
        rank = from_settings(section)
        assert rank is not None
        distributed._wait_for(rank, wait_s=5)


@pytest.mark.parametrize("address", ["[fd00::1]", "[fd00::1]:99", "fd00::1"])
def test_a_slice_may_name_its_hosts_by_ipv6_addresses(address):
    env = POD | {"TPU_WORKER_HOSTNAMES": f"{address},b,c,d"}
    rank = from_tpu(env.get, "here")
    assert rank is not None and rank.coordinator == "[fd00::1]:8482"
