"""Replace several files of a folder together, once all of them are complete."""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

UNFINISHED = ".writing"
"""Name of the subfolder for files that are being written."""


@contextmanager
def replacing(folder: Path) -> Iterator[Path]:
    """Yield an empty folder. Files written there replace the files of the same names in `folder`
    at the end; if an exception is raised, nothing changes. A link is replaced by a file; the link's
    target is unchanged. One writer at a time."""
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
