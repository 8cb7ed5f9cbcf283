"""One changed constant or comparison in the objective's formulas never goes unnoticed."""

import importlib.util
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from mutations import MUTATIONS, TESTS

ROOT = Path(__file__).parents[2]
CASES = [(file, old, new) for file, pairs in MUTATIONS.items() for old, new in pairs]
IDS = [f"{file}: {new}" for file, _, new in CASES]


@pytest.mark.parametrize(("file", "old", "new"), CASES, ids=IDS)
def test_each_mutation_is_of_the_source_as_it_is(file: str, old: str, new: str) -> None:
    source = (ROOT / f"jaxrl_async/algorithms/{file}.py").read_text(encoding="utf-8")
    assert source.count(old) == 1, f"tests/contract/mutations.py: say {old!r} in today's words"


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a copy of the package, of which one file is mutated at a time."""
    folder = tmp_path_factory.mktemp("mutated")
    ignored = shutil.ignore_patterns("__pycache__")
    shutil.copytree(ROOT / "jaxrl_async", folder / "jaxrl_async", ignore=ignored)
    return folder


@pytest.mark.slow
@pytest.mark.exhaustive
@pytest.mark.parametrize("file", sorted(MUTATIONS))
def test_without_a_mutation_the_tests_of_values_pass(file: str, package: Path) -> None:
    done = outcome(file, package)
    assert done.returncode == 0, done.stdout


@pytest.mark.slow
@pytest.mark.exhaustive
@pytest.mark.parametrize(("file", "old", "new"), CASES, ids=IDS)
def test_a_mutation_is_caught(file: str, old: str, new: str, package: Path) -> None:
    done = outcome(file, package, old, new)
    caught = re.findall(r"^FAILED (\S+)", done.stdout, re.MULTILINE)
    print(f"{file}: {old} -> {new}: {' '.join(caught)}")
    assert done.returncode == 1 and caught, f"{old!r} -> {new!r} survives:\n{done.stdout}"


def outcome(file: str, folder: Path, old: str = "", new: str = "") -> subprocess.CompletedProcess:
    """Run the tests of a file's values, up to the first that fails, on the copy of the package."""
    original, copied = (x / f"jaxrl_async/algorithms/{file}.py" for x in (ROOT, folder))
    source = original.read_text(encoding="utf-8")
    tests = [ROOT / "tests" / name for name in TESTS[file]]
    options = ("-n0", "-x", "-q", "-rf", "-p", "no:cacheprovider", "-c", ROOT / "pyproject.toml")
    outside = {k: v for k, v in os.environ.items() if k != "PYTEST_ADDOPTS"}  # CI's hides failures
    try:
        mutate(copied, source.replace(old, new))
        return subprocess.run(
            [sys.executable, "-m", "pytest", *options, "--rootdir", ROOT, *tests],
            cwd=folder,  # first on the path of python -m
            env={**outside, "PYTHONPATH": str(folder)},
            capture_output=True,
            text=True,
        )
    finally:
        mutate(copied, source)


def mutate(file: Path, source: str) -> None:
    """Change a module, and forget its bytecode: it could pass for that of the same size."""
    file.write_text(source, encoding="utf-8")
    Path(importlib.util.cache_from_source(str(file))).unlink(missing_ok=True)
