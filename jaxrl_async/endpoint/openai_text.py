"""OpenAI's /v1/completions: texts or token ids to continuations. Pure.

prompts  A, B    n = 2    choices  0: A  1: A  2: B  3: B
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from jaxrl_async.endpoint.body_fields import BodyFields
from jaxrl_async.endpoint.generation import GeneratedAnswer, GrowingAnswer
from jaxrl_async.endpoint.http_answers import (
    AnswerFormat,
    AnswerHeader,
    TokenRow,
    json_number,
    openai_usage,
    prompt_row,
)
from jaxrl_async.endpoint.openai_chat import stream_usage_of
from jaxrl_async.endpoint.request_fields import TEXT
from jaxrl_async.endpoint.sampling_request import (
    MAX_COUNT,
    MAX_TOP,
    NO_OTHERS,
    SamplingOptions,
    ShownLogprobs,
    logprobs_of,
    sampling_options,
)
from jaxrl_async.endpoint.text_flow import TextFlow
from jaxrl_async.types import IntArray

MAX_PROMPT = 2**24
"""Maximum number of prompt token ids in a call; the sampler checks a lower limit itself."""
MAX_CHOICES = 1024
"""Maximum number of prompts of a call, and of its answers."""
USUAL_TOKENS = 16
"""Default for the maximum tokens of an answer, as in OpenAI's API and vLLM."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TextCall:
    """A checked call."""

    prompts: tuple[str | tuple[int, ...], ...]
    options: SamplingOptions
    adds_special: bool = True  # whether texts begin with the tokenizer's initial tokens
    echo: bool = False  # whether an answer begins with its prompt
    stream: bool = False
    stream_usage: bool = False
    logprobs: bool = False
    shown: ShownLogprobs = NO_OTHERS
    ignored: tuple[str, ...] = ()
    token_ids: bool = False
    ids_as_tokens: bool = False


def text_call(body: object) -> TextCall:
    """Convert a body to a call. Raises CallRefused that names the field."""
    fields = BodyFields(body)
    prompts = _prompts(fields)
    count = fields.whole("n", 1, MAX_COUNT) or 1
    if len(prompts) * count > MAX_CHOICES:
        fields.refuse("prompt", f"prompts with at most {MAX_CHOICES} answers together")
    logprobs, echo = fields.whole("logprobs", 0, MAX_TOP), fields.flag("echo")
    shown = logprobs_of(fields, logprobs or 0)
    options = sampling_options(fields, count=count, usual=USUAL_TOKENS, least=0)
    if options.max_new_tokens == 0 and not echo and shown.prompt is None:
        fields.refuse("max_tokens", "at least 1, unless echo or prompt_logprobs is set")
    requested = shown
    if options.max_new_tokens == 0 or (echo and logprobs is not None):
        requested = replace(shown, prompt=max(shown.prompt or 0, logprobs or 0))
    stream_usage, counted = stream_usage_of(fields)
    call = TextCall(
        prompts=prompts,
        options=replace(options, logprobs=requested.request),
        adds_special=fields.flag("add_special_tokens", True),
        echo=echo,
        stream=fields.flag("stream"),
        stream_usage=stream_usage,
        logprobs=logprobs is not None,
        shown=shown,
        token_ids=fields.flag("return_token_ids"),
        ids_as_tokens=fields.flag("return_tokens_as_token_ids"),
    )
    return replace(call, ignored=(*fields.settle(TEXT), *counted))


def _prompts(fields: BodyFields) -> tuple[str | tuple[int, ...], ...]:
    """Return the prompts: a text, token ids, or a list of either. Raises CallRefused."""
    prompt = fields.value("prompt")
    several = isinstance(prompt, list) and prompt and isinstance(prompt[0], str | list)
    values = fields.rows("prompt", MAX_CHOICES) if several else [prompt]
    prompts = []
    for i, value in enumerate(values):
        name = f"prompt[{i}]" if several else "prompt"
        if isinstance(value, list):
            value = tuple(BodyFields({name: value}).token_ids(name, MAX_PROMPT))
        elif not isinstance(value, str):
            BodyFields({name: value}).refuse(name, "a text or a list of token ids")
        if not value:
            BodyFields({name: value}).refuse(name, "at least one token")
        prompts.append(value)
    return tuple(prompts)


@dataclass(frozen=True, slots=True, kw_only=True)
class TextWriter:
    """Writes the answers to one call, as a body or as stream chunks."""

    call: TextCall
    heading: AnswerHeader
    prompts: tuple[IntArray, ...]  # [prompt] int32 each
    words: AnswerFormat

    def body(self, answers: Sequence[GeneratedAnswer]) -> dict[str, Any]:
        """Return the complete answer."""
        choices = []
        for i, answer in enumerate(answers):
            flow = self.words.flow()
            lead = self._lead(i, answer.completion, flow)
            choice = self._choice(i, answer.text, TokenRow.of(answer.completion), flow)
            choices.append({**_joined(lead, choice), **self._end(i, answer)})
        return {**self._frame(choices), "usage": self._usage(answers)}

    def begin(self, index: int, answer: GrowingAnswer, flow: TextFlow) -> list[dict[str, Any]]:
        """Return the first chunk of a choice: its prompt, if it is echoed.

        Args:
            index: index of the choice.
            answer: with the prompt's log-probs, if they are asked for.
            flow: processes the prompt's tokens.
        """
        lead = self._lead(index, answer, flow)
        return [] if lead is None else [self._frame([lead])]

    def grow(self, index: int, text: str, row: TokenRow, flow: TextFlow) -> list[dict[str, Any]]:
        """Return the next chunk of a choice.

        Args:
            index: index of the choice.
            text: the text that can be sent.
            row: tokens since the last chunk.
            flow: has processed the tokens before these, and processes these.
        """
        wants_tokens = self.call.token_ids or self.call.logprobs
        if not text and not (wants_tokens and len(row.token_ids)):
            return []
        return [self._frame([self._choice(index, text, row, flow)])]

    def end(self, index: int, answer: GeneratedAnswer) -> list[dict[str, Any]]:
        """Return the last chunk of a choice."""
        nothing = TokenRow.of(answer.completion, len(answer.completion.token_ids))
        last = self._choice(index, "", nothing, self.words.flow())
        return [self._frame([{**last, **self._end(index, answer)}])]

    def close(self, answers: Sequence[GeneratedAnswer]) -> list[dict[str, Any]]:
        """Return the chunks after the last choice."""
        if not self.call.stream_usage:
            return []
        return [{**self._frame([]), "usage": self._usage(answers)}]

    def _prompt(self, index: int) -> IntArray:
        return self.prompts[index // self.call.options.count]

    def _usage(self, answers: Sequence[GeneratedAnswer]) -> dict[str, int]:
        return openai_usage(sum(map(len, self.prompts)), answers)

    def _frame(self, choices: Sequence[Mapping[str, object]]) -> dict[str, Any]:
        return self.heading.openai("text_completion", choices)

    def _lead(self, index: int, answer: Any, flow: TextFlow) -> dict[str, Any] | None:
        """Return the echoed prompt as a choice; None: it is not echoed."""
        if not self.call.echo:
            return None
        prompt = self.call.prompts[index // self.call.options.count]
        row = prompt_row(self._prompt(index), answer.prompt_logprobs)
        text = prompt if isinstance(prompt, str) else self.words.decode(row.token_ids.tolist())
        lead = self._choice(index, text, row, flow)
        if lead["logprobs"] is not None:  # no token precedes the first one
            lead["logprobs"]["token_logprobs"][0] = None
            if lead["logprobs"]["top_logprobs"] is not None:
                lead["logprobs"]["top_logprobs"][0] = None
        return lead

    def _choice(self, index: int, text: str, row: TokenRow, flow: TextFlow) -> dict[str, Any]:
        choice: dict[str, Any] = {
            "index": index,
            "text": text,
            "finish_reason": None,
            "logprobs": self._logprobs(row, flow) if self.call.logprobs else None,
        }
        if self.call.token_ids:
            choice["token_ids"] = row.token_ids.tolist()
        return choice

    def _end(self, index: int, answer: GeneratedAnswer) -> dict[str, Any]:
        end: dict[str, Any] = {"finish_reason": answer.finish, "stop_reason": answer.stop}
        prompt = self._prompt(index)
        if self.call.shown.prompt is not None:
            row = prompt_row(prompt, answer.completion.prompt_logprobs)
            end["prompt_logprobs"] = self.words.prompt_logprobs(row, self.call.shown)
        if self.call.token_ids:
            end["prompt_token_ids"] = prompt.tolist()
            end |= self.words.origin(answer.completion)
        return end

    def _logprobs(self, row: TokenRow, flow: TextFlow) -> dict[str, Any]:
        def word(token: int) -> str:
            return self.words.token(token, ids_as_tokens=self.call.ids_as_tokens)

        shown, ids = self.call.shown, row.token_ids.tolist()
        numbers = [json_number(x) for x in row.logprobs.tolist()]
        tops = []
        for index, pair in enumerate(zip(ids, numbers, strict=True)):
            by_text: dict[str, float] = {}  # of tokens with the same text, the likeliest
            for token, number in (*row.likely(index, shown.top, shown.ids), pair):
                by_text[word(token)] = max(number, by_text.get(word(token), number))
            tops.append(by_text)
        return {
            "tokens": [word(token) for token in ids],
            "token_logprobs": numbers,
            "top_logprobs": tops if shown.top or shown.ids else None,
            "text_offset": flow.offsets(ids),
        }


def _joined(lead: dict[str, Any] | None, choice: dict[str, Any]) -> dict[str, Any]:
    """Return a choice after its echoed prompt."""
    if lead is None:
        return choice
    logprobs = choice["logprobs"]
    if logprobs is not None:
        logprobs = {
            name: None if values is None else [*lead["logprobs"][name], *values]
            for name, values in logprobs.items()
        }
    return {**choice, "text": lead["text"] + choice["text"], "logprobs": logprobs}
