"""The page of settings has each of them, on one line, with all choices."""

import re

from jaxrl_async.config.field_help import help_of_fields, help_text
from jaxrl_async.config.settings_reference import markdown

ROWS = [line for line in markdown().splitlines() if re.match(r"\| `", line)]


def test_each_row_is_one_line_with_three_cells():
    assert len(ROWS) > 300
    assert [row for row in ROWS if len(re.findall(r"(?<!\\)\|", row)) != 4] == []


def test_a_default_with_line_ends_is_shown_on_one_line():
    first = help_text("reward.process.separator").splitlines()[0]
    assert first == r'  reward.process.separator = "\n\n"    (text)'


def test_a_row_names_every_choice():
    limited = [one for one in help_of_fields() if one.allowed.startswith("one of ")]
    assert len(limited) > 30
    for one in limited:
        start = f"| `{one.path.rpartition('.')[2]}` | `{one.default}` | {one.about}"
        row = next(row for row in ROWS if row.replace(r"\|", "|").startswith(start))
        for choice in one.allowed.removeprefix("one of ").removesuffix(" or null").split(", "):
            assert re.search(rf"\b{re.escape(choice)}\b", row), f"{one.path}: {choice}"


def test_settings_of_a_repeated_section_are_only_named():
    page = markdown()
    assert "### mesh.sampler\n" in page and "as in `mesh.trainer`" in page
    assert "seats.NAME.older\n" in page and "seats.NAME.eval.older\n" not in page
