"""Show a run's progress in a notebook: one output of the cell, redrawn in place.

Only IPython's display is used, which every kernel has: no widgets, nothing to install.
"""

import sys
import threading
from collections.abc import Callable
from html import escape
from typing import Any

EVERY_S = 0.5
"""Interval between two redraws, seconds."""


def in_notebook() -> bool:
    """Return whether this process is the kernel of a notebook, whose outputs can be redrawn."""
    ipython = sys.modules.get("IPython")  # a kernel has imported it
    shell = None if ipython is None else ipython.get_ipython()
    return getattr(shell, "kernel", None) is not None


class CellDisplay:
    """A cell output that a separate thread redraws until it is stopped."""

    def __init__(self, draw: Callable[[], tuple[str, str]], *, every_s: float = EVERY_S) -> None:
        """draw: returns the output as HTML, and as plain text for displays without HTML."""
        self._draw, self._every_s = draw, every_s
        self._shown: tuple[str, str] | None = None
        self._handle: Any = None
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._repeat, name="cell", daemon=True)

    def start(self) -> None:
        """Show the output in the cell that is running."""
        from IPython.display import DisplayHandle  # only in a kernel

        self._handle = DisplayHandle()
        self._shown = self._draw()
        self._handle.display(_bundle(self._shown), raw=True)
        self._thread.start()

    def stop(self) -> None:
        """Redraw a last time and stop."""
        self._done.set()
        self._thread.join()
        self._update()

    def _repeat(self) -> None:
        while not self._done.wait(self._every_s):
            self._update()

    def _update(self) -> None:
        drawn = self._draw()
        if drawn != self._shown:
            self._shown = drawn
            self._handle.update(_bundle(drawn), raw=True)


def progress_html(
    label: str, done: int, total: int, clock: str, numbers: list[tuple[str, str]], curves: list[str]
) -> str:
    """Return a progress bar with its clock, and labelled numbers and curves below it."""
    shown = " &nbsp; ".join(
        f'<span style="opacity:.6">{escape(label)}</span> {escape(value)}'
        for label, value in numbers
    )
    return (
        f'<div style="font-family:monospace"><b>{escape(label)} {done}/{total}</b> '
        f'<progress value="{done}" max="{total}" style="width:20em"></progress> {escape(clock)}'
        f"<br>{shown}{''.join(f'<br>{escape(line)}' for line in curves)}</div>"
    )


def _bundle(drawn: tuple[str, str]) -> dict[str, str]:
    return {"text/html": drawn[0], "text/plain": drawn[1]}
