"""jaxrl-async init: what it asks, writes and refuses, and that the written files train."""

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from jaxrl_async.command import init_command
from jaxrl_async.command.init_command import ask_missing, main, max_positions
from jaxrl_async.command.machine import Devices
from jaxrl_async.config.load import load

ROOT = Path(__file__).parents[2]
RECORDS = [{"problem": f"What is {i} + {i}?", "answer": str(2 * i)} for i in range(12)]


@pytest.fixture
def here(tmp_path, monkeypatch):
    """An empty current folder, on a machine with one GPU."""
    monkeypatch.chdir(tmp_path)
    gpu = Devices("gpu", "NVIDIA H100", 1, 80 * 2**30, "9.0")
    monkeypatch.setattr(init_command, "find_devices", lambda timeout_s: (gpu, []))
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(one) + "\n" for one in RECORDS))
    (tmp_path / "m").mkdir()
    (tmp_path / "m/config.json").write_text('{"max_position_embeddings": 300}')
    return tmp_path


def test_files_of_a_model_and_records_are_written_and_load(here, capsys):
    assert main(["--model", "m", "--data", "train.jsonl", "--algorithm", "dapo"]) == 0
    output = capsys.readouterr()
    assert "reward.py: a reward function" in output.out and "train config.yaml" in output.out
    assert output.err == "", "everything was said"
    config = load("config.yaml")
    assert config.run.name == "config" and config.model.path == "m" and config.mesh.colocated
    assert config.data.jsonl.prompt_field == "problem" and config.data.addition is None
    assert config.reward.function == "reward.py:reward" and config.algorithm.dynamic_sampling
    assert (config.sampler.max_length, config.sampler.max_new_tokens) == (300, 150)
    assert "1 x NVIDIA H100" in (here / "config.yaml").read_text()


def test_without_a_terminal_the_defaults_are_reported(here, capsys):
    assert main(["--out", "first.yaml"]) == 0
    output = capsys.readouterr().err
    for part in ("random weights (--model)", "additions (--data)", "grpo (--algorithm)"):
        assert part in output
    assert load("first.yaml").run.name == "first" and not (here / "reward.py").exists()


@pytest.mark.parametrize(
    ("file", "name"), [("my run.yaml", "my_run"), ("größe.yaml", "gr__e"), (".x.yaml", "_.x")]
)
def test_a_files_name_that_no_run_can_have_is_changed_into_one_that_it_can(here, file, name):
    assert main(["--out", file]) == 0
    assert load(file).run.name == name


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--name", "../x y"], "--name ../x y: a run's name has letters"),
        (["--model", "nowhere"], "--model nowhere: there is no folder with a config.json"),
        (["--model", "no.gguf"], "--model no.gguf: there is no such file"),
        (["--model", "m", "--data", "no.jsonl"], "--data no.jsonl: there is no such file"),
        (["--model", "m", "--data", "train.jsonl", "--reward", "exakt"], "did you mean 'exact'"),
        (["--model", "m", "--data", "train.jsonl", "--prompt-field", "x"], "have problem, answer"),
        (["--task", "calculatr"], "did you mean 'calculator'"),
        (["--task", "calculator", "--reward", "exact"], "has its own"),
        (["--answer-field", "x"], "columns of --data"),
        (["--algorithm", "ppo"], "give one of grpo"),
        (["--name", "no name"], "a run's name has letters"),
        (["--out", "nowhere/c.yaml"], "there is no folder nowhere"),
        (["--model", "m", "--lora-rank", "-1"], "--lora-rank -1"),
    ],
)
def test_what_cannot_be_used_is_refused_and_nothing_is_written(here, words, says, capsys):
    before = sorted(here.iterdir())
    assert main(words) == 2
    assert says in capsys.readouterr().err and sorted(here.iterdir()) == before


def test_files_are_replaced_only_by_force(here, capsys):
    words = ["--model", "m", "--data", "train.jsonl"]
    assert main(words) == 0
    (here / "config.yaml").unlink()
    (here / "reward.py").write_text("def mine(completion):\n    return 1.0\n")
    assert main(words) == 2 and "--reward reward.py:NAME" in capsys.readouterr().err
    assert main([*words, "--reward", "reward.py:mine"]) == 0
    assert load("config.yaml").reward.function == "reward.py:mine"
    assert main([*words, "--out", "config.yaml"]) == 2
    assert "already exists" in capsys.readouterr().err
    assert main([*words, "--force"]) == 0
    assert "def reward(" in (here / "reward.py").read_text()


@pytest.mark.parametrize(
    ("given", "answers", "found"),
    [
        ({}, ["", "", ""], {"model": None, "data": None, "task": None, "algorithm": None}),
        ({}, ["", "task:nim", "rloo"], {"task": "nim", "data": None, "algorithm": "rloo"}),
        ({}, ["m", " d.jsonl ", "", ""], {"model": "m", "data": "d.jsonl", "reward": None}),
        ({"model": "m", "data": "d", "algorithm": "dapo"}, ["math"], {"reward": "math"}),
        ({"model": "m", "task": "t.py:t", "algorithm": "dapo"}, [], {"reward": None}),
    ],
)
def test_only_what_no_option_says_is_asked(given, answers, found):
    usual = dict.fromkeys(("model", "data", "task", "reward", "algorithm"))
    left = iter(answers)
    got = ask_missing(argparse.Namespace(**{**usual, **given}), lambda question: next(left))
    assert {name: getattr(got, name) for name in found} == found
    assert list(left) == []


def test_the_end_of_the_input_writes_nothing(here, monkeypatch, capsys):
    for stream in (sys.stdin, sys.stdout):
        monkeypatch.setattr(stream, "isatty", lambda: True, raising=False)
    monkeypatch.setattr("builtins.input", lambda question: (_ for _ in ()).throw(EOFError))
    assert main([]) == 2
    assert "nothing is written" in capsys.readouterr().err and not (here / "config.yaml").exists()


def test_the_longest_sequence_of_a_model_is_read(tmp_path):
    assert max_positions(str(tmp_path)) is None
    (tmp_path / "config.json").write_text('{"text_config": {"max_position_embeddings": 7}}')
    assert max_positions(str(tmp_path)) == 7


def command(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """Run jaxrl-async WORDS in a folder."""
    return subprocess.run(
        [sys.executable, "-m", "jaxrl_async", *words],
        capture_output=True,
        text=True,
        timeout=500,
        cwd=folder,
        stdin=subprocess.DEVNULL,
        env={**os.environ, "PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"},
    )


@pytest.mark.full
def test_the_default_configuration_is_checked_and_trains(tmp_path):
    made = command(tmp_path, "init", "--steps", "2")
    assert made.returncode == 0, made.stderr
    checked = command(tmp_path, "doctor", "config.yaml")
    assert checked.returncode == 0 and "\nerror" not in checked.stdout, checked.stdout
    few = ["warm_start.steps=2", "data.addition.eval_size=8", "algorithm.groups_per_step=2"]
    trained = command(tmp_path, "train", "config.yaml", *few)
    assert trained.returncode == 0, trained.stderr
    lines = (tmp_path / "runs/config/metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [0, 1, 2]


@pytest.mark.full
@pytest.mark.exhaustive
@pytest.mark.parametrize("task", ["calculator", "guess_number", "nim", "proposer_solver"])
def test_each_built_in_task_trains_from_its_first_configuration(tmp_path, task):
    made = command(tmp_path, "init", "--task", task, "--steps", "2", "--algorithm", "rloo")
    assert made.returncode == 0, made.stderr
    few = ["warm_start.steps=2", "algorithm.groups_per_step=2", "eval.every=0"]
    trained = command(tmp_path, "train", "config.yaml", *few)
    assert trained.returncode == 0, trained.stderr
