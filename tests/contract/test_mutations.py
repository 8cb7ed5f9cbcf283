"""One small mistake in what is computed, counted or kept never goes unnoticed."""

import json
import os
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from mutations import GROUPS

ROOT = Path(__file__).parents[2]
CASES = [(g.file, g.tests, *change) for g in GROUPS for change in g.changes]
IDS = [f"{file}: {old} -> {new}" for file, _, old, new in CASES]
SELECTIONS = sorted({(g.file, g.tests) for g in GROUPS}, key=str)
LEAST = {"algorithms": 50, "trainer": 20, "buffer": 12, "sampler": 14, "weights": 9, "model": 14,
         "data": 9, "judge": 8, "teachers": 9, "scorers": 5, "run": 3}  # fmt: skip
"""Mutations of each folder."""


def source_of(file: str) -> str:
    return (ROOT / f"jaxrl_async/{file}.py").read_text(encoding="utf-8")


@pytest.mark.parametrize(("file", "old"), [(f, old) for f, _, old, _ in CASES], ids=IDS)
def test_each_mutation_is_of_the_source_as_it_is(file: str, old: str) -> None:
    count = source_of(file).count(old)
    assert count == 1, f"tests/contract/mutations.py: say {old!r} in today's words of {file}"


def test_every_part_of_the_package_has_its_mutations() -> None:
    found = Counter(file.partition("/")[0] for file, *_ in CASES)
    assert not {folder: found[folder] for folder, least in LEAST.items() if found[folder] < least}
    assert len(CASES) == len(set(CASES)) >= 80


Outcome = Callable[[str, tuple[str, ...], str, str], dict[str, Any]]


@pytest.fixture(scope="module")
def outcome() -> Iterator[Outcome]:
    """Runs tests on the package with one module changed, in a child of one process for all."""
    outside = {k: v for k, v in os.environ.items() if not k.startswith(("PYTEST", "COV_"))}
    with subprocess.Popen(
        [sys.executable, Path(__file__).with_name("mutant.py")],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=outside,  # CI's options hide failures
    ) as process:

        def run(file: str, tests: tuple[str, ...], old: str, new: str) -> dict[str, Any]:
            task = {
                "module": f"jaxrl_async.{file.replace('/', '.')}",
                "path": str(ROOT / f"jaxrl_async/{file}.py"),
                "source": source_of(file).replace(old, new) if old else source_of(file),
                "tests": [str(ROOT / "tests" / name) for name in tests],
            }
            assert process.stdin is not None and process.stdout is not None
            process.stdin.write(json.dumps(task) + "\n")
            process.stdin.flush()
            done: dict[str, Any] = json.loads(process.stdout.readline())
            return done

        yield run
        assert process.stdin is not None
        process.stdin.close()
        process.wait(60)


@pytest.mark.full
@pytest.mark.exhaustive
@pytest.mark.parametrize(("file", "tests"), SELECTIONS, ids=[f for f, _ in SELECTIONS])
def test_without_a_mutation_the_tests_pass(
    file: str, tests: tuple[str, ...], outcome: Outcome
) -> None:
    done = outcome(file, tests, "", "")
    assert done["code"] == 0, done["output"]


@pytest.mark.full
@pytest.mark.exhaustive
@pytest.mark.parametrize(("file", "tests", "old", "new"), CASES, ids=IDS)
def test_a_mutation_is_caught(
    file: str, tests: tuple[str, ...], old: str, new: str, outcome: Outcome
) -> None:
    done = outcome(file, tests, old, new)
    caught = re.findall(r"^(?:FAILED|ERROR) (\S+)", done["output"], re.MULTILINE)
    print(f"{file}: {old} -> {new}: {done['seconds']} s, {' '.join(caught)}")
    assert done["code"] == 1 and caught, f"{old!r} -> {new!r} survives:\n{done['output']}"
