"""The parts of a chat answer that can be sent before it is finished. Pure.

A partial answer may parse differently from the complete one: `<tool_call>` may become a call, and
trailing spaces may be cut. Text is therefore sent only up to a possible mark, and the rest when the
answer is finished. The parts that were sent, joined, are the finished message.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from jaxrl_async.endpoint.http_answers import ChatAnswer
from jaxrl_async.endpoint.http_errors import CallRefused
from jaxrl_async.endpoint.text_flow import HALF
from jaxrl_async.types import Message

STARTS = " \t\r\n{["
"""First characters of a text that may become a call in bare JSON, or whose spaces may be cut."""
MARK = re.compile(f"<|{HALF}")
"""Possible start of reasoning, calls and incomplete characters."""
MARK_WITH_TOOLS = re.compile(rf"[<\[{{]|{HALF}")
"""The same if tools may be called."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatDelta:
    """A part of an answer; exactly one of the fields is set."""

    reasoning: str = ""
    content: str = ""
    call: tuple[int, Mapping[str, Any]] | None = None  # index among the calls, and the call


class ChatDeltas:
    """One answer in parts."""

    def __init__(self, *, has_tools: bool) -> None:
        """has_tools: whether the prompt contains tools."""
        self._mark = MARK_WITH_TOOLS if has_tools else MARK
        self._reasoning = self._content = ""  # sent

    def grow(self, message: Message, held: int) -> Iterator[ChatDelta]:
        """Yield the parts of an unfinished answer that can be sent.

        Args:
            message: the tokens so far, parsed by the chat format.
            held: number of characters at the end that may become a stop string.
        """
        content = message.get("content") or ""
        reasoning = message.get("reasoning_content") or ""
        if message.get("tool_calls") or (content and content[0] in STARTS):
            return
        if content:
            sure = self._sure(content, held)
            if sure.startswith(self._content) and reasoning.startswith(self._reasoning):
                yield from self._reason_to(reasoning)
                yield from self._write_to(sure)
        else:
            sure = self._sure(reasoning, held)
            if sure.startswith(self._reasoning):
                yield from self._reason_to(sure)

    def end(self, answer: ChatAnswer) -> Iterator[ChatDelta]:
        """Yield the rest of a finished answer. Raises CallRefused if the parts already sent are not
        a prefix of it."""
        reasoning = answer.reasoning or ""
        if not (reasoning.startswith(self._reasoning) and answer.content.startswith(self._content)):
            raise CallRefused(
                "the complete answer parses differently from its beginning; call without stream",
                status=500,
                code="stream_diverged",
            )
        yield from self._reason_to(reasoning)
        yield from self._write_to(answer.content)
        for place, call in enumerate(answer.tool_calls):
            yield ChatDelta(call=(place, call))

    def _sure(self, text: str, held: int) -> str:
        """Return the prefix of a text that cannot change any more."""
        text = text[: len(text) - held] if held else text
        mark = self._mark.search(text)
        return (text if mark is None else text[: mark.start()]).rstrip()

    def _reason_to(self, text: str) -> Iterator[ChatDelta]:
        more, self._reasoning = text[len(self._reasoning) :], text
        if more:
            yield ChatDelta(reasoning=more)

    def _write_to(self, text: str) -> Iterator[ChatDelta]:
        more, self._content = text[len(self._content) :], text
        if more:
            yield ChatDelta(content=more)
