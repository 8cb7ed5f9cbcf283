"""The built-in task `nim`: two seats take stones from one heap; taking the last stone wins.

    first      user 7    assistant 2                      user 4    assistant 3  ...
    second                            user 5  assistant 1

The policy plays both seats against itself. Held-out games are played against a rival that never
errs, from heaps that can be won: every loss there is an error of the policy.
"""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import numpy as np
from pydantic import Field, validate_call

from jaxrl_async.tasks.game import Asked, Game, Round
from jaxrl_async.tasks.task import Task, TaskRecord
from jaxrl_async.types import CORRECT, Message

WORKED_GAMES = 4096
"""Number of distinct records of the warm start."""
HELD_OUT_TIMES = 8
"""Held-out games for each heap that can be won."""
FIRST, SECOND = "first", "second"


class Nim(Game):
    """One game: the winner's part `correct` is 1, the loser's 0; an illegal move loses."""

    seats = (FIRST, SECOND)

    def __init__(self, most: int) -> None:
        self._most, self._left, self._rival = most, 0, False

    async def reset(self, record: TaskRecord) -> Asked:
        """Show the heap to the first seat."""
        self._left, self._rival = int(record["stones"]), bool(record.get("rival"))
        return {FIRST: str(self._left)}

    async def step(self, said: Mapping[str, Message]) -> Asked:
        """Remove the stones, and show the rest to the other seat."""
        ((seat, message),) = said.items()
        other = SECOND if seat == FIRST else FIRST
        if not self._take_stones(str(message["content"]).strip()):
            return self._end(other)
        if not self._left:
            return self._end(seat)
        if self._rival:
            self._left -= best_move(self._left, self._most)
            return self._end(SECOND) if not self._left else {FIRST: str(self._left)}
        return {other: str(self._left)}

    def _take_stones(self, text: str) -> bool:
        """Take the number of stones in the text; return False if the move is not allowed."""
        number = int(text) if text.isdecimal() and len(text) < 10 else 0
        if not 1 <= number <= min(self._most, self._left):
            return False
        self._left -= number
        return True

    def _end(self, winner: str) -> Round:
        return Round(parts={seat: {CORRECT: float(seat == winner)} for seat in self.seats})


def best_move(left: int, most: int) -> int:
    """Return the move that leaves a multiple of most + 1, from which the other seat cannot win; 1
    if no such move exists."""
    return left % (most + 1) or 1


class Heaps(Sequence[TaskRecord]):
    """Games by index: all heaps alternately, each with a demonstration of random moves."""

    def __init__(self, size: int, heaps: Sequence[int], most: int, *, rival: bool) -> None:
        """Make them.

        Args:
            size: number of games.
            heaps: sizes of the heaps that games begin with.
            most: maximum stones per move.
            rival: whether the game itself plays the second seat, without errors.
        """
        self._size, self._heaps, self._most, self._rival = size, heaps, most, rival

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, index: Any) -> Any:
        """Return a game and a demonstration of one seat."""
        index = range(self._size)[index]
        stones = self._heaps[index % len(self._heaps)]
        random, left = np.random.default_rng([index, stones]), stones
        worked: list[Message] = []
        while left:
            move = int(random.integers(1, min(self._most, left) + 1))
            worked += [
                {"role": "user", "content": str(left)},
                {"role": "assistant", "content": str(move)},
            ]
            left -= move
            if left:
                left -= int(random.integers(1, min(self._most, left) + 1))
        return {"question": str(stones), "stones": stones, "rival": self._rival, "worked": worked}


@validate_call
def nim(
    stones: Annotated[int, Field(ge=2, le=200)] = 12,
    most: Annotated[int, Field(ge=1, le=20)] = 3,
) -> Task:
    """Return the task.

    Args:
        stones: the largest initial heap; the smallest has one more than a move may take.
        most: maximum stones per move.
    """
    if stones <= most:
        raise ValueError(f"stones ({stones}) must be more than one move may take ({most})")

    def game() -> Nim:
        return Nim(most)

    heaps = list(range(most + 1, stones + 1))
    to_win = [heap for heap in heaps if heap % (most + 1)] or heaps
    return Task(
        records=Heaps(max(WORKED_GAMES // len(heaps), 1) * len(heaps), heaps, most, rival=False),
        held_out=Heaps(HELD_OUT_TIMES * len(to_win), to_win, most, rival=True),
        game=game,
        words=[str(number) for number in range(stones + 1)],
    )
