"""Which runs a page has: those in its folders, and those that begin there later."""

import os
import shutil
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxrl_async.errors import ConfigError
from jaxrl_async.view import run_list
from jaxrl_async.view.__main__ import main
from jaxrl_async.view.queries import overview
from jaxrl_async.view.run_list import SEARCH_S, RunList, unique_names


def write_run(folder, name="metrics.jsonl"):
    folder.mkdir(parents=True, exist_ok=True)
    (folder / name).write_text('{"step": 1, "reward/mean": 0.5}\n')
    return folder


class HandClock:
    now = 0.0

    def __call__(self):
        return self.now


def test_folders_are_runs_or_hold_some_and_names_differ(tmp_path):
    for name in ("x/one", "x/two", "y/one"):
        write_run(tmp_path / name)
    runs = RunList([tmp_path / "x", tmp_path / "y" / "one", tmp_path / "x" / "two"]).now()
    assert set(runs) == {"x/one", "two", "y/one"}
    assert {name: run.root for name, run in runs.items()}["two"] == (tmp_path / "x/two").resolve()
    with pytest.raises(ConfigError, match="no such folder"):
        RunList([tmp_path / "gone"])
    with pytest.raises(ConfigError, match="this is a file"):
        RunList([tmp_path / "x/one/metrics.jsonl"])


def test_the_command_ends_with_2_after_a_wrong_folder(tmp_path, capsys):
    assert main([str(tmp_path / "gone")]) == 2
    assert "config error" in capsys.readouterr().err


def test_adapters_are_runs_and_a_warm_start_is_none(tmp_path):
    for name in ("both/few", "both/many", "both/warm_start", "begun/warm_start"):
        write_run(tmp_path / name)
    for name in ("both", "begun", "compiles"):
        write_run(tmp_path / name, "config.yaml")
    write_run(tmp_path / ".hidden")
    write_run(tmp_path / "run")
    write_run(tmp_path / "run" / "inner")
    assert set(RunList([tmp_path]).now()) == {"few", "many", "begun", "compiles", "run"}
    assert set(RunList([tmp_path / "both"]).now()) == {"few", "many"}
    assert set(RunList([tmp_path / "begun"]).now()) == {"begun"}


def test_a_run_that_begins_later_appears_and_a_removed_one_goes(tmp_path):
    clock = HandClock()
    runs = RunList([tmp_path], clock)
    assert runs.now() == {} and runs.now().folders == (str(tmp_path),)
    write_run(tmp_path / "first", "config.yaml")
    assert runs.now() == {}, "it has just been looked for"
    clock.now += SEARCH_S
    assert set(runs.now()) == {"first"}
    before = runs.now()["first"]
    write_run(tmp_path / "first")  # its first step
    write_run(tmp_path / "other" / "first")
    clock.now += SEARCH_S
    assert set(runs.now()) == {"first", "other/first"} and runs.now()["first"] is before
    shutil.rmtree(tmp_path / "first")
    clock.now += SEARCH_S
    assert set(runs.now()) == {"other/first"}


def test_a_browser_can_send_every_name_back(tmp_path):
    for raw in (b"good", b"bad\xff", b"bad\xfe", "bad\ufffd (2)".encode()):
        write_run(tmp_path / os.fsdecode(raw))
    runs = RunList([tmp_path]).now()
    assert len(runs) == 4 and {name.encode().decode() for name in runs} == set(runs)
    assert {run.root.name for run in runs.values()} == set(os.listdir(tmp_path))


def test_the_oldest_of_too_many_are_left_out_and_counted(tmp_path, monkeypatch):

    monkeypatch.setattr(run_list, "MAX_RUNS", 3)
    for age, name in enumerate(("a", "b", "c", "d", "e")):
        os.utime(write_run(tmp_path / name) / "metrics.jsonl", (1000 - age, 1000 - age))
    runs = RunList([tmp_path]).now()
    assert set(runs) == {"a", "b", "c"} and runs.left_out == 2
    assert overview(runs, {})["leftOut"] == 2


def test_a_run_keeps_its_number_when_another_begins(tmp_path):
    """Its number is its color: runs without a recorded start come first, by name."""
    clock = HandClock()
    for name, started in (("old", None), ("b", 10.0), ("c", 20.0)):
        write_run(tmp_path / name)
        if started is not None:
            (tmp_path / name / "starts.jsonl").write_text(f'{{"started": {started}}}\n')
    runs = RunList([tmp_path], clock)

    def numbers():
        return {one["name"]: one["number"] for one in overview(runs.now(), {})["runs"]}

    assert numbers() == {"old": 0, "b": 1, "c": 2}
    write_run(tmp_path / "a")
    (tmp_path / "a" / "starts.jsonl").write_text('{"started": 30.0}\n')
    clock.now += SEARCH_S
    assert numbers() == {"old": 0, "b": 1, "c": 2, "a": 3}


PARTS = st.lists(st.sampled_from("ab"), min_size=1, max_size=4)


@given(st.lists(PARTS, max_size=6), st.sets(st.sampled_from(["a", "b", "a/b"])))
def test_names_are_unique_ends_of_their_paths(parts, taken):

    paths = list(dict.fromkeys(Path("/", *one) for one in parts))
    names = unique_names(paths, taken)
    assert len(set(names)) == len(names) and not set(names) & taken
    for path, name in zip(paths, names, strict=True):
        assert path.as_posix().endswith(name)
