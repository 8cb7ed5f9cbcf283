"""Parts of the answers of all protocols: texts, token counts, log-probs, versions. Pure."""

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from jaxrl_async.endpoint.generation import GeneratedAnswer
from jaxrl_async.endpoint.text_flow import Decode, TextBytes, TextFlow, before_stop
from jaxrl_async.types import Completion, FloatArray, IntArray, Message

NO_LOGPROB = -9999.0
"""Value for an unknown log-prob, as in vLLM: JSON has no NaN."""

TokenText = Callable[[int], str]
"""Returns a single token's text."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerHeader:
    """The fields at the start of an answer."""

    id: str
    created: int  # seconds since 1970
    model: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """The token counts of a call."""

    prompt: int
    drawn: int

    def openai(self) -> dict[str, int]:
        """Return it in OpenAI's format."""
        return {
            "prompt_tokens": self.prompt,
            "completion_tokens": self.drawn,
            "total_tokens": self.prompt + self.drawn,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatAnswer:
    """One finished answer of a chat."""

    answer: GeneratedAnswer
    content: str
    reasoning: str | None = None
    tool_calls: tuple[Mapping[str, Any], ...] = ()

    @property
    def finish(self) -> str:
        """The stop reason, in OpenAI's terms."""
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


def chat_answer(answer: GeneratedAnswer, message: Message, *, reads_tools: bool) -> ChatAnswer:
    """Convert a finished answer to a message.

    Args:
        answer: the generated answer.
        message: its tokens, parsed by the chat format.
        reads_tools: False: tool calls remain text.
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
    """Sampled tokens with their log-probs."""

    token_ids: IntArray  # [tokens] int32
    logprobs: FloatArray  # [tokens] float32


def json_number(logprob: float) -> float:
    """Convert a log-prob to a JSON number. A float32 is preserved."""
    return float(logprob) if math.isfinite(logprob) else NO_LOGPROB


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerFormat:
    """Formats tokens and weight versions for answers."""

    text_of: TokenText
    bytes_of: Callable[[int], bytes]  # a token's bytes in a text
    decode: Decode  # tokens to text, as for the answer
    bytes_in_text: TextBytes | None  # bytes that a token adds to that text; None: not just bytes
    label: str  # prefix of the version in the run's weight labels

    def flow(self) -> TextFlow:
        """Return a TextFlow that finds the positions of an answer's tokens in its text."""
        return TextFlow(self.decode, bytes_of=self.bytes_in_text)

    def entries(self, row: TokenRow, *, top: bool, ids_as_tokens: bool) -> list[dict[str, Any]]:
        """Return the log-probs of tokens in the format of chat completions.

        Args:
            row: the tokens.
            top: list the sampled token as the most likely one; other log-probs are not known.
            ids_as_tokens: write token_id:N instead of the text.
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
        """Return the request id and the weight versions of an answer."""
        spans = self.spans(drawn.versions)
        return {"request_id": drawn.request_id, "weight_versions": spans}

    def spans(self, versions: IntArray) -> list[dict[str, Any]]:
        """Return the weight version of each span of tokens, with labels LABEL-VERSION as parsed by
        vllm_messages.version_of."""
        if not len(versions):
            return []
        changes = np.flatnonzero(np.diff(versions)) + 1
        edges = [0, *changes.tolist(), len(versions)]
        return [
            {"start": start, "end": end, "version": f"{self.label}-{int(versions[start])}"}
            for start, end in itertools.pairwise(edges)
        ]


def rows_of_answers(answers: Sequence[GeneratedAnswer]) -> int:
    """Return the total number of tokens of some answers."""
    return sum(len(a.completion.token_ids) for a in answers)
