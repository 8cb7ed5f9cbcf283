"""OpenAI's /v1/responses: convert a body to a chat call. Pure.

instructions ─> system message
input items  ─> messages: reasoning, message and function calls of one turn are one answer
"""

import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from jaxrl_async.endpoint.answer_constraint import format_constraint, openai_tool_choice
from jaxrl_async.endpoint.body_fields import BodyFields
from jaxrl_async.endpoint.call_messages import (
    MAX_MESSAGES,
    MAX_TOOLS,
    function_tool,
    image_part,
    joined_parts,
    read_messages,
    strict_fields,
    text_part,
)
from jaxrl_async.endpoint.http_errors import CallRefused
from jaxrl_async.endpoint.openai_chat import ChatCall, effort_of, template_of
from jaxrl_async.endpoint.request_fields import RESPONSES
from jaxrl_async.endpoint.sampling_request import (
    MAX_REQUESTED,
    SamplingOptions,
    sampling_options,
)
from jaxrl_async.types import LogitShaping, Message

HARMLESS_ITEM = frozenset({"id", "status", "annotations", "logprobs", "phase"})
"""Fields of items that clients send back and that have no effect."""
INCLUDED = ("reasoning.encrypted_content",)
"""Allowed values of `include`. Nothing is added: items contain their reasoning in plain text."""
TEXTS = ("input_text", "output_text", "text", "summary_text", "reasoning_text")
"""Types of content parts that are texts."""
PREFIX = "resp_"
"""Prefix of response ids, followed by the conversation's name and the index in it."""
ROOT_BYTES = 9
"""Random bytes in the name of a conversation that a response starts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ResponsesCall:
    """A checked call."""

    chat: ChatCall  # only the messages of the input
    instructions: str | None = None
    previous: str | None = None  # id of the response that it continues
    stores: bool = True  # whether later calls may continue this one
    repeated: Mapping[str, Any]  # fields that the answer repeats: tools, temperature ...

    def messages(self, before: Sequence[Message]) -> tuple[Message, ...]:
        """Return the whole conversation.

        before: conversation up to the previous response, which is included, without instructions.
        """
        messages = [*before, *self.chat.messages]
        if self.instructions:
            messages.insert(0, {"role": "system", "content": self.instructions})
        return read_messages(messages, "input")


def responses_call(body: object) -> ResponsesCall:
    """Convert a body to a call. Raises CallRefused that names the field."""
    fields = BodyFields(body)
    tools = tuple(map(_tool, fields.objects("tools", MAX_TOOLS)))
    options = sampling_options(fields)
    most = fields.whole("max_output_tokens", 1, MAX_REQUESTED)
    options = replace(options, max_new_tokens=most or options.max_new_tokens)
    options, ignored = _with_format(fields, options)
    reasoning, counted = _reasoning(fields)
    for i, included in enumerate(fields.rows("include", 16)):
        if included not in INCLUDED:
            raise CallRefused(f"must be {INCLUDED[0]!r}", field=f"include[{i}]")
    fields.inner("stream_options", {}).close(frozenset({"include_obfuscation"}))
    chat = ChatCall(
        messages=tuple(input_messages(fields.value("input"))),
        tools=tools,
        choice=openai_tool_choice(fields, tools),
        options=options,
        template=template_of(fields, {"reasoning.effort": reasoning}),
        stream=fields.flag("stream"),
    )
    call = ResponsesCall(
        chat=chat,
        instructions=fields.text("instructions"),
        previous=fields.text("previous_response_id"),
        stores=fields.flag("store", True),
        repeated={
            "tools": fields.value("tools") or [],
            "tool_choice": fields.value("tool_choice") or "auto",
            "parallel_tool_calls": chat.choice.parallel,
            "text": fields.value("text") or {"format": {"type": "text"}},
            "reasoning": fields.value("reasoning") or {"effort": None, "summary": None},
            "max_output_tokens": options.max_new_tokens,
            "temperature": options.temperature,
            "top_p": options.top_p,
            "metadata": fields.value("metadata") or {},
        },
    )
    everything = (*fields.settle(RESPONSES), *ignored, *counted, *strict_fields(fields))
    return replace(call, chat=replace(chat, ignored=everything))


def _with_format(
    fields: BodyFields, options: SamplingOptions
) -> tuple[SamplingOptions, tuple[str, ...]]:
    """Return options with the format of `text`, and the fields of `text` without effect. Raises
    CallRefused."""
    text = fields.inner("text", {})
    constraint = format_constraint(text, "format")
    ignored = ("text.verbosity",) if text.value("verbosity") is not None else ()
    text.close()
    if constraint is None:
        return options, ignored
    shaping = options.shaping or LogitShaping()
    if shaping.constraint is not None:
        text.refuse("format", "absent: another field gives the form of the answer")
    shaping = replace(shaping, constraint=constraint)
    return replace(options, shaping=shaping, constrained_by="text.format"), ignored


def _reasoning(fields: BodyFields) -> tuple[Mapping[str, Any] | None, tuple[str, ...]]:
    """Return the template's variables for an effort, and the fields of `reasoning` without effect.
    Raises CallRefused."""
    inner = fields.inner("reasoning", {})
    effort = effort_of(inner, "effort")
    unread = ("summary", "generate_summary", "context", "mode")
    inner.close(frozenset(unread))
    return effort, tuple(inner.name(name) for name in unread if inner.value(name) is not None)


# ---- input items


def input_messages(value: object) -> list[dict[str, Any]]:
    """Return the messages of an input: a text, or items. Raises CallRefused."""
    if isinstance(value, str):
        return [{"role": "user", "content": value}]
    if not isinstance(value, list) or not value:
        raise CallRefused("must be a text or a list of at least one item", field="input")
    if len(value) > MAX_MESSAGES:
        raise CallRefused(
            f"has {len(value)} items; at most {MAX_MESSAGES} are allowed", field="input"
        )
    turns = _Turns()
    for i, item in enumerate(value):
        turns.add(BodyFields(item, f"input[{i}]"))
    return turns.messages


class _Turns:
    """Combines items into messages; all items of one turn of the policy become one answer."""

    def __init__(self) -> None:
        self.messages: list[dict[str, Any]] = []

    def add(self, item: BodyFields) -> None:
        """Process the next item."""
        match item.text("type", "message"):
            case "message":
                self._message(item)
            case "reasoning":
                self._answer(is_new=lambda m: bool(m["content"] or m.get("tool_calls")))[
                    "reasoning_content"
                ] = _texts(item, "content") or _texts(item, "summary")
                item.value("summary")
                item.value("encrypted_content")
            case "function_call":
                self._answer(is_new=lambda _: False).setdefault("tool_calls", []).append(
                    {
                        "id": item.text("call_id", ""),
                        "type": "function",
                        "function": {
                            "name": item.needed_text("name"),
                            "arguments": item.text("arguments", ""),
                        },
                    }
                )
            case "function_call_output":
                self.messages.append(
                    {
                        "role": "tool",
                        "tool_call_id": item.text("call_id", ""),
                        "content": _content(item, "output"),
                    }
                )
            case _:
                item.refuse(
                    "type", "'message', 'reasoning', 'function_call' or 'function_call_output'"
                )
        item.close(HARMLESS_ITEM)

    def _message(self, item: BodyFields) -> None:
        role = item.choice("role", ("user", "system", "developer", "assistant"))
        if role is None:
            item.refuse("role", "'user', 'system', 'developer' or 'assistant'")
        if role != "assistant":
            self.messages.append({"role": role, "content": _content(item, "content")})
            return
        answer = self._answer(is_new=lambda m: bool(m["content"] or m.get("tool_calls")))
        answer["content"] = _texts(item, "content")

    def _answer(self, is_new: Callable[[Mapping[str, Any]], bool]) -> dict[str, Any]:
        """Return the answer that an item belongs to. is_new: whether it starts a new answer after
        this message."""
        last = self.messages[-1] if self.messages else None
        if last is None or last["role"] != "assistant" or is_new(last):
            last = {"role": "assistant", "content": ""}
            self.messages.append(last)
        return last


def _texts(item: BodyFields, field: str) -> str:
    """Return the joined texts of a field: a text, or a list of parts. Raises CallRefused."""
    content = _content(item, field)
    if not isinstance(content, str):
        item.refuse(field, "a text or a list of text parts, without images")
    return content


def _content(item: BodyFields, field: str) -> str | list[dict[str, Any]]:
    """Return the content of a field: one text, or, with images, parts in the form of chat
    completions. Raises CallRefused."""
    value = item.value(field)
    if value is None or isinstance(value, str):
        return value or ""
    if not isinstance(value, list):
        item.refuse(field, "a text or a list of parts")
    return joined_parts([_part(part) for part in item.objects(field)])


def _part(fields: BodyFields) -> dict[str, Any]:
    kind = fields.text("type", "input_text")
    if kind == "input_image":
        converted = image_part(fields.value("image_url"), fields.name("image_url"))
    elif kind in TEXTS or kind == "refusal":
        converted = text_part(fields.needed_text("refusal" if kind == "refusal" else "text"))
    else:
        fields.refuse("type", "a kind of text, or 'input_image'")
    fields.close(frozenset({"annotations", "logprobs", "detail", "prompt_cache_breakpoint"}))
    return converted


def _tool(fields: BodyFields) -> Mapping[str, Any]:
    if fields.text("type", "function") != "function":
        fields.refuse("type", "'function': tools that run on the server are not supported")
    tool = function_tool(fields)
    fields.close(frozenset({"strict", "defer_loading", "output_schema", "allowed_callers"}))
    return tool


# ---- the conversation of a response


def new_root() -> str:
    """Return an unguessable name for a conversation that a response starts."""
    return secrets.token_hex(ROOT_BYTES)


def root_of(response_id: str) -> str:
    """Return the name of the conversation that a response belongs to. Raises CallRefused if it is
    not the id of a response."""
    root, dash, number = response_id.removeprefix(PREFIX).partition("_")
    if not response_id.startswith(PREFIX) or not dash or not number.isdecimal():
        raise unknown_response(response_id)
    return root


def unknown_response(response_id: str) -> CallRefused:
    """Return the error for a response that is not stored."""
    return CallRefused(
        f"Previous response with id {response_id[:60]!r} not found. It may have expired: send its "
        "items in `input`.",
        field="previous_response_id",
        code="previous_response_not_found",
    )
