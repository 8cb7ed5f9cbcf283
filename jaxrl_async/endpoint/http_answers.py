"""Parts of the answers of all protocols: texts, token counts, log-probs, versions. Pure."""

import itertools
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from jaxrl_async.data.chat_formats.written_turn import THOUGHT, split_thinking
from jaxrl_async.endpoint.answer_constraint import ToolChoice
from jaxrl_async.endpoint.generation import GeneratedAnswer, GrowingAnswer
from jaxrl_async.endpoint.sampling_request import ShownLogprobs
from jaxrl_async.endpoint.text_flow import Decode, TextBytes, TextFlow
from jaxrl_async.ports.rollout import TurnMarks
from jaxrl_async.types import (
    Completion,
    FloatArray,
    IntArray,
    Message,
    PositionLogprobs,
)

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

    def openai(self, kind: str, choices: Sequence[Mapping[str, object]]) -> dict[str, Any]:
        """Return an object of OpenAI's API with this heading."""
        heading = {"id": self.id, "object": kind, "created": self.created, "model": self.model}
        return {**heading, "choices": choices}


def openai_usage(prompt: int, answers: Sequence[GeneratedAnswer]) -> dict[str, int]:
    """Return the token counts of a call in OpenAI's format. prompt: length of its prompts."""
    sampled = sum(len(answer.completion.token_ids) for answer in answers)
    return {"prompt_tokens": prompt, "completion_tokens": sampled, "total_tokens": prompt + sampled}


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


def visible_turn(
    message: Message, text: str, *, tools: Collection[str] | None, exact: bool = False
) -> Message:
    """Return a turn as its caller sees it: calls remain text unless tools were given.

    Args:
        message: the turn's tokens, parsed by the chat format.
        text: the turn's text.
        tools: names of the tools that may be called; None: no calls are parsed.
        exact: the text matches a constraint: it keeps the white space around it, and a call of an
            unknown tool is text.
    """
    calls = message.get("tool_calls") or ()
    is_text = tools is None or (exact and any(c["function"]["name"] not in tools for c in calls))
    if is_text and (calls or message.get("tool_call_errors")):
        shown: dict[str, Any] = {"role": "assistant", "content": text}
        if (reasoning := message.get("reasoning_content")) is not None:
            unended, rest = split_thinking(text, is_thinking=True, reads_calls=False)
            shown["reasoning_content"] = reasoning if THOUGHT in text else unended
            shown["content"] = rest
        return shown
    if exact and not calls:
        return {**message, "content": _unstripped(str(message.get("content") or ""), text)}
    return message


def text_after_marks(text: str, token_ids: IntArray, marks: TurnMarks) -> str:
    """Return a turn's text, [tokens] int32, without the line breaks after a reasoning that has no
    text and whose marks are special tokens, which are no text either."""
    is_over = np.isin(marks.tokens.get(THOUGHT, -1), token_ids)
    return text.lstrip("\n") if is_over and THOUGHT not in text else text


def _unstripped(content: str, text: str) -> str:
    """Return a turn's content with the white space around it, without the line breaks between the
    reasoning and the content.

    Args:
        content: without some of the white space around it.
        text: of the whole turn, which ends with it.
    """
    core, end = content.strip(), len(text.rstrip())
    before = text[: end - len(core)]
    if text[len(before) : end] != core:
        return content
    space = before[len(before.rstrip()) :]
    return (space if space == before else space.lstrip("\n")) + text[len(before) :]


def chat_answer(answer: GeneratedAnswer, message: Message, choice: ToolChoice) -> ChatAnswer:
    """Convert a finished answer to a message.

    Args:
        answer: the generated answer.
        message: its turn, as the caller sees it.
        choice: without parallel calls only the first one is kept.
    """
    calls = tuple(message.get("tool_calls") or ())[: None if choice.parallel else 1]
    content, reasoning = message.get("content") or "", message.get("reasoning_content")
    if answer.stop is not None:
        content = content.partition(answer.stop)[0]
        reasoning = None if reasoning is None else reasoning.partition(answer.stop)[0]
    return ChatAnswer(answer=answer, content=content, reasoning=reasoning, tool_calls=calls)


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenRow:
    """Sampled tokens with their log-probs."""

    token_ids: IntArray  # [tokens] int32
    logprobs: FloatArray  # [tokens] float32
    others: PositionLogprobs | None = None  # of other tokens at these positions

    @classmethod
    def of(cls, answer: "Completion | GrowingAnswer", start: int = 0) -> "TokenRow":
        """Return the tokens of an answer from `start`."""
        top = answer.top_logprobs
        return cls(
            token_ids=answer.token_ids[start:],
            logprobs=answer.logprobs[start:],
            others=None if top is None else top.part(slice(start, None)),
        )

    def likely(self, index: int, top: int, named: Sequence[int]) -> list[tuple[int, float]]:
        """Return ids and log-probs of a position's likeliest tokens and of the named ones; if they
        are unknown, only of the token at this position."""
        own = (int(self.token_ids[index]), json_number(float(self.logprobs[index])))
        if self.others is None:
            return [own]
        ids = [*self.others.top_ids[index, :top].tolist(), *named]
        logprobs = [*self.others.top_logprobs[index, :top], *self.others.id_logprobs[index]]
        by_id = dict(zip(ids, (json_number(float(x)) for x in logprobs), strict=True))
        return [(i, own[1] if i == own[0] else x) for i, x in by_id.items() if i >= 0]


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

    def token(self, token_id: int, *, ids_as_tokens: bool) -> str:
        """Return a token's text, or token_id:N."""
        return f"token_id:{token_id}" if ids_as_tokens else self.text_of(token_id)

    def entries(
        self, row: TokenRow, shown: ShownLogprobs, *, ids_as_tokens: bool
    ) -> list[dict[str, Any]]:
        """Return the log-probs of tokens in the format of chat completions.

        Args:
            row: the tokens.
            shown: the other tokens at each position.
            ids_as_tokens: write token_id:N instead of the text.
        """

        def entry(token: int, logprob: float) -> dict[str, Any]:
            text = self.token(token, ids_as_tokens=ids_as_tokens)
            return {
                "token": text,
                "logprob": json_number(logprob),
                "bytes": list(self.bytes_of(token)),
            }

        wants_others = bool(shown.top or shown.ids)
        return [
            {
                **entry(token, logprob),
                "top_logprobs": [entry(*pair) for pair in row.likely(index, shown.top, shown.ids)]
                if wants_others
                else [],
            }
            for index, (token, logprob) in enumerate(
                zip(row.token_ids.tolist(), row.logprobs.tolist(), strict=True)
            )
        ]

    def prompt_logprobs(self, row: TokenRow, shown: ShownLogprobs) -> list[Any]:
        """Return the log-probs of a prompt's tokens in vLLM's format: for each position an object
        from ids to log-probs; null for the first. The rank of a token that is none of the listed
        likeliest is the least that it can have: their number plus one."""

        def at_index(index: int) -> dict[str, Any]:
            own = (int(row.token_ids[index]), json_number(float(row.logprobs[index])))
            likeliest = [] if row.others is None else row.others.top_ids[index].tolist()
            ranks = {token: rank for rank, token in enumerate(likeliest, 1)}
            beyond = len(ranks) + 1 if ranks else None
            pairs = dict([own, *row.likely(index, shown.prompt or 0, shown.ids)])
            return {
                str(i): {
                    "logprob": x,
                    "rank": ranks.get(i, beyond),
                    "decoded_token": self.text_of(i),
                }
                for i, x in pairs.items()
            }

        return [None, *(at_index(index) for index in range(1, len(row.token_ids)))]

    def origin(self, completion: Completion) -> dict[str, Any]:
        """Return the request id and the weight versions of an answer."""
        spans = self.spans(completion.versions)
        return {"request_id": completion.request_id, "weight_versions": spans}

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


def prompt_row(prompt: IntArray, found: PositionLogprobs | None) -> TokenRow:
    """Return the tokens of a prompt, [prompt], with their log-probs; unknown ones are NaN."""
    unknown = np.full(len(prompt), np.nan, np.float32)
    return TokenRow(
        token_ids=prompt, logprobs=unknown if found is None else found.logprobs, others=found
    )
