"""Run notebooks and write their outputs into them: python notebooks/execute.py [FILE.ipynb ...]

Without names, all are run, each in an empty folder of its own. With JAXRL_NOTEBOOK=quick in the
environment nothing is written, because the settings are tiny and the outputs mean nothing.
"""

import os
import re
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import nbformat
from nbclient import NotebookClient

FOLDER = Path(__file__).parent
LONGEST_S = 3600
"""Longest time for a cell, seconds."""
CELL_FILE = re.compile(r"[^\s(\"]*/ipykernel_\d+/\d+\.py")
"""What ipykernel calls the file of a cell in errors: a path of the machine."""


def main(names: Sequence[str]) -> None:
    """Run the named notebooks, one after another."""
    for path in [Path(n) for n in names] or sorted(FOLDER.glob("*.ipynb")):
        notebook = executed(path)
        if os.environ.get("JAXRL_NOTEBOOK") != "quick":
            nbformat.write(notebook, path)
        print(path.name)


def executed(path: Path) -> nbformat.NotebookNode:
    """Run a notebook and return it with its outputs. Raises nbclient's CellExecutionError."""
    notebook = nbformat.read(path, as_version=4)
    with tempfile.TemporaryDirectory() as folder:
        client = NotebookClient(
            notebook,
            timeout=LONGEST_S,
            resources={"metadata": {"path": folder}},
            record_timing=False,
            coalesce_streams=True,
        )
        client.execute()
    for cell in notebook.cells:
        for output in cell.get("outputs", ()):
            if "text" in output:
                output.text = CELL_FILE.sub("cell.py", output.text)
    return notebook


if __name__ == "__main__":
    main(sys.argv[1:])
