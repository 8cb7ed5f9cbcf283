"""The setting `task`: names, files, arguments, and what is refused."""

import math
import re

import pytest

from jaxrl_async.config.load import load
from jaxrl_async.data.prompts import prompt_of
from jaxrl_async.errors import ConfigError, DataError
from jaxrl_async.rollout.chat_env import record_of
from jaxrl_async.tasks.calculator import calculate
from jaxrl_async.tasks.named_tasks import load_task
from jaxrl_async.tasks.task import Environment, Task
from jaxrl_async.tasks.task_source import TaskSource, task_records, worked_messages

MINE = """
from jaxrl_async import Environment, Task

class Mine(Environment):
    def __init__(self, size=3):
        self.size = size

RECORDS = [{"question": f"q{i}", "answer": i} for i in range(20)]
ready = Task(records=RECORDS)
number = 5

def made(count: int = 4):
    if count < 1:
        raise ValueError("count must be at least 1")
    return Task(records=RECORDS[:count])

def wrong():
    return "task"
"""


QUESTION = {"role": "user", "content": "1+1?"}
ANSWER = {"role": "assistant", "content": "2"}


@pytest.fixture
def mine(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text(MINE, encoding="utf-8")
    return str(file)


def test_a_file_gives_a_task_a_function_or_an_environment_class(mine):
    assert len(load_task(f"{mine}:ready").records) == 20
    assert len(load_task({f"{mine}:made": {"count": 7}}).records) == 7
    task = load_task({f"{mine}:Mine": {"size": 9}})
    assert task.environment().size == 9 and task.records is None
    assert isinstance(load_task(f"{mine}:Mine").environment(), Environment)


@pytest.mark.full
@pytest.mark.parametrize(
    ("choice", "words"),
    [
        ("gues_number", "did you mean 'guess_number'"),
        ("openenv:x", "not a server's address"),
        ({"guess_number": {"highst": 3}}, "unexpected keyword argument 'highst'"),
        ({"guess_number": {"highest": 1}}, "highest: Input should be greater"),
        ("reasoning_gym:nothing", "no dataset 'nothing'"),
        ({"reasoning_gym:chain_sum": {"min_terms": 0}}, "min_terms must be positive"),
        ("{mine}:nobody", r"has no task nobody \(it has: .*Mine, .*ready"),
        ("{mine}:number", "has no task number"),
        ("{mine}:wrong", "returned a str"),
        ({"{mine}:made": {"count": 0}}, "count must be at least 1"),
        ({"{mine}:ready": {"count": 0}}, "takes no arguments"),
        ({"{mine}:Mine": {"length": 0}}, "unexpected keyword argument 'length'"),
        ("gone.py:task", "there is no file"),
    ],
)
def test_what_cannot_be_is_refused_with_a_way_out(choice, words, mine):
    if "reasoning_gym" in str(choice):
        pytest.importorskip("reasoning_gym")
    if isinstance(choice, str):
        choice = choice.replace("{mine}", mine)
    else:
        choice = {name.replace("{mine}", mine): given for name, given in choice.items()}
    with pytest.raises(ConfigError, match=words):
        load_task(choice)


def test_the_setting_takes_arguments_from_the_command_line_like_any_choice(tmp_path):
    file = tmp_path / "c.yaml"
    file.write_text("task: {guess_number: {highest: 8}}\n", encoding="utf-8")
    config = load(file, ["task.guess_number.guesses=3", "env.max_turns=4"])
    assert config.task == {"guess_number": {"highest": 8, "guesses": 3}}
    empty = tmp_path / "empty.yaml"
    empty.write_text("", encoding="utf-8")
    with pytest.raises(ConfigError, match=r"env.max_turns \(4\) has no effect without task"):
        load(empty, ["env.max_turns=4"])
    with pytest.raises(ConfigError, match=r"task .* has no effect without run.job=rl or"):
        load(file, ["run.job=preference"])
    load(file, ["run.job=sft"])


def test_records_are_split_by_the_task_or_the_last_ones_are_held_out():
    records = [{"question": str(i)} for i in range(50)]
    task = Task(records=records)
    train, held = task_records(task, "train"), task_records(task, "eval")
    assert [r["question"] for r in [*train, *held]] == [str(i) for i in range(50)]
    assert len(held) == 5
    split = Task(records=lambda split: [{"question": split}])
    assert task_records(split, "eval")[0] == {"question": "eval"}
    own = Task(records=records, held_out=[{"question": "own"}])
    assert len(task_records(own, "train")) == 50 and len(task_records(own, "eval")) == 1
    for empty in (Task(records=[]), Task(records=records[:1])):
        with pytest.raises(DataError, match="the task has"):
            task_records(empty, "eval")
    with pytest.raises(ConfigError, match="records for train are a int"):
        task_records(Task(records=lambda split: 5), "train")


@pytest.mark.parametrize("record", [{"x": object()}, "text", {"x": {1: 2}}])
def test_a_record_that_no_checkpoint_can_hold_is_refused(record):
    with pytest.raises(DataError, match="record 0 of the task"):
        TaskSource([record])[0]


@pytest.mark.parametrize(
    ("record", "text", "reference", "messages"),
    [
        ({"question": "q", "answer": [1, 2]}, "q", "[1, 2]", []),
        ({"question": "q", "answer": {"a": None}}, "q", '{"a": null}', []),
        ({"messages": [QUESTION, ANSWER]}, "1+1?", "2", [QUESTION]),
        ({"messages": [QUESTION, ANSWER], "answer": 3}, "1+1?", "3", [QUESTION]),
        ({"prompt": [QUESTION], "answer": "2"}, "1+1?", "2", [QUESTION]),
    ],
)
def test_a_record_is_read_as_those_of_files_are(record, text, reference, messages):
    made = TaskSource([record])[0]
    assert (made.text, made.reference, list(made.messages)) == (text, reference, messages)
    prompt = prompt_of(made, 0, 0)
    assert Environment().reset(record_of(prompt)) == (messages or text)


def test_messages_that_are_none_are_refused():
    for wrong in ("hi", ["hi"], [{"content": "x"}], {"role": "user"}, [ANSWER]):
        with pytest.raises(DataError, match="record 0 of the task: its messages are"):
            TaskSource([{"messages": wrong}])[0]


def test_a_record_that_cannot_be_read_is_named():
    class Gone(list):
        def __getitem__(self, index):
            raise KeyError("gone")

    with pytest.raises(DataError, match="record 3 of the task's 0 cannot be read: KeyError"):
        TaskSource(Gone())[3]


def test_a_worked_conversation_is_the_records_own_or_question_and_answer():
    question, answer = QUESTION, ANSWER
    assert worked_messages({"question": "1+1?", "answer": 2}) == [question, answer]
    assert worked_messages({"messages": [question], "answer": "2"}) == [question, answer]
    assert worked_messages({"messages": [question, answer]}) == [question, answer]
    assert worked_messages({"worked": [question, answer, question]}) == [question, answer, question]
    with pytest.raises(DataError, match="nothing to imitate"):
        worked_messages({"question": "1+1?"})


def test_every_built_in_task_has_conversations_that_its_own_environment_likes():
    for choice in ("calculator", "guess_number"):
        task = load_task(choice)
        records = task_records(task, "train")
        assert records[7] == records[7] and len(task_records(task, "eval")) > 8
        assert {m["role"] for m in records[0]["worked"]} >= {"user", "assistant"}


@pytest.mark.parametrize(
    ("expression", "value"),
    [("12+34", "46"), ("7*(3-5)", "-14"), ("1/8", "0.125"), (" 2 * 3 ", "6")],
)
def test_the_calculator_computes(expression, value):
    assert calculate(expression) == value


@pytest.mark.parametrize(
    "expression", ["", "a", "2**9", "__import__('os')", "1+", "9" * 201, "1/0", "[1]", "True"]
)
def test_the_calculator_computes_nothing_else(expression):
    with pytest.raises((ValueError, ZeroDivisionError)):
        calculate(expression)


@pytest.mark.full
def test_an_answer_that_a_datasets_scorer_raises_on_scores_nothing():
    """prime_factorization converts each factor by int()."""
    task = load_task({"reasoning_gym:prime_factorization": {"size": 4, "eval_size": 1}})
    record = task.records[0]
    score = task.rewards[0]
    assert score("12 = n^2", record["index"]) == {"correct": 0.0}
    assert score(record["answer"], record["index"]) == {"correct": 1.0}


@pytest.mark.full
def test_examples_precede_each_question_and_are_in_neither_split():
    pytest.importorskip("reasoning_gym")
    choice = {"max_value": 20, "size": 8, "eval_size": 4}
    plain = load_task({"reasoning_gym:gcd": choice})
    task = load_task({"reasoning_gym:gcd": {**choice, "examples": 2}})
    first, last = task.records[0], task.held_out[3]
    assert [m["role"] for m in first["messages"]] == ["user", "assistant"] * 2 + ["user"]
    assert first["messages"][:4] == last["messages"][:4]
    for shown, record in ((first, plain.records[0]), (last, plain.held_out[3])):
        assert shown["messages"][4]["content"] == record["question"]
        assert (shown["answer"], shown["index"]) == (record["answer"], record["index"])
    score = task.rewards[0]
    assert score(last["answer"], last["index"]) == {"correct": 1.0}
    questions = {r["question"] for r in (*plain.records, *plain.held_out)}
    for start in (0, 2):
        question, answer = (m["content"] for m in first["messages"][start : start + 2])
        assert question not in questions
        numbers = [int(n) for n in re.findall(r"\d+", question)]
        assert int(answer) == math.gcd(*numbers)
    with pytest.raises(ConfigError, match=r"examples \(-1\) must be a whole number >= 0"):
        load_task({"reasoning_gym:gcd": {"examples": -1}})
