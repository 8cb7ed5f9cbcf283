"""The examples of docs/clients.md are what the drivers run, and its versions those that are
pinned."""

import re
from pathlib import Path

import pytest
from clients_rig import DRIVERS, ROOT, environments

PAGE = (ROOT / "docs/clients.md").read_text("utf-8")
EXAMPLES = re.findall(r"^```python\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
DRIVEN = sorted(file.name for file in DRIVERS.glob("drive_*.py"))


def flat(text: str) -> str:
    """It without white space: a driver has it in a function, with more settings."""
    return re.sub(r",(?=[)\]}])", "", re.sub(r"\s+", "", text)).replace(",**more", "")


@pytest.mark.parametrize("example", EXAMPLES, ids=[e.split("\n")[0] for e in EXAMPLES])
def test_every_example_is_run_by_a_driver(example: str) -> None:
    paragraphs = [flat(part) for part in example.split("\n\n") if part.strip() != "import os"]
    drivers = [flat(path.read_text("utf-8")) for path in map(Path, DRIVERS.glob("drive_*.py"))]
    assert any(all(part in driver for part in paragraphs) for driver in drivers)


def test_the_table_has_the_versions_that_are_pinned() -> None:
    told = dict(re.findall(r"^\| (\S+) (\d\S*) \|", PAGE, re.MULTILINE))
    pins = [
        re.fullmatch(r"([\w-]+)(?:\[.*\])?==(.+)", requirement).groups()
        for name in ("clients", "clients-older")
        for requirement in environments().ENVIRONMENTS[name].requirements
    ]
    assert told == dict(pins)
