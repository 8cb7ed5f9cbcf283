"""Huge pages: asked for once, at a process's start, and not where somebody said no."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from jaxrl_async.huge_pages import ALLOWED, SWITCH, TUNABLES, tunables_with_huge_pages

MADVISE = "always [madvise] never\n"
ASKED = "glibc.malloc.hugetlb=1"
PROGRAM = """
import os, sys
from jaxrl_async.huge_pages import start_with_huge_pages
print("start", flush=True)
start_with_huge_pages()
print(os.getpid(), os.environ.get("GLIBC_TUNABLES"), *sys.argv[1:], sep="|")
"""


@pytest.mark.parametrize(
    ("environment", "allowed", "expected"),
    [
        ({}, MADVISE, ASKED),
        ({TUNABLES: ""}, MADVISE, ASKED),
        (
            {TUNABLES: "glibc.malloc.arena_max=2"},
            MADVISE,
            f"glibc.malloc.arena_max=2:{ASKED}",
        ),
        ({TUNABLES: "glibc.malloc.hugetlb=2"}, MADVISE, None),
        ({TUNABLES: ASKED}, MADVISE, None),
        ({SWITCH: "0"}, MADVISE, None),
        ({SWITCH: "1"}, MADVISE, ASKED),
        ({}, "always madvise [never]\n", None),
        ({}, "[always] madvise never\n", None),
        ({}, "", None),
    ],
)
def test_huge_pages_are_asked_for_where_the_kernel_waits_for_it(environment, allowed, expected):
    assert tunables_with_huge_pages(environment, allowed) == expected


@pytest.mark.parametrize("said", ["", "0"])
def test_a_process_starts_again_once_with_its_number_and_its_words(said: str, tmp_path: Path):
    program = tmp_path / "program.py"
    program.write_text(PROGRAM, encoding="utf-8")
    environment = {k: v for k, v in os.environ.items() if k != TUNABLES} | {SWITCH: said}
    words = ["two words", "--x=ü"]
    with subprocess.Popen(
        [sys.executable, program, *words], stdout=subprocess.PIPE, text=True, env=environment
    ) as process:
        *starts, last = process.communicate()[0].splitlines()
    allowed = ALLOWED.read_text(encoding="ascii") if ALLOWED.exists() else ""
    asked = tunables_with_huge_pages(environment, allowed)
    assert last == "|".join([str(process.pid), str(asked), *words])
    assert starts == ["start"] * (1 if asked is None else 2)
    assert said != "0" or asked is None


KEPT = """
import sys
from jaxrl_async import huge_pages
print("start", flush=True)
{before}
huge_pages.start_with_huge_pages()
print("end")
"""


@pytest.mark.parametrize(
    ("before", "from_file"),
    [
        ("", False),  # read from stdin, as at a prompt: nobody could read it again
        ("sys.modules['jax'] = sys", True),  # something was begun
        ("sys.executable = '/nowhere/python'", True),
        ("sys.executable = ''", True),
    ],
)
def test_a_process_that_would_lose_something_goes_on_as_it_is(before, from_file, tmp_path: Path):
    program = tmp_path / "program.py"
    program.write_text(KEPT.format(before=before), encoding="utf-8")
    environment = {k: v for k, v in os.environ.items() if k not in (TUNABLES, SWITCH)}
    told = subprocess.run(
        [sys.executable, *([program] if from_file else ["-"])],
        input="" if from_file else program.read_text(encoding="utf-8"),
        capture_output=True,
        text=True,
        env=environment,
    )
    assert told.stdout.split() == ["start", "end"], told.stderr
