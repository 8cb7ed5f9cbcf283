"""OpenAI's /v1/responses: write answers as a body or as stream events. Pure."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jaxrl_async.endpoint.chat_deltas import ChatDelta
from jaxrl_async.endpoint.http_answers import AnswerHeader, ChatAnswer
from jaxrl_async.endpoint.responses_call import ResponsesCall
from jaxrl_async.types import IntArray

Event = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class ResponsesWriter:
    """Writes the answer to one call."""

    call: ResponsesCall
    heading: AnswerHeader
    prompt: IntArray  # [prompt] int32

    def body(self, answer: ChatAnswer) -> dict[str, Any]:
        """Return the complete answer."""
        parts = ItemStream(self.heading.id)
        for delta in _deltas(answer):
            parts.write(delta)
        parts.close()
        return self.finished(answer, parts.items)

    def begun(self) -> dict[str, Any]:
        """Return the response before any token is sampled."""
        return {**self._frame(), "status": "in_progress", "output": [], "usage": None}

    def finished(self, answer: ChatAnswer, items: Sequence[Mapping[str, object]]) -> dict[str, Any]:
        """Return the finished response. items: its output."""
        cut = answer.answer.finish == "length"
        sampled = len(answer.answer.completion.token_ids)
        return {
            **self._frame(),
            "status": "incomplete" if cut else "completed",
            "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
            "output": items,
            "usage": {
                "input_tokens": len(self.prompt),
                "input_tokens_details": {"cached_tokens": 0},
                "output_tokens": sampled,
                "output_tokens_details": {"reasoning_tokens": 0},
                "total_tokens": len(self.prompt) + sampled,
            },
        }

    def _frame(self) -> dict[str, Any]:
        return {
            "id": self.heading.id,
            "object": "response",
            "created_at": self.heading.created,
            "model": self.heading.model,
            "error": None,
            "incomplete_details": None,
            "instructions": self.call.instructions,
            "previous_response_id": self.call.previous,
            "store": self.call.stores,
            "truncation": "disabled",
            **self.call.repeated,
        }


def _deltas(answer: ChatAnswer) -> list[ChatDelta]:
    """Return a complete answer as the parts of a stream."""
    parts = [ChatDelta(reasoning=answer.reasoning)] if answer.reasoning else []
    parts += [ChatDelta(content=answer.content)] if answer.content else []
    return parts + [ChatDelta(call=pair) for pair in enumerate(answer.tool_calls)]


class ItemStream:
    """The items of one streamed answer, which of them is open, and their events. The events have no
    sequence_number yet."""

    def __init__(self, response_id: str) -> None:
        """response_id: prefix of the items' ids."""
        self._id, self._open = response_id, ""
        self.items: list[dict[str, Any]] = []  # the last may be open

    def write(self, delta: ChatDelta) -> list[Event]:
        """Return the events of a delta."""
        if delta.call is not None:
            return self._function_call(delta.call[1])
        kind, text = (
            ("reasoning", delta.reasoning) if delta.reasoning else ("message", delta.content)
        )
        events = [] if self._open == kind else [*self._end(), *self._begin(kind)]
        part = self.items[-1]["content"][0]
        part["text"] += text
        logprobs: Event = {} if kind == "reasoning" else {"logprobs": []}
        delta_event = {"type": f"{_text_event(kind)}.delta", "delta": text, **logprobs}
        return [*events, {**delta_event, **self._position(part=True)}]

    def close(self) -> list[Event]:
        """Return the events that end the answer; an answer without items gets an empty text."""
        begun = [] if self.items else self._begin("message")
        return [*begun, *self._end()]

    def _begin(self, kind: str) -> list[Event]:
        part: dict[str, Any] = {"type": "reasoning_text", "text": ""}
        item: dict[str, Any] = {"type": kind, "status": "in_progress", "content": []}
        if kind == "message":
            part = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
            item |= {"role": "assistant"}
        else:
            item |= {"summary": [], "encrypted_content": None}
        self._open = kind
        events = [self._added(item)]
        self.items[-1]["content"].append(part)
        begun = {"type": "response.content_part.added", "part": dict(part)}
        return [*events, {**begun, **self._position(part=True)}]

    def _added(self, item: Mapping[str, object]) -> Event:
        self.items.append({"id": f"{self._id}_i{len(self.items)}", **item})
        shown = {**self.items[-1]}
        if "content" in shown:
            shown["content"] = []
        return {
            "type": "response.output_item.added",
            "output_index": len(self.items) - 1,
            "item": shown,
        }

    def _end(self) -> list[Event]:
        if not self._open:
            return []
        kind, self._open = self._open, ""
        item = self.items[-1]
        item["status"] = "completed"
        (part,) = item["content"]
        position = self._position(part=True)
        logprobs: Event = {} if kind == "reasoning" else {"logprobs": []}
        return [
            {"type": f"{_text_event(kind)}.done", "text": part["text"], **logprobs, **position},
            {"type": "response.content_part.done", "part": dict(part), **position},
            self._done(),
        ]

    def _done(self) -> Event:
        return {
            "type": "response.output_item.done",
            "output_index": len(self.items) - 1,
            "item": self.items[-1],
        }

    def _function_call(self, call: Mapping[str, Any]) -> list[Event]:
        ended, name = self._end(), call["function"]["name"]
        arguments = call["function"]["arguments"]
        item = {"type": "function_call", "call_id": call["id"], "name": name, "arguments": ""}
        added = self._added({**item, "status": "in_progress"})
        self.items[-1] |= {"arguments": arguments, "status": "completed"}
        position, kind = self._position(part=False), "response.function_call_arguments"
        return [
            *ended,
            added,
            {"type": f"{kind}.delta", "delta": arguments, **position},
            {"type": f"{kind}.done", "arguments": arguments, "name": name, **position},
            self._done(),
        ]

    def _position(self, *, part: bool) -> dict[str, Any]:
        position = {"item_id": self.items[-1]["id"], "output_index": len(self.items) - 1}
        return {**position, "content_index": 0} if part else position


def _text_event(kind: str) -> str:
    return "response.reasoning_text" if kind == "reasoning" else "response.output_text"
