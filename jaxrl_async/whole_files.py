"""Several files of a folder, replaced together when all of them are whole."""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

UNFINISHED = ".writing"
"""Folder of the files that are being written, within the one that they are for."""


@contextmanager
def replacing(folder: Path) -> Iterator[Path]:
    """Yield an empty folder. What is written there replaces the files of the same names in
    `folder` at the end; if an exception leaves it, nothing changes. A link is replaced by a file:
    what it points to stays as it is. One writer at a time."""
    made = folder / UNFINISHED
    shutil.rmtree(made, ignore_errors=True)  # of a process that was killed
    made.mkdir(parents=True)
    try:
        yield made
        for file in sorted(made.rglob("*")):
            if file.is_file():
                target = folder / file.relative_to(made)
                target.parent.mkdir(exist_ok=True)
                os.replace(file, target)
    finally:
        shutil.rmtree(made, ignore_errors=True)
