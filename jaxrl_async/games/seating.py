"""Assignment of players to seats: a pure function of the seed, the game, the version, and the
standings at that version.

    seed, prompt.position, seat ──> choice of a mixture ──> snapshot of `older` ──> SeatedPlayer

All members of a group share one position and one version, so they meet the same opponents.
"""

import hashlib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from jaxrl_async.config.seats_section import (
    INITIAL,
    FillingSection,
    OlderSection,
    SeatFilling,
)
from jaxrl_async.metrics.metric import part_name

HARDNESS = 2
"""Exponent of the share of lost games in a snapshot's weight, for pick=worst."""
LEAST_WEIGHT = 0.01
"""Weight of a snapshot that the policy always beats."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SeatedPlayer:
    """The player of one seat in one group's games, other than the current policy."""

    seat: str
    choice: int  # index of its filling among the seat's choices
    filling: FillingSection
    snapshot: int | None = None  # version of the policy that plays; None: not a policy snapshot

    @property
    def name(self) -> str:
        """The player as a part of metric names; all snapshots share one name."""
        return name_of_filling(self.filling)

    @property
    def full_name(self) -> str:
        """The player's name for display."""
        league = self.filling.older is not None
        return f"{self.name} {self.snapshot}" if league else self.name


def name_of_filling(filling: FillingSection) -> str:
    """Return the name of a filling as a part of metric names."""
    if filling.policy:
        return "policy"
    if filling.older is not None:
        return "older"
    return part_name((filling.model or "").rstrip("/").rpartition("/")[2])


@dataclass(frozen=True, slots=True, kw_only=True)
class Games:
    """Results of the policy against one player."""

    games: int = 0
    reward: float = 0.0  # sum over the games

    def plus(self, games: int, reward: float) -> "Games":
        """Return the results with more games added. reward: sum over those games."""
        return Games(games=self.games + games, reward=self.reward + reward)


@dataclass(frozen=True, slots=True, kw_only=True)
class Standings:
    """Results of the policy against each snapshot, up to one version."""

    games: Mapping[tuple[str, int], Games] = field(default_factory=dict)  # by seat and snapshot
    lowest: float = 0.0  # reward of any game
    highest: float = 0.0

    def wins(self, seat: str, snapshot: int) -> float:
        """Return the policy's share of the reward range against a snapshot, 0 to 1, with one
        virtual game at half of the range."""
        found = self.games.get((seat, snapshot), Games())
        width = self.highest - self.lowest
        earned = (found.reward - found.games * self.lowest) / width if width > 0 else 0.0
        played = found.games if width > 0 else 0
        return (earned + 0.5) / (played + 1)

    def plus(self, seat: str, snapshot: int, rewards: Sequence[float]) -> "Standings":
        """Return the standings with more games against a snapshot added."""
        if not rewards:
            return self
        known = self.games.get((seat, snapshot), Games())
        first = not self.games
        return Standings(
            games={**self.games, (seat, snapshot): known.plus(len(rewards), sum(rewards))},
            lowest=min([*rewards, *(() if first else (self.lowest,))]),
            highest=max([*rewards, *(() if first else (self.highest,))]),
        )

    def of(self, snapshots: Collection[int]) -> "Standings":
        """Return the standings of these snapshots only."""
        kept = {key: games for key, games in self.games.items() if key[1] in snapshots}
        return Standings(games=kept, lowest=self.lowest, highest=self.highest)


def chance(seed: int, *words: object) -> float:
    """Return a number in [0, 1) that depends only on the arguments, on every machine."""
    text = "\0".join(str(word) for word in (seed, *words))
    digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") / 2**64


def weighted_index(weights: Sequence[float], number: float) -> int:
    """Return the index of the weight that a number in [0, 1) falls on."""
    left = number * sum(weights)
    for index, weight in enumerate(weights):
        left -= weight
        if left < 0:
            return index
    return len(weights) - 1


def league_of(older: OlderSection, saved: Sequence[int], version: int) -> tuple[int, ...]:
    """Return the snapshots that may play at a version, oldest first.

    Args:
        older: interval between snapshots, and how many of them play.
        saved: versions of all snapshots, ascending; the first counts regardless of `every`.
        version: version of the group's ticket.
    """
    taken = [v for n, v in enumerate(saved) if v <= version and (n == 0 or v % older.every == 0)]
    return tuple(taken[-older.keep :]) or tuple(saved[:1])


def is_due(older: Sequence[OlderSection], version: int) -> bool:
    """Return whether this version is saved as a snapshot."""
    return any(version % league.every == 0 for league in older)


def snapshot_weights(
    older: OlderSection, seat: str, league: Sequence[int], standings: Standings
) -> list[float]:
    """Return the sampling weight of each snapshot of the league."""
    if older.pick == "latest":
        return [float(n == len(league) - 1) for n in range(len(league))]
    if older.pick == "uniform":
        return [1.0] * len(league)
    lost = [1.0 - standings.wins(seat, snapshot) for snapshot in league]
    return [max(share, 0.0) ** HARDNESS + LEAST_WEIGHT for share in lost]


def seated_player(
    seat: str,
    filling: SeatFilling,
    game: tuple[int, int, int],
    saved: Sequence[int],
    standings: Standings,
) -> SeatedPlayer | None:
    """Return the player of a seat; None: the policy.

    Args:
        seat: name of the seat.
        filling: its possible players.
        game: the run's seed, the prompt's position, the version of the group's ticket.
        saved: versions of all snapshots, ascending.
        standings: standings at that version.
    """
    seed, position, version = game
    number = chance(seed, "filling", seat, position)
    choice = weighted_index(filling.weights, number)
    chosen = filling.choices[choice]
    if chosen.policy:
        return None
    snapshot = None
    if chosen.older is not None:
        league = league_of(chosen.older, saved, version)
        weights = snapshot_weights(chosen.older, seat, league, standings)
        number = chance(seed, "snapshot", seat, position, version)
        snapshot = league[weighted_index(weights, number)]
    elif chosen.endpoint is None and chosen.model == INITIAL:
        snapshot = saved[0]
    return SeatedPlayer(seat=seat, choice=choice, filling=chosen, snapshot=snapshot)
