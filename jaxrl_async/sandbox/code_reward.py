"""Run an answer's code against tests, in a sandbox.

    answer ──last block of code──> program ──┬─ with `test` and `entry_point` (HumanEval), or
                                             │  `test_list` (MBPP): one process runs both
                                             └─ with `tests`, [{input, output}]: one process for
                                                each, its output compared here

Tests in the answer's own process can be deceived by code that attacks them (an object that equals
everything); to end early does not help it, since success is a random word that the process gets
after the tests. Comparisons of outputs cannot be deceived in this way.
"""

import json
import re
import secrets
import sys
import sysconfig
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jaxrl_async.errors import ConfigError, RefusedScore
from jaxrl_async.sandbox.sandbox import CommandOutcome, Sandbox, SandboxPool
from jaxrl_async.scorers.answers import after_thinking
from jaxrl_async.types import CORRECT

ERROR, WRONG = "error", "wrong_output"
REASONS = (ERROR, WRONG, "time", "memory", "processes", "output", "disk", "left_processes")
"""Reasons for which a program fails: it raised or ended early, its output is wrong, a limit."""
FENCED = re.compile(r"```[^\n`]*\n(.*?)(?:```|\Z)", re.DOTALL)
PYTHON = (sys.executable, "-S", "-s", "-P", "-c")
"""Python without the start-up files of its packages, which take longer than most answers."""
PACKAGES = {"PYTHONPATH": ":".join(dict.fromkeys(map(sysconfig.get_path, ("purelib", "platlib"))))}
"""The variable by which it finds this Python's packages, such as NumPy."""
ARGUMENT_BYTES = 2**16
"""Maximum length of a program that is passed as an argument, which leaves no file."""
GRADER = """
import json, os, sys
request = json.loads(sys.stdin.readline())
out = os.dup(1)
nothing = os.open(os.devnull, os.O_WRONLY)
os.dup2(nothing, 1)
names = {"__name__": "answer"}
exec(compile(request["program"], "answer.py", "exec"), names)
exec(compile(request["test"], "test.py", "exec"), names)
if request["entry_point"] and "check" in names:
    names["check"](names[request["entry_point"]])
os.write(out, sys.stdin.readline().strip().encode())
"""


@dataclass(frozen=True, slots=True)
class Grade:
    """How many tests a program passed, and why the others failed."""

    passed: float  # share, 0 to 1
    reason: str  # one of REASONS; "": all passed


def code_in(answer: str) -> str:
    """Return an answer's code: its last fenced block after its thinking, or else all of it."""
    text = after_thinking(answer)
    if text is None:
        return ""
    blocks = FENCED.findall(text)
    return blocks[-1] if blocks else text


def program_of(answer: str, record: Mapping[str, Any]) -> str:
    """Return the program of an answer: for HumanEval's records the prompt with the answer's code,
    which completes the function or writes it whole."""
    code, prompt, name = code_in(answer), record.get("prompt"), record.get("entry_point")
    if not isinstance(prompt, str) or not name or f"def {name}" not in prompt:
        return code
    if re.search(rf"^(?:async )?def {re.escape(name)}\b", code, re.MULTILINE):
        return prompt[: prompt.rindex(f"def {name}")] + code
    return prompt + code


def grade(box: Sandbox, program: str, record: Mapping[str, Any], where: str = "") -> Grade:
    """Run a program against a record's tests in a fresh sandbox. Raises RefusedScore if the record
    has no tests, Away if the sandbox fails.

    where: names the record in errors.
    """
    if cases := record.get("tests"):
        return _grade_outputs(box, program, cases)
    test = record.get("test")
    if test is None and record.get("test_list"):
        setup = (*(record.get("test_imports") or ()), record.get("test_setup_code") or "")
        test = "\n".join([*setup, *record["test_list"]])
    if not isinstance(test, str) or not test.strip():
        raise RefusedScore(
            f"{where}has no tests: give records with `test` and `entry_point` (HumanEval), "
            "`test_list` (MBPP), or `tests`, a list of {input, output}."
        )
    word = secrets.token_hex(16)
    request = {"program": program, "test": test, "entry_point": record.get("entry_point")}
    outcome = box.run(
        [*PYTHON, GRADER],
        environ=PACKAGES,
        stdin=f"{json.dumps(request)}\n{word}\n".encode(),
        alone=True,
    )
    good = outcome.ok and outcome.stdout == word.encode()
    return Grade(1.0, "") if good else Grade(0.0, outcome.reason or ERROR)


def _grade_outputs(box: Sandbox, program: str, cases: Sequence[Mapping[str, object]]) -> Grade:
    words = [*PYTHON, program]
    if len(program.encode(errors="replace")) > ARGUMENT_BYTES or "\0" in program:
        box.write({"/work/answer.py": program.encode(errors="replace")})
        words = [*PYTHON[:-1], "/work/answer.py"]
    passed, reason = 0, ""
    for case in cases:
        outcome = box.run(
            words,
            environ=PACKAGES,
            stdin=str(case["input"]).encode(),
            alone=True,
        )
        failed = _failure(outcome, str(case["output"]))
        reason = reason or failed
        passed += not failed
    return Grade(passed / len(cases), reason)


def _failure(outcome: CommandOutcome, right: str) -> str:
    """Return why a case failed; "" if its output is right, except for spaces at ends of lines."""
    if not outcome.ok:
        return outcome.reason or ERROR
    output = outcome.stdout.decode(errors="replace")
    return "" if _lines(output) == _lines(right) else WRONG


def _lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.rstrip().splitlines()]


class CodeReward:
    """A reward function: whether an answer's code passes its record's tests.

    The part `correct` is 1 or 0; with `partial` it is the share of `tests` that pass. The metrics
    logged/failed_REASON are the shares of answers that failed for each of REASONS.
    """

    def __init__(self, pool: SandboxPool, *, partial: bool = False) -> None:
        if not isinstance(partial, bool):
            raise ConfigError(f"partial ({partial!r}) must be true or false.")
        self._pool, self._partial = pool, partial
        self.__name__ = "code"

    def close(self) -> None:
        """End the sandboxes that are kept ready; see RewardScorer.close."""
        self._pool.close()

    def __call__(
        self, completion: str, columns: Mapping[str, Any], log_metric: Callable[[str, float], None]
    ) -> dict[str, float]:
        """Score one answer. Raises RefusedScore, Away."""
        with self._pool.one() as box:
            result = grade(box, program_of(completion, columns), columns)
        for reason in REASONS:
            log_metric(f"failed_{reason}", float(result.reason == reason))
        return {CORRECT: result.passed if self._partial else float(result.passed == 1.0)}
