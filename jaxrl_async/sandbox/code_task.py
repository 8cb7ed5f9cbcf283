"""Tasks whose answers are programs, judged by tests: code:FILE.jsonl, code:small_functions.

task: {code:humaneval.jsonl: {tools: [python], timeout_s: 5, memory_mb: 512}}

Records are HumanEval's (prompt, entry_point, test), MBPP's (text, test_list), or have `tests`, a
list of {input, output} for a program that reads and writes (code_reward.py). With tools the policy
runs commands in a sandbox of its own before it answers.
"""

import functools
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxrl_async.errors import ConfigError, DataError
from jaxrl_async.sandbox.code_reward import CodeReward
from jaxrl_async.sandbox.sandbox import (
    CommandOutcome,
    Sandbox,
    SandboxLimits,
    SandboxPool,
    limits_of,
)
from jaxrl_async.sandbox.small_functions import STREAM_SIZE, WORDS, SmallFunctions
from jaxrl_async.tasks.task import Environment, Task, TaskRecord

SMALL_FUNCTIONS = "small_functions"
TOOLS = ("python", "bash")
COMPLETE = (
    "Complete this Python function. Answer with the whole function in a block of code.\n\n"
    "```python\n{prompt}\n```"
)
READS = "\n\nWrite a Python program that reads its input from stdin and prints the answer."
TESTED = "\n\nYour code should pass:\n{tests}"
QUESTIONS = ("question", "text", "problem", "description", "prompt")
"""Columns that may hold a problem's text; the first one that exists does."""
SHOWN_CHARS = 20_000
"""Maximum length of a command's output that the policy sees, characters."""


class SandboxEnvironment(Environment):
    """An episode with commands in a sandbox, which is started with the first command."""

    def __init__(self, limits: SandboxLimits, tools: Sequence[str] = TOOLS) -> None:
        self._limits, self.tools = limits, tuple(tools)
        self._box: Sandbox | None = None

    def python(self, code: str) -> str:
        """Run a Python program and return what it prints. Files stay, variables do not.

        Args:
            code: the program.
        """
        return self._output(["python3", "-c", code])

    def bash(self, command: str) -> str:
        """Run a shell command and return its output.

        Args:
            command: the command.
        """
        return self._output(["bash", "-c", command])

    def _output(self, words: Sequence[str]) -> str:
        if self._box is None:
            self._box = Sandbox(self._limits)
        return shown_outcome(self._box.run(words))

    def close(self) -> None:
        """End the sandbox."""
        if self._box is not None:
            self._box.close()


def shown_outcome(outcome: CommandOutcome) -> str:
    """Return what a policy sees of a command: its output, its errors, and how it failed."""
    text = (outcome.stdout + outcome.stderr).decode(errors="replace")
    if len(text) > SHOWN_CHARS:
        text = f"{text[:SHOWN_CHARS]}\n[{len(text) - SHOWN_CHARS} more characters]"
    if outcome.reason:
        return f"{text}\n[ended by the limit of {outcome.reason}]".lstrip()
    return f"{text}\n[exit code {outcome.code}]".lstrip() if outcome.code else text


def code_task(
    source: str,
    *,
    eval_path: str | None = None,
    tools: Sequence[str] = (),
    partial: bool = False,
    eval_size: int = 64,
    worked_share: float = 0.4,
    at_once: int = 16,
    ready: int = 2,
    **limits: object,
) -> Task:
    """Return the task of a file of problems.

    Args:
        source: FILE.jsonl, or small_functions.
        eval_path: file of held-out problems; None: the last ones of FILE.jsonl.
        tools: python, bash: what the policy may run before it answers.
        partial: reward the share of `tests` that pass; False: 1 if all do.
        eval_size: number of held-out small functions.
        worked_share: share of their demonstrations that are whole.
        at_once: maximum number of answers that are tested at the same time.
        ready: sandboxes that are started before they are needed.
        limits: of each sandbox (sandbox.SandboxLimits): memory_mb, disk_mb, processes, timeout_s,
            output_kb, network, readable.

    Raises ConfigError, DataError.
    """
    if isinstance(tools, str) or set(tools) - set(TOOLS):
        raise ConfigError(f"tools ({tools!r}) must be a list of {' and '.join(TOOLS)}.")
    for name, value, least in (("at_once", at_once, 1), ("ready", ready, 0)):
        if not isinstance(value, int) or value < least:
            raise ConfigError(f"{name} ({value!r}) must be a whole number of at least {least}.")
    bounds = limits_of(limits)
    with Sandbox(bounds) as box:  # fail early
        box.wait_ready()
    pool = SandboxPool(bounds, most=at_once, ready=ready)
    environment = functools.partial(SandboxEnvironment, bounds, tools) if tools else None
    reward = CodeReward(pool, partial=partial)
    if source == SMALL_FUNCTIONS:
        return Task(
            records=SmallFunctions(0, STREAM_SIZE, worked_share),
            held_out=SmallFunctions(STREAM_SIZE, eval_size, 1.0),
            environment=environment,
            reward=reward,
            words=WORDS,
        )
    return Task(
        records=read_problems(source),
        held_out=None if eval_path is None else read_problems(eval_path),
        environment=environment,
        reward=reward,
    )


def read_problems(path: str) -> list[TaskRecord]:
    """Return a file's problems with a column `question`. Raises DataError."""
    try:
        lines = Path(path).read_text(encoding="utf-8").split("\n")  # not at U+2028
    except OSError as error:
        raise DataError(f"{path}: {error.strerror}. Give a file with a problem a line.") from None
    except UnicodeDecodeError as error:
        raise DataError(f"{path}: not UTF-8 text (byte {error.start}). Save it as UTF-8.") from None
    problems = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
        except ValueError as error:
            raise DataError(f"{path}, line {number}: not JSON ({error}). Correct it.") from None
        problems.append(problem_of(record, f"{path}, line {number}"))
    return problems


def problem_of(record: object, where: str) -> TaskRecord:
    """Return a record with its question. where: names it in errors. Raises DataError."""
    if not isinstance(record, dict) or not any(map(record.get, ("test", "test_list", "tests"))):
        raise DataError(
            f"{where}: has no tests. Give `test` and `entry_point` (HumanEval), `test_list` "
            "(MBPP), or `tests`, a list of {input, output}."
        )
    cases: Sequence[Mapping[str, Any]] = record.get("tests") or ()
    if not all(isinstance(case, dict) and {"input", "output"} <= set(case) for case in cases):
        raise DataError(f"{where}: `tests` must be a list of objects with input and output.")
    text = next((record[name] for name in QUESTIONS if isinstance(record.get(name), str)), None)
    if record.get("messages"):
        return record
    if text is None:
        raise DataError(f"{where}: has no text. Give one of {', '.join(QUESTIONS)}.")
    if cases:
        text += READS
    elif record.get("test_list"):
        text += TESTED.format(tests="\n".join(record["test_list"]))
    elif "question" not in record:
        text = COMPLETE.format(prompt=text.strip("\n"))
    return {**record, "question": text}
