"""A task for a tiny policy that plays Harbor's Terminus-2: `benchmarks/harbor_policy.py:task`.

Terminus-2 writes prompts of 700 tokens of an ordinary vocabulary. Here its fixed texts are one
token each, so that a decoder of 0.2 M parameters learns on a CPU to answer them: a turn that writes
a word into a file, and a turn that confirms. Half of the demonstrations write another task's word.

python benchmarks/harbor_tasks.py TASKS 20
python -m jaxrl_async.train benchmarks/harbor_policy.yaml \\
    'task={benchmarks/harbor_policy.py:task: {folder: TASKS, python: HARBOR/bin/python}}'
"""

import subprocess
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from jaxrl_async.data.tokenizer import PRINTABLE
from jaxrl_async.sandbox.harbor_task import harbor_task
from jaxrl_async.tasks.task import Task, TaskRecord

START = '{"analysis": "", "plan": "", "commands": [{"keystrokes": "echo '
BETWEEN, END = " > ", '.txt\\n", "duration": 0.3}], "task_complete": true}'
CONFIRM = '{"analysis": "", "plan": "", "commands": [], "task_complete": true}'
SURE = (
    "Are you sure you want to mark the task as complete? This will trigger your solution to be "
    "graded and you won't be able to make any further corrections. If so, include "
    '"task_complete": true in your JSON response again.'
)
STATE, SCREEN = "Current terminal state:\n", "Current Terminal Screen:\n"
OUTPUT = "New Terminal Output:\n"
ASKED = "Write the word {word} into the file {word}.txt.\n"
TEMPLATE = "import harbor.agents.terminus_2 as t; print(t.__path__[0])"
SHELL, BLANK = "bash-5.2#", "\n" * 39
REPEATED = 8
"""Records of each task, with different demonstrations."""


def template_of(python: str) -> str:
    """Return Terminus-2's prompt up to the task's description."""
    done = subprocess.run([python, "-c", TEMPLATE], capture_output=True, text=True, check=True)
    file = Path(done.stdout.split()[-1]) / "templates" / "terminus-json-plain.txt"
    return file.read_text("utf-8").partition("{instruction}")[0].format()


def conversation(start: str, word: str, written: str) -> list[dict[str, str]]:
    """Return a demonstration. word: the task's; written: what it writes."""
    first = f"{start}{ASKED.format(word=word)}\n\n{STATE}{SCREEN}{SHELL}{BLANK}\n"
    command = f"echo {written} > {written}.txt"
    second = f"{STATE}{OUTPUT}{SHELL} {command}\n{SHELL}{BLANK}{SURE}"
    return [
        {"role": "user", "content": first},
        {"role": "assistant", "content": f"{START}{written}{BETWEEN}{written}{END}"},
        {"role": "user", "content": second},
        {"role": "assistant", "content": CONFIRM},
    ]


def task(folder: str, python: str, right_share: float = 0.5, **more: Any) -> Task:
    """Return Harbor's tasks with demonstrations and words for a tokenizer."""
    agent = {
        "name": "terminus-2",
        "kwargs": {
            "record_terminal_session": False,
            "max_turns": 4,
            "enable_summarize": False,
            "suppress_max_turns_warning": True,
        },
    }
    made = harbor_task(folder, python=python, agent=agent, **more)
    assert isinstance(made.records, Sequence)
    records: Sequence[TaskRecord] = made.records
    words = [str(record["name"]).removeprefix("write-") for record in records]
    start, random = template_of(python), np.random.default_rng(0)
    worked = []
    for record, word in [*zip(records, words, strict=True)] * REPEATED:
        written = word if random.random() < right_share else str(random.choice(words))
        worked.append({**record, "worked": conversation(start, word, written)})
    texts = (start, START, BETWEEN, END, CONFIRM, SURE, STATE, SCREEN, OUTPUT, SHELL, BLANK)
    pieces = ("Write the word ", " into the file ", ".txt")
    return replace(
        made,
        records=worked,
        held_out=worked[:4],
        words=(*texts, *pieces, *sorted(words, reverse=True), *PRINTABLE),
    )
