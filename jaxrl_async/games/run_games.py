"""A run's game: what a configuration may ask of it, and its environments."""

from collections.abc import Callable

from jaxrl_async.config.schema import Config, SeatSection
from jaxrl_async.errors import ConfigError, RolloutError
from jaxrl_async.games.game_env import GameEnvs, SeatsOf, seats_checked
from jaxrl_async.rollout.chat_env import ChatEnvs
from jaxrl_async.run.builders.playing import at_once
from jaxrl_async.tasks.game import Game
from jaxrl_async.types import Prompt


def check_game(config: Config, name: str) -> None:
    """Raise ConfigError for what would compare the seats of a game with each other."""
    if config.algorithm.pivots is not None:
        raise ConfigError(
            f"task = {name!r} is a game, and algorithm.pivots continues answers of one turn. Set "
            "algorithm.pivots=null."
        )
    if config.pairs is not None:
        raise ConfigError(
            f"task = {name!r} is a game, and pairs.loss would pair answers of different seats. "
            "Leave pairs.loss out: advantages compare each seat with its own kind."
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
    """Make the environments of a game, which is begun once on an example. Raises ConfigError."""
    games = GameEnvs(chat, make, seats_of)
    try_game(games, example, config)
    return games


def try_game(games: GameEnvs, example: Prompt, config: Config) -> None:
    """Begin a game and end it; all seats that are filled must be its own. Raises ConfigError."""

    async def begun() -> None:
        game, moves = await games.begun(example)
        seats_checked(game)
        if not moves.ask:
            raise RolloutError("the game's reset asks no seat. Say who moves first.")
        await games.chat.call(game.close)
        strange = [seat for seat in config.seats if seat not in game.seats]
        if strange:
            raise RolloutError(
                f"seats.{strange[0]} is no seat of the game, whose seats are "
                f"{', '.join(game.seats)}. Correct the name."
            )
        filled = [seat for seat in game.seats if never_the_policys(config.seats.get(seat))]
        if len(filled) == len(game.seats):
            raise RolloutError(
                f"seats ({', '.join(filled)}) leaves none of the game's to the policy. Leave one "
                "out."
            )

    at_once(begun())


def never_the_policys(section: SeatSection | None) -> bool:
    """Return whether others fill a seat in all training games."""
    return section is not None and not any(one.policy for one in section.choices)
