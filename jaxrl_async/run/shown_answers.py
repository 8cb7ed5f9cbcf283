"""Answers to a few held-out prompts at each evaluation, for people: written to a file; the first
and the last are shown at the end of a run."""

import json
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from jaxrl_async.metrics.recorder import encode
from jaxrl_async.rollout.evaluate import EvalSample

log = logging.getLogger(__name__)

NUM_SHOWN = 3
"""Number of prompts whose answers are shown at the end of a run."""
MOST_CHARACTERS = 100
"""Maximum characters of a prompt or an answer where it is shown."""


NEEDED: Mapping[str, type] = {
    "version": int,
    "index": int,
    "seat": str,
    "prompt": str,
    "completion": str,
    "reward": object,
}
"""Required keys of an answer, and their types."""


def answers_writer(file: Path) -> Callable[[Sequence[EvalSample]], None]:
    """Return a function that appends an evaluation's answers to a file, one JSON object each."""

    def write(samples: Sequence[EvalSample]) -> None:
        lines = [encode(asdict(sample)) + "\n" for sample in samples]
        with file.open("a", encoding="utf-8", errors="replace") as stream:
            stream.write("".join(lines))

    return write


def read_answers(file: Path) -> list[dict[str, Any]]:
    """Return the answers of a file, without torn and unrelated lines; [] if it does not exist."""
    answers = []
    lines = file.read_text("utf-8", "replace").split("\n")[:-1] if file.exists() else ()
    for number, line in enumerate(lines, 1):
        try:
            answer = json.loads(line)
            is_complete = all(isinstance(answer[name], kind) for name, kind in NEEDED.items())
        except (ValueError, TypeError, LookupError, RecursionError):
            is_complete = False
        if is_complete:
            answers.append(answer)
        else:
            log.warning("%s: line %d is not an answer of an evaluation: skipped", file, number)
    return answers


def before_and_after(file: Path) -> list[str]:
    """Return lines with the answers of the first and of the last evaluation; [] if there are fewer
    than two evaluations."""
    written = read_answers(file)
    versions = [line["version"] for line in written]
    if not written or versions[0] == versions[-1]:
        return []
    first, last = (
        {(line["index"], line["seat"]): line for line in written if line["version"] == version}
        for version in (versions[0], versions[-1])
    )
    shown = []
    for key in [key for key in first if key in last][:NUM_SHOWN]:
        shown.append(_in_a_line(first[key]["prompt"].strip().splitlines()[-1:]))
        shown += [_answer(line) for line in (first[key], last[key])]
    return shown


def _answer(line: Mapping[str, Any]) -> str:
    answer = _in_a_line(line["completion"].splitlines())
    reward = line["reward"]
    rounded = round(reward, 3) if isinstance(reward, float) else reward
    return f"  step {line['version']:<5} reward {rounded!s:<5} {answer}"


def _in_a_line(lines: Sequence[str]) -> str:
    """Return lines as one, without control characters of a terminal."""
    text = " ".join(" ".join(lines).split())
    text = "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in text)
    return text if len(text) <= MOST_CHARACTERS else text[: MOST_CHARACTERS - 3] + "..."
