"""docs/command_line.md has a section for every command, whose options exist."""

import re
from pathlib import Path

import pytest

from jaxrl_async.command.completion import OPTIONS
from jaxrl_async.command.entry_point import COMMANDS

PAGE = (Path(__file__).parents[2] / "docs/command_line.md").read_text(encoding="utf-8")
SECTIONS = {part.split("\n")[0]: part for part in PAGE.split("\n## ")[1:]}


def test_every_command_has_a_section_and_a_row():
    assert list(SECTIONS) == list(COMMANDS)
    assert re.findall(r"^\| \[`(\w+)`\]", PAGE, re.MULTILINE) == list(COMMANDS)


@pytest.mark.parametrize("name", OPTIONS)
def test_options_that_a_section_names_exist(name):
    """test_completion.py compares OPTIONS with --help itself."""
    documented = set(re.findall(r"(?<![\w-])--[a-z][a-z-]+", SECTIONS[name]))
    assert documented <= set(OPTIONS[name].split())


def test_the_page_names_options():
    assert len(set(re.findall(r"--[a-z][a-z-]+", PAGE))) > 30


def test_commands_in_the_page_exist():
    named = re.findall(r"jaxrl-async (\w+)", PAGE)
    assert len(named) > 10 and set(named) <= set(COMMANDS)
