"""The options of a chat in the terminal, its commands (/set, /system, ...), and what it prints of
tokens. Pure functions; needs no JAX."""

import math
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from difflib import get_close_matches
from typing import Any

from jaxrl_async.errors import ConfigError

MOST_SHOWN = 20
"""Maximum number of likeliest tokens that are shown at each position, as in OpenAI's API."""
LEAST_TEMPERATURE = 1e-6
"""Minimum temperature above 0, as of a sampler."""
COMMANDS = {
    "help": "list the commands",
    "reset": "begin a new conversation with the same system message",
    "system": "TEXT: begin a new conversation with this system message; without TEXT, without one",
    "regenerate": "replace the last answer by another one",
    "set": "NAME VALUE: change an option; without them, show the options",
    "exit": "end (so does Ctrl-D)",
}
"""Commands of a chat, and what each does."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatOptions:
    """How answers are sampled and shown."""

    temperature: float = 1.0  # 0: greedy
    top_p: float = 1.0
    top_k: int = 0  # 0: all tokens
    max_new_tokens: int = 1024  # longest answer
    logprobs: int | None = None  # likeliest tokens shown at each position; None: no log-probs


OPTION_NAMES = tuple(field.name for field in fields(ChatOptions))


def parsed_command(line: str) -> tuple[str, str] | None:
    """Return the command of a line and its argument; None: the line is a message. Raises
    ConfigError for an unknown command.

    A message that begins with a slash is written with two.
    """
    if not line.startswith("/") or line.startswith("//"):
        return None
    name, _, argument = line[1:].partition(" ")
    if name in COMMANDS:
        return name, argument.strip()
    near = get_close_matches(name, COMMANDS, n=1)
    hint = f"; did you mean /{near[0]}?" if near else "."
    raise ConfigError(
        f"unknown command /{name}{hint} /help lists the commands; a message that begins with a "
        "slash is written with two."
    )


def message_of(line: str) -> str:
    """Return the message of a line that is no command."""
    return line[1:] if line.startswith("//") else line


def changed_options(options: ChatOptions, text: str) -> ChatOptions:
    """Return the options after `NAME VALUE`. Raises ConfigError."""
    name, _, value = text.strip().replace("=", " ", 1).partition(" ")
    value = value.strip()
    if name not in OPTION_NAMES or not value:
        near = get_close_matches(name, OPTION_NAMES, n=1)
        hint = f" Did you mean {near[0]}?" if near and name not in OPTION_NAMES else ""
        raise ConfigError(
            f"/set {text}: give NAME VALUE, of {', '.join(OPTION_NAMES)}.{hint} For example /set "
            "temperature 0.7."
        )
    changed: dict[str, Any] = {name: _value_of(name, value)}
    return with_checked(replace(options, **changed))


def with_checked(options: ChatOptions) -> ChatOptions:
    """Return the options, whose values are allowed. Raises ConfigError."""
    wrong = None
    if not (options.temperature == 0 or LEAST_TEMPERATURE <= options.temperature < math.inf):
        wrong = f"temperature = {options.temperature:g} must be 0 (greedy) or above"
    elif not 0 < options.top_p <= 1:
        wrong = f"top_p = {options.top_p:g} must be above 0 and at most 1"
    elif options.top_k < 0:
        wrong = f"top_k = {options.top_k} must be 0 (all tokens) or above"
    elif options.max_new_tokens < 1:
        wrong = f"max_new_tokens = {options.max_new_tokens} must be 1 or above"
    elif options.logprobs is not None and not 0 <= options.logprobs <= MOST_SHOWN:
        wrong = f"logprobs = {options.logprobs} must be 0 to {MOST_SHOWN}, or off"
    if wrong is not None:
        raise ConfigError(f"{wrong}.")
    return options


def _value_of(name: str, value: str) -> float | int | None:
    """Parse the value of an option. Raises ConfigError."""
    if name == "logprobs" and value == "off":
        return None
    try:
        return float(value) if name in ("temperature", "top_p") else int(value)
    except ValueError:
        kind = "a number" if name in ("temperature", "top_p") else "a whole number"
        also = ", or off" if name == "logprobs" else ""
        raise ConfigError(f"{name} {value}: give {kind}{also}.") from None


def options_text(options: ChatOptions) -> str:
    """Return the options, a line each."""
    values = {name: getattr(options, name) for name in OPTION_NAMES}
    return "\n".join(f"{n} {'off' if v is None else f'{v:g}'}" for n, v in values.items())


def help_text() -> str:
    """Return the commands, a line each."""
    width = max(map(len, COMMANDS)) + 3
    lines = [f"{'/' + name:<{width}}{about}" for name, about in COMMANDS.items()]
    return "\n".join(
        [
            *lines,
            'A message of several lines begins and ends with """.',
            "Ctrl-C stops an answer; what was said so far remains a part of the conversation.",
        ]
    )


def for_terminal(text: str) -> str:
    """Return received text with a space for each character that controls a terminal."""
    return "".join(c if c in "\n\t" or unicodedata.category(c) != "Cc" else " " for c in text)


# ---- tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class ShownToken:
    """A token of an answer with its log-prob, and the likeliest tokens at its position."""

    text: str
    logprob: float  # natural logarithm, at temperature 1 if the policy is loaded here
    others: tuple[tuple[str, float], ...] = ()  # text and log-prob, the likeliest first


def token_lines(tokens: Sequence[ShownToken]) -> list[str]:
    """Return a line for each token: its log-prob, its probability, its text, and the others."""
    return [
        f"{one.logprob:8.3f} {math.exp(one.logprob):7.1%}  {one.text!r:<16}"
        + "  ".join(f"{text!r} {math.exp(logprob):.1%}" for text, logprob in one.others)
        for one in tokens
    ]
