"""What every protocol's answers are made of: texts, token counts, log-probs, versions. Pure."""

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from jaxrl_async.endpoint.generation import Answer
from jaxrl_async.endpoint.text_flow import Decode, TextBytes, TextFlow, before_stop
from jaxrl_async.types import Completion, FloatArray, IntArray, Message

NO_LOGPROB = -9999.0
"""What is written for a log-prob that is not known: JSON has no word for it, and this is vLLM's."""

TokenText = Callable[[int], str]
"""Gives a token's own text."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Heading:
    """What the beginning of an answer says."""

    id: str
    created: int  # seconds since 1970
    model: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """How many tokens a call took."""

    prompt: int
    drawn: int

    def openai(self) -> dict[str, int]:
        """Return it in OpenAI's words."""
        return {
            "prompt_tokens": self.prompt,
            "completion_tokens": self.drawn,
            "total_tokens": self.prompt + self.drawn,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatAnswer:
    """One finished answer of a chat."""

    answer: Answer
    content: str
    reasoning: str | None = None
    tool_calls: tuple[Mapping[str, Any], ...] = ()

    @property
    def finish(self) -> str:
        """Why it ended, in OpenAI's words."""
        ended = self.answer.finish
        return "tool_calls" if self.tool_calls and ended == "stop" else ended

    def message(self) -> dict[str, Any]:
        """Return it as an assistant's message."""
        message: dict[str, Any] = {"role": "assistant", "content": self.content}
        if self.reasoning is not None:
            message["reasoning_content"] = self.reasoning
        if self.tool_calls:
            message["tool_calls"] = list(self.tool_calls)
        return message


def chat_answer(answer: Answer, message: Message, *, reads_tools: bool) -> ChatAnswer:
    """Return a finished answer as a message.

    Args:
        answer: as it was drawn.
        message: what the chat format reads in its tokens.
        reads_tools: False: tool calls stay text.
    """
    calls = tuple(message.get("tool_calls") or ())
    if calls and not reads_tools:
        return ChatAnswer(answer=answer, content=answer.text)
    content, reasoning = message.get("content") or "", message.get("reasoning_content")
    if answer.stop is not None:
        content = before_stop(content, answer.stop)
        reasoning = None if reasoning is None else before_stop(reasoning, answer.stop)
    return ChatAnswer(answer=answer, content=content, reasoning=reasoning, tool_calls=calls)


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenRow:
    """Some drawn tokens with their log-probs."""

    token_ids: IntArray  # [tokens] int32
    logprobs: FloatArray  # [tokens] float32


def json_number(logprob: float) -> float:
    """Return a log-prob as JSON can write it. A float32 survives the way there and back."""
    return float(logprob) if math.isfinite(logprob) else NO_LOGPROB


@dataclass(frozen=True, slots=True, kw_only=True)
class Words:
    """How tokens and weights are named in answers."""

    text_of: TokenText
    bytes_of: Callable[[int], bytes]  # what a token stands for in a text
    decode: Decode  # tokens to text, as the answer's
    bytes_in_text: TextBytes | None  # that a token adds to that text; None: it is more than bytes
    label: str  # of the run's weights, before their version

    def flow(self) -> TextFlow:
        """Return what finds the places of an answer's tokens in its text."""
        return TextFlow(self.decode, bytes_of=self.bytes_in_text)

    def entries(self, row: TokenRow, *, top: bool, ids_as_tokens: bool) -> list[dict[str, Any]]:
        """Return the log-probs of tokens as chat completions list them.

        Args:
            row: the tokens.
            top: list the drawn token as the likeliest, too: no other's log-prob is known.
            ids_as_tokens: write token_id:N in place of the text.
        """
        entries = []
        for token, logprob in zip(row.token_ids.tolist(), row.logprobs.tolist(), strict=True):
            text = f"token_id:{token}" if ids_as_tokens else self.text_of(token)
            entry = {
                "token": text,
                "logprob": json_number(logprob),
                "bytes": list(self.bytes_of(token)),
            }
            entries.append({**entry, "top_logprobs": [entry] if top else []})
        return entries

    def origin(self, drawn: Completion) -> dict[str, Any]:
        """Return by which request and which weights an answer was drawn."""
        spans = self.spans(drawn.versions)
        return {"request_id": drawn.request_id, "weight_versions": spans}

    def spans(self, versions: IntArray) -> list[dict[str, Any]]:
        """Return which weights drew which tokens: stretches of one version, with labels
        LABEL-VERSION as vllm_messages.version_of reads them."""
        if not len(versions):
            return []
        changes = np.flatnonzero(np.diff(versions)) + 1
        edges = [0, *changes.tolist(), len(versions)]
        return [
            {"start": start, "end": end, "version": f"{self.label}-{int(versions[start])}"}
            for start, end in itertools.pairwise(edges)
        ]


def rows_of_answers(answers: Sequence[Answer]) -> int:
    """Return the number of tokens of some answers together."""
    return sum(len(a.completion.token_ids) for a in answers)
