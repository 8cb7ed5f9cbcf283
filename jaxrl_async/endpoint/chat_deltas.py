"""The parts of a chat answer that can be sent before it is finished. Pure.

A partial answer may parse differently from the complete one: `<tool_call>` may become a call, and
trailing spaces may be cut. Text is therefore sent only up to a mark of the chat format or the
beginning of one, and the rest when the answer is finished. The parts that were sent, joined, are
the finished message.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from jaxrl_async.data.chat_formats.written_turn import CALL, THINK, THOUGHT
from jaxrl_async.endpoint.http_answers import ChatAnswer
from jaxrl_async.endpoint.http_errors import CallRefused
from jaxrl_async.endpoint.text_flow import HALF, overlap
from jaxrl_async.ports.rollout import TurnMarks
from jaxrl_async.types import Message

ANY_MARK = ("<", "[", "{")
"""Beginnings of the marks of a format whose marks are unknown."""
BARE_CALL, BARE_START = '{"name":', 64
"""Start of a turn that is a call in bare JSON, without spaces; characters that are looked at."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatDelta:
    """A part of an answer; exactly one of the fields is set."""

    reasoning: str = ""
    content: str = ""
    call: tuple[int, Mapping[str, Any]] | None = None  # index among the calls, and the call


class ChatDeltas:
    """One answer in parts."""

    def __init__(self, *, reads_tools: bool, marks: TurnMarks) -> None:
        """Start without text.

        Args:
            reads_tools: whether calls are parsed from the answer.
            marks: of the chat format.
        """
        self._reads_tools, self._is_bare = reads_tools, marks.calls == "bare"
        texts = ANY_MARK if marks.texts is None else marks.texts
        self._ends = (THOUGHT, CALL, *texts)  # of reasoning
        self._calls: tuple[str, ...] = ()  # at which a call may begin
        if marks.texts is None or reads_tools:
            self._calls = tuple(text for text in texts if text not in (THINK, THOUGHT))
        self._reasoning = self._content = ""  # sent

    def grow(self, message: Message, held: int) -> Iterator[ChatDelta]:
        """Yield the parts of an unfinished answer that can be sent.

        Args:
            message: the tokens so far, parsed by the chat format.
            held: number of characters at the end that may become a stop string.
        """
        content = message.get("content") or ""
        reasoning = message.get("reasoning_content") or ""
        if message.get("tool_calls") or self._may_change(content):
            return
        if content:
            stable = self._stable(content, held, self._calls)
            if stable.startswith(self._content) and reasoning.startswith(self._reasoning):
                yield from self._reason_to(reasoning)
                yield from self._write_to(stable)
        else:
            stable = self._stable(reasoning, held, self._ends).rstrip()
            if stable.startswith(self._reasoning):
                yield from self._reason_to(stable)

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
        for index, call in enumerate(answer.tool_calls):
            yield ChatDelta(call=(index, call))

    def _may_change(self, content: str) -> bool:
        """Return whether a text may still become reasoning or a call as a whole, or lose its
        leading spaces to one."""
        start = content[:BARE_START].lstrip()
        if content and (THINK.startswith(start) or (self._reads_tools and content[0].isspace())):
            return True
        compact = re.sub(r"\s", "", start)
        is_call = compact.startswith(BARE_CALL) or BARE_CALL.startswith(compact)
        return self._reads_tools and self._is_bare and bool(content) and is_call

    def _stable(self, text: str, held: int, marks: tuple[str, ...]) -> str:
        """Return the prefix of a text that cannot change any more."""
        text = text[: len(text) - held] if held else text
        ends = [at for mark in (*marks, HALF) if (at := text.find(mark)) >= 0]
        end = min(ends, default=len(text) - max((overlap(text, m) for m in marks), default=0))
        return text[:end].rstrip() if self._calls else text[:end]

    def _reason_to(self, text: str) -> Iterator[ChatDelta]:
        more, self._reasoning = text[len(self._reasoning) :], text
        if more:
            yield ChatDelta(reasoning=more)

    def _write_to(self, text: str) -> Iterator[ChatDelta]:
        more, self._content = text[len(self._content) :], text
        if more:
            yield ChatDelta(content=more)
