"""A run's game: configuration checks, and its environments."""

from collections.abc import Callable

from jaxrl_async.config.schema import Config, SeatSection
from jaxrl_async.errors import ConfigError, RolloutError
from jaxrl_async.games.game_env import GameEnvs, SeatsOf, check_seats
from jaxrl_async.rollout.chat_env import ChatEnvs
from jaxrl_async.run.builders.playing import at_once
from jaxrl_async.tasks.game import Game
from jaxrl_async.types import Prompt


def check_game(config: Config, name: str) -> None:
    """Raise ConfigError for settings that would compare different seats of a game."""
    if config.algorithm.pivots is not None:
        raise ConfigError(
            f"task = {name!r} is a game, and algorithm.pivots continues answers of one turn. Set "
            "algorithm.pivots=null."
        )
    if config.pairs is not None:
        raise ConfigError(
            f"task = {name!r} is a game, and pairs.loss would pair answers of different seats. "
            "Remove pairs.loss: advantages compare only equivalent seats."
        )
    judge = config.reward.judge
    if judge is not None and judge.judges_answers and judge.mode == "rank":
        raise ConfigError(
            f"task = {name!r} is a game, and reward.judge.mode=rank would rank different seats. "
            "Set reward.judge.mode=score."
        )


def make_games(
    chat: ChatEnvs, make: Callable[[], Game], seats_of: SeatsOf, example: Prompt, config: Config
) -> GameEnvs:
    """Make the environments of a game, and try it once on an example. Raises ConfigError."""
    games = GameEnvs(chat, make, seats_of)
    try_game(games, example, config)
    return games


def try_game(games: GameEnvs, example: Prompt, config: Config) -> None:
    """Start and close a game; check that all configured seats exist. Raises ConfigError."""

    async def begin() -> None:
        game, moves = await games.begin(example)
        check_seats(game)
        if not moves.ask:
            raise RolloutError("the game's reset asks no seat. Return the seat that moves first.")
        await games.chat.call(game.close)
        unknown = [seat for seat in config.players if seat not in game.seats]
        if unknown:
            raise RolloutError(
                f"seats.{unknown[0]} is not a seat of the game, whose seats are "
                f"{', '.join(game.seats)}. Correct the name."
            )
        filled = [seat for seat in game.seats if is_never_policy(config.players.get(seat))]
        if len(filled) == len(game.seats):
            raise RolloutError(
                f"seats ({', '.join(filled)}) leaves no seat of the game to the policy. Remove "
                "one of them."
            )

    at_once(begin())


def is_never_policy(section: SeatSection | None) -> bool:
    """Return whether other players fill a seat in all training games."""
    return section is not None and not any(one.policy for one in section.choices)
