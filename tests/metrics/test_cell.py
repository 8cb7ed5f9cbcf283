"""Progress in a notebook, in a real kernel: one output that is redrawn, and no lines."""

import os
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

from jaxrl_async.metrics.console import in_notebook, progress_html

ROOT = Path(__file__).parents[2]
RUN = """
import threading
from jaxrl_async.metrics.console import Console

def run():
    with Console(5) as console:
        console.phase("preparing")
        for step in range(6):
            console.step(step, {"reward/mean": step / 5})
        console.phase("saving")
        console.summary(["", "all is well"])

run()
"""
ON_A_THREAD = "worker = threading.Thread(target=run)\nworker.start()\nworker.join()"
FAILS = """
try:
    with Console(5) as console:
        console.step(2, {"eval/accuracy": 0.25})
        raise ValueError
except ValueError:
    print("failed")
"""


@pytest.mark.full
def test_a_cell_has_one_output_with_the_last_state_and_then_the_summary(tmp_path, monkeypatch):
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    monkeypatch.setenv("PYTHONPATH", path)
    cells = [nbformat.v4.new_code_cell(source) for source in (RUN, ON_A_THREAD, FAILS)]
    notebook = nbformat.v4.new_notebook(cells=cells)
    NotebookClient(notebook, timeout=120, resources={"metadata": {"path": tmp_path}}).execute()
    for cell in notebook.cells[:2]:
        shown, printed = cell.outputs
        assert shown.output_type == "display_data" and printed.text == "all is well\n"
        assert "<b>step 5/5</b>" in shown.data["text/html"]
        assert shown.data["text/plain"] == "step 5/5  reward 1.000"
    shown, printed = notebook.cells[2].outputs
    assert (
        shown.data["text/plain"] == "step 2/5  eval accuracy 0.250" and printed.text == "failed\n"
    )


def test_outside_of_a_kernel_nothing_is_shown_in_cells():
    assert not in_notebook()


def test_what_a_run_is_called_is_no_html():
    assert "a&lt;b &amp; c" in progress_html("step", 1, 2, "a<b & c", [("<i>", "1")], [])
