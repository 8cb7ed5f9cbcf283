"""The first configuration: many combinations of choices load, and mean what was chosen."""

import ast
import itertools
import re

import pytest

from jaxrl_async.algorithms.preflight import with_correction
from jaxrl_async.command.first_config import (
    ALGORITHMS,
    SIZES,
    SMALL_TASKS,
    FirstChoices,
    RecordColumns,
    algorithm_settings,
    columns_of,
    commented_yaml,
    first_settings,
    mesh_settings,
    reward_skeleton,
)
from jaxrl_async.config.draft import parse_yaml
from jaxrl_async.config.field_help import setting_names
from jaxrl_async.config.load import load
from jaxrl_async.config.schema import Config, name_of
from jaxrl_async.errors import ConfigError
from jaxrl_async.run.start_checks import check_names

COLUMNS = RecordColumns(prompt="problem", messages=None, answer="solution")
SOURCES = (
    {},
    {"model": "Qwen/Qwen3-0.6B"},
    {"model": "Qwen/Qwen3-0.6B", "data": "train.jsonl", "reward": "reward.py:reward"},
    {"model": "small.gguf", "data": "train.jsonl", "columns": COLUMNS, "reward": "math"},
    {"model": "m", "max_positions": 64, "data": "train.jsonl", "reward": "exact"},
    {"model": "m", "task": "reasoning_gym:gcd", "lora_rank": 0},
    *({"task": task} for task in SMALL_TASKS),
)
DEVICES = (("cpu", 1), ("tpu", 1), ("gpu", 2), ("tpu", 8))


def loaded(choices: FirstChoices) -> Config:
    """Return the configuration of the file that these choices give."""
    text = commented_yaml(first_settings(choices), "a comment\nof two lines")
    return load(parse_yaml(text, "written"), where="written")


@pytest.mark.full
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_every_combination_loads_and_means_what_was_chosen(algorithm):
    for source, (platform, devices), steps in itertools.product(SOURCES, DEVICES, (None, 1, 30)):
        choices = FirstChoices(
            name="mine",
            algorithm=algorithm,
            platform=platform,
            devices=devices,
            steps=steps,
            **source,
        )
        config = loaded(choices)
        assert config == load(first_settings(choices)), "comments change nothing"
        if steps is None:
            check_names(config)
            with_correction(config)  # as --print-config does
        assert config.run.name == "mine" and steps in (None, config.run.steps)
        assert config.model.path == choices.model
        assert config.data.records_path == choices.data
        chosen = None if config.task is None else name_of(config.task)
        assert chosen == choices.task
        if choices.reward is not None:
            assert config.reward.function == choices.reward
        needed = config.mesh.num_devices
        assert needed == devices if platform != "cpu" else needed == 2
        assert config.sampler.max_length <= (choices.max_positions or 10**6)
        if choices.model is not None:
            assert (config.model.lora is None) == (choices.lora_rank == 0)


@pytest.mark.full
@pytest.mark.parametrize("name", ALGORITHMS)
def test_an_algorithm_is_that_of_its_recipe(name):
    recipe = load(f"recipe:{name}")
    longest = recipe.sampler.max_new_tokens
    own = load({"algorithm": algorithm_settings(name, longest)}).algorithm
    sizes = {size: getattr(recipe.algorithm, size) for size in SIZES}
    assert own.model_copy(update=sizes) == recipe.algorithm
    for task in ("addition", "calculator"):
        chosen = loaded(FirstChoices(name="x", task=task, algorithm=name)).algorithm
        of_task = load(f"recipe:{task}").algorithm
        assert all(getattr(chosen, size) == getattr(of_task, size) for size in SIZES), task


def test_lengths_of_an_algorithm_follow_the_longest_answer():
    assert algorithm_settings("dr_grpo", 300)["aggregate"] == {"constant": {"divisor": 300}}
    _, overlong = algorithm_settings("dapo", 300)["shaping"]
    assert overlong == {"soft_overlong": {"max_tokens": 300, "cache_tokens": 50}}
    _, shortest = algorithm_settings("dapo", 4)["shaping"]
    assert shortest["soft_overlong"]["cache_tokens"] == 1


def test_each_setting_is_explained_above_it_or_behind_it():
    choices = FirstChoices(name="x", model="m", data="d.jsonl", columns=COLUMNS)
    lines = commented_yaml(first_settings(choices), "head").splitlines()
    assert lines[0] == "# head" and max(map(len, lines)) <= 120
    named = {name.rpartition(".")[2] for name in setting_names()}
    for before, line in itertools.pairwise(lines):
        found = re.match(r"\s+(\w+): [^#]", line)
        if found is not None and found[1] in named:
            assert "  # " in line or before.lstrip().startswith("# "), line
    slots = next(line for line in lines if line.startswith("  slots:"))
    assert slots.endswith("# Sequences that each sampler decodes concurrently"), "no open bracket"


def test_a_single_chip_is_shared_and_several_are_divided():
    def mesh(platform: str, devices: int) -> dict:
        return mesh_settings(FirstChoices(name="x", platform=platform, devices=devices))

    assert mesh("gpu", 1) == {"colocated": True}
    assert mesh("tpu", 5) == {"trainer": {"fsdp": 3}, "samplers": 2}


@pytest.mark.parametrize(
    ("record", "options", "found"),
    [
        ({"question": "q", "answer": "a #### 7"}, (None, None), ("question", None, "answer")),
        ({"id": 1, "problem": "p", "solution": "s"}, (None, None), ("problem", None, "solution")),
        ({"messages": [], "label": "x"}, (None, None), (None, "messages", "label")),
        ({"messages": [], "x": "y"}, ("x", None), ("x", None, None)),
        ({"ask": "q", "say": "a"}, ("ask", "say"), ("ask", None, "say")),
    ],
)
def test_columns_are_found_by_their_usual_names(record, options, found):
    columns = columns_of(record, "f.jsonl", *options)
    assert (columns.prompt, columns.messages, columns.answer) == found
    assert columns.mark == ("#### " if "####" in str(record) else None)


@pytest.mark.parametrize(
    ("choices", "says"),
    [
        ({"algorithm": "ppo"}, "--algorithm ppo: give one of grpo"),
        ({"data": "d.jsonl"}, "need a model that reads their text"),
        ({"task": "reasoning_gym:gcd"}, "learns only addition, calculator"),
        ({"model": "m", "data": "d", "task": "nim"}, "Give one of them"),
        ({"lora_rank": 4}, "has no adapter"),
    ],
)
def test_choices_that_do_not_fit_each_other_are_refused(choices, says):
    with pytest.raises(ConfigError, match=re.escape(says)):
        first_settings(FirstChoices(name="x", **choices))


@pytest.mark.parametrize(
    ("record", "option", "says"),
    [
        ({"a": 1}, None, "--prompt-field NAME"),
        ({"question": 1}, "other", "--prompt-field other: the records of f have question"),
    ],
)
def test_a_column_that_is_not_there_is_refused(record, option, says):
    with pytest.raises(ConfigError, match=re.escape(says)):
        columns_of(record, "f", option, None)


@pytest.mark.parametrize("with_answer", [True, False])
def test_the_reward_to_be_changed_runs_and_rewards_the_better_answer(with_answer, capsys):
    text = reward_skeleton("mine.yaml", with_answer=with_answer)
    assert ast.get_docstring(ast.parse(text)).startswith("The reward of mine.yaml")
    space: dict = {"__name__": "__main__"}
    exec(text, space)
    assert capsys.readouterr().out
    if with_answer:
        assert space["reward"]("so it is 42.", " 42") == {"correct": 1.0}
        assert space["reward"]("42 or so", "42") == space["reward"]("", "42") == {"correct": 0.0}
    else:
        assert sum(space["reward"]("q", "It is.").values()) > sum(space["reward"]("q", "").values())
