"""jaxrl-async diff: what is reported of two runs, against records made by hand and real runs."""

import json
import math
from pathlib import Path

import numpy as np
import pytest
from runs import config_of, many_digits

from jaxrl_async.command.diff_command import estimate_text, main, read_run
from jaxrl_async.command.run_differences import (
    LastValue,
    RunRecords,
    difference,
    first_divergence,
    last_values,
    setting_differences,
    version_differences,
)
from jaxrl_async.config.load import dump, load
from jaxrl_async.config.setting_fields import value_text
from jaxrl_async.evals.estimates import Estimate
from jaxrl_async.run.loop import train


def a_run(folder: Path, *overrides: str, lines=(), start=None) -> Path:
    """Write the records of a run into a folder."""
    folder.mkdir()
    (folder / "config.yaml").write_text(dump(load("recipe:addition", overrides)))
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    if start is not None:
        (folder / "starts.jsonl").write_text(json.dumps(start) + "\n")
    return folder


def differing(tmp_path: Path, a: tuple[str, ...], b: tuple[str, ...]) -> dict:
    runs = [a_run(tmp_path / name, *words) for name, words in (("a", a), ("b", b))]
    return setting_differences(*(read_run(str(run)) for run in runs))


def test_only_settings_that_differ_are_shown_with_their_defaults(tmp_path):
    found = differing(
        tmp_path,
        ("run.name=one", "run.seed=1"),
        ("run.dir=elsewhere", "run.resume=true", "run.overwrite=false", "algorithm.epochs=2"),
    )
    assert found == {"run.seed": (1, 0, 0), "algorithm.epochs": (1, 2, 1)}


def test_a_choice_is_one_setting_and_a_section_that_one_lacks_is_null(tmp_path):
    found = differing(
        tmp_path,
        ("algorithm.loss={gspo: {clip_high: 0.5}}",),
        ("model.lora={rank: 4}", "endpoint={}"),
    )
    assert found == {
        "model.lora": (None, {"rank": 4}, None),
        "algorithm.loss": ({"gspo": {"clip_high": 0.5}}, "ppo_clip", "ppo_clip"),
        "endpoint": (None, {}, None),
    }


def test_a_configuration_of_another_version_is_compared_as_it_is_written(tmp_path):
    one, other = a_run(tmp_path / "a"), a_run(tmp_path / "b", "run.seed=3")
    text = (other / "config.yaml").read_text()
    (other / "config.yaml").write_text(text + "of_another_version: {x: 1}\n")
    runs = [read_run(str(run)) for run in (one, other)]
    assert [run.is_complete for run in runs] == [True, False]
    assert setting_differences(*runs) == {
        "run.seed": (0, 3, 0),
        "of_another_version": (None, {"x": 1}, None),
    }


@pytest.mark.full
def test_versions_are_compared_where_both_are_recorded(tmp_path):
    start = {"jaxrl_async": "0.4", "python": "3.11.2", "host": "x", "packages": {"jax": "0.10"}}
    other = {**start, "host": "y", "packages": {"jax": "0.11", "flax": "1"}}
    runs = [
        read_run(str(a_run(tmp_path / name, start=one)))
        for name, one in (("a", start), ("b", other), ("c", None))
    ]
    assert version_differences(*runs[:2]) == {"jax": ("0.10", "0.11"), "flax": ("", "1")}
    assert version_differences(runs[0], runs[2]) == {} == dict(runs[2].versions)


def test_the_last_finite_value_counts_with_the_standard_error_of_its_step():
    lines = [
        {"step": 0, "eval/reward": 0.5, "eval/reward_stderr": 0.1, "train/loss": 3.0},
        {"step": 1, "eval/reward": 0.75, "train/loss": math.nan},
        {"step": 2, "reward/mean": 1},
    ]
    assert last_values(lines) == {
        "eval/reward": LastValue(step=1, value=0.75, stderr=None),
        "train/loss": LastValue(step=0, value=3.0, stderr=None),
        "reward/mean": LastValue(step=2, value=1.0, stderr=None),
    }


def test_a_difference_has_the_interval_of_independent_runs():
    """Against many pairs of means drawn with these standard errors."""
    a, b = (LastValue(step=1, value=v, stderr=s) for v, s in ((1.0, 0.3), (1.5, 0.4)))
    found = difference(a, b)
    draws = np.random.default_rng(0).normal([1.0, 1.5], [0.3, 0.4], (200_000, 2))
    assert found.mean == pytest.approx(0.5)
    assert found.stderr == pytest.approx((draws[:, 1] - draws[:, 0]).std(), rel=0.01)
    assert difference(a, LastValue(step=1, value=0.0, stderr=None)) == Estimate(-1.0, None)


def test_the_first_step_that_differs_is_found_among_metrics_that_do_not_depend_on_time():
    key, timing = "train/loss", "throughput/generated_tokens_per_s"
    a = [{"step": s, key: 1.0, timing: 1.0 * s, "reward/mine": 0.5} for s in range(5)]
    b = [{**line, timing: 9.0} for line in a if line["step"] != 2]
    assert first_divergence(a, b) is None
    b[3]["reward/mine"], b[2]["only/here"] = 0.25, 1.0
    found = first_divergence(a, b)
    assert found.step == 4 and found.metrics == {"reward/mine": (0.5, 0.25)}
    a[1][key] = b[1][key] = math.nan
    assert first_divergence(a, b).step == 4, "two that are not numbers are the same"
    b[1][key] = 1.0
    assert first_divergence(a, b).step == first_divergence(b, a).step == 1, "one of them is"
    b[0][key] = np.nextafter(1.0, 2.0)
    assert first_divergence(a, b).step == 0, "bit for bit"


def test_the_text_has_all_parts_and_fits_the_terminal(tmp_path, monkeypatch, capsys):
    def line(step: int, value: float, **more: float) -> dict:
        return {"step": step, "eval/accuracy": value, "reward/mean": value, **more}

    a = a_run(
        tmp_path / "a",
        lines=[line(0, 0.25), {**line(1, 0.5), "eval/accuracy_stderr": 0.03, "buffer/x": 1.0}],
        start={"jaxrl_async": "1"},
    )
    b = a_run(
        tmp_path / "b",
        "algorithm.learning_rate=0.5",
        "run.copy_to=gs://bucket/" + "x" * 300,
        lines=[line(0, 0.25), {**line(1, 0.75), "eval/accuracy_stderr": 0.04}, {"step": 2}],
        start={"jaxrl_async": "2"},
    )
    monkeypatch.setenv("COLUMNS", "90")
    assert main([str(a), str(b)]) == 0
    output = capsys.readouterr().out
    assert max(map(len, output.splitlines()[2:-1])) <= 90
    table = {line.split()[0]: line for line in output.splitlines() if line.strip()}
    assert table["algorithm.learning_rate"].split()[1:3] == ["0.0002", "0.5"]
    assert "..." in table["run.copy_to"] and table["jaxrl_async"].split()[1:] == ["1", "2"]
    assert table["eval/accuracy"].split()[1:] == [
        *("0.5", "±", "0.0588", "0.75", "±", "0.0784", "(step", "1)"),
        *("+0.25", "±", "0.098"),
    ]
    assert "first step that differs: 1 (eval/accuracy 0.5 and 0.75, eval/accuracy_stderr" in output
    assert "buffer/x" not in output
    assert main([str(a), str(b), "--all"]) == 0 and "buffer/x" in capsys.readouterr().out


def test_json_has_the_same(tmp_path, capsys):
    lines = [{"step": 0, "eval/reward": 0.5, "eval/reward_stderr": 0.1}]
    a, b = a_run(tmp_path / "a", lines=lines), a_run(tmp_path / "b", "run.seed=1", lines=lines)
    assert main([str(a), str(b), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["settings"] == {"run.seed": {"a": 0, "b": 1, "default": 0}}
    assert found["first_step_that_differs"] is None and found["versions"] == {}
    metric = found["metrics"]["eval/reward"]
    assert metric["a"]["value"] == 0.5 and metric["difference"]["mean"] == 0
    low, high = metric["difference"]["interval_95"]
    assert high == pytest.approx(1.96 * 0.1 * 2**0.5, rel=1e-4) and low == -high


def test_runs_without_records_and_folders_without_a_run(tmp_path, capsys):
    a, b = a_run(tmp_path / "a"), a_run(tmp_path / "b")
    assert main([str(a), str(b)]) == 0
    output = capsys.readouterr().out
    for part in (
        "no setting differs",
        "versions are not recorded",
        "no metrics",
        "no step of both",
    ):
        assert part in output
    assert main([str(a), str(tmp_path / "no")]) == 2
    assert "there is no run" in capsys.readouterr().err
    (b / "config.yaml").write_text("{")
    assert main([str(a), str(b)]) == 2
    assert "not valid YAML" in capsys.readouterr().err


def test_a_damaged_record_of_starts_is_no_error(tmp_path):
    run = a_run(tmp_path / "a")
    for text in ("", "{", "[1]\n", '{"packages": 3}\n'):
        (run / "starts.jsonl").write_text(text)
        assert read_run(str(run)).versions == {}


@pytest.mark.parametrize(
    ("value", "text"),
    [(None, "null"), (1e-6, "1.0e-06"), ("a b", "a b"), ([1, {"x": 2}], "[1, {x: 2}]")],
)
def test_settings_are_shown_as_yaml(value, text):
    assert value_text(value) == text


def test_estimates_are_shown_with_their_interval():
    assert estimate_text(Estimate(0.5, None)) == "0.5"
    assert estimate_text(Estimate(0.5, 0.1), "+") == "+0.5 ± 0.196"
    assert estimate_text(Estimate(-0.5, None), "+") == "-0.5"


def test_the_number_of_updates_is_that_of_the_last_line():
    records = RunRecords(name="x", config={}, lines=[{"step": 4}, {"step": 2}])
    assert records.steps == 4 and RunRecords(name="x", config={}, lines=[]).steps == 0


@pytest.mark.full
@pytest.mark.exhaustive
def test_real_runs_of_one_seed_are_equal_and_of_two_differ(tmp_path, capsys):
    small = (
        "model.architecture={layers: 1, width: 32, heads: 2, kv_heads: 1, head_dim: 16, mlp: 32}",
        "warm_start.steps=0",
        "data.addition.digits=1",
        "data.addition.eval_size=6",
        "sampler={slots: 8, max_length: 24, max_new_tokens: 8}",
        "algorithm.group_size=2",
        "algorithm.groups_per_step=4",
        "trainer.warmup_steps=1",
        "run.steps=2",
        "staleness.max_staleness=0",
        "metrics.tensorboard=false",
        "metrics.peak_flops=1e9",
        many_digits(tmp_path),
    )
    folders = []
    for name, seed in (("one", 5), ("two", 5), ("three", 6)):
        train(config_of("addition", tmp_path, *small, f"run.seed={seed}", f"run.name={name}"))
        folders.append(str(tmp_path / name))
    capsys.readouterr()
    assert main([folders[0], folders[1]]) == 0
    output = capsys.readouterr().out
    assert "no setting differs" in output and "no step of both differs" in output
    assert main([folders[0], folders[2]]) == 0
    output = capsys.readouterr().out
    assert "run.seed" in output and "first step that differs: " in output and "±" in output
