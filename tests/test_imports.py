"""What importing costs: host modules never pull in JAX, and the package itself nothing."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

import jaxrl_async

PACKAGE = Path(jaxrl_async.__file__).parent
HOST_SIDE = [
    "types",
    "ports",
    "errors",
    "train",
    "config",
    "launch",
    "metrics",
    "buffer",
    "rollout",
    "scorers.answers",
    "scorers.graders",
    "scorers.mathprocess",
    "scorers.results",
    "scorers.rewards",
    "scorers.usercode",
    "scorers.reward_arguments",
    "scorers.guard",
    "sampler.batch.shapes",
    "sampler.batch.pages",
    "sampler.batch.prefix",
    "sampler.batch.slots",
    "sampler.batch.routes",
    "sampler.batch.kv_budget",
    "sampler.partial",
    "sampler.request_checks",
    "sampler.lifetime",
    "staleness",
    "codec",
    "sampler.batch.concurrency",
    "sampler.router.router",
    "sampler.router.supervise",
    "plan.simulate",
]
"""Modules, and packages of which every module counts."""
HEAVY = ("jax", "jaxlib", "flax", "orbax", "grain", "torch")


def host_modules() -> list[str]:
    names = []
    for name in HOST_SIDE:
        path = PACKAGE.joinpath(*name.split("."))
        inside = sorted(f"{name}.{p.stem}" for p in path.glob("*.py")) if path.is_dir() else [name]
        names += [n.removesuffix(".__init__") for n in inside]
    return names


def in_fresh_process(code: str) -> str:
    env = {**os.environ, "PYTHONPATH": str(PACKAGE.parent)}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, env=env
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.mark.parametrize("name", host_modules())
def test_a_host_module_is_imported_without_jax(name):
    heavy = in_fresh_process(
        f"import sys, jaxrl_async.{name}; print(*set({HEAVY}).intersection(sys.modules))"
    )
    assert heavy == ""


def test_importing_the_package_imports_only_the_standard_library():
    loaded = in_fresh_process(
        "import sys; before = set(sys.modules); import jaxrl_async; "
        "print(*set(sys.modules) - before)"
    ).split()
    assert [m for m in loaded if m.partition(".")[0] not in sys.stdlib_module_names] == [
        "jaxrl_async"
    ]


def test_light_public_names_come_without_jax():
    code = "import sys; from jaxrl_async import Request, SamplingParams, Completion, Episode; "
    assert in_fresh_process(code + "print('jax' in sys.modules)") == "False"


def test_every_public_name_is_there():
    code = "from jaxrl_async import *; import jaxrl_async as p; "
    assert in_fresh_process(code + "print([n for n in p.__all__ if n not in globals()])") == "[]"


def test_an_unknown_public_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="Smapler"):
        _ = jaxrl_async.Smapler


def test_inner_init_files_are_empty():
    full = [str(p) for p in PACKAGE.glob("*/**/__init__.py") if p.read_text().strip()]
    assert full == []
