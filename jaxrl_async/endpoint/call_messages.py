"""Messages and tools of a conversation, checked and normalised, and digests that identify equal
messages. Pure."""

import hashlib
import json
from collections.abc import Mapping, Sequence, Set
from typing import Any

from jaxrl_async.endpoint.body_fields import BodyFields
from jaxrl_async.endpoint.http_errors import CallRefused
from jaxrl_async.types import Message

MAX_MESSAGES = 4096
"""Maximum number of messages of one call."""
MAX_TOOLS = 512
"""Maximum number of tools of one call, and of tool calls of one message."""
ROLES = ("system", "developer", "user", "assistant", "tool")
HARMLESS: Set[str] = frozenset({"annotations", "parsed", "cache_control", "id", "object"})
"""Fields of a message that clients send back and that have no effect."""
NEUTRAL: Mapping[str, Any] = {"refusal": ("",), "audio": (), "function_call": ()}
"""Unsupported fields of a message, with the values that have no effect."""


def read_messages(values: Sequence[Any], where: str = "messages") -> tuple[Message, ...]:
    """Return the normalised messages of a call: texts as `content`, only relevant fields.

    Raises CallRefused that names the message and the field.
    """
    if not values:
        raise CallRefused("must hold at least one message", field=where)
    messages = tuple(_message(value, f"{where}[{i}]") for i, value in enumerate(values))
    if messages[-1]["role"] == "assistant":
        raise CallRefused(
            "the last message is the assistant's, but prefilled answers are not supported. "
            "End with a message of the user or of a tool.",
            field=f"{where}[{len(messages) - 1}].role",
        )
    return messages


def _message(value: Any, where: str) -> Message:
    fields = BodyFields(value, where)
    role = fields.choice("role", ROLES)
    if role is None:
        fields.refuse("role", " or ".join(map(repr, ROLES)))
    message: dict[str, Any] = {"role": "system" if role == "developer" else role}
    content = fields.value("content")
    message["content"] = "" if content is None else joined_text(content, fields.name("content"))
    if name := fields.text("name"):
        message["name"] = name
    if role == "tool":
        message["tool_call_id"] = fields.text("tool_call_id", "")
    if role == "assistant":
        _add_answer(fields, message)
    elif content is None:
        fields.refuse("content", "a text")
    fields.close(HARMLESS, NEUTRAL)
    return message


def _add_answer(fields: BodyFields, message: dict[str, Any]) -> None:
    """Read the fields that only an assistant's message has."""
    reasoning = fields.text("reasoning_content") or fields.text("reasoning")
    fields.value("reasoning")
    if reasoning:
        message["reasoning_content"] = reasoning
    calls = fields.rows("tool_calls", MAX_TOOLS)
    if calls:
        name = fields.name("tool_calls")
        message["tool_calls"] = [_tool_call(c, f"{name}[{i}]") for i, c in enumerate(calls)]


def joined_text(content: Any, where: str) -> str:
    """Return a message's content as one text. Raises CallRefused if it is not only text."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise CallRefused("must be a text or a list of text parts", field=where)
    texts = []
    for i, part in enumerate(content):
        fields = BodyFields(part, f"{where}[{i}]")
        if fields.text("type", "text") != "text":
            fields.refuse("type", "'text': this model takes texts only")
        texts.append(fields.needed_text("text"))
        fields.close(frozenset({"cache_control", "citations", "annotations"}))
    return "".join(texts)


def _tool_call(value: Any, where: str) -> dict[str, Any]:
    fields = BodyFields(value, where)
    fields.choice("type", ("function",))
    function = BodyFields(fields.value("function"), fields.name("function"))
    call = {
        "id": fields.text("id", ""),
        "type": "function",
        "function": {
            "name": function.needed_text("name"),
            "arguments": function.text("arguments", ""),
        },
    }
    function.close()
    fields.close(frozenset({"index"}))
    return call


def read_tools(values: Sequence[Any], where: str = "tools") -> tuple[Mapping[str, Any], ...]:
    """Return the function tools of a call. Raises CallRefused for other kinds."""
    return tuple(_tool(value, f"{where}[{i}]") for i, value in enumerate(values))


def _tool(value: Any, where: str) -> Mapping[str, Any]:
    fields = BodyFields(value, where)
    if fields.text("type", "function") != "function":
        fields.refuse("type", "'function'")
    function = BodyFields(fields.value("function"), fields.name("function"))
    tool = function_tool(
        function.needed_text("name"), function.text("description"), function.value("parameters")
    )
    function.close(neutral={"strict": (False,)})
    fields.close(frozenset({"cache_control"}))
    return tool


def function_tool(name: str, description: str | None, parameters: Any) -> Mapping[str, Any]:
    """Return a function tool in OpenAI's form."""
    if parameters is not None and not isinstance(parameters, dict):
        raise CallRefused(f"the parameters of {name!r} must be a JSON schema", field="tools")
    function: dict[str, Any] = {"name": name}
    if description is not None:
        function["description"] = description
    if parameters is not None:
        function["parameters"] = parameters
    return {"type": "function", "function": function}


# ---- equality of conversations


def digests(messages: Sequence[Message], tools: Sequence[Mapping[str, Any]]) -> list[bytes]:
    """Return one digest for each prefix of a conversation: entry i covers its first i messages.

    Ids of tool calls, whitespace in their arguments and reasoning do not count: clients rewrite the
    first two and drop the last.
    """
    found = [hashlib.blake2b(_bytes(list(tools)), digest_size=16).digest()]
    for message in messages:
        found.append(following(found[-1], message))
    return found


def following(digest: bytes, message: Message) -> bytes:
    """Return the digest of a conversation with one more message."""
    return hashlib.blake2b(digest + _bytes(_meaning(message)), digest_size=16).digest()


def same_reasoning(ours: Message, theirs: Message) -> bool:
    """Return whether a client has not changed the reasoning of an answer, or has dropped it."""
    given = theirs.get("reasoning_content")
    return not given or given == ours.get("reasoning_content")


def _meaning(message: Message) -> list[Any]:
    calls = [
        [call["function"]["name"], _arguments(call["function"]["arguments"])]
        for call in message.get("tool_calls", ())
    ]
    return [message["role"], message["content"] or "", message.get("name", ""), calls]


def _arguments(text: str) -> Any:
    """Return a call's arguments as values; the text itself if it is not JSON."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text


def _bytes(value: Any) -> bytes:
    return json.dumps(value, sort_keys=True, ensure_ascii=False, separators=(",", ":")).encode(
        "utf-8", "surrogatepass"
    )
