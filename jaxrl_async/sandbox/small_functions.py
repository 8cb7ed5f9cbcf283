"""The built-in problems code:small_functions: write a function of one line.

    user       f(x): 3 times x, minus 14
    assistant  def f(x): return 3*x-14

A demonstration is whole with the probability worked_share, and otherwise leaves out the last part:
tests teach what demonstrations alone do not.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from jaxrl_async.tasks.task import TaskRecord

STREAM_SIZE = 100_000
"""Number of problems to train on; the held-out ones come after them."""
TRIED = (-3, 0, 2, 11)
"""Arguments with which the tests call the function."""
SIGNS = (("plus", "+"), ("minus", "-"))
WORDS = (
    "f(x): ",
    " times x, ",
    "plus ",
    "minus ",
    "def f(x): return ",
    "*x",
    *"0123456789+-*x ,:()",
)
"""Tokens of the task's own tokenizer."""


class SmallFunctions(Sequence[TaskRecord]):
    """Problems by index, made when they are read."""

    def __init__(self, first: int, size: int, worked_share: float) -> None:
        self._first, self._size, self._worked_share = first, size, worked_share

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, index: Any) -> Any:
        """Return question, demonstration, tests and the function's name."""
        random = np.random.default_rng(self._first + range(self._size)[index])
        factor, number = (int(n) for n in random.integers((2, 1), (10, 30)))
        word, sign = SIGNS[int(random.integers(len(SIGNS)))]
        value = number if sign == "+" else -number
        right = [(x, factor * x + value) for x in TRIED]
        whole = random.random() < self._worked_share
        return {
            "question": f"f(x): {factor} times x, {word} {number}",
            "answer": f"def f(x): return {factor}*x{sign + str(number) if whole else ''}",
            "entry_point": "f",
            "test": "def check(f):\n" + "".join(f"    assert f({x}) == {y}\n" for x, y in right),
        }
