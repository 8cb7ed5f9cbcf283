"""The built-in task `guess_number`: a game of several turns.

    user       1 to 16
    assistant  8
    user       higher
    assistant  12
    user       lower
    ...

Fewer guesses give a higher reward; the best policy halves the range with each guess.
"""

from collections.abc import Sequence
from typing import Annotated, Any

import numpy as np
from pydantic import Field, validate_call

from jaxrl_async.tasks.task import Environment, Said, Step, Task, TaskRecord
from jaxrl_async.types import CORRECT, Message

WORKED_GAMES = 4096
"""Number of different records of the warm start."""
HELD_OUT_TIMES = 8
"""Number of held-out games with each number."""
HIGHER, LOWER, NO_NUMBER = "higher", "lower", "a number"


class GuessNumber(Environment):
    """One game: fewer guesses give a higher reward, 0 if the number was not found."""

    def __init__(self, guesses: int) -> None:
        self._guesses, self._made, self._number = guesses, 0, 0

    def reset(self, record: TaskRecord) -> Said:
        """Return the range of the number."""
        self._number = int(record["number"])
        return str(record["question"])

    def step(self, message: Message) -> Step | Said:
        """Answer a guess."""
        self._made += 1
        text = str(message["content"]).strip()
        guess = int(text) if text.isdecimal() and len(text) < 10 else None
        if guess == self._number:
            left = self._guesses - self._made
            return Step(reward=(left + 1) / self._guesses, parts={CORRECT: 1.0}, done=True)
        if self._made == self._guesses:
            return Step(parts={CORRECT: 0.0}, done=True)
        return hint(guess, self._number)

    def state(self) -> Any:
        """Return the state of the game."""
        return {"made": self._made, "number": self._number}

    def restore(self, state: Any) -> None:
        """Continue a saved game."""
        self._made, self._number = state["made"], state["number"]


def hint(guess: int | None, number: int) -> str:
    """Return the direction of the number from a wrong guess."""
    if guess is None:
        return NO_NUMBER
    return HIGHER if number > guess else LOWER


class NumberGames(Sequence[TaskRecord]):
    """Games by index: all numbers cyclically, each game with a demonstration."""

    def __init__(self, size: int, highest: int, guesses: int, careful: float) -> None:
        """Create the games.

        Args:
            size: number of games.
            highest: the maximum number.
            guesses: maximum number of guesses in each game.
            careful: share of demonstrations that guess at random among the remaining numbers; the
                others guess any number.
        """
        self._size, self._highest, self._guesses = size, highest, guesses
        self._careful = careful

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, index: Any) -> Any:
        """Return a game: its number and a demonstration."""
        index = range(self._size)[index]
        number, random = index % self._highest + 1, np.random.default_rng([index, self._highest])
        is_careful, low, high = random.random() < self._careful, 1, self._highest
        question = f"1 to {self._highest}"
        worked: list[Message] = [{"role": "user", "content": question}]
        for turn in range(self._guesses):
            guess = int(random.integers(low, high + 1))
            worked.append({"role": "assistant", "content": str(guess)})
            if guess == number or turn == self._guesses - 1:
                break
            worked.append({"role": "user", "content": hint(guess, number)})
            if is_careful:
                low, high = (max(low, guess + 1), high) if number > guess else (low, guess - 1)
        return {"question": question, "number": number, "worked": worked}


@validate_call
def guess_number(
    highest: Annotated[int, Field(ge=2, le=1000)] = 16,
    guesses: Annotated[int, Field(ge=1, le=100)] = 5,
    worked_share: Annotated[float, Field(ge=0, le=1)] = 0.35,
) -> Task:
    """Return the task.

    Args:
        highest: the largest number, from 1.
        guesses: maximum number of guesses in a game.
        worked_share: share of the warm start's games that guess among the remaining numbers; the
            others guess any number.
    """

    def environment() -> GuessNumber:
        return GuessNumber(guesses)

    numbers = [str(number) for number in range(1, highest + 1)]
    return Task(
        records=NumberGames(
            max(WORKED_GAMES // highest, 1) * highest, highest, guesses, worked_share
        ),
        held_out=NumberGames(HELD_OUT_TIMES * highest, highest, guesses, worked_share),
        environment=environment,
        words=(*numbers, HIGHER, LOWER, NO_NUMBER, "1 to ", " "),
    )
