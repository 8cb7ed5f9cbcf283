"""Schemas of Python functions as tools, and calls with wrong arguments."""

import asyncio
import json
import os
import signal
import time
from contextlib import contextmanager
from typing import Annotated, Literal

import pytest
from pydantic import BaseModel, Field

from jaxrl_async.errors import ConfigError, RolloutError
from jaxrl_async.tasks.toolbox import MOST_CALLS, Toolbox, ToolLimits, tool_schema, tools_of
from jaxrl_async.tasks.usercode import Threads


class Place(BaseModel):
    city: str
    zip: int = 0


def weather(
    place: Place,
    unit: Literal["C", "F"] = "C",
    days: Annotated[int, Field(ge=1, le=7)] = 1,
    tags: list[str] | None = None,
) -> str:
    """Say the weather
    of a place.

    More about it.

    Args:
        place: where,
            in words.
        days (int): how many.

    Returns: a text.
    """
    return f"{place.city} {unit} {days} {tags}"


class Owner:
    """Tools may be methods."""

    def __init__(self):
        self.calls = []

    def note(self, text: str) -> None:
        """Note it."""
        self.calls.append(text)


def test_the_whole_text_before_its_blocks_and_annotated_descriptions_reach_the_policy():
    def query(
        sql: str, most: Annotated[int, Field(description="Rows at most.", gt=0)] = 5
    ) -> list[str]:
        """
        Execute a read-only command.

        The database has one table,
        interactions, with the columns a and b.

        Args:
            sql: The command.

        Returns:
            Rows.
        """

    function = tool_schema(query)["function"]
    assert function["description"] == (
        "Execute a read-only command.\n\nThe database has one table, interactions, with the "
        "columns a and b."
    )
    properties = function["parameters"]["properties"]
    assert properties["sql"]["description"] == "The command."
    assert properties["most"]["description"] == "Rows at most."


def test_the_schema_comes_from_signature_and_docstring():
    function = tool_schema(weather)["function"]
    assert (
        function["name"] == "weather"
        and function["description"] == "Say the weather of a place.\n\nMore about it."
    )
    parameters = function["parameters"]
    assert parameters["required"] == ["place"] and parameters["additionalProperties"] is False
    properties = parameters["properties"]
    assert list(properties) == ["place", "unit", "days", "tags"]
    assert properties["place"]["description"] == "where, in words."
    assert properties["days"] == {
        "default": 1, "description": "how many.", "maximum": 7, "minimum": 1, "type": "integer",
    }  # fmt: skip
    assert properties["unit"]["enum"] == ["C", "F"]
    assert "title" not in str(parameters)


def ask(*calls, tools=(weather,)):
    """Run tool calls; return the texts of the answers, and the faults counted."""
    faults = []
    box = Toolbox(tools, Threads(4), ToolLimits(timeout_s=5.0), faults.append)
    message = {
        "role": "assistant",
        "tool_calls": [{"id": f"c{i}", "function": call} for i, call in enumerate(calls)],
    }
    answers = asyncio.run(box(message))
    assert [a["tool_call_id"] for a in answers] == [f"c{i}" for i in range(len(calls))]
    assert all(a["role"] == "tool" for a in answers)
    return [a["content"] for a in answers], faults


@pytest.mark.parametrize(
    ("arguments", "answer"),
    [
        ('{"place": {"city": "Ulm"}}', "Ulm C 1 None"),
        ({"place": {"city": "Ulm"}, "days": "3", "tags": ["a"]}, "Ulm C 3 ['a']"),
        ('{"place": {"city": "Ulm"}, "days": 9}', "error: weather: days: "),
        ('{"place": {}}', "error: weather: place.city: Field required"),
        ('{"place": {"city": "Ulm"}, "self": 1}', "error: weather: self: Extra inputs"),
        ("{", "error: weather: its arguments are not JSON"),
        ("[1]", "error: weather: its arguments are not a JSON object"),
        (5, "error: weather: its arguments are not a JSON object"),
        ("[" * 100_000, "error: weather: its arguments are not JSON"),
    ],
)
def test_arguments_are_checked_and_what_is_wrong_with_them_is_reported(arguments, answer):
    (text,), faults = ask({"name": "weather", "arguments": arguments})
    assert text.startswith(answer) and len(text) < 400
    assert faults == (["tool_errors"] if answer.startswith("error") else [])


def test_calls_that_are_no_calls_are_reported_and_too_many_are_not_made():
    owner = Owner()
    texts, faults = ask(
        *[{"name": "note", "arguments": {"text": "x"}}] * (MOST_CALLS + 1), tools=(owner.note,)
    )
    assert len(owner.calls) == MOST_CALLS and "not called" in texts[-1]
    assert texts[0] == "null" and faults == ["tool_errors"]
    texts, _ = ask(None, {}, {"name": 5}, {"name": "x" * 10_000})
    assert all(text.startswith("error: there is no tool") for text in texts)
    assert len(texts[-1]) <= 300


def test_a_result_that_is_no_unicode_is_returned_all_the_same():
    def name(at: int) -> str:
        """Return a file's name that is no UTF-8."""
        if at:
            raise ValueError("\udcff")
        return "x\udcff"

    calls = [{"name": "name", "arguments": {"at": at}} for at in (0, 1)]
    assert ask(*calls, tools=(name,))[0] == ["x?", "error: name: ValueError: ?"]


def test_a_call_that_could_not_be_read_is_reported_by_the_user():
    faults = []
    box = Toolbox((weather,), Threads(1), ToolLimits(), faults.append)
    errors = [{"text": "<tool_call>{", "reason": "not JSON"}]
    (message,) = asyncio.run(box({"role": "assistant", "tool_call_errors": errors}))
    assert message["role"] == "user" and "could not be read: not JSON" in message["content"]
    assert faults == ["tool_errors"]


def test_a_text_names_a_method_and_two_tools_may_not_share_a_name():
    owner = Owner()
    assert tools_of(owner, ("note",), (weather,)) == [owner.note, weather]
    with pytest.raises(RolloutError, match=r"Owner.tools names 'nite'"):
        tools_of(owner, ("nite",), ())
    with pytest.raises(ConfigError, match="two tools have one name"):
        Toolbox((weather, weather), Threads(1), ToolLimits())


def untyped(x):
    """No hint."""


def many(*x: int):
    """Not by name."""


def strange(x: "Missing"):
    """No such type."""


def opaque(x: Threads):
    """No schema."""


@pytest.mark.parametrize("tool", [untyped, many, strange, opaque, "text"])
def test_what_cannot_be_a_tool_is_refused(tool):
    with pytest.raises(ConfigError, match="tool "):
        tool_schema(tool)


def test_of_a_tool_that_sets_a_signal_the_user_is_warned_once(caplog):
    def guarded() -> str:
        """Guard itself as the tools of TRL's examples do."""
        signal.signal(signal.SIGALRM, lambda *_: None)
        return "never"

    call = {"name": "guarded", "arguments": "{}"}
    (first, second), faults = ask(call, call, tools=(guarded,))
    assert first == second and "signal only works in main thread" in first
    assert faults == ["tool_errors"] * 2
    assert caplog.text.count("the tool guarded sets a signal") == 1
    assert "env.tool_timeout_s" in caplog.text


# ---- tools that set signals, as TRL's examples do


@contextmanager
def alarmed(seconds: float):
    """Raise TimeoutError in the block after some seconds."""

    def late(number, frame):
        raise TimeoutError("late")

    signal.signal(signal.SIGALRM, late)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)


def query(sql: str, wait_s: float = 0.0, limit_s: float = 5.0) -> list[dict[str, int]]:
    """Execute a query.

    Args:
        sql: what to execute.
    """
    with alarmed(limit_s):
        time.sleep(wait_s)
        if sql == "wrong":
            raise LookupError("no such table")
        if sql == "die":
            os._exit(3)
        return [{"a": 1, "pid": os.getpid()}]


async def slow_query(sql: str) -> str:
    """Execute a query."""
    with alarmed(5.0):
        await asyncio.sleep(0.01)
        return sql.upper()


def call_of(name, **arguments):
    return {"name": name, "arguments": json.dumps(arguments)}


@pytest.mark.full
def test_tools_that_set_signals_run_in_processes_of_their_own(caplog):
    for _ in range(2):  # the first call finds it, the second knows
        (result,), faults = ask(call_of("query", sql="x"), tools=(query,))
        (row,) = json.loads(result)
        assert row["a"] == 1 and row["pid"] != os.getpid() and faults == []
    # Its own limit, its errors, and arguments that do not fit, are returned to the policy.
    texts, faults = ask(
        call_of("query", sql="x", wait_s=2.0, limit_s=0.1),
        call_of("query", sql="wrong"),
        call_of("query", sql=3),
        call_of("query", sql="die"),
        call_of("slow_query", sql="x"),
        tools=(query, slow_query),
    )
    assert texts[0] == "error: query: TimeoutError: late"
    assert texts[1] == "error: query: LookupError: no such table"
    assert texts[2].startswith("error: query: sql: Input should be a valid string")
    assert "ended its process, with code 3" in texts[3]
    assert texts[4] == "X"
    assert faults == ["tool_errors"] * 4
    # The run's limit ends the process.
    box = Toolbox([query], Threads(4), ToolLimits(timeout_s=0.5), lambda name: None)
    message = {"tool_calls": [{"id": "c", "function": call_of("query", sql="x", wait_s=60.0)}]}
    (late,) = asyncio.run(box({"role": "assistant", **message}))
    assert late["content"] == "error: query took more than 0.5 s"
    (result,), _ = ask(call_of("query", sql="x"), tools=(query,))  # by another process
    assert json.loads(result)[0]["a"] == 1
