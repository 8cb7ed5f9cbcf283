"""The commands and options of a chat, and what it prints of tokens."""

import math

import pytest

from jaxrl_async.command.chat_options import (
    ChatOptions,
    ShownToken,
    changed_options,
    for_terminal,
    message_of,
    options_text,
    parsed_command,
    token_lines,
    with_checked,
)
from jaxrl_async.errors import ConfigError


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ("hello", None),
        ("3 / 4", None),
        ("//reset", None),
        ("/reset", ("reset", "")),
        ("/system  Be brief. ", ("system", "Be brief.")),
        ("/set temperature 0.7", ("set", "temperature 0.7")),
    ],
)
def test_a_line_is_a_command_or_a_message(line, found):
    assert parsed_command(line) == found


def test_a_message_may_begin_with_a_slash():
    assert message_of("//reset") == "/reset" and message_of("a//b") == "a//b"


def test_an_unknown_command_gets_the_nearest_one():
    with pytest.raises(ConfigError, match="did you mean /reset"):
        parsed_command("/rest")


@pytest.mark.parametrize(
    ("text", "name", "value"),
    [
        ("temperature 0.7", "temperature", 0.7),
        ("temperature=0", "temperature", 0.0),
        ("top_p 1", "top_p", 1.0),
        ("top_k 40", "top_k", 40),
        ("max_new_tokens 5", "max_new_tokens", 5),
        ("logprobs 0", "logprobs", 0),
        ("logprobs off", "logprobs", None),
    ],
)
def test_an_option_is_changed_and_the_others_stay(text, name, value):
    before = ChatOptions(temperature=0.5, logprobs=3)
    after = changed_options(before, text)
    assert getattr(after, name) == value
    assert all(
        getattr(after, other) == getattr(before, other)
        for other in ("temperature", "top_p", "top_k", "max_new_tokens", "logprobs")
        if other != name
    )


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("temperature -1", "must be 0"),
        ("temperature nan", "must be 0"),
        ("temperature inf", "must be 0"),
        ("temperature 1e-9", "must be 0"),
        ("temperature warm", "give a number"),
        ("top_p 0", "above 0 and at most 1"),
        ("top_p 1.5", "above 0 and at most 1"),
        ("top_k -1", "0 \\(all tokens\\)"),
        ("top_k 1.5", "a whole number"),
        ("max_new_tokens 0", "1 or above"),
        ("logprobs 21", "0 to 20, or off"),
        ("logprobs on", "a whole number, or off"),
        ("temprature 1", "Did you mean temperature"),
        ("temperature", "give NAME VALUE"),
    ],
)
def test_a_value_that_is_not_allowed_is_refused(text, says):
    with pytest.raises(ConfigError, match=says):
        changed_options(ChatOptions(), text)


def test_the_options_are_shown_as_they_are_set():
    told = options_text(with_checked(ChatOptions(temperature=0.25, logprobs=None)))
    assert told.splitlines()[0] == "temperature 0.25" and told.endswith("logprobs off")
    changed = ChatOptions(temperature=0.25)
    for line in told.splitlines():
        assert changed_options(changed, line) == changed


def test_tokens_are_shown_with_probabilities():
    token = ShownToken(text=" a\n", logprob=math.log(0.25), others=((" b", math.log(0.5)),))
    (line,) = token_lines([token])
    assert line.split() == ["-1.386", "25.0%", "'", r"a\n'", "'", "b'", "50.0%"]


def test_an_answer_cannot_control_the_terminal():
    assert for_terminal("a\x1b[2Jb\r\u009bc\td\ne \N{GRINNING FACE}") == (
        "a [2Jb  c\td\ne \N{GRINNING FACE}"
    )
