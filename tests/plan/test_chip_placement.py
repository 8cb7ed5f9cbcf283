"""A plan reads a run's roles: the same devices as a run would take, refused for the same reasons.

The devices are those that libtpu's compiler describes, in a process of its own."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from jaxrl_async.config.load import load
from jaxrl_async.launch.gke import main, run_config
from jaxrl_async.launch.gke_values import load_values

ROOT = Path(__file__).parent.parent.parent
PLANS = sorted((ROOT / "configs/plans").glob("*.yaml"))

compiler = pytest.mark.skipif(
    importlib.util.find_spec("libtpu") is None,
    reason="libtpu, which holds the TPU compiler, is not installed: pip install 'jax[tpu]'",
)

SCRIPT = """
import json, os, sys
from jaxrl_async.plan.__main__ import COMPILER_ENV
os.environ |= COMPILER_ENV
from jaxrl_async.config.schema import Config
from jaxrl_async.errors import ConfigError
from jaxrl_async.plan.chips import parse_chips, parse_slice
from jaxrl_async.plan.chip_placement import place_on_chips

def answer(case):
    config = Config.model_validate({"mesh": case["mesh"]})
    samplers = parse_chips(case["samplers"]) if case.get("samplers") else None
    try:
        placement = place_on_chips(config, parse_slice(case["topology"]), samplers)
    except ConfigError as error:
        return str(error)
    meshes = (placement.slices.trainer, placement.slices.sampler)
    return {
        "trainer": placement.trainer.topology, "sampler": placement.sampler.topology,
        "chips": [placement.trainer.num_chips, placement.sampler.num_chips, placement.num_samplers],
        "ids": [sorted(d.id for d in mesh.devices.flat) for mesh in meshes],
        "hosts": [len({d.process_index for d in mesh.devices.flat}) for mesh in meshes],
    }

print(json.dumps([answer(case) for case in json.load(sys.stdin)]))
"""


def mesh(samplers_in, fsdp, tensor, samplers):
    return {
        "samplers_in": samplers_in,
        "trainer": {"fsdp": fsdp},
        "sampler": {"tensor": tensor},
        "samplers": samplers,
    }


CASES = {
    "apart": {"mesh": mesh("external", 16, 8, 2), "topology": "v5e-16", "samplers": "v6e-16"},
    "host": {"mesh": mesh("processes", 4, 2, 2), "topology": "v6e-8"},
    "threads": {"mesh": mesh("threads", 4, 1, 3), "topology": "v5e-8"},
    "hosts": {"mesh": mesh("threads", 8, 2, 4), "topology": "v5p-16"},
    "refused": {"mesh": mesh("threads", 8, 2, 4), "topology": "v5e-16"},
    "too many": {"mesh": mesh("threads", 8, 1, 1), "topology": "v5e-8"},
    "two hosts": {"mesh": mesh("processes", 8, 2, 4), "topology": "v5e-16"},
    "both": {"mesh": mesh("threads", 4, 1, 4), "topology": "v5e-8", "samplers": "v5e-4"},
}


@pytest.fixture(scope="module")
def placements():
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT],
        input=json.dumps(list(CASES.values())),
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert done.returncode == 0, done.stderr
    return dict(zip(CASES, json.loads(done.stdout), strict=True))


@pytest.mark.full
@compiler
def test_slices_of_their_own_may_have_several_hosts_and_another_generation(placements):
    found = placements["apart"]
    assert (found["trainer"], found["sampler"]) == ("v5e:4x4", "v6e:2x4")
    assert found["hosts"] == [4, 1] and found["chips"] == [16, 8, 2]


@pytest.mark.full
@compiler
def test_processes_and_threads_divide_one_host(placements):
    host = placements["host"]
    assert host["ids"] == [[0, 1, 2, 3], [4, 5]] and host["chips"] == [4, 2, 2]
    assert host["trainer"] == "v6e:2x4[0,1,2,3]", "a part's programs have keys of their own"
    threads = placements["threads"]
    assert threads["ids"] == [[0, 1, 2, 3], [4]] and threads["chips"] == [4, 1, 3]


@pytest.mark.full
@compiler
def test_threads_on_several_hosts_take_a_part_of_each_where_the_compiler_can(placements):
    hosts = placements["hosts"]
    assert hosts["hosts"] == [4, 1] and hosts["chips"] == [8, 2, 4]
    refused = placements["refused"]
    assert "the compiler rejects a sum over the 8 TPU v5 lite devices of mesh.trainer" in refused
    assert "mesh.samplers_in=external" in refused and "--topology" in refused


@pytest.mark.full
@compiler
@pytest.mark.parametrize(
    ("case", "message"),
    [
        ("too many", "mesh needs 9 devices"),
        ("two hosts", "divides the chips of one host, and v5e-16 .v5e:4x4. has 4 hosts"),
        ("both", "--sampler-topology is for samplers on separate slices"),
    ],
)
def test_what_no_host_or_slice_is_is_refused(placements, case, message):
    import re

    assert isinstance(placements[case], str) and re.search(message, placements[case])


# ---- what is written out


@pytest.mark.parametrize("file", PLANS, ids=lambda file: file.stem)
def test_a_shipped_plan_has_the_roles_of_its_command(file):
    """Its command names the slices of the roles in its configuration."""
    from jaxrl_async.plan.chips import parse_chips, parse_slice

    words = file.read_text().splitlines()[0].split()
    section = load(file).mesh
    if section.colocated:
        assert "--sampler-topology" not in words
        topology = words[words.index("--topology") + 1]
        shared = section.trainer.num_devices
        assert parse_slice(topology).num_devices == shared == section.sampler.num_devices
        return
    if section.samplers_in == "threads":
        assert "--sampler-topology" not in words
        topology = words[words.index("--topology") + 1]
        taken = section.trainer.num_devices + section.samplers * section.sampler.num_devices
        assert parse_slice(topology).num_devices == taken
        return
    topology, samplers = (words[words.index(w) + 1] for w in ("--topology", "--sampler-topology"))
    assert section.samplers_in == "external"
    assert parse_slice(topology).num_devices == section.trainer.num_devices
    chip, chips = parse_chips(samplers)
    assert chips * chip.devices == section.samplers * section.sampler.num_devices


def planned(topology, sampler, count):
    """As much of a plan as is written out."""
    from types import SimpleNamespace

    from jaxrl_async.plan.chips import parse_slice

    return SimpleNamespace(
        trainer=SimpleNamespace(where=parse_slice(topology)),
        sampler=SimpleNamespace(where=parse_slice(sampler)),
        num_samplers=count,
    )


def test_what_is_written_is_what_train_and_gke_take(tmp_path, capsys):
    from jaxrl_async.plan.launch_files import split_config, write_launch_files

    config = load(ROOT / "configs/plans/qwen3_8b_v6e_32.yaml")
    other = split_config(config, trainer_chips=16, now=8, samplers=4)
    lines = write_launch_files(tmp_path / "out", other, planned("v6e-16", "v6e-4", 4))
    written = load(tmp_path / "out/config.yaml")
    assert written.mesh.trainer.fsdp == 16 and written.mesh.samplers == 4
    assert written.sampler == config.sampler and written.trainer == config.trainer
    values = load_values(tmp_path / "out/values.yaml")
    launched = run_config(values, tmp_path / "out")
    assert launched.mesh == written.mesh
    assert values.trainer.tpu.chips == 16 and values.samplers.tpu.topology == "2x2"
    assert main([str(tmp_path / "out/values.yaml")]) == 0
    shown = list(yaml.safe_load_all(capsys.readouterr().out))
    jobs = [j for s in shown if s["kind"] == "JobSet" for j in s["spec"]["replicatedJobs"]]
    assert sorted((j["name"], j["replicas"]) for j in jobs) == [("sampler", 1)] * 4 + [
        ("trainer", 1)
    ]
    assert any("jaxrl_async.launch.gke" in line for line in lines)
    assert any("jaxrl_async.sample --join" in line for line in lines)


def test_a_divided_host_needs_no_values_file(tmp_path):
    from jaxrl_async.plan.launch_files import write_launch_files

    config = load(ROOT / "configs/addition.yaml", ["mesh.samplers_in=processes"])
    lines = write_launch_files(tmp_path, config, planned("v5e-8", "v5e-1", 1))
    assert not (tmp_path / "values.yaml").exists()
    assert lines[-1] == f"python -m jaxrl_async.train {tmp_path / 'config.yaml'}"
    assert load(tmp_path / "config.yaml") == config


def test_cards_are_launched_with_their_share_of_memory_and_no_manifest(tmp_path):
    from jaxrl_async.plan.launch_files import write_launch_files

    config = load(ROOT / "configs/plans/qwen3_8b_v6e_32.yaml")
    lines = write_launch_files(tmp_path, config, planned("h100-8", "h100-4", 6))
    assert not (tmp_path / "values.yaml").exists()
    commands = [line for line in lines if not line.startswith("#")]
    assert len(commands) == 2
    assert all(c.startswith("XLA_PYTHON_CLIENT_MEM_FRACTION=0.95 python") for c in commands)
    assert "6 times" in lines[2]


def test_a_split_that_no_axis_can_take_is_refused():
    from jaxrl_async.errors import ConfigError
    from jaxrl_async.plan.launch_files import split_config

    config = load(ROOT / "configs/addition.yaml", ["mesh.trainer.tensor=4"])
    with pytest.raises(ConfigError, match=r"neither fsdp .1. nor data .1. divides evenly"):
        split_config(config, trainer_chips=2, now=4, samplers=1)


SLICES = """
import json, os
from dataclasses import asdict, replace
from jaxrl_async.plan.__main__ import COMPILER_ENV
os.environ |= COMPILER_ENV
import jax, jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec
from jaxrl_async.config.schema import Config
from jaxrl_async.plan.chips import parse_slice, parse_chips
from jaxrl_async.plan.cost import cost_of
from jaxrl_async.plan.hlo import parse
from jaxrl_async.plan.pace import pace_of
from jaxrl_async.plan.chip_placement import place_on_chips

config = Config.model_validate({"mesh": {
    "samplers_in": "external", "trainer": {"data": 2, "fsdp": 4}, "sampler": {"tensor": 4}}})
mesh = place_on_chips(config, replace(parse_slice("v5e-4"), count=2), parse_chips("v5e-4"))
mesh = mesh.slices.trainer

def gradient(w, x):
    return jax.grad(lambda w: jnp.sum((x @ w) ** 2))(w)

def on(*spec):
    return NamedSharding(mesh, PartitionSpec(*spec))

w = jax.ShapeDtypeStruct((1024, 1024), jnp.float32, sharding=on("fsdp"))
x = jax.ShapeDtypeStruct((4096, 1024), jnp.float32, sharding=on(("data", "fsdp")))
program = jax.jit(gradient, out_shardings=on("fsdp")).lower(w, x).compile()
cost = cost_of(parse(program.as_text()), dict(mesh.shape), pace_of(parse_slice("v5e-4").chip))
print(json.dumps({"slices": [[d.slice_index for d in row.flat] for row in mesh.devices],
                  "collectives": [asdict(c) for c in cost.collectives]}))
"""


@pytest.mark.full
@compiler
def test_the_compiler_says_what_goes_between_two_slices():
    """Of a gradient in shares of four chips, 1 MiB each, half goes each way, twice."""
    done = subprocess.run(
        [sys.executable, "-c", SLICES],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    cost = json.loads(done.stdout.splitlines()[-1])
    assert cost["slices"] == [[0] * 4, [1] * 4]
    between = [c for c in cost["collectives"] if c["axes"].startswith("slices")]
    assert [(c["kind"], c["group"], c["num_bytes"], c["times"]) for c in between] == [
        ("all-reduce", 2, 2.0**20, 1.0)
    ]
    assert {c["axes"] for c in cost["collectives"]} - {between[0]["axes"]} == {"fsdp"}


TWO_SLICES = """
import json, math, os, sys
from dataclasses import replace
from jaxrl_async.plan.__main__ import COMPILER_ENV
os.environ |= COMPILER_ENV
import jax
from jaxrl_async.config.schema import Config
from jaxrl_async.plan import programs
from jaxrl_async.plan.chips import parse_chips, parse_slice
from jaxrl_async.plan.cost import BETWEEN_SLICES, cost_of
from jaxrl_async.plan.hlo import parse
from jaxrl_async.plan.pace import pace_of
from jaxrl_async.plan.chip_placement import place_on_chips
from jaxrl_async.trainer import update

axes, shape, apart = json.loads(sys.argv[1])
if not apart:
    update.can_sum_separately = lambda mesh, spec: False
architecture = {"layers": 2, "width": 256, "heads": 8, "kv_heads": 4, "head_dim": 128, "mlp": 512}
config = Config.model_validate({
    "mesh": {"samplers_in": "external", "trainer": {"data": 2, **axes}, "sampler": {"tensor": 4}},
    "model": {"dtype": "bfloat16", "remat": "layer",
              "architecture": {**architecture, "vocab": 1024, **shape}},
    "trainer": {"row_length": 256, "micro_batch_tokens": 2048},
    "sampler": {"max_length": 256, "max_new_tokens": 192, "slots": 8}})
config = config.on_devices("tpu")
placement = place_on_chips(config, replace(parse_slice("v5e-4"), count=2), parse_chips("v5e-4"))
spec = programs.spec_of(config)
cast = programs._pushed(config, spec, placement)["cast"]
weights = jax.tree.leaves(programs.trained(config, spec, placement.slices.trainer))
shards = [math.prod(w.sharding.shard_shape(w.shape)) for w in weights]
sent = {"shards": 4 * sum(shards)}
for one in programs.trainer_programs(config, spec, placement, cast):
    if one.name in ("gradient", "update"):
        text = one.program.compile().as_text()
        cost = cost_of(parse(text), one.mesh, pace_of(placement.trainer.chip),
                       open_turns=one.open_turns)
        sent[one.name] = sum(c.num_bytes for c in cost.collectives if c.axes == BETWEEN_SLICES)
print(json.dumps(sent))
"""


@compiler
@pytest.mark.full
@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("axes", "shape"),
    [
        ({"fsdp": 4}, {}),
        ({"tensor": 4}, {}),
        ({"fsdp": 2, "tensor": 2}, {}),
        ({"expert": 4}, {"family": "qwen3_moe", "experts": 8}),
    ],
)
def test_gradients_cross_the_network_between_slices_once_an_update(axes, shape):
    """A float32 gradient of a device's shards goes half each way, twice, in the update; a
    micro-batch sends sums of losses alone. Without parts it is the other way round, each time."""

    def sent(apart: bool) -> dict[str, float]:
        done = subprocess.run(
            [sys.executable, "-c", TWO_SLICES, json.dumps([axes, shape, apart])],
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            capture_output=True,
            text=True,
            timeout=600,
        )
        assert done.returncode == 0, done.stderr[-2000:]
        return json.loads(done.stdout.splitlines()[-1])

    now = sent(apart=True)
    assert now["gradient"] < 2**14
    assert now["shards"] <= now["update"] < 1.2 * now["shards"]
    if axes == {"fsdp": 4}:
        before = sent(apart=False)
        assert before["gradient"] > 0.5 * now["shards"] and before["update"] < 2**14
