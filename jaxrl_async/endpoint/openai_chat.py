"""OpenAI's /v1/chat/completions: convert a body to a call, and answers to a body or to stream
events. Pure.

vLLM's additional fields are supported; request_fields.CHAT lists all fields.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from jaxrl_async.endpoint.answer_constraint import ANY_TOOL, ToolChoice, openai_tool_choice
from jaxrl_async.endpoint.body_fields import BodyFields
from jaxrl_async.endpoint.call_messages import (
    MAX_MESSAGES,
    MAX_TOOLS,
    read_messages,
    read_tool,
    strict_fields,
    without_prefix,
)
from jaxrl_async.endpoint.chat_deltas import ChatDelta
from jaxrl_async.endpoint.http_answers import (
    AnswerFormat,
    AnswerHeader,
    ChatAnswer,
    TokenRow,
    openai_usage,
    prompt_row,
)
from jaxrl_async.endpoint.request_fields import CHAT
from jaxrl_async.endpoint.sampling_request import (
    MAX_COUNT,
    MAX_TOP,
    NO_OTHERS,
    SamplingOptions,
    ShownLogprobs,
    logprobs_of,
    sampling_options,
)
from jaxrl_async.types import IntArray, Message

EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")
"""Values of reasoning_effort."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatCall:
    """A checked chat call of any protocol."""

    messages: tuple[Message, ...]  # without the prefix
    prefix: str = ""  # the beginning of the answer, as the client wrote it
    tools: tuple[Mapping[str, Any], ...] = ()
    choice: ToolChoice = ANY_TOOL
    options: SamplingOptions
    # variables of the chat template, by the field that sets them; the first has precedence
    template: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    ignored: tuple[str, ...] = ()  # fields that are accepted without effect
    stream: bool = False
    stream_usage: bool = False  # whether a stream ends with the token counts
    logprobs: bool = False
    shown: ShownLogprobs = NO_OTHERS
    token_ids: bool = False  # whether answers contain their token ids
    ids_as_tokens: bool = False  # whether tokens are written as token_id:N

    @property
    def reads_tools(self) -> bool:
        """Whether tool calls are parsed from the answer."""
        return bool(self.tools) and self.choice.mode != "none"


def chat_call(body: object) -> ChatCall:
    """Convert a body to a call. Raises CallRefused that names the field."""
    fields = BodyFields(body)
    messages, prefix = read_conversation(fields)
    tools = tuple(map(read_tool, fields.objects("tools", MAX_TOOLS)))
    logprobs = fields.flag("logprobs")
    top = fields.whole("top_logprobs", 0, MAX_TOP) or 0
    if top and not logprobs:
        fields.refuse("top_logprobs", "0 unless logprobs is true")
    shown = logprobs_of(fields, top)
    options = sampling_options(fields, count=fields.whole("n", 1, MAX_COUNT) or 1)
    stream_usage, counted = stream_usage_of(fields)
    call = ChatCall(
        messages=messages,
        prefix=prefix,
        tools=tools,
        choice=openai_tool_choice(fields, tools),
        options=replace(options, logprobs=shown.request),
        template=template_of(fields, {"reasoning_effort": effort_of(fields, "reasoning_effort")}),
        stream=fields.flag("stream"),
        stream_usage=stream_usage,
        logprobs=logprobs,
        shown=shown,
        token_ids=fields.flag("return_token_ids"),
        ids_as_tokens=fields.flag("return_tokens_as_token_ids"),
    )
    return replace(call, ignored=(*fields.settle(CHAT), *counted, *strict_fields(fields)))


def read_conversation(fields: BodyFields) -> tuple[tuple[Message, ...], str]:
    """Return the messages, and the prefix of the answer. Raises CallRefused."""
    messages = read_messages(fields.rows("messages", MAX_MESSAGES))
    continues = fields.flag("continue_final_message")
    opens = fields.flag("add_generation_prompt", not continues)
    if opens == continues:
        fields.refuse(
            "add_generation_prompt",
            f"{json.dumps(not continues)}: with continue_final_message the last message begins the "
            "answer, and otherwise the policy's turn must be opened",
        )
    return without_prefix(messages) if continues else (messages, "")


def effort_of(fields: BodyFields, name: str) -> Mapping[str, Any] | None:
    """Return an effort as variables of chat templates, as in vLLM; None: not given. Raises
    CallRefused."""
    effort = fields.choice(name, EFFORTS)
    if effort is None:
        return None
    return {"reasoning_effort": effort, "enable_thinking": effort != "none"}


def template_of(
    fields: BodyFields, others: Mapping[str, Mapping[str, object] | None]
) -> dict[str, Mapping[str, Any]]:
    """Return the variables of the chat template that a call sets, by field. Raises CallRefused.

    others: variables of other fields; None: not given.
    """
    own = fields.value("chat_template_kwargs")
    if own is not None and not isinstance(own, dict):
        fields.refuse("chat_template_kwargs", "an object")
    by_field = {"chat_template_kwargs": own, **others}
    return {name: variables for name, variables in by_field.items() if variables}


def stream_usage_of(fields: BodyFields) -> tuple[bool, tuple[str, ...]]:
    """Return whether a stream ends with the token counts, and the options without effect: the
    counts are not repeated with each part."""
    inner = fields.inner("stream_options", {})
    usage, repeats = inner.flag("include_usage"), inner.flag("continuous_usage_stats")
    inner.close(frozenset({"include_obfuscation"}))
    return usage, (inner.name("continuous_usage_stats"),) if repeats else ()


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatWriter:
    """Writes the answer to one chat call, as a body or as stream chunks."""

    call: ChatCall
    heading: AnswerHeader
    prompt: IntArray  # [prompt] int32
    words: AnswerFormat

    def body(self, answers: Sequence[ChatAnswer]) -> dict[str, Any]:
        """Return the complete answer."""
        choices = [self._choice(i, answer) for i, answer in enumerate(answers)]
        return {
            **self.heading.openai("chat.completion", choices),
            "usage": self._usage(answers),
            **self._prompt_ids(),
            **self._prompt_logprobs(answers[0]),
        }

    def _usage(self, answers: Sequence[ChatAnswer]) -> dict[str, int]:
        return openai_usage(len(self.prompt), [answer.answer for answer in answers])

    def _prompt_logprobs(self, answer: ChatAnswer) -> dict[str, Any]:
        if self.call.shown.prompt is None:
            return {}
        row = prompt_row(self.prompt, answer.answer.completion.prompt_logprobs)
        return {"prompt_logprobs": self.words.prompt_logprobs(row, self.call.shown)}

    def _prompt_ids(self) -> dict[str, Any]:
        return {"prompt_token_ids": self.prompt.tolist()} if self.call.token_ids else {}

    def _choice(self, index: int, answer: ChatAnswer) -> dict[str, Any]:
        message = {**answer.message(), "refusal": None}
        if answer.tool_calls and not answer.content:
            message["content"] = None
        row = TokenRow.of(answer.answer.completion)
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
            entries = self.words.entries(row, call.shown, ids_as_tokens=call.ids_as_tokens)
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
        chunks = [self._chunk(i, first) for i in range(self.call.options.count)]
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
        return [{**self._chunk(0, {}), "choices": [], "usage": self._usage(answers)}]

    def _chunk(
        self, index: int, delta: Mapping[str, object], row: TokenRow | None = None
    ) -> dict[str, Any]:
        choice = {"index": index, "delta": delta, "finish_reason": None, **self._tokens(row)}
        return self.heading.openai("chat.completion.chunk", [choice])


def _delta(delta: ChatDelta) -> dict[str, Any]:
    if delta.call is not None:
        index, call = delta.call
        return {"tool_calls": [{"index": index, **call}]}
    if delta.reasoning:
        return {"reasoning_content": delta.reasoning}
    return {"content": delta.content}
