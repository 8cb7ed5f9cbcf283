"""The first cell of every notebook: it finds the project, installs it, or says what to do."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.full

NOTEBOOKS = sorted((Path(__file__).parents[1] / "notebooks").glob("*.ipynb"))
ABSENT = """
import importlib.util, subprocess
importlib.util.find_spec = lambda name: None
subprocess.run = lambda words, check: print(words[-1])
"""


def first_cell(notebook: Path) -> str:
    cells = json.loads(notebook.read_text("utf-8"))["cells"]
    return "".join(next(c["source"] for c in cells if c["cell_type"] == "code"))


def run(folder: Path, source: str = "", before: str = ABSENT) -> subprocess.CompletedProcess:
    cell = first_cell(NOTEBOOKS[0]).replace('SOURCE = ""', f"SOURCE = {source!r}")
    words = [sys.executable, "-c", before + cell]
    return subprocess.run(words, cwd=folder, capture_output=True, text=True)


def test_it_is_the_same_in_all():
    assert len({first_cell(notebook) for notebook in NOTEBOOKS}) == 1 and len(NOTEBOOKS) == 4


def test_where_the_project_is_nothing_is_installed(tmp_path):
    before = ABSENT.replace("lambda name: None", "lambda name: name")
    done = run(tmp_path, "somewhere", before)
    assert done.returncode == 0 and not done.stdout


def test_without_a_source_it_says_what_to_do(tmp_path):
    done = run(tmp_path)
    assert done.returncode == 1 and "Traceback" not in done.stderr
    assert "upload its wheel" in done.stderr and "SOURCE" in done.stderr


@pytest.mark.parametrize("source", ["", "jaxrl_async-0.1.0-py3-none-any.whl"])
def test_an_uploaded_wheel_is_installed(tmp_path, source):
    wheel = tmp_path / "jaxrl_async-0.1.0-py3-none-any.whl"
    wheel.touch()
    assert run(tmp_path, source).stdout.startswith(str(wheel))


@pytest.mark.parametrize("address", ["https://host/jaxrl_async.git", "git@host:a/jaxrl_async.git"])
def test_an_address_is_installed_by_git(tmp_path, address):
    said = run(tmp_path, address).stdout.strip()
    assert said.startswith("jaxrl_async") and said.endswith(f" @ git+{address}")
