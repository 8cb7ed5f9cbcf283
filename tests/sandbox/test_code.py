"""Code rewards: what counts as a program, which tests there are, and what they say."""

import asyncio
import json
from pathlib import Path

import pytest

from jaxrl_async.errors import ConfigError, DataError, RefusedScore
from jaxrl_async.sandbox.code_reward import REASONS, CodeReward, Grade, code_in, grade, program_of
from jaxrl_async.sandbox.code_task import (
    SandboxEnvironment,
    problem_of,
    read_problems,
    shown_outcome,
)
from jaxrl_async.sandbox.sandbox import CommandOutcome, Sandbox, SandboxLimits, SandboxPool
from jaxrl_async.sandbox.small_functions import TRIED, SmallFunctions
from jaxrl_async.scorers.rewards import Judge, RewardScorer
from jaxrl_async.tasks.named_tasks import load_task

HUMAN = {
    "task_id": "local/0",
    "prompt": 'import math\n\n\ndef area(r):\n    """Return the area of a circle."""\n',
    "entry_point": "area",
    "canonical_solution": "    return math.pi * r * r\n",
    "test": "def check(candidate):\n    assert abs(candidate(2) - 12.566370614359172) < 1e-9\n"
    "    assert candidate(0) == 0\n",
}
LISTED = {
    "text": "Write a function that doubles.",
    "test_list": ["assert twice(2) == 4", "assert twice(-1) == -2"],
}
SUMS = {
    "question": "Add the numbers.",
    "tests": [
        {"input": "1 2\n", "output": "3"},
        {"input": "5 5\n", "output": "10\n"},
        {"input": "-1 1\n", "output": "0 \n\n"},
        {"input": "1 1 1\n", "output": "3"},
    ],
}


@pytest.mark.parametrize(
    ("answer", "code"),
    [
        ("x = 1", "x = 1"),
        ("Here:\n```python\nx = 1\n```\nDone.", "x = 1\n"),
        ("```\nx = 1\n```\nor better\n```py\nx = 2\n```", "x = 2\n"),
        ("<think>```\nx = 0\n```</think>\n```\nx = 3\n```", "x = 3\n"),
        ("<think>it never ends ```\nx = 1\n```", ""),
        ("```python\nx = 4", "x = 4"),
    ],
)
def test_the_code_of_an_answer(answer: str, code: str) -> None:
    assert code_in(answer) == code


ANSWERS = {
    "the body alone, as base models write it": (HUMAN["canonical_solution"], 1.0, ""),
    "the whole function": ("```python\ndef area(r):\n    return math.pi * r**2\n```", 1.0, ""),
    "with its own import": ("import math\ndef area(r):\n    return math.pi * r**2", 1.0, ""),
    "wrong": ("    return 3 * r * r\n", 0.0, "error"),
    "no code": ("I do not know.", 0.0, "error"),
    "prints": ("    print('x' * 1000)\n    return math.pi * r * r\n", 1.0, ""),
    "prints without end": ("    while True: print('x' * 10**6)\n", 0.0, "time"),
    "exits in the test": ("    import os; os._exit(0)\n", 0.0, "error"),
    "raises SystemExit": ("    raise SystemExit(0)\n", 0.0, "error"),
    "reads the word before the tests": (
        "    import sys; print(sys.stdin.readline(), file=sys.__stdout__); raise SystemExit\n",
        0.0,
        "error",
    ),
}


@pytest.mark.full
@pytest.mark.parametrize("name", ANSWERS)
def test_humaneval(sandboxes, name: str) -> None:
    answer, passed, reason = ANSWERS[name]
    with Sandbox(SandboxLimits(timeout_s=20.0 if reason != "time" else 1.5)) as box:
        assert grade(box, program_of(answer, HUMAN), HUMAN) == Grade(passed, reason)
        assert box.clean


@pytest.mark.full
@pytest.mark.parametrize(
    ("answer", "passed"),
    [("def twice(x): return 2 * x", 1.0), ("def twice(x): return x + 2", 0.0), ("", 0.0)],
)
def test_mbpp(sandboxes, answer: str, passed: float) -> None:
    with Sandbox(SandboxLimits()) as box:
        assert grade(box, program_of(answer, LISTED), LISTED).passed == passed


@pytest.mark.parametrize("setup", ["class Box:\n    value = 3", ""])
def test_mbpps_tests_have_their_setup(sandboxes, setup: str) -> None:
    record = {"test_list": ["assert value(Box()) == 3"], "test_setup_code": setup}
    with Sandbox(SandboxLimits()) as box:
        assert grade(box, "def value(box): return box.value", record).passed == bool(setup)


READERS = {
    "right": ("print(sum(map(int, input().split())))", 1.0, ""),
    "right for two numbers": ("a, b = map(int, input().split())\nprint(a + b)", 0.75, "error"),
    "a constant": ("print(3)", 0.5, "wrong_output"),
    "more than required": ("print(sum(map(int, input().split())))\nprint(1)", 0.0, "wrong_output"),
    "right, but an error after it": ("print(sum(map(int, input().split())))\n1/0", 0.0, "error"),
    "too long for an argument": ("print(sum(map(int, input().split())))\n#" + "x" * 2**17, 1.0, ""),
}  # fmt: skip


@pytest.mark.full
@pytest.mark.parametrize("name", READERS)
def test_programs_that_read_and_write(sandboxes, name: str) -> None:
    answer, passed, reason = READERS[name]
    pool = SandboxPool(SandboxLimits(), most=1, ready=0)
    logged: dict[str, float] = {}
    whole = CodeReward(pool)(answer, SUMS, logged.__setitem__)
    assert whole == {"correct": float(passed == 1.0)}
    assert logged == {f"failed_{name}": float(name == reason) for name in REASONS}
    assert CodeReward(pool, partial=True)(answer, SUMS, logged.__setitem__) == {"correct": passed}
    pool.close()


def test_packages_of_this_python_are_there(sandboxes) -> None:
    record = {"test": "assert f() == 6\n", "entry_point": "f"}
    with Sandbox(SandboxLimits(timeout_s=60.0)) as box:
        code = "import numpy\ndef f(): return int(numpy.arange(4).sum())"
        assert grade(box, code, record) == Grade(1.0, "")


def test_a_record_without_tests_is_refused(sandboxes) -> None:
    with Sandbox(SandboxLimits()) as box, pytest.raises(RefusedScore, match="has no tests"):
        grade(box, "x = 1", {"question": "?"})


def test_questions_of_the_three_kinds_of_records() -> None:
    assert "```python\nimport math" in problem_of(HUMAN, "")["question"]
    assert "assert twice(2) == 4" in problem_of(LISTED, "")["question"]
    assert "stdin" in problem_of(SUMS, "")["question"]
    own = {"question": "Complete.", "test": "assert 1", "entry_point": "f"}
    assert problem_of(own, "")["question"] == "Complete."
    record = {"messages": [{"role": "user", "content": "a"}], "test": "assert 1"}
    assert problem_of(record, "") == record


def test_a_problem_is_what_stands_between_two_line_feeds(tmp_path: Path) -> None:
    file = tmp_path / "problems.jsonl"
    text, case = "before\u2028after\x85.", {"input": "", "output": ""}
    file.write_text(json.dumps({"text": text, "tests": [case]}, ensure_ascii=False) + "\r\n")
    (problem,) = read_problems(str(file))
    assert problem["question"].startswith(text)
    file.write_bytes(b'{"text": "\xff"}')
    with pytest.raises(DataError, match="not UTF-8"):
        read_problems(str(file))


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "line 2: not JSON"),
        ("[1]", "line 2: has no tests"),
        ('{"question": "a"}', "has no tests"),
        ('{"test": "assert 1"}', "has no text"),
        ('{"text": "a", "tests": [{"input": "1"}]}', "input and output"),
    ],
)
def test_a_bad_line_is_named(tmp_path: Path, line: str, message: str) -> None:
    file = tmp_path / "problems.jsonl"
    file.write_text(json.dumps(HUMAN) + "\n" + line + "\n")
    with pytest.raises(DataError, match=message):
        read_problems(str(file))
    with pytest.raises(DataError, match="nowhere"):
        read_problems(str(tmp_path / "nowhere"))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"tools": ["perl"]}, "a list of python and bash"),
        ({"tools": "bash"}, "tools"),
        ({"memory_mb": -1}, "memory_mb"),
        ({"memory": 5}, "memory"),
        ({"at_once": 0}, "at_once"),
        ({"ready": -1}, "ready"),
        ({"partial": 1}, "partial"),
    ],
)
def test_arguments_that_make_no_sense_are_refused(sandboxes, arguments, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_task({"code:small_functions": arguments})


def test_a_files_task_scores_its_own_solutions(sandboxes, tmp_path: Path) -> None:
    file = tmp_path / "humaneval.jsonl"
    file.write_text(
        "".join(json.dumps({**HUMAN, "task_id": f"local/{i}"}) + "\n" for i in range(3))
    )
    task = load_task({f"code:{file}": {"timeout_s": 20}})
    (reward,) = task.rewards
    assert len(task.records) == 3 and task.environment is None and task.held_out is None
    score = reward(HUMAN["canonical_solution"], task.records[0], lambda name, value: None)
    assert score == {"correct": 1.0}


@pytest.mark.full
def test_small_functions_have_right_tests_and_half_taught_demonstrations(sandboxes) -> None:
    problems = SmallFunctions(0, 200, 0.4)
    whole = [p for p in problems if "+" in p["answer"] or "-" in p["answer"]]
    assert 60 <= len(whole) <= 100 and problems[7] == SmallFunctions(7, 1, 0.4)[0]
    with Sandbox(SandboxLimits()) as box:
        for problem in [problems[i] for i in range(10)]:
            passed = grade(box, program_of(problem["answer"], problem), problem).passed
            assert passed == float(problem in whole)
    words = problems[0]["question"].split()
    factor, sign, number = int(words[1]), words[4], int(words[5])
    value = factor * TRIED[3] + (number if sign == "plus" else -number)
    assert f"assert f({TRIED[3]}) == {value}\n" in problems[0]["test"]


def test_tools_of_an_episode_share_its_files_and_end_with_it(sandboxes) -> None:
    environment = SandboxEnvironment(SandboxLimits(timeout_s=20.0))
    assert environment.bash("echo 5 > a") == ""
    assert environment.python("print(open('a').read())") == "5\n\n"
    assert environment.bash("cat b").endswith("[exit code 1]")
    assert environment.python("1/0").endswith(
        "ZeroDivisionError: division by zero\n\n[exit code 1]"
    )
    box = environment._box
    environment.close()
    assert box is not None and box._process.poll() is not None
    SandboxEnvironment(SandboxLimits()).close()  # nothing was run


def test_what_a_policy_sees_of_a_command() -> None:
    def shown(code: int, reason: str, text: bytes) -> str:
        return shown_outcome(
            CommandOutcome(code=code, reason=reason, stdout=text, stderr=b"", seconds=1.0)
        )

    assert shown(0, "", b"a") == "a"
    assert shown(2, "", b"") == "[exit code 2]"
    assert shown(-9, "memory", b"a") == "a\n[ended by the limit of memory]"
    assert shown(0, "", b"x" * 20_005) == "x" * 20_000 + "\n[5 more characters]"


@pytest.mark.exhaustive
def test_the_recipe_learns(sandboxes, tmp_path: Path) -> None:
    """As it is given, with fewer steps; and the policy may run Python before it answers."""
    import jaxrl_async as jr

    changes = {"steps": 12, "dir": str(tmp_path), "every": 12}
    run = jr.train(config="recipe:code", warm_start={"steps": 200}, **changes)
    (_, first), *_, (_, last) = run.curve("eval/accuracy")
    assert last > first, (first, last)


@pytest.mark.full
def test_rewards_run_side_by_side_on_threads(sandboxes) -> None:
    pool = SandboxPool(SandboxLimits(), most=3, ready=1)
    reward = CodeReward(pool)

    async def all_at_once() -> list[dict[str, float]]:
        calls = [
            asyncio.to_thread(reward, f"print({n})", SUMS, lambda name, value: None)
            for n in range(6)
        ]
        return await asyncio.gather(*calls)

    assert asyncio.run(all_at_once()) == [{"correct": 0.0}] * 6
    pool.close()


@pytest.mark.full
def test_a_scorer_closes_the_sandboxes_of_its_functions(sandboxes) -> None:
    pool = SandboxPool(SandboxLimits(), most=1, ready=1)
    scorer = RewardScorer([Judge(function=CodeReward(pool), name="code")], str, timeout_s=60)
    with pool.one():
        pass
    assert len(pool._free) == 2
    scorer.close()
    assert not pool._free
    with pool.one() as box:
        scorer.close()
    assert not pool._free, "one that was in use is not kept"
    with pytest.raises(Exception, match="ended"):
        box.run(["true"])
    with pool.one():
        pass
    assert pool._free, "a run after a trial keeps sandboxes again"
    pool.close()
