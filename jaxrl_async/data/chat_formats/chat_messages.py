"""Chat messages in OpenAI's chat completions format: validated and normalized on entry.

{"role": "system" | "developer" | "user" | "assistant" | "tool", "content": "..."}
an assistant message may have "tool_calls" and "reasoning_content"; a tool's has "tool_call_id"
"""

import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from jaxrl_async.errors import DataError
from jaxrl_async.types import Message

ROLES = ("system", "developer", "user", "assistant", "tool")
OTHER_NAMES_OF_REASONING = ("reasoning", "thinking")
OTHER_TOOLS_FIELD = "tool_defs"
"""Alternative column for tools, used if a record has no column of the usual name."""
MAX_MESSAGES = 10_000
"""Maximum number of messages in one conversation."""
LARGEST_NUMBER = sys.float_info.max
MAX_DIGITS = 4300
"""Maximum number of digits of a whole number, as of Python's own int()."""


def is_conversation(value: object) -> bool:
    """Return True if a field is meant to hold chat messages: a list of objects, or an empty
    list."""
    return isinstance(value, list) and all(isinstance(v, Mapping) for v in value[:1])


def as_messages(value: object) -> Any:
    """Return the chat messages of a field with JSON text; return any other value unchanged."""
    if not isinstance(value, str) or not value.lstrip().startswith("["):
        return value
    try:
        parsed = json.loads(value)
    except (ValueError, RecursionError):
        return value
    is_full = isinstance(parsed, list) and parsed
    return parsed if is_full and all(isinstance(m, dict) and "role" in m for m in parsed) else value


def tools_in(value: object) -> tuple[Mapping[str, Any], ...]:
    """Return the tools in a record's field, () for none: a list, or a list as JSON text.

    A tool without a `function` key is itself the function (name, description, parameters). Keys
    without a value, which tables fill in, are dropped. Raises DataError if it is not a list of
    function tools.
    """
    if isinstance(value, str):
        try:
            value = json.loads(value) if value.strip() else None
        except (ValueError, RecursionError):
            raise DataError(f"the tools are {_shown(value)}. Give a list of tools.") from None
    if value is None or value == []:
        return ()
    if not isinstance(value, list):
        return checked_tools(value)
    tools = [_plain(tool) for tool in value]
    return checked_tools([_function_tool(tool) for tool in tools])


def record_tools(
    columns: Mapping[str, object], field: str | None = "tools"
) -> tuple[Mapping[str, Any], ...]:
    """Return the tools of a record, from `field` or else from `tool_defs`; () if field is None.
    Raises DataError that names the column."""
    if field is None:
        return ()
    name = field if columns.get(field) is not None else OTHER_TOOLS_FIELD
    try:
        return tools_in(columns.get(name))
    except DataError as error:
        raise DataError(f"the column {name!r}: {error}") from None


def without_nulls(value: object) -> Any:
    """Return chat messages of a table without the keys that have no value. Tables add to each
    message, and to each call's arguments, all keys that others have. Any other value is returned
    unchanged."""
    listed = value.tolist() if isinstance(value, np.ndarray) else value
    if not isinstance(listed, list) or not listed:
        return value
    return _plain(listed) if all(isinstance(m, Mapping) and "role" in m for m in listed) else value


def _function_tool(tool: object) -> Any:
    if not isinstance(tool, Mapping) or "function" in tool or "name" not in tool:
        return tool
    return {"type": "function", "function": {k: v for k, v in tool.items() if k != "type"}}


def _plain(value: object) -> Any:
    """Return a value without the keys of its objects that have no value."""
    if isinstance(value, Mapping):
        return {key: _plain(inner) for key, inner in value.items() if inner is not None}
    return [_plain(inner) for inner in value] if isinstance(value, list | np.ndarray) else value


def checked_messages(value: object) -> tuple[Message, ...]:
    """Return normalized chat messages, or raise DataError that names the message.

    Content is text (text parts are joined), keys without a value are dropped, and the arguments of
    tool calls are JSON text of an object. Other keys are kept.
    """
    if not isinstance(value, Sequence) or isinstance(value, str | bytes) or not value:
        raise DataError(
            "no chat messages: give a list of objects such as "
            '{"role": "user", "content": "What is 1 + 2?"}.'
        )
    if len(value) > MAX_MESSAGES:
        raise DataError(f"{len(value):,} messages: a conversation has at most {MAX_MESSAGES:,}.")
    return tuple(_checked_message(message, f"message {i}") for i, message in enumerate(value))


def _checked_message(value: object, where: str) -> Message:
    if not isinstance(value, Mapping) or not all(isinstance(key, str) for key in value):
        raise DataError(f"{where} is {_shown(value)}. Give an object with role and content.")
    message = {key: v for key, v in value.items() if v is not None}
    role = message.get("role")
    if role not in ROLES:
        raise DataError(f"{where} has the role {_shown(role)}. Give one of {', '.join(ROLES)}.")
    if not message.get("tool_calls", True):
        del message["tool_calls"]
    calls = "tool_calls" in message
    if calls and role != "assistant":
        raise DataError(f"{where} has tool_calls, but its role is {role}. Only assistants call.")
    if "content" not in message and not calls:
        raise DataError(f"{where} has no content. Give text.")
    message["content"] = _text_of(message.get("content", ""), where)
    if calls:
        message["tool_calls"] = _checked_calls(message["tool_calls"], where)
    for name in OTHER_NAMES_OF_REASONING:
        if name in message:
            message.setdefault("reasoning_content", message.pop(name))
    for name in ("reasoning_content", "tool_call_id", "name"):
        if name in message:
            message[name] = _checked_text(message[name], f"{name} of {where}")
    return message


def _text_of(content: object, where: str) -> str:
    """Return a message's content as one text; parts other than text are refused."""
    if isinstance(content, str):
        return _checked_text(content, f"content of {where}")
    if not isinstance(content, Sequence) or isinstance(content, bytes):
        raise DataError(f"content of {where} is {_shown(content)}. Give text.")
    parts = []
    for part in content:
        text = part.get("text") if isinstance(part, Mapping) else part
        if isinstance(part, Mapping) and part.get("type", "text") != "text":
            raise DataError(
                f"content of {where} has a part of the type {_shown(part['type'])}, but only "
                "text is read here. Remove it, or see docs/images.md for where images are read."
            )
        parts.append(_checked_text(text, f"a part of the content of {where}"))
    return "".join(parts)


def _checked_text(value: object, what: str) -> str:
    if not isinstance(value, str):
        raise DataError(f"{what} is {_shown(value)}. Give text.")
    try:
        value.encode()
    except UnicodeEncodeError:
        raise DataError(f"{what} contains half a surrogate pair. Give text in UTF-8.") from None
    return value


def _checked_calls(value: object, where: str) -> list[dict[str, Any]]:
    if not isinstance(value, Sequence) or isinstance(value, str | bytes):
        raise DataError(f"tool_calls of {where} is {_shown(value)}. Give a list of calls.")
    return [_checked_call(call, f"tool call {i} of {where}") for i, call in enumerate(value)]


def _checked_call(value: Any, where: str) -> dict[str, Any]:
    function = value.get("function", value) if isinstance(value, Mapping) else None
    name = function.get("name") if isinstance(function, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(name, str) or not name:
        raise DataError(
            f'{where} is {_shown(value)}. Give {{"function": {{"name": ..., "arguments": ...}}}}.'
        )
    arguments = arguments_object(function.get("arguments") or {})
    if arguments is None:
        raise DataError(
            f"{where}: its arguments are {_shown(function['arguments'])}. Give an object, or one "
            "as JSON text."
        )
    call = {} if value.get("id") is None else {"id": _checked_text(value["id"], f"id of {where}")}
    written = {"name": _checked_text(name, f"name of {where}"), "arguments": json_text(arguments)}
    return {**call, "type": "function", "function": written}


def parsed_json(text: str, **more: Any) -> Any:
    """Parse JSON. A number beyond float64's range is read as the nearest number in it, which RFC
    8259 (section 6) leaves to the reader: JSON has no infinity, so it could not be written again.
    Raises ValueError and RecursionError.

    more: further arguments of json.loads.
    """
    return json.loads(text, parse_float=_finite, parse_int=_whole, **more)


def _finite(text: str) -> float:
    return max(-LARGEST_NUMBER, min(float(text), LARGEST_NUMBER))


def _whole(text: str) -> int | float:
    return int(text) if len(text) <= MAX_DIGITS else _finite(text)


def arguments_object(arguments: object) -> Mapping[str, Any] | None:
    """Return a tool call's arguments as an object; None if they are not an object."""
    if isinstance(arguments, str):
        try:
            arguments = parsed_json(arguments, parse_constant=_refused_constant)
        except (ValueError, RecursionError):
            return None
    if not isinstance(arguments, Mapping) or not all(isinstance(key, str) for key in arguments):
        return None
    try:
        json_text(arguments).encode()
    except (TypeError, ValueError, RecursionError):
        return None
    return arguments


def _refused_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


def json_text(value: object) -> str:
    """Return a value as JSON text in full Unicode. Raises ValueError, TypeError."""
    return json.dumps(value, ensure_ascii=False, allow_nan=False)


def checked_tools(value: object) -> tuple[Mapping[str, Any], ...]:
    """Return OpenAI's function tools, or raise DataError that names the tool."""
    if not isinstance(value, Sequence) or isinstance(value, str | bytes):
        raise DataError(f"the tools are {_shown(value)}. Give a list of function tools.")
    for i, tool in enumerate(value):
        function = tool.get("function") if isinstance(tool, Mapping) else None
        name = function.get("name") if isinstance(function, Mapping) else None
        if not isinstance(name, str) or not name:
            raise DataError(
                f"tool {i} is {_shown(tool)}. Give "
                '{"type": "function", "function": {"name": ..., "parameters": ...}}.'
            )
    return tuple(value)


def with_objects(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """Return the messages with the arguments of tool calls as objects, the form for chat
    templates."""
    return [{**message, **dict(_calls_with_objects(message))} for message in messages]


def _calls_with_objects(message: Message) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    if calls := message.get("tool_calls"):
        yield (
            "tool_calls",
            [{**call, "function": _with_object(call["function"])} for call in calls],
        )


def _with_object(function: Mapping[str, object]) -> dict[str, Any]:
    arguments = arguments_object(function["arguments"])
    return {**function, "arguments": function["arguments"] if arguments is None else arguments}


def with_system_prompt(messages: Sequence[Message], prompt: str | None) -> tuple[Message, ...]:
    """Return the messages after a system prompt, unless they already begin with one."""
    if prompt is None or messages[0]["role"] in ("system", "developer"):
        return tuple(messages)
    return ({"role": "system", "content": prompt}, *messages)


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
