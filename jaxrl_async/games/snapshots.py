"""Snapshots of the policy by version, and its results against them, in the run's folder.

    league/00000010/      a Hugging Face directory; it appears complete or not at all
    league/standings.jsonl    one line for each version, for pick=worst

Everything is written before the checkpoint of the same version, so a killed run finds it again.
"""

import dataclasses
import json
import logging
import shutil
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxrl_async.errors import CheckpointError
from jaxrl_async.games.seating import Games, Standings
from jaxrl_async.model.policy import Policy

log = logging.getLogger(__name__)

STANDINGS = "standings.jsonl"
DIGITS = 8


class Snapshots:
    """The snapshots in one folder, and the standings. Used under its owner's lock."""

    def __init__(self, folder: Path, *, remembered: int) -> None:
        """Use a folder; it is created by the first snapshot.

        Args:
            folder: folder of the league.
            remembered: number of newest versions whose standings are kept in memory.
        """
        self._folder, self._remembered = folder, remembered
        self._standings: OrderedDict[int, Standings] = OrderedDict()
        self.versions: tuple[int, ...] = ()  # of all snapshots, ascending

    def reopen(self, version: int) -> None:
        """Load snapshots and standings up to this version, and remove later ones, which the run
        produces again."""
        for unfinished in self._folder.glob("*.tmp"):
            shutil.rmtree(unfinished) if unfinished.is_dir() else unfinished.unlink()
        saved = sorted(int(p.name) for p in self._folder.glob("[0-9]*") if p.name.isdigit())
        for later in [v for v in saved if v > version]:
            shutil.rmtree(self.path(later))
        self.versions = tuple(v for v in saved if v <= version)
        lines = [line for line in self._lines() if line["version"] <= version]
        for line in lines[-self._remembered :]:
            self._remember(line["version"], standings_from(line))
        if (self._folder / STANDINGS).exists():
            text = "".join(json.dumps(line) + "\n" for line in lines)
            fresh = self._folder / (STANDINGS + ".tmp")
            fresh.write_text(text, encoding="utf-8")
            fresh.replace(self._folder / STANDINGS)

    def path(self, version: int) -> Path:
        """Return the directory of a snapshot."""
        return self._folder / f"{version:0{DIGITS}d}"

    def save(self, version: int, policy: Policy) -> None:
        """Write a snapshot, without a vision tower: games have no images. Raises
        CheckpointError."""
        unfinished = self.path(version).with_suffix(".tmp")
        try:
            shutil.rmtree(unfinished, ignore_errors=True)
            dataclasses.replace(policy, tower=None).save_pretrained(unfinished)
            shutil.rmtree(self.path(version), ignore_errors=True)
            unfinished.replace(self.path(version))
        except OSError as error:
            raise CheckpointError(
                f"{self.path(version)}: the snapshot of version {version} could not be written: "
                f"{error}. Check whether the disk is full and the folder writable."
            ) from error
        self.versions = tuple(sorted({*self.versions, version}))

    def forget(self, needed: Sequence[int]) -> None:
        """Remove all snapshots except these."""
        for version in self.versions:
            if version not in needed:
                shutil.rmtree(self.path(version), ignore_errors=True)
        self.versions = tuple(v for v in self.versions if v in needed)

    # ---- standings

    def standings(self, version: int) -> Standings:
        """Return the standings at a version; if they were dropped, the oldest in memory."""
        known = [v for v in self._standings if v <= version] or list(self._standings)[:1]
        return self._standings[known[-1]] if known else Standings()

    def write_standings(self, version: int, standings: Standings) -> None:
        """Store the standings at a version in memory and in the file. Raises CheckpointError."""
        self._remember(version, standings)
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            with (self._folder / STANDINGS).open("a", encoding="utf-8") as file:
                file.write(json.dumps(line_of(version, standings)) + "\n")
        except OSError as error:
            raise CheckpointError(
                f"{self._folder / STANDINGS} could not be written: {error}. Check whether the disk "
                "is full and the folder writable."
            ) from error

    def _remember(self, version: int, standings: Standings) -> None:
        self._standings[version] = standings
        while len(self._standings) > self._remembered:
            self._standings.popitem(last=False)

    def _lines(self) -> list[dict[str, Any]]:
        """Return the valid lines of the file. A torn last line of a killed process is skipped."""
        try:
            text = (self._folder / STANDINGS).read_text(encoding="utf-8")
        except FileNotFoundError:
            return []
        lines = []
        for line in text.splitlines():
            try:
                given = json.loads(line)
                standings_from(given)
                lines.append({**given, "version": int(given["version"])})
            except (ValueError, LookupError, TypeError, RecursionError):
                log.warning("%s: skipped a torn line", self._folder / STANDINGS)
        return lines


def line_of(version: int, standings: Standings) -> dict[str, Any]:
    """Convert standings to a line of the file."""
    games = [
        [seat, snapshot, won.games, won.reward] for (seat, snapshot), won in standings.games.items()
    ]
    bounds = [standings.lowest, standings.highest]
    return {"version": version, "bounds": bounds, "games": games}


def standings_from(line: Mapping[str, Any]) -> Standings:
    """Parse the standings of a line. Raises ValueError, LookupError, TypeError."""
    lowest, highest = line["bounds"]
    return Standings(
        games={
            (str(seat), int(snapshot)): Games(games=int(games), reward=float(reward))
            for seat, snapshot, games, reward in line["games"]
        },
        lowest=float(lowest),
        highest=float(highest),
    )
