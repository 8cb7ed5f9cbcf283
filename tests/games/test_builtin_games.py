"""The built-in games' rules and records, and the game of the documentation as it stands there."""

import asyncio
import re
from pathlib import Path
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxrl_async.errors import ConfigError
from jaxrl_async.games.nim import FIRST, SECOND, Nim, best_move
from jaxrl_async.games.proposer_solver import terms_of
from jaxrl_async.tasks.named_tasks import load_task

DOCS = Path(__file__).parents[2] / "docs" / "games.md"


def message_of(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


async def winner(first, second, stones: int, most: int) -> str:
    """Who wins if each seat moves as its function of the stones says."""
    game = Nim(most)
    asked = await game.reset({"stones": stones})
    while isinstance(asked, dict):
        ((seat, left),) = asked.items()
        move = (first if seat == FIRST else second)(int(left))
        asked = await game.step({seat: message_of(str(move))})
    return next(seat for seat, parts in asked.parts.items() if parts["correct"] == 1.0)


def wins(stones: int, most: int) -> bool:
    """Whether who moves wins, by looking at all that may follow."""
    won = [False]
    for left in range(1, stones + 1):
        won.append(any(not won[left - m] for m in range(1, min(most, left) + 1)))
    return won[stones]


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 20), st.integers(1, 5), st.integers(0, 99))
def test_the_best_move_of_nim_wins_whatever_the_other_does_where_a_win_is_there(
    stones: int, most: int, seed: int
) -> None:
    random = Random(seed)

    def best(left: int) -> int:
        return best_move(left, most)

    def any_move(left: int) -> int:
        return random.randint(1, min(most, left))

    can = wins(stones, most)
    assert asyncio.run(winner(best, any_move, stones, most)) == FIRST or not can
    assert asyncio.run(winner(best, best, stones, most)) == (FIRST if can else SECOND)


def test_held_out_games_of_nim_can_be_won_and_worked_ones_are_legal() -> None:
    task = load_task({"nim": {"stones": 8, "most": 2}})
    assert all(r["rival"] and wins(r["stones"], 2) for r in task.held_out)
    for record in (task.records[n] for n in range(50)):
        left = record["stones"]
        assert not record["rival"]
        for shown, move in zip(record["worked"][::2], record["worked"][1::2], strict=True):
            assert int(shown["content"]) <= left, "the other seat has moved meanwhile"
            left = int(shown["content"])
            assert 1 <= int(move["content"]) <= min(2, left)
            left -= int(move["content"])
    with pytest.raises(ConfigError, match=r"stones \(3\) must be more"):
        load_task({"nim": {"stones": 3, "most": 3}})


@pytest.mark.parametrize("text", ["3+", "+", "3+4+5", "3-4", "10+1", "sum", "1e1+1", ""])
def test_a_sum_that_is_not_written_as_asked_is_none(text: str) -> None:
    assert terms_of(text, 9) is None
    assert terms_of("3+9", 9) == (3, 9)


def test_the_game_in_the_documentation_is_one_and_pays_as_it_says(tmp_path: Path) -> None:
    blocks = re.findall(r"```python\n(.*?)```", DOCS.read_text("utf-8"), re.S)
    (text,) = [block for block in blocks if "class Haggle(Game)" in block]
    file = tmp_path / "haggle.py"
    file.write_text(text, encoding="utf-8")
    task = load_task(f"{file}:haggle")
    assert load_task(f"{file}:Haggle").game is not None and task.plays and task.judges

    async def paid(offer: str, answer: str) -> dict[str, float]:
        game = task.game()
        asked = game.reset({"most": 10})
        assert asked == {"buyer": "Offer at most 10 for it."}
        asked = await game.step({"buyer": message_of(offer)})
        assert set(asked) == {"seller"}
        return dict((await game.step({"seller": message_of(answer)})).rewards)

    assert asyncio.run(paid("4", "yes")) == {"buyer": 0.6, "seller": 0.4}
    assert asyncio.run(paid("4", "no")) == {"buyer": 0.0, "seller": 0.0}
    assert asyncio.run(paid("much", "yes")) == {"buyer": 1.0, "seller": 0.0}
