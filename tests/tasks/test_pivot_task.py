"""Pivots of given conversations: which turns, what the policy sees, the profile, and refusals."""

import json
import logging
from pathlib import Path

import pytest

from jaxrl_async.errors import ConfigError, DataError
from jaxrl_async.tasks.named_tasks import load_task
from jaxrl_async.tasks.pivot_task import (
    filter_by_profile,
    pivot_task,
    pivots_of,
    read_conversations,
)
from jaxrl_async.tasks.task_source import TaskSource

TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}


def called(**arguments: int) -> dict:
    function = {"name": "add", "arguments": json.dumps(arguments)}
    return {"role": "assistant", "tool_calls": [{"id": "c", "function": function}]}


def conversation(number: int) -> list[dict]:
    return [
        {"role": "system", "content": "Add."},
        {"role": "user", "content": f"{number} + 1?"},
        called(a=number, b=1),
        {"role": "tool", "tool_call_id": "c", "content": str(number + 1)},
        {"role": "assistant", "content": f"It is {number + 1}."},
        {"role": "assistant", "content": "More?"},
        {"role": "user", "content": "no"},
        {"role": "assistant", "content": ""},
    ]


def write(file: Path, records: list) -> str:
    file.write_text("".join(json.dumps(one) + "\n" for one in records), "utf-8")
    return str(file)


@pytest.fixture
def traces(tmp_path: Path) -> str:
    records = [{"messages": conversation(n), "tools": [TOOL], "id": n} for n in range(20)]
    return write(tmp_path / "traces.jsonl", records)


def test_each_turn_that_the_policy_can_take_is_a_pivot(traces):
    """Not the continuation of another turn, nor one that says nothing."""
    conversations = read_conversations(traces)
    assert [at for number, at in pivots_of(conversations, "all", "f").positions if not number] == [
        2,
        4,
    ]
    assert [at for n, at in pivots_of(conversations, "calls", "f").positions if not n] == [2]
    second = pivots_of(conversations, "all", "f")[1]
    assert [m["role"] for m in second["messages"]] == ["system", "user", "assistant", "tool"]
    assert second["given"]["content"] == second["answer"] == "It is 1."
    assert second["worked"] == [*second["messages"], second["given"]]
    assert second["tools"] == [TOOL] and second["id"] == 0 and second["turn"] == 4
    first = pivots_of(conversations, "all", "f")[0]
    assert json.loads(first["answer"])[0]["name"] == "add"


def test_a_pivot_is_a_record_of_the_task_that_ends_before_the_turn(traces):
    source = TaskSource(pivots_of(read_conversations(traces), "all", "f"))
    record = source[0]
    assert [m["role"] for m in record.messages] == ["system", "user"]
    assert record.text == "0 + 1?" and "add" in record.reference
    assert record.columns["given"]["tool_calls"]


def test_whole_conversations_are_held_out(traces, tmp_path):
    task = pivot_task(traces)
    numbers = [{r["conversation"] for r in of} for of in (task.records, task.held_out)]
    assert numbers == [set(range(18)), {18, 19}]
    other = write(tmp_path / "other.jsonl", [{"messages": conversation(5), "tools": [TOOL]}])
    task = pivot_task(traces, eval_path=other)
    assert len(task.records) == 40 and len(task.held_out) == 2


def test_the_setting_names_the_task_with_its_arguments(traces):
    task = load_task({f"pivots:{traces}": {"turns": "calls", "ignored": ["b"]}})
    reward = task.rewards[0]
    given = {"messages": [called(a=1, b=5)], "given": called(a=1, b=2), "stop": "eos"}
    assert reward(**given, log_metric=lambda name, value: None) == {"correct": 1.0}
    assert task.plays and not task.judges


def profile(file: Path, pivots, rewards: dict[int, list[float]]) -> Path:
    lines = [
        {"index": index, "reward": reward, "prompt": "", "reference": pivots[index]["answer"]}
        for index, of_one in rewards.items()
        for reward in of_one
    ]
    return Path(write(file, lines))


def test_a_profile_keeps_the_pivots_whose_rewards_vary_and_are_low(traces, tmp_path, caplog):
    caplog.set_level(logging.INFO)
    pivots = pivots_of(read_conversations(traces), "calls", "f")
    rewards = {0: [0, 0, 0, 0], 1: [1, 1, 1, 1], 2: [0, 1, 0, 0], 3: [1, 1, 1, 0], 4: [1, 0, 1, 0]}
    file = profile(tmp_path / "answers.jsonl", pivots, rewards)
    assert [p[0] for p in filter_by_profile(pivots, file, 1.0).positions] == [2, 3, 4]
    assert [p[0] for p in filter_by_profile(pivots, file, 0.75).positions] == [2, 4]
    assert "2 of 20 pivots are kept; left out: 2 with equal rewards, 1 with a mean" in caplog.text
    assert "15 without answers" in caplog.text
    task = pivot_task(traces, turns="calls", profile=str(file))
    assert {r["conversation"] for r in (*task.records, *task.held_out)} == {2, 3, 4}


@pytest.mark.parametrize(
    ("rewards", "message"),
    [
        ({0: [1.0]}, "have one answer"),
        ({0: [1.0, 1.0]}, "no pivot has rewards that differ"),
    ],
)
def test_a_profile_that_says_nothing_is_refused(traces, tmp_path, rewards, message):
    pivots = pivots_of(read_conversations(traces), "calls", "f")
    file = profile(tmp_path / "answers.jsonl", pivots, rewards)
    with pytest.raises(DataError, match=message):
        filter_by_profile(pivots, file, 1.0)


@pytest.mark.parametrize("text", ['{"index": 0}', "no JSON", '{"index": "x", "reference": ""}'])
def test_what_is_no_profile_is_refused(traces, tmp_path, text):
    pivots = pivots_of(read_conversations(traces), "calls", "f")
    (file := tmp_path / "answers.jsonl").write_text(text, "utf-8")
    with pytest.raises(DataError, match="not the answers of an evaluation"):
        filter_by_profile(pivots, file, 1.0)
    with pytest.raises(DataError, match="Give an answers"):
        filter_by_profile(pivots, tmp_path / "none.jsonl", 1.0)


def test_a_profile_of_other_turns_is_refused(traces, tmp_path):
    calls = pivots_of(read_conversations(traces), "calls", "f")
    file = profile(tmp_path / "answers.jsonl", calls, {1: [0, 1]})
    with pytest.raises(DataError, match="is to another turn"):
        filter_by_profile(pivots_of(read_conversations(traces), "all", "f"), file, 1.0)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"turns": "some"}, "turns .'some'. must be one of all, calls"),
        ({"calls": "x"}, "calls"),
        ({"text": 1}, "text"),
        ({"similarity": 0}, "similarity"),
        ({"max_mean": 1.5, "profile": "x"}, "max_mean"),
        ({"max_mean": 0.5}, "has no effect without profile"),
        ({"ignored": "b"}, "ignored"),
        ({"ignored": [1]}, "ignored"),
        ({"nothing": 1}, "nothing"),
    ],
)
def test_wrong_arguments_are_refused(traces, arguments, message):
    with pytest.raises(ConfigError, match=message):
        load_task({f"pivots:{traces}": arguments})


@pytest.mark.full
def test_malformed_conversations_are_skipped_and_too_many_refused(tmp_path, caplog):
    good = [{"messages": conversation(n), "tools": [TOOL]} for n in range(300)]
    bad = [
        {"messages": [{"role": "user", "content": "?"}]},
        {"messages": conversation(1)},
    ]
    assert len(read_conversations(write(tmp_path / "few.jsonl", [*good, *bad]))) == 300
    assert "there is no column `tools`" in caplog.text
    for wrong in (bad, [{"text": "x"}], [{"messages": [{"role": "robot", "content": ""}]}]):
        with pytest.raises(DataError):
            read_conversations(write(tmp_path / "bad.jsonl", wrong))


@pytest.mark.full
def test_one_conversation_alone_cannot_be_held_out(tmp_path):
    file = write(tmp_path / "one.jsonl", [{"messages": conversation(1), "tools": [TOOL]}])
    with pytest.raises(DataError, match="one conversation alone"):
        pivot_task(file)
    plain = [
        {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}
    ]
    with pytest.raises(DataError, match="no turn of the assistant is a pivot"):
        pivot_task(write(tmp_path / "plain.jsonl", plain * 2), turns="calls")
