"""The command jaxrl-async: every command line behind one door, none of them imported before."""

import argparse
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import jaxrl_async
from jaxrl_async.command.entry_point import COMMANDS, main, unknown

ROOT = Path(__file__).parents[2]


def run_command(*words: str, cwd: Path = ROOT) -> subprocess.CompletedProcess[str]:
    """Run `python -m jaxrl_async WORDS` in a process of its own."""
    return subprocess.run(
        [sys.executable, "-m", "jaxrl_async", *words],
        capture_output=True,
        text=True,
        timeout=300,
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"},
    )


def test_help_names_every_command(capsys):
    assert main(["--help"]) == 0
    shown = capsys.readouterr().out
    assert re.findall(r"^  (\S+) ", shown, re.MULTILINE) == list(COMMANDS)


def test_version_is_the_packages(capsys):
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"jaxrl-async {jaxrl_async.__version__}\n"


@pytest.mark.parametrize("words", [["--help"], ["--version"], ["trian"]])
def test_the_door_itself_imports_only_the_standard_library(words):
    code = (
        "import sys; before = set(sys.modules); from jaxrl_async.command.entry_point import main; "
        f"main({words}); print('|', *set(sys.modules) - before)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        check=True,
    )
    loaded = {name.partition(".")[0] for name in done.stdout.rpartition("|")[2].split()}
    assert loaded - set(sys.stdlib_module_names) == {"jaxrl_async"}


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_explains_itself(name, capsys):
    try:
        code = main([name, "--help"])
    except SystemExit as ended:  # argparse
        code = ended.code
    shown = capsys.readouterr().out
    assert code == 0 and re.search(rf"jaxrl[-_]async[ .]{name}", shown)


PARSED = ("plan", "doctor", "view", "diff", "sample", "serve", "chat", "eval", "export", "init")
"""Commands whose options argparse reads."""


@pytest.mark.parametrize("name", PARSED)
def test_help_shows_the_default_of_each_option(name, monkeypatch):
    """Of those that take a value; the parser is the one that main makes."""
    found = []
    parse = argparse.ArgumentParser._parse_known_args

    def kept(parser, *rest, **more):
        found.append(parser)
        return parse(parser, *rest, **more)

    monkeypatch.setattr(argparse.ArgumentParser, "_parse_known_args", kept)
    with pytest.raises(SystemExit):
        main([name, "--help"])
    formatter = found[0]._get_formatter()
    options = [action for action in found[0]._actions if action.option_strings]
    assert len(options) > 1
    for action in options:
        if action.nargs != 0 and not action.required:
            shown = formatter._expand_help(action)
            assert "default" in shown, action.option_strings
            if action.default not in (None, "", []) and "default:" in shown:
                assert str(action.default) in shown, action.option_strings


@pytest.mark.parametrize(
    ("words", "hint"),
    [
        (["trian", "x.yaml"], "did you mean train?"),
        (["Plan"], "did you mean plan?"),
        (["xyz"], "unknown command 'xyz'."),
        (["recipe:grpo", "a.b=c"], "did you mean `jaxrl-async train recipe:grpo a.b=c`?"),
        (["configs/addition.yaml"], "did you mean `jaxrl-async train configs/addition.yaml`?"),
        (["--resume", "x.yaml"], "options follow it"),
    ],
)
def test_what_is_no_command_gets_the_nearest_one(words, hint, capsys):
    assert main(words) == 2
    assert hint in capsys.readouterr().err
    assert hint in unknown(words[0], words[1:])


def test_no_command_at_all_is_answered_with_the_list(capsys):
    assert main([]) == 2
    assert "jaxrl-async COMMAND" in capsys.readouterr().err


@pytest.mark.full
@pytest.mark.parametrize(
    ("words", "code"),
    [
        (["train", "configs/addition.yaml", "sampler.slot=3"], 2),
        (["audit", "there_is_no_such_run"], 2),
        (["view", "there_is_no_such_run"], 2),
        (["export", "there_is_no_such_run", "out"], 2),
    ],
)
def test_a_commands_exit_code_is_passed_on(words, code):
    done = run_command(*words)
    assert done.returncode == code and done.stderr and "Traceback" not in done.stderr


@pytest.mark.full
def test_it_answers_as_the_module_does():
    words = ["configs/addition.yaml", "--print-config"]
    module = subprocess.run(
        [sys.executable, "-m", "jaxrl_async.train", *words],
        capture_output=True,
        text=True,
        cwd=ROOT,
        timeout=300,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert run_command("train", *words).stdout == module.stdout != ""


@pytest.mark.full
def test_a_reader_that_leaves_early_leaves_no_traceback():
    done = subprocess.run(
        ["bash", "-c", f"set -o pipefail; {sys.executable} -m jaxrl_async train --help | head -1"],
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert done.returncode == 0 and done.stderr == ""
    assert done.stdout.startswith("usage: jaxrl-async train")


@pytest.mark.full
@pytest.mark.exhaustive
def test_a_wheel_has_the_command_and_the_recipes_and_trains(tmp_path):
    """The repository is copied, since building in it would leave files there."""
    subprocess.run(
        [
            "bash",
            "-c",
            f"cp -a jaxrl_async configs pyproject.toml setup.py README.md LICENSE {tmp_path}",
        ],
        cwd=ROOT,
        check=True,
    )
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet"]
    for words in (
        ["wheel", "--no-deps", "--wheel-dir", tmp_path / "wheels", tmp_path],
        ["install", "--no-deps", "--target", tmp_path / "there", "--find-links"],
    ):
        if words[0] == "install":
            (wheel,) = (tmp_path / "wheels").glob("*.whl")
            words = [*words[:-1], wheel]
        subprocess.run([*pip, *map(str, words)], check=True, timeout=500, cwd=tmp_path)
    for used in ("jaxrl_async", "configs"):
        subprocess.run(["rm", "-r", str(tmp_path / used)], check=True)

    def installed(*words: str) -> str:
        done = subprocess.run(
            [str(tmp_path / "there/bin/jaxrl-async"), *words],
            capture_output=True,
            text=True,
            timeout=500,
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": str(tmp_path / "there"), "JAX_PLATFORMS": "cpu"},
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    listed = installed("recipes").splitlines()
    assert len(listed) == len(list((ROOT / "configs").glob("**/*.yaml")))
    result = installed("train", "recipe:plans/gpt_oss_20b_lora_v5e_64", "--print-config")
    assert f"path: {tmp_path}/there/jaxrl_async/recipes/plans/gpt-oss-20b" in result
    installed("train", "recipe:addition", *FEW_STEPS)
    lines = (tmp_path / "runs/addition/metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [0, 1, 2]


FEW_STEPS = (
    "run.steps=2",
    "trainer.warmup_steps=1",
    "warm_start.steps=2",
    "sampler.slots=4",
    "data.addition.eval_size=8",
    "algorithm.groups_per_step=2",
    "algorithm.group_size=2",
)
