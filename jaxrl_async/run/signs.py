"""Signs by which a run's folder knows who wrote its copy, or its checkpoints on a bucket, last.

Each process that begins to write there makes a sign, adds it to the folder's and only then puts it
there. So a folder that does not know the sign that is there was continued on another machine.
"""

import json
from collections.abc import Iterable
from pathlib import Path

SIGNS = "copied.json"
"""File in the run's folder: processes that have written the folder's copy (mirror)."""
WRITERS = "bucket_writers.json"
"""The same of the checkpoints on a bucket (run/checkpoint/bucket.py)."""


def read_signs(path: Path) -> tuple[str, ...]:
    """Return the signs in a file, oldest first: of this folder, or of what it was fetched from."""
    try:
        return tuple(json.loads(path.read_text("utf-8")))
    except (OSError, ValueError):
        return ()


def add_signs(path: Path, signs: Iterable[str]) -> None:
    """Add to the signs in a file."""
    text = json.dumps([*read_signs(path), *signs])
    fresh = path.with_name(path.name + ".tmp")
    fresh.write_text(text, "utf-8")
    fresh.replace(path)
