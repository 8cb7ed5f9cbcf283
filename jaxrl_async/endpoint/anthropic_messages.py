"""Anthropic's /v1/messages and count_tokens: convert a body to a chat call, and answers to a body
or to stream events. Pure."""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from jaxrl_async.endpoint.answer_constraint import anthropic_tool_choice, format_constraint
from jaxrl_async.endpoint.body_fields import BodyFields, parsed_json
from jaxrl_async.endpoint.call_messages import (
    MAX_MESSAGES,
    MAX_TOOLS,
    content_of,
    function_tool,
    image_part,
    joined_parts,
    joined_text,
    read_messages,
    strict_fields,
    text_part,
    without_prefix,
)
from jaxrl_async.endpoint.chat_deltas import ChatDelta
from jaxrl_async.endpoint.http_answers import AnswerHeader, ChatAnswer
from jaxrl_async.endpoint.http_errors import CallRefused
from jaxrl_async.endpoint.openai_chat import ChatCall, effort_of, template_of
from jaxrl_async.endpoint.request_fields import MESSAGES
from jaxrl_async.endpoint.sampling_request import (
    MAX_REQUESTED,
    SamplingOptions,
    stops_of,
    temperature_of,
    top_k_of,
    top_p_of,
)
from jaxrl_async.types import Constraint, IntArray, LogitShaping

BLOCK_LABELS = frozenset({"cache_control", "citations", "caller"})
"""Fields of a block of content that change no answer."""
TOOL_LABELS = frozenset(
    {
        "cache_control",
        "eager_input_streaming",
        "strict",
        "defer_loading",
        "input_examples",
        "allowed_callers",
    }
)
"""Fields of a tool that change no answer, or are counted (strict)."""
FINISHES = {"length": "max_tokens", "tool_calls": "tool_use", "stop": "end_turn"}
"""Stop reasons: OpenAI's names to Anthropic's."""


def messages_call(body: object, *, counting: bool = False) -> ChatCall:
    """Convert a body to a call. Raises CallRefused that names the field.

    counting: only the prompt's tokens are counted, and max_tokens is not required.
    """
    fields = BodyFields(body)
    messages = list(_system(fields.value("system")))
    for message in fields.objects("messages", MAX_MESSAGES):
        messages += _turn(message)
    max_new_tokens = fields.whole("max_tokens", 1, MAX_REQUESTED)
    if max_new_tokens is None and not counting:
        fields.refuse("max_tokens", "a whole number of at least 1")
    tools = tuple(map(_tool, fields.objects("tools", MAX_TOOLS)))
    effort, constraint = _output(fields)
    thinking, counted = _thinking(fields)
    conversation, prefix = read_messages(messages), ""
    if conversation[-1]["role"] == "assistant" and conversation[-1]["content"]:
        conversation, prefix = without_prefix(conversation)
    call = ChatCall(
        messages=conversation,
        prefix=prefix,
        tools=tools,
        choice=anthropic_tool_choice(fields, tools),
        template=template_of(fields, {"thinking": thinking, "output_config.effort": effort}),
        options=SamplingOptions(
            temperature=temperature_of(fields),
            top_k=top_k_of(fields),
            top_p=top_p_of(fields),
            max_new_tokens=max_new_tokens,
            stops=stops_of(fields, "stop_sequences"),
            shaping=None if constraint is None else LogitShaping(constraint=constraint),
            constrained_by="output_format" if fields.value("output_format") else "output_config",
        ),
        stream=fields.flag("stream"),
    )
    return replace(call, ignored=(*fields.settle(MESSAGES), *counted, *strict_fields(fields)))


def _output(fields: BodyFields) -> tuple[Mapping[str, Any] | None, Constraint | None]:
    """Return the template's variables for an effort, and what the text must match; None: not given.
    Raises CallRefused."""
    older = format_constraint(fields, "output_format")
    inner = fields.inner("output_config", {})
    effort, newer = effort_of(inner, "effort"), format_constraint(inner, "format")
    inner.close()
    return effort, newer or older


def _thinking(fields: BodyFields) -> tuple[Mapping[str, Any] | None, tuple[str, ...]]:
    """Return the template's variables for `thinking`; None: not given; and the fields of it that
    have no effect. Raises CallRefused."""
    if fields.value("thinking") is None:
        return None, ()
    inner = fields.inner("thinking")
    kind = inner.choice("type", ("enabled", "adaptive", "between_tools", "disabled"))
    if kind is None:
        inner.refuse("type", "'enabled', 'adaptive' or 'disabled'")
    budget = inner.whole("budget_tokens", 0)
    inner.close(frozenset({"display"}))
    counted = () if budget is None else (inner.name("budget_tokens"),)
    return {"enable_thinking": kind != "disabled"}, counted


def _system(value: object) -> Iterator[dict[str, Any]]:
    if value:
        yield {"role": "system", "content": joined_text(value, "system")}


def _turn(fields: BodyFields) -> list[dict[str, Any]]:
    """Convert a message of the body to messages in OpenAI's form. Tool results become separate
    messages."""
    role = fields.choice("role", ("user", "assistant", "system", "developer"))
    if role is None:
        fields.refuse("role", "'user', 'assistant' or 'system'")
    content = fields.value("content")
    fields.close()
    if isinstance(content, str) or role in ("system", "developer"):
        return [{"role": role, "content": joined_text(content, fields.name("content"))}]
    if not isinstance(content, list):
        fields.refuse("content", "a text or a list of blocks")
    blocks = fields.objects("content")
    return _assistant(blocks) if role == "assistant" else _user(blocks)


def _user(blocks: Iterable[BodyFields]) -> list[dict[str, Any]]:
    results: list[dict[str, Any]] = []
    parts: list[dict[str, Any]] = []
    for block in blocks:
        match block.needed_text("type"):
            case "text":
                parts.append(text_part(block.needed_text("text")))
            case "image":
                parts.append(_image(block))
            case "tool_result":
                results.append(_tool_result(block))
            case _:
                block.refuse("type", "'text', 'image' or 'tool_result'")
        block.close(BLOCK_LABELS)
    message = [{"role": "user", "content": joined_parts(parts)}] if parts or not results else []
    return results + message


def _tool_result(fields: BodyFields) -> dict[str, Any]:
    value, name = fields.value("content"), fields.name("content")
    blocks = value if isinstance(value, list) else []
    if any(isinstance(block, dict) and block.get("type") == "image" for block in blocks):
        content: Any = [
            _image(b) if b.needed_text("type") == "image" else text_part(b.needed_text("text"))
            for b in fields.objects("content")
        ]
    else:
        content = "" if value is None else content_of(value, name)
    if fields.flag("is_error"):
        content = f"Error: {joined_text(content, name)}"
    call = fields.needed_text("tool_use_id")
    return {"role": "tool", "tool_call_id": call, "content": content}


def _image(fields: BodyFields) -> dict[str, Any]:
    """Return an image block as a part in OpenAI's form. Raises CallRefused."""
    source = fields.inner("source")
    if source.text("type") != "base64":
        image_part(None, source.name("type"))
    kind, data = source.needed_text("media_type"), source.needed_text("data")
    return image_part(f"data:{kind};base64,{data}", source.name("data"))


def _assistant(blocks: Iterable[BodyFields]) -> list[dict[str, Any]]:
    message: dict[str, Any] = {"role": "assistant", "content": ""}
    calls: list[dict[str, Any]] = []
    for block in blocks:
        match block.needed_text("type"):
            case "text":
                message["content"] += block.needed_text("text")
            case "thinking":
                thought = block.text("thinking") or ""
                message["reasoning_content"] = message.get("reasoning_content", "") + thought
                block.value("signature")
            case "redacted_thinking":
                block.value("data")  # another model's, which nothing here can read
            case "tool_use":
                arguments = json.dumps(block.value("input") or {}, ensure_ascii=False)
                function = {"name": block.needed_text("name"), "arguments": arguments}
                calls.append({"id": block.text("id", ""), "type": "function", "function": function})
            case _:
                block.refuse("type", "'text', 'thinking' or 'tool_use'")
        block.close(BLOCK_LABELS)
    if calls:
        message["tool_calls"] = calls
    return [message]


def _tool(fields: BodyFields) -> Mapping[str, Any]:
    if fields.text("type", "custom") != "custom":
        fields.refuse("type", "'custom': Anthropic's own tools are not supported")
    tool = function_tool(fields, "input_schema")
    fields.close(TOOL_LABELS)
    return tool


# ---- answers


@dataclass(frozen=True, slots=True, kw_only=True)
class MessageWriter:
    """Writes the answer to one call, as a body or as stream events."""

    heading: AnswerHeader
    prompt: IntArray  # [prompt] int32

    def body(self, answer: ChatAnswer) -> dict[str, Any]:
        """Return the complete answer."""
        return {**self._message(_blocks(answer)), **self._stop(answer), "usage": self._all(answer)}

    def _message(self, content: Sequence[Mapping[str, object]]) -> dict[str, Any]:
        return {
            "id": self.heading.id,
            "type": "message",
            "role": "assistant",
            "model": self.heading.model,
            "content": content,
            "stop_reason": None,
            "stop_sequence": None,
            "usage": {"input_tokens": len(self.prompt), "output_tokens": 0},
        }

    def _stop(self, answer: ChatAnswer) -> dict[str, Any]:
        stop, reason = answer.answer.stop, FINISHES[answer.finish]
        if stop is not None and reason == "end_turn":
            reason = "stop_sequence"
        return {"stop_reason": reason, "stop_sequence": stop}

    def _all(self, answer: ChatAnswer) -> dict[str, int]:
        sampled = len(answer.answer.completion.token_ids)
        return {"input_tokens": len(self.prompt), "output_tokens": sampled}

    def begin(self) -> dict[str, Any]:
        """Return the first event."""
        return {"type": "message_start", "message": self._message([])}

    def end(self, answer: ChatAnswer) -> list[dict[str, Any]]:
        """Return the last events."""
        changed = {"type": "message_delta", "delta": self._stop(answer), "usage": self._all(answer)}
        return [changed, {"type": "message_stop"}]


def _blocks(answer: ChatAnswer) -> list[dict[str, Any]]:
    blocks: list[dict[str, Any]] = []
    if answer.reasoning:
        blocks.append({"type": "thinking", "thinking": answer.reasoning, "signature": ""})
    if answer.content or not answer.tool_calls:
        blocks.append({"type": "text", "text": answer.content})
    return blocks + [_tool_use(call, _input(call)) for call in answer.tool_calls]


def _tool_use(call: Mapping[str, Any], arguments: object) -> dict[str, Any]:
    name = call["function"]["name"]
    return {"type": "tool_use", "id": call["id"], "name": name, "input": arguments}


def _input(call: Mapping[str, Any]) -> Any:
    """Return a call's arguments as an object."""
    try:
        return parsed_json(call["function"]["arguments"].encode())
    except CallRefused:
        return {"arguments": call["function"]["arguments"]}


class BlockStream:
    """The content blocks of one streamed answer, and which of them is open."""

    def __init__(self) -> None:
        self._index, self._open = -1, ""

    def write(self, delta: ChatDelta) -> list[dict[str, Any]]:
        """Return the events of a delta."""
        if delta.call is not None:
            call = delta.call[1]
            events = self._begin("tool_use", _tool_use(call, {}), always=True)
            text = call["function"]["arguments"]
            return [*events, self._delta({"type": "input_json_delta", "partial_json": text})]
        if delta.reasoning:
            block = {"type": "thinking", "thinking": "", "signature": ""}
            more = {"type": "thinking_delta", "thinking": delta.reasoning}
            return [*self._begin("thinking", block), self._delta(more)]
        more = {"type": "text_delta", "text": delta.content}
        return [*self._begin("text", {"type": "text", "text": ""}), self._delta(more)]

    def close(self) -> list[dict[str, Any]]:
        """Return the events that end the open block; without any block, add an empty text."""
        begun = [] if self._open else self._begin("text", {"type": "text", "text": ""})
        return [*begun, *self._end()]

    def _begin(
        self, kind: str, block: Mapping[str, object], *, always: bool = False
    ) -> list[dict[str, Any]]:
        if kind == self._open and not always:
            return []
        ended = self._end()
        self._index, self._open = self._index + 1, kind
        start = {"type": "content_block_start", "index": self._index, "content_block": block}
        return [*ended, start]

    def _end(self) -> list[dict[str, Any]]:
        if not self._open:
            return []
        self._open = ""
        return [{"type": "content_block_stop", "index": self._index}]

    def _delta(self, delta: Mapping[str, object]) -> dict[str, Any]:
        return {"type": "content_block_delta", "index": self._index, "delta": delta}
