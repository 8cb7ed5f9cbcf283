"""Who sits where: a pure function; snapshots and standings in files."""

from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from jaxrl_async.config.seats_section import OlderSection, SeatSection
from jaxrl_async.games.seating import (
    Standings,
    chance,
    league_of,
    seated_player,
    snapshot_weights,
)
from jaxrl_async.games.snapshots import STANDINGS, Snapshots
from jaxrl_async.games.weights_player import branch_of


@dataclass(frozen=True)
class Saves:
    """A policy that writes an empty directory."""

    tower: None = None

    def save_pretrained(self, folder: Path) -> None:
        folder.mkdir(parents=True)
        (folder / "config.json").write_text("{}", encoding="utf-8")


def section(**given: object) -> SeatSection:
    return SeatSection.model_validate(given)


def test_a_league_has_the_newest_snapshots_up_to_a_version() -> None:
    older = OlderSection(every=3, keep=2)
    saved = (0, 3, 6, 9)
    assert [league_of(older, saved, v) for v in (0, 2, 3, 7, 11)] == [
        (0,), (0,), (0, 3), (3, 6), (6, 9),
    ]  # fmt: skip
    assert league_of(older, (7, 9), 8) == (7,), "a league that began at 7 has that one"


def test_who_sits_where_depends_on_the_game_alone_and_follows_the_weights() -> None:
    mixed = section(
        mixture=[{"policy": True, "weight": 3}, "initial", {"older": {"every": 1, "keep": 4}}]
    )
    saved = tuple(range(10))

    def seated(position: int) -> str:
        player = seated_player("second", mixed, (7, position, 9), saved, Standings())
        return "policy" if player is None else player.full_name

    names = Counter(seated(p) for p in range(3000))
    assert [seated(p) for p in range(50)] == [seated(p) for p in range(50)]
    assert abs(names["policy"] / 3000 - 0.6) < 0.05
    assert abs(names["initial"] / 3000 - 0.2) < 0.04
    league = [names[f"older {v}"] for v in (6, 7, 8, 9)]
    assert sum(league) == 3000 - names["policy"] - names["initial"]
    assert min(league) > 100, "uniform over the newest four"
    games = [(s, 1, 9) for s in range(30)]
    seeds = {seated_player("second", mixed, g, saved, Standings()) is None for g in games}
    assert seeds == {True, False}, "another seed seats others"
    numbers = [chance(s, "x", 1) for s in range(500)]
    assert min(numbers) >= 0 and max(numbers) < 1 and abs(np.mean(numbers) - 0.5) < 0.05


def test_the_worst_is_met_most_and_latest_is_the_newest() -> None:
    standings = Standings()
    for _ in range(20):
        standings = standings.plus("s", 0, [1.0]).plus("s", 1, [0.0]).plus("s", 2, [0.5])
    weights = snapshot_weights(OlderSection(pick="worst"), "s", (0, 1, 2, 3), standings)
    assert weights[1] > weights[2] > weights[0] > 0
    assert weights[3] == pytest.approx(weights[2], rel=0.05), "unknown counts as even"
    assert standings.wins("s", 0) > 0.95 and standings.wins("s", 1) < 0.05
    assert snapshot_weights(OlderSection(pick="latest"), "s", (0, 1), standings) == [0.0, 1.0]


def test_rewards_of_any_scale_count_between_the_worst_and_the_best() -> None:
    standings = Standings().plus("s", 0, [-5.0]).plus("s", 1, [5.0, -5.0])
    assert standings.wins("s", 1) == pytest.approx(0.5)
    assert standings.wins("s", 0) == pytest.approx(0.25)
    assert Standings().plus("s", 0, [1.0, 1.0]).wins("s", 0) == 0.5, "all alike says nothing"


def test_a_folder_is_taken_up_at_a_version_and_torn_parts_are_left_out(tmp_path: Path) -> None:
    folder = tmp_path / "league"
    first = Snapshots(folder, remembered=3)
    standings = Standings()
    for version in range(6):
        first.save(version, Saves())  # type: ignore[arg-type]
        standings = standings.plus("s", version, [float(version)])
        first.write_standings(version, standings)
    first.forget([2, 3, 4, 5])
    with (folder / STANDINGS).open("a", encoding="utf-8") as file:
        file.write('{"version": 6, "bou')
    (folder / "00000006.tmp").mkdir()
    again = Snapshots(folder, remembered=3)
    again.reopen(4)
    assert again.versions == (2, 3, 4)
    assert again.standings(4) == first.standings(4) and again.standings(9) == again.standings(4)
    assert sorted(p.name for p in folder.iterdir()) == [
        "00000002", "00000003", "00000004", STANDINGS,
    ]  # fmt: skip
    third = Snapshots(folder, remembered=3)
    third.reopen(4)
    assert third.versions == again.versions and third.standings(3) == again.standings(3)


def test_no_two_turns_draw_by_the_same_random_numbers() -> None:
    branches = [branch_of(seat, turn) for seat in ("a", "b") for turn in range(50)]
    assert len(set(branches)) == 100 and min(branches) > 0
