"""The arguments of jaxrl_async.train as a configuration and a task."""

import asyncio
import importlib
import itertools
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas
import pyarrow
import pytest
from datasets import Dataset

import jaxrl_async
from jaxrl_async.api.arguments import (
    AMBIGUOUS,
    TrainInputs,
    _section_of,
    configured,
    require_inputs,
)
from jaxrl_async.config.load import dump, load
from jaxrl_async.config.peers.trl_fields import TRL
from jaxrl_async.config.peers.tunix_fields import TUNIX
from jaxrl_async.config.schema import Config
from jaxrl_async.errors import CheckpointError, ConfigError, DataError
from jaxrl_async.tasks.named_tasks import load_task
from jaxrl_async.tasks.task import Environment, Task
from jaxrl_async.tasks.task_source import opening_of, question_of

RECORDS = [{"question": f"{n}", "answer": f"{n}"} for n in range(30)]


def right(completion: str, answer: str) -> float:
    return float(completion == answer)


def settled(tmp_path: Path, config: Any = None, /, **given: Any) -> tuple[Config, Task | None]:
    """Return the configuration and the task of a call."""
    settings = given.pop("settings", {})
    resolved, task = configured(TrainInputs(**given), config, {"dir": str(tmp_path), **settings})
    if task is None and resolved.task is not None:
        task = load_task(resolved.task)
    return resolved, task


def test_the_file_of_a_first_run_is_continued_by_resume_alone(tmp_path) -> None:
    first, _ = settled(tmp_path, data=RECORDS)
    file = tmp_path / "config.yaml"
    file.write_text(dump(first), encoding="utf-8")
    assert first.run.overwrite, "as a first run from Python writes down"

    def run_of(**settings: Any) -> tuple[bool, bool]:
        config, _ = settled(tmp_path, str(file), data=RECORDS, settings=settings)
        return config.run.resume, config.run.overwrite

    assert run_of(resume=True) == (True, False)
    assert run_of() == (False, True) and run_of(overwrite=False) == (False, False)
    with pytest.raises(ConfigError, match="exclude each other"):
        run_of(resume=True, overwrite=True)
    with pytest.raises(ConfigError, match="exclude each other"):
        settled(tmp_path, {"run": {"resume": True, "overwrite": True}}, data=RECORDS)


def test_a_section_that_a_file_turned_off_keeps_its_settings_when_it_is_turned_on(tmp_path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("endpoint: {enabled: false, port: 8123, max_open_calls: 7}")
    given = {"endpoint": {"enabled": True, "max_open_calls": 9}}
    config, _ = configured(TrainInputs(), str(file), given)
    assert config.endpoint is not None
    assert (config.endpoint.port, config.endpoint.max_open_calls) == (8123, 9)
    assert configured(TrainInputs(), str(file), {})[0].endpoint is None


@pytest.mark.parametrize(
    ("switch", "section", "own", "given"),
    [
        ("algorithm: {kl_coefficient: 0}", "reference", {"ema": 0.5}, {"kl_coefficient": 0.1}),
        ("algorithm: {advantage: rloo}", "critic", {"clip": None}, {"advantage": "gae"}),
        ("mesh: {samplers_in: threads}", "remote", {"wait_s": 5.0}, {"samplers_in": "external"}),
    ],
)
def test_an_argument_turns_on_what_a_file_has_the_settings_of(
    tmp_path, switch, section, own, given
) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(f"{switch}\n{section}: {json.dumps(own)}")
    config, _ = configured(TrainInputs(), str(file), given)
    assert getattr(config, section).model_dump(exclude_unset=True) == own
    assert getattr(configured(TrainInputs(), str(file), {})[0], section) is None


def test_records_and_functions_become_a_task_that_no_configuration_can_name(tmp_path) -> None:
    config, task = settled(tmp_path, data=RECORDS, reward=right)
    assert task is not None and task.rewards == (right,) and list(task.records or ()) == RECORDS
    assert config.run.overwrite and config.task is not None
    with pytest.raises(ConfigError, match="were objects of the Python program"):
        load_task(config.task)


def test_texts_are_prompts_and_any_iterable_of_mappings_is_data(tmp_path) -> None:
    _, task = settled(tmp_path, data=iter(["a", "b"]), reward=right, eval_data=({"prompt": "c"},))
    assert task is not None and task.records == [{"prompt": "a"}, {"prompt": "b"}]
    assert task.held_out == [{"prompt": "c"}]


def test_a_table_gives_its_rows_and_a_data_set_with_splits_is_refused(tmp_path) -> None:
    rows = [{"question": "a", "answer": "b"}, {"question": "c", "answer": "d"}]
    for table in (pandas.DataFrame(rows), pyarrow.Table.from_pylist(rows), Dataset.from_list(rows)):
        _, task = settled(tmp_path, data=table, reward=right)
        assert task is not None and list(task.records or ()) == rows
    with pytest.raises(DataError, match=r"mapping of 'train', 'test'.*data\['train'\]"):
        settled(tmp_path, data={"train": rows, "test": rows}, reward=right)


def test_an_empty_cell_of_a_data_frame_is_no_text(tmp_path) -> None:
    rows = [{"question": "a", "answer": "b", "tags": ["x"]}, {"question": None, "answer": 3}]
    with pytest.raises(DataError, match=r"data\[1\] has no column 'question'"):
        settled(tmp_path, data=pandas.DataFrame(rows), reward=right)
    rows[1]["question"] = "c"
    _, task = settled(tmp_path, data=pandas.DataFrame(rows), reward=right)
    assert task is not None and list(task.records or ()) == [rows[0], rows[1] | {"tags": None}]


def test_records_without_a_question_are_refused_by_their_place(tmp_path) -> None:
    with pytest.raises(DataError, match=r"data\[2\] has no column 'question' or 'prompt' or 'mess"):
        settled(tmp_path, data=[*RECORDS[:2], {"q": "a"}], reward=right)
    _, task = settled(tmp_path, data=[{"q": "a"}, {"q": "b"}], task=Task(environment=Asks))
    assert task is not None and len(list(task.records or ())) == 2


def test_a_run_says_that_it_is_not_there_and_which_metric_was_meant(tmp_path) -> None:
    with pytest.raises(CheckpointError, match="there is no such run"):
        _ = jaxrl_async.Run(tmp_path / "none").metrics
    lines = '{"step": 1, "reward/mean": 0.5, "reward/correct": 0.25}\n'
    (tmp_path / "metrics.jsonl").write_text(lines, encoding="utf-8")
    run = jaxrl_async.Run(str(tmp_path))  # type: ignore[arg-type]
    assert run.curve("reward/mean") == [(1, 0.5)] and run.curve("eval/accuracy") == []
    assert run._repr_svg_().startswith("<svg")
    for name, near in (("reward/men", "reward/mean"), ("reward/corect", "reward/correct")):
        with pytest.raises(DataError, match=f"Did you mean '{near}'"):
            run.curve(name)


class Asks(Environment):
    def reset(self, record: Any) -> str:
        return str(record["q"])


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ({"model": "m", "reward": right}, "there is no data"),
        ({"data": RECORDS, "reward": right}, "there is no model"),
        ({"model": "m", "reward": right, "config": {"run": {"dir": "r"}}}, "there is no data"),
        ({"model": "m", "reward": right, "config": {"data": {"tokenizer": "t"}}}, "is no data"),
        ({"model": "m", "reward": right, "config": Config()}, "there is no data"),
        ({"model": "m", "reward": right, "data": {"max_prompt_tokens": 9}}, "there is no data"),
        ({"model": "m", "reward": right, "answer_field": None}, "given without path"),
        ({"data": RECORDS, "reward": right, "config": {"run": {"dir": "r"}}}, "there is no model"),
        ({"data": RECORDS, "on_step": lambda: None}, "on_step is called with the update's number"),
        (
            {"data": RECORDS, "model": "m", "max_new_tokens": 500},
            r"max_new_tokens \(500\) must be below sampler.max_length",
        ),
    ],
)
def test_a_call_that_lacks_something_is_refused_before_anything_is_made(
    tmp_path, monkeypatch, given, reason
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=reason):
        jaxrl_async.train(**given)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "given",
    [
        {"config": "recipe:addition"},
        {"config": load("recipe:addition")},
        {"config": {"data": {"source": "addition"}}, "model": "m"},
        {"data": {"source": "addition"}, "model": "m"},
        {"source": "addition", "model": {"architecture": {"layers": 2}}},
        {"data": {"addition": {}}, "model": "m"},
        {"jsonl": {"path": "d"}, "model": "m"},
        {"config": {"data": {"source": "jsonl", "jsonl": {"path": "d"}}}, "model": "m"},
        {"task": "reasoning_gym:chain_sum", "model": "m"},
    ],
)
def test_a_call_may_name_its_data_in_any_way(given) -> None:
    settings = {k: v for k, v in given.items() if k not in ("config", "data", "model", "task")}
    of_call = {k: given.get(k) for k in ("data", "model", "task")}
    require_inputs(TrainInputs(**of_call), given.get("config"), settings)


@pytest.mark.parametrize(
    ("settings", "read", "value"),
    [
        ({"learning_rate": 1e-5}, lambda c: c.algorithm.learning_rate, 1e-5),
        ({"warm_start": {"learning_rate": 0.5}}, lambda c: c.warm_start.learning_rate, 0.5),
        ({"steps": 7}, lambda c: c.run.steps, 7),
        ({"max_new_tokens": 9}, lambda c: c.sampler.max_new_tokens, 9),
        ({"lora": {"rank": 4}}, lambda c: c.model.lora.rank, 4),
        ({"sampler": {"slots": 3}, "max_length": 77}, lambda c: c.sampler.max_length, 77),
        ({"resume": True}, lambda c: (c.run.resume, c.run.overwrite), (True, False)),
    ],
)
def test_a_setting_may_be_given_by_its_own_name(tmp_path, settings, read, value) -> None:
    assert read(settled(tmp_path, settings=settings)[0]) == value


def test_columns_of_a_file_are_named_by_settings_of_their_own(tmp_path) -> None:
    names = {"prompt_field": "asked", "answer_field": "wanted"}
    jsonl = settled(tmp_path, data="records.jsonl", settings=names)[0].data.jsonl
    assert (jsonl.prompt_field, jsonl.answer_field) == ("asked", "wanted")


def test_columns_of_records_may_have_any_name(tmp_path) -> None:
    names = {"prompt_field": "asked", "answer_field": "wanted", "messages_field": "talk"}
    talk = [{"role": "user", "content": "2 + 2"}]
    records = [
        {"asked": "1 + 1", "wanted": "2", "messages": "of something else", "source": "a book"},
        {"talk": talk, "wanted": "4"},
    ]
    held_out = [{"asked": "0 + 0", "wanted": "0"}]
    given = {"data": records, "eval_data": held_out, "reward": right}
    config, task = settled(tmp_path, **given, settings=names)
    assert task is not None and task.held_out == [{**held_out[0], "prompt": "0 + 0", "answer": "0"}]
    first, second = task.records
    assert (question_of(first), first["answer"], first["source"]) == ("1 + 1", "2", "a book")
    assert opening_of(first, "first") == ([], None), "messages are another column here"
    assert opening_of(second, "second") == (talk, None) and second["answer"] == "4"
    assert config.data.jsonl is None, "a task's records do not read it"
    with pytest.raises(DataError, match=r"data\[1\] has no column 'asked', only prompt, wanted"):
        wrong = [records[0], {"prompt": "3", "wanted": "3"}]
        settled(tmp_path, data=wrong, reward=right, settings={"prompt_field": "asked"})
    with pytest.raises(DataError, match=r"eval_data\[0\] has no column 'wanted'"):
        given["eval_data"] = [{"asked": "0 + 0", "answer": "0"}]
        settled(tmp_path, **given, settings=names)


def test_settings_change_a_file_a_mapping_or_a_config_and_leave_the_rest(tmp_path) -> None:
    file = tmp_path / "base.yaml"
    file.write_text("run: {steps: 5, seed: 3}\nsampler: {slots: 4}\n", encoding="utf-8")
    sections: Mapping[str, Any] = {"run": {"steps": 5, "seed": 3}, "sampler": {"slots": 4}}
    for base in (file, sections, load(file)):
        config, _ = settled(tmp_path, base, settings={"steps": 6})
        assert (config.run.steps, config.run.seed, config.sampler.slots) == (6, 3, 4)
    assert sections == {"run": {"steps": 5, "seed": 3}, "sampler": {"slots": 4}}, "left as it was"


def test_former_names_of_settings_are_read_with_a_warning_and_change_a_config(
    tmp_path, caplog
) -> None:
    ways: list[dict[str, Any]] = [
        {"beside": True, "least_members": 3},
        {"eval": {"beside": True}, "algorithm": {"least_members": 3}},
    ]
    for base, settings in itertools.product((None, Config(), {"eval": {"every": 7}}), ways):
        caplog.clear()
        config, _ = settled(tmp_path, base, settings=settings)
        assert config.eval.asynchronous and config.algorithm.min_members == 3
        assert "train: eval.beside is now written eval.asynchronous=true" in caplog.text
        require_inputs(TrainInputs(model="m", data="f"), base, settings)
    before = {"eval": {"beside": True}}
    config, _ = settled(tmp_path, before, settings={"asynchronous": False})
    assert not config.eval.asynchronous and before == {"eval": {"beside": True}}


def test_a_section_goes_where_its_objects_go(tmp_path) -> None:
    config, _ = settled(
        tmp_path, model={"architecture": {"layers": 3}}, data={"addition": {"digits": 2}}
    )
    assert (config.model.architecture.layers, config.data.addition.digits) == (3, 2)
    assert settled(tmp_path, model="some/dir")[0].model.path == "some/dir"
    assert settled(tmp_path, model="d", settings={"lora": {"rank": 2}})[0].model.lora.rank == 2


def test_rewards_by_name_and_as_functions_stand_beside_each_other(tmp_path) -> None:
    config, task = settled(tmp_path, data=RECORDS, reward=["exact", right])
    assert config.reward.function == "exact" and task is not None and task.rewards == (right,)
    config, _ = settled(tmp_path, data=RECORDS, reward=["exact", {"math": {"weight": 0.5}}])
    assert config.reward.weights == {"exact": 1.0, "math": 0.5}


def test_data_of_a_job_without_rollouts_is_written_to_files(tmp_path) -> None:
    config, task = settled(tmp_path, data=RECORDS, settings={"job": "sft"})
    file = config.data.jsonl.path
    assert task is None and config.data.addition is None
    assert Path(file).read_text(encoding="utf-8").count("\n") == len(RECORDS)
    assert settled(tmp_path, data="a.jsonl")[0].data.jsonl.path == "a.jsonl"


class Mine(Environment):
    """An environment."""


@pytest.mark.parametrize(
    ("given", "error", "words"),
    [
        ({"data": []}, DataError, "data is empty"),
        ({"data": [3]}, DataError, r"data\[0\] is a int"),
        ({"data": 3}, DataError, "data is a int. Give records"),
        ({"data": [{"a": 1}], "task": Task(records=RECORDS)}, ConfigError, "Leave one out"),
        ({"eval_data": RECORDS}, ConfigError, "eval_data is given without data"),
        ({"reward": 3}, ConfigError, "reward has a int"),
        ({"reward": [3]}, ConfigError, "reward has a int"),
        ({"reward": right, "task": Task(reward=right)}, ConfigError, "Leave one"),
        ({"reward": right, "task": "nim"}, ConfigError, "a task by name"),
        ({"task": 3}, ConfigError, "task is a int"),
        ({"model": 3}, ConfigError, "model is a int"),
        ({"settings": {"lerning_rate": 1}}, ConfigError, "did you mean learning_rate"),
        ({"settings": {"steps": "many"}}, ConfigError, "train: run.steps = 'many' is not allowed"),
    ],
)
def test_what_is_wrong_is_said_before_anything_is_made(tmp_path, given, error, words) -> None:
    with pytest.raises(error, match=words):
        settled(tmp_path, **given)
    assert not list(tmp_path.iterdir())


def test_an_environment_class_is_a_task(tmp_path) -> None:
    _, task = settled(tmp_path, task=Mine, data=RECORDS)
    assert task is not None and task.environment is Mine and task.records == RECORDS


def test_the_public_name_trains_also_once_the_module_of_this_name_is_imported() -> None:
    importlib.import_module("jaxrl_async.train")
    assert callable(jaxrl_async.train) and "train" in jaxrl_async.__all__
    with pytest.raises(ConfigError, match="reward has a int"):
        jaxrl_async.train(reward=[3])


# ---- tools, and scripts of TRL


def look_up(word: str) -> str:
    """Look a word up."""
    return word


def test_tools_stand_beside_data_and_a_reward(tmp_path) -> None:
    _, task = settled(tmp_path, data=RECORDS, reward=right, tools=[look_up])
    assert task is not None and task.tools == (look_up,) and task.rewards == (right,)
    assert list(task.records or ()) == RECORDS
    _, task = settled(tmp_path, data="file.jsonl", reward=right, tools=[look_up])
    assert task is not None and task.tools == (look_up,) and task.records is None
    _, task = settled(tmp_path, data=RECORDS, task=Task(tools=[right_tool]), tools=[look_up])
    assert task is not None and task.tools == (right_tool, look_up)
    for wrong, message in (
        ({"tools": look_up}, "Give a list of functions"),
        ({"tools": [lambda word: word]}, "needs a type hint"),
        ({"tools": [look_up], "task": "calculator"}, "a task by name has its own tools"),
        ({"tools": [look_up], "task": Task(program=["x"])}, "calls no tools"),
    ):
        with pytest.raises(ConfigError, match=message):
            settled(tmp_path, data=RECORDS, **wrong)


def right_tool(number: int) -> int:
    """Return a number."""
    return number


def test_trls_names_are_refused_together_with_what_to_write(tmp_path) -> None:
    names = {"num_generations": 4, "max_completion_length": 64, "report_to": "wandb"}
    with pytest.raises(ConfigError) as error:
        settled(tmp_path, data=RECORDS, settings={**names, "train_dataset": [], "nonsense": 1})
    message = str(error.value)
    assert "TRL's and Tunix's num_generations is group_size=4 here" in message
    assert "max_completion_length is max_new_tokens=64 and max_length=576 here" in message
    assert "report_to is wandb={'project': 'huggingface'} here" in message
    assert "train_dataset is data= here" in message and "nonsense is not a setting" in message
    assert "jaxrl_async.from_trl(args, ...) converts a whole GRPOConfig" in message
    with pytest.raises(ConfigError, match=r"did you mean eval=\{'every'"):
        settled(tmp_path, data=RECORDS, settings={"eval_every": 3})


def test_usual_names_lead_to_arguments(tmp_path) -> None:
    with pytest.raises(ConfigError) as error:
        settled(tmp_path, data=RECORDS, settings={"lr": 1e-4, "rank": 8, "batch_size": 4})
    message = str(error.value)
    assert "lr is not a setting; it is learning_rate=0.0001 here" in message
    assert "it is lora={'rank': 8} here" in message
    assert "it is groups_per_step (prompts of an update) and group_size (answers to a" in message


def test_a_name_with_two_meanings_is_refused(tmp_path) -> None:
    with pytest.raises(ConfigError, match=r"means two things.*clip_low.*trainer=\{'epsilon'"):
        settled(tmp_path, data=RECORDS, settings={"epsilon": 0.2})
    config, _ = settled(tmp_path, data=RECORDS, settings={"trainer": {"epsilon": 1e-6}})
    assert config.trainer.epsilon == 1e-6


def test_names_with_two_meanings_are_those_of_the_tables() -> None:
    """Of each setting by its own name, TRL's and Tunix's counterpart is the same setting."""
    conflicts = {
        name
        for peer in (TRL, TUNIX)
        for name, one in peer.fields.items()
        if one.settings and (section := _section_of(name)) is not None
        if f"{section}.{name}" not in {setting.path for setting in one.settings}
    }
    # dtype: an option of the command `trl grpo`, not an argument of Python
    assert conflicts - {"dtype"} == set(AMBIGUOUS)


@dataclass
class Arguments:
    """Some fields of TRL's GRPOConfig."""

    num_generations: int = 4
    per_device_train_batch_size: int = 8
    learning_rate: float = 1e-5
    max_completion_length: int = 32
    num_train_epochs: float = 2.0
    reward_weights: list[float] | None = None
    use_liger_kernel: bool = True
    generation_batch_size: int | None = 8


async def waited(completion: str) -> dict[str, float | None]:
    return {"a": 1.0, "b": None}


def test_a_script_of_trl_becomes_a_call(tmp_path, caplog) -> None:
    weighed = Arguments(reward_weights=[1.0, 0.5])
    peft = {"r": 8, "lora_alpha": 16, "target_modules": ["q_proj"]}
    call = jaxrl_async.from_trl(
        weighed,
        model="m",
        reward_funcs=[right, waited],
        train_dataset=RECORDS,
        peft_config=peft,
        tools=[look_up],
        callbacks=["c"],
        devices=2,
    )
    assert call["data"] is RECORDS and call["model"] == "m" and call["tools"] == [look_up]
    assert "use_liger_kernel has no counterpart" in caplog.text
    assert "callbacks has no counterpart: give callbacks= to train" in caplog.text
    rest = {k: v for k, v in call.items() if k not in ("config", "model")}
    config, task = settled(tmp_path, call["config"], **rest)
    assert config.algorithm.group_size == 4 and config.algorithm.groups_per_step == 4
    assert config.run.steps == 2 * (30 // 4) and config.algorithm.learning_rate == 1e-5
    assert config.model.lora is not None and config.model.lora.rank == 8
    assert config.trainer.schedule == "linear"  # TRL's default
    first, second = call["reward"]
    assert first.__name__ == "right" and first("a", answer="a") == 1.0
    assert asyncio.run(second("x")) == {"a": 0.5, "b": None}
    assert task is not None and task.tools == (look_up,)
    for wrong, message in (
        ({"args": 3}, "Give TRL's GRPOConfig"),
        ({"args": weighed, "reward_funcs": [right]}, "2 reward_weights"),
        ({"args": {}, "no_such": 1}, "has no argument no_such"),
        ({"args": {}, "peft_config": {**peft, "use_dora": True}}, "DoRA"),
    ):
        with pytest.raises(ConfigError, match=message):
            jaxrl_async.from_trl(**wrong)
