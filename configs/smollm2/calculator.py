"""The built-in task `calculator` with demonstrations before each question.

SmolLM2's chat template has no place for tools: the system message and two demonstrations
tell the model how to call one.
"""

import json

import jaxrl_async as jr
from jaxrl_async.tasks.calculator import Calculator, Questions, calculate
from jaxrl_async.tasks.task import Said, TaskRecord
from jaxrl_async.types import Message

SYSTEM = "Call the tool calculate, then say its result."
SHOWN = ("47*86", "93-18")


def _worked(expression: str) -> list[Message]:
    """Return a question, the call, the tool's reply, and the answer."""
    result = calculate(expression)
    function = {"name": "calculate", "arguments": json.dumps({"expression": expression})}
    call = {"id": "call_0", "type": "function", "function": function}
    return [
        {"role": "user", "content": f"{expression}?"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": result, "tool_call_id": "call_0", "name": "calculate"},
        {"role": "assistant", "content": result},
    ]


BEGINNING = [
    {"role": "system", "content": SYSTEM},
    *(message for expression in SHOWN for message in _worked(expression)),
]


class ShownCalculator(Calculator):
    """One question after the worked ones: rewarded 1 for the right answer after a call."""

    def reset(self, record: TaskRecord) -> Said:
        """Ask the question."""
        return [*BEGINNING, {"role": "user", "content": super().reset(record)}]


def calculator(digits: int = 2, eval_size: int = 32) -> jr.Task:
    """Return the task.

    Args:
        digits: digits of each of the two numbers.
        eval_size: held-out questions.
    """
    return jr.Task(
        records=Questions(0, 100_000, 2, digits, 1.0),
        held_out=Questions(100_000, eval_size, 2, digits, 1.0),
        environment=ShownCalculator,
    )
