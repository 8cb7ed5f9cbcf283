"""Recipes: the files of configs/, by name, wherever the package is."""

from pathlib import Path

import pytest

from jaxrl_async.command.recipe_list import main, recipe_lines
from jaxrl_async.config.load import load
from jaxrl_async.config.recipes import FOLDER, recipe_file, recipe_names, recipe_summary
from jaxrl_async.errors import ConfigError

CONFIGS = Path(__file__).parents[2] / "configs"


def test_recipes_are_the_files_of_configs_and_no_copies():
    assert FOLDER.resolve() == CONFIGS.resolve()
    there = {f.relative_to(CONFIGS).with_suffix("").as_posix() for f in CONFIGS.rglob("*.yaml")}
    assert set(recipe_names()) == there and len(there) == len(recipe_names())


def test_a_recipe_loads_as_its_file_does():
    named = load("recipe:grpo", ["run.steps=7"])
    assert named == load(CONFIGS / "grpo.yaml", ["run.steps=7"])


def test_a_recipes_neighbours_are_found_from_anywhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    config = load("recipe:plans/gpt_oss_20b_lora_v5e_64")
    assert (Path(config.model.path) / "config.json").is_file()
    (task,) = load("recipe:smollm2").task
    assert Path(task.partition(":")[0]).is_file()
    assert Path(load("recipe:smollm2/1_sft").data.jsonl.path).is_file()


def test_an_unknown_recipe_is_refused_with_the_nearest_ones():
    with pytest.raises(ConfigError, match=r"recipe:grp: .* did you mean recipe:grpo"):
        load("recipe:grp")
    with pytest.raises(ConfigError, match=r"give one of addition, .*smollm2/gcd\."):
        recipe_file("qqqqq")


def test_a_problem_in_a_recipe_names_its_file(tmp_path):
    with pytest.raises(
        ConfigError, match=r"grpo\.yaml, line 20: trainer\.warmup_steps \(5\).*run\.steps"
    ):
        load("recipe:grpo", ["run.steps=4"])


@pytest.mark.parametrize(("columns", "longest"), [("200", 200), ("80", 80), ("20", 60)])
def test_the_list_is_as_wide_as_the_terminal(columns, longest, monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", columns)
    assert main([]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == len(recipe_names())
    assert longest - 12 < max(map(len, lines)) <= longest
    assert all(line.startswith(name) for line, name in zip(lines, recipe_names(), strict=True))


def test_each_recipe_has_a_line_that_says_what_it_is(monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "140")
    assert main([]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines == recipe_lines() and len(lines) == len(recipe_names())
    assert all(len(line) <= 140 and len(line.split()) > 3 for line in lines)
    assert recipe_summary("grpo").startswith("GRPO, Shao et al. 2024")
    assert recipe_summary("plans/qwen3_8b_v5e_64").startswith("Qwen3-8B, 8k contexts")


def test_a_recipe_is_printed_to_copy(capsys):
    assert main(["recipe:grpo"]) == main(["grpo"]) == 0
    assert capsys.readouterr().out == 2 * (CONFIGS / "grpo.yaml").read_text()
    assert main(["nothing"]) == 2
