"""The interface of games for several players, whose seats move alternately or at the same time.

    record ──reset──> who moves, and the message to each ──> messages of those seats
             ──step──> who moves next, what each earned ──> ... ──> score

Each seat sees a separate conversation. games/game_env.py plays the seats with the policy, or with
others (ports.Player).
"""

from collections.abc import Awaitable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from jaxrl_async.tasks.task import Said, TaskRecord
from jaxrl_async.types import Message, Score


@dataclass(frozen=True, slots=True, kw_only=True)
class Round:
    """The result of the moves of some seats."""

    ask: Mapping[str, Said] = field(default_factory=dict)  # messages to the next seats; {}: over
    rewards: Mapping[str, float] = field(default_factory=dict)  # by seat, for its last move
    parts: Mapping[str, Mapping[str, float]] = field(default_factory=dict)  # named, by seat


Asked = Round | Mapping[str, Said] | None
"""A Round, or only the seats that move next; None: the game is over."""


class Game:
    """One game: created for each member of a group, used once.

    Each method may be `def` (it runs in a thread) or `async def`. A seat that gets no message sees
    only its own conversation.
    """

    seats: ClassVar[Sequence[str]] = ()
    """Names of all seats."""
    alike: ClassVar[Sequence[Sequence[str]]] = ()
    """Seats with the same task within one game, such as several solvers of one question: they are
    compared with each other, game by game. Any other seat is compared with the same seat of the
    group's other games."""

    def reset(self, record: TaskRecord) -> Asked | Awaitable[Asked]:
        """Begin: return the seats that move first, with the message to each."""
        raise NotImplementedError

    def step(self, said: Mapping[str, Message]) -> Asked | Awaitable[Asked]:
        """Answer the messages of the seats that moved."""
        raise NotImplementedError

    def score(self) -> Mapping[str, Any] | Awaitable[Mapping[str, Any]]:
        """Return what the game earned in addition to its rounds' rewards: by seat a number, or
        named parts that are added up. Also called if a limit cut it off."""
        return {}

    def close(self) -> Awaitable[None] | None:
        """Release the game's resources. Called once, however it ended."""
        return None


def peers_of(game: Game, seat: str, member: int) -> str:
    """Return the group that a seat's episode is compared with (Episode.peers): the seat's name, or
    for a seat in `alike` the first of these seats in this member's game."""
    for team in game.alike:
        if seat in team:
            return f"{team[0]}/{member}"
    return seat


@dataclass(frozen=True, slots=True, kw_only=True)
class SeatScore:
    """The score of one player of an episode, for a program that plays several."""

    player: str  # identifies its calls: their header x-session-id
    seat: str  # its name; empty: all play the same seat
    score: Score
    alike: bool = False  # it is compared with others of its seat in the same episode

    def peers(self, member: int) -> str:
        """Return the group that it is compared with (Episode.peers)."""
        return f"{self.seat}/{member}" if self.alike and self.seat else self.seat


def seat_of(peers: str) -> str:
    """Return the seat's name in a value of `peers_of`; for `alike` the first seat."""
    return peers.partition("/")[0]
