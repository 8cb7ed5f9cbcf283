"""The table of runs: settings that differ, axes, CSV; whatever a configuration holds."""

import csv
import io
import json

import numpy as np
import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from jaxrl_async.config.load import dump, load
from jaxrl_async.view.configuration import parsed, settings_of, text_of
from jaxrl_async.view.queries import measures, thinned
from jaxrl_async.view.run_table import csv_lines, differing
from jaxrl_async.view.watched import WatchedRun


def written(folder, lines=(), config=None):
    folder.mkdir(parents=True, exist_ok=True)
    text = "".join(json.dumps(line) + "\n" for line in lines)
    (folder / "metrics.jsonl").write_text(text)
    if config is not None:
        (folder / "config.yaml").write_text(
            config if isinstance(config, str) else yaml.dump(config)
        )
    return WatchedRun(folder, folder.name)


def test_settings_that_differ_are_columns_and_equal_ones_are_counted(tmp_path):
    base = {"run": {"name": "a", "steps": 9}, "algorithm": {"learning_rate": 1e-4, "loss": None}}
    other = {"run": {"name": "b", "steps": 9}, "algorithm": {"learning_rate": 2e-4, "kl": [1, 2]}}
    runs = [written(tmp_path / "a", config=base), written(tmp_path / "b", config=other)]
    runs.append(written(tmp_path / "c"))  # without a configuration
    found = differing(runs)
    named = dict(zip(found["names"], zip(*found["values"].values(), strict=True), strict=True))
    assert named == {
        "algorithm.learning_rate": ("0.0001", "0.0002", None),
        "algorithm.loss": ("null", None, None),
        "algorithm.kl": (None, "[1, 2]", None),
    }
    assert (found["equal"], found["leftOut"]) == (1, 0), "run.steps; run.name does not count"
    assert differing(runs[:1])["names"] == []


def test_a_real_configuration_has_all_its_settings(tmp_path):
    config = load("recipe:addition", ["metrics.tags=[sweep, small]", "run.steps=7"])
    run = written(tmp_path / "a", config=dump(config))
    settings = dict(settings_of(parsed(dump(config))))
    assert settings["run.steps"] == "7" and settings["run.resume"] == "false"
    assert len(settings) > 150 and run.tags() == ["sweep", "small"]
    (tmp_path / "a" / "tags.txt").write_text("good\n\n small \n" + "x" * 90 + "\n")
    assert run.tags() == ["sweep", "small", "good", "x" * 40]


LONG = "0x" + "f" * 6000
BOMB = "a: &a [x, x]\n" + "".join(
    f"{b}: &{b} [*{a}, *{a}, *{a}, *{a}, *{a}, *{a}, *{a}, *{a}]\n"
    for a, b in zip("abcdefghijkl", "bcdefghijklm", strict=True)
)


@pytest.mark.parametrize(
    "text",
    ["", "a: [", "- x", "[" * 9000, "- " * 9000, "a: !!python/object:os.x {}", "\x00", BOMB,
     "a: 2026-01-01", "? [1, 2]\n: 3", "a: &x {b: *x}", "a: " + "9" * 5000,
     f"a: [{LONG}]", f"? {LONG}\n: 1", f"a: {LONG}"],
)  # fmt: skip
def test_no_configuration_stops_the_table(tmp_path, text):
    run = written(tmp_path / "a", config=text)
    found = json.dumps([differing([run, written(tmp_path / "b", config="b: 1")]), run.tags()])
    assert len(found) < 100_000


def test_metrics_of_a_removed_file_are_forgotten(tmp_path):
    run = written(tmp_path / "a", [{"step": 1, "old": 1.0}])
    assert run.measured() == ["old"]
    (tmp_path / "a" / "metrics.jsonl").unlink()
    assert run.measured() == []
    written(tmp_path / "a", [{"step": 1, "new": 1.0}])
    assert run.measured() == ["new"]


@pytest.mark.parametrize("tag", [LONG, "*m"], ids=["a long number", "a bomb"])
def test_no_tag_stops_the_list_of_runs(tmp_path, tag):
    text = f"{BOMB}metrics:\n  tags:\n  - fine\n  - {tag}\n"
    tags = written(tmp_path / "a", config=text).tags()
    assert tags[0] == "fine" and all(len(one) <= 40 for one in tags)


def test_long_values_are_shortened():
    assert len(text_of("x" * 999)) == 200 and len(text_of(list(range(999)))) < 200
    assert (text_of(None), text_of(True), text_of(0.5), text_of("a")) == (
        "null",
        "true",
        "0.5",
        "a",
    )


SEGMENTS = st.lists(st.lists(st.floats(0.01, 100), min_size=1, max_size=6), min_size=1, max_size=4)


@given(SEGMENTS)
def test_the_time_of_a_resumed_run_is_the_sum_of_its_parts(tmp_path_factory, segments):
    """The reference: each process counts its time from 0, and begins below where the last ended."""
    elapsed, wanted, before = [], [], 0.0
    for seconds in segments:
        own = np.cumsum(seconds)
        if elapsed and own[0] >= elapsed[-1]:
            own = own * (elapsed[-1] / own[0] / 2)
        elapsed += own.tolist()
        wanted += (before + own).tolist()
        before = wanted[-1]
    lines = [{"step": s, "time/elapsed_s": e} for s, e in enumerate(elapsed, 1)]
    run = written(tmp_path_factory.mktemp("run"), lines)
    steps, values = run.axis("time")
    assert steps == list(range(1, len(elapsed) + 1))
    np.testing.assert_allclose(values, wanted, rtol=1e-9)


def test_the_axis_of_tokens_is_their_sum(tmp_path):
    tokens = [5.0, 7.0, 0.0, 11.0]
    lines = [{"step": 2 * i, "train/tokens": t} for i, t in enumerate(tokens)]
    run = written(tmp_path, [*lines, {"step": 9, "reward/mean": 1.0}])
    assert run.axis("tokens") == ([0, 2, 4, 6], np.cumsum(tokens).tolist())
    with pytest.raises(KeyError, match="axis weight"):
        run.axis("weight")
    steps, values = thinned((list(range(1000)), [float(i) for i in range(1000)]), 10)
    assert steps[0] == 0 and steps[-1] == 999 and len(steps) == 10 and values == steps


def test_a_row_has_the_newest_values_and_the_best_evaluation(tmp_path):
    lines = [
        {"step": 0, "eval/accuracy": 0.25},
        {"step": 1, "train/tokens": 30.0, "time/elapsed_s": 2.0, "eval/accuracy": 0.75},
        {"step": 2, "train/tokens": 10.0, "time/elapsed_s": 3.0, "eval/accuracy": 0.5},
    ]
    row = measures(written(tmp_path, lines))
    assert row["newest"]["eval/accuracy"] == 0.5 and row["best"] == 0.75
    assert (row["tokens"], row["time"], row["alerts"]) == (40.0, 3.0, [])
    assert measures(written(tmp_path / "empty"))["best"] is None


def test_csv_has_every_value_and_no_formula(tmp_path):
    lines = [{"step": 1, "reward/mean": 0.5, "train/tokens": 8.0}, {"step": 2, "a,b": 1e-9}]
    runs = [written(tmp_path / "=1+1", lines), written(tmp_path / "other", lines[:1])]
    text = "".join(csv_lines(runs, ["reward/mean", "a,b"]))
    assert list(csv.reader(io.StringIO(text))) == [
        ["run", "step", "tokens", "time", "reward/mean", "a,b"],
        ["'=1+1", "1", "8.0", "", "0.5", ""],
        ["'=1+1", "2", "", "", "", "1e-09"],
        ["other", "1", "8.0", "", "0.5", ""],
    ]
