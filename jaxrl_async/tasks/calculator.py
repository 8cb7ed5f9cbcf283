"""The built-in task `calculator`: a question with numbers, and a tool that computes.

    user       47*86-9?
    assistant  calculate(expression="47*86-9")
    tool       4033
    assistant  4033

The numbers are too large for mental multiplication: the policy must call the tool, and then
repeat its result.
"""

import ast
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any

import numpy as np
from pydantic import Field, validate_call

from jaxrl_async.tasks.task import Environment, Said, Step, Task, TaskRecord
from jaxrl_async.types import CORRECT, Message

SIGNS = ("+", "-", "*")
STREAM_SIZE = 1_000_000
"""Number of questions to train on; the held-out ones come after them."""
MOST_CHARACTERS = 200
"""Maximum length of an expression."""
OPERATIONS: Mapping[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}
WORDS = (
    '{"name": "calculate", "arguments": {"expression": "',  # a tool call up to its expression
    '"}}',
    "calculate(expression)",
    "error:",
    *"0123456789",
    *SIGNS,
    *"/().? ",
)
"""Tokens of the task's own tokenizer."""


def calculate(expression: str) -> str:
    """Compute an arithmetic expression.

    Args:
        expression: numbers with + - * / and brackets.
    """
    if len(expression) > MOST_CHARACTERS:
        raise ValueError(f"longer than {MOST_CHARACTERS} characters")
    try:
        tree = ast.parse(expression.strip(), mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        raise ValueError("not an expression") from None
    value = _value(tree)
    return str(value if isinstance(value, int) else round(value, 6))


def _value(node: ast.expr) -> int | float:
    if isinstance(node, ast.Constant) and type(node.value) in (int, float):
        return node.value  # type: ignore[return-value]
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return -_value(node.operand)
    if isinstance(node, ast.BinOp) and type(node.op) in OPERATIONS:
        result: int | float = OPERATIONS[type(node.op)](_value(node.left), _value(node.right))
        return result
    raise ValueError("not arithmetic")


class Calculator(Environment):
    """One question: rewarded 1 for the correct answer after a call of the tool."""

    tools = (calculate,)

    def __init__(self) -> None:
        self._answer, self._calls = "", 0

    def reset(self, record: TaskRecord) -> Said:
        """Ask the question."""
        self._answer = str(record["answer"])
        return str(record["question"])

    async def step(self, message: Message) -> Step | Said:
        """Run the tool's calls; judge a message without calls as the answer."""
        if message.get("tool_calls") or message.get("tool_call_errors"):
            self._calls += bool(message.get("tool_calls"))
            return await self.run_tools(message)
        right = self._calls > 0 and str(message["content"]).strip() == self._answer
        return Step(parts={CORRECT: float(right)})

    def state(self) -> Any:
        """Return the state of the episode."""
        return {"answer": self._answer, "calls": self._calls}

    def restore(self, state: Any) -> None:
        """Continue a saved episode."""
        self._answer, self._calls = state["answer"], state["calls"]


class Questions(Sequence[TaskRecord]):
    """Questions by index, each with a demonstration."""

    def __init__(self, first: int, size: int, numbers: int, digits: int, worked: float) -> None:
        """Create the questions.

        Args:
            first: number of the first one.
            size: number of questions.
            numbers: numbers in each question.
            digits: maximum digits of a number.
            worked: share whose demonstration calls the tool; the others guess an answer.
        """
        self._first, self._size = first, size
        self._numbers, self._digits, self._worked = numbers, digits, worked

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, index: Any) -> Any:
        """Return a question with its answer and its demonstration."""
        random = np.random.default_rng([range(self._size)[index] + self._first, self._digits])
        numbers = random.integers(10 ** (self._digits - 1), 10**self._digits, self._numbers)
        signs = random.choice(SIGNS, self._numbers - 1)
        pairs = zip(["", *signs], numbers, strict=True)
        expression = "".join(f"{sign}{number}" for sign, number in pairs)
        answer = calculate(expression)
        guess = str(random.integers(10 ** max(len(answer) - 1, 0)))
        worked = [
            {"role": "user", "content": f"{expression}?"},
            *(_with_tool(expression, answer) if random.random() < self._worked else ()),
        ]
        reply = answer if len(worked) > 1 else guess
        return {
            "question": f"{expression}?",
            "answer": answer,
            "worked": [*worked, {"role": "assistant", "content": reply}],
        }


def _with_tool(expression: str, answer: str) -> list[Message]:
    function = {"name": "calculate", "arguments": f'{{"expression": "{expression}"}}'}
    call = {"id": "call_0", "type": "function", "function": function}
    return [
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": answer, "tool_call_id": "call_0", "name": "calculate"},
    ]


@validate_call
def calculator(
    numbers: Annotated[int, Field(ge=2, le=8)] = 2,
    digits: Annotated[int, Field(ge=1, le=9)] = 2,
    eval_size: Annotated[int, Field(ge=1, le=100_000)] = 128,
    worked_share: Annotated[float, Field(ge=0, le=1)] = 0.35,
) -> Task:
    """Return the task.

    Args:
        numbers: numbers in each question.
        digits: digits of each number.
        eval_size: number of held-out questions.
        worked_share: share of the warm start's demonstrations that call the tool; the others guess.
    """
    return Task(
        records=Questions(0, STREAM_SIZE, numbers, digits, worked_share),
        held_out=Questions(STREAM_SIZE, eval_size, numbers, digits, worked_share),
        environment=Calculator,
        words=WORDS,
    )
