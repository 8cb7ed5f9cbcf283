"""The embedded task: add two numbers, showing the work digit by digit with carries.

    prompt  "4738+2985="
    answer  "8+5=13 3+8+1=12 7+9+1=17 4+2+1=7 #7723"     columns from the right; "+1" is the carry

Problems are a function of (seed, index), so nothing is stored. The held-out problems are the same
for every seed, and no training stream contains any of them, in either order of the summands.
"""

from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from jaxrl_async.config.schema import AdditionSection
from jaxrl_async.data.tokenizer import Tokenizer, character_tokenizer
from jaxrl_async.errors import ConfigError

ALPHABET = "0123456789+=# "
"""Every character of prompts and answers."""
STREAM_SIZE = 1_000_000
"""Problems in one pass of the training stream."""
HELD_OUT_SEED = 20_240_601
"""Seed of the held-out problems; constant, to keep runs with different seeds comparable."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """One addition."""

    a: int
    b: int

    @property
    def prompt(self) -> str:
        """The prompt text for the policy."""
        return f"{self.a}+{self.b}="

    @property
    def reference(self) -> str:
        """The correct sum, in digits."""
        return str(self.a + self.b)


def worked_answer(a: int, b: int, slip: tuple[int, int] = (0, 0)) -> str:
    """Write out the addition from the rightmost column, then '#' and the sum.

    slip: (column, error), an error that is added in that column and also appears in the sum.

    >>> worked_answer(47, 85)
    '7+5=12 4+8+1=13 #132'
    >>> worked_answer(204, 3)
    '4+3=7 0+0=0 2+0=2 #207'
    >>> worked_answer(47, 85, slip=(0, -1))
    '7+5=11 4+8+1=13 #131'
    """
    column, error = slip
    steps: list[str] = []
    carry, x, y = 0, a, b
    while x or y or not steps:
        total = x % 10 + y % 10 + carry
        written = total + error if len(steps) == column else total
        steps.append(f"{x % 10}+{y % 10}{'+1' if carry else ''}={written}")
        carry, x, y = total // 10, x // 10, y // 10
    return f"{' '.join(steps)} #{a + b + error * 10**column}"


def wrong_answer(problem: Problem, random: np.random.Generator) -> str:
    """Return an answer with one wrong digit in the sum.

    With equal probability the work contains a slip in that column, or there is no work at all.
    """
    a, b = problem.a, problem.b
    column = int(random.integers(max(len(str(a)), len(str(b)))))
    right = (a + b) // 10**column % 10
    error = (right + int(random.integers(1, 10))) % 10 - right
    if random.random() < 0.5:
        return str(a + b + error * 10**column)
    return worked_answer(a, b, slip=(column, error))


def draw_problem(random: np.random.Generator, digits: int) -> Problem:
    """Sample summands of 1 to `digits` digits: a uniform length, then a uniform number of this
    length."""
    lengths = random.integers(1, digits + 1, size=2)
    lowest = np.where(lengths == 1, 0, 10 ** (lengths - 1))
    a, b = random.integers(lowest, 10**lengths)
    return Problem(a=int(a), b=int(b))


@lru_cache(maxsize=8)
def held_out(digits: int, size: int) -> tuple[Problem, ...]:
    """Return the first `size` held-out problems, all different in either order of the summands.

    They are sampled like the problems of the stream. Raises ConfigError if they would be more than
    half of all problems.
    """
    numbers = 10**digits
    possible = numbers * (numbers + 1) // 2
    if size > possible // 2:
        raise ConfigError(
            f"data.addition.eval_size = {size} must be at most {possible // 2}, half of the "
            f"{possible} problems with {digits} digits. Lower it or raise data.addition.digits."
        )
    random = np.random.default_rng([HELD_OUT_SEED, digits])
    problems: dict[tuple[int, int], Problem] = {}
    while len(problems) < size:
        problem = draw_problem(random, digits)
        problems.setdefault(_unordered(problem), problem)
    return tuple(problems.values())


def _unordered(problem: Problem) -> tuple[int, int]:
    return min(problem.a, problem.b), max(problem.a, problem.b)


class AdditionStream:
    """Training problems by index, without the held-out ones."""

    def __init__(self, section: AdditionSection, seed: int) -> None:
        self._digits = section.digits
        self._seed = seed
        self._reserved = {_unordered(p) for p in held_out(section.digits, section.eval_size)}

    def __len__(self) -> int:
        return STREAM_SIZE

    def __getitem__(self, index: int) -> Problem:
        """Return problem number `index`, which depends only on the index and the seed."""
        random = np.random.default_rng([self._seed, index])
        while True:
            problem = draw_problem(random, self._digits)
            if _unordered(problem) not in self._reserved:
                return problem


def addition_tokenizer() -> Tokenizer:
    """Return the task's own tokenizer: one token per character."""
    return character_tokenizer(ALPHABET)
