"""The built-in task `proposer_solver`: one seat writes a sum, others solve it.

    proposer  user sum    assistant 3+5
    solver_1  user 3+5    assistant 8        solver_2  user 3+5    assistant 7   ...

A solver is rewarded for the correct result. The proposer's reward is highest, 1, if half of the
solvers are correct, and 0 if all or none are: it proposes what the solvers can just learn
(Sukhbaatar et al. 2017, arXiv:1703.05407; Zhao et al. 2025, Absolute Zero, arXiv:2505.03335). In
held-out games, the record gives one solver a sum.
"""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import numpy as np
from pydantic import Field, validate_call

from jaxrl_async.tasks.game import Asked, Game, Round
from jaxrl_async.tasks.task import Task, TaskRecord
from jaxrl_async.types import CORRECT, Message

WORKED_GAMES = 8192
"""Number of distinct records of the warm start."""
PROPOSER = "proposer"
ASKED = "sum"
SIGN = "+"


class ProposerSolver(Game):
    """One game: a sum, and the solvers' results."""

    def __init__(self, highest: int, solvers: int) -> None:
        self._highest, self._result = highest, 0
        self._solvers = tuple(f"solver_{number}" for number in range(1, solvers + 1))
        self.seats, self.alike = (PROPOSER, *self._solvers), (self._solvers,)  # type: ignore[misc]

    async def reset(self, record: TaskRecord) -> Asked:
        """Ask for a sum, or give the record's sum to the first solver."""
        given = record.get("given")
        if given is None:
            return {PROPOSER: ASKED}
        self._result = sum(terms_of(str(given), self._highest) or ())
        return {self._solvers[0]: str(given)}

    async def step(self, said: Mapping[str, Message]) -> Asked:
        """Pass the sum to the solvers, or score their answers."""
        if PROPOSER in said:
            text = str(said[PROPOSER]["content"]).strip()
            terms = terms_of(text, self._highest)
            if terms is None:
                return Round(parts={PROPOSER: {"well_formed": 0.0}})
            self._result = sum(terms)
            return dict.fromkeys(self._solvers, text)
        right = {seat: is_number(message, self._result) for seat, message in said.items()}
        share = sum(right.values()) / len(right)
        return Round(
            parts={seat: {CORRECT: float(ok)} for seat, ok in right.items()},
            rewards={} if len(said) < len(self._solvers) else {PROPOSER: 1 - abs(2 * share - 1)},
        )


def terms_of(text: str, highest: int) -> tuple[int, ...] | None:
    """Return the two terms of a well-formed sum; None for anything else."""
    terms = text.split(SIGN)
    wrong = len(terms) != 2 or not all(t.isdecimal() and len(t) < 10 for t in terms)
    if wrong or any(int(t) > highest for t in terms):
        return None
    return tuple(map(int, terms))


def is_number(message: Message, number: int) -> bool:
    """Return whether a message is exactly this number."""
    return str(message["content"]).strip() == str(number)


class SumRecords(Sequence[TaskRecord]):
    """Games by index, with demonstrations of both kinds of seat."""

    def __init__(self, size: int, highest: int, right: float, *, given: bool) -> None:
        """Make them.

        Args:
            size: number of games.
            highest: the largest term.
            right: share of correct results in the demonstrations.
            given: whether the record contains the sum.
        """
        self._size, self._highest, self._right, self._given = size, highest, right, given

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, index: Any) -> Any:
        """Return a game and a demonstration: the proposer's for even indices."""
        index = range(self._size)[index]
        random = np.random.default_rng([index, self._highest, self._given])
        a, b = (int(random.integers(0, self._highest + 1)) for _ in range(2))
        text, result = f"{a}{SIGN}{b}", a + b
        if random.random() >= self._right:
            result = int(random.integers(0, 2 * self._highest + 1))
        pair = (ASKED, text) if index % 2 == 0 and not self._given else (text, str(result))
        worked = [
            {"role": role, "content": content}
            for role, content in zip(("user", "assistant"), pair, strict=True)
        ]
        given = {"given": text, "answer": str(a + b)} if self._given else {}
        return {"question": pair[0], "worked": worked, **given}


@validate_call
def proposer_solver(
    highest: Annotated[int, Field(ge=1, le=100)] = 9,
    solvers: Annotated[int, Field(ge=2, le=64)] = 4,
    worked_right: Annotated[float, Field(ge=0, le=1)] = 0.4,
) -> Task:
    """Return the task.

    Args:
        highest: the largest term of a sum.
        solvers: number of solvers of the same sum.
        worked_right: share of correct results in the warm start.
    """

    def game() -> ProposerSolver:
        return ProposerSolver(highest, solvers)

    return Task(
        records=SumRecords(WORKED_GAMES, highest, worked_right, given=False),
        held_out=SumRecords(128, highest, worked_right, given=True),
        game=game,
        words=(*(str(number) for number in range(2 * highest + 1)), SIGN, ASKED),
    )
