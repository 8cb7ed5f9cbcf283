"""Show live progress: redrawn in place on a terminal and in a notebook, lines elsewhere."""

import sys
import threading
import time
from array import array
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from html import escape
from typing import Any, TextIO, cast

import numpy as np
from rich.console import Console as RichConsole
from rich.console import Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text

from jaxrl_async.metrics.guarded_stream import GuardedStream

REDRAW_S = 0.5
"""Interval between two redraws of a notebook's cell, seconds."""


def in_notebook() -> bool:
    """Return whether this process is the kernel of a notebook, whose outputs can be redrawn."""
    ipython = sys.modules.get("IPython")  # a kernel has imported it
    shell = None if ipython is None else ipython.get_ipython()
    return getattr(shell, "kernel", None) is not None


class CellDisplay:
    """A cell output that a separate thread redraws until it is stopped."""

    def __init__(self, draw: Callable[[], tuple[str, str]]) -> None:
        """draw: returns the output as HTML, and as plain text for displays without HTML."""
        self._draw = draw
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
        while not self._done.wait(REDRAW_S):
            self._update()

    def _update(self) -> None:
        output = self._draw()
        if output != self._shown:
            self._shown = output
            self._handle.update(_bundle(output), raw=True)


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


def _bundle(output: tuple[str, str]) -> dict[str, str]:
    return {"text/html": output[0], "text/plain": output[1]}


EVERY_S, LONGEST_S = 2.0, 60.0
"""Minimum interval between two plain lines, at the start and after an hour, seconds; first, last
and evaluation steps always get a line."""
WINDOW = 32
"""Number of steps from which the remaining time is estimated."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ConsoleProgress:
    """The displayed state. `values` holds the newest value of each key, even from an earlier
    step."""

    total_steps: int
    step: int = 0
    phase: str = ""
    detail: str = ""
    part: tuple[int, int] | None = None  # done and total of a counted phase
    values: Mapping[str, float] = field(default_factory=dict)
    eta_s: float | None = None
    elapsed_s: float = 0.0


SHOWN: tuple[tuple[str, str, Callable[[float], str]], ...] = (
    ("reward", "reward/mean", "{:.3f}".format),
    ("eval loss", "eval/loss", "{:.3f}".format),
    ("pairs right", "preference/accuracy", "{:.3f}".format),
    ("eval accuracy", "eval/accuracy", "{:.3f}".format),
    ("eval reward", "eval/reward", "{:.3f}".format),
    ("tokens/s", "throughput/generated_tokens_per_s", "{:,.0f}".format),
    ("staleness", "staleness/mean", "{:.2f}".format),
    ("sampler idle", "sampler/idle_share", "{:.0%}".format),
    ("trainer idle", "trainer/idle_share", "{:.0%}".format),
)
"""Label, key, format. The held-out reward is shown only if there is no accuracy."""


CURVES = ("reward", "eval accuracy", "eval reward", "eval loss", "pairs right")
"""Labels of SHOWN that may get a curve; the first two that the run has get one."""
CURVE_WIDTH = 48
"""Maximum width of a curve, columns."""

Keep = Callable[[str], object]
"""Called with each line that a log shows, also while a live display shows no lines."""
OnStep = Callable[[int, Mapping[str, float]], object]
"""Called with the number of a finished update (0: the evaluation before the first) and its metrics.
"""


class Console:
    """The run's progress on a terminal, in a notebook or in a log, and for a caller. Only one
    thread at a time may call it, but any thread may call `notice`. If the stream can no longer be
    written, that is logged once."""

    def __init__(
        self,
        total_steps: int,
        *,
        stream: TextIO | None = None,
        live: bool | None = None,
        clock: Callable[[], float] = time.monotonic,
        on_step: OnStep | None = None,
        keep: Keep | None = None,
        name: str = "",
    ) -> None:
        """Create the display. `live` None means live if the stream is a terminal, or if no stream
        is given and this process is a notebook's kernel.

        name: of one of several runs; plain lines begin with it.
        """
        self._on_step, self._name = on_step, f"{name}  " if name else ""
        self.keep = keep
        self.with_caller = False
        """Whether the caller's own on_step is running."""
        self._stream = GuardedStream(stream or sys.stdout, "the console")
        self._clock, self._start = clock, clock()
        self._progress = ConsoleProgress(total_steps=total_steps)
        self._times: deque[tuple[int, float]] = deque(maxlen=WINDOW)
        self._parts: deque[tuple[int, float]] = deque(maxlen=WINDOW)  # of a counted phase
        self._seen = {key: array("d") for label, key, _ in SHOWN if label in CURVES}
        self._printed_at = -EVERY_S
        self._rich = RichConsole(file=cast(TextIO, self._stream))
        terminal = self._rich.is_terminal and not self._rich.is_dumb_terminal
        self._live: Live | CellDisplay | None = None
        if live is None and stream is None and in_notebook():
            self._live = CellDisplay(self._in_cell)
        elif terminal if live is None else live:
            self._live = Live(get_renderable=self._draw, console=self._rich, refresh_per_second=4)
        self._started = False
        self._spinner = Spinner("dots")

    def phase(self, name: str, detail: str = "") -> None:
        """Show the phase (compiling, warm start, training, saving) and its changing detail."""
        self._parts.clear()
        self._show_phase(name, detail, None, None)

    def counted(self, name: str, done: int, total: int, detail: str) -> None:
        """Show a counted phase, such as the updates of a warm start, and its remaining time. On a
        display its bar replaces the bar of the steps."""
        self._parts.append((done, self._clock()))
        left_s = eta_s(self._parts, total)
        line = f"{done}/{total}, {detail}" + (f", eta {duration(left_s)}" if left_s else "")
        self._show_phase(name, detail, (done, total), left_s, line)

    def _show_phase(
        self,
        name: str,
        detail: str,
        part: tuple[int, int] | None,
        left_s: float | None,
        line: str = "",  # instead of the detail, where lines are written
    ) -> None:
        now = self._clock()
        changed = name != self._progress.phase
        self._progress = replace(
            self._progress,
            phase=name,
            detail=detail,
            part=part,
            eta_s=left_s,
            elapsed_s=now - self._start,
        )
        line = line or detail
        if self._live is not None:
            self._show()
        if changed or (line and now - self._printed_at >= spacing_s(now - self._start)):
            self._print(f"[{duration(now - self._start)}] {name}{f': {line}' if line else ''}")

    def step(self, step: int, values: Mapping[str, float]) -> None:
        """Show a finished step and its metrics."""
        now = self._clock()
        total = self._progress.total_steps
        self._times.append((step, now))
        self._progress = replace(
            self._progress,
            step=step,
            values={**self._progress.values, **values},
            eta_s=eta_s(self._times, total),
            elapsed_s=now - self._start,
        )
        for key in self._seen.keys() & values.keys():
            self._seen[key].append(values[key])
        first = len(self._times) == 1
        evaluated = any(key.startswith("eval/") for key in values)
        spaced = now - self._printed_at >= spacing_s(now - self._start)
        prints = spaced or first or step == total or evaluated
        if self._live is not None:
            self._show()
        if prints:
            self._print(plain_line(self._progress))
        if self._on_step is not None:
            self.with_caller = True
            try:
                self._on_step(step, values)
            finally:
                self.with_caller = False

    def notice(self, text: str) -> bool:
        """Show what the run is waiting for; return whether that was printed as a line, not on a
        live display. Any thread may call this."""
        if self._live is not None:
            self._progress = replace(self._progress, phase="waiting", detail=text)
            self._show()
            return False
        since = duration(self._clock() - self._start)
        self._write(f"{self._name}[{since}] waiting: {text}")
        return True

    def summary(self, lines: Iterable[str]) -> None:
        """End the display and print the closing lines, skipping empty ones."""
        self.close()
        for line in lines:
            if line:
                self._print(line)

    def close(self) -> None:
        """End the live display, leaving its last state visible. A second call does nothing."""
        if self._live is not None and self._started:
            self._progress = replace(self._progress, phase="", detail="", part=None)
            self._live.stop()
        self._live = None

    def __enter__(self) -> "Console":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _show(self) -> None:
        assert self._live is not None
        if not self._started:
            self._started = True
            self._live.start()

    def _print(self, line: str) -> None:
        self._printed_at = self._clock()
        self._write(f"{self._name}{line}")

    def _write(self, line: str) -> None:
        """Write a line where no live display is, and keep it."""
        if self._live is None:
            print(line, file=cast(TextIO, self._stream), flush=True)
        if self.keep is not None:
            self.keep(line)

    def _in_cell(self) -> tuple[str, str]:
        # As _draw, on the cell's own thread
        progress = self._progress
        phase = f"{progress.phase}  {progress.detail}".strip()
        clock = f"{self._clock_text(progress)}  {phase}".strip()
        numbers = labelled_values(progress)
        curves = [f"{label}  {line}" for label, line in self._curves(CURVE_WIDTH)]
        line = progress_html(*shown_part(progress), clock, numbers, curves)
        return line, f"{plain_line(progress)}  {phase}".strip()

    def _clock_text(self, progress: ConsoleProgress) -> str:
        """Return the time since the start, and the remaining time."""
        left = "" if progress.eta_s is None else f"  {duration(progress.eta_s)} left"
        return f"{duration(self._clock() - self._start)}{left}"

    def _curves(self, width: int) -> list[tuple[str, str]]:
        """Return label with range, and curve, of up to two numbers measured at least twice."""
        curves = []
        for label, key, form in SHOWN:
            # copied first, since the other thread may append meanwhile
            values = np.array(self._seen.get(key, array("d"))[:])
            values = values[np.isfinite(values)]
            if len(values) > 1:
                extent = f"{form(values.min())} to {form(values.max())}"
                curves.append((f"{label} {extent}", curve(values, width)))
        return curves[:2]

    def _draw(self) -> Group:
        # Runs on rich's own thread. Reads one reference, whose object never changes.
        progress = self._progress
        label, done, total = shown_part(progress)
        table = Table.grid(padding=(0, 1))
        table.add_row(
            Text(f"{label} {done}/{total}", style="bold"),
            ProgressBar(total=total, completed=done, width=32),
            Text(self._clock_text(progress), style="dim"),
        )
        numbers = Text()
        for label, value in labelled_values(progress):
            numbers.append(f"{label} ", style="dim").append(value, style="cyan").append("   ")
        rows: list[Table | Text | Spinner] = [table]
        if numbers.plain:
            rows.append(numbers)
        if not self._rich.options.ascii_only:
            for label, line in self._curves(min(CURVE_WIDTH, self._rich.width - 28)):
                rows.append(Text(f"{label:<27} ", style="dim").append(line, style="green"))
        if progress.phase:
            self._spinner.update(text=Text(f"{progress.phase}  {progress.detail}", style="dim"))
            rows.append(self._spinner)
        return Group(*rows)


def shown_part(progress: ConsoleProgress) -> tuple[str, int, int]:
    """Return the content of the bar: its label, the number done, and the total."""
    if progress.part is not None:
        return progress.phase, *progress.part
    return "step", progress.step, progress.total_steps


def labelled_values(progress: ConsoleProgress) -> list[tuple[str, str]]:
    """Return label and text of each number measured so far."""
    values = dict(progress.values)
    if "eval/accuracy" in values:
        values.pop("eval/reward", None)
    return [(label, form(values[key])) for label, key, form in SHOWN if key in values]


def plain_line(progress: ConsoleProgress) -> str:
    """Format one line for logs: step  12/150  reward 0.531  eval accuracy 0.812  ...  eta 1:23."""
    width = len(str(progress.total_steps))
    parts = [f"step {progress.step:>{width}}/{progress.total_steps}"]
    parts += [f"{label} {value}" for label, value in labelled_values(progress)]
    if progress.eta_s is not None and progress.step < progress.total_steps:
        parts.append(f"eta {duration(progress.eta_s)}")
    return "  ".join(parts)


def spacing_s(elapsed_s: float) -> float:
    """Return the minimum interval between two plain lines at this time, seconds: a sixtieth of the
    elapsed time, so a log of several days has a few thousand lines."""
    return min(max(EVERY_S, elapsed_s / 60), LONGEST_S)


def eta_s(times: Iterable[tuple[int, float]], total_steps: int) -> float | None:
    """Estimate the remaining seconds from the oldest and newest (step, time); None if they are
    equal."""
    times = list(times)
    if len(times) < 2 or times[-1][0] <= times[0][0]:
        return None
    (first, start), (last, now) = times[0], times[-1]
    return (now - start) / (last - first) * max(total_steps - last, 0)


def duration(seconds: float) -> str:
    """Format seconds as 1:05, 12:00 or 1:02:03."""
    total = round(max(seconds, 0.0))
    hours, minutes = total // 3600, total // 60 % 60
    return f"{hours}:{minutes:02}:{total % 60:02}" if hours else f"{minutes}:{total % 60:02}"


# ---- a curve in a line


BLOCKS = "▁▂▃▄▅▆▇█"


def curve(values: Sequence[float], width: int) -> str:
    """Return the curve of finite values, oldest first, in at most `width` columns.

    The lowest column has the lowest block, the highest column the highest block; equal values all
    have the lowest. A column of several values shows their mean.
    """
    shown = np.asarray(values, np.float64)
    shown = shown[np.isfinite(shown)]
    if not len(shown) or width < 1:
        return ""
    columns = np.array([part.mean() for part in np.array_split(shown, min(width, len(shown)))])
    least, most = columns.min(), columns.max()
    share = (columns - least) / (most - least) if most > least else np.zeros(len(columns))
    return "".join(BLOCKS[round(x * (len(BLOCKS) - 1))] for x in share)
