"""Chat, messages and completions while they are sampled: stream events, or complete answers.

Events are sent when more tokens arrive; between events, only the sampler holds the answer's state.
"""

import itertools
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any

from jaxrl_async.endpoint.anthropic_messages import BlockStream, MessageWriter
from jaxrl_async.endpoint.callers import Caller
from jaxrl_async.endpoint.chat_deltas import ChatDelta, ChatDeltas
from jaxrl_async.endpoint.chat_turns import ChatTurns
from jaxrl_async.endpoint.conversations import PromptTokens
from jaxrl_async.endpoint.generation import GrowingAnswer
from jaxrl_async.endpoint.http_answers import AnswerHeader, ChatAnswer, TokenRow
from jaxrl_async.endpoint.http_exchange import anthropic_event, openai_event
from jaxrl_async.endpoint.openai_chat import ChatCall, ChatWriter
from jaxrl_async.endpoint.openai_text import TextWriter
from jaxrl_async.endpoint.responses_call import ResponsesCall
from jaxrl_async.endpoint.responses_writer import ItemStream, ResponsesWriter
from jaxrl_async.endpoint.service import EndpointService
from jaxrl_async.types import Message

COMMENT, DONE = b": waiting\n\n", b"data: [DONE]\n\n"
"""A line that a stream's reader skips, and the end of OpenAI's older streams."""
READ_EVERY = 64
"""An unfinished answer is parsed again when it has grown by 1/READ_EVERY, so parsing a long one
costs no more than a few times its length."""


class _ChatChoice:
    """One answer of a chat while it is streamed."""

    def __init__(self, choice: GrowingAnswer, deltas: ChatDeltas) -> None:
        self.choice, self.deltas = choice, deltas
        self.parsed = 0  # number of tokens when it was last parsed
        self.num_sent = 0  # number of tokens whose ids were sent
        self.answer: ChatAnswer | None = None

    @property
    def should_parse(self) -> bool:
        """Whether enough tokens have arrived to parse it again, and no stop string has ended it."""
        count = len(self.choice.token_ids)
        return self.choice.flow.stop is None and count > self.parsed + self.parsed // READ_EVERY

    def row(self) -> TokenRow | None:
        """Return the tokens that were not sent yet; None: all were sent."""
        start, self.num_sent = self.num_sent, len(self.choice.token_ids)
        if start == self.num_sent:
            return None
        return TokenRow.of(self.choice, start)


class ChatSteps:
    """The answers of a chat call, whole or in parts, for any protocol."""

    def __init__(
        self, chats: ChatTurns, caller: Caller, call: ChatCall, prompt: PromptTokens
    ) -> None:
        """Sample nothing yet."""
        self._chats, self.caller, self.call, self.prompt = chats, caller, call, prompt
        self.words = chats.service.words
        self._options = chats.options(caller, call, prompt)
        chats.service.count(continued=prompt.continued, opened=not prompt.continued)

    async def whole(self) -> list[ChatAnswer]:
        """Return all answers."""
        async with self._generation(parts=False) as generation:
            await generation.answers()
            return [
                await self._chats.finish(self.caller, self.call, self.prompt, choice)
                for choice in generation.choices
            ]

    async def steps(self) -> AsyncIterator[tuple[int, list[ChatDelta], TokenRow | None, Any]]:
        """Yield index, texts, tokens and, at its end, the answer of each choice that has grown."""
        async with self._generation(parts=True) as generation:
            reads, marks = self.call.reads_tools, self.prompt.chat.marks
            parts = [
                _ChatChoice(choice, ChatDeltas(reads_tools=reads, marks=marks))
                for choice in generation.choices
            ]
            async for _ in generation.steps():
                for index, part in enumerate(parts):
                    if part.answer is None and part.choice.answer is not None:
                        part.answer = await self._chats.finish(
                            self.caller, self.call, self.prompt, part.choice
                        )
                        yield index, list(part.deltas.end(part.answer)), part.row(), part.answer
                    elif part.answer is None and part.should_parse:
                        part.parsed = len(part.choice.token_ids)
                        message = await self._chats.so_far(self.call, self.prompt, part.choice)
                        deltas = list(part.deltas.grow(message, part.choice.flow.held))
                        yield index, deltas, part.row(), None

    def _generation(self, *, parts: bool) -> Any:
        return self._chats.service.sample(
            self.caller, [self.prompt.token_ids], self._options, parts=parts
        )


class StreamedChat:
    """A chat completion of OpenAI's API."""

    ping, last = COMMENT, DONE

    def __init__(self, steps: ChatSteps, heading: AnswerHeader) -> None:
        """Sample nothing yet."""
        self._steps = steps
        self._writer = ChatWriter(
            call=steps.call, heading=heading, prompt=steps.prompt.token_ids, words=steps.words
        )

    async def whole(self) -> dict[str, Any]:
        """Return the body of the answer."""
        return self._writer.body(await self._steps.whole())

    async def events(self) -> AsyncIterator[bytes]:
        """Yield the chunks of a stream."""
        writer, answers, begun = self._writer, [], False
        async for index, deltas, row, answer in self._steps.steps():
            for chunk in () if begun else writer.begin():  # from here on no error status
                yield openai_event(chunk)
            begun = True
            for chunk in writer.grow(index, deltas, row):
                yield openai_event(chunk)
            if answer is not None:
                answers.append(answer)
                for chunk in writer.end(index, answer):
                    yield openai_event(chunk)
        for chunk in writer.close(answers):
            yield openai_event(chunk)


class StreamedMessage:
    """A message of Anthropic's API."""

    ping, last = anthropic_event({"type": "ping"}), b""

    def __init__(self, steps: ChatSteps, heading: AnswerHeader) -> None:
        """Sample nothing yet."""
        self._steps = steps
        self._writer = MessageWriter(heading=heading, prompt=steps.prompt.token_ids)

    async def whole(self) -> dict[str, Any]:
        """Return the body of the answer."""
        (answer,) = await self._steps.whole()
        return self._writer.body(answer)

    async def events(self) -> AsyncIterator[bytes]:
        """Yield the events of a stream."""
        blocks, begun = BlockStream(), False
        async for _, deltas, _, answer in self._steps.steps():
            if not begun:
                yield anthropic_event(self._writer.begin())
            begun = True
            for delta in deltas:
                for event in blocks.write(delta):
                    yield anthropic_event(event)
            if answer is not None:
                for event in [*blocks.close(), *self._writer.end(answer)]:
                    yield anthropic_event(event)


class StreamedResponse:
    """A response of OpenAI's API."""

    ping, last = COMMENT, b""

    def __init__(
        self,
        steps: ChatSteps,
        call: ResponsesCall,
        messages: Sequence[Message],
        heading: AnswerHeader,
    ) -> None:
        """Sample nothing yet. messages: the whole conversation, without instructions."""
        self._steps, self._messages = steps, messages
        self._writer = ResponsesWriter(call=call, heading=heading, prompt=steps.prompt.token_ids)
        self._log = steps.caller.conversations.responses if call.stores else None

    async def whole(self) -> dict[str, Any]:
        """Return the body of the answer."""
        (answer,) = await self._steps.whole()
        self._keep(answer)
        return self._writer.body(answer)

    async def events(self) -> AsyncIterator[bytes]:
        """Yield the events of a stream."""
        writer, number = self._writer, itertools.count()
        items = ItemStream(writer.heading.id)

        def event(record: Mapping[str, object]) -> bytes:
            return anthropic_event({**record, "sequence_number": next(number)})

        begun = False
        async for _, deltas, _, answer in self._steps.steps():
            if not begun:
                for kind in ("response.created", "response.in_progress"):
                    yield event({"type": kind, "response": writer.begun()})
            begun = True
            for delta in deltas:
                for record in items.write(delta):
                    yield event(record)
            if answer is not None:
                self._keep(answer)
                for record in items.close():
                    yield event(record)
                response = writer.finished(answer, items.items)
                yield event({"type": f"response.{response['status']}", "response": response})

    def _keep(self, answer: ChatAnswer) -> None:
        if self._log is not None:
            self._log.keep(self._writer.heading.id, [*self._messages, answer.message()])


class StreamedText:
    """A completion of OpenAI's API."""

    ping, last = COMMENT, DONE

    def __init__(self, service: EndpointService, caller: Caller, writer: TextWriter) -> None:
        """Sample nothing yet."""
        self._service, self._caller, self._writer = service, caller, writer

    async def whole(self) -> dict[str, Any]:
        """Return the body of the answer."""
        async with self._generation(parts=False) as generation:
            return self._writer.body(await generation.answers())

    async def events(self) -> AsyncIterator[bytes]:
        """Yield the chunks of a stream."""
        writer, options = self._writer, self._writer.call.options
        sent = [0] * (options.count * len(writer.prompts))  # characters
        num_sent = [0] * len(sent)  # tokens; -1: its end was sent
        begun = [not writer.call.echo] * len(sent)
        scores = options.logprobs is not None and options.logprobs.prompt
        flows = [writer.words.flow() for _ in sent]
        async with self._generation(parts=True) as generation:
            async for _ in generation.steps():
                for index, choice in enumerate(generation.choices):
                    if num_sent[index] < 0:
                        continue
                    if not begun[index]:
                        if choice.answer is None and choice.prompt_logprobs is None and scores:
                            continue
                        begun[index] = True
                        for chunk in writer.begin(index, choice, flows[index]):
                            yield openai_event(chunk)
                    text = choice.flow.sendable() if choice.answer is None else choice.answer.text
                    row = TokenRow.of(choice, num_sent[index])
                    for chunk in writer.grow(index, text[sent[index] :], row, flows[index]):
                        yield openai_event(chunk)
                    sent[index], num_sent[index] = len(text), len(choice.token_ids)
                    if choice.answer is not None:
                        num_sent[index] = -1
                        for chunk in writer.end(index, choice.answer):
                            yield openai_event(chunk)
            for chunk in writer.close(generation.finished):
                yield openai_event(chunk)

    def _generation(self, *, parts: bool) -> Any:
        writer = self._writer
        return self._service.sample(self._caller, writer.prompts, writer.call.options, parts=parts)


Streamed = StreamedChat | StreamedMessage | StreamedResponse | StreamedText
"""An answer of any protocol. `ping` is sent after a pause of its stream, and `last` at its end."""
