"""Which parts of a TPU slice programs run on, asked of the real compiler; all that ships does.

Needs libtpu (pip install 'jax[tpu]'), no TPU.
"""

import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from jaxrl_async.config.load import load
from jaxrl_async.launch.gke import run_config
from jaxrl_async.launch.gke_slices import GENERATIONS
from jaxrl_async.launch.gke_values import load_values
from jaxrl_async.plan.__main__ import COMPILER_ENV
from jaxrl_async.plan.chips import parse_slice

HERE = Path(__file__).parent
ROOT = HERE.parents[1]

pytestmark = [
    pytest.mark.exhaustive,
    pytest.mark.skipif(
        importlib.util.find_spec("libtpu") is None,
        reason="libtpu, which holds the TPU compiler, is not installed: pip install 'jax[tpu]'",
    ),
]


def case(topology, take="all", axes=None, hosts_of=None):
    return {"topology": topology, "take": take, "axes": axes, "hosts_of": hosts_of}


def answers(cases):
    """What check_collective says to each case: None, or the error."""
    done = subprocess.run(
        [sys.executable, str(HERE / "tpu_layouts.py")],
        input=json.dumps(cases),
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, **COMPILER_ENV},
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout.splitlines()[-1])


def shipped_values():
    """Each role of the example for GKE, on a whole slice."""
    values = load_values(ROOT / "tpu_scripts/gke_values.yaml")
    config = run_config(values, ROOT / "tpu_scripts")
    for role, axes in (
        (values.trainer, config.mesh.trainer),
        (values.samplers, config.mesh.sampler),
    ):
        assert role is not None
        yield case(f"{role.tpu.generation}:{role.tpu.topology}", axes=axes.model_dump())


def shipped_plans():
    """Each role of the plans, on the topologies of their first lines: a slice each, or parts of
    one."""
    for file in sorted((ROOT / "configs/plans").glob("*.yaml")):
        first = file.read_text(encoding="utf-8").splitlines()[0]
        given = re.search(r"--topology (\S+)(?: --sampler-topology (\S+))?", first)
        config = load(file)
        if config.mesh.colocated and config.mesh.num_devices == 1:
            continue  # one device needs no collective
        assert given is not None, file
        if parse_slice(given[1]).chip.is_card:
            continue  # a program runs on any of a host's cards
        topology = parse_slice(given[1]).topology
        if given[2] is None:
            yield {**case(topology), "mesh": config.mesh.model_dump()}
            continue
        yield case(topology, axes=config.mesh.trainer.model_dump())
        each = config.mesh.sampler.num_devices
        generation = given[2].partition("-")[0]
        where = parse_slice(f"{generation}-{4 if each < 4 else each}").topology
        if each > 1:  # one device needs no collective
            yield case(where, axes=config.mesh.sampler.model_dump())


def one_host():
    """tpu_scripts/run_on_host.sh: halves of one host."""
    for take in ("half", "upper"):
        for generation in ("v5e", "v6e"):
            yield case(f"{generation}:2x2", take)
            yield case(f"{generation}:2x4", take, hosts_of=[2, 4])
        for generation in ("v4", "v5p", "tpu7x"):
            yield case(f"{generation}:2x2x1", take)


@pytest.mark.parametrize("examples", [shipped_values, shipped_plans, one_host])
def test_a_collective_over_each_roles_mesh_compiles_for_all_that_ships(examples):
    cases = list(examples())
    assert len(cases) >= 2
    errors = dict(zip(map(str, cases), answers(cases), strict=True))
    assert errors == {str(c): None for c in cases}


def test_the_table_of_generations_is_what_the_compiler_says():
    """Where it says divisible any part will do; elsewhere the whole slice, not half of each host.

    (There, whole hosts that are half of a slice are sometimes taken: not on v5e:4x8.)
    """
    cases = [
        case(f"{name}:{topology}", part)
        for name, generation in GENERATIONS.items()
        for topology in (("4x4", "4x8") if generation.flat else ("2x2x2", "2x2x4", "4x4x4"))
        for part in ("all", "half", *(("upper", "first") if generation.divisible else ()))
    ]
    for one, error in zip(cases, answers(cases), strict=True):
        divisible = GENERATIONS[one["topology"].partition(":")[0]].divisible
        assert (error is not None) == (one["take"] == "half" and not divisible), (one, error)


def test_what_the_compiler_refuses_is_refused_with_what_to_do():
    errors = answers([case("v6e:4x4", "half"), case("v5e:4x4", "host0")])
    for error, hosts in zip(errors, (4, 1), strict=True):
        assert re.search(
            rf"rejects a sum over the \d TPU .* of mesh.trainer, on {hosts} host", error
        )
        for remedy in ("mesh.samplers_in=external", "python -m jaxrl_async.sample"):
            assert remedy in error


def test_a_run_whose_slices_the_compiler_refuses_does_not_start():
    """Trainer and samplers on four hosts, half of each one's chips."""
    threads = {"trainer": {"fsdp": 8}, "sampler": {"tensor": 2}, "samplers": 4}
    cases = [{**case(name), "mesh": threads} for name in ("v6e:4x4", "v5p:2x2x4")]
    refused, taken = answers(cases)
    assert "mesh.trainer" in refused and taken is None


def test_a_colocated_sampler_on_one_of_several_hosts_starts_where_any_part_will_do():
    """Trainer on the whole slice of two hosts, each host's sampler on its four chips."""
    shared = {"trainer": {"fsdp": 8}, "sampler": {"tensor": 4}, "colocated": True}
    cases = [{**case(name), "mesh": shared} for name in ("v5p:2x2x2", "v4:2x2x2")]
    assert answers(cases) == [None, None]
    wide = {"trainer": {"fsdp": 16}, "sampler": {"tensor": 4}, "colocated": True}
    (refused,) = answers([{**case("v5e:4x4"), "mesh": wide}])
    assert "mesh.sampler, on 1 hosts" in refused
