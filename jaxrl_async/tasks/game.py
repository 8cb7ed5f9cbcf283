"""What a user brings for several players: a game, whose seats move in turns or side by side.

    record ──reset──> who moves, and what each is told ──> messages of those seats
             ──step──> who moves next, what each earned ──> ... ──> score

Each seat sees a conversation of its own. games/game_env.py plays the seats by the policy, or by
others (ports.Player).
"""

from collections.abc import Awaitable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from jaxrl_async.tasks.record import Said, TaskRecord
from jaxrl_async.types import Message, Score


@dataclass(frozen=True, slots=True, kw_only=True)
class Round:
    """What follows the moves of some seats."""

    ask: Mapping[str, Said] = field(default_factory=dict)  # who moves next, told what; none: over
    rewards: Mapping[str, float] = field(default_factory=dict)  # by seat, for what it did last
    parts: Mapping[str, Mapping[str, float]] = field(default_factory=dict)  # named, by seat


Asked = Round | Mapping[str, Said] | None
"""A Round, or only who moves next; None: the game is over."""


class Game:
    """One game: made afresh for each member of a group, used once.

    Each method may be `def` (it runs in a thread) or `async def`. A seat that is told nothing new
    sees its own conversation alone.
    """

    seats: ClassVar[Sequence[str]] = ()
    """Names of all seats."""
    alike: ClassVar[Sequence[Sequence[str]]] = ()
    """Seats that are given the same task within one game, such as several solvers of one question:
    they are compared with each other, game by game. Any other seat is compared with the same seat
    of the group's other games."""

    def reset(self, record: TaskRecord) -> Asked | Awaitable[Asked]:
        """Begin: say who moves first, and what each of these is told."""
        raise NotImplementedError

    def step(self, said: Mapping[str, Message]) -> Asked | Awaitable[Asked]:
        """Answer the messages of the seats that moved."""
        raise NotImplementedError

    def score(self) -> Mapping[str, Any] | Awaitable[Mapping[str, Any]]:
        """Return what the whole game earned beside its rounds' rewards: by seat a number, or named
        parts that are added up. Also asked where a limit cut the game off."""
        return {}

    def close(self) -> Awaitable[None] | None:
        """Give back what the game holds. Called once, whatever became of it."""
        return None


def peers_of(game: Game, seat: str, member: int) -> str:
    """Return with whom a seat's episode is compared (Episode.peers): the seat's name, or for one of
    `alike` the first of these in this member's game."""
    for team in game.alike:
        if seat in team:
            return f"{team[0]}/{member}"
    return seat


@dataclass(frozen=True, slots=True, kw_only=True)
class SeatScore:
    """What one player of an episode earned, of a program that plays several."""

    voice: str  # by which its calls are known: their header x-session-id
    seat: str  # its name; empty: all play the same
    score: Score
    alike: bool = False  # others of its seat play beside it, with whom it is compared

    def peers(self, member: int) -> str:
        """Return with whom it is compared (Episode.peers)."""
        return f"{self.seat}/{member}" if self.alike and self.seat else self.seat


def seat_of(peers: str) -> str:
    """Return the seat's name in a word of `peers_of`; of `alike` the first."""
    return peers.partition("/")[0]
