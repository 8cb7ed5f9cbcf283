"""OpenAI's /v1/chat/completions: convert a body to a call, and answers to a body or to stream
events. Pure.

vLLM's additional fields are supported: top_k, min_p, stop_token_ids, ignore_eos, return_token_ids.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jaxrl_async.endpoint.body_fields import BodyFields
from jaxrl_async.endpoint.call_messages import MAX_MESSAGES, MAX_TOOLS, read_messages, read_tools
from jaxrl_async.endpoint.chat_deltas import ChatDelta
from jaxrl_async.endpoint.http_answers import (
    AnswerFormat,
    AnswerHeader,
    ChatAnswer,
    TokenRow,
    Usage,
    rows_of_answers,
)
from jaxrl_async.endpoint.sampling_request import (
    HARMLESS_FIELDS,
    MAX_ASKED,
    MAX_COUNT,
    NEUTRAL_SAMPLING,
    SamplingOptions,
    min_p_of,
    seed_of,
    stops_of,
    temperature_of,
    top_k_of,
    top_p_of,
)
from jaxrl_async.types import IntArray, Message

MAX_STOP_IDS = 64
"""Maximum number of stop token ids in a call; the sampler checks a lower limit itself."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatCall:
    """A checked chat call of any protocol."""

    messages: tuple[Message, ...]
    tools: tuple[Mapping[str, Any], ...] = ()
    reads_tools: bool = True  # whether tool calls are parsed from the answer (tool_choice)
    wish: SamplingOptions
    stream: bool = False
    stream_usage: bool = False  # whether a stream ends with the token counts
    logprobs: bool = False
    top_logprobs: int = 0  # 0 or 1: the sampler knows only the sampled token's
    token_ids: bool = False  # whether answers contain their token ids
    ids_as_tokens: bool = False  # whether tokens are written as token_id:N


def chat_call(body: Any) -> ChatCall:
    """Convert a body to a call. Raises CallRefused that names the field."""
    fields = BodyFields(body)
    messages = read_messages(fields.rows("messages", MAX_MESSAGES))
    tools = read_tools(fields.rows("tools", MAX_TOOLS))
    choice = fields.value("tool_choice")
    if choice not in (None, "auto", "none"):
        fields.refuse("tool_choice", "'auto' or 'none': forced tool calls are not supported")
    logprobs = fields.flag("logprobs")
    top = fields.whole("top_logprobs", 0) or 0
    if top > 1:
        fields.refuse("top_logprobs", "0 or 1: only the sampled token's log-prob is known")
    stream = fields.flag("stream")
    wish = sampling_wish(fields, count=fields.whole("n", 1, MAX_COUNT) or 1)
    call = ChatCall(
        messages=messages,
        tools=tools,
        reads_tools=choice != "none",
        wish=wish,
        stream=stream,
        stream_usage=stream_usage_of(fields),
        logprobs=logprobs,
        top_logprobs=top,
        token_ids=fields.flag("return_token_ids"),
        ids_as_tokens=fields.flag("return_tokens_as_token_ids"),
    )
    fields.close(HARMLESS_FIELDS, NEUTRAL_SAMPLING)
    return call


def sampling_wish(fields: BodyFields, count: int, usual: int | None = None) -> SamplingOptions:
    """Return the sampling parameters of a body in OpenAI's form, including vLLM's fields.

    Args:
        fields: fields of the body.
        count: number of answers.
        usual: default for the maximum tokens of an answer; None: as many as possible.
    """
    asked = fields.whole("max_completion_tokens", 1, MAX_ASKED)
    older = fields.whole("max_tokens", 1, MAX_ASKED)
    return SamplingOptions(
        count=count,
        temperature=temperature_of(fields),
        top_k=top_k_of(fields),
        top_p=top_p_of(fields),
        min_p=min_p_of(fields),
        max_new_tokens=asked or older or usual,
        stops=stops_of(fields, "stop"),
        stop_token_ids=tuple(fields.token_ids("stop_token_ids", MAX_STOP_IDS)),
        ends_at_eos=not fields.flag("ignore_eos"),
        seed=seed_of(fields),
    )


def stream_usage_of(fields: BodyFields) -> bool:
    """Return whether a stream ends with the token counts."""
    options = fields.value("stream_options")
    if options is None:
        return False
    inner = BodyFields(options, "stream_options")
    wanted = inner.flag("include_usage")
    inner.close(frozenset({"include_obfuscation", "continuous_usage_stats"}))
    return wanted


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatWriter:
    """Writes the answer to one chat call, as a body or as stream chunks."""

    call: ChatCall
    heading: AnswerHeader
    prompt: IntArray  # [prompt] int32
    words: AnswerFormat

    def body(self, answers: Sequence[ChatAnswer]) -> dict[str, Any]:
        """Return the complete answer."""
        usage = Usage(prompt=len(self.prompt), drawn=rows_of_answers([a.answer for a in answers]))
        return {
            "id": self.heading.id,
            "object": "chat.completion",
            "created": self.heading.created,
            "model": self.heading.model,
            "choices": [self._choice(i, answer) for i, answer in enumerate(answers)],
            "usage": usage.openai(),
            **self._prompt_ids(),
        }

    def _prompt_ids(self) -> dict[str, Any]:
        return {"prompt_token_ids": self.prompt.tolist()} if self.call.token_ids else {}

    def _choice(self, index: int, answer: ChatAnswer) -> dict[str, Any]:
        message = {**answer.message(), "refusal": None}
        if answer.tool_calls and not answer.content:
            message["content"] = None
        completion = answer.answer.completion
        row = TokenRow(token_ids=completion.token_ids, logprobs=completion.logprobs)
        return {
            "index": index,
            "message": message,
            "finish_reason": answer.finish,
            **self._tokens(row),
            **self._origin(answer),
        }

    def _tokens(self, row: TokenRow | None) -> dict[str, Any]:
        """Return the fields of a choice about its tokens."""
        call, fields = self.call, dict[str, Any](logprobs=None)
        if row is None:
            return fields
        if call.logprobs:
            entries = self.words.entries(
                row, top=call.top_logprobs > 0, ids_as_tokens=call.ids_as_tokens
            )
            fields["logprobs"] = {"content": entries, "refusal": None}
        if call.token_ids:
            fields["token_ids"] = row.token_ids.tolist()
        return fields

    def _origin(self, answer: ChatAnswer) -> dict[str, Any]:
        """Return the request id and the weight versions of a choice."""
        return self.words.origin(answer.answer.completion) if self.call.token_ids else {}

    # ---- streams

    def begin(self) -> list[dict[str, Any]]:
        """Return the first chunk of each choice."""
        first = {"role": "assistant", "content": ""}
        chunks = [self._chunk(i, first) for i in range(self.call.wish.count)]
        chunks[0] |= self._prompt_ids()
        return chunks

    def grow(
        self, index: int, deltas: Sequence[ChatDelta], row: TokenRow | None
    ) -> list[dict[str, Any]]:
        """Return the next chunks of a choice.

        Args:
            index: index of the choice.
            deltas: texts and calls.
            row: tokens since the last chunks; None: no tokens.
        """
        parts = [_delta(delta) for delta in deltas]
        wants_tokens = row is not None and (self.call.logprobs or self.call.token_ids)
        if not parts and wants_tokens:
            parts = [{"content": ""}]
        return [self._chunk(index, part, None if i else row) for i, part in enumerate(parts)]

    def end(self, index: int, answer: ChatAnswer) -> list[dict[str, Any]]:
        """Return the last chunk of a choice."""
        chunk = self._chunk(index, {})
        chunk["choices"][0] |= {"finish_reason": answer.finish, **self._origin(answer)}
        return [chunk]

    def close(self, answers: Sequence[ChatAnswer]) -> list[dict[str, Any]]:
        """Return the chunks after the last choice."""
        if not self.call.stream_usage:
            return []
        usage = Usage(prompt=len(self.prompt), drawn=rows_of_answers([a.answer for a in answers]))
        return [{**self._chunk(0, {}), "choices": [], "usage": usage.openai()}]

    def _chunk(
        self, index: int, delta: Mapping[str, Any], row: TokenRow | None = None
    ) -> dict[str, Any]:
        choice = {"index": index, "delta": delta, "finish_reason": None, **self._tokens(row)}
        return {
            "id": self.heading.id,
            "object": "chat.completion.chunk",
            "created": self.heading.created,
            "model": self.heading.model,
            "choices": [choice],
        }


def _delta(delta: ChatDelta) -> dict[str, Any]:
    if delta.call is not None:
        place, call = delta.call
        return {"tool_calls": [{"index": place, **call}]}
    if delta.reasoning:
        return {"reasoning_content": delta.reasoning}
    return {"content": delta.content}
