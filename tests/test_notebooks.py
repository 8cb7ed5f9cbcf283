"""The first cell of every notebook, which finds or installs the project, and the names they use."""

import ast
import json
import subprocess
import sys
from pathlib import Path

import pytest

import jaxrl_async

NOTEBOOKS = sorted((Path(__file__).parents[1] / "notebooks").glob("*.ipynb"))
WHEEL = "jaxrl_async-0.1.0-py3-none-any.whl"
ABSENT = """
import importlib.util, shutil, subprocess
from types import SimpleNamespace

importlib.util.find_spec = lambda name: None
shutil.which = lambda program: program if {driver!r} else None


def run(words, **others):
    if words[0] == "nvidia-smi":
        return SimpleNamespace(returncode=0, stdout={driver!r})
    print(words[-1])
    return SimpleNamespace(returncode=int(any(words[-1].startswith(f) for f in {fails!r})))


subprocess.run = run
"""


def code_of(notebook: Path) -> list[str]:
    cells = json.loads(notebook.read_text("utf-8"))["cells"]
    return ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]


def run(
    folder: Path, *, driver: str = "", fails: tuple[str, ...] = (), more: str = ""
) -> subprocess.CompletedProcess:
    """The cell on a machine without the project, with a driver of NVIDIA's, where pip cannot
    install what begins so."""
    before = ABSENT.format(driver=driver, fails=fails)
    words = [sys.executable, "-c", "\n".join([before, more, code_of(NOTEBOOKS[0])[0]])]
    return subprocess.run(words, cwd=folder, capture_output=True, text=True)


def test_it_is_the_same_in_all():
    assert len({code_of(notebook)[0] for notebook in NOTEBOOKS}) == 1 and len(NOTEBOOKS) == 4


@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: path.name)
def test_only_public_names_are_used(notebook):
    public = set(jaxrl_async.__all__)
    for cell in code_of(notebook):
        for node in ast.walk(ast.parse(cell)):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("jaxrl_async"):
                assert node.module == "jaxrl_async" and {n.name for n in node.names} <= public
            if isinstance(node, ast.Import):
                assert not [n.name for n in node.names if n.name.startswith("jaxrl_async.")]
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
                assert node.value.id != "jr" or node.attr in public, node.attr


@pytest.mark.full
def test_where_the_project_is_nothing_is_installed(tmp_path):
    done = run(tmp_path, more="importlib.util.find_spec = lambda name: name")
    assert done.returncode == 0 and not done.stdout


@pytest.mark.full
def test_it_is_installed_by_name_then_from_the_release(tmp_path):
    assert run(tmp_path).stdout.splitlines() == ["jaxrl_async"]
    by_name, release = run(tmp_path, fails=("jaxrl_async",)).stdout.splitlines()
    name, _, address = release.partition(" @ ")
    assert by_name == name == "jaxrl_async"
    assert address.startswith("https://") and address.endswith("-py3-none-any.whl")


@pytest.mark.full
def test_an_uploaded_wheel_comes_first(tmp_path):
    (tmp_path / WHEEL).touch()
    assert run(tmp_path).stdout.splitlines() == [str(tmp_path / WHEEL)]
    said = run(tmp_path, fails=(str(tmp_path),)).stdout.splitlines()
    assert said == [str(tmp_path / WHEEL), "jaxrl_async"]


@pytest.mark.full
def test_where_nothing_can_be_installed_it_says_what_to_do(tmp_path):
    done = run(tmp_path, fails=("jaxrl_async",) * 2 + ("",))
    assert done.returncode == 1 and "Traceback" not in done.stderr
    assert "upload the wheel" in done.stderr


@pytest.mark.full
@pytest.mark.parametrize(
    ("driver", "extra"),
    [
        ("550.54.15\n", "[cuda12]"),
        ("579.99\n", "[cuda12]"),
        ("580.65.06\n580.65.06\n", "[cuda13]"),
        ("NVIDIA-SMI has failed because it could not reach the driver.", ""),
        ("No devices were found\n", ""),
    ],
)
def test_the_driver_decides_on_cuda_12_or_13(tmp_path, driver, extra):
    assert run(tmp_path, driver=driver).stdout.splitlines() == [f"jaxrl_async{extra}"]
    last = run(tmp_path, driver=driver, fails=("jaxrl_async[", "jaxrl_async")).stdout.splitlines()
    assert last[-1].startswith(f"jaxrl_async{extra} @ https://")


@pytest.mark.full
def test_a_session_that_had_loaded_another_numpy_is_to_be_restarted(tmp_path):
    loaded = "import sys; sys.modules['numpy'] = SimpleNamespace(__version__='1.0')"
    done = run(tmp_path, more=loaded)
    assert done.returncode == 1 and "restart the session" in done.stderr
    assert run(tmp_path, more="import numpy").returncode == 0
