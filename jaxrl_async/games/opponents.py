"""Opponents of the policy: players for the rollouts, snapshots and standings for the trainer.

    rollouts ──begins(ticket, prompt)──> the version that decides ──> Opponents(prompt) ──> Players
    trainer  ──note_draw(draw)──> published(version): standings, a snapshot if it is due ──> channel

A version's snapshot and standings exist before any group has a ticket of that version.
"""

import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from jaxrl_async.config.seats_section import OlderSection, SeatSection, fillings
from jaxrl_async.data.prompts import EVAL_POSITION
from jaxrl_async.games.seating import SeatedPlayer, Standings, is_due, league_of, seated_player
from jaxrl_async.games.snapshots import Snapshots
from jaxrl_async.model.policy import Policy
from jaxrl_async.model.spec import Params
from jaxrl_async.ports.rollout import GroupSource, Player
from jaxrl_async.ports.weights import Publisher
from jaxrl_async.types import Draw, Drop, EpisodeGroup, Prompt, Ticket

log = logging.getLogger(__name__)

MAX_BEGUN = 65_536
"""Maximum number of groups whose versions are stored: far more than a gate starts at a time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LeagueTerms:
    """Properties of the run that a league depends on."""

    seed: int
    slack: int  # versions by which a ticket may be older than the newest weights
    oldest_resumable: Callable[[], int | None]  # version of the oldest checkpoint; None: none


class Opponents:
    """Fills the seats that the policy does not. Rollouts and trainer share it."""

    def __init__(
        self,
        seats: Mapping[str, SeatSection],
        terms: LeagueTerms,
        snapshots: Snapshots,
        player_of: Callable[[SeatedPlayer], Player],
    ) -> None:
        """Create no players yet.

        Args:
            seats: possible players, by seat.
            terms: properties of the run.
            snapshots: snapshots of the policy.
            player_of: makes the player of a seat.
        """
        self._seats, self._terms, self._snapshots = seats, terms, snapshots
        self._player_of = player_of
        self.leagues: tuple[OlderSection, ...] = tuple(
            one.older for _, one in fillings(seats) if one.older is not None
        )
        self._keeps_standings = any(league.pick == "worst" for league in self.leagues)
        self._keeps_first = any(
            one.model == "initial" and one.endpoint is None for _, one in fillings(seats)
        )
        self._begun: OrderedDict[int, int] = OrderedDict()  # ticket's version by prompt's position
        self._version, self._lock = 0, threading.Lock()
        self._draw: Draw | None = None
        self._measures: dict[str, float] = {}

    # ---- used by the rollouts

    def begins(self, ticket: Ticket, prompt: Prompt) -> None:
        """Record that a group starts: the version of its ticket decides its opponents."""
        with self._lock:
            self._begun[prompt.position] = ticket.version
            while len(self._begun) > MAX_BEGUN:
                self._begun.popitem(last=False)

    def __call__(self, prompt: Prompt) -> Mapping[str, Player]:
        """Return the players of this prompt's seats; the policy fills seats that are missing."""
        with self._lock:
            version = self._begun.get(prompt.position, self._version)
        seated = self.seated(prompt.position, version)
        return {seat: self._player_of(one) for seat, one in seated.items() if one is not None}

    def seated(self, position: int, version: int) -> dict[str, SeatedPlayer | None]:
        """Return the player of each seat in a group's games; None: the policy.

        Args:
            position: position of its prompt.
            version: version of its ticket; for held-out games the live version.
        """
        with self._lock:
            saved, standings = self._snapshots.versions, self._snapshots.standings(version)
        held_out = position >= EVAL_POSITION
        return {
            seat: seated_player(
                seat,
                section.in_evaluation if held_out else section,
                (self._terms.seed, position, version),
                saved,
                standings,
            )
            for seat, section in self._seats.items()
        }

    def names(self, group: EpisodeGroup) -> dict[str, str]:
        """Return the names of the players in a group's games, for display."""
        seated = self.seated(group.prompt.position, group.ticket.version)
        return {seat: "policy" if one is None else one.full_name for seat, one in seated.items()}

    # ---- used by the trainer

    def begin(self, version: int, policy: Policy) -> None:
        """Resume the league of a resumed run, or start one. Raises CheckpointError.

        version: version of the policy.
        """
        self._version = version
        if not self.leagues and not self._keeps_first:
            return
        self._snapshots.reopen(version)
        if not self._snapshots.versions:
            if version:
                log.warning("the league begins at version %d, without older snapshots", version)
            self._snapshots.save(version, policy)

    def note_draw(self, draw: Draw | None) -> None:
        """Record the batch of the next version; None: the batch was given back."""
        self._draw = draw

    def published(self, version: int, policy: Policy) -> None:
        """Handle a new version, before any sampler uses it. Raises CheckpointError.

        policy: with the weights of this version.
        """
        draw, self._draw = self._draw, None
        groups = () if draw is None else finished(draw)
        known = [(g, self.seated(g.prompt.position, g.ticket.version)) for g in groups]
        measures = seat_measures(known, version)
        if self._keeps_standings:
            with self._lock:
                before = self._snapshots.standings(version - 1)
                after = standings_after(before, known).of(self._playing(version))
                self._snapshots.write_standings(version, after)
        if is_due(self.leagues, version):
            began = time.perf_counter()
            self._snapshots.save(version, policy)
            measures["seats/snapshot_s"] = time.perf_counter() - began
            self._snapshots.forget(self._needed(version))
        if self.leagues:
            measures["seats/snapshots"] = float(len(self._snapshots.versions))
        with self._lock:
            self._version, self._measures = version, measures

    def measures(self) -> dict[str, float]:
        """Return the metrics of the games in the last version's batch."""
        with self._lock:
            return dict(self._measures)

    def _playing(self, version: int) -> set[int]:
        saved = self._snapshots.versions
        return {v for league in self.leagues for v in league_of(league, saved, version)}

    def _needed(self, version: int) -> list[int]:
        """Return the snapshots that may still be used, also after a resume."""
        checkpoint = self._terms.oldest_resumable()
        first = max(0, min(version, version if checkpoint is None else checkpoint))
        versions = range(max(0, first - self._terms.slack), version + 1)
        needed = {v for n in versions for v in self._playing(n)}
        return sorted(needed | set(self._snapshots.versions[:1] if self._keeps_first else ()))


def finished(draw: Draw) -> tuple[EpisodeGroup, ...]:
    """Return the groups of a draw whose rewards are informative about opponents, including groups
    whose games all ended the same way."""
    same = [group for group, reason in draw.dropped if reason is Drop.NO_SIGNAL]
    return (*draw.groups, *same)


SeatedGroup = tuple[EpisodeGroup, Mapping[str, SeatedPlayer | None]]
"""A group, and the player of each seat in its games."""


def standings_after(before: Standings, known: Sequence[SeatedGroup]) -> Standings:
    """Return standings updated with the games of more groups."""
    for group, seated in known:
        rewards = [score.total for score in group.scores]
        for player in seated.values():
            if player is not None and player.filling.older is not None:
                assert player.snapshot is not None
                before = before.plus(player.seat, player.snapshot, rewards)
    return before


def seat_measures(known: Sequence[SeatedGroup], version: int) -> dict[str, float]:
    """Return metrics by seat and player: episodes of the policy against it, their mean reward, and
    the mean age of snapshots in versions."""
    rewards: dict[str, list[float]] = {}
    ages: dict[str, list[int]] = {}
    for group, seated in known:
        for seat, player in seated.items():
            name = f"{seat}.policy" if player is None else f"{seat}.{player.name}"
            rewards.setdefault(name, []).extend(score.total for score in group.scores)
            if player is not None and player.snapshot is not None:
                ages.setdefault(name, []).append(version - player.snapshot)
    return {
        **{f"seats/games_{name}": float(len(of)) for name, of in rewards.items()},
        **{f"seats/reward_{name}": float(np.mean(of)) for name, of in rewards.items() if of},
        **{f"seats/age_{name}": float(np.mean(of)) for name, of in ages.items()},
    }


# ---- wrappers of the trainer's source and publisher


class WatchedSource:
    """A GroupSource that reports its draws to the opponents."""

    def __init__(self, source: GroupSource, opponents: Opponents) -> None:
        self._source, self._opponents = source, opponents
        self.pause, self.resume, self.set_limit = source.pause, source.resume, source.set_limit

    def draw(self, version: int, timeout_s: float | None = None) -> Draw:
        """See ports.GroupSource."""
        draw = self._source.draw(version, timeout_s)
        self._opponents.note_draw(draw)
        return draw

    def give_back(self) -> None:
        """See ports.GroupSource."""
        self._opponents.note_draw(None)
        self._source.give_back()


class WatchedPublisher:
    """A Publisher that reports its versions to the opponents first."""

    def __init__(self, publisher: Publisher, opponents: Opponents, policy: Policy) -> None:
        """policy: the policy whose weights are published."""
        self._publisher, self._opponents, self._policy = publisher, opponents, policy
        self.wait_taken, self.wait_live = publisher.wait_taken, publisher.wait_live

    def publish(self, version: int, params: Params, probe_logprobs: object = None) -> None:
        """See ports.Publisher."""
        self._opponents.published(version, self._policy.with_trained(params))
        self._publisher.publish(version, params, probe_logprobs)
