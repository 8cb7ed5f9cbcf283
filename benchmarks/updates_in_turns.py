"""Let engines make updates in turns, each in a process of its own that is stopped meanwhile.

A process is stopped by a signal (SIGSTOP), wherever its threads are, and continued where it was: an
asynchronous run has no point at which it could be paused without losing what it was ahead. What it
says of an update (peers/update_lines.py) counts if no such pause touched it.
"""

import json
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

WARM_UP = 3
"""Updates of each process before the first turn: all programs compile in them."""

Line = Mapping[str, float]
"""What is known of one update: began, ended, cpu_s, peak_mib, tokens, draw_s, update_s, ..."""


@dataclass(slots=True)
class Engine:
    """A process that makes updates without end."""

    process: "subprocess.Popen[str]"
    log: Path  # what it wrote to stderr
    stopped_at: float = 0.0
    continued_at: float = 0.0

    def stop(self) -> None:
        """Stop it where it is."""
        self.process.send_signal(signal.SIGSTOP)
        self.stopped_at = time.perf_counter()

    def go_on(self) -> None:
        """Let it continue."""
        self.continued_at = time.perf_counter()
        self.process.send_signal(signal.SIGCONT)

    def updates(self, count: int) -> list[Line]:
        """Return its next updates that no pause has touched. Raises RuntimeError if it ends."""
        lines: list[Line] = []
        while len(lines) < count:
            line = self.line()
            if line["began"] > self.continued_at or line["ended"] < self.stopped_at:
                lines.append(line)
        return lines

    def line(self) -> Line:
        """Return its next update. Raises RuntimeError if it ends."""
        assert self.process.stdout is not None
        text = self.process.stdout.readline()
        if not text:
            raise RuntimeError(f"an engine ended: {self.log.read_text(errors='replace')[-2000:]}")
        line: Line = json.loads(text)
        return line


def in_turns(
    commands: Mapping[str, Sequence[Any]], steps: int, turn: int, folder: Path
) -> dict[str, list[Line]]:
    """Start each command, let it warm up, then let all make `steps` updates, `turn` at a time.

    Args:
        commands: of the engines, by name; each writes peers/update_lines.py's lines.
        steps: updates of each that count.
        turn: updates before the next one's turn.
        folder: for their logs.
    """
    taken: dict[str, list[Line]] = {name: [] for name in commands}
    with ExitStack() as stack:
        engines = {
            name: stack.enter_context(started(command, folder / f"{name}.log"))
            for name, command in commands.items()
        }
        while min(map(len, taken.values())) < steps:
            for name, engine in engines.items():
                engine.go_on()
                taken[name] += engine.updates(min(turn, steps - len(taken[name])))
                engine.stop()
    return taken


@contextmanager
def started(command: Sequence[Any], log: Path) -> Iterator[Engine]:
    """Start an engine and stop it when it is warm; leaving kills it."""
    with log.open("w", encoding="utf-8") as errors:
        process = subprocess.Popen(
            [str(word) for word in command],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
        )
    engine = Engine(process, log)
    try:
        for _ in range(WARM_UP):
            engine.line()
        engine.stop()
        yield engine
    finally:
        process.kill()
        process.wait()
