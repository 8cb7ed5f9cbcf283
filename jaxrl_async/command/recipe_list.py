"""jaxrl-async recipes: list the configurations that come with the package, one line each.

usage: jaxrl-async recipes [NAME]

A description is cut at the width of the terminal (of a file or a pipe: 140, or $COLUMNS).
Train one with `jaxrl-async train recipe:NAME [section.key=value ...]`. With NAME, its file is
printed, to copy and change.
"""

import shutil
import sys
import textwrap
from collections.abc import Sequence

from jaxrl_async.config.recipes import PREFIX, recipe_file, recipe_names, recipe_summary
from jaxrl_async.errors import ConfigError

LINE = 140
"""Length of a line of the list if the output is no terminal and COLUMNS is not set, characters."""
LEAST = 60
"""Minimum length of a line, characters: what a narrower terminal wraps."""


def main(argv: Sequence[str]) -> int:
    """Run the command line and return the exit code."""
    if "--help" in argv or "-h" in argv:
        print((__doc__ or "").strip())
        return 0
    if len(argv) > 1 or any(word.startswith("-") for word in argv):
        print("usage: jaxrl-async recipes [NAME]", file=sys.stderr)
        return 2
    try:
        if argv:
            file = recipe_file(argv[0].removeprefix(PREFIX))
            print(file.read_text(encoding="utf-8"), end="")
        else:
            print("\n".join(recipe_lines(shutil.get_terminal_size((LINE, 24)).columns)))
    except ConfigError as error:
        print(error, file=sys.stderr)
        return 2
    return 0


def recipe_lines(columns: int = LINE) -> list[str]:
    """Return a line for each recipe, of at most so many columns: its name and what it is."""
    names = recipe_names()
    width = max(map(len, names)) + 2
    return [
        f"{name:<{width}}"
        + textwrap.shorten(recipe_summary(name), max(columns, LEAST) - width, placeholder=" ...")
        for name in names
    ]
