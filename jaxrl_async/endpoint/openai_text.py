"""OpenAI's /v1/completions: a text or token ids to a continuation. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from jaxrl_async.endpoint.body_fields import BodyFields
from jaxrl_async.endpoint.generation import GeneratedAnswer
from jaxrl_async.endpoint.http_answers import (
    AnswerFormat,
    AnswerHeader,
    TokenRow,
    Usage,
    json_number,
    rows_of_answers,
)
from jaxrl_async.endpoint.openai_chat import sampling_wish, stream_usage_of
from jaxrl_async.endpoint.sampling_request import (
    HARMLESS_FIELDS,
    MAX_COUNT,
    NEUTRAL_SAMPLING,
    SamplingOptions,
)
from jaxrl_async.endpoint.text_flow import TextFlow
from jaxrl_async.types import IntArray

MAX_PROMPT = 2**24
"""Maximum number of prompt token ids in a call; the sampler checks a lower limit itself."""
USUAL_TOKENS = 16
"""Default for the maximum tokens of an answer, as in OpenAI's API."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TextCall:
    """A checked call."""

    prompt: str | tuple[int, ...]
    wish: SamplingOptions
    stream: bool = False
    stream_usage: bool = False
    logprobs: int | None = None  # 0 or 1; None: none
    token_ids: bool = False
    ids_as_tokens: bool = False


def text_call(body: Any) -> TextCall:
    """Convert a body to a call. Raises CallRefused that names the field."""
    fields = BodyFields(body)
    logprobs = fields.whole("logprobs", 0)
    if logprobs is not None and logprobs > 1:
        fields.refuse("logprobs", "0 or 1: only the sampled token's log-prob is known")
    prompt = fields.value("prompt")
    if isinstance(prompt, list):
        if len(prompt) == 1 and isinstance(prompt[0], str | list):
            prompt = prompt[0]
        elif prompt and isinstance(prompt[0], str | list):
            fields.refuse("prompt", "one text or one list of token ids: send several calls")
    if isinstance(prompt, list):
        prompt = tuple(BodyFields({"prompt": prompt}).token_ids("prompt", MAX_PROMPT))
    elif not isinstance(prompt, str):
        fields.refuse("prompt", "a text or a list of token ids")
    if not prompt:
        fields.refuse("prompt", "at least one token")
    wish = sampling_wish(fields, count=fields.whole("n", 1, MAX_COUNT) or 1, usual=USUAL_TOKENS)
    call = TextCall(
        prompt=prompt,
        wish=wish,
        stream=fields.flag("stream"),
        stream_usage=stream_usage_of(fields),
        logprobs=logprobs,
        token_ids=fields.flag("return_token_ids"),
        ids_as_tokens=fields.flag("return_tokens_as_token_ids"),
    )
    fields.close(HARMLESS_FIELDS, NEUTRAL_SAMPLING)
    return call


@dataclass(frozen=True, slots=True, kw_only=True)
class TextWriter:
    """Writes the answer to one call, as a body or as stream chunks."""

    call: TextCall
    heading: AnswerHeader
    prompt: IntArray  # [prompt] int32
    words: AnswerFormat

    def body(self, answers: Sequence[GeneratedAnswer]) -> dict[str, Any]:
        """Return the complete answer."""
        choices = []
        for i, answer in enumerate(answers):
            drawn = answer.completion
            row = TokenRow(token_ids=drawn.token_ids, logprobs=drawn.logprobs)
            flow = self.words.flow()
            choices.append({**self._choice(i, answer.text, row, flow), **self._end(answer)})
        usage = Usage(prompt=len(self.prompt), drawn=rows_of_answers(answers)).openai()
        return {**self._frame(choices), "usage": usage}

    def grow(self, index: int, text: str, row: TokenRow, flow: TextFlow) -> list[dict[str, Any]]:
        """Return the next chunk of a choice.

        Args:
            index: index of the choice.
            text: the text that can be sent.
            row: tokens since the last chunk.
            flow: has processed the tokens before these, and processes these.
        """
        wants_tokens = self.call.token_ids or self.call.logprobs is not None
        if not text and not (wants_tokens and len(row.token_ids)):
            return []
        return [self._frame([self._choice(index, text, row, flow)])]

    def end(self, index: int, answer: GeneratedAnswer) -> list[dict[str, Any]]:
        """Return the last chunk of a choice."""
        nothing = TokenRow(
            token_ids=answer.completion.token_ids[:0], logprobs=answer.completion.logprobs[:0]
        )
        last = self._choice(index, "", nothing, self.words.flow())
        return [self._frame([{**last, **self._end(answer)}])]

    def close(self, answers: Sequence[GeneratedAnswer]) -> list[dict[str, Any]]:
        """Return the chunks after the last choice."""
        if not self.call.stream_usage:
            return []
        usage = Usage(prompt=len(self.prompt), drawn=rows_of_answers(answers)).openai()
        return [{**self._frame([]), "usage": usage}]

    def _frame(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": self.heading.id,
            "object": "text_completion",
            "created": self.heading.created,
            "model": self.heading.model,
            "choices": choices,
        }

    def _choice(self, index: int, text: str, row: TokenRow, flow: TextFlow) -> dict[str, Any]:
        choice: dict[str, Any] = {
            "index": index,
            "text": text,
            "finish_reason": None,
            "logprobs": None if self.call.logprobs is None else self._logprobs(row, flow),
        }
        if self.call.token_ids:
            choice["token_ids"] = row.token_ids.tolist()
        return choice

    def _end(self, answer: GeneratedAnswer) -> dict[str, Any]:
        end: dict[str, Any] = {"finish_reason": answer.finish, "stop_reason": answer.stop}
        if self.call.token_ids:
            end["prompt_token_ids"] = self.prompt.tolist()
            end |= self.words.origin(answer.completion)
        return end

    def _logprobs(self, row: TokenRow, flow: TextFlow) -> dict[str, Any]:
        entries = self.words.entries(row, top=False, ids_as_tokens=self.call.ids_as_tokens)
        tokens = [entry["token"] for entry in entries]
        numbers = [json_number(x) for x in row.logprobs.tolist()]
        tops = [{t: x} for t, x in zip(tokens, numbers, strict=True)]
        return {
            "tokens": tokens,
            "token_logprobs": numbers,
            "top_logprobs": tops if self.call.logprobs else None,
            "text_offset": flow.places(row.token_ids.tolist()),
        }
