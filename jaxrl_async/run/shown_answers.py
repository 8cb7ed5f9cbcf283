"""Answers to a few held-out prompts at each evaluation, for people: written down, and shown at the
end of a run beside those of its start."""

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path

from jaxrl_async.metrics.recorder import read_lines
from jaxrl_async.rollout.evaluate import EvalSample

NUM_SHOWN = 3
"""Prompts whose answers are shown at the end of a run."""
MOST_CHARACTERS = 100
"""Length to which a prompt or an answer is cut where it is shown."""


def answers_writer(file: Path) -> Callable[[Sequence[EvalSample]], None]:
    """Return what appends the answers of an evaluation to a file, a JSON object each."""

    def write(samples: Sequence[EvalSample]) -> None:
        lines = [json.dumps(asdict(s), ensure_ascii=False) + "\n" for s in samples]
        with file.open("a", encoding="utf-8") as stream:
            stream.write("".join(lines))

    return write


def before_and_after(file: Path) -> list[str]:
    """Return lines with the answers of the first and of the last evaluation; [] if there is one
    alone, or none."""
    written = read_lines(file) if file.exists() else []
    versions = [line["version"] for line in written]
    if not written or versions[0] == versions[-1]:
        return []
    shown = []
    first = [line for line in written if line["version"] == versions[0]]
    last = {line["prompt"]: line for line in written if line["version"] == versions[-1]}
    for before in [line for line in first if line["prompt"] in last][:NUM_SHOWN]:
        after = last[before["prompt"]]
        shown.append(_in_a_line(before["prompt"].strip().splitlines()[-1:]))
        for line in (before, after):
            answer = _in_a_line(line["completion"].split("\n"))
            shown.append(f"  step {line['version']:<5} reward {line['reward']:<5g} {answer}")
    return shown


def _in_a_line(lines: Sequence[str]) -> str:
    text = " ".join(" ".join(lines).split())
    return text if len(text) <= MOST_CHARACTERS else text[: MOST_CHARACTERS - 3] + "..."
