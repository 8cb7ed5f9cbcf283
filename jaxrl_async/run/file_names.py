"""Checks of file names: inside a folder, or free."""

import os
from pathlib import Path


def is_inside(root: Path, path: Path) -> bool:
    """Return whether a path is in `root` once all links are followed; `root` may be a link."""
    return Path(os.path.realpath(path)).is_relative_to(os.path.realpath(root))


def free_name(path: Path) -> Path:
    """Return the first of path.1, path.2, ... that does not exist."""
    number = 1
    while os.path.lexists(path.with_name(f"{path.name}.{number}")):
        number += 1
    return path.with_name(f"{path.name}.{number}")
