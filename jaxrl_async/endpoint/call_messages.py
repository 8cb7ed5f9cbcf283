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
HARMLESS: Set[str] = frozenset(
    {
        "annotations",
        "parsed",
        "cache_control",
        "id",
        "object",
        "provider_specific_fields",
        "thinking_blocks",
        "reasoning_details",
    }
)
"""Fields of a message that clients send back and that have no effect."""
NEUTRAL: Mapping[str, Any] = {"refusal": ("",), "audio": (), "function_call": ()}
"""Unsupported fields of a message, with the values that have no effect."""


def read_messages(values: Sequence[object], where: str = "messages") -> tuple[Message, ...]:
    """Return the normalised messages of a call: texts as `content`, only relevant fields.

    Raises CallRefused that names the message and the field.
    """
    if not values:
        raise CallRefused("must hold at least one message", field=where)
    return tuple(_message(value, f"{where}[{i}]") for i, value in enumerate(values))


def without_prefix(
    messages: tuple[Message, ...], where: str = "messages"
) -> tuple[tuple[Message, ...], str]:
    """Return the messages before the last one, which begins the answer, and its text. Raises
    CallRefused if it is not a text of the assistant."""
    *before, last = messages
    is_text = isinstance(last["content"], str) and not last.get("tool_calls")
    if last["role"] != "assistant" or not is_text or not before:
        raise CallRefused(
            "the last message begins the answer, so it must be a text of the assistant after "
            "other messages",
            field=f"{where}[{len(before)}]",
        )
    return tuple(before), last["content"]


def _message(value: object, where: str) -> Message:
    fields = BodyFields(value, where)
    role = fields.choice("role", ROLES)
    if role is None:
        fields.refuse("role", " or ".join(map(repr, ROLES)))
    message: dict[str, Any] = {"role": "system" if role == "developer" else role}
    content = fields.value("content")
    message["content"] = "" if content is None else content_of(content, fields.name("content"))
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


def _add_answer(fields: BodyFields, message: dict[str, object]) -> None:
    """Read the fields that only an assistant's message has."""
    reasoning = fields.text("reasoning_content") or fields.text("reasoning")
    fields.value("reasoning")
    if reasoning:
        message["reasoning_content"] = reasoning
    if calls := list(map(_tool_call, fields.objects("tool_calls", MAX_TOOLS))):
        message["tool_calls"] = calls


def joined_text(content: object, where: str) -> str:
    """Return a message's content as one text. Raises CallRefused if it is not only text."""
    text = content_of(content, where)
    if not isinstance(text, str):
        raise CallRefused("must be a text or a list of text parts, without images", field=where)
    return text


def content_of(content: object, where: str) -> str | list[dict[str, Any]]:
    """Return a message's content: one text, or, with images, text and image_url parts in OpenAI's
    form. Raises CallRefused for anything else."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise CallRefused("must be a text or a list of text parts", field=where)
    return joined_parts([_part(part, f"{where}[{i}]") for i, part in enumerate(content)])


def joined_parts(parts: Sequence[dict[str, Any]]) -> str | list[dict[str, Any]]:
    """Return text and image parts as one text if there are no images."""
    if any(part["type"] != "text" for part in parts):
        return list(parts)
    return "".join(part["text"] for part in parts)


def text_part(text: str) -> dict[str, Any]:
    """Return a text as a part of a content."""
    return {"type": "text", "text": text}


def image_part(url: object, where: str) -> dict[str, Any]:
    """Return an image as a part of a content. Raises CallRefused for one that is not in the
    body."""
    if not isinstance(url, str) or not url.startswith("data:"):
        raise CallRefused(
            "the server fetches no images; send it as a data: URL "
            "(data:image/png;base64,...), or in Anthropic's form as a base64 source",
            field=where,
        )
    return {"type": "image_url", "image_url": {"url": url}}


def _part(part: object, where: str) -> dict[str, Any]:
    fields = BodyFields(part, where)
    kind = fields.text("type", "text")
    if kind == "image_url":
        image = fields.value("image_url")
        url = image.get("url") if isinstance(image, dict) else image
        converted = image_part(url, fields.name("image_url"))
    elif kind in ("text", "refusal"):
        converted = text_part(fields.needed_text("text" if kind == "text" else "refusal"))
    else:
        fields.refuse("type", "'text' or 'image_url'")
    fields.close(frozenset({"cache_control", "citations", "annotations"}))
    return converted


def _tool_call(fields: BodyFields) -> dict[str, Any]:
    fields.choice("type", ("function",))
    function = fields.inner("function")
    call = {
        "id": fields.text("id", ""),
        "type": "function",
        "function": {
            "name": function.needed_text("name"),
            "arguments": function.text("arguments", ""),
        },
    }
    function.close(frozenset({"parsed_arguments"}))
    fields.close(frozenset({"index"}))
    return call


def read_tool(fields: BodyFields) -> Mapping[str, Any]:
    """Return a function tool. Raises CallRefused for other kinds."""
    if fields.text("type", "function") != "function":
        fields.refuse("type", "'function'")
    function = fields.inner("function")
    tool = function_tool(function)
    function.close(frozenset({"strict", "defer_loading"}))
    fields.close(frozenset({"cache_control", "defer_loading"}))
    return tool


def strict_fields(fields: BodyFields) -> tuple[str, ...]:
    """Return the name of the field if any tool asks for calls that always match its schema. It is
    counted: the policy is trained on what it calls, and only a required call is constrained."""
    functions = [tool.get("function") or tool for tool in fields.value("tools") or ()]
    return ("tools.strict",) if any(function.get("strict") for function in functions) else ()


def function_tool(fields: BodyFields, schema: str = "parameters") -> Mapping[str, Any]:
    """Return a function tool in OpenAI's form. schema: name of the field of its parameters."""
    name, description = fields.needed_text("name"), fields.text("description")
    parameters = fields.value(schema)
    if parameters is not None and not isinstance(parameters, dict):
        raise CallRefused(f"the parameters of {name!r} must be a JSON schema", field="tools")
    function = {"name": name, "description": description, "parameters": parameters}
    present = {field: value for field, value in function.items() if value is not None}
    return {"type": "function", "function": present}


# ---- equality of conversations


def digests(messages: Sequence[Message], tools: Sequence[Mapping[str, object]]) -> list[bytes]:
    """Return one digest for each prefix of a conversation: entry i covers its first i messages.

    Ids of tool calls, whitespace in their arguments and reasoning do not count: clients rewrite the
    first two and drop the last.
    """
    prefixes = [hashlib.blake2b(_bytes(list(tools)), digest_size=16).digest()]
    for message in messages:
        prefixes.append(next_digest(prefixes[-1], message))
    return prefixes


def next_digest(digest: bytes, message: Message) -> bytes:
    """Return the digest of a conversation with one more message."""
    return hashlib.blake2b(digest + _bytes(_compared_fields(message)), digest_size=16).digest()


def same_reasoning(ours: Message, theirs: Message) -> bool:
    """Return whether a client has not changed the reasoning of an answer, or has dropped it."""
    reasoning = theirs.get("reasoning_content")
    return not reasoning or reasoning == ours.get("reasoning_content")


def _compared_fields(message: Message) -> list[Any]:
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


def _bytes(value: object) -> bytes:
    return json.dumps(value, sort_keys=True, ensure_ascii=False, separators=(",", ":")).encode(
        "utf-8", "surrogatepass"
    )
