"""The whole command on a tiny model: real programs through the real TPU compiler, twice."""

import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import jaxrl_async as jr

ROOT = Path(__file__).parent.parent.parent
CONFIG = """
run: {name: tiny, steps: 10}
model:
  architecture: {layers: 2, width: 128, heads: 2, kv_heads: 2, head_dim: 128, mlp: 256, vocab: 1024}
  dtype: bfloat16
  remat: layer
mesh: {samplers_in: external, trainer: {fsdp: 4}, sampler: {tensor: 1}, samplers: 4}
data: {max_prompt_tokens: 64}
sampler: {slots: 8, max_length: 256, max_new_tokens: 192, block: 4, prefill_chunk: 128}
algorithm: {groups_per_step: 4, group_size: 2}
trainer: {micro_batch_tokens: 1024}
"""

pytestmark = [
    pytest.mark.full,
    pytest.mark.skipif(
        importlib.util.find_spec("libtpu") is None,
        reason="libtpu, which holds the TPU compiler, is not installed: pip install 'jax[tpu]'",
    ),
]


def plan(tmp_path: Path, cache: Path, *words: str) -> subprocess.CompletedProcess[str]:
    file = tmp_path / "tiny.yaml"
    file.write_text(CONFIG)
    where = ["--topology", "v5e-4", "--json", str(tmp_path / "plan.json"), "--cache", str(cache)]
    return subprocess.run(
        [sys.executable, "-m", "jaxrl_async.plan", str(file), *where, *words],
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, "PYTHONPATH": str(ROOT), "JAX_LOG_COMPILES": "1"},
    )


def compiles(done: subprocess.CompletedProcess[str]) -> list[str]:
    """What JAX says that it compiled; not the conversion of a number, on the CPU."""
    found = re.findall(r"Finished XLA compilation of jit\((\w+)\)", done.stderr)
    return [name for name in found if name != "convert_element_type"]


@pytest.fixture(scope="module")
def first(tmp_path_factory):
    """The plan of CONFIG, made where nothing was kept: its folder, and what the command said."""
    folder = tmp_path_factory.mktemp("first")
    return folder, plan(folder, folder / "cache")


@pytest.fixture
def cache(first, tmp_path):
    """A cache that has the programs of CONFIG, and no others."""
    return shutil.copytree(first[0] / "cache", tmp_path / "cache")


def test_a_plan_is_made_of_compiled_programs_and_kept(tmp_path, first, cache):
    folder, first = first
    assert first.returncode == 0, first.stderr
    found = json.loads((folder / "plan.json").read_text())
    programs = {p["name"]: p for p in found["trainer"]["programs"] + found["sampler"]["programs"]}
    assert set(programs) == {"gradient", "update", "cast", "prepare", "prefill", "decode"}
    assert not any(p["cached"] for p in programs.values())
    kernels = {n: {k["name"] for k in p["cost"]["kernels"]} for n, p in programs.items()}
    assert any("splash" in k for k in kernels["gradient"]), "splash attention in the training step"
    assert any("ragged_paged" in k for k in kernels["decode"]), (
        "paged attention in the decode block"
    )
    assert any("ragged_paged" in k for k in kernels["prefill"]), "and in the prefill"
    assert found["sampler"]["timings"]["prefill"]["kernels_s"] > 0
    axes = {c["axes"] for c in programs["gradient"]["cost"]["collectives"]}
    assert axes == {"fsdp"}
    assert found["fits"] and "HBM of a chip" in first.stdout and "MFU" in first.stdout
    assert len(compiles(first)) == len(programs)

    second = plan(tmp_path, cache)
    assert second.returncode == 0 and compiles(second) == []
    again = json.loads((tmp_path / "plan.json").read_text())
    assert all(p["cached"] for p in again["trainer"]["programs"])
    assert again["learning"] == found["learning"] and again["decode"] == found["decode"]


@pytest.mark.exhaustive
def test_a_plan_from_python_is_that_of_the_command(tmp_path, cache):
    done = plan(tmp_path, cache)
    planned = jr.plan(tmp_path / "tiny.yaml", "v5e-4", cache=cache)
    assert planned.fits and str(planned) == planned.text == done.stdout.rstrip()
    assert planned.numbers == json.loads((tmp_path / "plan.json").read_text())
    small = jr.plan(jr.load(tmp_path / "tiny.yaml"), "v5e-4", lengths={64: 1, 128: 2}, cache=cache)
    assert small.numbers["lengths"]["values"] == [64, 128]
    assert small.numbers["lengths"]["weights"] == pytest.approx([1 / 3, 2 / 3])
    large = jr.plan(
        tmp_path / "tiny.yaml", "v5e-4", overrides=["sampler.kv_memory_mib=30000"], cache=cache
    )
    assert not large.fits and "DOES NOT FIT" in large.text


def test_another_program_is_not_taken_from_the_cache_and_what_does_not_fit_is_said(tmp_path, cache):
    """A KV cache larger than the chip: the decode block is refused, and the advice names knobs."""
    done = plan(tmp_path, cache, "sampler.kv_memory_mib=30000")
    assert done.returncode == 1, done.stderr
    assert "compiling decode" in done.stderr and "compiling gradient" not in done.stderr
    assert "DOES NOT FIT" in done.stdout and "a sampler chip lacks" in done.stdout
    assert "sampler.kv_memory_mib=" in done.stdout and "mesh.sampler.tensor=2" in done.stdout
    assert "no times of the run: the compiler rejected" in done.stdout
    assert "MFU" not in done.stdout and "splits" not in done.stdout
    found = json.loads((tmp_path / "plan.json").read_text())
    assert not {"learning", "decode", "simulated", "splits"} & set(found)


@pytest.mark.exhaustive
def test_weights_too_large_for_a_sampler_do_not_fit_and_that_is_kept(tmp_path, cache):
    """23 GiB on a chip of 16: every program that takes them is refused."""
    large = ("model.architecture.width=2048", "model.architecture.mlp=1000000")
    done = plan(tmp_path, cache, *large)
    assert done.returncode == 1, done.stderr
    assert re.search(r"prepare +rejected by the compiler: it needs 45", done.stdout)
    assert "a sampler chip lacks" in done.stdout and "mesh.sampler.tensor=2" in done.stdout
    assert compiles(plan(tmp_path, cache, *large)) == []


def test_the_devices_of_every_generation_can_be_arranged():
    """As a program of its own, in the compiler's environment."""
    lines = [
        "import os",
        "from jaxrl_async.plan.__main__ import COMPILER_ENV",
        "os.environ |= COMPILER_ENV",
        "from jaxrl_async.config import schema",
        "from jaxrl_async.mesh import make_mesh",
        "from jaxrl_async.plan.chips import CHIPS, parse_slice",
        "from jaxrl_async.plan.chip_placement import devices_of",
        "for name in CHIPS:",
        "    where = parse_slice(f'{name}-8')",
        "    axes = schema.AxesSection(fsdp=where.num_devices // 2, tensor=2)",
        "    assert make_mesh(axes, devices_of(where)).size == where.num_devices",
    ]
    done = subprocess.run(
        [sys.executable, "-c", "\n".join(lines)],
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert done.returncode == 0, done.stderr


def test_meshes_that_do_not_fill_their_topologies_are_refused(tmp_path, cache):
    done = plan(tmp_path, cache, "mesh.trainer.fsdp=2")
    assert done.returncode == 2 and "a program runs on a whole slice" in done.stderr
    done = plan(tmp_path, cache, "--sampler-topology", "v5e-8")
    assert done.returncode == 2 and "Set mesh.samplers=8" in done.stderr
