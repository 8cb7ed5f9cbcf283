"""What importing costs: host modules never pull in JAX, and the package itself nothing."""

import ast
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
    "tasks",
    "scorers.reward_arguments",
    "scorers.guard",
    "sampler.batch.shapes",
    "sampler.batch.slots",
    "sampler.batch.expert_routing",
    "sampler.batch.kv_budget",
    "sampler.partial",
    "sampler.request_checks",
    "sampler.lifetime",
    "staleness",
    "codec",
    "sampler.batch.sequence",
    "sampler.batch.admission",
    "sampler.batch.kv_cache",
    "sampler.router",
    "sampler.requests",
    "sampler.stats",
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


@pytest.mark.full
def test_host_modules_are_imported_without_jax():
    """One process imports all of them, and names each with what it was the first to load."""
    loaded = in_fresh_process(
        "import importlib, sys\n"
        f"for name in {host_modules()}:\n"
        "    before = set(sys.modules)\n"
        "    importlib.import_module('jaxrl_async.' + name)\n"
        f"    for heavy in set({HEAVY}) & (set(sys.modules) - before):\n"
        "        print(name, 'imports', heavy)\n"
    )
    assert len(host_modules()) > 100 and loaded == ""


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


@pytest.mark.full
def test_every_public_name_is_there():
    code = "from jaxrl_async import *; import jaxrl_async as p; "
    assert in_fresh_process(code + "print([n for n in p.__all__ if n not in globals()])") == "[]"


def test_an_unknown_public_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="Smapler"):
        _ = jaxrl_async.Smapler


def test_inner_init_files_hold_a_docstring_alone():
    """But for the package that shares its name with a public function."""
    files = PACKAGE.glob("*/**/__init__.py")
    full = [p.parent.name for p in files if len(ast.parse(p.read_text()).body) > 1]
    assert full == ["plan"]


def test_completion_shows_the_public_names_alone():
    code = "import jaxrl_async as jr; print(*(n for n in dir(jr) if n not in jr.__all__)); "
    assert in_fresh_process(code + "assert set(dir(jr)) == set(jr.__all__)") == ""


def test_a_module_of_ours_is_not_hidden_by_one_of_pythons():
    code = "from jaxrl_async import types; print(types.__name__)"
    assert in_fresh_process(code) == "jaxrl_async.types"


@pytest.mark.full
@pytest.mark.parametrize("name", ["train", "plan"])
def test_a_module_that_shares_its_name_with_a_function_calls_it(name):
    """Also if the module was imported first, and with the function's own complaint."""
    code = (
        f"import jaxrl_async as jr, jaxrl_async.{name}; import types; "
        f"assert isinstance(jr.{name}, types.ModuleType)\n"
        f"try: jr.{name}(config='nothing.yaml', **({{}} if {name!r} == 'train' else "
        "{'topology': 'v5e-4'}))\n"
        "except jr.JaxrlError as error: print(error)"
    )
    assert "nothing.yaml: cannot be read" in in_fresh_process(code)


@pytest.mark.full
def test_a_policy_is_loaded_without_a_word_of_libtpu(tmp_path):
    """Where libtpu is installed and no TPU is there, JAX starts it unless it is told not to."""
    code = f"""
import jaxrl_async as jr
try:
    jr.Policy.from_pretrained({str(tmp_path / "none")!r})
except jr.JaxrlError as error:
    import jax
    print(jax.default_backend(), "no such folder" in str(error))
"""
    env = {k: v for k, v in os.environ.items() if k not in ("JAX_PLATFORMS", "XLA_FLAGS")}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env)
    assert "libtpu" not in done.stderr and done.stdout.endswith(" True\n"), done.stderr
