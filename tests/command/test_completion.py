"""Completion in the shells themselves: bash always, zsh and fish where they are installed."""

import contextlib
import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from jaxrl_async.command.completion import OPTIONS, main, script
from jaxrl_async.command.entry_point import COMMANDS
from jaxrl_async.command.entry_point import main as entry_point

ROOT = Path(__file__).parents[2]


def completed_by_bash(line: str) -> list[str]:
    """Return what bash offers for the last word of a line, which it splits as it does when a person
    types it: at spaces, ":" and "="."""
    words = re.findall(r"[^\s:=]+|[:=]", line) + [""] * line.endswith(" ")
    call = (
        f"{script('bash')}\ncompopt() {{ :; }}\nCOMP_WORDBREAKS=' =:'\n"
        f"COMP_LINE={json.dumps(line)}; COMP_POINT=${{#COMP_LINE}}\n"
        f"COMP_WORDS=({' '.join(map(json.dumps, words))}); COMP_CWORD={len(words) - 1}\n"
        'set +e; _jaxrl_async; printf "%s\\n" "${COMPREPLY[@]}"'
    )
    done = subprocess.run(
        ["bash", "--norc", "-c", call], capture_output=True, text=True, cwd=ROOT, timeout=60
    )
    assert done.returncode == 0 and not done.stderr, done.stderr
    return done.stdout.split()


CASES = [
    ("jaxrl-async tr", ["train"]),
    ("jaxrl-async train recipe:ad", ["recipe:addition"]),
    ("jaxrl-async train recipe:grpo algorithm.learning", ["algorithm.learning_rate="]),
    ("jaxrl-async train configs/addi", ["configs/addition.yaml"]),
    ("jaxrl-async plan configs/addition.yaml --sampler-t", ["--sampler-topology"]),
    ("jaxrl-async completion z", ["zsh"]),
    ("jaxrl-async recipes rlhf_three_steps/2", ["rlhf_three_steps/2_reward_model"]),
]


@pytest.mark.parametrize(("line", "offered"), CASES)
def test_bash_completes(line, offered):
    # readline replaces only what follows the last ":"
    assert completed_by_bash(line) == [word.removeprefix("recipe:") for word in offered]


def test_bash_completes_the_value_of_a_setting_as_a_path():
    assert completed_by_bash("jaxrl-async train x.yaml model.path=configs/own") == [
        "configs/own_decoder"
    ]


def test_bash_offers_every_command():
    assert set(completed_by_bash("jaxrl-async ")) == {*COMMANDS, "--help", "--version"}


@pytest.mark.parametrize(("line", "offered"), CASES)
@pytest.mark.skipif(not shutil.which("fish"), reason="needs fish")
def test_fish_completes(line, offered, tmp_path):
    file = tmp_path / "jaxrl-async.fish"
    file.write_text(script("fish"))
    done = subprocess.run(
        ["fish", "--no-config", "-c", f"source {file}; complete -C {json.dumps(line)}"],
        capture_output=True,
        text=True,
        cwd=ROOT,
        timeout=60,
    )
    assert not done.stderr
    assert [line.split("\t")[0] for line in done.stdout.splitlines()] == offered


@pytest.mark.skipif(not shutil.which("zsh"), reason="needs zsh")
def test_zsh_can_read_its_script(tmp_path):
    file = tmp_path / "_jaxrl-async"
    file.write_text(script("zsh"))
    done = subprocess.run(["zsh", "-n", str(file)], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0 and not done.stderr


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_nothing_is_left_to_fill_in(shell, capsys):
    assert main([shell]) == 0
    text = capsys.readouterr().out
    assert not re.search(r"@[A-Z_]+@", text) and "algorithm.learning_rate=" in text


def test_an_unknown_shell_is_refused(capsys):
    assert main(["tcsh"]) == main([]) == 2
    assert "bash|zsh|fish" in capsys.readouterr().err


@pytest.mark.parametrize("name", OPTIONS)
def test_the_options_it_knows_are_those_of_help(name, capsys):
    with contextlib.suppress(SystemExit):
        entry_point([name, "--help"])
    shown = capsys.readouterr().out.partition("\n\nrun\n")[0]  # of train: what is before settings
    documented = set(re.findall(r"(?<![\w-])--[a-z][a-z-]+", shown))
    assert set(OPTIONS[name].split()) == documented | {"--help"}
