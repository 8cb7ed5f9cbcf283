"""Recipes: the configurations of the package by name, such as recipe:grpo."""

import re
from collections.abc import Iterator, Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from jaxrl_async.errors import ConfigError

PREFIX = "recipe:"
FOLDER = Path(__file__).parents[1] / "recipes"
"""The repository's configs/: a link to it there, a folder in an installed package."""
IN_REPOSITORY = "configs/"
"""Prefix of paths in recipes to files next to them."""


def recipe_names() -> list[str]:
    """Return the names of all recipes: in configs/ first, then in its folders."""
    files = [*sorted(FOLDER.glob("*.yaml")), *sorted(FOLDER.glob("*/*.yaml"))]
    return [file.relative_to(FOLDER).with_suffix("").as_posix() for file in files]


def recipe_file(name: str) -> Path:
    """Return the file of a recipe. Raises ConfigError for an unknown name."""
    names = recipe_names()
    if name not in names:
        near = get_close_matches(name, names, n=3)
        hint = f"did you mean {' or '.join(PREFIX + n for n in near)}?" if near else "give one of"
        known = "" if near else f" {', '.join(names)}."
        raise ConfigError(
            f"{PREFIX}{name}: no such recipe; {hint}{known} `jaxrl-async recipes` lists them."
        )
    return FOLDER / f"{name}.yaml"


def recipe_summary(name: str) -> str:
    """Return a recipe's description from the comment at its beginning: the text below the command
    in its first line, or else after it."""
    first, *rest = recipe_file(name).read_text(encoding="utf-8").splitlines()
    below = list(_comment(rest))
    return " ".join(below) if below else re.split(r" {2,}", first)[-1]


def with_own_paths(tree: Mapping[str, object]) -> dict[str, Any]:
    """Return a recipe's sections with its paths of the form configs/... replaced by paths on this
    machine; also in the name of a choice with arguments."""
    return {_own_path(key): _own_path(value) for key, value in tree.items()}


def _own_path(value: object) -> Any:
    if isinstance(value, Mapping):
        return with_own_paths(value)
    if isinstance(value, str) and value.startswith(IN_REPOSITORY):
        return str(FOLDER / value.removeprefix(IN_REPOSITORY))
    return value


def _comment(lines: list[str]) -> Iterator[str]:
    for line in lines:
        if not line.startswith("# "):
            return
        yield line.removeprefix("# ").strip()
