"""Seats that cannot be filled are refused before anything is made."""

from pathlib import Path

import pytest
from runs import CONFIGS

from jaxrl_async.config.load import dump, load
from jaxrl_async.config.rules import RULES
from jaxrl_async.config.schema import Config
from jaxrl_async.config.seats_section import frozen_models, resident_snapshots
from jaxrl_async.errors import ConfigError


def broken(seats: object, **sections: object) -> str:
    config = Config.model_validate({"task": "nim", "seats": seats, **sections})
    return "\n".join(violation.sentence for violation in RULES.violations(config))


@pytest.mark.parametrize(
    ("seats", "message"),
    [
        ({"second": {}}, "names no player"),
        ({"second": {"policy": True, "model": "d"}}, "policy and model"),
        ({"second": {"endpoint": "http://h/v1"}}, "needs seats.second.model"),
        (
            {"second": {"model": "d", "timeout_s": 3}},
            "seats.second.timeout_s (3.0) has no effect without",
        ),
        ({"second": {"policy": True, "mixture": ["policy"]}}, "mixture and another player"),
        ({"second": {"mixture": ["policy", {"weight": 2}]}}, "seats.second.mixture[1]"),
        ({"second": {"model": "d", "eval": {}}}, "seats.second.eval"),
        ({"s": {"endpoint": "http://h/v1", "model": "m", "extra": {"n": 2}}}, "extra has n"),
    ],
)
def test_each_seat_is_filled_in_one_way(seats: object, message: str) -> None:
    assert message in broken(seats)


def test_weights_need_devices_of_this_process() -> None:
    league = {"second": {"older": {}}}
    assert "another process's" in broken(league, mesh={"samplers_in": "processes"})
    server = {"second": {"endpoint": "http://h/v1", "model": "m"}}
    assert "another process's" not in broken(server, mesh={"samplers_in": "processes"})
    assert "Set mesh.samplers=1" in broken(league, mesh={"samplers": 2, "sampler": {"tensor": 2}})
    assert "seats" in broken(league, run={"job": "sft"})
    assert "task is null" in broken(league, task=None)


def test_memory_is_that_of_all_who_may_be_there_at_once() -> None:
    config = Config.model_validate(
        {
            "seats": {
                "a": {"mixture": ["initial", {"model": "d"}, {"older": {"keep": 1}}]},
                "b": {"older": {"resident": 3}, "eval": {"model": "d"}},
                "c": {"model": "m", "endpoint": "http://h/v1"},
            }
        }
    )
    assert frozen_models(config.players) == ("d",)
    assert resident_snapshots(config.players) == 4


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("seats={second: nobody}", "seats.second: "),
        ("seats={second: {older: {every: 0}}}", "seats.second.older.every = 0 is not allowed"),
        (
            "seats={second: {mixture: [{modle: d}]}}",
            "seats.second.mixture.0.modle is not a setting",
        ),
        ("seats=3", "must be {name: {setting: value}} or null"),
    ],
)
def test_a_wrong_value_is_named_by_its_whole_path(given: str, message: str) -> None:
    with pytest.raises(ConfigError) as error:
        load(CONFIGS / "nim.yaml", [given])
    assert message in str(error.value)


@pytest.mark.parametrize("none", ["seats={}", "seats=null"])
def test_no_players_are_null(none: str) -> None:
    config = load(CONFIGS / "nim.yaml", [none])
    assert config.seats is None and config.players == {} and "seats: null" in dump(config)


def test_seats_are_read_back_as_they_were_written(tmp_path: Path) -> None:
    words = "{mixture: [policy, initial, {older: {every: 1}, weight: 3}], eval: initial}"
    config = load(CONFIGS / "nim.yaml", [f"seats={{second: {words}}}"])
    (tmp_path / "config.yaml").write_text(dump(config), encoding="utf-8")
    assert load(tmp_path / "config.yaml") == config
